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
        code: x -> int32, the code nearest to a number that was divided by its scale.
        largest: what the largest number of a column becomes when it is divided by the column's scale.
        native: `value` for all codes of a word at once, of factor 1, with the conversions that GPUs from compute
            capability 8.9 have. None where there are none.
    """

    parts: tuple[str, ...]
    bits: int
    block: int
    value: Any
    factor: float
    code: Any
    largest: float
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
def round_copy(
    state, copy, slot, h, p, saturated,
    N: tl.constexpr, P: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
    CODE: tl.constexpr, LARGEST_CODE: tl.constexpr,
):  # fmt: skip
    """Write the read copy of columns `p` of a head, whose checkpoint [N, P] `state` points to.

    The key rows that share a bit position in the words are a tile, so that making words moves nothing between lanes.
    """
    WORDS: tl.constexpr = N // CODES
    inside: tl.constexpr = WORDS // BLOCKS
    r = tl.arange(0, WORDS)
    mask = (p < P)[None, :]
    at = state + first_keys(r, N, CODES, BLOCKS)[:, None] * P + p[None, :]
    tiles = ()
    amax = tl.zeros([WORDS, p.shape[0]], tl.float32)
    for c in tl.static_range(CODES):
        x = tl.load(at + c * P, mask=mask, other=0).to(tl.float32)
        tiles = tiles + (x,)  # type: ignore[assignment]
        amax = larger(amax, tl.abs(x))
    amax = tl.reduce(tl.reshape(amax, [inside, BLOCKS, p.shape[0]]), 0, larger)
    whole = tl.reduce(amax, 0, larger)
    unusual = (whole > LARGEST) | (whole != whole)  # a NaN hides what is too large beside it
    if tl.max(unusual.to(tl.int32), 0) > 0:  # almost never, so that nothing else has to count
        over = tl.zeros([WORDS, p.shape[0]], tl.int64)
        for c in tl.static_range(CODES):
            over += (tl.abs(tiles[c]) > LARGEST).to(tl.int64)
        tl.atomic_add(saturated + slot, tl.sum(tl.sum(over, 1), 0))
    column = tl.maximum(at_most(whole, LARGEST) * (1 / LARGEST_CODE), SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    if BLOCKS == 1:
        inverse = tl.div_rn(1.0, column)[None, :]
    else:
        wanted = at_most(amax, LARGEST) * tl.div_rn(1.0, 6 * column)[None, :]
        block = e4m3_code(tl.where(amax == 0, 1.0, tl.minimum(tl.maximum(wanted, 0.001953125), 448.0)))
        tl.store(copy_at(copy[2], slot, h, tl.arange(0, BLOCKS), p, BLOCKS, P), block.to(tl.uint8), mask=mask)
        inverse = tl.div_rn(1.0, block_scale(block) * column[None, :])
        spread = tl.broadcast_to(inverse[None, :, :], [inside, BLOCKS, p.shape[0]])
        inverse = tl.reshape(spread, [WORDS, p.shape[0]])
    words = CODE(tiles[0] * inverse)  # type: ignore[misc]
    for c in tl.static_range(1, CODES):
        words |= CODE(tiles[c] * inverse) << (BITS * c)
    tl.store(copy_at(copy[0], slot, h, r, p, WORDS, P), words, mask=mask)
    tl.store(copy[1][0] + slot * copy[1][1] + h * P + p, column, mask=p < P)


@triton.jit
def larger(a, b):
    """The larger number, NaN where one of them is: for reductions."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_most(x, LIMIT: tl.constexpr):
    return tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)


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
def fp8_code(x):
    # not by the conversion that GPUs from compute capability 8.9 have: a fold beside it would spill
    return e4m3_code(tl.minimum(tl.maximum(x, -448.0), 448.0))


@triton.jit
def int8_value(words, c: tl.constexpr):
    # the low bits of fp32 numbers from 2^23 on count in ones
    return (((words >> (8 * c)) & 255) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def int8_code(x):
    # 1.5 * 2^23 is where fp32 numbers are spaced by 1: to the nearest even integer
    return (tl.minimum(tl.maximum(x, -127.0), 127.0) + 12582912.0).to(tl.int32, bitcast=True) & 255


@triton.jit
def nvfp4_value(words, c: tl.constexpr):
    return (((words << (28 - 4 * c)) >> 6) & -2118123520).to(tl.float32, bitcast=True)  # 0x81C00000


@triton.jit
def nvfp4_code(x):
    size = tl.minimum(tl.abs(x), 6.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - (126 << 1)
    subnormal = (size + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000  # multiples of 1/2, the spacing at 2^22
    return tl.where(size < 1.0, subnormal, normal) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


TRITON_FORMATS = {
    "fp8": TritonFormat(("", ".scale"), 8, 0, fp8_value, 2.0**120, fp8_code, 448.0, fp8_native),
    "int8": TritonFormat(("", ".scale"), 8, 0, int8_value, 1.0, int8_code, 127.0),
    "nvfp4": TritonFormat(
        ("", ".column_scale", ".scale"), 4, Nvfp4Format.block, nvfp4_value, 2.0**126, nvfp4_code, 6 * 448.0
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
        "CODE": form.code,
        "LARGEST_CODE": form.largest,
    }
