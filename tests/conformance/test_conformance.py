"""Every recurrence passes the suite, and adding one touches one folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import replayssm
from replayssm.recurrences import Recurrence, get, load, registry

from .suite import CHECKS
from .toys import TOYS

SOURCE = Path(replayssm.__file__).parent


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", registry())
def test_recurrence(name: str, check: Callable[[Recurrence], None]) -> None:
    check(get(name))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", TOYS)
def test_a_new_recurrence_is_one_folder(name: str, check: Callable[[Recurrence], None], tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    for file, text in TOYS[name].items():
        (folder / file).write_text(text)
    check(load(folder))


def test_a_wrong_recurrence_fails(tmp_path: Path) -> None:
    """The suite can fail: the same toy with one sign changed."""
    folder = tmp_path / "wrong"
    folder.mkdir()
    text = TOYS["gla"]["__init__.py"].replace('return record["gate"]', 'return 1.01 * record["gate"]')
    (folder / "__init__.py").write_text(text)
    wrong = load(folder)
    for check in CHECKS[2:]:
        with pytest.raises(AssertionError, match="relative error"):
            check(wrong)


def test_no_recurrence_is_named_outside_its_folder() -> None:
    """State, flow, kernels and everything above work from what a folder says."""
    words = {}
    for name, recurrence in registry().items():
        for word in (name, type(recurrence).__name__, recurrence.title):
            words[word] = SOURCE / "recurrences" / name
    found = []
    for path in SOURCE.rglob("*.py"):
        if SOURCE / "models" in path.parents:
            continue  # names of bundled models
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found += [
                f"{path.relative_to(SOURCE)}:{number}: {word}"
                for word, home in words.items()
                if home not in path.parents and re.search(rf"\b{re.escape(word)}\b", line)
            ]
    assert not found, "\n".join(found)


def test_what_is_out_of_form_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="no decayed sum of rank-1 terms"):
        get("mamba1")
    with pytest.raises(ValueError, match="no recurrence is called 'rwkv0'; there are: "):
        get("rwkv0")


def test_a_folder_without_a_recurrence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no __init__\.py"):
        load(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "__init__.py").write_text("RECURRENCE = None\n")
    with pytest.raises(ValueError, match="must set RECURRENCE"):
        load(tmp_path / "empty")
