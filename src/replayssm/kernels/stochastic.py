"""Stochastic rounding in the templates: the numbers of `state.formats.stochastic`, to the bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def draw(seeds, slot, layer, tokens, h, first, p, N: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr):
    """Random uint32 [ROWS, columns] for columns `p` of head h and rows from `first` on, those beyond N included.

    Args:
        seeds: (pointer, stride) of the slots' seeds, int64.
        layer: number of the layer within its pool.
        tokens: of the slot's checkpoint once it is stored, int64.
        first: a multiple of 4.
    """
    quad = (h * ((N + 3) // 4) + first // 4 + tl.arange(0, ROWS // 4))[:, None] * P + p[None, :]
    quad = quad.to(tl.uint32)
    rest = quad * 0
    w0, w1, w2, w3 = tl.philox(
        tl.load(seeds[0] + slot * seeds[1]),
        quad,
        rest + layer.to(tl.uint32),
        rest + tokens.to(tl.uint32),
        rest + (tokens >> 32).to(tl.uint32),
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [quads, columns, 2, 2]: word 2 i + j at [i, j]
    words = tl.permute(tl.reshape(words, [ROWS // 4, p.shape[0], 4]), [0, 2, 1])
    return tl.reshape(words, [ROWS, p.shape[0]])


@triton.jit
def round_to_grid(x, noise, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """fp32 `x` rounded down or up to a number with MANTISSA bits behind the leading one, of at least 2^LEAST."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    exponent = size >> 23
    sig = tl.where(exponent > 0, size & 0x7FFFFF | 0x800000, size)
    exponent = tl.maximum(exponent, 1)
    spacing = tl.maximum(exponent - 127, LEAST) - MANTISSA
    dropped = tl.minimum(spacing + 150 - exponent, 56)
    shifted = (sig.to(tl.int64) << 32) >> dropped.to(tl.int64)
    kept = (shifted >> 32).to(tl.int32) + (noise < shifted.to(tl.uint32)).to(tl.int32)
    rounded = kept.to(tl.float32) * ((spacing + 127) << 23).to(tl.float32, bitcast=True)
    signed = (rounded.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, signed)
