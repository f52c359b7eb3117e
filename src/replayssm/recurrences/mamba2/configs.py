"""Whole models by the ids of `geometries.py`, as transformers writes a configuration; what is left out is its default.

Of a hybrid model's layers the number of each kind is the model's. Their order is so only in nemotron3-nano-4b.
"""

from __future__ import annotations

from typing import Any

KINDS = {"M": "linear_attention", "-": "mlp", "E": "moe", "*": "full_attention"}
NANO_4B = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"


def _hybrid(
    pattern: str, hidden: int, heads: tuple[int, int], attention: tuple[int, int], state: int = 128, **ffn: int
) -> dict[str, Any]:
    """`heads` are the recurrent ones and their value dim, `attention` those of queries and of keys."""
    return {
        "model_type": "nemotron_h",
        "layers_block_type": [KINDS[kind] for kind in pattern],
        "hidden_size": hidden,
        "mamba_num_heads": heads[0],
        "mamba_head_dim": heads[1],
        "ssm_state_size": state,
        "num_attention_heads": attention[0],
        "num_key_value_heads": attention[1],
    } | ffn


def _experts(count: int, chosen: int, size: int, shared: int, latent: int | None = None) -> dict[str, Any]:
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": size,
        "moe_shared_expert_intermediate_size": shared,
        "moe_latent_size": latent,
    }


CONFIGS = {
    "nemotron3-nano-4b": _hybrid(NANO_4B, 3136, (96, 80), (40, 8), intermediate_size=12544),
    "nemotron3-nano-30b": _hybrid(
        ("ME" * 4 + "*") * 5 + "MEMEME*", 2688, (64, 64), (32, 2), **_experts(128, 6, 1856, 3712)
    ),
    "nemotron3-super-120b": _hybrid(
        ("ME" * 5 + "*") * 8, 4096, (128, 64), (32, 2), **_experts(512, 22, 2688, 2688, latent=1024)
    ),
    "nemotron3-ultra-550b": _hybrid(
        ("ME" * 4 + "*") * 12, 8192, (256, 64), (64, 2), **_experts(512, 22, 5120, 5120, latent=2048)
    ),
    "nemotron-h-8b": _hybrid(("M-" * 6 + "*") * 4, 4096, (128, 64), (32, 8), intermediate_size=21504),
    "nemotron-h-56b": _hybrid(
        ("M-" * 5 + "*") * 10 + "M-" * 4, 8192, (256, 64), (64, 8), state=256, intermediate_size=32768
    ),
    "bamba-9b": {
        "model_type": "bamba",
        "num_hidden_layers": 32,
        "attn_layer_indices": [9, 18, 27],
        "mamba_d_state": 128,
    },
    "mamba2-2.7b": {
        "model_type": "mamba2",
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "num_heads": 80,
        "n_groups": 1,
        "vocab_size": 50288,
        "tie_word_embeddings": True,
    },
}
