"""The causal convolution's window: a small ring of raw inputs per slot that rewinds with the cursor.

Row = position mod carry rows. A step writes its tokens' inputs behind the committed ones; `commit` moves the position,
so that rejected inputs are simply overwritten. In a draft tree an output reads the inputs on the path to its token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.flow.backend import kernels_of
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


ACTIVATIONS = (None, "silu", "swish")
"""What `causal_conv` may do to its sums. The last two are the same."""


def causal_conv(
    pool: StatePool,
    layer: int,
    step: Step,
    raw: Tensor | Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
) -> Tensor:
    """Depthwise causal convolution over window and tokens; appends the tokens' inputs.

    Args:
        pool: the pool.
        layer: index into `pool.layers`.
        step: from `open_step`; for prompts as well.
        raw: [B, T, channels] in the model's dtype, any strides; or several that lie side by side.
        weight: [channels, conv_width], any strides and floating dtype. The sum is rounded to it, and the activation
            after it again.
        bias: [channels] of the same dtype, or None.
        activation: one of `ACTIVATIONS`.

    Returns:
        [B, T, channels] in the model's dtype; zero on padded rows and tokens.

    Raises:
        ValueError: an argument has another shape or dtype, or the activation is unknown.
    """
    state = pool.layers[layer]
    _require_conv(state)
    parts = [raw] if isinstance(raw, Tensor) else list(raw)
    check_conv(state, step, parts, weight, bias, activation)
    kernels = None if step.is_prompt else kernels_of(pool)
    if kernels is not None and step.width:
        return kernels.causal_conv(layer, step.plan, parts, weight, bias, activation, step.is_tree)
    raw = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    window = conv_window(pool, layer, step)
    conv_append(pool, layer, step, raw)
    if step.width == 0:
        return raw  # torch refuses a convolution without outputs
    joined = torch.cat([window, masked(raw, step.token_mask)], 1).to(weight.dtype)
    if not step.is_tree:
        total = F.conv1d(joined.transpose(1, 2), weight.unsqueeze(1), bias, groups=weight.shape[0]).transpose(1, 2)
    else:
        # every token's path as a sequence of its own, so that the sum is rounded as a chain's
        paths = conv_paths(step, joined, weight.shape[1]).flatten(0, 1)
        total = F.conv1d(paths, weight.unsqueeze(1), bias, groups=weight.shape[0]).view_as(raw)
    return masked(total if activation is None else F.silu(total), step.token_mask).to(raw.dtype)


def check_conv(
    state: LayerState, step: Step, parts: list[Tensor], weight: Tensor, bias: Tensor | None, activation: str | None
) -> None:
    """ValueError unless `causal_conv` can run with these."""
    layout, batch = state.layout, (step.plan.shape[0], step.width)
    channels, width = layout.geometry.conv_channels, layout.geometry.conv_width
    fits = all(part.dim() == 3 and part.shape[:2] == batch and part.dtype == layout.model_dtype for part in parts)
    if not fits or sum(part.shape[2] for part in parts) != channels:
        given = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
        raise ValueError(f"conv inputs must be {layout.model_dtype} {[*batch, channels]}, got {given}")
    if tuple(weight.shape) != (channels, width) or not weight.is_floating_point():
        raise ValueError(f"conv weights must be floating {[channels, width]}, got {weight.dtype} {list(weight.shape)}")
    if bias is not None and (tuple(bias.shape) != (channels,) or bias.dtype != weight.dtype):
        raise ValueError(f"conv bias must be {weight.dtype} {[channels]}, got {bias.dtype} {list(bias.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")


def _require_conv(state: LayerState) -> None:
    if not state.layout.geometry.conv_channels:
        raise ValueError("this layer has no convolution: its geometry says conv_channels = 0")
