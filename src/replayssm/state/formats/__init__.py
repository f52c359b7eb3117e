"""Number formats for checkpoints and read copies.

A format turns a state [..., H, N, P] into one or more named parts (the codes, and scales where it has any) and back.
The pool allocates the parts, so a new format is one class and one entry in `FORMATS`; nothing else changes.

`encode` and `decode` are the semantics: elementary operations with one defined rounding each, so that kernels can
repeat them bit for bit. All share four rules:

* Zero stays zero, and blocks of zeros decode to zeros.
* Values beyond a format's `limit`, infinities too, become the limit with their sign; the pool counts them.
* A NaN is never hidden. Everything that shares a scale with it becomes NaN.
* Scales and the values divided by them are fp32. x / s stands for x * (1 / s) everywhere, each operation rounded to
  nearest even: one true division per scale and none per element, and a constant 1 / s is the nearest fp32 number.
"""

from __future__ import annotations

import torch

from replayssm.state.formats.base import Format
from replayssm.state.formats.cast import CastFormat
from replayssm.state.formats.nvfp4 import Nvfp4Format
from replayssm.state.formats.scaled import Fp8Format, Int8Format

FORMATS: dict[str, Format] = {
    "fp64": CastFormat("fp64", torch.float64),  # for verification: the whole flow then computes in fp64
    "fp32": CastFormat("fp32", torch.float32),
    "fp16": CastFormat("fp16", torch.float16),
    "bf16": CastFormat("bf16", torch.bfloat16),
    "fp8": Fp8Format(),
    "int8": Int8Format(),
    "nvfp4": Nvfp4Format(),
}

__all__ = ["FORMATS", "CastFormat", "Format", "Fp8Format", "Int8Format", "Nvfp4Format"]
