"""Snapshots between pools that differ in window, verify_len, ring origin, strides and slot."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest

from replayssm.state.snapshot import restore, snapshot

from .machine import Machine, Row
from .setups import RECURRENCES
from .test_each_invariant import script

SIZES = ((8, 4), (11, 2), (7, 1), (16, 16))


def in_mid_window(recurrence: str, window: int, verify_len: int, tokens: int, **options: object) -> Machine:
    """A pool with one sequence of a prompt of 5 and `tokens` decoded; each step is compared with the oracle."""
    machine = script(recurrence, window=window, verify_len=verify_len, **options)  # type: ignore[arg-type]
    machine.acquire(choice=None)
    machine.prompt([Row(0, tokens=5)], loaded=False)
    for _ in range(tokens):
        machine.run_step([Row(0, tokens=1)])
        machine.run_commit([Row(0, accept=1)])
    return machine


@pytest.mark.parametrize("carry_history", [False, True])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_between_pools(recurrence: str, carry_history: bool) -> None:
    """The restored sequence goes on as the oracle says, in whatever window, and back to every boundary it may reach."""
    for (source, target), tokens in itertools.product(pairwise((*SIZES, SIZES[0])), (3, 25)):
        here = in_mid_window(recurrence, *source, tokens, carry_history=carry_history)
        there = in_mid_window(recurrence, *target, 2, carry_history=carry_history)
        slot = here.usable()[0]
        if here.live[slot].length > target[0]:
            here.flush([Row(0)])
        here.run_step([Row(0, tokens=1)])  # pending, and so not in the snapshot
        taken = restore(there.pool, snapshot(here.pool, slot), slot=3)
        assert taken == 3
        there.adopt(3, here.live[slot].copy())
        there.fresh = max(here.fresh, there.fresh)
        there.check()
        there.materialize_all()
        if carry_history:
            there.fork(1, 1, 2)
        for _ in range(4):
            rows = [Row(pick, tokens=target[1], accept=16) for pick in range(len(there.usable()))]
            there.run_step(rows)
            there.run_commit(rows)
            there.check()


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_bytes_do_not_depend_on_where_the_sequence_lies(recurrence: str) -> None:
    """Another slot, another ring origin, rejected drafts in the ring's free rows: the same bytes."""
    machine = in_mid_window(recurrence, 8, 4, 6)
    slot = machine.usable()[0]
    data = snapshot(machine.pool, slot)
    machine.run_step([Row(0, tokens=2)])
    assert snapshot(machine.pool, slot) == data
    machine.move(0, 2)
    (slot,) = machine.usable()
    assert snapshot(machine.pool, slot) == data
    machine.pool.release(slot)
    machine.forget(slot)
    assert snapshot(machine.pool, restore(machine.pool, data)) == data
