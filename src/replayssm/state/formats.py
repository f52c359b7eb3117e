"""Number formats for checkpoints and read copies.

A format turns a state [..., N, P] into one or more named parts (the codes, and scales where it has
any) and back. The pool allocates the parts, so a new format is one class here and one entry in
`FORMATS`; nothing else changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CastFormat:
    """A plain floating-point cast with one part, the codes themselves; out-of-range values saturate.

    A silent inf in the checkpoint would turn the rest of the sequence into NaN, so finite values beyond
    the format's range become its largest value; the pool counts them. NaN stays NaN.
    """

    name: str
    dtype: torch.dtype

    @property
    def bits_per_element(self) -> float:
        """Storage bits per state element, scales included."""
        return self.dtype.itemsize * 8

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each stored part of one state of `shape` [H, N, P], by suffix ("" is the codes)."""
        return {"": (shape, self.dtype)}

    def encode(self, state: Tensor) -> dict[str, Tensor]:
        """Round `state` [..., N, P] to nearest even into the parts named by `parts`."""
        limit = torch.finfo(self.dtype).max
        if limit < torch.finfo(state.dtype).max:
            state = state.clamp(-limit, limit)
        return {"": state.to(self.dtype)}

    def decode(self, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The state [..., N, P] in `dtype` that the parts stand for."""
        return parts[""].to(dtype)

    def saturated(self, state: Tensor) -> Tensor:
        """How many elements of each state [B, H, N, P] `encode` would clamp: int64 [B]."""
        limit = torch.finfo(self.dtype).max
        if limit >= torch.finfo(state.dtype).max:
            return torch.zeros(state.shape[0], dtype=torch.int64, device=state.device)
        return (state.abs() > limit).flatten(1).sum(1)


FORMATS: dict[str, CastFormat] = {
    "fp64": CastFormat("fp64", torch.float64),  # for verification: the whole flow then computes in fp64
    "fp32": CastFormat("fp32", torch.float32),
    "fp16": CastFormat("fp16", torch.float16),
    "bf16": CastFormat("bf16", torch.bfloat16),
}
