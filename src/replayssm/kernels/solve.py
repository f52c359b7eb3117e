"""A launch before the first one, for delta rules beside a read copy: windows that a fold must solve again.

The ring's write vectors were corrected against the read copy, which must not reach the checkpoint. What takes the
errors of a window to its write vectors depends on keys, rates and decays alone: for each head of the rows that are due,
`solves` [B, H, WP + 1, WP] holds the matrix M = (I + A)^-1 diag(rate), with A[s, i] = rate_s (decay from i to s)
(k_s . k_i) for i < s, and behind it the factors of S^T k. The flush launch applies both (`exact.solved_writes`).

A solution is a chain of dependent rows, which takes its time whatever else runs: many small programs wait side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.kernels.exact import exact_dot
from replayssm.kernels.plan import DUE_COUNT, FOLD_START, FOLDED, ORDER, SLOT
from replayssm.kernels.prepare import pick


@triton.jit
def solve_kernel(
    plan_row, plan, keys, ring, rates, layer_params, solves,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, RING_ROWS: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr,
    OVERLAP: tl.constexpr, RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
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
        gdc_wait()
        gdc_launch_dependents()
    due = tl.load(plan + DUE_COUNT).to(tl.int32)
    for item in range(tl.program_id(0), due * H, tl.num_programs(0)):
        b = tl.load(plan + item // H * plan_row + ORDER)
        row = plan + b * plan_row
        h = item % H
        solve_window(
            h, h // (H // G), tl.load(row + SLOT), tl.load(row + FOLDED), tl.load(row + FOLD_START), keys, ring, rates,
            layer_params, solves + (b * H + h) * ((WP + 1) * WP), N, RING_ROWS, NP, WP, RECORD_SCALES, RECORD_DECAY,
        )  # fmt: skip


@triton.jit
def solve_window(
    h, g, slot, folded, start, keys, ring, rates, layer_params, out,
    N: tl.constexpr, RING_ROWS: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
):  # fmt: skip
    """`solves` of one head, row by row: M_s = rate_s (e_s - sum over i < s of (decay) (k_s . k_i) M_i)."""
    n, i = tl.arange(0, NP), tl.arange(0, WP)
    kept_mask = i < folded
    rows = (start + i) % RING_ROWS
    key_at = keys[0] + slot * keys[1] + rows[:, None] * keys[2] + g * keys[3] + n[None, :]
    raw = tl.load(key_at, mask=kept_mask[:, None] & (n < N)[None, :], other=0)
    key_scale, _ = RECORD_SCALES(ring, slot, rows, g, h, kept_mask)
    log_decay = RECORD_DECAY(ring, layer_params, slot, rows, h, 0, kept_mask, N)
    rate = tl.load(rates[0] + slot * rates[1] + rows * rates[2] + h * rates[3], mask=kept_mask, other=0)
    overlap = exact_dot(raw, tl.trans(raw)) * key_scale[:, None] * key_scale[None, :]
    matrix = tl.zeros([WP, WP], tl.float32)
    since = tl.zeros([WP], tl.float32)  # log decay from record i to the present one, a sum of one sign
    for s in range(folded):
        here = i == s
        since = tl.where(i < s, since + tl.sum(tl.where(here, log_decay, 0.0), 0), 0.0)
        rate_s = tl.sum(tl.where(here, rate, 0.0), 0)
        weight = tl.where(i < s, rate_s * tl.exp(since) * pick(overlap, s), 0.0)
        row = tl.where(here, rate_s, 0.0) - tl.sum(weight[:, None] * matrix, 0)
        matrix = tl.where(here[:, None], row[None, :], matrix)
    tl.store(out + i[:, None] * WP + i[None, :], matrix)
    tl.store(out + WP * WP + i, tl.exp(tl.cumsum(log_decay, 0)) * key_scale)
