"""materialize: the state at an exact committed boundary, for prefix caches and engines. Leaves the slot alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.flow.backend import fold_kernels_of
from replayssm.flow.flush import folded_state
from replayssm.flow.step import Step, per_row, plan_rows
from replayssm.state.plan import COLUMN
from replayssm.state.pool import StatePool


def materialize(
    pool: StatePool, layer: int, slots: Sequence[int], records: int | Sequence[int] | Tensor | None = None
) -> Tensor:
    """States [B, H, N, P] of one layer in the compute dtype.

    Args:
        pool: the pool.
        layer: index into `pool.layers`.
        slots: live slots; the same one may come several times, for several boundaries.
        records: how many of each slot's committed ring records to apply, 0..length; all of them by default. Pending
            rows are never applied.
    """
    return _states(pool, layer, slots, _boundaries(pool, slots, records))


def materialize_into(
    pool: StatePool,
    slots: Sequence[int],
    records: int | Sequence[int] | Tensor | None = None,
    dst: Sequence[int] | None = None,
) -> list[int]:
    """Put states at exact boundaries into free slots, folded, with their carry; returns the slots taken.

    Going back behind the newest record needs carry_history when the layers have a convolution.
    """
    bounds = _boundaries(pool, slots, records)
    for slot, count in zip(slots, bounds.tolist(), strict=True):
        pool.require_reach(int(pool.cursor.length[slot]), count)
    taken: list[int] = []
    try:
        for i in range(len(slots)):
            taken.append(pool.acquire(None if dst is None else dst[i]))
    except ValueError:
        for slot in taken:
            pool.release(slot)
        raise
    source, target = (torch.tensor(x, dtype=torch.int64, device=pool.device) for x in (list(slots), taken))
    tokens = pool.cursor.position[source] - pool.cursor.length[source] + bounds
    pool.cursor.seed[target] = pool.cursor.seed[source]
    active = torch.ones(len(taken), dtype=torch.bool, device=pool.device)
    kernels = fold_kernels_of(pool)
    for index, layer in enumerate(pool.layers):
        if kernels is None:
            pool.store(index, target, _states(pool, index, slots, bounds), active, tokens)
        else:
            kernels.materialize_into(index, _plan(pool, slots, bounds), target)
        if "carry.conv" in layer.tensors:
            carry = layer.tensors["carry.conv"]
            for src, new in zip(slots, taken, strict=True):
                carry[new].copy_(carry[src])
    pool.cursor.position[target] = tokens
    pool.cursor.saturated[target] += pool.cursor.saturated[source]  # a copy of a clamped state is as wrong, and warns
    return taken


def _boundaries(pool: StatePool, slots: Sequence[int], records: int | Sequence[int] | Tensor | None) -> Tensor:
    for slot in slots:
        pool.slots.require_live(slot)
    length = pool.cursor.length[torch.tensor(list(slots), dtype=torch.int64, device=pool.device)]
    if records is None:
        return length
    count = torch.as_tensor(per_row(pool, records, len(slots), "records"), device=pool.device).expand(len(slots))
    wrong = (count < 0) | (count > length)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"slot {slots[row]} has {int(length[row])} committed records in its ring, got records = {int(count[row])}"
        )
    return count


def _states(pool: StatePool, layer: int, slots: Sequence[int], records: Tensor) -> Tensor:
    kernels = fold_kernels_of(pool)
    if kernels is not None:
        out = torch.empty(len(slots), *pool.layers[layer].layout.geometry.state_shape, device=pool.device)
        kernels.materialize(layer, _plan(pool, slots, records), out)
        return out
    step = Step(_plan(pool, slots, records), 0, False, pool.config.window, pool.ring_rows)
    return folded_state(pool.layers[layer], step.slots, step.fold_rows, step.fold_mask, step.empty_before)


def _plan(pool: StatePool, slots: Sequence[int], records: Tensor) -> Tensor:
    """A plan [B, columns] whose rows fold `records` of their slots' records: as a flush's, but for some of them."""
    index = torch.tensor(list(slots), dtype=torch.int64, device=pool.device)
    plan = plan_rows(pool, index, 0, 0, pool.config.window, True)
    plan[:, COLUMN["folded"]] = records
    return plan
