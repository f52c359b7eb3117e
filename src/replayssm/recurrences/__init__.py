"""The recurrences this library replays, one folder each. A folder is found by looking, so there is no list to keep.

A recurrence's folder has an `__init__.py` that names its one `RECURRENCE`; see docs/adding-a-recurrence.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path

from replayssm.recurrences.base import Field, Geometry, Recurrence, Tensors

OUT_OF_FORM = {
    "mamba1": "Mamba-1 decays every state element at its own input-dependent rate (a full [key dim, value dim] matrix "
    "per token), so a window of tokens is no decayed sum of rank-1 terms and cannot be replayed",
}


@cache
def registry() -> dict[str, Recurrence]:
    """Every recurrence of this package by name."""
    folders = sorted(p for p in Path(__file__).parent.iterdir() if (p / "__init__.py").is_file())
    found = [importlib.import_module(f"{__name__}.{folder.name}").RECURRENCE for folder in folders]
    return {recurrence.name: recurrence for recurrence in found}


def get(name: str) -> Recurrence:
    """The recurrence called `name`; ValueError with the reason where there is none."""
    if name in OUT_OF_FORM:
        raise ValueError(f"{name} cannot be replayed: {OUT_OF_FORM[name]}")
    try:
        return registry()[name]
    except KeyError:
        raise ValueError(f"no recurrence is called {name!r}; there are: {', '.join(registry())}") from None


def load(folder: str | Path) -> Recurrence:
    """The recurrence in a folder outside this package (its `__init__.py` sets RECURRENCE)."""
    folder = Path(folder).resolve()
    init = folder / "__init__.py"
    if not init.is_file():
        raise ValueError(f"{folder} is no recurrence folder: it has no __init__.py")
    name = f"replayssm_recurrence_{folder.name}"
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    recurrence = getattr(module, "RECURRENCE", None)
    if not isinstance(recurrence, Recurrence):
        raise ValueError(f"{init} must set RECURRENCE to an instance of replayssm.recurrences.Recurrence")
    return recurrence


__all__ = ["OUT_OF_FORM", "Field", "Geometry", "Recurrence", "Tensors", "get", "load", "registry"]
