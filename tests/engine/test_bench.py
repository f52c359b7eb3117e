"""What `replayssm bench vllm` does without vLLM: options, rows and weights."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from replayssm.bench import engine as bench
from replayssm.bench.engine import EngineRequest, NotTogether, _report, _steps, fill, ordinary_format, save_config
from replayssm.bench.rows import Conditions, Report
from replayssm.bench.timing import wall_laps
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
        ({"options": {"model": "other"}}, "options must not set model: it is the command's argument"),
        ({"options": {"speculative_config": {}}}, "options must not set speculative_config: draft_len says"),
        ({"options": {"mamba_ssm_cache_dtype": "auto"}}, "options must not set mamba_ssm_cache_dtype: precision says"),
        (
            {"options": {"additional_config": {"replayssm": {}}}},
            "additional_config must be an object without replayssm",
        ),
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


def test_a_format_that_vllm_lacks_is_not_said_of_its_states() -> None:
    assert [ordinary_format(name) for name in ("fp8", "bf16", "fp16+nvfp4")] == ["fp32", "bf16", "fp16"]


class Playing:
    """An engine in which so many requests have room, each until it has `most` tokens."""

    def __init__(self, room: int, most: int) -> None:
        self.room, self.most = room, most
        self.tokens: dict[str, list[int]] = {}

    def add_request(self, name: str, prompt: object, params: object) -> None:
        self.tokens[name] = []

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.tokens.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.tokens)

    def step(self) -> list[SimpleNamespace]:
        outputs = []
        for name in list(self.tokens)[: self.room]:
            given = self.tokens[name]
            given.append(len(given))
            finished = len(given) == self.most
            outputs.append(
                SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=given)], finished=finished)
            )
            if finished:
                del self.tokens[name]
        return outputs


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **_: None))


@pytest.mark.usefixtures("no_vllm")
def test_steps_of_all_rows_together() -> None:
    found = _steps(Playing(room=3, most=100), EngineRequest("m", steps=10), 3, vocabulary=50)
    assert found["tokens"] == 30
    assert [len(text) for text in found["text"]] == [8] * 8


@pytest.mark.usefixtures("no_vllm")
def test_rows_that_do_not_decode_together_are_not_timed() -> None:
    engine = Playing(room=2, most=100)
    with pytest.raises(NotTogether, match="as long as max_model_len allows before all had decoded together"):
        _steps(engine, EngineRequest("m", steps=10), 3, vocabulary=50)
    assert not engine.tokens  # the next batch has the engine for itself


@pytest.mark.usefixtures("no_vllm")
def test_rows_that_wait_while_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def crowd(body: object, count: int) -> list[float]:
        engine.room = 2  # what the others have grown by, one of them has no room for
        return wall_laps(body, count)  # type: ignore[arg-type]

    engine = Playing(room=3, most=100)
    monkeypatch.setattr(bench, "wall_laps", crowd)
    with pytest.raises(NotTogether, match="10 steps of 3 rows brought 20 tokens: rows waited for room"):
        _steps(engine, EngineRequest("m", steps=10), 3, vocabulary=50)


def test_a_reason_is_reported() -> None:
    report = Report(Conditions.collect(torch.device("cpu")), None)
    _report(report, "m", EngineRequest("m"), "replay", {"batch": 4, "reason": "no room"}, {})
    assert not report.rows
    assert (report.refusals[0].case, report.refusals[0].reason) == ("m B=4", "no room")


def test_random_weights_are_the_same_every_time_and_decay() -> None:
    drawn = [torch.empty(8) for _ in range(2)]
    for weight in drawn:
        fill("layers.0.mixer.A", weight, torch.Generator().manual_seed(3))
    assert torch.equal(*drawn)
    assert bool((drawn[0] < -1).all())
    matrix = torch.zeros(16, 16)
    fill("layers.0.mixer.in_proj.weight", matrix, torch.Generator().manual_seed(0))
    assert 0.01 < float(matrix.std()) < 0.03
