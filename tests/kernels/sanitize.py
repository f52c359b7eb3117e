"""Every kernel on small shapes, for compute-sanitizer. From the root of the repository:

PYTHONPATH=src compute-sanitizer --tool memcheck python -m tests.kernels.sanitize
PYTHONPATH=src compute-sanitizer --tool racecheck python -m tests.kernels.sanitize
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

# torch's own cache of memory would hide a read beyond a tensor; results are compared as in the tests
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")


def main() -> None:
    """One case of each recurrence and choice."""
    from tests.kernels.harness import SPLIT, Case, run

    if not torch.cuda.is_available():
        raise SystemExit("sanitize needs a CUDA device")
    for name in ("mamba2", "gdn", "kda"):
        case = Case(name, steps=3)
        for variant in (
            case,
            replace(case, choice=SPLIT),
            replace(case, verify_len=4),
            replace(case, verify_len=4, choice=SPLIT, paged=True),
            replace(case, model_dtype="fp32", window=1),
            replace(case, checkpoint_format="fp16", window=2),
        ):
            run(variant)
            print(variant, "agrees", flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
