"""The layers around Gated DeltaNet: q | k | v before a convolution, a and b for the gates, a norm per head, then z."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.recurrences.base import Geometry
from replayssm.recurrences.gdn.spec import GatedDeltaNet
from replayssm.recurrences.mixer import Mixer, Norm, Projected, Weights, conv_weights, drawn, split_heads


def project(module: Any, hidden: Tensor) -> Projected:
    """Projections of q, k and v: together, with z and interleaved by key heads, or each by itself."""
    if hasattr(module, "in_proj_qkv"):
        return Projected(
            (module.in_proj_qkv(hidden),),
            (module.in_proj_a(hidden), module.in_proj_b(hidden)),
            module.in_proj_z(hidden),
        )
    if hasattr(module, "in_proj_qkvz"):
        sorted_out = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
        q, k, v, z, b, a = (part.flatten(2) for part in sorted_out)
        return Projected((q, k, v), (a, b), z)
    return Projected(
        (module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)),
        (module.a_proj(hidden), module.b_proj(hidden)),
        module.g_proj(hidden),
    )


def weights(module: Any) -> Weights:
    layer = norm(module)
    gated_norm = Norm(module.head_v_dim, layer.weight, layer.variance_epsilon, "silu", gate_first=False)
    # with negative eigenvalues allowed, beta reaches from 0 to 2
    most = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
    return Weights(*conv_weights(module), (module.A_log, module.dt_bias), (most,), gated_norm)


def norm(module: Any) -> Any:
    return module.norm if hasattr(module, "norm") else module.o_norm


def out(module: Any) -> Any:
    return module.out_proj if hasattr(module, "out_proj") else module.o_proj


def inputs(geometry: Geometry, y: Tensor) -> dict[str, Tensor]:
    key = (geometry.key_heads, geometry.key_dim)
    return split_heads(y, q=key, k=key, v=(geometry.heads, geometry.value_dim))


def gates(
    given: tuple[Tensor, ...], params: tuple[Tensor, ...], constants: tuple[float, ...], geometry: Geometry
) -> dict[str, Tensor]:
    log_decay, beta = GatedDeltaNet.gates(*given, *params)
    return {"log_decay": log_decay, "beta": beta * constants[0]}


def draw(
    geometry: Geometry, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> tuple[Projected, Weights]:
    heads, P = geometry.heads, geometry.value_dim
    return drawn(
        geometry,
        shape,
        dtype,
        generator,
        conv=(2 * geometry.key_heads * geometry.key_dim + heads * P,),
        bias=False,
        gates=(heads, heads),
        params=((heads,), (heads,)),
        constants=(1.0,),
        norm=Norm(P, torch.empty(P), 1e-6, "silu", gate_first=False),
    )


MIXER = Mixer(
    project=project, weights=weights, inputs=inputs, gates=gates, norm=norm, out=out, draw=draw, masks_inputs=True
)
