"""What kernels do to pairs with inline assembly, as plain functions for where they are interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton
import triton.language as tl

from replayssm.kernels import formats, launch
from replayssm.kernels.formats import TRITON_FORMATS, fp8_value, int8_value

CACHED = (launch.layer_constants, launch.prepare_constants, launch.verify_constants)


def use_pairs(patch: pytest.MonkeyPatch) -> None:
    """Let kernels read copies as a GPU would, with these functions in place of the assembly."""
    patch.setattr(launch, "_has_e4m3", lambda: True)
    patch.setattr(formats, "halves", halves)
    patch.setattr(formats, "fma_pairs", fma_pairs)
    patch.setattr(formats, "fma_bf16_pairs", fma_bf16_pairs)
    for name, twin in {"fp8": fp8_pairs, "int8": int8_pairs}.items():
        patch.setitem(TRITON_FORMATS, name, replace(TRITON_FORMATS[name], pairs=twin))


@triton.jit
def half(pairs, high: tl.constexpr):
    return (pairs >> (16 * high)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def pair(low, high):
    low, high = low.to(tl.float16).to(tl.int16, bitcast=True), high.to(tl.float16).to(tl.int16, bitcast=True)
    return (low.to(tl.int32) & 65535) | (high.to(tl.int32) << 16)


@triton.jit
def halves(pairs):
    return half(pairs, 0).to(tl.float32), half(pairs, 1).to(tl.float32)


@triton.jit
def fma_pairs(a, b, c):
    # in fp64 the product and, but for bits far below those of fp16, the sum are exact
    low = half(a, 0).to(tl.float64) * half(b, 0).to(tl.float64) + half(c, 0).to(tl.float64)
    high = half(a, 1).to(tl.float64) * half(b, 1).to(tl.float64) + half(c, 1).to(tl.float64)
    return pair(low, high)


@triton.jit
def fma_bf16_pairs(a, b, c):
    b, c = a * 0 + b, a * 0 + c  # they may be constants
    return bf16_fma(a, b, c) | (bf16_fma(a >> 16, b >> 16, c >> 16) << 16)


@triton.jit
def bf16_number(half):
    return (half << 16).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def bf16_fma(a, b, c):
    """Of the numbers in the low halves. What would be rounded is cut off: codes have no bit there."""
    number = bf16_number(a) * bf16_number(b) + bf16_number(c)
    return (number.to(tl.float32).to(tl.int32, bitcast=True) >> 16) & 65535


@triton.jit
def fp8_pairs(words):
    factor: tl.constexpr = 2.0**120
    return (
        pair(fp8_value(words, 0) * factor, fp8_value(words, 1) * factor),
        pair(fp8_value(words, 2) * factor, fp8_value(words, 3) * factor),
    )


@triton.jit
def int8_pairs(words):
    return pair(int8_value(words, 0), int8_value(words, 1)), pair(int8_value(words, 2), int8_value(words, 3))
