"""verify: outputs of T new tokens per row from checkpoint and ring, without storing the state. Decode is T = 1.

The tokens of a row form a tree of drafts; a chain is the tree with one branch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from replayssm.flow import algebra
from replayssm.flow.backend import kernels_of
from replayssm.flow.flush import fold_due
from replayssm.flow.records import check_inputs, take_inputs, take_ring
from replayssm.flow.step import Step
from replayssm.state.pool import LayerState, StatePool
from replayssm.state.rows import put_rows


def verify(pool: StatePool, layer: int, step: Step, inputs: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
    """Run one layer of a step.

    Rows that are due are folded first. The tokens' records are written behind the committed ones; they become real
    with `commit`. On a GPU a step may begin to read states and rings while the launch right before it still runs, so
    whatever else changes them does so before `open_step`.

    Args:
        pool: the pool.
        layer: index into `pool.layers`.
        step: from `open_step`.
        inputs: the fields of `recurrence.inputs`, each [B, T, ...]; "model" fields in the model's dtype. Rows and
            tokens beyond the step's mask may hold anything.
        out: [B, T, H, P] to write the outputs to, contiguous within a token, in any floating dtype.

    Returns:
        y [B, T, H, P] in the compute dtype, or `out`; zero on padded rows and tokens.

    Raises:
        ValueError: a field is missing, unknown, or has the wrong shape, dtype or device.
    """
    state = pool.layers[layer]
    if out is not None:
        _check_out(state, step, out)
    kernels = kernels_of(pool)
    if kernels is not None and step.width > 0:
        check_inputs(state.layout, step, inputs)
        return kernels.verify(layer, step.plan, step.width, inputs, out, step.is_tree)
    y = _verify(pool, layer, step, take_inputs(state.layout, step, inputs))
    return y if out is None else out.copy_(y)


def _check_out(layer: LayerState, step: Step, out: Tensor) -> None:
    geometry = layer.layout.geometry
    shape = (step.plan.shape[0], step.width, geometry.heads, geometry.value_dim)
    if tuple(out.shape) != shape or out.device != step.plan.device or not out.is_floating_point():
        given = f"{out.dtype} {list(out.shape)} on {out.device}"
        raise ValueError(f"out must be floating {list(shape)} on {step.plan.device}, got {given}")
    if out.stride()[2:] != (geometry.value_dim, 1):
        raise ValueError(f"out must be contiguous within a token, got strides {list(out.stride())}")


def _verify(pool: StatePool, number: int, step: Step, inputs: dict[str, Tensor]) -> Tensor:
    layer = pool.layers[number]
    recurrence = layer.layout.recurrence
    fold_due(pool, number, step)
    state = layer.state(step.slots, layer.read_kind)
    if layer.layout.read_format is not None:
        # a row that has just folded has the checkpoint in hand: it reads that
        state = torch.where((step.folded > 0)[:, None, None, None], layer.state(step.slots, "checkpoint"), state)
    state = torch.where(step.empty[:, None, None, None], 0, state)

    history = None
    if not (step.is_full and step.folds):  # where every row has just folded, no ring has anything
        history = take_ring(layer, step.slots, step.history_rows, step.history_mask)
    record = recurrence.record(inputs, layer.params)
    y, u = window_outputs(layer, state, history, record, inputs, step.descends)

    if recurrence.delta_rule:
        record["u"] = u
    active = None if step.is_full else step.token_mask.flatten()
    index = (step.slots.unsqueeze(1).expand(-1, step.width).flatten(), step.draft_rows.flatten())
    for field in layer.layout.ring_fields:
        put_rows(layer.tensors[f"ring.{field.name}"], index, record[field.name].flatten(0, 1), active)
    return y if step.is_full else torch.where(step.token_mask[..., None, None], y, 0)


def window_outputs(
    layer: LayerState,
    state: Tensor,
    history: dict[str, Tensor] | None,
    record: dict[str, Tensor],
    inputs: dict[str, Tensor],
    descends: Tensor,
) -> tuple[Tensor, Tensor]:
    """(y, u) of T tokens [B, T, H, P] after `state` [B, H, N, P] and, behind it, the committed `history`.

    The whole history lies on the path to every token; of the others, `descends` [B, T, T] says which do.
    """
    recurrence, geometry, params = layer.layout.recurrence, layer.layout.geometry, layer.params
    key, log_decay = recurrence.key(record), recurrence.decay_channels(record, params)
    dtype, past = state.dtype, 0
    earlier_u: list[Tensor] = []
    keys, decays, reaches = key, log_decay, descends.expand(len(key), -1, -1)
    if history is not None:
        keys = torch.cat([recurrence.key(history), key], 1)
        decays = torch.cat([recurrence.decay_channels(history, params), log_decay], 1)
        earlier_u = [history["u"] if recurrence.delta_rule else recurrence.write(history)]
        past = earlier_u[0].shape[1]
        reaches = torch.cat([reaches.new_ones(*reaches.shape[:2], past), reaches], 2)
    later = algebra.path_sums(decays, reaches)
    sums = torch.cat([algebra.path_sums(decays[:, :past]), later], 1)
    decay = algebra.decay_between(later, sums, reaches)
    whole = later.to(dtype).exp()

    if recurrence.delta_rule:
        # in fp64: with nearly equal keys the corrections cancel each other, and rounded products of keys would add up
        overlap = algebra.products(key.double(), keys.double(), decay, geometry)
        error = recurrence.target(record) - algebra.read_state(state, key, whole, geometry).double()
        if earlier_u:
            error = error - torch.einsum("btrh,brhp->bthp", overlap[:, :, :past], earlier_u[0].double())
        u = algebra.solve(recurrence.rate(record).double(), error, overlap[:, :, past:]).to(dtype)
    else:
        u = recurrence.write(record)

    query = recurrence.query(inputs, params)
    weights = algebra.products(query, keys, decay.to(dtype), geometry)
    y = algebra.read_state(state, query, whole, geometry)
    y = y + torch.einsum("btrh,brhp->bthp", weights, torch.cat([*earlier_u, u], 1))
    bypass = recurrence.skip(inputs, params)
    return (y if bypass is None else y + bypass), u
