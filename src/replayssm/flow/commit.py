"""commit: make the first `accepted` pending rows of each slot real. Only adds to cursors; rejection costs nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.flow.backend import kernels_of
from replayssm.flow.step import batch_of, on_device, per_row
from replayssm.state.cursor import commit as advance
from replayssm.state.pool import StatePool
from replayssm.state.rows import host_visible
from replayssm.state.slots import PAD_SLOT


def commit(pool: StatePool, slots: Sequence[int] | Tensor, accepted: int | Sequence[int] | Tensor) -> None:
    """Accept tokens of the last step, all layers at once. One-shot: nothing is pending afterwards.

    Args:
        pool: the pool.
        slots: [B], keyed by slot and not by the batch order of the step; PAD_SLOT rows are ignored.
        accepted: how many of each slot's pending rows stay, 0..pending. 0 leaves the logical state as it was.

    Raises:
        ValueError: accepted is out of range (device tensors are clamped instead: the host does not wait for them).
    """
    index = batch_of(pool, slots)
    count = per_row(pool, accepted, len(index), "accepted")
    if host_visible(index):
        _require_pending(pool, index, count)
    kernels = kernels_of(pool)
    if kernels is not None:
        kernels.commit(index, count)
        return
    live, at, cursor = index != PAD_SLOT, index.clamp(min=0), pool.cursor
    pending = torch.where(live, cursor.pending[at], 0)
    kept = torch.minimum(on_device(pool, count).clamp(min=0), pending)
    length, position = advance(cursor.length[at], cursor.position[at], kept)
    cursor.length.index_add_(0, at, length - cursor.length[at])
    cursor.position.index_add_(0, at, position - cursor.position[at])
    cursor.pending.index_add_(0, at, -pending)


def _require_pending(pool: StatePool, slots: Tensor, accepted: int | Tensor) -> None:
    live = slots != PAD_SLOT
    pending = torch.where(live, pool.cursor.pending[slots.clamp(min=0)], 0)
    count = torch.as_tensor(accepted).expand(len(slots))
    wrong = live & ((count < 0) | (count > pending))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"accepted {int(count[row])} for slot {int(slots[row])}, which has {int(pending[row])} pending rows"
        )
