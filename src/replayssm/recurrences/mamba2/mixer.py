"""The layers around Mamba-2: one projection z | x, B, C | dt, and a norm of the gated output, group by group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.recurrences.base import Geometry
from replayssm.recurrences.mamba2.spec import Mamba2
from replayssm.recurrences.mixer import Mixer, Norm, Projected, Weights, conv_weights, drawn, split_heads


def project(module: Any, hidden: Tensor) -> Projected:
    scale, scales = getattr(module, "ssm_in_multiplier", None), getattr(module, "mup_vector", None)
    if scale is not None:
        hidden = hidden * scale
    projected = module.in_proj(hidden)
    if scales is not None:
        projected = projected * scales
    z, conv, dt = projected.split([module.intermediate_size, module.conv_dim, module.num_heads], -1)
    return Projected((conv,), (dt,), z)


def weights(module: Any) -> Weights:
    return Weights(*conv_weights(module), (module.dt_bias,), (), gated_norm(module))


def gated_norm(module: Any) -> Norm:
    """Versions and families of transformers differ in the groups; FalconH1 may gate last, or not normalise at all."""
    width, layer = module.intermediate_size, norm(module)
    if layer is None:
        return Norm(width, None, 0.0, "silu", gate_first=True)
    groups = getattr(layer, "n_groups", 1)
    size = getattr(layer, "group_size", width // groups)
    return Norm(size, layer.weight, layer.variance_epsilon, "silu", not getattr(layer, "norm_before_gate", False))


def norm(module: Any) -> Any:
    return module.norm if getattr(module, "mamba_rms_norm", True) else None


def inputs(geometry: Geometry, y: Tensor) -> dict[str, Tensor]:
    group = (geometry.key_heads, geometry.key_dim)
    return split_heads(y, x=(geometry.heads, geometry.value_dim), B=group, C=group)


def gates(
    given: tuple[Tensor, ...], params: tuple[Tensor, ...], constants: tuple[float, ...], geometry: Geometry
) -> dict[str, Tensor]:
    return {"dt": Mamba2.step_size(given[0], params[0])}


def draw(
    geometry: Geometry, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> tuple[Projected, Weights]:
    heads, width = geometry.heads, geometry.heads * geometry.value_dim
    norm = Norm(width // geometry.key_heads, torch.empty(width), 1e-5, "silu", gate_first=True)
    channels = width + 2 * geometry.key_heads * geometry.key_dim
    return drawn(
        geometry,
        shape,
        dtype,
        generator,
        conv=(channels,),
        bias=True,
        gates=(heads,),
        params=((heads,),),
        constants=(),
        norm=norm,
    )


MIXER = Mixer(
    project=project,
    weights=weights,
    inputs=inputs,
    gates=gates,
    norm=norm,
    out=lambda module: module.out_proj,
    draw=draw,
    masks_inputs=False,
)
