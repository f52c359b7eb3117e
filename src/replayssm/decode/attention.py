"""Attention of few new tokens on a long cache, for models whose query heads share keys.

transformers repeats keys and values for every query head as soon as there is a mask, which in a decode step costs more
than the attention does. Here the query heads of one key head are more queries of that head. Load a model with
`attn_implementation=GROUPED` to use it; it needs torch's scaled-dot-product attention only. `STATIC` is for a `Runner`
on a GPU, whose shapes stay: torch compiles its flex attention for them, which reads keys and values at the rate of the
memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "replayssm_grouped"
STATIC = "replayssm_static"
MOST_STATIC_QUERIES = 64
"""Query tokens times query heads per key head up to which flex attention splits the keys instead of the queries."""


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Outputs [B, T, heads, dim] of queries [B, heads, T, dim] on keys and values [B, key heads, S, dim]."""
    if attention_mask is None or key.shape[1] == query.shape[1]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    shared = _shared(query, key)
    mask = attention_mask.repeat(1, 1, shared.shape[2] // query.shape[2], 1)
    out = nn.functional.scaled_dot_product_attention(
        shared, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return _apart(out, query), None


def static_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The same by flex attention, for a runner's steps on a GPU; everything else takes `grouped_attention`."""
    shared = _shared(query, key)
    if dropout or query.device.type != "cuda" or not fits_static(shared, attention_mask):
        return grouped_attention(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)
    return _apart(_compiled()(shared, key, value, attention_mask, scaling), query), None


def fits_static(shared: Tensor, mask: Tensor | None) -> TypeGuard[Tensor]:
    """Whether `biased_attention` takes these queries with this mask: one that is added, for each row and all heads."""
    if mask is None or not mask.is_floating_point() or mask.shape[:2] != (len(shared), 1):
        return False
    return shared.shape[2] <= MOST_STATIC_QUERIES


def biased_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float | None) -> Tensor:
    """Flex attention of grouped queries [B, key heads, groups * T, dim]; bias [B, 1, T, S] is added to the scores."""
    tokens = bias.shape[2]

    def biased(score: Tensor, row: Tensor, head: Tensor, place: Tensor, column: Tensor) -> Tensor:
        return score + bias[row, 0, place % tokens, column]

    out = flex_attention(query, key, value, score_mod=biased, scale=scaling)
    assert isinstance(out, Tensor)
    return out


@cache
def _compiled() -> Any:
    return torch.compile(biased_attention, dynamic=False)


def _shared(query: Tensor, key: Tensor) -> Tensor:
    """Queries [B, key heads, groups * T, dim] of [B, heads, T, dim]: the heads of a key head side by side."""
    return query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)


def _apart(out: Tensor, query: Tensor) -> Tensor:
    """Outputs [B, T, heads, dim] of grouped ones."""
    return out.unflatten(2, (-1, query.shape[2])).flatten(1, 2).transpose(1, 2).contiguous()


def register() -> None:
    """Make `GROUPED` and `STATIC` known to transformers."""
    for name, attention in ((GROUPED, grouped_attention), (STATIC, static_attention)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, sdpa_mask)


register()
