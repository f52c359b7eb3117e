"""A launch beside the first one, for delta rules with a read copy: windows that a fold must solve again.

The ring's write vectors were corrected against the read copy, which must not reach the checkpoint. What takes the
errors of a window to its write vectors depends on keys, rates and decays alone: for each head of the rows that are due,
`solves` [B, H, WP + 1, WP] holds the matrix M = (I + A)^-1 diag(rate), with A[s, i] = rate_s (decay from i to s)
(k_s . k_i) for i < s, and behind it the factors of S^T k, where a decay per channel does not keep them from being drawn
out. The flush launch applies both (`exact.solved_writes`).

M is found by forward substitution, and each of its columns by itself: a thread holds one and waits for nobody. What all
of them multiply with, A, lies in M's place in memory until then.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.kernels.exact import exact_dot
from replayssm.kernels.plan import DUE_COUNT, FOLD_START, FOLDED, ORDER, SLOT

CHANNELS = tl.constexpr(16)
"""Channels whose decays a program holds at once."""


@triton.jit
def solve_kernel(
    plan_row, plan, keys, ring, rates, layer_params, solves,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, RING_ROWS: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr,
    CHANNEL: tl.constexpr, OVERLAP: tl.constexpr, RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
):  # fmt: skip
    """A fixed grid walks through the heads of the rows that are due.

    | argument | shape                | in/out | meaning                                                        |
    |----------|----------------------|--------|----------------------------------------------------------------|
    | plan     | [B, columns] int64   | in     | `state.plan.COLUMNS`; rows lie `plan_row` apart                |
    | keys     | [slots, rows, G, N]  | in     | ring of raw keys: (pointer, slot, row and head stride)         |
    | rates    | [slots, rows, H]     | in     | ring of rates: the same                                        |
    | ring     | tuple of such        | in     | the recurrence's other ring fields, write vectors excepted     |
    | layer_params | tuple of pointers | in    | per-layer constants                                            |
    | solves   | [B, H, WP + 1, WP] fp32 | out | see the module; written for rows that fold                     |
    """
    if OVERLAP:
        # the first launch has let this one start after all that it waited for had ended, and writes nothing read here
        gdc_launch_dependents()
    due = tl.load(plan + DUE_COUNT).to(tl.int32)
    for item in range(tl.program_id(0), due * H, tl.num_programs(0)):
        b = tl.load(plan + item // H * plan_row + ORDER)
        row = plan + b * plan_row
        h = item % H
        solve_window(
            h, h // (H // G), tl.load(row + SLOT), tl.load(row + FOLDED).to(tl.int32),
            tl.load(row + FOLD_START).to(tl.int32), keys, ring, rates, layer_params,
            solves + (b * H + h) * ((WP + 1) * WP), N, RING_ROWS, NP, WP, CHANNEL, RECORD_SCALES, RECORD_DECAY,
        )  # fmt: skip
    if OVERLAP:
        gdc_wait()  # whoever waits for this launch counts on the first one having ended as well


@triton.jit
def solve_window(
    h, g, slot, folded, start, keys, ring, rates, layer_params, out,
    N: tl.constexpr, RING_ROWS: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr, CHANNEL: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
):  # fmt: skip
    """`solves` of one head."""
    i = tl.arange(0, WP)
    kept_mask = i < folded
    rows = (start + i) % RING_ROWS
    key_rows = keys[0] + slot * keys[1] + rows[:, None] * keys[2] + g * keys[3]
    key_scale, _ = RECORD_SCALES(ring, slot, rows, g, h, kept_mask)
    rate = tl.load(rates[0] + slot * rates[1] + rows * rates[2] + h * rates[3], mask=kept_mask, other=0)
    later = i[:, None] > i[None, :]
    if CHANNEL:
        corrections = tl.zeros([WP, WP], tl.float32)
        for first in tl.range(0, NP, CHANNELS, num_stages=1):
            n = first + tl.arange(0, CHANNELS)
            corrections += channel_overlap(
                key_rows, ring, layer_params, slot, start, folded, h, n, N, WP, RING_ROWS, RECORD_DECAY
            )
    else:
        n = tl.arange(0, NP)
        raw = tl.load(key_rows + n[None, :], mask=kept_mask[:, None] & (n < N)[None, :], other=0)
        log_decay = RECORD_DECAY(ring, layer_params, slot, rows, h, 0, kept_mask, N)
        # log decay from a record to a later one, a sum of one sign
        since = tl.cumsum(tl.where(later, log_decay[:, None], 0.0), 0)
        corrections = tl.exp(since) * exact_dot(raw, tl.trans(raw))
        tl.store(out + WP * WP + i, tl.exp(tl.cumsum(log_decay, 0)) * key_scale)
    corrections *= rate[:, None] * key_scale[:, None] * key_scale[None, :]
    tl.store(out + i[:, None] * WP + i[None, :], tl.where(later, corrections, 0.0))
    substitute(out, rate, WP)


@triton.jit
def channel_overlap(
    key_rows, ring, layer_params, slot, start, records, h, n,
    N: tl.constexpr, WP: tl.constexpr, RING_ROWS: tl.constexpr, RECORD_DECAY: tl.constexpr,
):  # fmt: skip
    """[WP, WP]: products of raw keys over the channels `n`, with their decays from the earlier to the later record.

    The decay between two records is drawn apart where a boundary between halves, quarters, eighths ... of the window
    first parts them: no factor is larger than 1, each exponent is a sum of one sign, and all pairs that a boundary
    parts are one product of matrices. Entries that are no decay from an earlier record to a later one are 0.
    """
    i = tl.arange(0, WP)
    rows, later_rows = (start + i) % RING_ROWS, (start + i + 1) % RING_ROWS
    mask, later_mask = (i < records)[:, None] & (n < N)[None, :], (i + 1 < records)[:, None] & (n < N)[None, :]
    k = tl.load(key_rows + n[None, :], mask=mask, other=0).to(tl.float32)
    here = RECORD_DECAY(ring, layer_params, slot, rows[:, None], h, n[None, :], mask, N)
    later = RECORD_DECAY(ring, layer_params, slot, later_rows[:, None], h, n[None, :], later_mask, N)
    overlap = tl.zeros([WP, WP], tl.float32)
    for level in tl.static_range(16):
        if 1 << level < WP:
            overlap += parted_overlap(k, here, later, 1 << level)
    return overlap


@triton.jit
def parted_overlap(k, here, later, PART: tl.constexpr):
    """The same for records in neighbouring parts of PART rows, the first of which has an even number.

    `k`, `here`, `later` [WP, channels]: keys, and the log decays of each row and of the row after it.
    """
    shape: tl.constexpr = [k.shape[0] // PART, PART, k.shape[1]]
    i = tl.arange(0, k.shape[0])
    part = i // PART
    # from the boundary to rows behind it, and from those before it to the boundary
    after = tl.reshape(tl.cumsum(tl.reshape(here, shape), 1), k.shape)
    inside = tl.where((i % PART == PART - 1)[:, None], 0.0, later)
    before = tl.reshape(tl.cumsum(tl.reshape(inside, shape), 1, reverse=True), k.shape)
    decayed = k * tl.exp(tl.where((part % 2 == 1)[:, None], after, before))
    parted = (part[:, None] % 2 == 1) & (part[None, :] == part[:, None] - 1)
    return tl.where(parted, tl.dot(decayed, tl.trans(decayed), input_precision="tf32x3"), 0.0)


@triton.jit
def substitute(out, rate, WP: tl.constexpr):
    """Put M = (I + A)^-1 diag(rate) where `out` [WP, WP] has A, strictly lower: BLOCK rows after those before them."""
    BLOCK: tl.constexpr = min(WP, 32)
    column, i, k = tl.arange(0, WP), tl.arange(0, BLOCK)[:, None], tl.arange(0, WP)
    for first in range(0, WP, BLOCK):
        tl.debug_barrier()  # what other threads have stored is read
        rows = out + first * WP
        if WP > BLOCK:  # what is known of M goes to the right-hand side
            above = (k < first)[:, None] & (column < first)[None, :]
            taken = tl.load(rows + i * WP + k[None, :], mask=(k < first)[None, :], other=0)
            known = tl.load(out + k[:, None] * WP + column[None, :], mask=above, other=0)
            tl.debug_barrier()
            right = -tl.dot(taken, known, input_precision="tf32x3")
            tl.store(rows + i * WP + column[None, :], right, mask=(column < first)[None, :])
            tl.debug_barrier()
        solve_rows(rows, rate, first, WP, BLOCK)


@triton.jit
def solve_rows(rows, rate, first, WP: tl.constexpr, BLOCK: tl.constexpr):
    """Replace `rows` [BLOCK, WP], the right-hand side up to column `first` and A from there on, with those of M."""
    column = tl.arange(0, WP)
    # two numbers at a time
    two = (rows + first).to(tl.pointer_type(tl.int64))
    known = ()
    for s in tl.static_range(BLOCK):
        row = tl.where(column == first + s, rate, 0.0)
        if WP > BLOCK:
            row += tl.load(rows + s * WP + column, mask=column < first, other=0)
        for i in tl.static_range(0, s, 2):
            pair = tl.load(two + (s * WP + i) // 2)
            row -= pair.to(tl.int32).to(tl.float32, bitcast=True) * known[i]
            if i + 1 < s:
                row -= (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True) * known[i + 1]
        known = known + (row,)  # type: ignore[assignment]
    tl.debug_barrier()  # nobody needs these rows of A any more
    for s in tl.static_range(BLOCK):
        tl.store(rows + s * WP + column, known[s])
