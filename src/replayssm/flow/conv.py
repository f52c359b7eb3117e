"""The causal convolution's window: a small ring of raw inputs per slot that rewinds with the cursor.

Row = position mod carry rows. A step writes its tokens' inputs behind the committed ones; `commit` moves the position,
so that rejected inputs are simply overwritten. In a draft tree an output reads the inputs on the path to its token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.flow.records import masked
from replayssm.flow.step import Step
from replayssm.state.cursor import carry_row
from replayssm.state.pool import LayerState, StatePool
from replayssm.state.rows import put_rows


def conv_window(pool: StatePool, layer: int, step: Step) -> Tensor:
    """The conv_width - 1 inputs before this step's tokens, oldest first: [B, lag, channels], zero before the start."""
    state = pool.layers[layer]
    _require_conv(state)
    offsets = torch.arange(-state.layout.conv_lag, 0, device=step.position.device)
    return _window(state, step.slots, step.position.unsqueeze(1) + offsets, step.tokens > 0)


def _window(state: LayerState, slots: Tensor, positions: Tensor, active: Tensor) -> Tensor:
    rows = carry_row(positions.clamp(min=0), state.layout.carry_rows)
    values = state.tensors["carry.conv"][slots.clamp(min=0).unsqueeze(1), rows]
    return masked(values, (positions >= 0) & active.unsqueeze(1))


def conv_append(pool: StatePool, layer: int, step: Step, raw: Tensor) -> None:
    """Write the raw inputs `raw` [B, T, channels] of this step's tokens."""
    state = pool.layers[layer]
    _require_conv(state)
    layout = state.layout
    expected = (len(step.slots), step.width, layout.geometry.conv_channels)
    if tuple(raw.shape) != expected or raw.dtype != layout.model_dtype:
        raise ValueError(
            f"conv inputs must be {layout.model_dtype} {list(expected)}, got {raw.dtype} {list(raw.shape)}"
        )
    # of a long prompt only the last rows survive; writing older ones to the same rows would race
    offsets = torch.arange(step.width, device=raw.device)
    active = step.token_mask & (offsets >= step.tokens.unsqueeze(1) - layout.carry_rows)
    rows = carry_row(step.position.unsqueeze(1) + offsets, layout.carry_rows)
    index = (step.slots.unsqueeze(1).expand(-1, step.width).flatten(), rows.flatten())
    put_rows(state.tensors["carry.conv"], index, raw.flatten(0, 1), active.flatten())


def conv_paths(step: Step, joined: Tensor, width: int) -> Tensor:
    """The inputs that each token's output reads, oldest first: [B, T, channels, width].

    Args:
        step: from `open_step`.
        joined: [B, width - 1 + T, channels], the inputs before the step's tokens and theirs.
        width: taps of the convolution.
    """
    lag, parents = width - 1, step.parents
    # the place in `joined` of what each token follows; the window's own rows follow each other
    follows = torch.where(parents < 0, lag - 1, lag + parents)
    at = lag + torch.arange(step.width, device=joined.device).expand_as(follows)
    places = [at]
    for _ in range(lag):
        at = torch.where(at < lag, at - 1, follows.gather(1, (at - lag).clamp(min=0)))
        places.append(at)
    batch = torch.arange(len(joined), device=joined.device)[:, None, None]
    return joined[batch, torch.stack(places[::-1], 2)].transpose(2, 3)


def causal_conv(
    pool: StatePool, layer: int, step: Step, raw: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Depthwise causal convolution with SiLU over window and tokens; appends the tokens' inputs.

    Args:
        pool: the pool.
        layer: index into `pool.layers`.
        step: from `open_step`; for prompts as well.
        raw: [B, T, channels] in the model's dtype.
        weight: [channels, conv_width].
        bias: [channels] or None.

    Returns:
        [B, T, channels] in the model's dtype; zero on padded rows and tokens.
    """
    window = conv_window(pool, layer, step)
    conv_append(pool, layer, step, raw)
    if step.width == 0:
        return raw  # torch refuses a convolution without outputs
    joined = torch.cat([window, masked(raw, step.token_mask)], 1)
    if not step.is_tree:
        total = F.conv1d(joined.transpose(1, 2), weight.unsqueeze(1), bias, groups=weight.shape[0]).transpose(1, 2)
    else:
        # every token's path as a sequence of its own, so that the sum is rounded as a chain's
        paths = conv_paths(step, joined, weight.shape[1]).flatten(0, 1)
        total = F.conv1d(paths, weight.unsqueeze(1), bias, groups=weight.shape[0]).view_as(raw)
    return masked(F.silu(total), step.token_mask)


def _require_conv(state: LayerState) -> None:
    if not state.layout.geometry.conv_channels:
        raise ValueError("this layer has no convolution: its geometry says conv_channels = 0")
