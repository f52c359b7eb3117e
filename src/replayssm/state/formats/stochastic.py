"""Stochastic rounding: where its random numbers come from, and how one number is rounded.

A rounded checkpoint enters the recurrence again. With rounding to nearest a small change of a large element is lost at
every flush; rounded at random, with the probability that makes the mean exact, it survives on average.

The random numbers are those of Philox4x32-10 (Salmon et al., 2011) at a counter that says which element of which state
is rounded, and so depend on the request alone: not on its slot, the batch, or how often a graph was replayed.

    key      = the request's seed, low and high 32 bits
    counter  = (quad, layer, tokens in the checkpoint, its high 32 bits)
    quad     = (head * ceil(N / 4) + n // 4) * P + p          four key rows of a column share one counter
    noise    = word n % 4 of the four 32-bit results

The tokens in the checkpoint number the flushes of a request: no two of them fold the same number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


@dataclass(frozen=True)
class Grid:
    """The numbers of a floating-point format, around zero those of equal spacing.

    Args:
        mantissa: bits behind the leading one.
        least_exponent: of the smallest numbers with a leading one; spacing is the same below.
    """

    mantissa: int
    least_exponent: int


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words for each counter; every word is an int64 in 0..2^32-1, all broadcast together."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2  # int64 wraps around: all 64 bits are right
        c0, c1, c2, c3 = (
            (second >> 32 & MASK) ^ c1 ^ k0,
            second & MASK,
            (first >> 32 & MASK) ^ c3 ^ k1,
            first & MASK,
        )
        k0, k1 = k0 + WEYL[0] & MASK, k1 + WEYL[1] & MASK
    return c0, c1, c2, c3


def noise(seed: Tensor, layer: int, folded: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Random int64 [B, H, N, P] in 0..2^32-1 for states of `shape` [H, N, P].

    Args:
        seed: int64 [B], of the requests.
        layer: number of the layer within its pool.
        folded: int64 [B], tokens in each checkpoint once it is stored.
    """
    heads, keys, columns = shape
    device = seed.device
    quads = torch.arange(heads * -(-keys // 4) * columns, device=device).reshape(heads, -1, 1, columns)
    seed, folded = (x.reshape(-1, 1, 1, 1, 1) for x in (seed, folded))
    words = philox(
        (seed & MASK, seed >> 32 & MASK),
        (quads, torch.full((), layer, device=device), folded & MASK, folded >> 32 & MASK),
    )
    return torch.cat(words, -2).flatten(-3, -2)[..., :keys, :]


def round_to_grid(x: Tensor, noise: Tensor, grid: Grid) -> Tensor:
    """fp32 `x` rounded down or up to a number of the grid, up with probability (x - down) / (up - down).

    |x| = sig * 2^(e - 150) with an integer sig < 2^24 has a spacing of 2^q, q = max(e - 127, least exponent) -
    mantissa. In units of it, with d = q + 150 - e, it is sig / 2^d: the whole part, and a fraction of which 32 bits are
    compared with the noise. NaN stays NaN.
    """
    bits = x.abs().view(torch.int32).long()
    exponent = bits >> 23
    sig = torch.where(exponent > 0, bits & 0x7FFFFF | 0x800000, bits)
    exponent = exponent.clamp(min=1)
    spacing = (exponent - 127).clamp(min=grid.least_exponent) - grid.mantissa
    dropped = (spacing + 150 - exponent).clamp(max=56)  # nothing is left of sig < 2^24 in 32 bits below 2^-56
    fraction = (sig << 32) >> dropped & MASK
    kept = (sig >> dropped) + (noise < fraction)
    unit = (spacing + 127 << 23).int().view(torch.float32)
    return torch.where(x.isnan(), x, (kept.float() * unit).copysign(x))
