"""A step's inputs as a layer has them before a kernel: raw gates in bf16, everything else as the kernels share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.bench.cases import Case
from replayssm.planner.model import MODEL_DTYPE
from replayssm.recurrences.gdn.spec import GatedDeltaNet
from replayssm.recurrences.kda.spec import KimiDeltaAttention
from replayssm.recurrences.mamba2.spec import Mamba2

LOWER_BOUND = -5.0
"""Of the bounded KDA gate (glm-5.3-flash)."""


@dataclass(frozen=True)
class Inputs:
    """Tensors of all layers.

    Args:
        fields: what `recurrence.inputs` lists, [layers, B, T, ...], and the raw gates they were made from.
        params: constants of one layer, those of `recurrence.params` and those of the raw gates.
    """

    fields: dict[str, Tensor]
    params: dict[str, Tensor]

    def of(self, layer: int, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Fields of one layer by name, [B, T, ...]."""
        return {name: self.fields[name][layer] for name in names}


def draw(case: Case, layers: int, device: torch.device) -> Inputs:
    """Random inputs with the magnitudes a trained layer has."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*dims: int) -> Tensor:
        return torch.randn(dims, generator=generator, device=device)

    def model(*dims: int) -> Tensor:
        return normal(*dims).to(MODEL_DTYPE)

    geometry, shape = case.model.geometry, (layers, case.batch, case.verify_len)
    H, G, N, P = geometry.heads, geometry.key_heads, geometry.key_dim, geometry.value_dim
    if case.model.recurrence == "mamba2":
        raw, bias = (normal(*shape, H) - 2).to(MODEL_DTYPE), normal(H) / 4
        fields = {
            "x": model(*shape, H, P),
            "B": model(*shape, G, N),
            "C": (normal(*shape, G, N) / N**0.5).to(MODEL_DTYPE),
            "dt_raw": raw,
            "dt": Mamba2.step_size(raw, bias),
        }
        return Inputs(fields, {"A": -torch.exp(normal(H)), "D": normal(H), "dt_bias": bias})
    # q, k and v lie side by side, as the convolution leaves them
    packed = model(*shape, 2 * G * N + H * P)
    q, k, v = packed.split((G * N, G * N, H * P), dim=-1)
    fields = {
        "packed": packed,
        "q": q.unflatten(-1, (G, N)).contiguous(),
        "k": k.unflatten(-1, (G, N)).contiguous(),
        "v": v.unflatten(-1, (H, P)).contiguous(),
        "beta_raw": model(*shape, H),
    }
    if case.model.recurrence == "gdn":
        raw, rate, bias = (normal(*shape, H) - 2).to(MODEL_DTYPE), normal(H), normal(H)
        log_decay, beta = GatedDeltaNet.gates(raw, fields["beta_raw"], rate, bias)
    else:
        raw, rate, bias = (normal(*shape, H, N) - 2).to(MODEL_DTYPE), normal(H), normal(H, N)
        bound = LOWER_BOUND if case.geometry.startswith("glm") else None
        log_decay = KimiDeltaAttention.log_decay_of_gate(raw, rate, bias, bound)
        beta = torch.sigmoid(fields["beta_raw"].float())
    fields |= {"gate_raw": raw, "log_decay": log_decay, "beta": beta}
    return Inputs(fields, {"A_log": rate, "dt_bias": bias})
