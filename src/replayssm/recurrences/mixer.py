"""What surrounds a recurrence in the layers of model libraries: projections, convolution, gates, gated norm.

    conv, gate inputs, z = project(hidden)        the model's own modules, called as such
    k, q, v, ...         = activation(convolution(conv))
    dt, log_decay, ...   = gates(gate inputs, parameters)
    out projection of norm(y, z)

Each recurrence's own `mixer.py` says it for its layers. A mixer is data plus small functions, as a `Binding` is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.recurrences.base import Geometry


@dataclass(frozen=True)
class Projected:
    """What the projections in front of a recurrence make of T tokens of B rows, all in the model's dtype.

    Args:
        conv: [B, T, *] each, the inputs of the convolution, side by side.
        gates: [B, T, *] each, what the gates are made of; contiguous within a token.
        z: [B, T, H * P], the gate of the output; contiguous within a token.
    """

    conv: tuple[Tensor, ...]
    gates: tuple[Tensor, ...]
    z: Tensor


@dataclass(frozen=True)
class Norm:
    """How y and z become the input of the output projection: a root mean square norm and a gate.

    Args:
        size: elements of a group that is normalised by itself.
        weight: [H * P] or, the same for each group, [size]; None where there is no norm but the gate alone.
        eps: added to the mean square.
        gate: what is done to z.
        gate_first: whether y is gated before it is normalised.
    """

    size: int
    weight: Tensor | None
    eps: float
    gate: Literal["silu", "sigmoid"]
    gate_first: bool

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        """[B, T, H * P] in the dtype of `z` of y [B, T, H, P], in fp32 (or fp64) and rounded once, at the end."""
        dtype = torch.promote_types(y.dtype, torch.float32)
        y, wide = y.flatten(2).to(dtype), z.to(dtype)
        gate = F.silu(wide) if self.gate == "silu" else torch.sigmoid(wide)
        if self.gate_first:
            y = y * gate
        if self.weight is not None:
            groups = y.unflatten(2, (-1, self.size))
            groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
            y = (groups * self.weight.to(dtype).view(-1, self.size)).flatten(2)
        return (y if self.gate_first else y * gate).to(z.dtype)


@dataclass(frozen=True)
class Weights:
    """The parameters of one layer that are no projections, as they are in the module.

    Args:
        conv: [C, width].
        conv_bias: [C] or None.
        activation: of the convolution.
        gates: contiguous tensors that the gates need, in the order in which `Mixer.gates` takes them.
        constants: numbers that they need besides.
        norm: what follows the recurrence.
    """

    conv: Tensor
    conv_bias: Tensor | None
    activation: str
    gates: tuple[Tensor, ...]
    constants: tuple[float, ...]
    norm: Norm


@dataclass(frozen=True, eq=False)
class Mixer:
    """The layers around one recurrence.

    Args:
        project: (module, hidden [B, T, *]) -> `Projected`.
        weights: module -> `Weights`; AttributeError where the module lacks one.
        inputs: (geometry, y [B, T, C] of the convolution) -> the recurrence's "model" inputs, as views.
        gates: (gate inputs, gate parameters, constants, geometry) -> its "exact" inputs, fp32. The Triton form says
            the same as `gate`.
        norm: module -> the module that `Weights.norm` stands for, None without one.
        out: module -> the projection behind the norm.
        draw: (geometry, (B, T), dtype, generator) -> random (`Projected`, `Weights`), for tests and benchmarks.
        others: module -> further modules that `gates` stands for, so that nobody calls them.
        masks_inputs: whether a mask of padding tokens multiplies the hidden states in front of the projections and
            nothing else; where it does more, steps that have one run the layer's own forward.
        refusal: module -> why this description is not what the module does, or None; besides what holds for all.
    """

    project: Callable[[Any, Tensor], Projected]
    weights: Callable[[Any], Weights]
    inputs: Callable[[Geometry, Tensor], dict[str, Tensor]]
    gates: Callable[[tuple[Tensor, ...], tuple[Tensor, ...], tuple[float, ...], Geometry], dict[str, Tensor]]
    norm: Callable[[Any], Any]
    out: Callable[[Any], Any]
    draw: Callable[[Geometry, tuple[int, int], torch.dtype, torch.Generator], tuple[Projected, Weights]]
    masks_inputs: bool
    others: Callable[[Any], tuple[Any, ...]] = lambda module: ()
    refusal: Callable[[Any], str | None] = lambda module: None


def split_heads(y: Tensor, **parts: tuple[int, int]) -> dict[str, Tensor]:
    """Views [B, T, heads, size] of the channels of `y` [B, T, C], one after the other, by name: (heads, size)."""
    pieces = y.split([heads * size for heads, size in parts.values()], 2)
    return {name: piece.unflatten(2, parts[name]) for name, piece in zip(parts, pieces, strict=True)}


def conv_weights(module: Any) -> tuple[Tensor, Tensor | None, str]:
    """Weight, bias and activation of a module's `conv1d`."""
    return module.conv1d.weight.squeeze(1), module.conv1d.bias, module.activation


def drawn(
    geometry: Geometry,
    shape: tuple[int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    conv: tuple[int, ...],
    bias: bool,
    gates: tuple[int, ...],
    params: tuple[tuple[int, ...], ...],
    constants: tuple[float, ...],
    norm: Norm,
) -> tuple[Projected, Weights]:
    """What `Mixer.draw` returns, given the sizes: everything projected is a slice of one tensor, as in most layers.

    Args:
        geometry, shape, dtype, generator: as of `Mixer.draw`; tensors are on the generator's device.
        conv, gates: sizes of the inputs of the convolution and of the gates.
        bias: whether the convolution has one.
        params, constants: shapes of the gates' parameters, and their constants.
        norm: with any weight of the right shape.
    """

    def normal(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=generator, device=generator.device)

    channels, width = sum(conv), geometry.heads * geometry.value_dim
    parts = normal(*shape, channels + sum(gates) + width).to(dtype).split([*conv, *gates, width], 2)
    if norm.weight is not None:
        norm = replace(norm, weight=(1 + 0.1 * normal(*norm.weight.shape)).to(dtype))
    weights = Weights(
        conv=(normal(channels, geometry.conv_width) * geometry.conv_width**-0.5).to(dtype),
        conv_bias=normal(channels).to(dtype) if bias else None,
        activation="silu",
        gates=tuple(normal(*dims) for dims in params),
        constants=constants,
        norm=norm,
    )
    return Projected(parts[: len(conv)], parts[len(conv) : -1], parts[-1]), weights
