"""The cursor kernels against the torch back end, number by number, for many rows and every way to give a value."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from replayssm import ReplayConfig, flow
from replayssm.flow.step import settle_flush
from replayssm.kernels import plan as kernels
from replayssm.kernels import verify
from replayssm.kernels.ops import Kernels
from replayssm.kernels.plan import row_in_turn
from replayssm.recurrences import Geometry, get
from replayssm.state.plan import COLUMN, COLUMNS
from replayssm.state.pool import StatePool

from .harness import DEVICE

WINDOW, VERIFY_LEN = 7, 3


def pool_of(slots: int, backend: str, generator: torch.Generator) -> StatePool:
    """A pool whose cursors are somewhere in the middle of things."""
    config = ReplayConfig(window=WINDOW, verify_len=VERIFY_LEN)
    pool = StatePool.allocate(
        get("gdn"), Geometry(1, 1, 2, 2), config, slots=slots, model_dtype=torch.float32, device=DEVICE, backend=backend
    )
    for _ in range(slots):
        pool.acquire()

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (slots,), generator=generator)

    cursor, length = pool.cursor, draw(0, WINDOW + 1)
    cursor.start.copy_(draw(0, pool.ring_rows))
    cursor.length.copy_(length)
    cursor.position.copy_(length + draw(0, 2) * draw(0, 100))
    cursor.pending.copy_(draw(0, VERIFY_LEN + 1))
    cursor.window.copy_(draw(VERIFY_LEN, WINDOW + 1))
    return pool


def pools(slots: int, seed: int) -> list[StatePool]:
    return [pool_of(slots, backend, torch.Generator().manual_seed(seed)) for backend in ("torch", "triton")]


def batch_of(slots: int, rows: int, seed: int) -> torch.Tensor:
    """Distinct slots in any order, some rows padded."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(slots, generator=generator)[:rows]
    chosen[torch.rand(rows, generator=generator) < 0.2] = -1
    return chosen.to(DEVICE)


@pytest.mark.parametrize("rows", [1, 5, 40, 1024, 2500])
@pytest.mark.parametrize("kind", ["numbers", "tensors", "strided"])
def test_whole_steps(rows: int, kind: str) -> None:
    theirs, ours = pools(rows + 3, rows)
    slots = batch_of(rows + 3, rows, rows)
    generator = torch.Generator().manual_seed(1)

    def values(low: int, high: int) -> torch.Tensor:
        drawn = torch.randint(low, high, (rows,), generator=generator).to(DEVICE)
        return torch.stack([drawn, drawn - 1], 1)[:, 0] if kind == "strided" else drawn.int()

    if kind == "numbers":
        tokens, window, forced = 2, None, False
    else:
        tokens, window, forced = values(0, VERIFY_LEN + 1), values(1, WINDOW + 1), values(0, 2).bool()
        slots = torch.stack([slots, slots], 1)[:, 0] if kind == "strided" else slots.int()
    for pool in (theirs, ours):
        step = flow.open_step(pool, slots, tokens, width=VERIFY_LEN, window=window, forced=forced)
        flow.close_step(pool, step)
        pending = torch.where(slots >= 0, pool.cursor.pending[slots.clamp(min=0)], 0)
        flow.commit(pool, slots, pending // 2)
        if pool is theirs:
            plan = step.plan
    assert torch.equal(step.plan, plan)
    same_cursors(theirs, ours)
    for pool in (theirs, ours):
        flow.close_step(pool, flow.open_step(pool, slots, 5, is_prompt=True))
    same_cursors(theirs, ours)


@pytest.mark.parametrize("rows", [1, 40, 1500])
def test_trees_reach_the_cursor(rows: int) -> None:
    theirs, ours = pools(rows + 3, rows)
    slots = batch_of(rows + 3, rows, rows)
    generator = torch.Generator().manual_seed(2)
    parents = torch.stack([torch.randint(-1, t, (rows,), generator=generator) for t in range(VERIFY_LEN)], 1).to(DEVICE)
    tokens = torch.randint(0, VERIFY_LEN + 1, (rows,), generator=generator).to(DEVICE)
    for pool in (theirs, ours):
        step = flow.open_step(pool, slots, tokens, width=VERIFY_LEN, parents=parents, window=WINDOW)
        flow.close_step(pool, step)
        if pool is theirs:
            plan = step.plan
    assert torch.equal(step.plan, plan)
    same_cursors(theirs, ours)
    assert rows < 5 or bool(ours.cursor.tree.any())
    for pool in (theirs, ours):  # the next step is of chains again
        flow.close_step(pool, flow.open_step(pool, slots, 2, window=WINDOW))
    same_cursors(theirs, ours)
    assert not bool(ours.cursor.tree.any())


def test_flush_between_steps_keeps_pending_rows() -> None:
    theirs, ours = pools(40, 3)
    slots = batch_of(40, 30, 3)
    for pool in (theirs, ours):
        settle_flush(pool, flow.open_step(pool, slots, 0, forced=True))
    same_cursors(theirs, ours)


def test_commit_clamps_what_the_host_cannot_see() -> None:
    theirs, ours = pools(40, 4)
    slots = batch_of(40, 30, 4)
    accepted = torch.arange(-5, 25, device=DEVICE)
    pending = torch.where(slots >= 0, theirs.cursor.pending[slots.clamp(min=0)], 0)
    Kernels(ours).commit(slots, accepted)
    flow.commit(theirs, slots, torch.minimum(accepted.clamp(min=0), pending))
    same_cursors(theirs, ours)


def test_columns_are_the_same_everywhere() -> None:
    """The kernels' constants are the columns of the plan."""
    names = ["slot", "tokens", "folded", "fold_start", "history", "empty", "order", "due_count"]
    for name in names:
        assert getattr(verify, name.upper()).value == COLUMN[name]
    assert list(COLUMNS)[: len(names)] == names
    assert [kernels.START.value, kernels.POSITION.value, kernels.DUE.value, kernels.TREE.value] == [8, 9, 10, 11]


def same_cursors(theirs: StatePool, ours: StatePool) -> None:
    for name, counter in theirs.cursor.items():
        assert torch.equal(getattr(ours.cursor, name), counter), name
    assert torch.equal(ours.counts, theirs.counts)


@triton.jit
def turns_kernel(plan, plan_row, rows, due, out, SPREAD: tl.constexpr):
    turn = tl.program_id(0)
    tl.store(out + turn, row_in_turn(plan, plan_row, turn, rows, due, SPREAD))


@pytest.mark.parametrize("spread", [False, True])
def test_every_row_has_one_turn_and_those_that_fold_have_theirs_early(spread: bool) -> None:
    for rows in (1, 2, 7, 8, 9, 24, 33):
        for due in range(rows + 1):
            plan = torch.zeros(rows, len(COLUMNS), dtype=torch.int64, device=DEVICE)
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(due)).to(DEVICE)
            plan[:, COLUMN["order"]] = order
            out = torch.full((rows,), -1, dtype=torch.int64, device=DEVICE)
            turns_kernel[(rows,)](plan, plan.stride(0), rows, due, out, spread)
            assert sorted(out.tolist()) == list(range(rows)), (rows, due)
            turns = [out.tolist().index(row) for row in order[:due].tolist()]
            apart = max(1, min(8, rows // max(1, due))) if spread else 1
            assert turns == [apart * number for number in range(due)], (rows, due)
