"""The models bundled with the package, one folder each: configuration, weights, tokenizer and `training.json`.

`training.json` says what the model was trained on and how well it does on text it has not seen.
"""

from __future__ import annotations

from pathlib import Path

DEFAULT = "gdn-tiny"
DRAFT = "gdn-draft"
"""A model that drafts for the others, in speculative decoding."""

_HERE = Path(__file__).resolve().parent


def names() -> tuple[str, ...]:
    """The names of the bundled models, sorted."""
    return tuple(sorted(folder.name for folder in _HERE.iterdir() if (folder / "config.json").is_file()))


def path(name: str = DEFAULT) -> Path:
    """The folder of the bundled model called `name`, for `from_pretrained`.

    Raises:
        ValueError: no bundled model has that name; the message lists those that exist.
    """
    known = names()
    if name not in known:
        there_are = ", ".join(known) or "none in this installation"
        raise ValueError(f"no bundled model is called {name!r}; there are: {there_are}")
    return _HERE / name
