"""What a layer keeps in a page of vLLM's cache: vLLM's own convolution state, and behind it our tensors and a cursor.

The layout is the only thing that sizes our part, for the layers and for the model class alike. There is one page per
sequence and layer, drafts or not: a draft is a row of the ring and needs no state of its own.

The cursor lies in the page as well, that of the first layer of those that share a block table: whoever copies pages,
as prefix caching does, copies checkpoint, ring and cursor together.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from replayssm.config import ReplayConfig
from replayssm.recurrences.base import Recurrence
from replayssm.recurrences.engine import geometry_of
from replayssm.state.cursor import Cursor
from replayssm.state.layout import PAGE_ALIGNMENT_BYTES, StateLayout
from replayssm.state.pool import LayerState

CURSOR_BYTES = PAGE_ALIGNMENT_BYTES

Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def layout_of(recurrence: Recurrence, config: ReplayConfig, stock: Shapes, model_dtype: torch.dtype) -> StateLayout:
    """The layout of a layer for which vLLM itself keeps `stock`: the shapes of convolution and recurrent state.

    The convolution state stays vLLM's, so the layout has no carry.
    """
    conv, state = stock
    channels, rows = conv if is_conv_state_dim_first() else conv[::-1]
    geometry = geometry_of(state, channels, rows + 2 - config.verify_len)
    return StateLayout(recurrence, geometry, config, model_dtype)


def shapes_of(layout: StateLayout, stock: Shapes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a page's parts: the convolution state, then ours as bytes."""
    return stock[0], (layout.page_bytes + CURSOR_BYTES,)


def dtypes_of(stock: tuple[torch.dtype, torch.dtype]) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of the same."""
    return stock[0], torch.uint8


def cursor_in(layer: LayerState) -> tuple[Cursor, Tensor]:
    """The cursor in a layer's pages, and the counter beside it that `EngineSteps` calls `certain`."""
    assert layer.pages is not None
    words = layer.pages[:, layer.layout.page_bytes :][:, :CURSOR_BYTES].view(torch.int64)
    return Cursor.of(words), words[:, len(fields(Cursor))]
