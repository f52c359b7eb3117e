"""Cursor arithmetic on the device: the plan of a step, settling after it, and commit, each one launch.

The rule itself is `state.cursor`, which says it once in Python; these kernels say the same for a whole batch, and the
tests hold them to it number by number. A single program walks through the rows in blocks: every counter of a row is 8
bytes, so a launch costs what a launch costs, and sums over rows need no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replayssm.state.cursor import Cursor
from replayssm.state.plan import COLUMN

SLOT, TOKENS, FOLDED, FOLD_START = (tl.constexpr(COLUMN[n]) for n in ("slot", "tokens", "folded", "fold_start"))
HISTORY, EMPTY, ORDER, DUE_COUNT = (tl.constexpr(COLUMN[n]) for n in ("history", "empty", "order", "due_count"))
START, POSITION, DUE, TREE = (tl.constexpr(COLUMN[n]) for n in ("start", "position", "due", "tree"))

# what a step's rows were: a decode step, a prompt, or a flush between steps
DECODE, PROMPT, FLUSH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

MAX_BLOCK = 1024

FOLDS_APART = tl.constexpr(8)
"""Every so many rows of a launch may fold, until all that do have had their turn."""


@triton.jit
def row_value(value, rows, mask, EACH: tl.constexpr):
    """`value` of each row: a (pointer, stride) when EACH, else a (number, 0) for all of them."""
    if EACH:
        return tl.load(value[0] + rows * value[1], mask=mask, other=0).to(tl.int64)
    else:
        return tl.zeros(rows.shape, tl.int64) + value[0]


@triton.jit
def count_folds(rows_of: tl.constexpr, given, EACH: tl.constexpr, batch, BLOCK: tl.constexpr):
    """Rows of `batch` that fold. `rows_of` (rows, mask, given, EACH) gives what `write_plan` takes, and maybe more."""
    folds = tl.zeros([], tl.int32)
    for block in range(0, batch, BLOCK):
        rows = block + tl.arange(0, BLOCK).to(tl.int64)
        _, _, _, committed, _, due = rows_of(rows, rows < batch, given, EACH)[:6]
        folds += tl.sum((due & (committed > 0)).to(tl.int32), 0)
    return folds


@triton.jit
def write_plan(plan, plan_row, rows, mask, slot, tokens, first, committed, at, due, tree, ring_rows, all_folds, before):
    """Every column of these rows; returns how many rows fold up to and with them.

    Args:
        rows, mask: of the batch, and which of them there are.
        slot, tokens: of each row; PAD_SLOT and 0 on padded rows.
        first, committed, at: start, length and position of its cursor.
        due, tree: whether its ring is emptied, and the shape of its tokens.
        all_folds, before: rows that fold in the whole batch, and in front of these.
    """
    folded = tl.where(due, committed, 0)
    out = plan + rows * plan_row
    tl.store(out + SLOT, slot, mask=mask)
    tl.store(out + TOKENS, tokens, mask=mask)
    tl.store(out + FOLDED, folded, mask=mask)
    tl.store(out + FOLD_START, first, mask=mask)
    tl.store(out + HISTORY, committed - folded, mask=mask)
    tl.store(out + EMPTY, (at == committed).to(tl.int64), mask=mask)
    tl.store(out + DUE_COUNT, tl.zeros(rows.shape, tl.int64) + all_folds, mask=mask)
    tl.store(out + START, (first + folded) % ring_rows, mask=mask)
    tl.store(out + POSITION, at, mask=mask)
    tl.store(out + DUE, due.to(tl.int64), mask=mask)
    tl.store(out + TREE, tree, mask=mask)

    # rows that fold come first: their rank among themselves, and that of the others behind them
    folds = (folded > 0).to(tl.int32)
    rank = before + tl.cumsum(folds, 0) - folds
    place = tl.where(folds > 0, rank, all_folds + (rows.to(tl.int32) - rank))
    tl.store(plan + place.to(tl.int64) * plan_row + ORDER, rows, mask=mask)
    return before + tl.sum(folds, 0)


@triton.jit
def write_cursor(cursor, slot, live, first, committed, at, waiting, shape):
    """The counters of these slots after a step, but for the window in force."""
    start, length, position, pending, tree, _, each = cursor
    tl.store(start + slot * each, first, mask=live)
    tl.store(length + slot * each, committed, mask=live)
    tl.store(position + slot * each, at, mask=live)
    tl.store(pending + slot * each, waiting, mask=live)
    tl.store(tree + slot * each, shape, mask=live)


@triton.jit
def row_in_turn(plan, plan_row, turn, rows, due, SPREAD: tl.constexpr):
    """The row of the batch that is the `turn`th of `rows` to be worked on where one launch takes all of them.

    Those that fold take longest, so they come first, or early with others between them (SPREAD), where programs are
    few and long: those read while these write (docs/experiments.md).
    """
    apart = tl.maximum(1, tl.minimum(FOLDS_APART if SPREAD else 1, rows // tl.maximum(due, 1)))
    folds = (turn % apart == 0) & (turn // apart < due)
    place = tl.where(folds, turn // apart, due + turn - tl.minimum(due, tl.cdiv(turn, apart)))
    return tl.load(plan + place.to(tl.int64) * plan_row + ORDER)


@triton.jit
def planned_rows(rows, mask, given, EACH: tl.constexpr):
    """The rows' slots and everything that follows from their cursors alone; EACH is for tokens, windows and forced."""
    slots, tokens, windows, forced, start, length, position, window, each, width = given
    slot = tl.load(slots[0] + rows * slots[1], mask=mask, other=-1).to(tl.int64)
    live = slot >= 0
    counts = row_value(tokens, rows, mask, EACH[0])
    counts = tl.where(live, tl.minimum(tl.maximum(counts, 0), width), 0)
    first = tl.load(start + slot * each, mask=live, other=0)
    committed = tl.load(length + slot * each, mask=live, other=0)
    at = tl.load(position + slot * each, mask=live, other=0)
    in_force = tl.minimum(tl.load(window + slot * each, mask=live, other=0), row_value(windows, rows, mask, EACH[1]))
    due = live & ((row_value(forced, rows, mask, EACH[2]) != 0) | (committed + counts > in_force))
    return slot, counts, first, committed, at, due


@triton.jit
def plan_kernel(
    plan, plan_row, slots, tokens, windows, forced, trees, start, length, position, window, each, batch, width,
    ring_rows,
    TOKENS_EACH: tl.constexpr, WINDOWS_EACH: tl.constexpr, FORCED_EACH: tl.constexpr, TREES_EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. B = `batch` rows.

    | argument | shape | in/out | meaning |
    |----------|-------|--------|---------|
    | plan | [B, columns] int64 | out | `state.plan.COLUMNS`; rows lie `plan_row` apart |
    | slots | [B] int32 or int64 | in | (pointer, stride); PAD_SLOT on padded rows |
    | tokens, windows, forced, trees | [B] or a number | in | (pointer, stride) or (number, 0) |
    | start, length, position, window | [slots] int64 | in | the cursor; slots lie `each` apart |
    """
    given = (slots, tokens, windows, forced, start, length, position, window, each, width)
    EACH: tl.constexpr = (TOKENS_EACH, WINDOWS_EACH, FORCED_EACH)
    all_folds = count_folds(planned_rows, given, EACH, batch, BLOCK)
    before = tl.zeros([], tl.int32)
    for block in range(0, batch, BLOCK):
        rows = block + tl.arange(0, BLOCK).to(tl.int64)
        mask = rows < batch
        slot, counts, first, committed, at, due = planned_rows(rows, mask, given, EACH)
        tree = tl.where(slot >= 0, row_value(trees, rows, mask, TREES_EACH), 0)
        before = write_plan(
            plan, plan_row, rows, mask, slot, counts, first, committed, at, due, tree, ring_rows, all_folds, before
        )


@triton.jit
def settle_kernel(
    plan, plan_row, start, length, position, pending, tree, window, each, tally, batch, full_window,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the cursor after the step of `plan`, and the step's counts.

    | argument | shape | in/out | meaning |
    |----------|-------|--------|---------|
    | plan | [B, columns] int64 | in | the step; rows lie `plan_row` apart |
    | start, length, position, pending, tree, window | [slots] int64 | in/out | the cursor; slots lie `each` apart |
    | tally | [5] int64 | in/out | row steps, new records, history records, flushes, folded records |
    """
    cursor = (start, length, position, pending, tree, window, each)
    row_steps, flushes = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    new, seen, folded_records = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for block in range(0, batch, BLOCK):
        rows = block + tl.arange(0, BLOCK).to(tl.int64)
        mask = rows < batch
        row = plan + rows * plan_row
        slot = tl.load(row + SLOT, mask=mask, other=-1)
        live = slot >= 0
        first = tl.load(row + START, mask=live, other=0)
        folded = tl.load(row + FOLDED, mask=live, other=0)
        history = tl.load(row + HISTORY, mask=live, other=0)
        flushed = (folded > 0).to(tl.int64)
        flushes += tl.sum(flushed, 0)
        folded_records += tl.sum(folded, 0)
        if KIND == FLUSH:
            row_steps += tl.sum(flushed, 0)
            tl.store(start + slot * each, first, mask=live)
            tl.store(length + slot * each, history, mask=live)
        else:
            tokens = tl.load(row + TOKENS, mask=live, other=0)
            at = tl.load(row + POSITION, mask=live, other=0)
            shape = tl.load(row + TREE, mask=live, other=0)
            if KIND == PROMPT:
                write_cursor(cursor, slot, live, first, history, at + tokens, tl.zeros([BLOCK], tl.int64), shape)
            else:
                write_cursor(cursor, slot, live, first, history, at, tokens, shape)
                # the phase given at acquire holds for one flush only; loading a prompt is not that flush
                due = tl.load(row + DUE, mask=live, other=0) != 0
                tl.store(window + slot * each, tl.zeros([BLOCK], tl.int64) + full_window, mask=due)
                row_steps += tl.sum(((tokens > 0) | (folded > 0)).to(tl.int64), 0)
                new += tl.sum(tokens, 0)
                seen += tl.sum(history, 0)
    if KIND != PROMPT:
        tl.store(tally, tl.load(tally) + row_steps)
        tl.store(tally + 1, tl.load(tally + 1) + new)
        tl.store(tally + 2, tl.load(tally + 2) + seen)
        tl.store(tally + 3, tl.load(tally + 3) + flushes)
        tl.store(tally + 4, tl.load(tally + 4) + folded_records)


@triton.jit
def commit_kernel(
    slots, accepted, length, position, pending, each, batch, ACCEPTED_EACH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program per BLOCK rows: the first `accepted` pending rows of each slot become real.

    | argument | shape | in/out | meaning |
    |----------|-------|--------|---------|
    | slots | [B] int32 or int64 | in | (pointer, stride); PAD_SLOT on padded rows |
    | accepted | [B] or a number | in | (pointer, stride) or (number, 0); clamped to 0..pending |
    | length, position, pending | [slots] int64 | in/out | the cursor; slots lie `each` apart |
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < batch
    slot = tl.load(slots[0] + rows * slots[1], mask=mask, other=-1).to(tl.int64)
    live = slot >= 0
    waiting = tl.load(pending + slot * each, mask=live, other=0)
    kept = tl.minimum(tl.maximum(row_value(accepted, rows, mask, ACCEPTED_EACH), 0), waiting)
    tl.store(length + slot * each, tl.load(length + slot * each, mask=live, other=0) + kept, mask=live)
    tl.store(position + slot * each, tl.load(position + slot * each, mask=live, other=0) + kept, mask=live)
    tl.store(pending + slot * each, tl.zeros([BLOCK], tl.int64), mask=live)


def launch_plan(
    plan: Tensor,
    slots: Tensor,
    tokens: int | Tensor,
    width: int,
    window: int | Tensor,
    forced: bool | Tensor,
    tree: Tensor | None,
    cursor: Cursor,
    ring_rows: int,
) -> None:
    """Fill `plan` [B, columns]; the other arguments as in `flow.step.plan_rows`."""
    batch = len(slots)
    if not batch:
        return
    plan_kernel[(1,)](
        plan,
        plan.stride(0),
        (slots, slots.stride(0)),
        _value(tokens),
        _value(window),
        _value(forced),
        _value(0 if tree is None else tree),
        cursor.start,
        cursor.length,
        cursor.position,
        cursor.window,
        cursor.apart,
        batch,
        width,
        ring_rows,
        TOKENS_EACH=isinstance(tokens, Tensor),
        WINDOWS_EACH=isinstance(window, Tensor),
        FORCED_EACH=isinstance(forced, Tensor),
        TREES_EACH=tree is not None,
        BLOCK=block_of(batch),
        num_warps=4,
    )


def launch_settle(plan: Tensor, cursor: Cursor, tally: Tensor, full_window: int, kind: int) -> None:
    """Move the cursor and add the step's counts; `kind` is DECODE, PROMPT or FLUSH."""
    if not len(plan):
        return
    settle_kernel[(1,)](
        plan,
        plan.stride(0),
        cursor.start,
        cursor.length,
        cursor.position,
        cursor.pending,
        cursor.tree,
        cursor.window,
        cursor.apart,
        tally,
        len(plan),
        full_window,
        KIND=kind,
        BLOCK=block_of(len(plan)),
        num_warps=4,
    )


def launch_commit(slots: Tensor, accepted: int | Tensor, cursor: Cursor) -> None:
    """Accept rows [B]; see `commit_kernel`."""
    batch = len(slots)
    if not batch:
        return
    block = block_of(batch)
    commit_kernel[(triton.cdiv(batch, block),)](
        (slots, slots.stride(0)),
        _value(accepted),
        cursor.length,
        cursor.position,
        cursor.pending,
        cursor.apart,
        batch,
        ACCEPTED_EACH=isinstance(accepted, Tensor),
        BLOCK=block,
        num_warps=4,
    )


def _value(value: int | Tensor) -> tuple[int | Tensor, int]:
    return (value, value.stride(0)) if isinstance(value, Tensor) else (int(value), 0)


def block_of(batch: int) -> int:
    """Rows of a block: few different ones, so that few kernels are compiled."""
    return min(MAX_BLOCK, max(32, triton.next_power_of_2(batch)))
