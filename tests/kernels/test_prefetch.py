"""Hints ask for what a launch will read and for nothing else, whatever the plan holds by then."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl

from replayssm.kernels import launch, recurrent, single
from replayssm.kernels import prefetch as hints
from replayssm.kernels.launch import Choice, Tile
from replayssm.kernels.prefetch import guessed_row, prefetch_records
from replayssm.state.plan import COLUMN, COLUMNS

from .harness import DEVICE, Case, run

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="hints leave no trace on a GPU")

SLOTS, ROWS, HEADS, KEY_HEADS, N = 3, 5, 4, 2, 6


@triton.jit
def mark(at, COUNT: tl.constexpr):
    """In place of `prefetch`: what is asked for becomes 1."""
    for i in range(COUNT):
        tl.store(at + i, 1.0)


@triton.jit
def ask_kernel(
    plan, slots, keys, writes, h, ROWS: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr, SIZES: tl.constexpr,
    RING_ROWS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    slot, start, _, _, _ = guessed_row(plan, slots, RING_ROWS)
    if slot >= 0:
        row = 0 if ALL else start
        prefetch_records(keys, (writes,), slot, row, h, H, ROWS, HEADS, SIZES)


def asked(
    monkeypatch: pytest.MonkeyPatch, slot: int, start: int, h: int, heads: int, *, all_rows: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is asked for of rings of keys [slots, rows, G, N] and of write vectors [slots, rows, H, N]: ones."""
    monkeypatch.setattr(hints, "prefetch", mark)
    plan = torch.zeros(1, len(COLUMNS), dtype=torch.int64)
    plan[0, COLUMN["slot"]], plan[0, COLUMN["fold_start"]] = slot, start
    # head by head in memory, as the layout has them
    keys, writes = (torch.zeros(SLOTS, count, ROWS, N).transpose(1, 2) for count in (KEY_HEADS, HEADS))
    given = [(ring, *ring.stride()[:3]) for ring in (keys, writes)]
    sizes = ((KEY_HEADS, N), (HEADS, N))
    ask_kernel[(1,)](plan, SLOTS, *given, h, ROWS if all_rows else 1, heads, all_rows, sizes, ROWS, HEADS)
    return keys, writes


@pytest.mark.parametrize(("slot", "start", "h"), [(0, 0, 0), (2, 4, 3), (1, 2, 1)])
def test_the_first_record_of_a_head(monkeypatch: pytest.MonkeyPatch, slot: int, start: int, h: int) -> None:
    keys, writes = asked(monkeypatch, slot, start, h, 1, all_rows=False)
    expected_keys, expected_writes = torch.zeros_like(keys), torch.zeros_like(writes)
    expected_keys[slot, start, h // 2] = 1
    expected_writes[slot, start, h] = 1
    assert torch.equal(keys, expected_keys)
    assert torch.equal(writes, expected_writes)


@pytest.mark.parametrize(("h", "heads"), [(0, 2), (2, 2), (3, 1)])
def test_all_rows_of_heads_that_share_a_key_head(monkeypatch: pytest.MonkeyPatch, h: int, heads: int) -> None:
    keys, writes = asked(monkeypatch, 1, 3, h, heads, all_rows=True)
    expected_keys, expected_writes = torch.zeros_like(keys), torch.zeros_like(writes)
    expected_keys[1, :, h // 2] = 1
    expected_writes[1, :, h : h + heads] = 1
    assert torch.equal(keys, expected_keys)
    assert torch.equal(writes, expected_writes)


@pytest.mark.parametrize(("slot", "start"), [(-1, 0), (SLOTS, 0), (2**62, 1), (0, -1), (0, ROWS), (1, 2**40)])
def test_nothing_is_asked_for_where_the_plan_holds_something_else(
    monkeypatch: pytest.MonkeyPatch, slot: int, start: int
) -> None:
    for ring in asked(monkeypatch, slot, start, 1, 1, all_rows=False):
        assert not ring.any()


@triton.jit
def nothing(*_):
    pass


@triton.jit
def wrong_slot(plan, slots, RING_ROWS: tl.constexpr):
    zero = tl.load(plan) * 0
    return zero, zero.to(tl.int32) + 1, zero, zero + 1, zero != 0


@triton.jit
def wrong_start(plan, slots, RING_ROWS: tl.constexpr):
    slot, start, folded, history, empty = guessed_row(plan, slots, RING_ROWS)
    return slot, (start + 1) % RING_ROWS, folded, history, empty


@triton.jit
def wrong_records(plan, slots, RING_ROWS: tl.constexpr):
    slot, start, folded, history, empty = guessed_row(plan, slots, RING_ROWS)
    return slot, start, folded, (folded + history == 0).to(tl.int64), empty


@triton.jit
def wrong_due(plan, slots, RING_ROWS: tl.constexpr):
    slot, start, folded, history, empty = guessed_row(plan, slots, RING_ROWS)
    return slot, start, history, folded, empty


@triton.jit
def wrong_folded(plan, slots, RING_ROWS: tl.constexpr):
    slot, start, folded, history, empty = guessed_row(plan, slots, RING_ROWS)
    return slot, start, folded + 1, history, empty


@triton.jit
def wrong_empty(plan, slots, RING_ROWS: tl.constexpr):
    slot, start, folded, history, empty = guessed_row(plan, slots, RING_ROWS)
    return slot, start, folded, history, not empty


@triton.jit
def wrong_turn(order_at, rows):
    return (tl.load(order_at) + 1) % rows


GUESSES = (guessed_row, wrong_slot, wrong_start, wrong_records, wrong_due, wrong_folded, wrong_empty)


RECURRENT = [(name, recurrent, "recurrent", guess) for name in ("mamba2", "gdn", "kda") for guess in GUESSES]
SINGLE = [(name, single, "single", guess) for name in ("mamba2", "gdn") for guess in (*GUESSES, wrong_turn)]


@pytest.mark.parametrize(
    ("name", "module", "form", "guess"),
    [*RECURRENT, *SINGLE],
    ids=lambda value: value if isinstance(value, str) else value.__name__.rpartition(".")[2],
)
def test_a_wrong_guess_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, module: ModuleType, form: str, guess: object
) -> None:
    """A launch that does everything reads from its guess, and again where the plan says otherwise."""
    stock = launch.run

    def start(*given, launch_pdl=False, **options):  # type: ignore[no-untyped-def]
        stock(*given, **options)

    monkeypatch.setattr(launch, "overlaps", lambda device: True)
    monkeypatch.setattr(launch, "run", start)
    for replaced in ("gdc_wait", "gdc_launch_dependents", "prefetch", "prefetch_rows", "prefetch_records"):
        monkeypatch.setattr(module, replaced, nothing, raising=False)
    monkeypatch.setattr(module, "guessed_turn" if guess is wrong_turn else "guessed_row", guess)
    run(Case(name, choice=Choice(Tile(16), form=form), window=2, rows=(-1, 3, 0), steps=5))
