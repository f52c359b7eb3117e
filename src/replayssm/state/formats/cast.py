"""fp64, fp32, fp16, bf16: a plain floating-point cast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.state.formats.base import Format, Parts
from replayssm.state.formats.stochastic import Grid, round_to_grid

# of bf16 the subnormals below 2^-126 are left out: an fp32 power of two that small would itself be subnormal
GRIDS = {torch.float16: Grid(10, -14), torch.bfloat16: Grid(7, -119)}


@dataclass(frozen=True)
class CastFormat(Format):
    """One part, the codes themselves; out-of-range values saturate.

    A silent inf in the checkpoint would turn the rest of the sequence into NaN, so values beyond the format's range
    become its largest value.
    """

    name: str
    dtype: torch.dtype

    @property
    def grid(self) -> Grid:
        return GRIDS[self.dtype]

    @property
    def limit(self) -> float:
        return torch.finfo(self.dtype).max

    @property
    def bits_per_element(self) -> float:
        return self.dtype.itemsize * 8

    def parts(self, shape: tuple[int, ...]) -> Parts:
        return {"": (shape, self.dtype)}

    def encode(self, state: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
        if self.limit < torch.finfo(state.dtype).max:
            state = state.clamp(-self.limit, self.limit)
        if noise is not None:
            state = round_to_grid(state.float(), noise, self.grid)
        return {"": state.to(self.dtype)}

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return parts[""].to(dtype)
