"""The causal convolution of tokens that go to the ring, on the state that vLLM keeps for it.

That state is a window over a sequence's recent inputs, conv_width - 1 + drafts of them. A step writes those of all its
tokens; the next one is told how many were accepted, and begins that far into the window: rejection costs nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

from replayssm.attach.vllm.metadata import DecodeRows


def convolve(
    raw: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, activation: str, rows: DecodeRows, taps: int
) -> Tensor:
    """Convolved and activated tokens [n, channels]; `states` move on.

    Args:
        raw: [n, channels].
        states: vLLM's convolution states, in the order that it was told to keep them in.
        weight: [channels, taps].
        bias: [channels] or None.
        activation: "silu" or "swish".
        rows: whose tokens they are.
        taps: inputs that one output needs.
    """
    window = channels_first(states)
    if raw.device.type == "cpu":
        return _on_cpu(raw, window, weight, bias, rows, taps - 1)
    drafts = {} if rows.starts is None else _draft_arguments(rows, window.shape[-1] + 2 - taps)
    return causal_conv1d_update(raw, window, weight, bias, activation, conv_state_indices=rows.blocks, **drafts)


def channels_first(states: Tensor) -> Tensor:
    """vLLM's convolution states as [blocks, channels, rows], whichever order it keeps them in."""
    return states if is_conv_state_dim_first() else states.transpose(-1, -2)


def _draft_arguments(rows: DecodeRows, most: int) -> dict[str, object]:
    return {"num_accepted_tokens": rows.accepted, "query_start_loc": rows.starts, "max_query_len": most}


def _on_cpu(raw: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, rows: DecodeRows, lag: int) -> Tensor:
    """The same in torch: vLLM's CPU operator does not know of drafts."""
    live = rows.blocks.nonzero().squeeze(1)
    at = rows.blocks[live].long()
    kept = history(window[at], None if rows.accepted is None else rows.accepted[live], lag)
    joined = torch.cat([kept.to(raw.dtype), rows.spread(raw)[live].transpose(1, 2)], 2)
    y = F.silu(F.conv1d(joined, weight.unsqueeze(1), bias, groups=len(weight))).transpose(1, 2)
    window[at, :, : joined.shape[2] - 1] = joined[:, :, 1:].to(window.dtype)
    out = raw.new_zeros(*rows.spread(raw).shape)
    out[live] = y
    return out.flatten(0, 1) if rows.gather is None else _gathered(out, rows, raw)


def history(window: Tensor, accepted: Tensor | None, lag: int) -> Tensor:
    """The `lag` inputs [B, channels, lag] before each row's next token, from its window [B, channels, rows].

    Args:
        window: as a step left it that wrote any number of tokens.
        accepted: [B], how many of those were kept, at least 1; None where there was one.
        lag: inputs to return.
    """
    if accepted is None:
        return window[:, :, :lag]
    place = accepted.long().unsqueeze(1) - 1 + torch.arange(lag, device=window.device)
    return window.gather(2, place.unsqueeze(1).expand(-1, window.shape[1], -1))


def _gathered(spread: Tensor, rows: DecodeRows, raw: Tensor) -> Tensor:
    out = torch.zeros_like(raw)
    rows.collect(spread, out)
    return out
