"""The plug-in in vLLM on a GPU, with CUDA graphs: what vLLM itself says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from .harness import difference, drive, spec
from .tiny import save

pytestmark = pytest.mark.gpu

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# engines share the GPU: one that measured how much is free would take the others' memory for a fault
MEMORY = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 500_000_000, "max_model_len": 320}
GRAPHS = {"enforce_eager": False, **MEMORY}


def side_by_side(*runs: dict[str, Any]) -> list[dict[str, Any]]:
    """What engines say that run at once, a process each: most of their time goes into starting."""
    with ThreadPoolExecutor(len(runs)) as pool:
        found = [each for said in pool.map(drive, runs) for each in said]
    assert not [each["error"] for each in found if "error" in each]
    return found


def test_tokens_are_those_of_vllm_itself(tmp_path: Path) -> None:
    model = save("nemotron_h", tmp_path)
    stock, eager, graphs, drafts, broken = side_by_side(
        spec(model, **GRAPHS),
        spec(model, {"window": 8}, **MEMORY),
        spec(model, {"window": 8}, tokens=256, **GRAPHS),
        spec(model, {"window": 8}, speculative_config=NGRAM, tokens=256, **GRAPHS),
        spec(model, {"window": 8}, fault="zero_the_ring", **GRAPHS),
    )
    assert eager["tokens"] == stock["tokens"]
    assert [row[:40] for row in graphs["tokens"]] == stock["tokens"]
    assert drafts["tokens"] == graphs["tokens"]
    assert drafts["accepted"] > 0
    assert broken["tokens"] != stock["tokens"]


def test_log_probabilities(tmp_path: Path) -> None:
    # vLLM's kernel for prompts of Gated DeltaNet takes no fp32 there
    model, options = save("qwen3_5", tmp_path, torch.bfloat16), {"dtype": "bfloat16", "logprobs": True, **GRAPHS}
    stock, ours, drafts, broken = side_by_side(
        spec(model, **options),
        spec(model, {"window": 8}, **options),
        spec(model, {"window": 8}, speculative_config=NGRAM, **options),
        spec(model, {"window": 8}, fault="zero_the_ring", **options),
    )
    for found in (ours, drafts):
        compared, differences = difference(stock, found)
        assert compared > 90  # of 240
        assert differences < 0.1
    assert drafts["accepted"] > 0
    assert difference(stock, broken)[1] > 0.5 or difference(stock, broken)[0] < 60
