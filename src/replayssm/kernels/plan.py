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


@triton.jit
def row_value(value, rows, mask, EACH: tl.constexpr):
    """`value` of each row: a (pointer, stride) when EACH, else a (number, 0) for all of them."""
    if EACH:
        return tl.load(value[0] + rows * value[1], mask=mask, other=0).to(tl.int64)
    else:
        return tl.zeros(rows.shape, tl.int64) + value[0]


@triton.jit
def plan_block(
    rows, mask, slots, tokens, windows, forced, start, length, position, window, each, width,
    TOKENS_EACH: tl.constexpr, WINDOWS_EACH: tl.constexpr, FORCED_EACH: tl.constexpr,
):  # fmt: skip
    """The rows' slots and everything that follows from their cursors alone."""
    slot = tl.load(slots[0] + rows * slots[1], mask=mask, other=-1).to(tl.int64)
    live = slot >= 0
    counts = row_value(tokens, rows, mask, TOKENS_EACH)
    counts = tl.where(live, tl.minimum(tl.maximum(counts, 0), width), 0)
    first = tl.load(start + slot * each, mask=live, other=0)
    committed = tl.load(length + slot * each, mask=live, other=0)
    at = tl.load(position + slot * each, mask=live, other=0)
    in_force = tl.minimum(
        tl.load(window + slot * each, mask=live, other=0), row_value(windows, rows, mask, WINDOWS_EACH)
    )
    due = live & ((row_value(forced, rows, mask, FORCED_EACH) != 0) | (committed + counts > in_force))
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
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    due_rows = tl.zeros([], tl.int32)
    for block in range(0, batch, BLOCK):
        rows = block + offsets
        mask = rows < batch
        slot, counts, first, committed, at, due = plan_block(
            rows, mask, slots, tokens, windows, forced, start, length, position, window, each, width,
            TOKENS_EACH, WINDOWS_EACH, FORCED_EACH,
        )  # fmt: skip
        due_rows += tl.sum((due & (committed > 0)).to(tl.int32), 0)

    folds_before = tl.zeros([], tl.int32)
    for block in range(0, batch, BLOCK):
        rows = block + offsets
        mask = rows < batch
        slot, counts, first, committed, at, due = plan_block(
            rows, mask, slots, tokens, windows, forced, start, length, position, window, each, width,
            TOKENS_EACH, WINDOWS_EACH, FORCED_EACH,
        )  # fmt: skip
        folded = tl.where(due, committed, 0)
        out = plan + rows * plan_row
        tl.store(out + SLOT, slot, mask=mask)
        tl.store(out + TOKENS, counts, mask=mask)
        tl.store(out + FOLDED, folded, mask=mask)
        tl.store(out + FOLD_START, first, mask=mask)
        tl.store(out + HISTORY, committed - folded, mask=mask)
        tl.store(out + EMPTY, (at == committed).to(tl.int64), mask=mask)
        tl.store(out + DUE_COUNT, tl.zeros([BLOCK], tl.int64) + due_rows, mask=mask)
        tl.store(out + START, (first + folded) % ring_rows, mask=mask)
        tl.store(out + POSITION, at, mask=mask)
        tl.store(out + DUE, due.to(tl.int64), mask=mask)
        tl.store(out + TREE, tl.where(slot >= 0, row_value(trees, rows, mask, TREES_EACH), 0), mask=mask)

        # rows that fold come first: their rank among themselves, and that of the others behind them
        folds = (folded > 0).to(tl.int32)
        rank = folds_before + tl.cumsum(folds, 0) - folds
        place = tl.where(folds > 0, rank, due_rows + (rows.to(tl.int32) - rank))
        tl.store(plan + place.to(tl.int64) * plan_row + ORDER, rows, mask=mask)
        folds_before += tl.sum(folds, 0)


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
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    row_steps, flushes = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    new, seen, folded_records = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for block in range(0, batch, BLOCK):
        rows = block + offsets
        mask = rows < batch
        row = plan + rows * plan_row
        slot = tl.load(row + SLOT, mask=mask, other=-1)
        live = slot >= 0
        folded = tl.load(row + FOLDED, mask=live, other=0)
        history = tl.load(row + HISTORY, mask=live, other=0)
        tl.store(start + slot * each, tl.load(row + START, mask=live, other=0), mask=live)
        tl.store(length + slot * each, history, mask=live)
        flushed = (folded > 0).to(tl.int64)
        flushes += tl.sum(flushed, 0)
        folded_records += tl.sum(folded, 0)
        if KIND == FLUSH:
            row_steps += tl.sum(flushed, 0)
        else:
            tokens = tl.load(row + TOKENS, mask=live, other=0)
            tl.store(tree + slot * each, tl.load(row + TREE, mask=live, other=0), mask=live)
            if KIND == PROMPT:
                tl.store(position + slot * each, tl.load(row + POSITION, mask=live, other=0) + tokens, mask=live)
                tl.store(pending + slot * each, tl.zeros([BLOCK], tl.int64), mask=live)
            else:
                tl.store(position + slot * each, tl.load(row + POSITION, mask=live, other=0), mask=live)
                tl.store(pending + slot * each, tokens, mask=live)
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
