"""Hints before a launch may read anything: what it will read comes into the L2 while the launch before it still runs.

A launch that starts early (programmatic dependent launch) has to wait for the one before it, which may write the plan,
inputs, or even states. Hints read nothing, so they need not wait: only the plan's row is looked at, whatever it holds
by then. It is a guess which is right for all layers of a step but the first; where it is wrong, other memory is asked
for and nothing else happens. `earlier_done` is that wait, for launches that have nothing else to do about it.
kernels/single.py goes further and reads its pool from such a guess, which it then has to check.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.kernels.plan import EMPTY, FOLD_START, FOLDED, HISTORY, SLOT

# one thread of the program asks for all of it, from a multiple of 16 bytes on
ASK = tl.constexpr("""{
    .reg .pred first;
    .reg .b32 thread;
    .reg .b64 at;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    and.b64 at, $1, -16;
    @first cp.async.bulk.prefetch.L2.global [at], $2;
    mov.b32 $0, thread;
}""")


# a branch around the wait would part the loads in front of it from what becomes of them
WAIT_UNLESS = tl.constexpr("""{
    .reg .pred waits;
    setp.eq.s32 waits, $1, 0;
    @waits griddepcontrol.wait;
    mov.b32 $0, $1;
}""")


@triton.jit
def earlier_done(OVERLAP: tl.constexpr):
    """Wait for all earlier launches. The next one may start then: it waits for what it needs itself."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def earlier_done_unless(known, OVERLAP: tl.constexpr):
    """The same, but do not wait where it is `known` (int32, not 0) that what is needed of earlier launches is there."""
    if OVERLAP:
        tl.inline_asm_elementwise(WAIT_UNLESS, "=r,r", [known], tl.int32, is_pure=False, pack=1)
        gdc_launch_dependents()


@triton.jit
def prefetch(at, COUNT: tl.constexpr):
    """Ask for COUNT elements, rounded up to 16 bytes, from the scalar pointer `at` on.

    Compute capability 9.0 and later.
    """
    BYTES: tl.constexpr = COUNT * (at.dtype.element_ty.primitive_bitwidth // 8)
    size = tl.full([], (BYTES + 15) // 16 * 16, tl.int32)
    tl.inline_asm_elementwise(ASK, "=r,l,r", [at.to(tl.int64), size], tl.int32, is_pure=False, pack=1)


@triton.jit
def guessed_row(plan, slots, RING_ROWS: tl.constexpr):
    """(slot, ring row of the first record, folded, history, whether the checkpoint is empty) of the row at `plan`.

    PAD_SLOT where it holds what no plan does. Read past the L1, where what is stale by then would stay.
    """
    slot = tl.load(plan + SLOT, cache_modifier=".cg")
    start = tl.load(plan + FOLD_START, cache_modifier=".cg")
    folded = tl.load(plan + FOLDED, cache_modifier=".cg")
    history = tl.load(plan + HISTORY, cache_modifier=".cg")
    empty = tl.load(plan + EMPTY, cache_modifier=".cg") != 0
    possible = (slot >= 0) & (slot < slots) & (start >= 0) & (start < RING_ROWS)
    return tl.where(possible, slot, -1), start.to(tl.int32), folded, history, empty


@triton.jit
def guessed_turn(order_at, rows):
    """The same of the row, one of `rows`, that the plan's order has at `order_at`; row 0 where that is none."""
    row = tl.load(order_at, cache_modifier=".cg")
    return tl.where((row >= 0) & (row < rows), row, 0)


@triton.jit
def prefetch_rows(
    ring, slot, row, h,
    H: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, RING_HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Ask for ROWS rows from `row` on, of HEADS heads from h on, in a ring: (pointer, slot, row and head stride).

    The ring has RING_HEADS heads, and SIZE elements in a row of one. A head's rows lie together, so several heads are
    asked for whole.
    """
    at = ring[0] + slot * ring[1] + row * ring[2] + h // (H // RING_HEADS) * ring[3]
    prefetch(at, ROWS * SIZE * max(1, HEADS * RING_HEADS // H))


@triton.jit
def prefetch_records(
    keys, ring, slot, row, h, H: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, SIZES: tl.constexpr
):  # fmt: skip
    """The same in the ring of keys and the other rings but write vectors, with (heads, elements) of each in SIZES."""
    prefetch_rows(keys, slot, row, h, H, ROWS, HEADS, SIZES[0][0], SIZES[0][1])
    for field in tl.static_range(len(ring)):
        prefetch_rows(ring[field], slot, row, h, H, ROWS, HEADS, SIZES[field + 1][0], SIZES[field + 1][1])
