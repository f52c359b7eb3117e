"""Mamba-2 layers of vLLM. Their state is [H, P, N]; dt arrives before bias and softplus, and is never clamped."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from replayssm.recurrences.base import Geometry
from replayssm.recurrences.engine import EngineBinding, Tokens
from replayssm.recurrences.mamba2.spec import Mamba2


def split(layer: Any, projected_states: Tensor, output: Tensor) -> Tokens:
    """projected_states [n, gate + channels + H]; output [n, H * P]."""
    _, raw, dt = projected_states.split(
        [layer.tped_intermediate_size, layer.tped_conv_size, layer.tped_dt_size], dim=-1
    )
    return Tokens(raw, (dt,), output.unflatten(-1, (-1, layer.head_dim)))


def conv(layer: Any) -> tuple[Tensor, Tensor | None, str]:
    return layer.conv_weights, layer.conv1d.bias, layer.activation


def inputs(layer: Any, geometry: Geometry, convolved: Tensor, gates: tuple[Tensor, ...]) -> dict[str, Tensor]:
    keys = geometry.key_heads * geometry.key_dim
    x, B, C = convolved.split([geometry.heads * geometry.value_dim, keys, keys], dim=-1)
    return {
        "x": x.unflatten(-1, (geometry.heads, geometry.value_dim)),
        "B": B.unflatten(-1, (geometry.key_heads, geometry.key_dim)),
        "C": C.unflatten(-1, (geometry.key_heads, geometry.key_dim)),
        "dt": step_size(gates[0], layer.dt_bias),
    }


def step_size(raw: Tensor, bias: Tensor) -> Tensor:
    if raw.device.type == "cpu":
        return Mamba2.step_size(raw, bias)
    from replayssm.recurrences.mamba2 import gates_triton

    return gates_triton.step_size(raw, bias)


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
    inputs=inputs,
    params=params,
    state=transposed,
)
