"""flush: fold the ring's committed records into a new checkpoint. Never changes the logical state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.flow import algebra
from replayssm.flow.backend import fold_kernels_of
from replayssm.flow.records import take_ring
from replayssm.flow.step import Step, guarded, open_step, settle_flush
from replayssm.state.pool import LayerState, StatePool
from replayssm.state.rows import host_visible


def flush(pool: StatePool, slots: Sequence[int] | Tensor) -> None:
    """Fold these slots now, between steps. Pending rows stay pending."""
    forced = open_step(pool, slots, 0, forced=True)
    with guarded(pool, forced):
        for layer in range(len(pool.layers)):
            fold_due(pool, layer, forced)
    settle_flush(pool, forced)


def fold_due(pool: StatePool, number: int, step: Step) -> None:
    """Fold, in layer `number`, the records of the rows that are due; other rows are untouched."""
    if not step.folds:
        return
    kernels = fold_kernels_of(pool)
    if kernels is not None:
        kernels.fold_due(number, step.plan)
        return
    layer = pool.layers[number]
    active = None if step.is_full else step.folded > 0
    slots, rows, mask, empty = step.slots, step.fold_rows, step.fold_mask, step.empty_before
    tokens = step.position - step.history
    if active is not None and host_visible(active):
        chosen = active.nonzero().squeeze(1)
        if not len(chosen):
            return
        slots, rows, mask, empty, active, tokens = (x[chosen] for x in (slots, rows, mask, empty, active, tokens))
    pool.store(number, slots, folded_state(layer, slots, rows, mask, empty), active, tokens)


def folded_state(layer: LayerState, slots: Tensor, rows: Tensor, mask: Tensor, empty: Tensor) -> Tensor:
    """The state [B, H, N, P] after the checkpoint and the masked records, in the compute dtype.

    Args:
        layer: the layer.
        slots: [B].
        rows: physical ring rows [B, R], oldest first.
        mask: bool [B, R], which of them count; a prefix of each row.
        empty: bool [B], whose checkpoint stands for zero.
    """
    recurrence, geometry = layer.layout.recurrence, layer.layout.geometry
    state = torch.where(empty[:, None, None, None], 0, layer.state(slots, "checkpoint"))
    # in fp64, as the fold itself: what the ring holds exactly then enters the state with the fold's one rounding
    record = {name: x.double() for name, x in take_ring(layer, slots, rows, mask).items()}
    key, log_decay = recurrence.key(record), recurrence.decay_channels(record, layer.params)
    if not recurrence.delta_rule:
        u = recurrence.write(record)
    elif layer.layout.read_format is None:
        u = record["u"]
    else:
        # the ring's u was corrected against the rounded read copy: solve the window again from the raw inputs
        sums = algebra.path_sums(log_decay)
        reaches = algebra.chain(key.shape[1], key.device)
        overlap = algebra.products(key, key, algebra.decay_between(sums, sums, reaches), geometry)
        answered = algebra.read_state(state.double(), key, sums.exp(), geometry)
        u = algebra.solve(recurrence.rate(record), recurrence.target(record) - answered, overlap)
    return algebra.fold(state, key, u, log_decay, geometry)
