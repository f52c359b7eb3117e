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
from replayssm.recurrences.mixer import Mixer, Projected, Weights
from replayssm.state.pool import StatePool


def mix(
    pool: StatePool,
    layer: int,
    step: Step,
    mixer: Mixer,
    weights: Weights,
    projected: Projected,
    advance: Callable[[dict[str, Tensor]], Tensor] | None = None,
) -> Tensor:
    """Run one layer of a step to the ring, from its projections to the input of its output projection.

    Args:
        pool: the pool.
        layer: index into `pool.layers`.
        step: from `open_step`, no prompt.
        mixer: of the layer's recurrence.
        weights: of this layer.
        projected: of the step's tokens [B, T, ...].
        advance: the recurrence's inputs -> y [B, T, H, P] contiguous, in place of `verify`; for measurements.

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
    if kernels is not None and step.width:
        parts = list(projected.conv)
        check_conv(pool.layers[layer], step, parts, weights.conv, weights.conv_bias, weights.activation)
        y, gates = kernels.convolve(layer, step.plan, parts, weights, projected.gates, step.is_tree)
    else:
        y = causal_conv(pool, layer, step, projected.conv, weights.conv, weights.conv_bias, weights.activation)
        gates = mixer.gates(projected.gates, weights.gates, weights.constants, layout.geometry)
        gates = {name: gate.to(layout.compute_dtype) for name, gate in gates.items()}
    inputs = {**mixer.inputs(layout.geometry, y), **gates}
    read = verify(pool, layer, step, inputs) if advance is None else advance(inputs)
    if kernels is not None and step.width:
        return kernels.gated_norm(read, projected.z, weights.norm)
    return weights.norm(read, projected.z)
