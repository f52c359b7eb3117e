"""Kimi Delta Attention in the normal form: a delta rule with one decay per key channel.

log_decay may be strong (a bounded gate reaches -5 per token, an unbounded one more): sums over the window exceed the
range of exp in fp32, so only differences along a path are ever exponentiated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.recurrences.base import Geometry, Tensors
from replayssm.recurrences.delta import DeltaRule
from replayssm.recurrences.kda.reference import recurrent


class KimiDeltaAttention(DeltaRule):
    """Delta rule with a decay per key channel (Kimi Team, 2025, arXiv:2510.26692)."""

    name = "kda"
    title = "Kimi Delta Attention"
    decay = "channel"

    def recurrent(self, inputs: Tensors, params: Tensors, state: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        return recurrent(inputs, state)

    @staticmethod
    def log_decay_of_gate(f_raw: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
        """log_decay [..., H, N] in fp32 from the layer's raw gate input.

        Args:
            f_raw: [..., H, N], as the gate projection produced it.
            A_log: [H].
            dt_bias: [H, N].
            lower_bound: None for the unbounded gate -exp(A_log) softplus(f + dt_bias); else a negative number b for
                the bounded gate b sigmoid(exp(A_log) (f + dt_bias)).
        """
        rate, shifted = torch.exp(A_log.float()).unsqueeze(-1), f_raw.float() + dt_bias.float()
        if lower_bound is None:
            return -rate * F.softplus(shifted)
        return lower_bound * torch.sigmoid(rate * shifted)

    def draw(self, geometry: Geometry, shape: tuple[int, ...], generator: torch.Generator) -> tuple[dict, dict]:
        def normal(*dims: int) -> Tensor:
            return torch.randn(*dims, generator=generator)

        H, G, N, P = geometry.heads, geometry.key_heads, geometry.key_dim, geometry.value_dim
        # half of the layers drawn use each gate, so that tests meet both
        lower_bound = None if torch.rand((), generator=generator) < 0.5 else -5.0
        log_decay = self.log_decay_of_gate(normal(*shape, H, N) - 2.0, normal(H), normal(H, N), lower_bound)
        q, k, v = normal(*shape, G, N), normal(*shape, G, N), normal(*shape, H, P)
        return {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": torch.sigmoid(normal(*shape, H))}, {}
