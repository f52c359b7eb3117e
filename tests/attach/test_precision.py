"""Other dtypes: of the model, of the checkpoint, and autocast."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm.state.pool import SaturationWarning

from .helpers import assert_close, attached, built, forward, generate, new_cache, prompt, sequences_of, states_of
from .models import FAMILIES, build

# Their experts flip with the last bit of the router's input, so that two exact decodings differ by 0.1 and more.
WITH_EXPERTS = {"nemotron_h", "granitemoehybrid", "qwen3_next", "qwen3_5_moe", "kimi_linear", "glm5_next"}
ONE_EACH = ("qwen3_5", "bamba", "kimi_linear")


@pytest.mark.parametrize("family", ONE_EACH)
def test_rows_are_rounded_at_random_each_in_its_own_way(family: str) -> None:
    """Equal rows get different checkpoints, the same in every run; copies of a row go on in its way."""
    model = built(family)

    def decoded() -> Any:
        held = new_cache(model)
        for i in range(7):
            forward(model, prompt(1, seed=i).expand(3, 1), held, i)
        return held

    with attached(model, window=2, checkpoint_format="bf16", rounding="stochastic", stagger=False):
        held, again = decoded(), decoded()
        for one, other in zip(states_of(held), states_of(again), strict=True):
            assert torch.equal(one, other)
            assert not any(torch.equal(one[i], one[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
        held.reorder_cache(torch.tensor([2, 0, 0]))
        sequences = sequences_of(held)
        assert sequences.pool.cursor.seed.tolist() == [2, 0, 0]
        sequences.allow_rollback()
        assert sequences.pool.cursor.seed.tolist() == [2, 0, 0]
        held.reset()
        forward(model, prompt(5, 3), held)
        assert sequences.pool.cursor.seed.tolist() == [0, 1, 2]


@cache
def rounded(family: str, dtype: torch.dtype) -> Any:
    return build(family, dtype=dtype)


def teacher_forced(model: Any, ids: Tensor) -> Tensor:
    held = new_cache(model)
    logits = [forward(model, ids[:, :9], held)]
    logits += [forward(model, ids[:, i : i + 1], held, i) for i in range(9, ids.shape[1])]
    return torch.cat(logits, 1).float().log_softmax(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bit_models(family: str, dtype: torch.dtype) -> None:
    """As far from the fp32 model as ordinary decoding in 16 bit is, or nearer."""
    model, ids = rounded(family, dtype), prompt(24)
    exact = teacher_forced(build(family, dtype=dtype).float(), ids)
    ordinary = teacher_forced(model, ids)
    with attached(model, window=4):
        found = teacher_forced(model, ids)
        generate(model, ids, 4)
    assert found.isfinite().all()
    error, allowed = (found - exact).abs().mean(), (ordinary - exact).abs().mean()
    assert error <= (3 if family in WITH_EXPERTS else 1.25) * allowed


@pytest.mark.parametrize("family", ONE_EACH)
def test_several_tokens_at_once_in_sixteen_bit(family: str) -> None:
    model, ids = rounded(family, torch.bfloat16), prompt(16)
    with attached(model, window=4, verify_len=4):
        one_by_one = teacher_forced(model, ids)
        held = new_cache(model)
        logits = [forward(model, ids[:, :9], held), forward(model, ids[:, 9:13], held, 9)]
        logits.append(forward(model, ids[:, 13:], held, 13))
        # one state, whichever way: what differs is the order in which bf16 matrix products add up
        assert_close(torch.cat(logits, 1).float().log_softmax(-1), one_by_one, 0.5)


@pytest.mark.parametrize("family", ONE_EACH)
def test_checkpoint_and_read_copy_in_fewer_bits(family: str) -> None:
    """A read copy costs accuracy of outputs but none of the state."""
    model, ids = built(family), prompt(40)
    exact = teacher_forced(model, ids)
    errors, states = {}, {}
    for name, formats in {
        "fp32": {},
        "fp64": {"checkpoint_format": "fp64"},
        "bf16 read copy": {"read_format": "bf16"},
        "bf16 checkpoint": {"checkpoint_format": "bf16"},
    }.items():
        with attached(model, window=8, **formats):
            held = new_cache(model)
            forward(model, ids[:, :9], held)
            logits = [forward(model, ids[:, i : i + 1], held, i) for i in range(9, 40)]
            errors[name] = (torch.cat(logits, 1).log_softmax(-1) - exact[:, 9:]).abs().max().item()
            states[name] = states_of(held)[0].double()
    assert errors["fp32"] < 1e-4
    assert errors["fp64"] < 1e-4
    assert 1e-4 < errors["bf16 read copy"] < 3
    assert 1e-4 < errors["bf16 checkpoint"] < 3
    # the first layer's inputs do not depend on any read copy
    difference = {name: ((s - states["fp64"]).norm() / states["fp64"].norm()).item() for name, s in states.items()}
    assert difference["bf16 read copy"] < 1e-6
    assert difference["bf16 checkpoint"] > 1e-5


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ({"checkpoint_format": "fp16"}, "checkpoint elements were clamped"),
        ({"read_format": "fp16"}, r"read copy \(fp16\) were clamped"),
    ],
    ids=["checkpoint", "read copy"],
)
def test_a_clamped_state_warns(formats: dict[str, str], message: str) -> None:
    """When the cache is gone, at the next sign of life of the model."""
    model = built("qwen3_5")
    with attached(model, window=1, **formats) as handle:
        held = new_cache(model)
        forward(model, prompt(5), held)
        pool = sequences_of(held).pool
        beyond = torch.full((1, *pool.layers[0].layout.geometry.state_shape), 1e6)
        pool.store(0, torch.tensor([0]), beyond, torch.tensor([True]), torch.tensor([5]))
        del held, pool
        with pytest.warns(SaturationWarning, match=message):
            handle.traffic()


@pytest.mark.parametrize("family", ONE_EACH)
def test_autocast_does_not_reach_the_recurrence(family: str) -> None:
    model, ids = built(family), prompt(24)
    with torch.autocast("cpu", torch.bfloat16):
        ordinary = teacher_forced(model, ids)
        with attached(model, window=4):
            found = teacher_forced(model, ids)
    exact = teacher_forced(model, ids)
    assert (found - exact).abs().mean() <= 1.5 * (ordinary - exact).abs().mean()
