"""Predictions against measured rows, sizes against real models, and the command."""

from __future__ import annotations

import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from replayssm.bench.geometries import find
from replayssm.bench.predictions import LIMIT, differences, step_differences, summary
from replayssm.bench.rows import Report
from replayssm.cli.app import app
from replayssm.config import ReplayConfig
from replayssm.planner.gpus import H200, Fit
from replayssm.planner.model import config_of, fewer_layers, known_configs, read_fields, sizes_of
from replayssm.planner.step import MEASURED, Workload, plan
from replayssm.state.layout import StateLayout
from replayssm.state.pool import LayerState, StatePool

from ..attach import models
from ..attach.helpers import cache_name

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KNOWN = known_configs()

OUTSIDE = {
    # at batch 8 a flush has too few programs to keep all multiprocessors busy, each of which folds one window after the
    # other: it waits for latency and not for bytes. Its mean over the window is predicted
    "qwen3.5-122b-a10b B=8 fp32 replay flush",
    "qwen3.5-122b-a10b B=8 bf16 replay flush",
    "nemotron3-super-120b B=8 fp32+fp8 replay flush",
    "nemotron3-super-120b B=8 fp32+nvfp4 replay flush",
    "nemotron3-super-120b B=8 fp32+nvfp4 replay step",
    # a fold beside a copy takes as long for two rows as for many
    "qwen3.5-122b-a10b B=8 fp32+nvfp4 replay staggered",
    # its tiles are for other batches
    "nemotron3-super-120b B=64 fp32+fp8 replay flush",
    # one launch waits once, and Mamba-2's needs less than others to compute its weights in it
    "nemotron3-super-120b B=8 fp32 replay step",
    # from before that launch, with tiles for other batches
    "qwen3.5-122b-a10b B=8 bf16 replay cycle",
    "qwen3.5-122b-a10b B=1 bf16 replay flush",
    # few rows with drafts are launches that wait for one another and little else. A flush, whose outputs need no ring
    # rows, waits less than the steps whose launches it is charged with, and the tiles of batch 1 (of batch 64) wait
    # longer than those of batch 8 (its own)
    "nemotron3-super-120b B=1 fp32 replay flush T=4 a=3",
    "nemotron3-super-120b B=1 fp32 replay flush T=8 a=5",
    "nemotron3-super-120b B=1 fp32 replay step T=8 a=5",
    "nemotron3-super-120b B=1 fp32 replay tree T=8 a=5",
    "nemotron3-super-120b B=8 fp32 replay step T=4 a=3",
    "nemotron3-super-120b B=8 fp32 replay tree T=4 a=3",
    "nemotron3-super-120b B=8 fp32 replay staggered T=4 a=3",
    "qwen3.5-122b-a10b B=1 fp32 replay flush T=4 a=3",
    "qwen3.5-122b-a10b B=1 fp32 replay flush T=8 a=5",
    # with drafts and a window of 64 the tiles do not fit into registers
    "nemotron3-super-120b B=64 fp32 replay cycle W=64 T=4 a=3",
    "nemotron3-super-120b B=64 fp32 replay flush W=64 T=4 a=3",
    "nemotron3-super-120b B=64 fp32 replay staggered W=64 T=4 a=3",
    "nemotron3-super-120b B=256 fp32 replay cycle W=64 T=4 a=3",
    "nemotron3-super-120b B=256 fp32 replay flush W=64 T=4 a=3",
    "qwen3.5-122b-a10b B=256 fp32 replay staggered W=64 T=4 a=3",
    # this kernel of others takes one token after the other; with one row, that is latency
    "qwen3.5-122b-a10b B=1 fp32 snapshot step T=4 a=3",
    "qwen3.5-122b-a10b B=1 fp32 snapshot step T=8 a=5",
}


def measured(fit: Fit) -> list[Report]:
    return [Report.load(BENCHMARKS / source) for source in fit.sources]


def test_the_prediction_is_within_15_percent_of_every_measured_layer() -> None:
    found = differences(H200.kernels, measured(H200.fit))
    assert len(found) > 200
    outside = {row.label: row.relative for row in found if abs(row.relative) > LIMIT}
    assert set(outside) == OUTSIDE, outside
    assert summary(found, H200.fit.sources) == H200.fit


def test_the_prediction_is_within_15_percent_of_every_measured_step() -> None:
    found = step_differences(H200, measured(H200.step_fit))
    assert {row.label: row.relative for row in found if abs(row.relative) > LIMIT} == {}
    assert summary(found, H200.step_fit.sources) == H200.step_fit
    rows = [row for report in measured(H200.step_fit) for row in report.rows]
    assert len(found) == len(rows) > 8


NOT_COMPARED = {
    "kernels/results/2026-11-30-h200-first.json",  # kernels that are no longer there
    "kernels/results/2026-11-30-h200-verify.json",  # all of its cases were measured again
    "kernels/results/2026-11-30-h200-reads-before.json",  # the same
    "steps/results/2026-11-30-h200-nano-before.json",  # the same
    "kernels/results/2026-11-30-h200-columns.json",  # a form of several tokens that is used for other states
    "kernels/results/2026-11-30-h200-sketches.json",  # parts of kernels
    "kernels/results/2026-11-30-h200-reads-sketches.json",
    "kernels/results/2026-11-30-h200-tokens-sketches.json",
    "kernels/results/2026-12-01-h200-forms-sketches.json",
    "kernels/results/2026-12-01-h200-folds-first.json",  # an order of launches that fp32 states do not have
    "kernels/results/2026-12-01-h200-reads.json",  # flushes shared out in a way that is no longer there
    "kernels/results/2026-12-01-h200-bits16.json",
    "kernels/results/2026-12-01-h200-small.json",
    "kernels/results/2026-12-01-h200-others.json",
    "kernels/results/2026-12-01-h200-one-launch-sketches.json",
}


def test_every_result_is_compared() -> None:
    found = {
        str(path.relative_to(BENCHMARKS))
        for part in ("kernels", "steps")
        for path in BENCHMARKS.glob(f"{part}/results/*.json")
    }
    assert found == {*H200.fit.sources, *H200.step_fit.sources} | NOT_COMPARED


def test_complete_steps_are_compared_with_what_was_planned() -> None:
    """A row that says what the plan says, and one that took twice as long."""
    (report, *_), name = measured(H200.fit), "nemotron3-super-120b"
    fields = fewer_layers(KNOWN[name], 11)
    planned = plan(sizes_of(name, config_of(fields)), H200, "fp32", Workload(64, 2048), window=16)
    row = replace(report.rows[0], geometry=name, batch=64, view="model", detail={"layers": 11.0, "context": 2048.0})
    rows = [
        replace(row, what="model replay", us=planned.time.total, window=16),
        replace(row, what="model ordinary", us=2 * planned.ordinary_time.total),
        replace(row, what="model neighbours", us=planned.time.total - planned.time.state),
        replace(row, what="model ordinary", geometry="a model that is not known"),
    ]
    found = step_differences(H200, [Report(report.conditions, None, rows)])
    assert [row.relative for row in found] == [pytest.approx(0), pytest.approx(-0.5), pytest.approx(0)]


def test_what_was_measured_is_said() -> None:
    rows = [row for report in measured(H200.fit) for row in report.rows if row.what == "replay"]
    assert {(row.format, row.verify_len, row.window) for row in rows} == MEASURED


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_model_is_the_one_that_its_geometry_says(name: str) -> None:
    sizes, listed = sizes_of(name, config_of(read_fields(name))), find(name)
    assert sizes.recurrent == ((listed.replayed, listed.geometry, listed.layers),)
    billions = re.search(r"-(\d+(?:\.\d+)?)b", name)
    if billions is not None:
        assert sizes.parameters / 1e9 == pytest.approx(float(billions[1]), rel=0.1)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_sizes_are_those_of_the_model(family: str) -> None:
    model = models.build(family)
    sizes = sizes_of(family, model.config)
    language = [p for name, p in model.named_parameters() if "visual" not in name]
    assert sizes.parameters == sum(p.numel() for p in language)
    assert sizes.layers == model.config.get_text_config(decoder=True).num_hidden_layers
    cache = model(torch.full((1, 48), 5), use_cache=True)[cache_name(model)]
    if sizes.attention_layers and "kv_lora_rank" in model.config.get_text_config(decoder=True).to_dict():
        values = next(layer.values for layer in cache.layers if _elements(layer))
        if values.numel() > 0:
            pytest.skip("here transformers keeps the keys and values of every head, not their latent vector")
    kept = {_elements(layer) for layer in cache.layers} - {0}
    assert kept == ({48 * sizes.kv_elements} if sizes.attention_layers else set())


def _elements(layer: Any) -> int:
    held = (getattr(layer, name, None) for name in ("keys", "values", "indexer_keys"))
    return sum(tensor.numel() for tensor in held if isinstance(tensor, torch.Tensor))


def test_memory_and_time_follow_from_the_layout() -> None:
    sizes = sizes_of("nemotron3-nano-4b", config_of(read_fields("nemotron3-nano-4b")))
    found = plan(sizes, H200, "fp32", Workload(256, 1024), window=16)
    state = 21 * 96 * 128 * 80 * 4
    assert found.memory.checkpoint == found.ordinary_memory.checkpoint == state
    assert found.memory.kv_per_token == 4 * 2 * 8 * 128 * 2
    assert found.memory.sequence > found.ordinary_memory.sequence
    assert found.is_measured
    assert 1 < found.gain < found.state_gain < 2
    drafts = plan(sizes, H200, "fp32", Workload(256, 1024, 4, 3), window=16)
    assert drafts.ordinary_memory.checkpoint == 4 * state  # a snapshot per token
    assert drafts.memory.fit > 2 * drafts.ordinary_memory.fit
    copied = plan(sizes, H200, "fp32+fp8", Workload(256, 1024), window=16)
    assert copied.memory.read_copy > 0 and copied.time.state < found.time.state
    assert not copied.is_measured  # with this window


MEMORY = json.loads((BENCHMARKS / "speculation" / "results" / "memory.json").read_text())


@pytest.mark.parametrize("row", MEMORY["rows"], ids=lambda row: f"{row['model']}-{row['verify_len']}")
def test_the_table_of_memory_is_that_of_a_pool(row: dict[str, Any]) -> None:
    model, tokens = find(row["model"]), row["verify_len"]
    config = ReplayConfig(window=MEMORY["conditions"]["window"], verify_len=tokens)
    layout = StateLayout(model.replayed, model.geometry, config, torch.bfloat16)
    params = {field.name: torch.zeros(field.shape(model.geometry)) for field in model.replayed.params}
    pool = StatePool([LayerState.allocate(layout, 1, "cpu", params)])
    tensors = [(name, tensor.nbytes) for layer in pool.layers for name, tensor in layer.tensors.items()]
    assert sum(size for _, size in tensors) * row["recurrent_layers"] == sum(row["replay_bytes"].values())
    states = sum(size for name, size in tensors if name == "checkpoint")
    assert tokens * states * row["recurrent_layers"] == row["snapshot_bytes"]["states"]
    assert row["recurrent_layers"] == model.layers
    assert row["fit"]["replay"] > row["fit"]["snapshots"] > 0


def test_the_table_of_memory_is_current(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["memory.py"])
    runpy.run_path(str(BENCHMARKS / "speculation" / "memory.py"), run_name="__main__")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == MEMORY["rows"]


@pytest.mark.parametrize("batch", [64, 256])
@pytest.mark.parametrize("name", ["nemotron3-super-120b", "qwen3.5-122b-a10b"])
def test_the_window_is_the_fastest_that_was_measured(name: str, batch: int) -> None:
    """The planner and the clock choose the same one."""
    rows = [row for report in measured(H200.fit) for row in report.rows if row.what == "replay"]
    times = {
        row.window: row.us
        for row in rows
        if (row.geometry, row.batch, row.format) == (name, batch, "fp32")
        and (row.verify_len, row.accepted, row.view) == (4, 3, "staggered")
    }
    assert len(times) == 5
    sizes = sizes_of(name, config_of(read_fields(name)))
    chosen = plan(sizes, H200, "fp32", Workload(batch, 1024, 4, 3))
    assert chosen.window == min(times, key=lambda window: times[window])
    for window in times:
        assert chosen.time.total <= plan(sizes, H200, "fp32", Workload(batch, 1024, 4, 3), window).time.total


def test_a_window_that_was_not_measured_is_said_to_be() -> None:
    sizes = sizes_of("qwen3.5-4b", config_of(read_fields("qwen3.5-4b")))
    single = plan(sizes, H200, "fp32", Workload(64, 1024))
    assert (single.window, single.is_measured) == (16, True)
    drafts = plan(sizes, H200, "fp32+nvfp4", Workload(64, 1024, 4, 3))
    assert not drafts.is_measured
    for window in (8, 16, 64):
        assert drafts.time.total <= plan(sizes, H200, "fp32+nvfp4", Workload(64, 1024, 4, 3), window).time.total


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words])


def test_the_command_prints_tables_and_json(tmp_path: Path) -> None:
    shown = run("qwen3.5-4b", "-b", "8")
    assert shown.exit_code == 0
    assert shown.stdout.count("differ from the prediction") == 2
    file = tmp_path / "config.json"
    file.write_text(json.dumps(KNOWN["qwen3.5-4b"]))
    for model in (file, tmp_path):
        data = json.loads(run(str(model), "-b", "8", "-p", "fp32", "--verify-len", "1", "--json").stdout)
        assert [p["batch"] for p in data["plans"]] == [8]
        assert tuple(data["gpu"]["step_fit"]["sources"]) == H200.step_fit.sources


def test_the_first_layers_fit_where_all_do_not() -> None:
    name, words = "qwen3.5-122b-a10b", ("-b", "1", "-p", "fp32", "--json")
    whole, part = (json.loads(run(name, *words, *more).stdout) for more in ((), ("--layers", "8")))
    assert [len(data["plans"]) for data in (whole, part)] == [2, 2]
    assert all(p["memory_bytes"]["fit"] == 0 for p in whole["plans"])
    assert all(p["memory_bytes"]["fit"] > 0 for p in part["plans"])
    assert "do not fit on one h200" in run(name, *words[:-1]).stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("nothing-7b",), "no model is called that"),
        (("qwen3.5-4b", "--gpu", "tpu"), "no GPU is called 'tpu'"),
        (("qwen3.5-4b", "-p", "fp7"), "checkpoint_format must be one of"),
        (("qwen3.5-4b", "--accepted", "5"), "accepted must be in 1..verify_len"),
        (("qwen3.5-4b", "--window", "2"), "verify_len 4 is larger than window 2"),
        (("qwen3.5-4b", "-b", "0"), "batch must be at least 1, got 0"),
    ],
)
def test_a_wrong_request_is_one_sentence(words: tuple[str, ...], reason: str) -> None:
    shown = run(*words)
    assert shown.exit_code == 2
    assert shown.stderr.startswith("Error: ") and reason in shown.stderr and shown.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "is no JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "has no model_type"),
        ('{"model_type": "qwen3_5_text", "hidden_size": "64"}', "'hidden_size' expected int, got str"),
        ('{"model_type": "unheard"}', "transformers does not take"),
        ('{"model_type": "llama", "num_hidden_layers": 1}', "no recurrent layer that can be replayed"),
    ],
)
def test_a_wrong_config_is_one_sentence(tmp_path: Path, config: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(config)
    shown = run(str(tmp_path))
    assert shown.exit_code == 2
    assert reason in shown.stderr and shown.stderr.count("\n") == 1
