"""Values beyond a format's range, with numbers that can be checked by hand: clamped, counted, and said (fault 25)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch

from replayssm import ReplayConfig, flow
from replayssm.recurrences import Geometry, get
from replayssm.state.pool import SaturationWarning, StatePool
from replayssm.state.snapshot import restore, snapshot

LIMIT = 65504.0  # of fp16


def one_number(checkpoint: str = "fp16", read_copy: str | None = None, layers: int = 1) -> StatePool:
    """Mamba-2 whose states are one number beside zeros, in the first of four key rows: S <- S / 2 + x, y = S."""
    config = ReplayConfig(window=2, checkpoint_format=checkpoint, read_format=read_copy, stagger=False)
    params = {"A": torch.tensor([-math.log(2)]), "D": torch.zeros(1)}
    return StatePool.allocate(
        get("mamba2"), Geometry(1, 1, 4, 1), config, slots=4, model_dtype=torch.float32, params=[params] * layers
    )


def decode(pool: StatePool, slot: int, x: float) -> float:
    """One token, committed; the output of the last layer."""
    first = torch.eye(4)[:1].reshape(1, 1, 1, 4)
    inputs = {"x": torch.full((1, 1, 1, 1), x), "B": first, "C": first, "dt": torch.ones(1, 1, 1)}
    with flow.step(pool, [slot]) as step:
        for layer in range(len(pool.layers)):
            y = flow.verify(pool, layer, step, inputs)
    flow.commit(pool, [slot], 1)
    return float(y)


def checkpoint(pool: StatePool, slot: int, layer: int = 0) -> float:
    return float(pool.layers[layer].tensors["checkpoint"][slot, 0, 0, 0])


def clamped(pool: StatePool, slot: int) -> int:
    return int(pool.cursor.saturated[slot])


def test_a_sequence_goes_on_from_the_clamped_checkpoint() -> None:
    pool = one_number()
    slot = pool.acquire()
    assert decode(pool, slot, 190_000.0) == pytest.approx(190_000)
    assert decode(pool, slot, 0.0) == pytest.approx(95_000)  # the ring holds the exact value still
    assert clamped(pool, slot) == 0
    flow.flush(pool, [slot])
    assert (checkpoint(pool, slot), clamped(pool, slot)) == (LIMIT, 1)
    assert float(flow.materialize(pool, 0, [slot])[0, 0, 0, 0]) == LIMIT
    assert decode(pool, slot, -1000.0) == pytest.approx(LIMIT / 2 - 1000)
    flow.flush(pool, [slot])
    assert checkpoint(pool, slot) == pytest.approx(LIMIT / 2 - 1000, rel=2**-11)
    assert clamped(pool, slot) == 1  # what was clamped once is not counted again
    decode(pool, slot, -1e30)
    flow.flush(pool, [slot])
    assert (checkpoint(pool, slot), clamped(pool, slot)) == (-LIMIT, 2)


@pytest.mark.parametrize(("value", "count"), [(LIMIT, 0), (math.nextafter(LIMIT, 0), 0), (LIMIT + 1, 1)])
def test_the_border_itself_is_in_range(value: float, count: int) -> None:
    """fp16 would round everything below 65520 to 65504; what lies beyond 65504 counts all the same."""
    pool = one_number()
    slot = pool.acquire()
    decode(pool, slot, value)
    flow.flush(pool, [slot])
    assert (checkpoint(pool, slot), clamped(pool, slot)) == (LIMIT, count)


def test_every_layer_counts_and_only_the_slot_concerned() -> None:
    pool = one_number(layers=3)
    slot, other = pool.acquire(), pool.acquire()
    decode(pool, slot, -1e5)
    decode(pool, other, 1e4)
    flow.flush(pool, [other, -1, slot])
    assert [checkpoint(pool, slot, layer) for layer in range(3)] == [-LIMIT] * 3
    assert pool.cursor.saturated.tolist() == [3 if s == slot else 0 for s in range(4)]


COPIES: dict[str, Callable[[StatePool, int], tuple[StatePool, int]]] = {
    "fork": lambda pool, slot: (pool, pool.fork(slot)),
    "fork to an earlier point": lambda pool, slot: (pool, pool.fork(slot, records=0)),
    "move": lambda pool, slot: (pool, pool.move(slot)),
    "gather": lambda pool, slot: (pool.gather(torch.tensor([slot, slot])), 1),
    "materialize_into": lambda pool, slot: (pool, flow.materialize_into(pool, [slot])[0]),
    "materialize_into an earlier point": lambda pool, slot: (pool, flow.materialize_into(pool, [slot], 0)[0]),
    "snapshot": lambda pool, slot: (pool, restore(pool, snapshot(pool, slot))),
}


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_a_clamped_sequence_says_so_too(copy: str) -> None:
    """Whatever continues from a clamped checkpoint is as wrong as its source, so that its release warns as well."""
    pool = one_number()
    slot = pool.acquire()
    decode(pool, slot, 1e6)
    flow.flush(pool, [slot])
    decode(pool, slot, 5.0)
    pool, target = COPIES[copy](pool, slot)
    assert clamped(pool, target) == 1
    with pytest.warns(SaturationWarning, match=f"slot {target}: 1 checkpoint elements were clamped .* fp16"):
        pool.release(target)


def test_a_copy_adds_what_it_clamps_itself() -> None:
    """Two flushes of the source clamped, and so does the fold into the new slot."""
    pool = one_number()
    slot = pool.acquire()
    for _ in range(2):
        decode(pool, slot, 1e6)
        flow.flush(pool, [slot])
    decode(pool, slot, 1e6)
    (target,) = flow.materialize_into(pool, [slot])
    assert (clamped(pool, slot), clamped(pool, target)) == (2, 3)


def test_a_clamped_read_copy_is_counted_and_said() -> None:
    """The state itself is not touched by it, but outputs see the copy's largest value: wrong, and not in silence."""
    pool = one_number("fp32", "fp16")
    slot, quiet = pool.acquire(), pool.acquire()
    decode(pool, slot, 190_000.0)
    decode(pool, quiet, 6.0)
    flow.flush(pool, [slot, quiet])
    assert (checkpoint(pool, slot), float(pool.layers[0].tensors["read_copy"][slot, 0, 0, 0])) == (190_000, LIMIT)
    assert decode(pool, slot, 0.0) == pytest.approx(LIMIT / 2)
    assert float(flow.materialize(pool, 0, [slot])[0, 0, 0, 0]) == pytest.approx(95_000)
    assert (clamped(pool, slot), clamped(pool, quiet)) == (1, 0)
    with pytest.warns(
        SaturationWarning, match=r"1 elements of checkpoint \(fp32\) and read copy \(fp16\) were clamped"
    ):
        pool.release(slot)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.release(quiet)


@pytest.mark.parametrize("read_copy", ["fp8", "int8"])
def test_a_read_copy_of_wider_range_does_not_see_what_the_checkpoint_lost(read_copy: str) -> None:
    pool = one_number("fp16", read_copy)
    slot = pool.acquire()
    decode(pool, slot, 190_000.0)
    flow.flush(pool, [slot])
    assert decode(pool, slot, 0.0) == pytest.approx(LIMIT / 2)
    assert clamped(pool, slot) == 1


def test_a_reused_slot_starts_counting_anew() -> None:
    pool = one_number()
    slot = pool.acquire()
    decode(pool, slot, 1e6)
    flow.flush(pool, [slot])
    pool.reset(slot)
    assert clamped(pool, slot) == 0
    decode(pool, slot, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.release(slot)
