"""A mixer's own forward with the functions that touch the state replaced.

The forward's code runs with a copy of its module's globals in which a few names mean our functions. They act only when
they are handed a `StateHandle`, and call the original otherwise, so that prompts keep whatever kernels are installed.
The class, its module and its other instances are not changed.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.activations import ACT2FN

from replayssm.attach.transformers.find import RecurrentLayer
from replayssm.attach.transformers.sequences import ConvInputs, StateHandle
from replayssm.flow.conv import ACTIVATIONS as CONV_ACTIVATIONS
from replayssm.recurrences.binding import Binding, Core


def rebound_forward(layer: RecurrentLayer) -> Callable[..., Any]:
    """The forward of the layer's mixer class, as a function of (mixer, *args, **kwargs).

    Raises:
        ValueError: the forward does not call the functions that it must.
    """
    cls: Any = type(layer.mixer)
    return _rebound(cls, layer.binding)


def forward_with_cores(layer: RecurrentLayer, replacement: Callable[[Core], Callable[..., Any]]) -> Callable[..., Any]:
    """The same forward with the functions that advance the state replaced, whatever they are handed."""
    return _copied(type(layer.mixer), layer.binding, lambda originals: _cores(layer.binding, replacement))[0]


def _cores(binding: Binding, replacement: Callable[[Core], Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    return {core.name: replacement(core) for core in binding.cores}


@functools.cache
def _rebound(cls: Any, binding: Binding) -> Callable[..., Any]:
    def ours(originals: dict[str, Any]) -> dict[str, Callable[..., Any]]:
        conv = _conv(originals[binding.conv])
        convs = {binding.conv: conv, binding.conv_step: _conv_step(originals[binding.conv_step], conv)}
        return convs | _cores(binding, lambda core: _core(core, originals[core.name]))

    rebound, module = _copied(cls, binding, ours)
    # torch.compile looks a function's globals up by module name, so the copy must be a module that can be found
    sys.modules[module.__name__] = module
    return rebound


def _copied(
    cls: Any, binding: Binding, ours: Callable[[dict[str, Any]], dict[str, Callable[..., Any]]]
) -> tuple[Callable[..., Any], types.ModuleType]:
    """A copy of the forward, and of its module with some functions replaced: `ours` makes them from the originals."""
    # unwrapping drops two decorators: one moves offloaded weights (attach refuses offloaded models), one renames the
    # old cache argument (the models themselves use the new one)
    forward = inspect.unwrap(cls.forward)
    names = {binding.conv_step, binding.conv, *(core.name for core in binding.cores)}
    missing = sorted(names - (set(forward.__code__.co_names) & set(forward.__globals__)))
    if missing:
        raise ValueError(
            f"{cls.__name__}.forward of transformers {transformers.__version__} does not call {', '.join(missing)}: "
            "this version is not supported (5.17 to 5.24 are), or the class has a forward of its own"
        )
    module = types.ModuleType(f"{__name__}.{cls.__module__}.{cls.__qualname__}")
    module.__dict__.update(forward.__globals__, __name__=module.__name__)
    module.__dict__.update(ours(forward.__globals__))
    rebound = types.FunctionType(
        forward.__code__, module.__dict__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    rebound.__kwdefaults__ = forward.__kwdefaults__
    return rebound, module


def argument(forward: Callable[..., Any], *names: str) -> tuple[str, int]:
    """Name and position (self not counted) of the first of `names` that a mixer's forward takes.

    5.24 renamed the cache.
    """
    parameters = list(inspect.signature(forward).parameters)
    name = next(name for name in names if name in parameters)
    return name, parameters.index(name) - 1


def _conv(original: Callable[..., Any]) -> Callable[..., Any]:
    def conv(x: Tensor | ConvInputs, *args: Any, **kwargs: Any) -> Any:
        return _convolved(x, *args, **kwargs) if isinstance(x, ConvInputs) else original(x, *args, **kwargs)

    return conv


def _conv_step(original: Callable[..., Any], conv: Callable[..., Any]) -> Callable[..., Any]:
    def conv_step(x: Tensor, state: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, StateHandle):
            return original(x, state, *args, **kwargs)
        return conv(state.sequences.conv_inputs(state.ordinal, x), *args, **kwargs)[..., -x.shape[-1] :]

    return conv_step


def _convolved(
    given: ConvInputs, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """A step's convolution [B, channels, T]; activations that the flow does not know follow it."""
    known = activation in CONV_ACTIVATIONS
    y = given.sequences.convolve(given.ordinal, given.x, weight, bias, activation if known else None)
    return y if known else ACT2FN[activation](y)


def _core(core: Core, original: Callable[..., Any]) -> Callable[..., Any]:
    def advance(*args: Any, **kwargs: Any) -> Any:
        handle = _handle_in(args, kwargs)
        if handle is None:
            return original(*args, **kwargs)
        sequences, ordinal = handle.sequences, handle.ordinal

        def scan(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            state = sequences.state_before(ordinal)
            args = tuple(state if x is handle else x for x in args)
            return original(*args, **{name: state if x is handle else x for name, x in kwargs.items()})

        def replay(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            y = sequences.verify(ordinal, core.inputs(sequences.layers[ordinal].geometry, *args, **kwargs))
            return core.result(y.contiguous(), handle, *args, **kwargs)

        before, after = sequences.split
        if not after:
            return scan(args, kwargs)
        if not before:
            return replay(args, kwargs)
        tokens = before + after
        y, state = scan(*_tokens_of(args, kwargs, tokens, slice(before)))
        sequences.load(ordinal, state)
        tail, state = replay(*_tokens_of(args, kwargs, tokens, slice(before, tokens)))
        return torch.cat([y, tail.to(y.dtype)], 1), state

    return advance


def _tokens_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int, part: slice
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A core's arguments for some of the forward's tokens: those with a row per token are [B, tokens, ...]."""

    def cut(x: Any) -> Any:
        return x[:, part] if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == tokens else x

    return tuple(map(cut, args)), {name: cut(x) for name, x in kwargs.items()}


def _handle_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StateHandle | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, StateHandle):
            return value
    return None
