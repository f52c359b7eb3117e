"""Tiny checkpoints with random weights, of sizes that vLLM's CPU engine takes, saved to disk without a tokenizer.

Its attention needs heads of 32; where it differs from transformers in how groups are normalised, there is one group.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as T
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

VOCABULARY = 96
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
SSM = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
LINEAR = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def nemotron_h() -> Any:
    blocks = ["linear_attention", "mlp", "linear_attention", "full_attention", "linear_attention", "mlp"]
    heads = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
    return T.NemotronHForCausalLM(
        T.NemotronHConfig(layers_block_type=blocks, head_dim=32, chunk_size=8, **heads, **SIZES, **TOKENS)
    )


def granitemoehybrid() -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
    sizes = SIZES | {"intermediate_size": 32, "num_hidden_layers": 3, "mamba_expand": 2} | experts
    config = T.GraniteMoeHybridConfig(
        layer_types=LAYERS, position_embedding_type="rope", **sizes, **SSM | {"mamba_n_groups": 1}, **TOKENS
    )
    return T.GraniteMoeHybridForCausalLM(config)


def falcon_h1() -> Any:
    return T.FalconH1ForCausalLM(
        T.FalconH1Config(num_hidden_layers=2, mamba_d_ssm=128, head_dim=32, **SIZES, **SSM, **TOKENS)
    )


def mamba2() -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 16}
    return T.Mamba2ForCausalLM(T.Mamba2Config(**sizes, expand=2, n_groups=1, chunk_size=8, **TOKENS))


def qwen3_5() -> Any:
    sizes = SIZES | LINEAR | {"num_hidden_layers": 3, "layer_types": LAYERS, "head_dim": 32}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **TOKENS))


def qwen3_next() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = SIZES | LINEAR | experts | {"num_hidden_layers": 3, "layer_types": LAYERS, "head_dim": 32}
    return T.Qwen3NextForCausalLM(T.Qwen3NextConfig(shared_expert_intermediate_size=32, **sizes, **TOKENS))


def llama() -> Any:
    return T.LlamaForCausalLM(T.LlamaConfig(num_hidden_layers=1, **SIZES, **TOKENS))


def save(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint whose recurrent state matters, the same every time."""
    torch.manual_seed(0)
    model = globals()[family]().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1] in ("A_log", "dt_bias"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 2 - 1)
            elif parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    model.to(dtype).save_pretrained(folder / family)
    return folder / family


def add_tokenizer(model: Path) -> Path:
    """Let the checkpoint have a tokenizer: token i is the word "ti"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.decoder = decoders.Sequence([decoders.Replace("t", " t")])
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", pad_token="t0").save_pretrained(model)
    return model
