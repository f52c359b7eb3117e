"""Recurrent layers of published models, by id. Each recurrence's folder lists its own (`geometries.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec

from replayssm.recurrences import Geometry, Recurrence, get, registry


@dataclass(frozen=True)
class Model:
    """The recurrent layers of one model.

    Args:
        recurrence: name in `replayssm.recurrences`.
        geometry: sizes of one layer.
        layers: recurrent layers of the model.
    """

    recurrence: str
    geometry: Geometry
    layers: int

    @property
    def replayed(self) -> Recurrence:
        """The recurrence itself."""
        return get(self.recurrence)

    @property
    def timed(self) -> Geometry:
        """Sizes of a layer as kernels are timed: without its convolution."""
        return replace(self.geometry, conv_channels=0)


def _collect() -> dict[str, Model]:
    models: dict[str, Model] = {}
    for name in registry():
        module = f"replayssm.recurrences.{name}.geometries"
        if find_spec(module) is not None:
            listed = import_module(module).GEOMETRIES
            models |= {model: Model(name, layers.geometry, layers.count) for model, layers in listed.items()}
    return models


MODELS: dict[str, Model] = _collect()


def find(name: str) -> Model:
    """The model called `name`; ValueError naming all of them where there is none."""
    try:
        return MODELS[name]
    except KeyError:
        raise ValueError(f"no geometry is called {name!r}; there are: {', '.join(MODELS)}") from None
