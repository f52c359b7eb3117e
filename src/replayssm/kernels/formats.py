"""Codes in the templates, of read copies and fp8 checkpoints: how words become numbers, how sums over them run, and how
a state becomes words.

The meaning of a format is its torch code (`state/formats`); what stands here repeats it bit for bit. Words of 4 or 8
codes lie along the key rows (`state/formats/words.py`), scales are applied after sums over the codes that share them.

Integer shifts put a code where fp32 has sign, exponent and mantissa: the number is then the code's value times a power
of two, which the scale of the column gives back (VALUE and FACTOR of a format). A NaN is in the scale of its column.

GPUs that can (NATIVE) take codes two at a time, as pairs of fp16 numbers, which hold every code exactly. One token with
16-bit probes is then read with products of pairs: up to PAIRS_IN_SUM of them are summed in fp16, those sums in fp32
(`pair_sums`; docs/numerics.md says what that loses).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from replayssm.kernels.stochastic import round_to_grid
from replayssm.state.formats import FORMATS, nvfp4
from replayssm.state.formats.base import LARGEST_SCALED, SMALLEST_SCALE
from replayssm.state.formats.nvfp4 import Nvfp4Format
from replayssm.state.formats.words import WORD_BITS

SMALLEST = tl.constexpr(SMALLEST_SCALE)
LARGEST = tl.constexpr(LARGEST_SCALED)
PROBE_FACTOR = tl.constexpr(2.0**64)
"""Keeps products of probes with numbers like 2^-126 far from the smallest ones of fp32.

Where codes become such numbers, probes from 2^-64 to 2^63 keep all their digits.
"""
SIGNS, SIZES = tl.constexpr(nvfp4.SIGNS), tl.constexpr(nvfp4.SIZES)
MINUS_ZERO = tl.constexpr(-2147450880)
"""A pair of bf16 or fp16 numbers that changes no sum."""
FP16_MAX = 65504.0
PAIRS_IN_SUM = tl.constexpr(8)
"""Products of pairs that are added up in fp16, at most."""
PAIR_SUM_ERROR = 2.0**-10
"""Of what one token takes from a copy that is read as pairs, relative to the norm of all columns' sums.

A sum has PAIRS_IN_SUM - 1 roundings in fp16 of 2^-11 / sqrt(3) or less (root of the mean square, relative to a partial
sum): together less than 0.8 of this where partial sums are no larger than what they end in.
"""


@dataclass(frozen=True)
class TritonFormat:
    """A read copy's format as the templates see it.

    Args:
        parts: suffixes of its tensors: words, scales of columns, and scales of blocks where it has any.
        bits: of a code.
        block: key rows with a scale of their own; 0 when only columns have one.
        value: (words, c) -> fp32, code c of every word times 1 / factor.
        factor: see `value`; a power of two.
        code: (x, c) -> int32, the code nearest to a number that was divided by its scale, where code c has its bits.
        largest: what the largest number of a column becomes when it is divided by the column's scale.
        pairs: words -> tuple of int32, codes 2 i and 2 i + 1 of every word as two fp16 numbers (the first one low)
            times 1 / pair_factor, with what GPUs from compute capability 8.9 have.
        pair_factor: see `pairs`; a power of two.
        largest_pair: the largest of those numbers.
        tile: (words, codes of block scales) -> bf16, see `word_tile`, with the same.
        tile_factor: what its numbers are to be multiplied with; a power of two.
    """

    parts: tuple[str, ...]
    bits: int
    block: int
    value: Any
    factor: float
    code: Any
    largest: float
    pairs: Any
    pair_factor: float
    largest_pair: float
    tile: Any
    tile_factor: float


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
    """(S^T q, S^T k) of one pass over the words, as R rows [R, P] each that are still to be summed; k only when TWO.

    Args:
        words: tuple of tiles [R, P], word rows in order; R divides BLOCKS where that is more than one.
        scales: tuple of tiles [R, P], of all blocks; read when there is more than one.
        column: scales of columns [P].
        q_at, k_at: pointers to the probes [N].
    """
    R: tl.constexpr = words[0].shape[0]
    SETS: tl.constexpr = BLOCKS // R if BLOCKS > 1 else 1
    RAISED: tl.constexpr = PROBE_FACTOR if FACTOR > PROBE_FACTOR else 1.0
    q_sums = tl.zeros(words[0].shape, tl.float32)
    k_sums = q_sums
    for of in tl.static_range(SETS):  # tiles that share blocks
        q_part = tl.zeros(words[0].shape, tl.float32)
        k_part = q_part
        for tile in tl.static_range(of, len(words), SETS):
            key = first_keys(tile * R + tl.arange(0, R), N, CODES, BLOCKS)
            if NATIVE:
                pairs = VALUE(words[tile])
            for c in tl.static_range(CODES):
                if NATIVE:
                    x = halves(pairs[c // 2])[c % 2]
                else:
                    x = VALUE(words[tile], c)
                q = tl.load(q_at + key + c, mask=live, other=0).to(tl.float32) * RAISED
                q_part += x * q[:, None]
                if TWO:
                    k = tl.load(k_at + key + c, mask=live, other=0).to(tl.float32) * RAISED
                    k_part += x * k[:, None]
        if BLOCKS > 1:
            q_part *= scales[of]
            k_part *= scales[of]
        q_sums += q_part
        k_sums += k_part
    # sums first: a column's scale times such a factor may be more than fp32 holds
    return q_sums * (FACTOR / RAISED) * column[None, :], k_sums * (FACTOR / RAISED) * column[None, :]


@triton.jit
def pair_sums(
    words, scales, column, q_at, k_at,
    N: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr, VALUE: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """`word_sums` with products of pairs, times the powers of two that `store_probe` returned.

    q_at and k_at point to what it left, four numbers an int64.
    """
    R: tl.constexpr = words[0].shape[0]
    SETS: tl.constexpr = BLOCKS // R if BLOCKS > 1 else max(1, len(words) * CODES // (2 * PAIRS_IN_SUM))
    four = first_keys(tl.arange(0, R), N, CODES, BLOCKS) // 4
    q_at += four
    k_at += four
    q_sums = tl.zeros(words[0].shape, tl.float32)
    k_sums = q_sums
    for of in tl.static_range(SETS):
        q_part = tl.zeros(words[0].shape, tl.int32)
        k_part = q_part
        for tile in tl.static_range(of, len(words), SETS):
            pairs = VALUE(words[tile])
            # a constant apart from the first tile's, which needs no addresses of its own
            for i in tl.static_range(CODES // 4):
                q = tl.load(q_at + (first_keys(tile * R, N, CODES, BLOCKS) // 4 + i))
                q_part = fma_pairs(pairs[2 * i], q.to(tl.int32)[:, None], q_part)
                q_part = fma_pairs(pairs[2 * i + 1], (q >> 32).to(tl.int32)[:, None], q_part)
                if TWO:
                    k = tl.load(k_at + (first_keys(tile * R, N, CODES, BLOCKS) // 4 + i))
                    k_part = fma_pairs(pairs[2 * i], k.to(tl.int32)[:, None], k_part)
                    k_part = fma_pairs(pairs[2 * i + 1], (k >> 32).to(tl.int32)[:, None], k_part)
        scale = 1.0
        if BLOCKS > 1:
            scale = scales[of]
        low, high = halves(q_part)
        q_sums += low * scale
        q_sums += high * scale
        if TWO:
            low, high = halves(k_part)
            k_sums += low * scale
            k_sums += high * scale
    return q_sums * column[None, :], k_sums * column[None, :]


@triton.jit
def store_probe(x, at, mask, BITS: tl.constexpr, FACTOR: tl.constexpr):
    """Store `x` [N] fp32 for `pair_sums`, and return the power of two that sums of what is stored are to be multiplied
    with. It has the FACTOR of the format.

    Stored are fp16 numbers, the largest at least 2^(BITS - 1) and less than 2^BITS: of 16-bit probes they keep every
    bit that counts, and no sum of products with codes overflows.
    """
    largest = tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(largest, BITS), 252 + BITS)  # of what is tiny, infinite or NaN: any
    factor = ((253 + BITS - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(at, (x * factor).to(tl.float16), mask=mask)
    return ((exponent - BITS + 1) << 23).to(tl.float32, bitcast=True) * FACTOR


HALVES = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.f32.f16 $0, low;
    cvt.f32.f16 $1, high;
}""")


@triton.jit
def fma_pairs(a, b, c):
    """a b + c of int32 that are pairs of fp16 numbers, rounded once."""
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def halves(pairs):
    """The two fp16 numbers of each int32, as fp32."""
    return tl.inline_asm_elementwise(HALVES, "=f,=f,r", [pairs], (tl.float32, tl.float32), is_pure=True, pack=1)


@triton.jit
def fma_bf16_pairs(a, b, c):
    """a b + c of int32 that are pairs of bf16 numbers, rounded once."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def bf16_halves(pairs):
    """The two bf16 numbers of each int32, in a last dimension of 2."""
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))


@triton.jit
def word_tile(
    words, scales,
    CODES: tl.constexpr, BLOCKS: tl.constexpr, FACTOR: tl.constexpr, VALUE: tl.constexpr, NATIVE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Codes of words [A, B, C, D] times the scales of their blocks, times 1 / TILE_FACTOR: bf16 [A, B, C, D, CODES].

    Nothing is rounded: a code and its block's scale have 8 bits together, at most. `scales` are codes of scales, as
    int32 of the words' shape; read when there is more than one block.
    """
    if NATIVE:
        return TILE(words, scales)
    else:
        scale = block_scale(scales) if BLOCKS > 1 else 1.0
        x = four_values(words, scale, 0, FACTOR, VALUE)
        if CODES == 8:
            x = tl.permute(tl.join(x, four_values(words, scale, 4, FACTOR, VALUE)), [0, 1, 2, 3, 6, 4, 5])
        x = tl.reshape(x, words.shape + [CODES])
        # cutting off what is zero is a rounding that every GPU has, and the interpreter
        return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def four_values(words, scale, c: tl.constexpr, FACTOR: tl.constexpr, VALUE: tl.constexpr):
    """Codes c to c + 3 of words [...] times `scale`, as fp32 [..., 2, 2]."""
    even = tl.join(VALUE(words, c) * FACTOR * scale, VALUE(words, c + 2) * FACTOR * scale)
    odd = tl.join(VALUE(words, c + 1) * FACTOR * scale, VALUE(words, c + 3) * FACTOR * scale)
    return tl.join(even, odd)


@triton.jit
def state_rows(head, column, n, p, mask, P: tl.constexpr, SCALED: tl.constexpr):
    """Rows `n` [R] of a checkpoint's columns `p` [C] in fp32, of the head that `head` points to.

    Of an fp8 checkpoint (SCALED), whose scales `column` [C] are, rows that share a word load it each: they are loaded
    where rows fold only, and words that were loaded once would have to move between lanes.
    """
    if SCALED:
        words = tl.load(head + (n // 4)[:, None] * P + p[None, :], mask=mask, other=0)
        return e4m3_value(words >> (n % 4 * 8)[:, None]) * column[None, :]
    else:
        return tl.load(head + n[:, None] * P + p[None, :], mask=mask, other=0).to(tl.float32)


@triton.jit
def scaled_codes(S, noise, RANDOM: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """What an fp8 checkpoint makes of columns S [N, P] within LARGEST: (words [N / 4, P], scales [P], S as rounded).

    When RANDOM it is rounded by `noise` (`kernels.stochastic`).
    """
    column = tl.maximum(tl.reduce(tl.abs(S), 0, larger) * (1 / 448.0), SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(tl.maximum(S * tl.div_rn(1.0, column)[None, :], -448.0), 448.0)
    if RANDOM:
        scaled = round_to_grid(scaled, noise, MANTISSA, LEAST)
    codes = e4m3_code(scaled)
    shifted = codes << (tl.arange(0, S.shape[0]) % 4 * 8)[:, None]
    words = tl.sum(tl.reshape(shifted, [S.shape[0] // 4, 4, S.shape[1]]), 1)
    return words, column, e4m3_value(codes) * column[None, :]


@triton.jit
def round_copy(
    state, state_scale, copy, slot, h, p, saturated,
    N: tl.constexpr, P: tl.constexpr, SCALED: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr,
    CODE: tl.constexpr, LARGEST_CODE: tl.constexpr,
):  # fmt: skip
    """Write the read copy of columns `p` of head h, whose checkpoint `state` points to.

    The key rows that share a bit position in the words are a tile, so that making words moves nothing between lanes.
    """
    WORDS: tl.constexpr = N // CODES
    inside: tl.constexpr = WORDS // BLOCKS
    r = tl.arange(0, WORDS)
    mask = (p < P)[None, :]
    keys = first_keys(r, N, CODES, BLOCKS)
    of_state = column_scales(state_scale, slot, h, p, P, SCALED)
    tiles = ()
    amax = tl.zeros([WORDS, p.shape[0]], tl.float32)
    for c in tl.static_range(CODES):
        x = state_rows(state, of_state, keys + c, p, mask, P, SCALED)
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
    words = CODE(tiles[0] * inverse, 0)  # type: ignore[misc]
    for c in tl.static_range(1, CODES):
        words |= CODE(tiles[c] * inverse, c)
    tl.store(copy_at(copy[0], slot, h, r, p, WORDS, P), words, mask=mask)
    tl.store(copy[1][0] + slot * copy[1][1] + h * P + p, column, mask=p < P)


@triton.jit
def column_scales(state_scale, slot, h, p, P: tl.constexpr, SCALED: tl.constexpr):
    """Scales of a checkpoint's columns `p`, where it has any: `state_scale` is (pointer, slot stride) then."""
    if SCALED:
        return tl.load(state_scale[0] + slot * state_scale[1] + h * P + p, mask=p < P, other=0)
    else:
        return 1.0


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
def e4m3_value(code):
    """fp32 of the E4M3 code in the low byte of `code` (int32)."""
    return (((code << 24) >> 4) & -2014314496).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def fp8_value(words, c: tl.constexpr):
    # an arithmetic shift copies the sign into the exponent's high bits, which the mask then clears
    return (((words << (24 - 8 * c)) >> 4) & -2014314496).to(tl.float32, bitcast=True)  # 0x87F00000


FP8_PAIRS = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@triton.jit
def fp8_pairs(words):
    return tl.inline_asm_elementwise(FP8_PAIRS, "=r,=r,r", [words], (tl.int32, tl.int32), is_pure=True, pack=1)


@triton.jit
def fp8_tile(words, scales):
    LIFT: tl.constexpr = 2072017792  # 2^120 twice
    even = ((words << 8) & -2147450880) | ((words << 4) & 133171184)  # 0x80008000, 0x07F007F0
    odd = (words & -2147450880) | ((words >> 4) & 133171184)
    halves = tl.join(
        bf16_halves(fma_bf16_pairs(even, LIFT, MINUS_ZERO)), bf16_halves(fma_bf16_pairs(odd, LIFT, MINUS_ZERO))
    )
    return tl.reshape(halves, words.shape + [4])


@triton.jit
def fp8_code(x, c: tl.constexpr):
    # not by the conversion that GPUs from compute capability 8.9 have: a fold beside it would spill
    return e4m3_code(tl.minimum(tl.maximum(x, -448.0), 448.0)) << (8 * c)


@triton.jit
def int8_value(words, c: tl.constexpr):
    # the low bits of fp32 numbers from 2^23 on count in ones
    return (((words >> (8 * c)) & 255) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0


# and those of fp16 numbers from 2^10 on: 1152 is 2^10 + 128
INT8_PAIRS = tl.constexpr("""{
    .reg .b32 bytes, offset, ones;
    mov.b32 offset, 0x64806480;
    mov.b32 ones, 0x64646464;
    xor.b32 bytes, $2, 0x80808080;
    prmt.b32 $0, bytes, ones, 0x4140;
    prmt.b32 $1, bytes, ones, 0x4342;
    sub.rn.f16x2 $0, $0, offset;
    sub.rn.f16x2 $1, $1, offset;
}""")


@triton.jit
def int8_pairs(words):
    return tl.inline_asm_elementwise(INT8_PAIRS, "=r,=r,r", [words], (tl.int32, tl.int32), is_pure=True, pack=1)


@triton.jit
def int8_tile(words, scales):
    return tl.reshape(tl.join(bytes_as_bf16(words), bytes_as_bf16(words >> 8)), words.shape + [4])


@triton.jit
def bytes_as_bf16(words):
    """Integers in the first and the third byte of words."""
    # 0x4300 is 128 as bf16, whose last bit is 1, and 0x4380 is 256: 128 + low bits, less 128 or 256 by the sign
    raised = (words & 16711935) | 1124090624
    return bf16_halves(fma_bf16_pairs(raised & -8323200, -1082081408, raised & -8388737))


@triton.jit
def int8_code(x, c: tl.constexpr):
    # 1.5 * 2^23 is where fp32 numbers are spaced by 1: to the nearest even integer
    code = (tl.minimum(tl.maximum(x, -127.0), 127.0) + 12582912.0).to(tl.int32, bitcast=True) & 255
    return code << (8 * c)


@triton.jit
def nvfp4_value(words, c: tl.constexpr):
    SIGN: tl.constexpr = SIGNS[c // 2] + 16 * (c % 2)
    UP: tl.constexpr = 22 - SIZES[c // 2] - 16 * (c % 2)
    # 0x01C00000: the low ends of exponent and mantissa
    size = (words << max(UP, 0) >> max(-UP, 0)) & 29360128
    return (((words << (31 - SIGN)) & -2147483648) | size).to(tl.float32, bitcast=True)


@triton.jit
def nvfp4_pairs(words):
    # 0x8E008E00 is where a pair has its bits, 0x80008000 those of signs and 0x0E000E00 the others
    third = ((words << 1) & -2147450880) | ((words << 6) & 234884608)
    fourth = ((words << 2) & -2147450880) | ((words << 9) & 234884608)
    return words & -1912566272, (words << 3) & -1912566272, third, fourth


@triton.jit
def nvfp4_tile(words, scales):
    # as fp32 numbers have them, codes are less than 2^-123: products with scales that are raised by 2^100 are not
    raised = fma_bf16_pairs(scales * 1048592, 2072017792, MINUS_ZERO)  # twice in a word; 2^120
    raised = fma_bf16_pairs(raised, 1904243072, MINUS_ZERO)  # 2^100
    low = tl.join(nvfp4_half(words, raised, 0), nvfp4_half(words, raised, 2))
    high = tl.join(nvfp4_half(words, raised, 1), nvfp4_half(words, raised, 3))
    return tl.reshape(tl.permute(tl.join(low, high), [0, 1, 2, 3, 5, 6, 4]), words.shape + [8])


@triton.jit
def nvfp4_half(words, raised, i: tl.constexpr):
    """Codes 2 i and 2 i + 1 of words times scales."""
    SIGN: tl.constexpr = 15 - SIGNS[i]
    UP: tl.constexpr = 6 - SIZES[i]
    pairs = ((words << SIGN) & -2147450880) | ((words << max(UP, 0) >> max(-UP, 0)) & 29360576)  # 0x01C001C0
    return bf16_halves(fma_bf16_pairs(pairs, raised, MINUS_ZERO))


@triton.jit
def nvfp4_code(x, c: tl.constexpr):
    SIGN: tl.constexpr = SIGNS[c // 2] + 16 * (c % 2)
    size = tl.minimum(tl.abs(x), 6.0)
    # from 2^23 on fp32 numbers are spaced by 1: indices as spacings of 1/2, 1 and 2 give them, each too large elsewhere
    index = tl.minimum(tl.minimum(2 * size + 8388608.0, size + 8388610.0), 0.5 * size + 8388612.0)
    PLACE: tl.constexpr = SIZES[c // 2] + 16 * (c % 2)
    BIT: tl.constexpr = 1 << SIGN if SIGN < 31 else -2147483648
    sign = (x.to(tl.int32, bitcast=True) >> (31 - SIGN)) & BIT
    return sign | ((index.to(tl.int32, bitcast=True) << PLACE) & (7 << PLACE))


TRITON_FORMATS = {
    "fp8": TritonFormat(
        ("", ".scale"), 8, 0, fp8_value, 2.0**120, fp8_code, 448.0, fp8_pairs, 1.0, 448.0, fp8_tile, 1.0
    ),
    "int8": TritonFormat(
        ("", ".scale"), 8, 0, int8_value, 1.0, int8_code, 127.0, int8_pairs, 1.0, 127.0, int8_tile, 1.0
    ),
    "nvfp4": TritonFormat(
        parts=("", ".column_scale", ".scale"),
        bits=4,
        block=Nvfp4Format.block,
        value=nvfp4_value,
        factor=2.0**126,
        code=nvfp4_code,
        largest=6 * 448.0,
        pairs=nvfp4_pairs,
        pair_factor=2.0**14,
        largest_pair=6 * 2.0**-14,
        tile=nvfp4_tile,
        tile_factor=2.0**26,
    ),
}
assert TRITON_FORMATS.keys() <= FORMATS.keys()


def format_constants(name: str | None, key_dim: int, native: bool = False) -> dict[str, Any]:
    """Compile-time arguments of the templates for a read copy; CODES is 0 without one.

    `native`: whether the GPU has the conversions of compute capability 8.9.
    """
    form = TRITON_FORMATS["fp8" if name is None else name]
    return {
        "NATIVE": native,
        "CODES": 0 if name is None else WORD_BITS // form.bits,
        "BLOCKS": key_dim // form.block if form.block else 1,
        "FACTOR": form.pair_factor if native else form.factor,
        "VALUE": form.pairs if native else form.value,
        "TILE": form.tile,
        "TILE_FACTOR": form.tile_factor if native else 1.0,
        "CODE": form.code,
        "LARGEST_CODE": form.largest,
    }


def probe_bits(name: str) -> int:
    """BITS of `store_probe`: fp16 holds PAIRS_IN_SUM products with codes, and the probes themselves."""
    room = FP16_MAX / (PAIRS_IN_SUM.value * TRITON_FORMATS[name].largest_pair)
    return min(15, int(math.log2(room)))
