"""A step of slots that an engine owns, opened in one launch: commit what is pending, plan, and settle.

`attach.vllm.steps.EngineSteps` says what it means, in the verbs of the flow; the tests hold this kernel to it number by
number. An engine has a cursor per group of layers, and every launch counts at small batches.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels.plan import block_of, count_folds, write_cursor, write_plan
from replayssm.state.cursor import Cursor


@triton.jit
def engine_rows(rows, mask, given, EACH: tl.constexpr):
    """The rows as `write_plan` takes them, once what was pending is committed; their blocks, and tokens they kept.

    EACH is (RAGGED, DRAFTS).
    """
    table, starts, accepted, noted, cursor, width, in_force, null = given
    start, length, position, pending, _, window, each = cursor
    number = tl.load(table[0] + rows * table[1], mask=mask, other=null).to(tl.int64)
    slot = tl.where(number == null, -1, number)
    live = slot >= 0
    if EACH[0]:
        counts = (tl.load(starts + rows + 1, mask=mask, other=0) - tl.load(starts + rows, mask=mask, other=0)).to(
            tl.int64
        )
        counts = tl.where(live, tl.minimum(tl.maximum(counts, 0), width), 0)
    else:
        counts = live.to(tl.int64)
    kept = tl.zeros(rows.shape, tl.int64) + 1
    committed = tl.load(length + slot * each, mask=live, other=0)
    at = tl.load(position + slot * each, mask=live, other=0)
    if EACH[1]:
        kept = tl.load(accepted + rows, mask=mask, other=1).to(tl.int64)
        real = tl.minimum(tl.maximum(kept, 0), tl.load(pending + slot * each, mask=live, other=0))
        committed += real
        at += real
    known = tl.load(noted + slot * each, mask=live, other=0)
    kept = tl.maximum(tl.where(known > 0, known, kept), 1)
    first = tl.load(start + slot * each, mask=live, other=0)
    limit = tl.minimum(tl.load(window + slot * each, mask=live, other=0), in_force)
    return slot, counts, first, committed, at, live & (committed + counts > limit), number, kept


@triton.jit
def engine_kernel(
    plan, plan_row, blocks, kept_out, table, starts, accepted, certain, noted,
    start, length, position, pending, tree, window, each, batch, width, in_force, full_window, ring_rows, null,
    RAGGED: tl.constexpr, DRAFTS: tl.constexpr, CERTAIN_EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. B = `batch` rows.

    | argument | shape | in/out | meaning |
    |----------|-------|--------|---------|
    | plan | [B, columns] int64 | out | `state.plan.COLUMNS`; rows lie `plan_row` apart |
    | blocks, kept_out | [B] int32 | out | the rows' blocks; tokens of its last step that each row kept |
    | table | [B] int32 or int64 | in | (pointer, stride): the rows' blocks, `null` on padded rows |
    | starts | [B + 1] int32 | in | where each row's tokens begin; RAGGED only, else every row has one |
    | accepted | [B] int32 | in | tokens of its last step that each row kept; DRAFTS only |
    | certain | [B] bool | in | rows whose tokens all stay; CERTAIN_EACH only, else all do |
    | noted | [slots] int64 | in/out | tokens of a slot's last step if all were certain, else 0 |
    | start, length, position, pending, tree, window | [slots] int64 | in/out | the cursor |

    Counters of the cursor, and `noted`, lie `each` elements apart.
    """
    cursor = (start, length, position, pending, tree, window, each)
    given = (table, starts, accepted, noted, cursor, width, in_force, null)
    EACH: tl.constexpr = (RAGGED, DRAFTS)
    all_folds = count_folds(engine_rows, given, EACH, batch, BLOCK)
    before = tl.zeros([], tl.int32)
    for block in range(0, batch, BLOCK):
        rows = block + tl.arange(0, BLOCK).to(tl.int64)
        mask = rows < batch
        # a slot is in one row only, so what this block writes is read by no other
        slot, counts, first, committed, at, due, number, kept = engine_rows(rows, mask, given, EACH)
        live, chain = slot >= 0, tl.zeros([BLOCK], tl.int64)
        tl.store(blocks + rows, number.to(tl.int32), mask=mask)
        tl.store(kept_out + rows, kept.to(tl.int32), mask=mask)
        before = write_plan(
            plan, plan_row, rows, mask, slot, counts, first, committed, at, due, chain, ring_rows, all_folds, before
        )
        real = counts
        if CERTAIN_EACH:
            real = tl.where(tl.load(certain + rows, mask=mask, other=0) != 0, counts, 0)
        folded = tl.where(due, committed, 0)
        begin, left = (first + folded) % ring_rows, committed - folded
        write_cursor(cursor, slot, live, begin, left + real, at + real, counts - real, chain)
        tl.store(window + slot * each, tl.zeros([BLOCK], tl.int64) + full_window, mask=due)
        tl.store(noted + slot * each, real, mask=live)


def launch_engine_step(
    plan: Tensor,
    blocks: Tensor,
    kept: Tensor,
    table: Tensor,
    starts: Tensor | None,
    accepted: Tensor | None,
    certain: Tensor | None,
    noted: Tensor,
    cursor: Cursor,
    width: int,
    in_force: int,
    full_window: int,
    ring_rows: int,
    null: int,
) -> None:
    """Open a step of B rows; see `engine_kernel`."""
    batch = len(table)
    if not batch:
        return
    engine_kernel[(1,)](
        plan,
        plan.stride(0),
        blocks,
        kept,
        (table, table.stride(0)),
        table if starts is None else starts,
        table if accepted is None else accepted,
        table if certain is None else certain,
        noted,
        cursor.start,
        cursor.length,
        cursor.position,
        cursor.pending,
        cursor.tree,
        cursor.window,
        cursor.apart,
        batch,
        width,
        in_force,
        full_window,
        ring_rows,
        null,
        RAGGED=starts is not None,
        DRAFTS=accepted is not None,
        CERTAIN_EACH=certain is not None,
        BLOCK=block_of(batch),
        num_warps=4,
    )
