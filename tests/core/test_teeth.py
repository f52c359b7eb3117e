"""The property tests can fail: with a fault in the implementation, the state machine goes red.

A ring with one row fewer is no such fault here: this back end reads a flush's records before it writes the step's
tokens. Kernels do both in one launch, and `test_cursor.py` holds the rows to be disjoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from replayssm.flow import algebra, conv
from replayssm.state import cursor

from .machine import machine_for
from .setups import RECURRENCES


def folds_twice(patch: pytest.MonkeyPatch) -> None:
    """A flush that leaves the records in the ring."""
    patch.setattr(cursor, "settle", lambda start, length, is_due, ring_rows: (start, length))


def wraps_early(patch: pytest.MonkeyPatch) -> None:
    """A ring that is used only in part: records overwrite each other."""
    patch.setattr(cursor, "ring_row", lambda start, offset, ring_rows: (start + offset) % max(1, ring_rows // 2))


def carry_is_short(patch: pytest.MonkeyPatch) -> None:
    """Fewer carry rows than the convolution's lag."""
    patch.setattr(conv, "carry_row", lambda position, carry_rows: position % 2)


def forgets_decay(patch: pytest.MonkeyPatch) -> None:
    """A fold without the decay of the checkpoint."""
    right = algebra.fold

    def fold(state: Any, key: Any, u: Any, log_decay: Any, geometry: Any) -> Any:
        return right(state, key, u, log_decay * 0.999, geometry)

    patch.setattr(algebra, "fold", fold)


FAULTS = (folds_twice, wraps_early, carry_is_short, forgets_decay)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_state_machine_goes_red(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    quick = settings(
        max_examples=100,
        stateful_step_count=30,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        database=None,
    )
    with pytest.raises((AssertionError, ValueError, BaseExceptionGroup)):
        run_state_machine_as_test(machine_for(RECURRENCES[0], "exact"), settings=quick)
