"""Every kernel on small shapes, for compute-sanitizer. From the root of the repository:

PYTHONPATH=src compute-sanitizer --tool memcheck python -m tests.kernels.sanitize mamba2
PYTHONPATH=src compute-sanitizer --tool racecheck python -m tests.kernels.sanitize mamba2

and the same for gdn, kda, and "mixer" (convolution, gates, norm) and "engine" (an engine's own steps), side by side:
most of the time goes into compiling. A number behind mamba2, gdn or kda leaves out the first so many cases.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch

# torch's own cache of memory would hide a read beyond a tensor; results are compared as in the tests
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")


MIXER = "(convolution_agrees and T4) or (gated_norm and bf16 and (2048 or 24)) or (mix_agrees and constants1-bf16-3)"
TESTS = {
    "mixer": ["tests/kernels/test_convolve.py", "tests/kernels/test_mixer.py", "-k", MIXER],
    "engine": ["tests/kernels/test_engine.py", "-k", "test_whole_steps and not 1100"],
}
"""Kernels whose tests are small enough to run as they are."""


def main(name: str, first: int = 0) -> None:
    """One case of each choice, or the tests of other kernels."""
    if name in TESTS:
        import pytest

        raise SystemExit(pytest.main([*TESTS[name], "-q", "-p", "no:cacheprovider"]))
    from tests.kernels.harness import SPLIT, Case, run

    from replayssm.kernels.launch import Choice, Tile
    from replayssm.recurrences import Geometry

    if not torch.cuda.is_available():
        raise SystemExit("sanitize needs a CUDA device")
    case = Case(name, steps=3)
    pipelined = Choice(Tile(16, 2, 2, 2), Tile(16, 2, 2, 3))
    variants = [] if name == "kda" else [replace(case, choice=Choice(Tile(16), form="single"), window=2)]
    variants += [
        replace(case, choice=SPLIT),
        replace(case, checkpoint_format="fp16", window=2),
        replace(case, choice=Choice(Tile(16), form="recurrent"), window=1),
        replace(case, verify_len=4, choice=pipelined, paged=True),
        replace(case, verify_len=4, choice=SPLIT, trees=True),  # paths that are accepted move records
    ]
    beside = Case(name, Geometry(4, 2, 64, 32), window=4, steps=6, read_format="nvfp4")
    variants += [replace(beside, choice=SPLIT), replace(beside, verify_len=4, choice=SPLIT, read_format="fp8")]
    for variant in variants[first:]:
        run(variant)
        print(variant, "agrees", flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
