"""fp8 and int8 with a scale per column."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from replayssm.state.formats.base import LARGEST_SCALED, Format, Parts, scale_of, within
from replayssm.state.formats.stochastic import Grid, round_to_grid
from replayssm.state.formats.words import BYTES, pack, unpack, word_rows

E4M3_MAX = 448.0
E4M3_GRID = Grid(3, -6)


def to_e4m3(x: Tensor) -> Tensor:
    """Bytes (uint8) of `x` in E4M3, to nearest even; the caller clamps, torch would make NaN of what is too large."""
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(code: Tensor) -> Tensor:
    """fp32 values of E4M3 bytes, exact."""
    return code.to(torch.uint8).contiguous().view(torch.float8_e4m3fn).float()


class ColumnFormat(Format):
    """8-bit codes with an fp32 scale per head and value column, which is applied after a dot product over keys.

    | part     | shape       | dtype | value                                                   |
    |----------|-------------|-------|---------------------------------------------------------|
    | (codes)  | [H, N/4, P] | int32 | nearest code of x / scale; four to a word (`words.py`)  |
    | `.scale` | [H, P]      | fp32  | max(amax over the key rows / largest code, 2^-100)      |
    """

    dtype = torch.int32
    limit = LARGEST_SCALED
    bits_per_element = 8.0
    largest: float
    """Largest code."""

    @abstractmethod
    def codes(self, x: Tensor) -> Tensor:
        """Bytes (0..255) of scaled values within +-`largest`."""

    @abstractmethod
    def values(self, codes: Tensor) -> Tensor:
        """fp32 numbers that bytes stand for."""

    def parts(self, shape: tuple[int, ...]) -> Parts:
        heads, keys, columns = shape
        words = (heads, word_rows(keys, 8, len(BYTES), self.name), columns)
        return {"": (words, torch.int32), ".scale": ((heads, columns), torch.float32)}

    def encode(self, state: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
        x = within(state, self.limit)
        scale = scale_of(x.abs().amax(-2), self.largest)
        x = (x * scale.reciprocal().unsqueeze(-2)).clamp(-self.largest, self.largest)
        if noise is not None:
            x = round_to_grid(x, noise, self.grid)
        return {"": pack(self.codes(x), BYTES, x.shape[-2]), ".scale": scale}

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        words = parts[""]
        codes = unpack(words, BYTES, words.shape[-2] * len(BYTES))
        return (self.values(codes) * parts[".scale"].unsqueeze(-2)).to(dtype)


class Fp8Format(ColumnFormat):
    """E4M3. Zero keeps its sign."""

    name = "fp8"
    largest = E4M3_MAX
    grid = E4M3_GRID

    def codes(self, x: Tensor) -> Tensor:
        return to_e4m3(x)

    def values(self, codes: Tensor) -> Tensor:
        return from_e4m3(codes)


class Int8Format(ColumnFormat):
    """Integers from -127 to 127 in two's complement. -0 becomes 0.

    A Hadamard rotation before rounding was tried and left out: docs/experiments.md.
    """

    name = "int8"
    largest = 127.0
    grid = Grid(7, 7)

    def codes(self, x: Tensor) -> Tensor:
        # the scale of a column with a NaN is NaN; its codes say nothing, but conversion of NaN is undefined
        return x.round().nan_to_num(0.0).to(torch.int32) & 255

    def values(self, codes: Tensor) -> Tensor:
        return codes.to(torch.int8).float()
