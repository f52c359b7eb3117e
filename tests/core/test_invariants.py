"""Random interleavings of every verb against the oracle, for every recurrence and kind of checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from .machine import MODES, machine_for
from .setups import RECURRENCES

# Share of the profile's examples; "exact" shows faults best. With "ci" (300) they add up to 450 over three recurrences.
SHARE = {"exact": 0.16, "fp32": 0.1, "read copy": 0.1, "low precision": 0.08, "two precisions": 0.06}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_any_interleaving_of_verbs(recurrence: str, mode: str) -> None:
    profile = settings()
    examples = max(1, round(profile.max_examples * SHARE[mode]))
    run_state_machine_as_test(
        machine_for(recurrence, mode), settings=settings(profile, max_examples=examples, stateful_step_count=30)
    )
