"""Mamba-2 layers of vLLM. Their state is [H, P, N]; dt arrives before bias and softplus, and is never clamped."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from replayssm.recurrences.engine import EngineBinding, Tokens
from replayssm.recurrences.mamba2.mixer import MIXER


def split(layer: Any, projected_states: Tensor, output: Tensor) -> Tokens:
    """projected_states [n, gate + channels + H]; output [n, H * P]."""
    _, raw, dt = projected_states.split(
        [layer.tped_intermediate_size, layer.tped_conv_size, layer.tped_dt_size], dim=-1
    )
    return Tokens(raw, (dt,), output.unflatten(-1, (-1, layer.head_dim)))


def conv(layer: Any) -> tuple[Tensor, Tensor | None, str]:
    return layer.conv_weights, layer.conv1d.bias, layer.activation


def gates(layer: Any) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    return (layer.dt_bias,), ()


def params(layer: Any) -> dict[str, Tensor]:
    return {"A": layer.A, "D": layer.D}


def transposed(state: Tensor) -> Tensor:
    return state.transpose(-1, -2)


BINDING = EngineBinding(
    layer="vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2",
    architectures=(
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "Mamba2ForCausalLM",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "Zamba2ForCausalLM",
    ),
    forward="conv_ssm_forward",
    split=split,
    conv=conv,
    mixer=MIXER,
    gates=gates,
    params=params,
    state=transposed,
)
