"""Attention of few new tokens on a long cache, for models whose query heads share keys.

transformers repeats keys and values for every query head as soon as there is a mask, which in a decode step costs more
than the attention does. Here the query heads of one key head are more queries of that head. Load a model with
`attn_implementation=GROUPED` to use it; it needs torch's scaled-dot-product attention only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "replayssm_grouped"


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
    groups = query.shape[1] // key.shape[1]
    shared = query.unflatten(1, (key.shape[1], groups)).flatten(2, 3)
    mask = attention_mask.repeat(1, 1, groups, 1)
    out = nn.functional.scaled_dot_product_attention(
        shared, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return out.unflatten(2, (groups, query.shape[2])).flatten(1, 2).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `GROUPED` known to transformers."""
    AttentionInterface.register(GROUPED, grouped_attention)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)


register()
