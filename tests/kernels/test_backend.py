"""Which back end a pool gets, what it says about it, and what it refuses."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from replayssm import ReplayConfig
from replayssm.recurrences import Geometry, get
from replayssm.state import backend as backends
from replayssm.state.layout import StateLayout
from replayssm.state.pool import LayerState, StatePool

from .harness import DEVICE

GEOMETRY = Geometry(2, 1, 8, 4)


def layer(
    geometry: Geometry = GEOMETRY, model_dtype: torch.dtype = torch.bfloat16, name: str = "gdn", **options: object
) -> LayerState:
    layout = StateLayout(get(name), geometry, ReplayConfig(**options), model_dtype)
    return LayerState.allocate(layout, 2, DEVICE)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (lambda: layer(checkpoint_format="fp64"), "keep checkpoints in fp32, fp16, bf16, fp8, not in fp64"),
        (lambda: layer(model_dtype=torch.float64), "fp32, fp16 and bf16 activations, not torch.float64"),
        (lambda: layer(read_format="bf16"), "read copies in fp8, int8, nvfp4, and read_format is bf16"),
        (lambda: layer(GEOMETRY, read_format="fp8"), f"key_dim is 64, 128 or 256, and it is {GEOMETRY.key_dim}"),
        (lambda: layer(checkpoint_format="fp8"), f"codes of states whose key_dim is 64, 128 or 256, and it is {8}"),
        (lambda: layer(replace(GEOMETRY, key_dim=257)), "at most 256 rows of a state, and key_dim is 257"),
        (lambda: turned(layer()), "'checkpoint' must be contiguous within a slot"),
    ],
)
def test_a_named_back_end_works_or_says_why_not(state: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        StatePool([state()], backend="triton")
    assert StatePool([state()], backend="auto").backend == "torch"
    assert StatePool([state()], backend="torch").backend == "torch"


def turned(state: LayerState) -> LayerState:
    """The layer with its checkpoint stored the other way round."""
    checkpoint = state.tensors["checkpoint"].transpose(2, 3).contiguous().transpose(2, 3)
    return LayerState.of(state.layout, {**state.tensors, "checkpoint": checkpoint})


def test_unknown_back_end() -> None:
    with pytest.raises(ValueError, match='must be "auto", "torch" or "triton", got \'cuda\''):
        StatePool([layer()], backend="cuda")


def test_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "interpreting", lambda: False)
    state = LayerState.allocate(layer().layout, 2, "cpu")
    with pytest.raises(ValueError, match="the pool is on cpu and Triton compiles for CUDA devices"):
        StatePool([state], backend="triton")


@pytest.mark.parametrize(
    ("version", "sentence"), [(None, "Triton is not installed"), ("3.5.1", "Triton 3.5.1 is installed")]
)
def test_without_the_right_triton(version: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = None if version is None else backends.find_spec("triton")
    monkeypatch.setattr(backends, "find_spec", lambda name: found)
    monkeypatch.setattr(backends.metadata, "version", lambda name: version)
    backends._triton_missing.cache_clear()
    try:
        with pytest.raises(ValueError, match=rf"{sentence}.*install triton>=3.6,<3.10"):
            StatePool([layer()], backend="triton")
    finally:
        backends._triton_missing.cache_clear()


def test_the_choice_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    backends._say.cache_clear()
    with caplog.at_level(logging.INFO, logger="replayssm"):
        pools = [StatePool([layer()]) for _ in range(2)]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and said[0].startswith(f"back end {pools[0].backend}: ")


def test_a_gathered_pool_keeps_its_back_end() -> None:
    pool = StatePool([layer()], backend="triton")
    pool.acquire(0)
    assert pool.gather(torch.tensor([0, 0], device=DEVICE)).backend == "triton"


def test_a_gpu_that_gets_the_torch_back_end_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerState, "device", torch.device("cuda"))
    backends._say.cache_clear()
    with caplog.at_level(logging.INFO, logger="replayssm"):
        assert backends.choose("auto", [layer(read_format="fp16")]) == "torch"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "read_format is fp16" in record.getMessage()
