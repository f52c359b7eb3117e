"""Bringing a step's inputs and ring records into the compute dtype, with everything beyond the mask set to zero."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from replayssm.flow.step import Step
from replayssm.state.layout import StateLayout
from replayssm.state.pool import LayerState


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` [B, R, ...] where `mask` [B, R], else 0; a selection, as unread rows may hold NaN. All of it for None."""
    return x if mask is None else torch.where(mask.reshape(*mask.shape, *[1] * (x.dim() - 2)), x, 0)


def check_inputs(layout: StateLayout, step: Step, inputs: Mapping[str, Tensor]) -> None:
    """ValueError unless the layer's inputs are exactly those of its recurrence, in shape, dtype and device."""
    recurrence = layout.recurrence
    names = [f.name for f in recurrence.inputs]
    if set(inputs) != set(names):
        raise ValueError(f"inputs of {recurrence.title} must be exactly {names}, got {sorted(inputs)}")
    rows, device = step.plan.shape[0], step.plan.device
    for field in recurrence.inputs:
        x, shape = inputs[field.name], (rows, step.width, *field.shape(layout.geometry))
        if tuple(x.shape) != shape:
            raise ValueError(f"input {field.name!r} must have shape {list(shape)}, got {list(x.shape)}")
        if x.device != device:
            raise ValueError(f"input {field.name!r} is on {x.device}, the pool on {device}")
        expected = layout.dtype_of(field)
        if x.dtype != expected:
            raise ValueError(f"input {field.name!r} must be {expected}, got {x.dtype}")


def take_inputs(layout: StateLayout, step: Step, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layer's inputs, checked, masked and raised to the compute dtype."""
    check_inputs(layout, step, inputs)
    mask, dtype = None if step.is_full else step.token_mask, layout.compute_dtype
    return {field.name: masked(inputs[field.name], mask).to(dtype) for field in layout.recurrence.inputs}


def take_ring(layer: LayerState, slots: Tensor, rows: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Ring records at physical `rows` [B, R], masked and raised to the compute dtype."""
    dtype = layer.layout.compute_dtype
    return {name: masked(x, mask).to(dtype) for name, x in layer.ring(slots, rows).items()}
