"""What a layer keeps in a page of vLLM's cache: our tensors, and behind them vLLM's own convolution state.

The layout is the only thing that sizes either of them, for the layers and for the model class alike. There is one page
per sequence and layer, drafts or not: a draft is a row of the ring and needs no state of its own.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from replayssm.config import ReplayConfig
from replayssm.recurrences.base import Recurrence
from replayssm.recurrences.engine import geometry_of
from replayssm.state.layout import StateLayout

Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def layout_of(recurrence: Recurrence, config: ReplayConfig, stock: Shapes, model_dtype: torch.dtype) -> StateLayout:
    """The layout of a layer for which vLLM itself keeps `stock`: the shapes of convolution and recurrent state.

    The convolution state stays vLLM's, so the layout has no carry.
    """
    conv, state = stock
    channels, rows = conv if is_conv_state_dim_first() else conv[::-1]
    geometry = geometry_of(state, channels, rows + 2 - config.verify_len)
    return StateLayout(recurrence, geometry, config, model_dtype)


def shapes_of(layout: StateLayout, stock: Shapes) -> Shapes:
    """Shapes of a page's parts: our tensors as bytes, then the convolution state."""
    return (layout.page_bytes,), stock[0]


def dtypes_of(stock: tuple[torch.dtype, torch.dtype]) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of the same."""
    return torch.uint8, stock[0]
