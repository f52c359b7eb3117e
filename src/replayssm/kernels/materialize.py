"""The Triton template of `materialize`: the state after any prefix of the ring, for many rows in one launch.

A flush between steps is the same with the slot's own checkpoint as destination. A program owns one row, one head and
BLOCK_P columns; each state is read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels.exact import channel_keys, clamp, fold_channel, fold_head, head_weights, high_low, newest_first
from replayssm.kernels.launch import clamp_limit, layer_arguments, layer_constants, run
from replayssm.kernels.plan import EMPTY, FOLD_START, FOLDED, SLOT
from replayssm.state.layout import StateLayout
from replayssm.state.pool import LayerState

BLOCK_P, NUM_WARPS = 32, 4


@triton.jit
def fold(
    S, keys, writes, ring, layer_params, slot, start, records, g, h, n, n_mask, p, p_mask,
    N: tl.constexpr, WP: tl.constexpr, RING_ROWS: tl.constexpr, CHANNEL: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
):  # fmt: skip
    """The columns S [NP, BLOCK_P] of a state after the oldest `records` records of its ring."""
    j = tl.arange(0, WP) if CHANNEL else newest_first(WP)
    rows = (start + j) % RING_ROWS
    past = tl.load(
        writes[0] + slot * writes[1] + rows[:, None] * writes[2] + h * writes[3] + p[None, :],
        mask=(j < records)[:, None] & p_mask[None, :],
        other=0,
    ).to(tl.float32)
    if CHANNEL:
        scaled, log_decay = channel_keys(
            keys, ring, layer_params, slot, start, records, g, h, n, n_mask,
            N, WP, RING_ROWS, RECORD_SCALES, RECORD_DECAY,
        )  # fmt: skip
        return fold_channel(S, scaled, past, log_decay)
    else:
        raw_keys = tl.load(
            keys[0] + slot * keys[1] + rows[None, :] * keys[2] + g * keys[3] + n[:, None],
            mask=(j < records)[None, :] & n_mask[:, None],
            other=0,
        )
        head = h + tl.zeros([1, 1], tl.int32)
        weight, log_decay = head_weights(
            ring, layer_params, slot, start, records, g, head, N, WP, RING_ROWS, RECORD_SCALES, RECORD_DECAY
        )
        high, low = high_low(tl.sum(log_decay, 0))
        return fold_head(S, raw_keys, tl.sum(weight, 0)[:, None] * past, high, low)


@triton.jit
def materialize_kernel(
    plan_row, plan, state, state_slot, keys, writes, ring, layer_params, out, out_row, targets, saturated,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr,
    RING_ROWS: tl.constexpr, BLOCK_P: tl.constexpr, CHANNEL: tl.constexpr, LIMIT: tl.constexpr,
    INTO_SLOTS: tl.constexpr, ONLY_DUE: tl.constexpr, RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
):  # fmt: skip
    """See the module. M rows; H heads, G key heads, N key dim, P value dim.

    | argument | shape | in/out | meaning |
    |----------|-------|--------|---------|
    | plan | [M, columns] int64 | in | slot, folded (the records to apply), fold_start, empty |
    | state | [slots, H, N, P] | in | checkpoint |
    | keys, writes | [slots, rows, G, N], [slots, rows, H, P] | in | ring: (pointer, slot, row and head stride) |
    | ring | tuple of such | in | the recurrence's other ring fields |
    | layer_params | tuple of pointers | in | per-layer constants |
    | out | [M, H, N, P], or [slots, H, N, P] when INTO_SLOTS | out | the states |
    | targets | [M] int64 | in | (pointer, stride): the slot that each row is written to, when INTO_SLOTS |
    | saturated | [slots] int64 | in/out | counts elements beyond LIMIT, when INTO_SLOTS |

    ONLY_DUE leaves rows without records alone: a flush in place.
    """
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    pid = tl.program_id(0)
    m = (pid // (tiles * H)).to(tl.int64)
    h = pid // tiles % H
    g = h // (H // G)
    plan += m * plan_row
    slot = tl.load(plan + SLOT)
    records = tl.load(plan + FOLDED)
    if slot >= 0 and (records > 0 or not ONLY_DUE):
        n = tl.arange(0, NP)
        p = pid % tiles * BLOCK_P + tl.arange(0, BLOCK_P)
        n_mask, p_mask = n < N, p < P
        mask = n_mask[:, None] & p_mask[None, :]
        empty = tl.load(plan + EMPTY) != 0
        offsets = h * (N * P) + n[:, None] * P + p[None, :]
        S = tl.load(state + slot * state_slot + offsets, mask=mask & (not empty), other=0).to(tl.float32)
        start = tl.load(plan + FOLD_START)
        S = fold(
            S, keys, writes, ring, layer_params, slot, start, records, g, h, n, n_mask, p, p_mask,
            N, WP, RING_ROWS, CHANNEL, RECORD_SCALES, RECORD_DECAY,
        )  # fmt: skip
        target = m
        if INTO_SLOTS:
            target = tl.load(targets[0] + m * targets[1])
        if LIMIT > 0:
            S = clamp(S, saturated + target, LIMIT, INTO_SLOTS)
        tl.store(out + target * out_row + offsets, S.to(out.dtype.element_ty), mask=mask)


def launch_fold(layer: LayerState, plan: Tensor, saturated: Tensor) -> None:
    """Fold the rows of a step that are due, in place.

    Args:
        layer: the layer.
        plan: int64 [B, columns].
        saturated: the cursor's counter, int64 [slots].
    """
    _launch(layer, plan, layer.tensors["checkpoint"], plan[:, SLOT.value], saturated, only_due=True)


def launch_materialize(layer: LayerState, plan: Tensor, targets: Tensor, saturated: Tensor) -> None:
    """Put the states of the plan's rows into the checkpoints of the slots `targets` [M], none of which is a source."""
    _launch(layer, plan, layer.tensors["checkpoint"], targets, saturated, only_due=False)


def launch_read(layer: LayerState, plan: Tensor, out: Tensor) -> None:
    """Put the states of the plan's rows into `out` [M, H, N, P], contiguous within a row."""
    _launch(layer, plan, out, None, None, only_due=False)


def _launch(
    layer: LayerState, plan: Tensor, out: Tensor, targets: Tensor | None, saturated: Tensor | None, *, only_due: bool
) -> None:
    if not len(plan):
        return
    layout = layer.layout
    given = layer_arguments(layer, plan) | {
        "out": out,
        "out_row": out.stride(0),
        "targets": (plan, 0) if targets is None else (targets, targets.stride(0)),
        "saturated": plan if saturated is None else saturated,
    }
    programs = len(plan) * layout.geometry.heads * triton.cdiv(layout.geometry.value_dim, BLOCK_P)
    compiled_for = constants(layout, out.dtype, into_slots=targets is not None, only_due=only_due)
    run(materialize_kernel, programs, given, compiled_for, num_warps=NUM_WARPS)


def constants(layout: StateLayout, dtype: torch.dtype, *, into_slots: bool, only_due: bool) -> dict[str, object]:
    """Compile-time arguments of `materialize_kernel`, among others, for a destination of `dtype`."""
    return layer_constants(layout) | {
        "BLOCK_P": BLOCK_P,
        "LIMIT": clamp_limit(torch.finfo(dtype).max),
        "INTO_SLOTS": into_slots,
        "ONLY_DUE": only_due,
    }
