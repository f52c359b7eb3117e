"""Read copies in the templates: how words become numbers, how sums over them run, and how a state becomes words.

The meaning of a format is its torch code (`state/formats`); what stands here repeats it bit for bit. Words of 4 or 8
codes lie along the key rows (`state/formats/words.py`), scales are applied after sums over the codes that share them.

Integer shifts put a code where fp32 has sign, exponent and mantissa: the number is then the code's value times a power
of two, which the scale of the column gives back (VALUE and FACTOR of a format). A NaN is in the scale of its column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from replayssm.kernels.exact import clamp
from replayssm.state.formats import FORMATS
from replayssm.state.formats.base import LARGEST_SCALED, SMALLEST_SCALE
from replayssm.state.formats.nvfp4 import Nvfp4Format
from replayssm.state.formats.words import WORD_BITS

SMALLEST = tl.constexpr(SMALLEST_SCALE)
LARGEST = tl.constexpr(LARGEST_SCALED)
PROBE_FACTOR = tl.constexpr(2.0**64)
"""Keeps products of probes with numbers like 2^-126 far from the smallest ones of fp32."""


@dataclass(frozen=True)
class TritonFormat:
    """A read copy's format as the templates see it.

    Args:
        parts: suffixes of its tensors: words, scales of columns, and scales of blocks where it has any.
        bits: of a code.
        block: key rows with a scale of their own; 0 when only columns have one.
        value: (words, c) -> fp32, code c of every word times 1 / factor.
        factor: see `value`; a power of two.
        native: the same, of factor 1, with the conversion that GPUs from compute capability 8.9 have; None without.
        encode: (state [N, P], BLOCKS) -> (codes int32 [N, P], scale of columns [P], codes of block scales
            [BLOCKS, P], the fp32 state [N, P] that they stand for).
    """

    parts: tuple[str, ...]
    bits: int
    block: int
    value: Any
    factor: float
    encode: Any
    native: Any = None


@triton.jit
def copy_at(part, slot, h, rows, p, ROWS: tl.constexpr, P: tl.constexpr):
    """Addresses [rows, P] in a part of the read copy: (pointer, slot stride), [H, ROWS, P] within a slot."""
    return part[0] + slot * part[1] + h * (ROWS * P) + rows[:, None] * P + p[None, :]


@triton.jit
def block_scale(code):
    """fp32 of E4M3 bytes that are scales: positive."""
    return (code.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def first_keys(r, N: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr):
    """Key row of the first code of word rows `r`."""
    return r % BLOCKS * (N // BLOCKS) + r // BLOCKS * CODES


@triton.jit
def word_sums(
    words, scales, column, q_at, k_at, live,
    N: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr, VALUE: tl.constexpr, FACTOR: tl.constexpr,
    NATIVE: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """(S^T q, S^T k) [P] each of one pass over the words; k only when TWO.

    Args:
        words: tuple of tiles [R, P], word rows in order.
        scales: of blocks [BLOCKS, P]; read when there is more than one.
        column: scales of columns [P].
        q_at, k_at: pointers to the probes [N].
    """
    R: tl.constexpr = words[0].shape[0]
    q_sums = tl.zeros(words[0].shape, tl.float32)
    k_sums = q_sums
    for tile in tl.static_range(len(words)):
        key = first_keys(tile * R + tl.arange(0, R), N, CODES, BLOCKS)
        if NATIVE:
            values = VALUE(words[tile])
        for c in tl.static_range(CODES):
            if NATIVE:
                x = values[c]
            else:
                x = VALUE(words[tile], c)
            q = tl.load(q_at + key + c, mask=live, other=0).to(tl.float32) * PROBE_FACTOR
            q_sums += x * q[:, None]
            if TWO:
                k = tl.load(k_at + key + c, mask=live, other=0).to(tl.float32) * PROBE_FACTOR
                k_sums += x * k[:, None]
    if BLOCKS > 1:  # a tile has one word of each block
        q_sums *= scales
        k_sums *= scales
    column *= FACTOR / PROBE_FACTOR
    return tl.sum(q_sums, 0) * column, tl.sum(k_sums, 0) * column


@triton.jit
def word_dot(
    words, scales, column, probe_at, mask,
    N: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr, VALUE: tl.constexpr, FACTOR: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Products [D, P] of probes with a state.

    Args:
        words: [N / CODES, P].
        scales: of the words' blocks [N / CODES, P]; read when there is more than one block.
        column: scales of columns [P].
        probe_at: pointers to the first element of D probes, [D, 1].
        mask: [D, 1], which of them count.
    """
    r = tl.arange(0, words.shape[0])
    key = first_keys(r, N, CODES, BLOCKS)
    mask = mask & (r < N // CODES)[None, :]  # products have at least 16 word rows
    found = tl.zeros([probe_at.shape[0], words.shape[1]], tl.float32)
    if NATIVE:
        values = VALUE(words)
    for c in tl.static_range(CODES):
        if NATIVE:
            x = values[c]
        else:
            x = VALUE(words, c) * FACTOR
        if BLOCKS > 1:
            x *= scales
        probe = tl.load(probe_at + (key + c)[None, :], mask=mask, other=0)
        if probe.dtype == tl.float32:
            found = tl.dot(probe, x, found, input_precision="tf32x3")
        else:
            found = tl.dot(probe, x.to(probe.dtype), found)  # codes with scales of blocks have 8 bits at most
    return found * column[None, :]


@triton.jit
def store_copy(
    S, copy, slot, h, p, saturated,
    N: tl.constexpr, P: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
    ENCODE: tl.constexpr,
):  # fmt: skip
    """Write the read copy of columns `p` of a head; what it stands for comes back. S [N, P] is the checkpoint's."""
    S = clamp(S, saturated + slot, LARGEST, True)
    codes, column, block, shown = ENCODE(S, BLOCKS)
    WORDS: tl.constexpr = N // CODES
    inside: tl.constexpr = WORDS // BLOCKS
    apart = tl.permute(tl.reshape(codes, [BLOCKS, inside, CODES, S.shape[1]]), (1, 0, 2, 3))
    shift = BITS * tl.arange(0, CODES)
    words = tl.sum(tl.reshape(apart, [WORDS, CODES, S.shape[1]]) << shift[None, :, None], 1)
    inside_p = p < P
    tl.store(copy_at(copy[0], slot, h, tl.arange(0, WORDS), p, WORDS, P), words, mask=inside_p[None, :])
    tl.store(copy[1][0] + slot * copy[1][1] + h * P + p, column, mask=inside_p)
    if BLOCKS > 1:
        tl.store(copy_at(copy[2], slot, h, tl.arange(0, BLOCKS), p, BLOCKS, P), block.to(tl.uint8), mask=inside_p[None, :])
    return shown


@triton.jit
def column_scale(amax, S, LARGEST_CODE: tl.constexpr):
    """Scale [P] of columns with the largest magnitudes `amax`; NaN where one of S [N, P] is."""
    is_nan = tl.max((S != S).to(tl.int32), 0) > 0
    return tl.where(is_nan, float("nan"), tl.maximum(amax * (1 / LARGEST_CODE), SMALLEST))


@triton.jit
def e4m3_code(x):
    """E4M3 bytes (int32) nearest to x within +-448, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 codes are multiples of 2^-9, the spacing of fp32 at 2^14
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal) | ((bits >> 24) & 128)


@triton.jit
def fp8_value(words, c: tl.constexpr):
    # an arithmetic shift copies the sign into the exponent's high bits, which the mask then clears
    return (((words << (24 - 8 * c)) >> 4) & -2014314496).to(tl.float32, bitcast=True)  # 0x87F00000


FROM_E4M3 = tl.constexpr("""{
    .reg .b16 low, high, a0, a1, b0, b1;
    .reg .b32 a, b;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 a, low;
    cvt.rn.f16x2.e4m3x2 b, high;
    mov.b32 {a0, a1}, a;
    mov.b32 {b0, b1}, b;
    cvt.f32.f16 $0, a0;
    cvt.f32.f16 $1, a1;
    cvt.f32.f16 $2, b0;
    cvt.f32.f16 $3, b1;
}""")


@triton.jit
def fp8_native(words):
    four: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
    return tl.inline_asm_elementwise(FROM_E4M3, "=f,=f,=f,=f,r", [words], four, is_pure=True, pack=1)


@triton.jit
def fp8_encode(S, BLOCKS: tl.constexpr):
    column = column_scale(tl.max(tl.abs(S), 0), S, 448.0)
    x = S * tl.div_rn(1.0, column)[None, :]
    codes = e4m3_code(tl.minimum(tl.maximum(x, -448.0), 448.0))
    shown = fp8_value(codes, 0) * 1.329227995784916e36 * column[None, :]
    return codes, column, column, shown


@triton.jit
def int8_value(words, c: tl.constexpr):
    # the low bits of fp32 numbers from 2^23 on count in ones
    return (((words >> (8 * c)) & 255) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def int8_encode(S, BLOCKS: tl.constexpr):
    column = column_scale(tl.max(tl.abs(S), 0), S, 127.0)
    x = S * tl.div_rn(1.0, column)[None, :]
    rounded = tl.minimum(tl.maximum(x, -127.0), 127.0) + 12582912.0  # 1.5 * 2^23: to the nearest even integer
    codes = rounded.to(tl.int32, bitcast=True) & 255
    return codes, column, column, (rounded - 12582912.0) * column[None, :]


@triton.jit
def nvfp4_value(words, c: tl.constexpr):
    return (((words << (28 - 4 * c)) >> 6) & -2118123520).to(tl.float32, bitcast=True)  # 0x81C00000


@triton.jit
def nvfp4_encode(S, BLOCKS: tl.constexpr):
    size: tl.constexpr = S.shape[0] // BLOCKS
    amax = tl.max(tl.reshape(tl.abs(S), [BLOCKS, size, S.shape[1]]), 1)
    column = column_scale(tl.max(amax, 0), S, 2688.0)
    wanted = amax * tl.div_rn(1.0, 6 * column)[None, :]
    wanted = tl.minimum(tl.maximum(wanted, 0.001953125), 448.0)
    block = e4m3_code(tl.where(amax == 0, 1.0, wanted))
    scale = block_scale(block)
    inverse = tl.div_rn(1.0, scale * column[None, :])
    x = tl.minimum(tl.abs(S) * of_keys(inverse, size), 6.0)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - (126 << 1)
    subnormal = (x + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000  # multiples of 1/2, the spacing at 2^22
    codes = tl.where(x < 1.0, subnormal, normal) | ((S.to(tl.int32, bitcast=True) >> 28) & 8)
    values = nvfp4_value(codes, 0) * 8.507059173023462e37 * of_keys(scale, size)  # 2^126
    return codes, column, block, values * column[None, :]


@triton.jit
def of_keys(scale, SIZE: tl.constexpr):
    """Scales of blocks [BLOCKS, P] for each of their SIZE key rows: [N, P]."""
    rows: tl.constexpr = scale.shape[0] * SIZE
    spread = tl.broadcast_to(scale[:, None, :], [scale.shape[0], SIZE, scale.shape[1]])
    return tl.reshape(spread, [rows, scale.shape[1]])


TRITON_FORMATS = {
    "fp8": TritonFormat(("", ".scale"), 8, 0, fp8_value, 2.0**120, fp8_encode, fp8_native),
    "int8": TritonFormat(("", ".scale"), 8, 0, int8_value, 1.0, int8_encode),
    "nvfp4": TritonFormat(
        ("", ".column_scale", ".scale"), 4, Nvfp4Format.block, nvfp4_value, 2.0**126, nvfp4_encode
    ),
}
assert TRITON_FORMATS.keys() <= FORMATS.keys()


def format_constants(name: str | None, key_dim: int, native: bool = False) -> dict[str, Any]:
    """Compile-time arguments of the templates for a read copy; CODES is 0 without one.

    `native`: whether the GPU has the conversions of compute capability 8.9.
    """
    form = TRITON_FORMATS["fp8" if name is None else name]
    native = native and form.native is not None
    return {
        "NATIVE": native,
        "CODES": 0 if name is None else WORD_BITS // form.bits,
        "BITS": form.bits,
        "BLOCKS": key_dim // form.block if form.block else 1,
        "FACTOR": 1.0 if native else form.factor,
        "VALUE": form.native if native else form.value,
        "ENCODE": form.encode,
    }
