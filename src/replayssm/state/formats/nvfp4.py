"""NVFP4: four bits per element, a scale per block of 16 key rows, a scale per column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from replayssm.state.formats.base import LARGEST_SCALED, Format, Parts, scale_of, within
from replayssm.state.formats.scaled import E4M3_MAX, from_e4m3, to_e4m3
from replayssm.state.formats.stochastic import Grid, round_to_grid
from replayssm.state.formats.words import Place, pack, unpack, word_rows

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each code; a fourth bit is the sign."""
SIGNS, SIZES = (15, 12, 14, 13), (9, 6, 3, 0)
"""Bits of codes 2 i and 2 i + 1 in the low and the high half of a word: sign, lowest of the index."""
PLACES: tuple[Place, ...] = tuple(
    ((8, SIGNS[c // 2] - 3 + 16 * (c % 2)), (7, SIZES[c // 2] + 16 * (c % 2))) for c in range(8)
)
E4M3_MIN = 2.0**-9


@dataclass(frozen=True)
class Nvfp4Format(Format):
    """E2M1 elements in blocks of 16 key rows of a column, and a scale per column on top of those of blocks.

    | part            | shape        | dtype | value                                                               |
    |-----------------|--------------|-------|---------------------------------------------------------------------|
    | (codes)         | [H, N/8, P]  | int32 | codes of four bits, eight to a word (`words.py`, `PLACES`)          |
    | `.scale`        | [H, N/16, P] | uint8 | E4M3 s: amax of the block / (6 s2) within [2^-9, 448]; 1 for zeros  |
    | `.column_scale` | [H, P]       | fp32  | s2 = max(amax of the column / 2688, 2^-100)                         |

    A code is sign << 3 | index of the magnitude nearest to |x| / (s s2), ties to the even index, with the
    rounded s; larger quotients (a rounded s may be too small) saturate at 6. Zero keeps its sign. The value is
    (magnitude * s) * s2: the first product is exact. NVFP4 elsewhere has one s2 for a whole tensor; one per column
    leaves columns independent of each other, as everything else of a state is.

    Two codes of a word are an fp16 pair, times 2^-14, once their bits are where fp16 has its sign (15) and the low ends
    of its exponent and mantissa (11, 10 and 9). `PLACES` has the first pair there; the second takes one shift, since
    its sign and index are as far apart, for which a word has no room more than twice; the others take two.
    """

    name = "nvfp4"
    dtype = torch.int32
    limit = LARGEST_SCALED
    bits_per_element = 4.5
    block = 16
    grid = Grid(1, 0)

    def parts(self, shape: tuple[int, ...]) -> Parts:
        heads, keys, columns = shape
        return {
            "": ((heads, word_rows(keys, 4, self.block, self.name), columns), torch.int32),
            ".scale": ((heads, keys // self.block, columns), torch.uint8),
            ".column_scale": ((heads, columns), torch.float32),
        }

    def encode(self, state: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
        x = within(state, self.limit)
        amax = blocks(x, self.block).abs().amax(-2)
        column_scale = scale_of(amax.amax(-2), E2M1[-1] * E4M3_MAX)
        whole = column_scale.unsqueeze(-2)
        scale = (amax * (6 * whole).reciprocal()).clamp(E4M3_MIN, E4M3_MAX)
        code = to_e4m3(torch.where(amax == 0, 1.0, scale))
        size = x.abs() * spread((from_e4m3(code) * whole).reciprocal(), self.block)
        size = size.clamp(max=E2M1[-1])
        if noise is not None:
            size = round_to_grid(size, noise, self.grid)
        codes = x.signbit().to(torch.uint8) << 3 | nearest_e2m1(size)
        return {"": pack(codes, PLACES, self.block), ".scale": code, ".column_scale": column_scale}

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes = unpack(parts[""], PLACES, self.block)
        value = e2m1_of(codes & 7)
        value = torch.where(codes > 7, -value, value)
        value = value * spread(from_e4m3(parts[".scale"]), self.block)
        return (value * parts[".column_scale"].unsqueeze(-2)).to(dtype)


def blocks(x: Tensor, size: int) -> Tensor:
    """[..., N, P] as blocks of key rows [..., N / size, size, P]."""
    return x.unflatten(-2, (-1, size))


def spread(scale: Tensor, size: int) -> Tensor:
    """Scales of blocks [..., N / size, P] for each key row: [..., N, P]."""
    return scale.unsqueeze(-2).expand(*scale.shape[:-1], size, -1).flatten(-3, -2)


def e2m1_of(index: Tensor) -> Tensor:
    """fp32 magnitudes of indices: a table would have to be copied from the host, which breaks CUDA graphs."""
    whole = index.int()
    doubled = torch.where(whole < 2, whole, (2 + (whole & 1)) << ((whole >> 1) - 1).clamp(min=0))
    return doubled.float() * 0.5


def nearest_e2m1(size: Tensor) -> Tensor:
    """Index (uint8) of the magnitude nearest to `size` >= 0, the even index where two are equally near."""
    midpoints = [(a + b) / 2 for a, b in pairwise(E2M1)]
    index = torch.zeros_like(size, dtype=torch.uint8)
    for lower, midpoint in enumerate(midpoints):
        index += (size >= midpoint) if lower % 2 else (size > midpoint)
    return index
