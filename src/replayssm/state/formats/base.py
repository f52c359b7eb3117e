"""What a number format must say about itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from replayssm.state.formats.stochastic import Grid

Parts = dict[str, tuple[tuple[int, ...], torch.dtype]]

SMALLEST_SCALE = 2.0**-100
"""Scales never become smaller, so that blocks of zeros need no rule of their own and reciprocals stay finite."""

LARGEST_SCALED = 2.0**127
"""Limit of formats with scales: their largest code times its rounded scale is still a finite fp32 number."""


class Format(ABC):
    """One way to store a state."""

    name: str
    dtype: torch.dtype
    """Of the stored codes."""

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """The numbers that codes stand for before any scale."""

    @property
    @abstractmethod
    def limit(self) -> float:
        """Largest magnitude that can be stored."""

    @property
    @abstractmethod
    def bits_per_element(self) -> float:
        """Storage bits per state element with the scales of blocks; those of whole columns and heads do not count."""

    @abstractmethod
    def parts(self, shape: tuple[int, ...]) -> Parts:
        """Shape and dtype of each stored part of one state of `shape` [H, N, P], by suffix ("" is the codes).

        Raises:
            ValueError: the format cannot hold a state of this shape.
        """

    @abstractmethod
    def encode(self, state: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
        """Round `state` [..., H, N, P] into the parts named by `parts`, to nearest even.

        Args:
            state: in fp32 or fp64.
            noise: int64 of the same shape, random in 0..2^32-1: round up or down at random instead, with the
                probability that makes the mean exact (`stochastic.round_to_grid`).
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The state [..., H, N, P] in `dtype` that the parts stand for."""

    def saturated(self, state: Tensor) -> Tensor:
        """How many elements of each state [B, H, N, P] `encode` would clamp: int64 [B]."""
        if self.limit >= torch.finfo(state.dtype).max:
            return torch.zeros(state.shape[0], dtype=torch.int64, device=state.device)
        return (state.abs() > self.limit).flatten(1).sum(1)


def scale_of(amax: Tensor, largest_code: float) -> Tensor:
    """fp32 scale that takes `amax` to the largest code; NaN where `amax` is."""
    return (amax * (1 / largest_code)).clamp(min=SMALLEST_SCALE)


def within(state: Tensor, limit: float) -> Tensor:
    """`state` in fp32, clamped to +-`limit`; NaN stays NaN."""
    return state.clamp(-limit, limit).float()
