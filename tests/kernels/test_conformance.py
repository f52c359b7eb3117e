"""Every kernel against the torch back end, on small shapes: interpreted without a GPU, compiled with one."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from replayssm import flow
from replayssm.kernels import launch
from replayssm.kernels.formats import PAIR_SUM_ERROR
from replayssm.kernels.launch import Choice, Tile
from replayssm.recurrences import Geometry

from .harness import DEVICE, SINGLE, SPLIT, Case, Twins, run

RECURRENCES = ("mamba2", "gdn", "kda")
GROUP = Geometry(heads=4, key_heads=2, key_dim=16, value_dim=32)
LARGE = Geometry(heads=2, key_heads=1, key_dim=96, value_dim=80)
SHARED = Choice(Tile(16, units=4, num_stages=2), Tile(32, units=2, num_warps=2))
ONE_BY_ONE = Choice(Tile(16), form="recurrent")
MANY = (-1, 3, 0, -1, 4, 1, -1)


def cases() -> list[Case]:
    found = []
    for name in RECURRENCES:
        plain = Case(name)
        found += [
            replace(plain, rows=MANY),
            replace(plain, choice=ONE_BY_ONE, rows=MANY),
            replace(plain, choice=ONE_BY_ONE, verify_len=3, checkpoint_format="fp16", model_dtype="fp16", window=3),
            replace(plain, choice=ONE_BY_ONE, geometry=GROUP, window=1, model_dtype="fp32", paged=True),
            replace(plain, choice=SPLIT, model_dtype="fp16"),
            replace(plain, choice=SHARED, geometry=GROUP, window=4),
            replace(plain, verify_len=4),
            replace(plain, verify_len=4, choice=SPLIT, paged=True),
            replace(plain, verify_len=4, choice=SPLIT, geometry=GROUP, steps=3),  # tokens in rows
            replace(plain, verify_len=3, geometry=GROUP, choice=SHARED, model_dtype="fp32", steps=3),
            replace(plain, model_dtype="fp32", window=1),
            replace(plain, window=1),
            replace(plain, window=20, steps=3),
            replace(plain, checkpoint_format="fp16", window=2, model_dtype="fp16"),
            replace(plain, checkpoint_format="bf16", window=2, choice=SPLIT, paged=True),
            replace(plain, geometry=Geometry(1, 1, 96, 80), rows=(0, 3), window=2, steps=3),
            replace(plain, checkpoint_format="fp16", window=2, rounding="stochastic", model_dtype="fp16"),
            replace(plain, checkpoint_format="bf16", window=1, rounding="stochastic", choice=ONE_BY_ONE, paged=True),
            replace(plain, verify_len=5, trees=True),
            replace(plain, verify_len=2, window=2, choice=SPLIT, checkpoint_format="fp16", model_dtype="fp16"),
            replace(plain, verify_len=3, window=3, choice=SPLIT, checkpoint_format="fp16", rounding="stochastic"),
            replace(plain, verify_len=9, window=9, choice=SPLIT, checkpoint_format="bf16", geometry=LARGE, steps=3),
            replace(plain, verify_len=6, window=9, trees=True, geometry=GROUP, choice=SPLIT, paged=True, steps=3),
            replace(plain, verify_len=16, window=16, trees=True, model_dtype="fp32", steps=3, choice=SPLIT),
        ]
        if name != "kda":  # decays of channels have no such form
            alone = replace(plain, choice=SINGLE)
            found += [
                replace(alone, rows=MANY, steps=7),
                replace(alone, geometry=GROUP, window=1, model_dtype="fp32", paged=True),
                replace(alone, geometry=LARGE, window=2, model_dtype="fp16", rows=(0, 3)),
                replace(alone, checkpoint_format="fp16", window=2, model_dtype="fp16"),
                replace(alone, checkpoint_format="bf16", window=2, rounding="stochastic", paged=True),
                replace(alone, window=20, steps=3),
            ]
    return found


WORDS = Geometry(heads=4, key_heads=2, key_dim=64, value_dim=24)
BESIDE = Choice(Tile(16, units=2), Tile(16, units=2, num_warps=2, num_stages=2))


def codes() -> list[Case]:
    """Read copies and fp8 checkpoints: every format, drafts, dtypes and windows."""
    found = []
    for name in RECURRENCES:
        plain = Case(name, geometry=WORDS, choice=SPLIT, read_format="nvfp4")
        found += [
            replace(plain, rows=MANY, steps=7),
            replace(plain, read_format="fp8", rows=MANY, choice=BESIDE, paged=True),
            replace(plain, read_format="int8", window=2),
            replace(plain, verify_len=4, choice=BESIDE, steps=6),
            replace(plain, verify_len=3, read_format="fp8", model_dtype="fp32"),
            replace(plain, verify_len=2, read_format="int8", model_dtype="fp16", checkpoint_format="fp16"),
            replace(plain, window=20, model_dtype="fp32", steps=3),
            replace(plain, verify_len=5, window=8, trees=True),
            replace(plain, checkpoint_format="fp8", window=2, paged=True),
            replace(plain, checkpoint_format="fp8", read_format=None, window=2, choice=BESIDE),
            replace(plain, checkpoint_format="fp8", read_format=None, verify_len=3, steps=3),
            replace(plain, checkpoint_format="fp8", window=2, rounding="stochastic"),
        ]
    return found


@pytest.mark.parametrize("case", [*cases(), *codes()], ids=str)
def test_kernels_agree_with_torch(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("read_format", ["nvfp4", "fp8", "int8"])
@pytest.mark.parametrize("name", ["mamba2", "gdn"])
def test_copies_read_as_pairs_agree_with_torch(name: str, read_format: str, interpreted_pairs: None) -> None:
    case = Case(name, geometry=WORDS, choice=BESIDE, read_format=read_format, rows=MANY, steps=7)
    assert case.output_tolerance > PAIR_SUM_ERROR, "pairs are not used"
    run(case)


@pytest.mark.parametrize("read_format", ["nvfp4", "fp8", "int8"])
@pytest.mark.parametrize("name", RECURRENCES)
def test_drafts_read_copies_as_tiles(name: str, read_format: str, interpreted_pairs: None) -> None:
    run(Case(name, geometry=WORDS, choice=BESIDE, read_format=read_format, verify_len=4, steps=4))


@pytest.mark.parametrize(("name", "read_format"), [("mamba2", None), ("gdn", "nvfp4"), ("kda", None)])
def test_few_programs_share_the_folds_of_several_rows(
    name: str, read_format: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer programs than units: what one folds at a time ends in the middle of a row, and it goes around again."""
    monkeypatch.setattr(launch, "flush_warps", lambda layout, tokens: 1)
    monkeypatch.setattr(launch, "processors", lambda device: 5)
    geometry = Geometry(heads=4, key_heads=2, key_dim=64, value_dim=48)
    run(Case(name, geometry, 1, read_format=read_format, choice=Choice(Tile(16), Tile(16, 4)), rows=(3, 0, 1)))


@pytest.mark.parametrize("name", RECURRENCES)
def test_what_suits_chains_only_is_not_used_for_trees(name: str) -> None:
    """The form that goes from token to token, and the window of 1 that belongs to it."""
    twins = Twins(Case(name, verify_len=3, choice=ONE_BY_ONE, rows=(3, 0)))
    with patch("replayssm.kernels.ops.window_in_force", lambda *_: 1):
        for _ in range(3):
            twins.step([3, 3], [3, 2], parents=[[-1, 0, 0], [-1, -1, 0]])
    assert int(twins.pools["triton"].cursor.length[3]) > 1
    twins.compare_states()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a chain's code is the same there")
@pytest.mark.parametrize("name", RECURRENCES)
def test_a_chain_said_as_a_tree_changes_no_bit(name: str) -> None:
    chains = Twins(Case(name, verify_len=4, rows=(3, 0)), seed=2)
    trees = Twins(Case(name, verify_len=4, rows=(3, 0)), seed=2)
    for _ in range(3):
        ours = trees.step([4, 2], [3, 2], parents=[[-1, 0, 1, 2]] * 2)["triton"]
        assert torch.equal(ours, chains.step([4, 2], [3, 2])["triton"])


def test_only_padded_rows() -> None:
    """Nothing is read and nothing written but zeros in the outputs."""
    for choice in (Case("gdn").choice, SPLIT):
        twins = Twins(Case("gdn", rows=(-1, -1), choice=choice))
        before = twins.untouched()
        out = twins.step([1, 1], [0, 0])["triton"]
        assert not out.any()
        after = twins.untouched()
        assert all((after[name] == value).all() for name, value in before.items())


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the order of interpreted programs is what is tested")
def test_row_order_and_padding_change_no_bit() -> None:
    """Each row's numbers depend on nothing but the row."""

    def outputs(rows: tuple[int, ...]) -> dict[int, torch.Tensor]:
        twins = Twins(Case("gdn", rows=(0, 3, 1)))
        inputs, _ = twins._draw(1)
        order = [(0, 3, 1).index(slot) if slot >= 0 else 0 for slot in rows]
        pool = twins.pools["triton"]
        found: dict[int, torch.Tensor] = {}
        for _ in range(2):
            with flow.step(pool, rows) as step:
                y = flow.verify(pool, 0, step, {name: x[order] for name, x in inputs.items()})
            flow.commit(pool, rows, [int(slot >= 0) for slot in rows])
            found |= {slot: y[i] for i, slot in enumerate(rows) if slot >= 0}
        return found

    first, second = outputs((0, 3, 1)), outputs((-1, 1, 0, -1, 3))
    assert all(torch.equal(first[slot], second[slot]) for slot in first)
