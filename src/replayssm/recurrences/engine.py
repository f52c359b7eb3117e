"""How the layers of a serving engine map onto a recurrence, as each recurrence's own `vllm.py` says it.

Like `binding`, this is data plus small functions that import no engine. The engine keeps the convolution; what is bound
is the part between its output and the output of the layer's core.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from replayssm.recurrences import registry
from replayssm.recurrences.base import Geometry, Recurrence
from replayssm.recurrences.mixer import Mixer


@dataclass(frozen=True)
class Tokens:
    """A layer's tokens of one step, as its core receives them. n tokens, one after the other.

    Args:
        raw: inputs of the convolution [n, channels], in the model's dtype.
        gates: what gates are made of, each [n, ...].
        out: where the core's output goes [n, H, P], in any floating dtype.
    """

    raw: Tensor
    gates: tuple[Tensor, ...]
    out: Tensor


@dataclass(frozen=True, eq=False)
class EngineBinding:
    """One recurrence in vLLM.

    Args:
        layer: "module:class" of the layer.
        architectures: models whose recurrent layers are all of that class.
        forward: name of its method that runs convolution and core, with tokens as the first dim of every argument.
        split: (layer, *arguments of that method) -> their tokens.
        conv: layer -> weight [channels, taps], bias [channels] or None, activation of the convolution.
        mixer: of the recurrence: how the convolution's output is divided, and what gates are made of it.
        gates: layer -> parameters of its gates, and the numbers that they need besides, as `Mixer.gates` takes them.
        params: layer -> the fields of `Recurrence.params`.
        state: the engine's own states [rows, H, P, N] -> a view [rows, H, N, P] of them.
        core: name of the operator that runs `forward` on a CPU, where that is not the method itself.
        methods: other methods of the layer that are replaced.
    """

    layer: str
    architectures: tuple[str, ...]
    forward: str
    split: Callable[..., Tokens]
    conv: Callable[[Any], tuple[Tensor, Tensor | None, str]]
    mixer: Mixer
    gates: Callable[[Any], tuple[tuple[Tensor, ...], tuple[float, ...]]]
    params: Callable[[Any], dict[str, Tensor]]
    state: Callable[[Tensor], Tensor]
    core: str | None = None
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def engine_bindings() -> tuple[tuple[Recurrence, EngineBinding], ...]:
    """Every recurrence that has a `vllm.py`, with its binding."""
    found = []
    for recurrence in registry().values():
        folder = type(recurrence).__module__.rpartition(".")[0]
        if importlib.util.find_spec(f"{folder}.vllm") is not None:
            found.append((recurrence, importlib.import_module(f"{folder}.vllm").BINDING))
    return tuple(found)


def geometry_of(state: tuple[int, ...], channels: int, taps: int) -> Geometry:
    """Sizes of a layer whose engine keeps states [H, P, N] behind a convolution over values, keys and queries.

    `conv_channels` is 0: the convolution's inputs stay with the engine, and the layout has no carry.
    """
    heads, value_dim, key_dim = state
    return Geometry(
        heads=heads,
        key_heads=(channels - heads * value_dim) // (2 * key_dim),
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=taps,
    )
