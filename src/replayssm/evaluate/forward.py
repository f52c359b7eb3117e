"""A model's forward over given tokens with its recurrent layers replayed in several precisions, one group of rows each.

Everything but the recurrences is the model's own forward over the whole text, for all settings together.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from replayssm.attach.transformers.find import find_layers
from replayssm.attach.transformers.rebind import forward_with_cores
from replayssm.config import ReplayConfig
from replayssm.evaluate.replay import LayerReplay
from replayssm.recurrences.binding import Core


@dataclass
class Replayed:
    """What a forward over several settings gave.

    Args:
        hidden: what the model's head reads, [settings, rows, T, width].
        state_errors: per recurrent layer [settings, pieces], as in `LayerRun`.
        half_lives, memories: per recurrent layer [H], as in `LayerRun`.
    """

    hidden: Tensor
    state_errors: list[Tensor] = field(default_factory=list)
    half_lives: list[Tensor] = field(default_factory=list)
    memories: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def replayed_forward(
    model: Any, ids: Tensor, configs: Sequence[ReplayConfig], progress: Callable[[int], None] | None = None
) -> Replayed:
    """Decode `ids` [rows, T], which are given, with each configuration.

    Args:
        model: a causal language model of transformers, in eval mode and not attached.
        ids: the same number of tokens for every row.
        configs: how each setting keeps the states; the first is what state errors are measured against.
        progress: called with a number of tokens each time that a recurrent layer has run so many.
    """
    if model.training:
        raise ValueError("the model is in training mode, in which some forwards go another way: call model.eval()")
    rows = ids.shape[0]
    result = Replayed(torch.empty(0))
    with _replaying(model, configs, rows, result, progress):
        hidden = model.base_model(input_ids=ids.repeat(len(configs), 1), use_cache=False).last_hidden_state
    result.hidden = hidden.unflatten(0, (len(configs), rows))
    return result


@contextmanager
def _replaying(
    model: nn.Module,
    configs: Sequence[ReplayConfig],
    rows: int,
    result: Replayed,
    progress: Callable[[int], None] | None,
) -> Iterator[None]:
    layers = find_layers(model)
    taken = [layer.name for layer in layers if "forward" in layer.mixer.__dict__]
    if taken:
        raise ValueError(f"{taken[0]} has a forward of its own: detach the model before it is evaluated")
    try:
        for number, layer in enumerate(layers):

            def replacement(core: Core, layer: Any = layer, number: int = number) -> Callable[..., Any]:
                def advance(*args: Any, **kwargs: Any) -> Any:
                    inputs = core.inputs(layer.geometry, *args, **kwargs)
                    first = next(iter(inputs.values()))
                    params = layer.binding.params(layer.mixer)
                    run = LayerReplay(
                        layer.recurrence, layer.geometry, params, configs, rows, first.dtype, first.device, number
                    ).run(inputs, progress)
                    result.state_errors.append(run.state_error)
                    result.half_lives.append(run.half_life)
                    result.memories.append(run.memory)
                    return core.result(run.outputs, None, *args, **kwargs)

                return advance

            forward = forward_with_cores(layer, replacement)
            layer.mixer.__dict__["forward"] = types.MethodType(forward, layer.mixer)
        yield
    finally:
        for layer in layers:
            layer.mixer.__dict__.pop("forward", None)


class _Body(BaseModelOutputWithPast):
    """Output of a model's body. What else some bodies return (a cache, router logits) is asked for and passed on."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@torch.no_grad()
def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """The model's logits [rows, T, vocabulary] in fp32 for what its head reads [rows, T, width].

    Heads differ (some scale their input or their output), so it is the model's own forward that runs, with what its
    body would return put in place of it.
    """
    body = model.base_model
    body.__dict__["forward"] = lambda *_, **__: _Body(last_hidden_state=hidden)
    try:
        dummy = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        return model(input_ids=dummy, use_cache=False).logits.float()
    finally:
        del body.__dict__["forward"]
