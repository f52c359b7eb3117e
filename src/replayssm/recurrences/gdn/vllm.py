"""Gated DeltaNet layers of vLLM. Their state is [Hv, V, K], which its CPU operators fill as [Hv, K, V]."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from replayssm.recurrences.engine import EngineBinding, Tokens
from replayssm.recurrences.gdn.mixer import MIXER


def split(layer: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> Tokens:
    """mixed_qkv [n, channels]; b, a [n, Hv]; core_attn_out [n, Hv, V]."""
    return Tokens(mixed_qkv, (a, b), core_attn_out)


def conv(layer: Any) -> tuple[Tensor, Tensor | None, str]:
    # on a CPU the weight itself may have been packed for another operator
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", layer.conv1d.weight)
    return weight.view(weight.shape[0], weight.shape[-1]), layer.conv1d.bias, layer.activation


def gates(layer: Any) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    return (layer.A_log, layer.dt_bias), (1.0,)


def state(states: Tensor) -> Tensor:
    if states.device.type != "cpu":
        return states.transpose(-1, -2)
    rows, heads, value_dim, key_dim = states.shape
    return states.view(rows, heads, key_dim, value_dim)


BINDING = EngineBinding(
    layer="vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention",
    architectures=(
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    forward="_forward_core",
    split=split,
    conv=conv,
    mixer=MIXER,
    gates=gates,
    params=lambda layer: {},
    state=state,
    core="cpu_gdn_attention_core",
    # on a CPU as well, the operator in the middle calls the method named above
    methods={"forward_cpu": lambda layer, hidden_states: layer.forward_cuda(hidden_states)},
)
