"""Every kernel on small shapes, for compute-sanitizer. From the root of the repository:

PYTHONPATH=src compute-sanitizer --tool memcheck python -m tests.kernels.sanitize mamba2
PYTHONPATH=src compute-sanitizer --tool racecheck python -m tests.kernels.sanitize mamba2

and the same for gdn and kda, side by side: most of the time goes into compiling.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch

# torch's own cache of memory would hide a read beyond a tensor; results are compared as in the tests
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")


def main(name: str) -> None:
    """One case of each choice."""
    from tests.kernels.harness import SPLIT, Case, run

    from replayssm.kernels.launch import Choice, Tile

    if not torch.cuda.is_available():
        raise SystemExit("sanitize needs a CUDA device")
    case = Case(name, steps=3)
    pipelined = Choice(Tile(16, 2, 2, 2), Tile(16, 2, 2, 3))
    for variant in (
        replace(case, choice=SPLIT),
        replace(case, checkpoint_format="fp16", window=2),
        replace(case, choice=Choice(Tile(16), recurrent=True), window=1),
        replace(case, verify_len=4, choice=pipelined, paged=True),
    ):
        run(variant)
        print(variant, "agrees", flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
