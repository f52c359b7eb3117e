"""Mamba-2 layers of transformers.

The model keeps its state as [B, H, P, N] and hands over dt before bias and softplus. Its scan clamps dt to
`time_step_limit`, its step does not: a token that enters the ring follows the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from replayssm.recurrences.base import Geometry
from replayssm.recurrences.binding import Binding, Core
from replayssm.recurrences.mamba2.mixer import MIXER
from replayssm.recurrences.mamba2.spec import Mamba2


def geometry(mixer: Any) -> Geometry:
    channels, _, width = mixer.conv1d.weight.shape
    return Geometry(
        heads=mixer.num_heads,
        key_heads=mixer.n_groups,
        key_dim=mixer.ssm_state_size,
        value_dim=mixer.head_dim,
        conv_channels=channels,
        conv_width=width,
    )


def params(mixer: Any) -> dict[str, Tensor]:
    return {"A": -torch.exp(mixer.A_log.detach().float()), "D": mixer.D.detach().float()}


def step_inputs(
    geometry: Geometry, state: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *_: Any, **call: Any
) -> dict[str, Tensor]:
    """x [B, H, P]; B, C [B, G, N]; dt and dt_bias raw, repeated over P."""
    dt = Mamba2.step_size(dt[..., 0], call["dt_bias"][..., 0])
    return {name: value.unsqueeze(1) for name, value in (("x", x), ("B", B), ("C", C), ("dt", dt))}


def step_result(y: Tensor, state: Any, *_: Any, z: Tensor | None = None, **__: Any) -> Tensor:
    """[B, H, P] in fp32, which the gated norm behind it reads; FalconH1 without that norm gates here."""
    y = y.squeeze(1)
    return y if z is None else y * silu(z.to(y.dtype))


def scan_inputs(
    geometry: Geometry, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *_: Any, **call: Any
) -> dict[str, Tensor]:
    """x [B, T, H, P]; B, C [B, T, G, N]; dt raw [B, T, H]."""
    return {"x": x, "B": B, "C": C, "dt": Mamba2.step_size(dt, call["dt_bias"])}


def scan_result(y: Tensor, state: Any, *_: Any, return_final_states: bool = False, **__: Any) -> Any:
    """[B, T, H, P], with the state where the call asks for it."""
    return (y, state) if return_final_states else y


def transposed(state: Tensor) -> Tensor:
    return state.transpose(-1, -2).contiguous()


BINDING = Binding(
    mixers={
        "NemotronHMamba2Mixer": "nemotron_h",
        "BambaMixer": "bamba",
        "GraniteMoeHybridMambaLayer": "granitemoehybrid",
        "FalconH1Mixer": "falcon_h1",
        "Zamba2MambaMixer": "zamba2",
        "Mamba2Mixer": "mamba2",
    },
    cores=(
        Core("mamba2_selective_state_update", step_inputs, step_result),
        Core("mamba2_chunk_scan", scan_inputs, scan_result),
    ),
    geometry=geometry,
    params=params,
    to_model=transposed,
    from_model=transposed,
    mixer=MIXER,
)
