"""How the layers of model libraries map onto a recurrence, as each recurrence's own `bind.py` says it.

A binding is data plus small functions. It needs no model library to be imported, so the list of supported families
costs nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from replayssm.recurrences import registry
from replayssm.recurrences.base import Geometry, Recurrence
from replayssm.recurrences.mixer import Mixer


@dataclass(frozen=True)
class Core:
    """A function that a layer's forward calls to advance its state, over one token or over several.

    Args:
        name: its name in the module of the layer's class.
        inputs: (geometry, *args, **kwargs of the call) -> the fields of `Recurrence.inputs`, each [B, T, ...], in any
            floating dtype.
        result: (y [B, T, H, P], state, *args, **kwargs of the call) -> what the function itself would return; `state`
            takes the place of the state after the call.
    """

    name: str
    inputs: Callable[..., dict[str, Tensor]]
    result: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Binding:
    """One recurrence in the transformers library.

    Args:
        mixers: class name of a mixer -> model family.
        cores: the functions that advance the state in those mixers' forward.
        geometry: mixer -> its sizes.
        params: mixer -> the fields of `Recurrence.params`.
        to_model: our state [B, H, N, P] -> as the model's own scan expects it.
        from_model: the state that the model's own scan returns -> [B, H, N, P].
        conv_step: name of the function that runs the causal convolution over a single token.
        conv: name of the one that runs it over several.
        mixer: what surrounds the recurrence, where its own kernels may take the place of the layer's; None otherwise.
    """

    mixers: Mapping[str, str]
    cores: tuple[Core, ...]
    geometry: Callable[[Any], Geometry]
    params: Callable[[Any], dict[str, Tensor]]
    to_model: Callable[[Tensor], Tensor]
    from_model: Callable[[Tensor], Tensor]
    conv_step: str = "causal_conv1d_update"
    conv: str = "causal_conv1d_fn"
    mixer: Mixer | None = None


def bindings() -> dict[str, tuple[Recurrence, Binding]]:
    """Mixer class name -> its recurrence and binding, of every recurrence that has a `bind.py`."""
    found = {}
    for recurrence in registry().values():
        folder = type(recurrence).__module__.rpartition(".")[0]
        if importlib.util.find_spec(f"{folder}.bind") is None:
            continue
        binding: Binding = importlib.import_module(f"{folder}.bind").BINDING
        found.update(dict.fromkeys(binding.mixers, (recurrence, binding)))
    return found


def supported_families() -> tuple[str, ...]:
    """Model families that `attach` accepts, as transformers spells their model_type."""
    return tuple(sorted({family for _, binding in bindings().values() for family in binding.mixers.values()}))
