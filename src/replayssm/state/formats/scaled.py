"""fp8 with a scale per column, int8 with a scale per block of key rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.state.formats.base import LARGEST_SCALED, Format, Parts, scale_of, within
from replayssm.state.formats.stochastic import Grid, round_to_grid

E4M3_MAX = 448.0
E4M3_GRID = Grid(3, -6)


def to_e4m3(x: Tensor) -> Tensor:
    """Bytes (uint8) of `x` in E4M3, to nearest even; the caller clamps, torch would make NaN of what is too large."""
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(code: Tensor) -> Tensor:
    """fp32 values of E4M3 bytes, exact."""
    return code.contiguous().view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Fp8Format(Format):
    """E4M3 with an fp32 scale per head and value column, so that the scale is applied after a dot product over keys.

    | part     | shape     | dtype | value                                             |
    |----------|-----------|-------|---------------------------------------------------|
    | (codes)  | [H, N, P] | uint8 | E4M3(x / scale within +-448), zero keeps its sign |
    | `.scale` | [H, P]    | fp32  | max(amax over the key rows / 448, 2^-100)         |
    """

    name = "fp8"
    dtype = torch.uint8
    limit = LARGEST_SCALED
    bits_per_element = 8.0

    def parts(self, shape: tuple[int, ...]) -> Parts:
        heads, _, columns = shape
        return {"": (shape, self.dtype), ".scale": ((heads, columns), torch.float32)}

    def encode(self, state: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
        x = within(state, self.limit)
        scale = scale_of(x.abs().amax(-2), E4M3_MAX)
        x = (x * scale.reciprocal().unsqueeze(-2)).clamp(-E4M3_MAX, E4M3_MAX)
        if noise is not None:
            x = round_to_grid(x, noise, E4M3_GRID)
        return {"": to_e4m3(x), ".scale": scale}

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return (from_e4m3(parts[""]) * parts[".scale"].unsqueeze(-2)).to(dtype)


@dataclass(frozen=True)
class Int8Format(Format):
    """Integers with an fp32 scale per block of 32 key rows of a column; the last block of a column may be shorter.

    | part     | shape              | dtype | value                                  |
    |----------|--------------------|-------|----------------------------------------|
    | (codes)  | [H, N, P]          | int8  | nearest even of x / scale within +-127 |
    | `.scale` | [H, ceil(N/32), P] | fp32  | max(amax of the block / 127, 2^-100)   |

    -0 becomes 0. A rotation of each block (Hadamard) before rounding was tried: docs/experiments.md.
    """

    name = "int8"
    dtype = torch.int8
    limit = LARGEST_SCALED
    bits_per_element = 9.0
    block = 32
    largest = 127.0

    def parts(self, shape: tuple[int, ...]) -> Parts:
        heads, keys, columns = shape
        return {"": (shape, self.dtype), ".scale": ((heads, -(-keys // self.block), columns), torch.float32)}

    def encode(self, state: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
        x = within(state, self.limit)
        scale = scale_of(blocks(x, self.block).abs().amax(-2), self.largest)
        x = (x * spread(scale.reciprocal(), self.block, x.shape[-2])).clamp(-self.largest, self.largest)
        x = x.round() if noise is None else round_to_grid(x, noise, Grid(7, 7))
        # the scale of a block with a NaN is NaN; its codes say nothing, but conversion of NaN is undefined
        return {"": x.nan_to_num(0.0).to(self.dtype), ".scale": scale}

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes = parts[""]
        return (codes.float() * spread(parts[".scale"], self.block, codes.shape[-2])).to(dtype)


def blocks(x: Tensor, size: int) -> Tensor:
    """[..., N, P] as blocks of key rows [..., ceil(N / size), size, P], zeros after the last row."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % size)).unflatten(-2, (-1, size))


def spread(scale: Tensor, size: int, rows: int) -> Tensor:
    """Scales of blocks [..., blocks, P] for each of `rows` key rows: [..., rows, P]."""
    return scale.repeat_interleave(size, dim=-2)[..., :rows, :]
