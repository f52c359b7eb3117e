"""Prompts: `prefill` runs our own chunked scan, `load` takes a state that something else computed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from replayssm.flow import algebra
from replayssm.flow.flush import fold_due
from replayssm.flow.records import take_inputs
from replayssm.flow.step import Step
from replayssm.flow.verify import window_outputs
from replayssm.state.pool import StatePool

CHUNK = 64  # tokens solved together; the work per token grows with it, the passes over the state shrink


def prefill(pool: StatePool, layer: int, step: Step, inputs: Mapping[str, Tensor]) -> Tensor:
    """Run one layer over a prompt (or its next chunk) and store the state after it.

    Args:
        pool: the pool.
        layer: index into `pool.layers`.
        step: from `prompt`.
        inputs: the fields of `recurrence.inputs`, each [B, L, ...]; rows may have different numbers of tokens.

    Returns:
        y [B, L, H, P] in the compute dtype; zero beyond each row's tokens.
    """
    _require_prompt(step)
    target = pool.layers[layer]
    recurrence, geometry = target.layout.recurrence, target.layout.geometry
    taken = take_inputs(target.layout, step, inputs)
    state = state_before(pool, layer, step)
    outputs = []
    for begin in range(0, step.width, CHUNK):
        chunk = {name: x[:, begin : begin + CHUNK] for name, x in taken.items()}
        record = recurrence.record(chunk, target.params)
        descends = algebra.chain(min(CHUNK, step.width - begin), state.device)
        y, u = window_outputs(target, state, None, record, chunk, descends)
        log_decay = recurrence.decay_channels(record, target.params)
        # a masked token must not decay the state of a shorter row
        valid = step.token_mask[:, begin : begin + CHUNK, None, None]
        log_decay, u = torch.where(valid, log_decay, 0), torch.where(valid, u, 0)
        state = algebra.fold(state, recurrence.key(record), u, log_decay, geometry)
        outputs.append(y)
    pool.store(layer, step.slots, state, step.tokens > 0, step.position + step.tokens)
    y = torch.cat(outputs, 1) if outputs else state.new_zeros(len(step.slots), 0, geometry.heads, geometry.value_dim)
    return torch.where(step.token_mask[..., None, None], y, 0)


def state_before(pool: StatePool, layer: int, step: Step) -> Tensor:
    """The exact state [B, H, N, P] before a prompt step's tokens: checkpoint with the ring folded in, zero when fresh.

    Rows with committed records are folded, as `Step.due` says of every prompt row.
    """
    _require_prompt(step)
    target = pool.layers[layer]
    fold_due(pool, layer, step)
    return torch.where(step.empty[:, None, None, None], 0, target.state(step.slots, "checkpoint"))


def load(pool: StatePool, layer: int, step: Step, state: Tensor) -> None:
    """Store a state that the model's own scan (or an engine) computed over this step's tokens.

    Args:
        pool: the pool.
        layer: index into `pool.layers`.
        step: from `prompt`; its `tokens` are the tokens that `state` has and the slot had not.
        state: [B, H, N, P], the state after them. The convolution's inputs go through `conv_append`.
    """
    _require_prompt(step)
    layout = pool.layers[layer].layout
    expected = (len(step.slots), *layout.geometry.state_shape)
    if tuple(state.shape) != expected or not state.is_floating_point():
        raise ValueError(f"state must be floating {list(expected)}, got {state.dtype} {list(state.shape)}")
    pool.store(layer, step.slots, state.to(layout.compute_dtype), step.tokens > 0, step.position + step.tokens)


def _require_prompt(step: Step) -> None:
    if not step.is_prompt:
        raise ValueError("prefill and load need a step opened with `prompt`: decode steps go to the ring")
