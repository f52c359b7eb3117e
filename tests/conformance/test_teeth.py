"""The checks can fail: one small fault at a time, and the suite's comparison goes red."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from replayssm import ReplayConfig, flow
from replayssm.recurrences import Recurrence, get, registry

from .suite import Bench


def corrupt_ring_row(bench: Bench) -> None:
    """One value of the oldest committed record changes in its first vector."""
    slot, layer = bench.slots[1], bench.pool.layers[0]
    start = int(bench.pool.cursor.start[slot])
    name = next(f.name for f in layer.layout.ring_fields if len(f.dims) == 2)
    layer.tensors[f"ring.{name}"][slot, start, 0, 0] += 1e-3


def corrupt_the_checkpoint(bench: Bench) -> None:
    """The checkpoint of one slot is off by one part in a million."""
    bench.pool.layers[0].tensors["checkpoint"][bench.slots[0]] *= 1 + 1e-6


def lose_a_record(bench: Bench) -> None:
    bench.pool.cursor.length[bench.slots[2]] -= 1


def shift_the_origin(bench: Bench) -> None:
    slot = bench.slots[0]
    bench.pool.cursor.start[slot] = (bench.pool.cursor.start[slot] + 1) % bench.pool.ring_rows


def skip_a_commit(bench: Bench) -> None:
    """The step's token is dropped although the text goes on."""
    inputs, width = bench.batch([1, 1, 1], [0, 1, 2])
    with flow.step(bench.pool, bench.slots, 1, width=width) as step:
        flow.verify(bench.pool, 0, step, inputs)
    bench.position = [p + 1 for p in bench.position]


def commit_to_the_wrong_slot(bench: Bench) -> None:
    inputs, width = bench.batch([2, 2, 2], [0, 1, 2])
    with flow.step(bench.pool, bench.slots, 2, width=width) as step:
        flow.verify(bench.pool, 0, step, inputs)
    flow.commit(bench.pool, [bench.slots[1], bench.slots[0], bench.slots[2]], [1, 2, 1])
    bench.position = [p + a for p, a in zip(bench.position, [1, 2, 1], strict=True)]


def swap_two_slots(bench: Bench) -> None:
    bench.slots[0], bench.slots[1] = bench.slots[1], bench.slots[0]


FAULTS = (
    corrupt_ring_row,
    corrupt_the_checkpoint,
    lose_a_record,
    shift_the_origin,
    skip_a_commit,
    commit_to_the_wrong_slot,
    swap_two_slots,
)


def ready(recurrence: Recurrence) -> Bench:
    """Every slot in mid-window, with something in its checkpoint."""
    config = ReplayConfig(window=5, verify_len=2, checkpoint_format="fp64", stagger=False)
    bench = Bench(recurrence, config)
    for _ in range(8):
        bench.advance([1, 1, 1], [1, 1, 1], [0, 1, 2])
    return bench


def go_on(bench: Bench) -> None:
    """A few more steps, compared one by one."""
    for _ in range(6):
        bench.advance([1, 1, 1], [1, 1, 1], [0, 1, 2])
        bench.check_states()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", registry())
def test_a_fault_is_seen(name: str, fault: Callable[[Bench], None]) -> None:
    bench = ready(get(name))
    fault(bench)
    with pytest.raises(AssertionError, match="relative error"):
        go_on(bench)


@pytest.mark.parametrize("name", registry())
def test_without_a_fault_nothing_is_seen(name: str) -> None:
    bench = ready(get(name))
    go_on(bench)
    assert bool(torch.isfinite(flow.materialize(bench.pool, 0, bench.slots)).all())
