"""What `replayssm bench vllm` does without vLLM: options, rows and weights."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from replayssm.bench.engine import EngineRequest, _report, fill, save_config
from replayssm.bench.rows import Conditions, Report
from replayssm.cli.app import app
from replayssm.planner.model import known_configs


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_it_says_that_vllm_is_missing() -> None:
    done = CliRunner().invoke(app, ["bench", "vllm", "nemotron3-nano-4b"])
    assert done.exit_code == 2
    assert "bench vllm needs vLLM, which is not installed; install replayssm[vllm]" in done.output


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batches": ()}, "batches must be at least 1, got 0"),
        ({"batches": (0,)}, "batches must be at least 1, got 0"),
        ({"options": [1]}, r"options must be an object with arguments of vllm.LLM, got \[1\]"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"precision": "fp7"}, "checkpoint_format must be one of"),
        ({"window": 2, "draft_len": 3}, "verify_len 4 is larger than window 2"),
    ],
)
def test_wrong_options(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineRequest("nemotron3-nano-4b", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["glm-5.3-flash", "qwen3.5-4b"])
def test_only_language_models_have_a_class_that_vllm_can_load(name: str, tmp_path: Path) -> None:
    if name == "qwen3.5-4b":
        save_config(known_configs()[name], tmp_path)
        assert "ForCausalLM" in json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    else:
        with pytest.raises(ValueError, match="no language model of the configuration glm5_next"):
            save_config(known_configs()[name], tmp_path)


FOUND = {
    "batch": 4,
    "version": "0.26.0",
    "us": 900.0,
    "low_us": 800.0,
    "high_us": 1000.0,
    "blocks": 10,
    "context": 64,
    "tok_s": 4444.0,
    "p50_us": 890.0,
    "p99_over_p50": 1.1,
    "tokens": 4,
    "text": [[5, 6, 7, 8], [1, 2, 3, 4]],
}


def both_sides(text: list[list[int]]) -> Report:
    """A report of an ordinary engine, and of one with replay that has written `text`."""
    device, ordinary = torch.device("cpu"), {}
    report, request = Report(Conditions.collect(device), None), EngineRequest("m", precision="fp32+fp8", window=16)
    _report(report, "m", request, "ordinary", FOUND, ordinary)
    _report(report, "m", request, "replay", FOUND | {"us": 600.0, "text": text}, ordinary)
    return report


def test_rows_of_both_sides() -> None:
    plain, ours = both_sides([[5, 6, 7, 8], [1, 2, 9, 9]]).rows
    assert (plain.format, plain.window, plain.over_ordinary) == ("fp32", None, None)
    assert (ours.format, ours.window, ours.over_ordinary) == ("fp32+fp8", 16, 1.5)
    assert ours.detail["agreement"] == 0.75


def test_an_engine_that_writes_another_text_is_refused() -> None:
    report = both_sides([[0, 0, 0, 0], [1, 0, 0, 0]])
    assert [row.name for row in report.rows] == ["vLLM"]
    assert "behind 12% of their first" in report.refusals[0].reason


def test_random_weights_are_the_same_every_time_and_decay() -> None:
    drawn = [torch.empty(8) for _ in range(2)]
    for weight in drawn:
        fill("layers.0.mixer.A", weight, torch.Generator().manual_seed(3))
    assert torch.equal(*drawn)
    assert bool((drawn[0] < -1).all())
    matrix = torch.zeros(16, 16)
    fill("layers.0.mixer.in_proj.weight", matrix, torch.Generator().manual_seed(0))
    assert 0.01 < float(matrix.std()) < 0.03
