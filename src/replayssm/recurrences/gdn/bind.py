"""Gated DeltaNet layers of transformers. Their state is [B, H, N, P], as ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from replayssm.recurrences.base import Geometry
from replayssm.recurrences.binding import Binding, Core
from replayssm.recurrences.gdn.mixer import MIXER


def geometry(mixer: Any) -> Geometry:
    channels, _, width = mixer.conv1d.weight.shape
    return Geometry(
        heads=mixer.num_v_heads,
        key_heads=mixer.num_k_heads,
        key_dim=mixer.head_k_dim,
        value_dim=mixer.head_v_dim,
        conv_channels=channels,
        conv_width=width,
    )


def inputs(
    geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **call: Any
) -> dict[str, Tensor]:
    """q, k [B, T, heads, N] before normalisation; v [B, T, H, P]; g (log_decay) and beta [B, T, H].

    transformers before 5.23 hands over q and k with each key head repeated for its group of heads.
    """
    assert call["use_qk_l2norm_in_kernel"]
    repeats = q.shape[2] // geometry.key_heads
    return {"q": q[:, :, ::repeats], "k": k[:, :, ::repeats], "v": v, "log_decay": g, "beta": beta}


def result(y: Tensor, state: Any, q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Any]:
    return y.to(q.dtype), state


def unchanged(state: Tensor) -> Tensor:
    return state


BINDING = Binding(
    mixers={
        "Qwen3NextGatedDeltaNet": "qwen3_next",
        "Qwen3_5GatedDeltaNet": "qwen3_5",
        "Qwen3_5MoeGatedDeltaNet": "qwen3_5_moe",
        "OlmoHybridGatedDeltaNet": "olmo_hybrid",
    },
    cores=(
        Core("torch_recurrent_gated_delta_rule", inputs, result),
        Core("torch_chunk_gated_delta_rule", inputs, result),
    ),
    geometry=geometry,
    params=lambda mixer: {},
    to_model=unchanged,
    from_model=unchanged,
    mixer=MIXER,
)
