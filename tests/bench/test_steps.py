"""The complete step's benchmark, dry: every side runs and is checked, and nothing wrong gets a number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from replayssm import attach
from replayssm.attach.transformers.sequences import Sequences
from replayssm.bench import steps
from replayssm.bench.rows import Conditions, Report
from replayssm.bench.steps import (
    Neighbours,
    PerTokenSide,
    ReplaySide,
    StepBench,
    StepCase,
    build_model,
    replace_verify,
)
from replayssm.cli.app import app
from replayssm.planner.model import fewer_layers, known_configs

from ..attach import models

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".carry" / "peers"


def fields_of(family: str) -> dict[str, Any]:
    return models.build(family).config.to_dict()


def bench(family: str, steps: int = 6) -> StepBench:
    model = build_model(fields_of(family), CPU)
    return StepBench(model, Report(Conditions.collect(CPU, "test")), steps, log=lambda line: None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5", "kimi_linear", "falcon_h1"])
def test_every_side_runs(family: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "attach", partial(attach, fused=fused))
    found = bench(family)
    rows = found.measure(StepCase("toy", 3, 70, window=4), [PerTokenSide(), ReplaySide()])
    assert found.report.refusals == []
    assert [row.what for row in rows] == ["model neighbours", "model ordinary", "model replay"]
    neighbours, ordinary, replay = rows
    assert replay.ordinary_us == ordinary.us and ordinary.ordinary_us is None
    assert replay.y_error is not None and replay.y_error < 0.1
    assert replay.detail["state_us"] == pytest.approx(replay.us - neighbours.us)
    assert replay.detail["tok_s"] == pytest.approx(3 / replay.us * 1e6)
    assert {"context", "p50_us", "p99_us", "slot_bytes", "layers"} <= set(replay.detail)


def test_precisions_share_what_is_ordinary() -> None:
    found = bench("qwen3_5")
    for form in ("fp32", "fp32+fp8", "bf16"):
        found.measure(StepCase("toy", 1, 65, form), [PerTokenSide(), ReplaySide()])
    assert found.report.refusals == []
    ordinary = {row.format: row.us for row in found.report.rows if row.what == "model ordinary"}
    assert list(ordinary) == ["fp32", "bf16"]
    replays = {row.format: row.ordinary_us for row in found.report.rows if row.what == "model replay"}
    assert replays == ordinary | {"fp32+fp8": ordinary["fp32"]}
    assert len([row for row in found.report.rows if row.what == "model neighbours"]) == 1


def test_drafts_and_read_copies() -> None:
    found = bench("qwen3_5")
    (_, replay) = found.measure(StepCase("toy", 2, 65, "fp32+fp8", 8, 4, 3), [ReplaySide()])
    assert found.report.refusals == []
    assert replay.detail["tok_s"] == pytest.approx(2 * 3 / replay.us * 1e6)


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5", "kimi_linear"])
def test_a_side_that_is_wrong_gets_no_row(family: str) -> None:
    """One forgets the state, as a kernel would that reads an empty slot; one has no state part at all."""

    class Forgetting(ReplaySide):
        name = "forgetting"

        def take(self, case: StepCase, sequences: Sequences) -> None:
            advance = sequences.verify

            def verify(ordinal: int, inputs: Mapping[str, Tensor]) -> Tensor:
                for layer in sequences.pool.layers:
                    layer.tensors["checkpoint"].zero_()
                    layer.tensors[f"ring.{layer.layout.ring_fields[0].name}"].zero_()
                return advance(ordinal, inputs)

            replace_verify(sequences, verify)

    class Nothing(Neighbours):
        what, name = "model replay", "nothing"

    # a subclass of the neighbours would not be checked
    nothing = type(
        "Side", (), {n: getattr(Nothing, n) for n in ("what", "name", "version", "fused", "config", "take")}
    )()
    found = bench(family)
    rows = found.measure(StepCase("toy", 2, 65), [Forgetting(), nothing])
    assert [row.what for row in rows] == ["model neighbours"]
    assert [refusal.name for refusal in found.report.refusals] == ["forgetting", "nothing"]
    assert all("outputs differ by" in refusal.reason for refusal in found.report.refusals)


@pytest.mark.parametrize("name", ["nemotron3-super-120b", "qwen3.5-122b-a10b", "kimi-linear-48b-a3b"])
def test_fewer_layers_keep_the_ratio(name: str) -> None:
    from replayssm.planner.model import config_of, sizes_of

    period = {"nemotron3-super-120b": 11, "qwen3.5-122b-a10b": 4, "kimi-linear-48b-a3b": 4}[name]
    fields = known_configs()[name]
    whole, part = sizes_of(name, config_of(fields)), sizes_of(name, config_of(fewer_layers(fields, period)))
    assert part.layers == period
    assert part.recurrent[0][:2] == whole.recurrent[0][:2]
    assert part.recurrent_layers / part.attention_layers == pytest.approx(
        whole.recurrent_layers / whole.attention_layers, rel=0.1
    )


def test_fewer_layers_than_there_are() -> None:
    """A configuration without a list of its layers would otherwise grow, and one of several parts stay as it is."""
    text = {"num_hidden_layers": 8, "layer_types": list("abcdefgh")}
    assert fewer_layers({"text_config": text}, 3)["text_config"] == {"num_hidden_layers": 3, "layer_types": list("abc")}
    for fields in (text, {"num_hidden_layers": 8}, {"text_config": text}):
        for layers in (0, -1, 9):
            with pytest.raises(ValueError, match=rf"layers must be in 1\.\.8, got {layers}"):
                fewer_layers(fields, layers)


@pytest.mark.skipif(not (PEERS / "vllm").is_dir(), reason="needs benchmarks/kernels/fetch_peers.py to have run")
@pytest.mark.parametrize(
    ("family", "stage", "what", "count"),
    [
        ("nemotron_h", "nano", "ordinary", 1),
        ("qwen3_5", "qwen-drafts", "snapshot", 1),
        ("kimi_linear", "kimi", "ordinary", 2),
    ],
)
def test_kernels_of_others_put_out_what_ours_do(tmp_path: Path, family: str, stage: str, what: str, count: int) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(fields_of(family)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(PEERS)])}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "bench" / "dry_run.py"), "steps", str(tmp_path)]
    command += ["--toy", str(config), "--steps", "2", "--stage", stage]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = Report.load(tmp_path / f"steps-{stage}.json").rows
    peers = [row for row in rows if row.what == f"model {what}" and not row.name.startswith("replay")]
    assert len(peers) == count
    assert all(row.y_error is not None and row.y_error < 0.1 for row in peers)


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", "step", *words])


def test_the_command(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(fields_of("qwen3_5")))
    out = tmp_path / "steps.json"
    words = [str(config), "--device", "cpu", "-b", "2", "--context", "64", "--steps", "4", "--window", "4"]
    page = tmp_path / "steps.html"
    shown = run(*words, "--format", "fp32", "--format", "fp32+bf16", "--json", str(out), "--report", str(page))
    assert shown.exit_code == 0, shown.output
    assert "no state part" in shown.output
    report = Report.load(out)
    assert [row.format for row in report.rows if row.what == "model replay"] == ["fp32", "fp32+bf16"]
    assert "fp32+bf16 W=4: replay" in page.read_text()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("qwen3.5-4b",), "needs a CUDA GPU"),
        (("nothing-7b", "--device", "cpu"), "no model is called that"),
        (("qwen3.5-4b", "--device", "tpu"), 'device must be "cuda" or "cpu"'),
        (("qwen3.5-4b", "--verify-len", "4", "--window", "2"), "verify_len 4 is larger than window 2"),
        (("qwen3.5-4b", "--steps", "0"), "steps must be at least 1, got 0"),
        (("qwen3.5-4b", "--device", "cpu", "--layers", "3"), "none of the first 3 layers of qwen3.5-4b is one of"),
        (("qwen3.5-4b", "--device", "cpu", "--layers", "0"), "layers must be in 1..32, got 0"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the first is for machines without a GPU")
def test_a_wrong_request_is_one_sentence(words: tuple[str, ...], reason: str) -> None:
    shown = run(*words)
    assert shown.exit_code == 2
    assert reason in shown.stderr and shown.stderr.count("\n") == 1
