"""Choosing tiles: tables, rules, and the tuner that makes tables."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from replayssm import ReplayConfig
from replayssm.bench import tune, tune_cli
from replayssm.bench.timing import WallTimer
from replayssm.kernels import ops, tuned
from replayssm.kernels.launch import Choice, Tile
from replayssm.recurrences import Geometry, get
from replayssm.state.layout import StateLayout, number_of

from .harness import DEVICE, Case, Twins

GPU = "Some GPU 9000"
LAYOUT = StateLayout(get("gdn"), Geometry(64, 16, 128, 128), ReplayConfig(16, 4), torch.bfloat16)
SPLIT = Choice(Tile(32, 4, 1), Tile(16, 4, 2))


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty table of a GPU in a folder of its own."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuned.table.cache_clear()
    tuned.decide.cache_clear()
    yield tuned.path_of(GPU)
    tuned.table.cache_clear()
    tuned.decide.cache_clear()


def measured(batch: int, tokens: int, choice: Choice, window: int = 16, in_force: int = 16) -> tuned.Measured:
    return tuned.Measured(tuned.Shape.of(LAYOUT), batch, tokens, window, choice, 12.5, in_force)


def test_the_nearest_row_is_taken(table: Path) -> None:
    small, large, drafts = Choice(Tile(16)), SPLIT, Choice(Tile(8))
    tuned.save(
        table, (measured(1, 1, small, in_force=1), measured(256, 1, large), measured(8, 4, drafts)), {"gpu": GPU}
    )
    assert table.name == "some-gpu-9000.json"
    near = tuned.decide(LAYOUT, 2, 1, GPU)
    assert near.choice == small and near.window_in_force == 1
    far = tuned.decide(LAYOUT, 512, 1, GPU)
    assert far.choice == large and far.us == 12.5 and "batch 256, 1 tokens, window 16" in far.reason
    assert tuned.decide(LAYOUT, 256, 3, GPU).choice == drafts
    assert "because it was the fastest measured on Some GPU 9000" in str(far)


def test_rows_measured_again_are_replaced(table: Path) -> None:
    tuned.save(table, (measured(1, 1, SPLIT), measured(8, 1, SPLIT)), {})
    tuned.save(table, (measured(1, 1, Choice(Tile(16))),), {})
    assert {row.batch: row.choice.flush for row in tuned.load(table)} == {1: None, 8: SPLIT.flush}


def test_a_rule_where_nothing_was_measured(table: Path) -> None:
    tuned.save(table, (measured(1, 1, SPLIT),), {})
    other = replace(LAYOUT, geometry=Geometry(32, 16, 128, 128))
    assert "has no row of this shape" in tuned.decide(other, 1, 1, GPU).reason
    assert tuned.decide(other, 1, 1, None).choice.form == "single"
    assert tuned.decide(other, 1, 1, GPU).window_in_force == other.config.window
    assert tuned.decide(other, 256, 1, None).choice.form == "prepared"
    channels = replace(other, recurrence=get("kda"), geometry=Geometry(32, 32, 128, 128))
    assert tuned.decide(channels, 1, 1, None).choice.form == "recurrent"
    assert tuned.decide(channels, 1, 1, GPU).window_in_force == 1
    replayed = tuned.decide(channels, 16, 1, GPU)
    assert replayed.choice.flush is not None and replayed.window_in_force == channels.config.window


def test_a_longer_ring_takes_more_warps_where_a_launch_holds_all_of_it(table: Path) -> None:
    alone = Choice(Tile(32), form="single")
    tuned.save(table, (measured(1, 1, alone),), {})
    layout = replace(LAYOUT, config=ReplayConfig(16))
    assert tuned.decide(layout, 1, 1, GPU).choice == alone
    longer = tuned.decide(replace(LAYOUT, config=ReplayConfig(33)), 1, 1, GPU)
    assert longer.choice == Choice(Tile(32, num_warps=4), form="single")
    assert "more warps" in longer.reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"form": "singel"}, "there are prepared, single, recurrent"),
        ({"form": "single", "flush": Tile(16)}, "does all of it"),
        ({"form": "recurrent", "step": Tile(16, units=2)}, "does all of it"),
    ],
)
def test_choices_that_mean_nothing_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Choice(**{"step": Tile(16), **fields})


def test_a_form_that_a_step_does_not_have_is_refused() -> None:
    for case in (Case("kda"), Case("gdn", verify_len=2)):
        twins = Twins(replace(case, choice=Choice(Tile(16), form="single")))
        with pytest.raises(ValueError, match="no single launch"):
            twins.step([1] * 4, [1] * 4)


def test_another_file_is_refused(table: Path) -> None:
    table.write_text('{"format": "something else"}')
    with pytest.raises(ValueError, match="no table of tuned kernels"):
        tuned.load(table)


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
@pytest.mark.parametrize("sizes", [(6, 3, 96, 80), (8, 2, 24, 20), (1, 1, 256, 64), (128, 8, 128, 64), (4, 4, 16, 8)])
def test_rules_and_candidates_fit_every_geometry(name: str, sizes: tuple[int, int, int, int]) -> None:
    heads, key_heads, key_dim, value_dim = sizes
    geometry = Geometry(heads, heads if name == "kda" else key_heads, key_dim, value_dim)
    for tokens, precision in product((1, 4, 16), ("fp32", "fp32+fp8", "fp8")):
        config = ReplayConfig.of(precision, window=16, verify_len=tokens)
        layout = StateLayout(get(name), geometry, config, torch.bfloat16)
        choices = [tuned.heuristic(layout, batch, tokens)[0] for batch in (1, 64, 4096)]
        for choice in [*choices, *tune.candidates_for(layout, tokens)]:
            assert all(tune._fits(layout, tile) for tile in (choice.step, choice.flush) if tile)
            assert precision == "fp32" or choice.flush, "the launcher refuses it where steps read codes"


def test_the_tuner_times_only_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = StateLayout(get("mamba2"), Geometry(1, 1, 16, 8), ReplayConfig(window=2), torch.bfloat16)
    wrong, right = Choice(Tile(8)), Choice(Tile(16))
    stock = tune.launch_verify

    def launch(layer, plan, inputs, y, choice, *memory):  # type: ignore[no-untyped-def]
        stock(layer, plan, inputs, y, choice, *memory)
        if choice == wrong:
            y[0] += 0.01

    monkeypatch.setattr(tune, "launch_verify", launch)
    said: list[str] = []
    rows = tune.tune(layout, [2], 1, DEVICE, candidates=[wrong, right], timer=WallTimer(), log=said.append)
    assert [row.choice for row in rows] == [right] and rows[0].us > 0
    assert any("wrong, outputs differ by" in line for line in said)


@pytest.mark.parametrize("broken", ["", "outputs", "states", "copies"])
def test_the_tuner_checks_read_copies(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ReplayConfig(window=4, read_format="nvfp4")
    layout = StateLayout(get("gdn"), Geometry(1, 1, 64, 16), config, torch.bfloat16)
    stock = tune.launch_verify

    def launch(layer, plan, inputs, y, *others):  # type: ignore[no-untyped-def]
        stock(layer, plan, inputs, y, *others)
        if broken == "outputs":
            y[0] *= 1.01
        elif broken:
            layer.tensors["checkpoint" if broken == "states" else "read_copy.column_scale"] *= 1.02

    monkeypatch.setattr(tune, "launch_verify", launch)
    choice = tuned.heuristic(layout, 2, 1)[0]
    found = tune.check(layout, 1, choice, DEVICE).wrong(layout)
    assert broken in found and (found == "") == (broken == "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_the_command_needs_a_gpu() -> None:
    result = CliRunner().invoke(tune_cli.app, ["qwen3.5-122b-a10b"])
    assert result.exit_code == 2 and "tune needs a CUDA GPU" in result.output


def test_a_larger_window_than_the_measured_one_stays_in_force(table: Path) -> None:
    tuned.save(table, (measured(64, 1, SPLIT),), {})
    wide = replace(LAYOUT, config=replace(LAYOUT.config, window=32))
    assert tuned.decide(wide, 64, 1, GPU).window_in_force == 32
    tuned.save(table, (replace(measured(64, 1, SPLIT), window_in_force=1),), {})
    assert tuned.decide(wide, 64, 1, GPU).window_in_force == 1


def test_an_empty_batch_needs_no_decision(table: Path) -> None:
    tuned.save(table, (measured(64, 1, SPLIT),), {})
    assert ops.window_in_force([number_of(LAYOUT)], 0, 1) == LAYOUT.config.window


def test_a_tile_that_leaves_units_out_is_refused() -> None:
    twins = Twins(Case("gdn", choice=Choice(Tile(16, units=3))))
    with pytest.raises(ValueError, match="does not divide the 2 units of a row"):
        twins.step([1, 1, 1, 1], [1, 1, 1, 1])
