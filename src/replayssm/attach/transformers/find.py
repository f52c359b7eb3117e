"""Which modules of a model are recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from replayssm.recurrences import OUT_OF_FORM, Recurrence
from replayssm.recurrences.base import Geometry
from replayssm.recurrences.binding import Binding, bindings, supported_families

OUT_OF_FORM_MIXERS = dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer"), "mamba1")


@dataclass(frozen=True)
class RecurrentLayer:
    """One mixer of a model.

    Args:
        name: dotted name of the mixer in the model.
        mixer: the module.
        index: its place in a cache's layers.
        family: the model family it belongs to.
        recurrence, binding, geometry: what is replayed, how the mixer maps to it, and its sizes.
    """

    name: str
    mixer: nn.Module
    index: int
    family: str
    recurrence: Recurrence
    binding: Binding
    geometry: Geometry


def find_layers(model: nn.Module) -> tuple[RecurrentLayer, ...]:
    """Every recurrent layer, in the order in which a forward runs them.

    Raises:
        ValueError: there is none, or one that cannot be replayed; the message says why and what is supported.
    """
    known = bindings()
    found = []
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            if cls.__name__ in OUT_OF_FORM_MIXERS:
                raise ValueError(
                    f"{type(model).__name__} cannot be attached: {OUT_OF_FORM[OUT_OF_FORM_MIXERS[cls.__name__]]}. "
                    f"{_supported()}"
                )
            if cls.__name__ in known:
                recurrence, binding = known[cls.__name__]
                family, geometry = binding.mixers[cls.__name__], binding.geometry(module)
                found.append(RecurrentLayer(name, module, module.layer_idx, family, recurrence, binding, geometry))
                break
    if not found:
        raise ValueError(f"{type(model).__name__} has no recurrent layer that can be replayed. {_supported()}")
    found.sort(key=lambda layer: layer.index)
    if len({layer.index for layer in found}) < len(found):
        raise ValueError(f"{type(model).__name__} holds several models: attach each of them by itself")
    devices = {str(device_of(layer.mixer)) for layer in found}
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(
            f"the recurrent layers lie on {', '.join(sorted(devices))}, but the slots of a sequence need one device "
            "that holds weights: load the model without device_map"
        )
    return tuple(found)


def device_of(mixer: nn.Module) -> torch.device:
    """Where a mixer's weights are."""
    return next(mixer.parameters()).device


def dtype_of(mixer: nn.Module) -> torch.dtype:
    """Dtype of a mixer's activations: that of the projection in front of it."""
    for _, child in mixer.named_children():
        if isinstance(child, nn.Linear) and child.weight.is_floating_point():
            return child.weight.dtype
    return next(p.dtype for p in mixer.parameters() if p.is_floating_point())


def _supported() -> str:
    return f"Supported model families: {', '.join(supported_families())}."
