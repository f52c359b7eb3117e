"""Keys and values of a batch whose rows differ in length: each row writes behind its own tokens, in memory that stays.

transformers appends a forward's tokens to the cache, at the same columns of every row, and its static cache writes them
all at one place. Rows that accept different numbers of drafts, or have prompts of different lengths, need neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionAndFullAttentionLayer

BLOCK = 64
"""Capacities are multiples of it: masks then have rows that attention kernels can load whole."""


class Columns:
    """Where a forward's tokens go in every layer of one cache.

    Args:
        capacity: columns to begin with; more are added when a forward needs them.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = _rounded(capacity)
        self.at = torch.empty(0, 0, dtype=torch.int64)
        """int64 [B, T], the column of each token."""
        self.read = 0
        """Columns that attention reads, from the first on."""

    def place(self, at: Tensor, read: int) -> None:
        """The next forward writes its tokens to `at` and reads the first `read` columns."""
        self.at, self.read = at, read
        if read > self.capacity:
            self.capacity = max(2 * self.capacity, _rounded(read))


class Ragged:
    """Part of a cache layer's class that keeps keys and values at given columns."""

    columns: Columns
    is_initialized: bool
    keys: Any
    values: Any

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys = self._put(self.keys if self.is_initialized else None, key_states)
        self.values = self._put(self.values if self.is_initialized else None, value_states)
        self.is_initialized = True
        read = self.columns.read
        return self.keys[:, :, :read], self.values[:, :, :read]

    def _put(self, held: Tensor | None, new: Tensor) -> Tensor:
        """`held` [B, heads, capacity, dim] with the new columns [B, heads, T, dim] in it."""
        batch, heads, _, dim = new.shape
        if held is None or held.shape[2] < self.columns.capacity:
            # zeros, because a masked column counts 0 times what it holds
            grown = new.new_zeros(batch, heads, self.columns.capacity, dim)
            if held is not None:
                grown[:, :, : held.shape[2]] = held
            held = grown
        rows = torch.arange(batch, device=new.device).unsqueeze(1)
        held.transpose(1, 2)[rows, self.columns.at] = new.transpose(1, 2)
        return held

    def get_seq_length(self, *_: Any) -> int:
        """Columns before those of the running forward."""
        return self.columns.read - self.columns.at.shape[1]

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        return self.columns.read, 0


class RaggedLayer(Ragged, DynamicLayer):
    """A layer of attention alone."""


class RaggedRecurrentLayer(Ragged, LinearAttentionAndFullAttentionLayer):
    """A layer that has a recurrent state as well."""


CLASSES: dict[type, type] = {
    DynamicLayer: RaggedLayer,
    LinearAttentionAndFullAttentionLayer: RaggedRecurrentLayer,
}


def ragged_cache(config: Any, columns: Columns) -> DynamicCache:
    """A cache for a model of this configuration with ragged rows, wherever attention finds keys by a mask."""
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) in CLASSES:
            cache.layers[index] = CLASSES[type(layer)]()
            cache.layers[index].columns = columns
    return cache


def _rounded(capacity: int) -> int:
    return -(-capacity // BLOCK) * BLOCK
