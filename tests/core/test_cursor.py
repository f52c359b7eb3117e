"""The cursor's arithmetic, exhaustively and without a device: the flush rule, its rows, int against tensor."""

from __future__ import annotations

import itertools

import pytest
import torch

from replayssm import ReplayConfig
from replayssm.recurrences import get
from replayssm.state import cursor
from replayssm.state.layout import StateLayout

from .setups import geometry_for

SMALL = [(window, verify_len) for window in range(1, 9) for verify_len in range(1, window + 1)]
LARGE = [(13, 5), (16, 16), (64, 1), (64, 16), (63, 7)]


def ring_rows(window: int, verify_len: int) -> int:
    config = ReplayConfig(window=window, verify_len=verify_len)
    return StateLayout(get("mamba2"), geometry_for("mamba2"), config, torch.float32).ring_rows


def rows_of_step(
    start: int, length: int, tokens: int, window: int, forced: bool, rows: int
) -> tuple[list[int], list[int], list[int], int, int]:
    """(folded rows, history rows, draft rows, start, length) of one row's step."""
    due = cursor.due(length, tokens, window, forced)
    new_start, new_length = cursor.settle(start, length, due, rows)
    folded = [cursor.ring_row(start, j, rows) for j in range(length - new_length)]
    history = [cursor.ring_row(new_start, j, rows) for j in range(new_length)]
    drafts = [cursor.ring_row(new_start + new_length, i, rows) for i in range(tokens)]
    return folded, history, drafts, new_start, new_length


@pytest.mark.parametrize(("window", "verify_len"), SMALL)
def test_rows_read_and_written_are_disjoint(window: int, verify_len: int) -> None:
    """Invariants 2 and 5, for every start, length, number of tokens, window in force, forced or not."""
    rows = ring_rows(window, verify_len)
    assert rows == window + verify_len
    choices = itertools.product(
        range(rows), range(window + 1), range(verify_len + 1), range(1, window + 1), (False, True)
    )
    for start, length, tokens, in_force, forced in choices:
        folded, history, drafts, new_start, new_length = rows_of_step(start, length, tokens, in_force, forced, rows)
        case = (start, length, tokens, in_force, forced)
        assert length + tokens <= rows, case
        assert len(set(folded + history + drafts)) == length + tokens, case  # all rows differ
        assert all(0 <= row < rows for row in (*folded, *history, *drafts)), case
        assert (not folded) or (not history), case  # a due row folds everything
        assert new_length + tokens <= window, case  # whatever is accepted, the next step starts within the window
        assert cursor.ring_row(new_start, new_length, rows) == cursor.ring_row(start, length, rows), case


@pytest.mark.parametrize(("window", "verify_len"), LARGE)
def test_rows_are_disjoint_in_large_windows(window: int, verify_len: int) -> None:
    rows = ring_rows(window, verify_len)
    for start, length, tokens in itertools.product(
        (0, 1, rows // 2, rows - 1), range(window + 1), range(verify_len + 1)
    ):
        folded, history, drafts, _, new_length = rows_of_step(start, length, tokens, window, False, rows)
        assert len(set(folded + history + drafts)) == length + tokens
        assert new_length + tokens <= window


def test_one_ring_row_fewer_is_not_enough() -> None:
    """The ring's size is not generous: with one row less some step overwrites what it reads."""
    for window, verify_len in SMALL:
        rows = window + verify_len - 1
        folded, history, drafts, _, _ = rows_of_step(0, window, verify_len, window, False, rows)
        assert len(set(folded + history + drafts)) < window + verify_len


def test_the_rule_is_a_deadline() -> None:
    """Plain decode flushes every `window` tokens, and a smaller window in force only flushes earlier."""
    for window in (1, 2, 5, 16, 64):
        length, folds = 0, []
        for step in range(4 * window):
            if cursor.due(length, 1, window):
                folds.append(step)
                length = 0
            length += 1
        assert folds == [window, 2 * window, 3 * window]
        for length, tokens, in_force in itertools.product(range(window + 1), range(17), range(1, window + 1)):
            if cursor.due(length, tokens, window):
                assert cursor.due(length, tokens, in_force)


@pytest.mark.parametrize(("window", "verify_len"), [(1, 1), (5, 3), (16, 8), (64, 16)])
def test_ints_and_tensors_agree(window: int, verify_len: int) -> None:
    rows = window + verify_len
    cases = list(
        itertools.product(range(0, rows, 3), range(window + 1), range(0, verify_len + 1, 2), {1, window}, (False, True))
    )
    start, length, tokens, in_force, forced = (torch.tensor(column) for column in zip(*cases, strict=True))
    due = cursor.due(length, tokens, in_force, forced)
    moved = torch.stack(cursor.settle(start, length, due, rows), 1)
    drafts = cursor.ring_row(moved[:, 0] + moved[:, 1], tokens, rows)
    committed = torch.stack(cursor.commit(length, start, tokens), 1)
    for case, (s, n, t, w, f) in enumerate(cases):
        is_due = cursor.due(n, t, w, f)
        assert bool(due[case]) is bool(is_due)
        settled = cursor.settle(s, n, is_due, rows)
        assert tuple(moved[case].tolist()) == settled
        assert int(drafts[case]) == cursor.ring_row(settled[0] + settled[1], t, rows)
        assert tuple(committed[case].tolist()) == cursor.commit(n, s, t)
        assert int(cursor.carry_row(tokens[case], 7)) == cursor.carry_row(t, 7)


def test_phases_are_handed_out_in_turn() -> None:
    """Every window from verify_len up is used equally often, whatever the slots are."""
    for window, verify_len in ((16, 1), (16, 4), (7, 7), (1, 1), (64, 16)):
        count = window - verify_len + 1
        phases = [cursor.first_window(turn, window, verify_len) for turn in range(2 * count)]
        assert sorted(phases) == sorted(2 * list(range(verify_len, window + 1)))


def test_counters_in_somebody_elses_memory() -> None:
    """All are views of it but one: kernels add to `saturated` slot by slot, without a stride."""
    words = torch.arange(24).view(3, 8).repeat(1, 2)
    counters = cursor.Cursor.of(words[:, :9])
    assert counters.apart == 16 and counters.saturated.is_contiguous() and not counters.saturated.any()
    for place, (name, counter) in enumerate(counters.items()):
        if name != "saturated":
            assert torch.equal(counter, words[:, place]) and counter.data_ptr() == words[:, place].data_ptr()
