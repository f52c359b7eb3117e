"""Tiny models of every supported family, with weights that make the recurrent state matter.

With the initial weights of transformers a wrong state changes logits by 1e-7 to 1e-3 and passes any test; the weights
are drawn again so that it changes them by more than 1e-2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

VOCABULARY = 96
TOK = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
HIDDEN = {"hidden_size": 64, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LFL = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SSM = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}
LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DELTA = {**HIDDEN, **HEADS, **LFL, **LINEAR, "head_dim": 16}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def nemotron_h() -> Any:
    blocks = ["linear_attention", "mlp", "linear_attention", "full_attention", "linear_attention", "moe"]
    config = T.NemotronHConfig(
        hidden_size=64,
        layers_block_type=blocks,
        intermediate_size=96,
        head_dim=16,
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        **HEADS,
        **TOK,
    )
    return T.NemotronHForCausalLM(config)


def bamba(attention: int = 1) -> Any:
    sizes = {"intermediate_size": 96, "attn_layer_indices": [attention], "mamba_expand": 2}
    return T.BambaForCausalLM(T.BambaConfig(**HIDDEN, **HEADS, **SSM, **sizes, **TOK))


def granitemoehybrid() -> Any:
    sizes = {"intermediate_size": 32, "shared_intermediate_size": 32, "mamba_expand": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"}
    config = T.GraniteMoeHybridConfig(**HIDDEN, **HEADS, **LFL, **SSM, **sizes, **experts, **TOK)
    return T.GraniteMoeHybridForCausalLM(config)


def falcon_h1() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "mamba_d_ssm": 128}
    return T.FalconH1ForCausalLM(T.FalconH1Config(**sizes, **HEADS, **SSM, **TOK))


def zamba2() -> Any:
    config = T.Zamba2Config(
        **HIDDEN,
        layers_block_type=["linear_attention", "hybrid", "linear_attention"],
        mamba_d_state=16,
        mamba_ngroups=2,
        n_mamba_heads=8,
        chunk_size=8,
        intermediate_size=96,
        num_attention_heads=4,
        use_mem_rope=True,
        adapter_rank=8,
        **TOK,
    )
    return T.Zamba2ForCausalLM(config)


def mamba2() -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 16}
    return T.Mamba2ForCausalLM(T.Mamba2Config(**sizes, expand=2, n_groups=2, chunk_size=8, **TOK))


def qwen3_next() -> Any:
    return T.Qwen3NextForCausalLM(T.Qwen3NextConfig(intermediate_size=96, **DELTA, **MOE, **TOK))


def qwen3_5() -> Any:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(intermediate_size=96, **DELTA, **TOK))


def qwen3_5_moe() -> Any:
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**DELTA, **MOE, **TOK))


def olmo_hybrid() -> Any:
    linear = {**LINEAR, "linear_num_key_heads": 4, "linear_value_head_dim": 32}
    return T.OlmoHybridForCausalLM(T.OlmoHybridConfig(intermediate_size=96, **HIDDEN, **HEADS, **LFL, **linear, **TOK))


def kimi_linear() -> Any:
    config = T.KimiLinearConfig(
        **HIDDEN,
        **LFL,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        linear_head_dim=16,
        linear_num_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        **TOK,
    )
    return T.KimiLinearForCausalLM(config)


def glm5_next() -> Any:
    text = dict(
        **HIDDEN,
        **LFL,
        intermediate_size=96,
        moe_intermediate_size=32,
        mlp_layer_types=["dense", "dense", "sparse"],
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        v_head_dim=16,
        qk_nope_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        index_topk=64,
        index_head_dim=16,
        index_n_heads=2,
        index_kpool=4,
        linear_head_dim=16,
        linear_num_heads=4,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        **TOK,
    )
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "image_size": 28, "out_hidden_size": 64}
    vision |= {"intermediate_size": 32, "projection_intermediate_size": 32}
    tokens = {"image_token_id": 90, "video_start_token_id": 91, "video_end_token_id": 92}
    tokens |= {"image_start_token_id": 93, "image_end_token_id": 94}
    return T.Glm5NextForConditionalGeneration(T.Glm5NextConfig(text_config=text, vision_config=vision, **tokens))


FAMILIES: dict[str, Callable[[], Any]] = {
    build.__name__: build
    for build in (
        nemotron_h,
        bamba,
        granitemoehybrid,
        falcon_h1,
        zamba2,
        mamba2,
        qwen3_next,
        qwen3_5,
        qwen3_5_moe,
        olmo_hybrid,
        kimi_linear,
        glm5_next,
    )
}


VARIANTS: dict[str, Callable[[], Any]] = {"bamba with attention first": lambda: bamba(attention=0)}
"""Tiny models beside one per family."""


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model whose state matters, the same for the same seed."""
    torch.manual_seed(seed)
    model = (FAMILIES | VARIANTS)[family]().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1] in ("A_log", "dt_bias"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 2 - 1)
            elif parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model.to(dtype)
