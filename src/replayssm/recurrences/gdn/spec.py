"""Gated DeltaNet in the normal form: a delta rule with one decay per value head, key heads shared by a group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.recurrences.base import Geometry, Tensors
from replayssm.recurrences.delta import DeltaRule
from replayssm.recurrences.gdn.reference import recurrent


class GatedDeltaNet(DeltaRule):
    """Delta rule with a decay per value head (Yang et al., 2024, arXiv:2412.06464)."""

    name = "gdn"
    title = "Gated DeltaNet"
    decay = "head"

    def recurrent(self, inputs: Tensors, params: Tensors, state: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        return recurrent(inputs, state)

    @staticmethod
    def gates(a_raw: Tensor, b_raw: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """(log_decay, beta), each [..., Hv] in fp32, from the layer's raw gate inputs.

        Args:
            a_raw, b_raw: [..., Hv], as the projections produced them.
            A_log, dt_bias: [Hv].
        """
        log_decay = -torch.exp(A_log.float()) * F.softplus(a_raw.float() + dt_bias.float())
        return log_decay, torch.sigmoid(b_raw.float())

    def draw(self, geometry: Geometry, shape: tuple[int, ...], generator: torch.Generator) -> tuple[dict, dict]:
        def normal(*dims: int) -> Tensor:
            return torch.randn(*dims, generator=generator)

        H, G, N, P = geometry.heads, geometry.key_heads, geometry.key_dim, geometry.value_dim
        log_decay, beta = self.gates(normal(*shape, H) - 2.0, normal(*shape, H), normal(H), normal(H))
        q, k, v = normal(*shape, G, N), normal(*shape, G, N), normal(*shape, H, P)
        return {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}, {}
