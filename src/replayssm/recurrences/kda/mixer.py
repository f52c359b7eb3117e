"""The layers around Kimi Delta Attention: q, k, v before a convolution, decay and z of low rank, a norm per head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.recurrences.base import Geometry
from replayssm.recurrences.kda.spec import KimiDeltaAttention
from replayssm.recurrences.mixer import Mixer, Norm, Projected, Weights, conv_weights, drawn, split_heads


def project(module: Any, hidden: Tensor) -> Projected:
    decay = module.forget_gate
    return Projected(
        (module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)),
        (decay.f_b_proj(decay.f_a_proj(hidden)), module.b_proj(hidden)),
        module.g_b_proj(module.g_a_proj(hidden)),
    )


def weights(module: Any) -> Weights:
    decay, norm = module.forget_gate, module.o_norm
    gated_norm = Norm(module.head_dim, norm.weight, norm.variance_epsilon, "sigmoid", gate_first=False)
    # 0 stands for a decay without a bound
    bound = getattr(decay, "safe_gate_lower_bound", None) or 0.0
    return Weights(*conv_weights(module), (decay.A_log, decay.dt_bias), (bound,), gated_norm)


def inputs(geometry: Geometry, y: Tensor) -> dict[str, Tensor]:
    key = (geometry.heads, geometry.key_dim)
    return split_heads(y, q=key, k=key, v=(geometry.heads, geometry.value_dim))


def gates(
    given: tuple[Tensor, ...], params: tuple[Tensor, ...], constants: tuple[float, ...], geometry: Geometry
) -> dict[str, Tensor]:
    f_raw, b_raw = given
    A_log, dt_bias = params
    heads = (geometry.heads, geometry.key_dim)
    log_decay = KimiDeltaAttention.log_decay_of_gate(
        f_raw.unflatten(-1, heads), A_log.flatten(), dt_bias.view(heads), constants[0] or None
    )
    return {"log_decay": log_decay, "beta": torch.sigmoid(b_raw.float())}


def refusal(module: Any) -> str | None:
    """The decay gate is a module of its own: it must do what `gates` says."""
    decay, described = module.forget_gate, weights(module)
    # the projection may be wrapped, so that it has no weight of its own
    weight = next((p for p in decay.f_a_proj.parameters() if p.is_floating_point()), None)
    if weight is None:
        return "the projections of its decay gate are not in a floating dtype"
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 3, module.hidden_size, generator=draw).to(weight.device, weight.dtype)
    with torch.no_grad():
        given = decay.f_b_proj(decay.f_a_proj(hidden)).unflatten(-1, (module.num_heads, -1))
        A_log, dt_bias = described.gates
        ours = KimiDeltaAttention.log_decay_of_gate(
            given, A_log.flatten(), dt_bias.view(given.shape[2:]), described.constants[0] or None
        )
        same = torch.allclose(decay(hidden).float(), ours, rtol=1e-3, atol=1e-5)
    return None if same else f"{type(decay).__name__} is not the decay gate that is known"


def draw(
    geometry: Geometry, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> tuple[Projected, Weights]:
    heads, N, P = geometry.heads, geometry.key_dim, geometry.value_dim
    return drawn(
        geometry,
        shape,
        dtype,
        generator,
        conv=(heads * N, heads * N, heads * P),
        bias=False,
        gates=(heads * N, heads),
        params=((heads,), (heads * N,)),
        constants=(0.0,),
        norm=Norm(P, torch.empty(P), 1e-5, "sigmoid", gate_first=False),
    )


MIXER = Mixer(
    project=project,
    weights=weights,
    inputs=inputs,
    gates=gates,
    norm=lambda module: module.o_norm,
    out=lambda module: module.o_proj,
    draw=draw,
    masks_inputs=True,
    others=lambda module: (module.forget_gate,),
    refusal=refusal,
)
