"""The last launch of a `verify` beside a read copy: rounds the copies of rows that have just been folded.

A fold needs all registers there are; the many small operations that make codes of a state would make it spill. So they
have a launch of their own, which finds most of the new checkpoints in the L2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from replayssm.kernels.formats import round_copy
from replayssm.kernels.plan import DUE_COUNT, ORDER, SLOT


@triton.jit
def copy_kernel(
    plan_row, plan, state, state_slot, copy, saturated,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr,
    CODES: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr, CODE: tl.constexpr,
    LARGEST_CODE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A fixed grid walks through BLOCK_P columns of every head of the rows that are due.

    | argument  | shape            | in/out | meaning                                                            |
    |-----------|------------------|--------|--------------------------------------------------------------------|
    | plan      | [B, columns]     | in     | `state.plan.COLUMNS`; rows lie `plan_row` apart                    |
    | state     | [slots, H, N, P] | in     | checkpoint                                                         |
    | copy      | tuple            | out    | parts of the read copy: (pointer, slot stride) each                |
    | saturated | [slots] int64    | in/out | counts elements beyond the format's limit                          |
    """
    if OVERLAP:
        gdc_wait()
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    due = tl.load(plan + DUE_COUNT).to(tl.int32)
    for item in range(tl.program_id(0), due * H * tiles, tl.num_programs(0)):
        row = tl.load(plan + item // (H * tiles) * plan_row + ORDER)
        slot = tl.load(plan + row * plan_row + SLOT)
        h = item % (H * tiles) // tiles
        p = item % tiles * BLOCK_P + tl.arange(0, BLOCK_P)
        head = state + slot * state_slot + h * (N * P)
        round_copy(head, copy, slot, h, p, saturated, N, P, CODES, BITS, BLOCKS, CODE, LARGEST_CODE, NATIVE)
