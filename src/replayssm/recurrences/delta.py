"""What all delta rules share: l2-normalised keys and queries, and the correction u = beta (v - (decayed S)^T k).

The ring keeps k as the layer produced it (exact in the model dtype) with its inverse norm in fp32; a ring of rounded
normalised keys loses four digits of the state. The raw v and beta are kept only when outputs read a read copy, whose
corrections must not enter the checkpoint: the flush then solves the window again.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from replayssm.recurrences.base import Field, Recurrence, Tensors

NORM_EPS = 1e-6


class DeltaRule(Recurrence):
    """A recurrence with inputs q, k, v, log_decay and beta. Subclasses say which decay they have."""

    delta_rule = True
    params = ()

    def __init_subclass__(cls) -> None:
        dims = {"head": ("heads",), "channel": ("heads", "key_dim")}[cls.decay]
        log_decay = Field("log_decay", dims, "exact", "natural log of the decay, per token, <= 0")
        k = Field("k", ("key_heads", "key_dim"), "model", "key before normalisation")
        cls.inputs = (
            Field("q", ("key_heads", "key_dim"), "model", "query before normalisation"),
            k,
            Field("v", ("heads", "value_dim"), "model", "value"),
            log_decay,
            Field("beta", ("heads",), "exact", "write strength after sigmoid"),
        )
        cls.records = (
            k,
            Field("k_inv_norm", ("key_heads",), "exact", "1 / sqrt(sum k^2 + 1e-6)"),
            log_decay,
            Field("v", ("heads", "value_dim"), "model", "value", kept="read_copy"),
            Field("beta", ("heads",), "exact", "write strength after sigmoid", kept="read_copy"),
        )

    decay: Literal["head", "channel"]

    def record(self, inputs: Tensors, params: Tensors) -> dict[str, Tensor]:
        inverse_norm = torch.rsqrt(inputs["k"].square().sum(-1) + NORM_EPS)
        return {"k_inv_norm": inverse_norm} | {name: inputs[name] for name in ("k", "log_decay", "v", "beta")}

    def log_decay(self, record: Tensors, params: Tensors) -> Tensor:
        return record["log_decay"]

    def key(self, record: Tensors) -> Tensor:
        return record["k"] * record["k_inv_norm"].unsqueeze(-1)

    def query(self, inputs: Tensors, params: Tensors) -> Tensor:
        q = inputs["q"]
        scale = q.shape[-1] ** -0.5
        return q * (torch.rsqrt(q.square().sum(-1, keepdim=True) + NORM_EPS) * scale)

    def rate(self, record: Tensors) -> Tensor:
        return record["beta"]

    def target(self, record: Tensors) -> Tensor:
        return record["v"]
