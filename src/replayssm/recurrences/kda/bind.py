"""Kimi Delta Attention layers of transformers. Their state is [B, H, N, P], as ours; gates arrive activated."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from replayssm.recurrences.base import Geometry
from replayssm.recurrences.binding import Binding, Core
from replayssm.recurrences.kda.mixer import MIXER


def geometry(mixer: Any) -> Geometry:
    channels, _, width = mixer.conv1d.weight.shape
    return Geometry(
        heads=mixer.num_heads,
        key_heads=mixer.num_heads,
        key_dim=mixer.head_dim,
        value_dim=mixer.head_dim,
        conv_channels=channels,
        conv_width=width,
    )


def inputs(
    geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **call: Any
) -> dict[str, Tensor]:
    """q, k [B, T, H, N] before normalisation; v [B, T, H, P]; g (log_decay) [B, T, H, N]; beta [B, T, H]."""
    assert call["use_qk_l2norm_in_kernel"]
    return {"q": q, "k": k, "v": v, "log_decay": g, "beta": beta}


def result(y: Tensor, state: Any, q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Any]:
    return y.to(q.dtype), state


def unchanged(state: Tensor) -> Tensor:
    return state


BINDING = Binding(
    mixers={"KimiLinearDeltaAttention": "kimi_linear", "Glm5NextTextLinearAttention": "glm5_next"},
    cores=(
        Core("recurrent_kimi_delta_attention", inputs, result),
        Core("chunk_kimi_delta_attention", inputs, result),
    ),
    geometry=geometry,
    params=lambda mixer: {},
    to_model=unchanged,
    from_model=unchanged,
    mixer=MIXER,
)
