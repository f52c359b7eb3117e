"""Mamba-2 in the normal form: k = B, q = C, u = dt x, log_decay = dt A, skip = D x.

The ring keeps x and B exactly as the convolution produced them and dt in fp32, so it is exact and C is never kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.recurrences.base import Field, Geometry, Recurrence, Tensors
from replayssm.recurrences.mamba2.reference import recurrent


class Mamba2(Recurrence):
    """Selective state space with one decay per head (Dao and Gu, 2024, arXiv:2405.21060)."""

    name = "mamba2"
    title = "Mamba-2"
    decay = "head"
    delta_rule = False
    inputs = (
        Field("x", ("heads", "value_dim"), "model", "input of the state, after conv and activation"),
        Field("B", ("key_heads", "key_dim"), "model", "write direction, shared by the heads of a group"),
        Field("C", ("key_heads", "key_dim"), "model", "read direction, shared by the heads of a group"),
        Field("dt", ("heads",), "exact", "step size after bias and softplus, >= 0"),
    )
    params = (
        Field("A", ("heads",), "exact", "decay rate, -exp(A_log), < 0"),
        Field("D", ("heads",), "exact", "weight of the input that bypasses the state"),
    )
    records = (
        Field("x", ("heads", "value_dim"), "model", "input of the state"),
        Field("B", ("key_heads", "key_dim"), "model", "write direction"),
        Field("dt", ("heads",), "exact", "step size, processed"),
    )

    def record(self, inputs: Tensors, params: Tensors) -> dict[str, Tensor]:
        return {name: inputs[name] for name in ("x", "B", "dt")}

    def log_decay(self, record: Tensors, params: Tensors) -> Tensor:
        return record["dt"] * params["A"]

    def key(self, record: Tensors) -> Tensor:
        return record["B"]

    def query(self, inputs: Tensors, params: Tensors) -> Tensor:
        return inputs["C"]

    def write(self, record: Tensors) -> Tensor:
        return record["dt"].unsqueeze(-1) * record["x"]

    def skip(self, inputs: Tensors, params: Tensors) -> Tensor:
        return params["D"].unsqueeze(-1) * inputs["x"]

    def recurrent(self, inputs: Tensors, params: Tensors, state: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        return recurrent(inputs, params, state)

    @staticmethod
    def step_size(dt_raw: Tensor, dt_bias: Tensor) -> Tensor:
        """dt = softplus(dt_raw + dt_bias) in fp32 (linear above 20), the only place where it is computed.

        Args:
            dt_raw: [..., H], as the input projection produced it.
            dt_bias: [H].
        """
        return F.softplus(dt_raw.float() + dt_bias.float())

    def draw(self, geometry: Geometry, shape: tuple[int, ...], generator: torch.Generator) -> tuple[dict, dict]:
        def normal(*dims: int) -> Tensor:
            return torch.randn(*dims, generator=generator)

        H, G, N, P = geometry.heads, geometry.key_heads, geometry.key_dim, geometry.value_dim
        inputs = {
            "x": normal(*shape, H, P),
            "B": normal(*shape, G, N),
            "C": normal(*shape, G, N) / N**0.5,
            "dt": F.softplus(normal(*shape, H) - 2.0),
        }
        params = {"A": -torch.exp(normal(H)), "D": normal(H)}
        return inputs, params
