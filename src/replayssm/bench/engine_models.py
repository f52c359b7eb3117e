"""Text models that some versions of vLLM know only as the language part of a larger one."""

from __future__ import annotations

from vllm.model_executor.models.interfaces import IsHybrid
from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
)


class _Hybrid(IsHybrid):
    get_mamba_state_dtype_from_config = Qwen3_5ForConditionalGeneration.get_mamba_state_dtype_from_config
    get_mamba_state_shape_from_config = Qwen3_5ForConditionalGeneration.get_mamba_state_shape_from_config
    get_mamba_state_copy_func = Qwen3_5ForConditionalGeneration.get_mamba_state_copy_func


class Qwen3_5Text(Qwen3_5ForCausalLM, _Hybrid):
    """Qwen3.5 without its vision tower."""


class Qwen3_5MoeText(Qwen3_5MoeForCausalLM, _Hybrid):
    """The same with experts."""


TEXT_MODELS = {"Qwen3_5ForCausalLM": Qwen3_5Text, "Qwen3_5MoeForCausalLM": Qwen3_5MoeText}
"""Architecture as transformers names it -> class."""
