"""The normal form that every replayed recurrence is written in, and what a recurrence must say about itself.

    S_t = diag(d_t) S_{t-1} + k_t u_t^T          y_t = S_t^T q_t  (+ skip)

S is [N, P] per head (N key dim, P value dim); d_t = exp(log_decay_t), one number per head or one per key
channel; u_t is the write vector: an input, or for delta rules the correction
u_t = rate_t (target_t - (diag(d_t) S_{t-1})^T k_t).

A recurrence is data (its fields) plus a few small functions. State, flow and kernels never name one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Geometry:
    """Sizes of one recurrent layer.

    Args:
        heads: H, heads that own a state.
        key_heads: G, heads of k and q; state head h uses key head h // (H / G).
        key_dim: N, rows of a state.
        value_dim: P, columns of a state.
        conv_channels: channels of the causal convolution in front of the recurrence, 0 without one.
        conv_width: taps of that convolution; its window keeps conv_width - 1 earlier inputs.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int = 0
    conv_width: int = 4

    def __post_init__(self) -> None:
        for name in ("heads", "key_heads", "key_dim", "value_dim", "conv_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.conv_channels < 0:
            raise ValueError(f"conv_channels must not be negative, got {self.conv_channels}")
        if self.heads % self.key_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of key_heads {self.key_heads}")

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[H, N, P] of one slot's state; the value dim is contiguous."""
        return (self.heads, self.key_dim, self.value_dim)

    def expand_heads(self, x: Tensor, dim: int) -> Tensor:
        """Repeat the key heads of `x` along `dim` so that each state head sees its own."""
        group = self.heads // self.key_heads
        return x if group == 1 else x.repeat_interleave(group, dim=dim)


@dataclass(frozen=True)
class Layers:
    """The recurrent layers of one model.

    Args:
        geometry: sizes of one layer.
        count: recurrent layers of the model.
    """

    geometry: Geometry
    count: int


@dataclass(frozen=True)
class Field:
    """One named tensor of a token, a record or a layer.

    Args:
        name: its key in the dictionaries that carry it.
        dims: names of `Geometry` sizes, outermost first.
        dtype: "model" (the activation dtype, stored as it came) or "exact" (fp32; fp64 when the checkpoint is).
        meaning: one line for tables and errors.
        kept: for ring fields, "always" or "read_copy" (only needed when a flush must solve the window again).
    """

    name: str
    dims: tuple[str, ...]
    dtype: Literal["model", "exact"]
    meaning: str
    kept: Literal["always", "read_copy"] = "always"

    def shape(self, geometry: Geometry) -> tuple[int, ...]:
        """Size of the field for one token, in elements per dim."""
        return tuple(getattr(geometry, dim) for dim in self.dims)


U_FIELD = Field("u", ("heads", "value_dim"), "exact", "write vector after correction")
READ_U_FIELD = replace(U_FIELD, dtype="model", meaning="write vector corrected against the read copy, for outputs only")


class Recurrence(ABC):
    """What is replayed. Subclasses fill in the data and the functions; they keep no state.

    Tensors carry any leading dims (written ...); per-token dims follow the fields. Functions compute in the dtype of
    their arguments, which the flow has raised to the compute dtype (fp32, or fp64 for verification) first.
    """

    name: str
    """Identifier, equal to the folder's name."""
    title: str
    """Name for people."""
    decay: Literal["head", "channel"]
    """One log_decay per head, or one per key channel."""
    delta_rule: bool
    """True when the write vector corrects what the state already holds; `rate` and `target` then replace `write`."""
    inputs: tuple[Field, ...]
    """What a layer hands over per token."""
    params: tuple[Field, ...]
    """Per-layer constants."""
    records: tuple[Field, ...]
    """What the ring keeps per token, besides `u` for delta rules."""

    @abstractmethod
    def record(self, inputs: Tensors, params: Tensors) -> dict[str, Tensor]:
        """Turn a token's inputs into its record: every field of `records`."""

    @abstractmethod
    def log_decay(self, record: Tensors, params: Tensors) -> Tensor:
        """log d_t: [..., H] or, per channel, [..., H, N]. Natural log, at most 0, never cumulative."""

    @abstractmethod
    def key(self, record: Tensors) -> Tensor:
        """k_t [..., G, N]."""

    @abstractmethod
    def query(self, inputs: Tensors, params: Tensors) -> Tensor:
        """q_t [..., G, N]."""

    def write(self, record: Tensors) -> Tensor:
        """u_t [..., H, P] where it is an input."""
        raise NotImplementedError(f"{self.name} is a delta rule: its write vector needs the state")

    def rate(self, record: Tensors) -> Tensor:
        """Delta rules: [..., H], how much of the error is written (beta)."""
        raise NotImplementedError(f"{self.name} is no delta rule")

    def target(self, record: Tensors) -> Tensor:
        """Delta rules: [..., H, P], what the state should answer for k_t (v)."""
        raise NotImplementedError(f"{self.name} is no delta rule")

    def skip(self, inputs: Tensors, params: Tensors) -> Tensor | None:
        """A term added to y_t that bypasses the state, [..., H, P], or None."""
        return None

    @abstractmethod
    def draw(self, geometry: Geometry, shape: tuple[int, ...], generator: torch.Generator) -> tuple[dict, dict]:
        """Random (inputs [*shape, ...], params) with the magnitudes a trained layer has, for tests and benchmarks."""

    @abstractmethod
    def recurrent(self, inputs: Tensors, params: Tensors, state: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """The definition itself, token by token, sharing no code with the functions above.

        Args:
            inputs: fields of `inputs` with one leading time dim [T, ...].
            params: fields of `params`.
            state: [H, N, P].

        Returns:
            y [T, H, P] and the state after the last token [H, N, P], in the dtype of `state`.
        """

    def ring_fields(self, read_copy: bool) -> tuple[Field, ...]:
        """Fields the ring stores, in order."""
        kept = tuple(f for f in self.records if f.kept == "always" or read_copy)
        return (*kept, READ_U_FIELD if read_copy else U_FIELD) if self.delta_rule else kept

    def channels(self, geometry: Geometry) -> int:
        """Decay channels per head: N or 1, so that log_decay broadcasts as [..., H, channels]."""
        return geometry.key_dim if self.decay == "channel" else 1

    def decay_channels(self, record: Tensors, params: Tensors) -> Tensor:
        """`log_decay` as [..., H, channels], whichever kind it is."""
        log_decay = self.log_decay(record, params)
        return log_decay if self.decay == "channel" else log_decay.unsqueeze(-1)


def tolerance(dtype: torch.dtype) -> float:
    """Relative error allowed between two orders of summation over at most a few hundred terms in `dtype`."""
    return 64 * torch.finfo(dtype).eps
