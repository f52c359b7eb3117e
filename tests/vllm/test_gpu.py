"""The plug-in in vLLM on a GPU, with CUDA graphs: the tokens of vLLM itself."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from .harness import drive, spec
from .tiny import save

pytestmark = pytest.mark.gpu

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
GRAPHS = {"enforce_eager": False, "gpu_memory_utilization": 0.05}


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5"])
def test_tokens_are_those_of_vllm_itself(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path)
    runs = (
        spec(model, **GRAPHS),
        spec(model, {"window": 8}, **GRAPHS | {"enforce_eager": True}),
        spec(model, {"window": 8}, tokens=256, **GRAPHS),
        spec(model, {"window": 8}, speculative_config=NGRAM, tokens=256, **GRAPHS),
        spec(model, {"window": 8}, fault="zero_the_ring", **GRAPHS),
    )
    found = [drive(run)[0] for run in runs]  # one process each: an engine leaves something on the GPU
    assert not [each["error"] for each in found if "error" in each]
    stock, eager, graphs, drafts, broken = found
    assert eager["tokens"] == stock["tokens"]
    assert [row[:40] for row in graphs["tokens"]] == stock["tokens"]
    assert drafts["tokens"] == graphs["tokens"]
    assert drafts["accepted"] > 0
    assert broken["tokens"] != stock["tokens"]
