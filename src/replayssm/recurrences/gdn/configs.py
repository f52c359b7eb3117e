"""Whole models by the ids of `geometries.py`, as transformers writes a configuration; the rest is its default."""

from __future__ import annotations

from typing import Any


def _dense(hidden: int, layers: int, heads: int, attention: tuple[int, int], ffn: int) -> dict[str, Any]:
    """`heads` are the value heads of a recurrent layer, `attention` the heads of queries and of keys."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "linear_num_value_heads": heads}
    sizes |= {"num_attention_heads": attention[0], "num_key_value_heads": attention[1], "intermediate_size": ffn}
    return {"model_type": "qwen3_5_text", **sizes}


def _experts(
    hidden: int, layers: int, heads: int, queries: int, experts: tuple[int, int, int], kind: str = "qwen3_5_moe_text"
) -> dict[str, Any]:
    """`experts`: how many there are, how many a token takes, and the size of each, the shared one included."""
    count, chosen, size = experts
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "linear_num_value_heads": heads}
    sizes |= {"num_attention_heads": queries, "num_key_value_heads": 2, "num_experts": count}
    sizes |= {"num_experts_per_tok": chosen, "moe_intermediate_size": size, "shared_expert_intermediate_size": size}
    return {"model_type": kind, **sizes}


CONFIGS = {
    "qwen3.5-4b": _dense(2560, 32, 32, (16, 4), 9216) | {"tie_word_embeddings": True},
    "qwen3.5-9b": _dense(4096, 32, 32, (16, 4), 12288),
    "qwen3.5-27b": _dense(5120, 64, 48, (24, 4), 17408),
    "qwen3.5-35b-a3b": _experts(2048, 40, 32, 16, (256, 8, 512)),
    "qwen3.5-122b-a10b": _experts(3072, 48, 64, 32, (256, 8, 1024)),
    "qwen3.5-397b-a17b": _experts(4096, 60, 64, 32, (512, 10, 1024)),
    "qwen3-next-80b-a3b": _experts(2048, 48, 32, 16, (512, 10, 512), "qwen3_next"),
}
