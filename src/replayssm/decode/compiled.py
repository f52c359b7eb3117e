"""What lies between the recurrent layers, in fewer launches: norms and feed-forward layers through torch.compile.

A norm in eager torch is half a dozen launches, and a decoding step of a small batch little else. Only modules that hold
no state are compiled, each by itself; caches, attention and mixers run as they are.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import nn

MOST_INPUTS = 2
"""Tensors that such a module takes: hidden states, and what gates them."""


def compile_neighbours(model: nn.Module) -> int:
    """Compile the model's norms and feed-forward layers in place; says how many modules that were.

    The first forward of each shape then waits for the compiler. To undo it, `del module.forward` of the modules.

    Args:
        model: a transformers model.
    """
    found = [module for module in model.modules() if _is_plain(module) and "forward" not in vars(module)]
    # one compiled function serves all modules of a class, and all batches
    compiled: dict[Any, Any] = {cls: torch.compile(cls.forward, dynamic=True) for cls in {type(m) for m in found}}
    for module in found:
        # a bound method, so that a copy of the model gets one that is bound to the copy
        module.forward = types.MethodType(compiled[type(module)], module)
    return len(found)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module of the model's own takes hidden states, keeps none, and consists of torch's layers."""
    if _is_of_torch(module) or next(module.parameters(), None) is None:
        return False
    inputs = inspect.signature(type(module).forward).parameters.values()
    named = [x for x in inputs if x.kind is not inspect.Parameter.VAR_KEYWORD][1:]
    if len(named) > MOST_INPUTS or len(named) < len(list(inputs)) - 1:
        return False
    return all(_is_of_torch(child) or next(child.parameters(), None) is None for child in module.children())


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")
