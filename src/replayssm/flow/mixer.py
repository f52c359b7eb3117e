"""mix: everything between the projections of a recurrent layer, in one call and, on kernels, in few launches.

    convolution and gates, verify, norm and gate

The torch back end below is what it means; `recurrences/<name>/mixer.py` says what differs between recurrences.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from replayssm.flow.backend import kernels_of
from replayssm.flow.conv import causal_conv, check_conv
from replayssm.flow.step import Step
from replayssm.flow.verify import verify
from replayssm.recurrences.base import Tensors
from replayssm.recurrences.mixer import Mixer, Projected, Weights
from replayssm.state.pool import StatePool


def mix(
    pool: StatePool,
    layer: int,
    step: Step,
    mixer: Mixer,
    weights: Weights,
    projected: Projected,
    advance: Callable[[Tensors], Tensor] | None = None,
) -> Tensor:
    """Run one layer of a step to the ring, from its projections to the input of its output projection.

    Args:
        pool: the pool.
        layer: index into `pool.layers`.
        step: from `open_step`, no prompt.
        mixer: of the layer's recurrence.
        weights: of this layer.
        projected: of the step's tokens [B, T, ...].
        advance: inputs -> y, what runs the recurrence; `verify` by default.

    Returns:
        [B, T, H * P] in the model's dtype. The gates, the outputs of the recurrence and the norm are fp32, and are
        rounded once, at the end.

    Raises:
        ValueError: the step is a prompt, or a tensor has a wrong shape or dtype.
    """
    if step.is_prompt:
        raise ValueError("mix runs steps to the ring: a prompt goes through the model's own scan, and `load`")
    layout = pool.layers[layer].layout
    kernels = kernels_of(pool)
    z = projected.z
    if kernels is not None and step.width:
        z = z if z.stride(-1) == 1 else z.contiguous()  # here, because the norm's launch reads it before it waits
        parts = list(projected.conv)
        check_conv(pool.layers[layer], step, parts, weights.conv, weights.conv_bias, weights.activation)
        y, made = kernels.convolve(layer, step.plan, parts, weights, projected.gates, step.is_tree)
    else:
        y = causal_conv(pool, layer, step, projected.conv, weights.conv, weights.conv_bias, weights.activation)
        made = gates(pool, layer, mixer, projected.gates, weights.gates, weights.constants)
    inputs = {**mixer.inputs(layout.geometry, y), **made}
    read = verify(pool, layer, step, inputs) if advance is None else advance(inputs)
    if kernels is not None and step.width:
        return kernels.gated_norm(read, z, weights.norm)
    return weights.norm(read, z)


def gates(
    pool: StatePool,
    layer: int,
    mixer: Mixer,
    given: tuple[Tensor, ...],
    params: tuple[Tensor, ...],
    constants: tuple[float, ...],
) -> dict[str, Tensor]:
    """The gates alone, for engines that convolve themselves: the recurrence's "exact" inputs [B, T, *], by name.

    Args:
        pool: the pool.
        layer: index into `pool.layers`.
        mixer: of the layer's recurrence.
        given: what its gates are made of [B, T, *], each contiguous within a token.
        params: their contiguous parameters, in the order in which `mixer.gates` takes them.
        constants: numbers that they need besides.
    """
    kernels = kernels_of(pool)
    if kernels is not None:
        return kernels.gates(layer, given, params, constants)
    layout = pool.layers[layer].layout
    made = mixer.gates(given, params, constants, layout.geometry)
    return {name: gate.to(layout.compute_dtype) for name, gate in made.items()}
