"""NVFP4: four bits per element, a scale per block of 16 key rows, a scale per head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from replayssm.state.formats.base import LARGEST_SCALED, Format, Parts, scale_of, within
from replayssm.state.formats.scaled import E4M3_MAX, blocks, from_e4m3, spread, to_e4m3
from replayssm.state.formats.stochastic import Grid, round_to_grid

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each code; a fourth bit is the sign."""
E2M1_GRID = Grid(1, 0)
E4M3_MIN = 2.0**-9


@dataclass(frozen=True)
class Nvfp4Format(Format):
    """E2M1 elements in blocks of 16 key rows of a column; the last block of a column may be shorter.

    | part          | shape              | dtype | value                                                              |
    |---------------|--------------------|-------|--------------------------------------------------------------------|
    | (codes)       | [H, N/2, P]        | uint8 | key row 2i of a column in the low nibble of row i, 2i+1 in the high |
    | `.scale`      | [H, ceil(N/16), P] | uint8 | E4M3 s: amax of the block / (6 s2) within [2^-9, 448]; 1 for zeros  |
    | `.head_scale` | [H]                | fp32  | s2 = max(amax of the head / 2688, 2^-100)                          |

    A nibble is sign << 3 | index of the magnitude nearest to |x| / (s s2), ties to the even index, with the
    rounded s; larger quotients (a rounded s may be too small) saturate at 6. Zero keeps its sign. The value is
    (magnitude * s) * s2: the first product is exact.
    """

    name = "nvfp4"
    dtype = torch.uint8
    limit = LARGEST_SCALED
    bits_per_element = 4.5
    block = 16

    def parts(self, shape: tuple[int, ...]) -> Parts:
        heads, keys, columns = shape
        if keys % 2:
            raise ValueError(f"nvfp4 keeps two key rows in a byte and needs an even key_dim, got {keys}")
        return {
            "": ((heads, keys // 2, columns), torch.uint8),
            ".scale": ((heads, -(-keys // self.block), columns), torch.uint8),
            ".head_scale": ((heads,), torch.float32),
        }

    def encode(self, state: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
        x = within(state, self.limit)
        amax = blocks(x, self.block).abs().amax(-2)
        head_scale = scale_of(amax.amax((-2, -1)), E2M1[-1] * E4M3_MAX)
        whole = head_scale[..., None, None]
        scale = (amax * (6 * whole).reciprocal()).clamp(E4M3_MIN, E4M3_MAX)
        code = to_e4m3(torch.where(amax == 0, 1.0, scale))
        size = x.abs() * spread((from_e4m3(code) * whole).reciprocal(), self.block, x.shape[-2])
        size = size.clamp(max=E2M1[-1])
        if noise is not None:
            size = round_to_grid(size, noise, E2M1_GRID)
        nibbles = x.signbit().to(torch.uint8) << 3 | nearest_e2m1(size)
        return {
            "": nibbles[..., 0::2, :] | nibbles[..., 1::2, :] << 4,
            ".scale": code,
            ".head_scale": head_scale,
        }

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes = parts[""]
        nibbles = torch.stack([codes & 15, codes >> 4], -2).flatten(-3, -2)
        value = e2m1_of(nibbles & 7)
        value = torch.where(nibbles > 7, -value, value)
        value = value * spread(from_e4m3(parts[".scale"]), self.block, value.shape[-2])
        return (value * parts[".head_scale"][..., None, None]).to(dtype)


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
