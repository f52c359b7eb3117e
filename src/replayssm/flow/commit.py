"""commit: make the first `accepted` pending rows of each slot real. Only adds to cursors; rejection costs nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.flow.step import batch_of, per_row
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
    live, at = index != PAD_SLOT, index.clamp(min=0)
    count = per_row(pool, accepted, len(index), "accepted")
    cursor = pool.cursor
    pending = torch.where(live, cursor.pending[at], 0)
    if host_visible(count):
        wrong = live & ((count < 0) | (count > pending))
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"accepted {int(count[row])} for slot {int(index[row])}, which has {int(pending[row])} pending rows"
            )
    count = torch.where(live, torch.minimum(count.clamp(min=0), pending), 0)
    length, position = advance(cursor.length[at], cursor.position[at], count)
    cursor.length.index_add_(0, at, torch.where(live, length - cursor.length[at], 0))
    cursor.position.index_add_(0, at, torch.where(live, position - cursor.position[at], 0))
    cursor.pending.index_add_(0, at, -pending)
