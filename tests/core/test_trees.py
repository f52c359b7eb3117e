"""Draft trees: every origin of the ring, every path, and faults that must be seen. Random ones are in the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from replayssm import flow
from replayssm.flow import algebra
from replayssm.state import cursor
from replayssm.state.slots import PAD_SLOT

from .machine import Row
from .setups import RECURRENCES
from .test_each_invariant import run, same, script, slot_bits

Patch = pytest.MonkeyPatch
BUSHY = (0, 1, 1, 2, 2, 3)  # raw draws: token t follows BUSHY[t] % (t + 1) - 1, so 0, 0, 1, 1, 2 below the first


def test_the_tree_of_these_tests_branches() -> None:
    assert Row(0, tree=BUSHY).parents(6) == [-1, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_every_path_at_every_origin(recurrence: str, window: int) -> None:
    """A tree written at each physical row, on steps that flush and others; each of its paths, and none, accepted."""
    verify_len = min(6, window)
    machine = script(recurrence, window=window, verify_len=verify_len)
    machine.acquire(choice=None)
    machine.acquire(choice=None)
    seen = set()
    for turn in range(4 * (window + verify_len)):
        if turn % 5 == 0:  # or some lengths of paths would only ever lead to every other row
            machine.run_step([Row(0)])
            machine.run_commit([Row(0, accept=1)])
        slot = machine.usable()[0]
        seen.add(int(machine.pool.cursor.start[slot] + machine.pool.cursor.length[slot]) % machine.pool.ring_rows)
        rows = [Row(0, tokens=verify_len, tree=BUSHY), Row(1, tokens=1 + turn % verify_len)]
        machine.run_step(rows)
        machine.run_commit([Row(0, accept=turn % (verify_len + 1)), Row(1, accept=(turn // 2) % 3)])
        machine.check()
    assert seen == set(range(machine.pool.ring_rows))
    machine.materialize_all()


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_chain_is_the_tree_with_one_branch(recurrence: str) -> None:
    """Said or left out, to the bit, and whichever verb accepts it."""
    found = []
    for parents, accept in ((None, flow.commit), ([[-1, 0, 1, 2]] * 2, flow.commit_path)):
        machine = script(recurrence, conv=False)
        pool, slots = machine.pool, [machine.pool.acquire(), machine.pool.acquire()]
        for turn in range(7):
            numbers = [list(range(4 * turn, 4 * turn + 4)), list(range(turn, turn + 2))]
            y = run(pool, machine.model, slots, numbers, parents=parents)
            if accept is flow.commit:
                flow.commit(pool, slots, [3, 2])
            else:
                flow.commit_path(pool, slots, torch.tensor([[0, 1, 2], [0, 1, -1]]))
            found.append([*y, *slot_bits(pool, slots[0], "ring"), *slot_bits(pool, slots[1], "checkpoint")])
    assert all(same(a, b) for a, b in zip(found[:7], found[7:], strict=True))


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_committed_path_looks_like_a_chain(recurrence: str) -> None:
    """Invariant 6 for trees: the next steps are those of a slot that only ever saw the accepted tokens."""
    machine = script(recurrence, conv=False)
    pool, model = machine.pool, machine.model
    tree, plain = pool.acquire(), pool.acquire()
    for turn in range(9):
        base = 5 * turn
        run(pool, model, [tree], [[base, base + 1, base + 2, base + 3]], parents=[[-1, 0, 0, 2]])
        flow.commit_path(pool, [tree], [[0, 2, 3]])
        run(pool, model, [plain], [[base, base + 2, base + 3]])
        flow.commit(pool, [plain], 3)
        ours, theirs = (flow.materialize(pool, 0, [slot])[0] for slot in (tree, plain))
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_moves_with_its_slot() -> None:
    """The shape of a pending tree goes wherever its rows go."""
    machine = script("gdn")
    pool = machine.pool
    slot = pool.acquire()
    parents = [[-1, 0, 0, 1]]
    run(pool, machine.model, [slot], [[1, 2, 3, 4]], parents=parents)
    moved = pool.move(slot)
    twin = pool.gather(torch.tensor([moved, moved]))
    with pytest.raises(ValueError, match="row 3 follows row 1, not row 2"):
        flow.commit_path(twin, [1], [[0, 2, 3]])
    flow.commit_path(twin, [0, 1], [[0, 1, 3], [0, 2]])
    flow.commit_path(pool, [moved, PAD_SLOT], [[0, 1, 3], []])
    assert pool.cursor.get(moved)["length"] == 3


def test_the_code_of_a_tree() -> None:
    """Every parent that a token may have survives, and a chain is 0."""
    parents = torch.tensor([[min(t - 1, first) for t in range(16)] for first in range(-1, 15)])
    code = cursor.tree_code(parents)
    assert torch.equal(cursor.parents_of(code, 16), parents)
    assert int(code[-1]) == 0
    assert cursor.tree_code(torch.empty(3, 0, dtype=torch.int64)).tolist() == [0, 0, 0]


# ---- refusals


def test_what_is_no_tree() -> None:
    machine = script("mamba2")
    pool, slot = machine.pool, machine.pool.acquire()
    refused = [
        ([[-1, 1]], r"token 1 of row 0 has parent 1: a parent is an earlier token of the row, or -1"),
        ([[0, 0]], r"token 0 of row 0 has parent 0"),
        ([[-1, -2]], r"token 1 of row 0 has parent -2"),
        ([[-1]], r"parents must be integers \[1, 2\], one per token of each row, got \[1, 1\]"),
        ([[-1.0, 0.0]], r"parents must be integers \[1, 2\]"),
    ]
    for parents, message in refused:
        with pytest.raises(ValueError, match=message):
            flow.open_step(pool, [slot], 2, parents=parents)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a prompt has no parents"):
        flow.open_step(pool, [slot], 2, parents=[[-1, 0]], is_prompt=True)
    flow.open_step(pool, [slot], [1], width=2, parents=[[-1, 7]])  # beyond the row's tokens anything goes


def test_what_is_no_path() -> None:
    machine = script("mamba2")
    pool, slot = machine.pool, machine.pool.acquire()
    run(pool, machine.model, [slot], [[1, 2, 3, 4]], parents=[[-1, 0, 0, 1]])
    before = slot_bits(pool, slot, "ring")
    refused = [
        (lambda: flow.commit_path(pool, [slot], [[0, 3]]), "row 3 follows row 1, not row 0"),
        (lambda: flow.commit_path(pool, [slot], [[1, 3]]), "row 1 follows row 0, not the committed history"),
        (lambda: flow.commit_path(pool, [slot], [[0, 0]]), "row 0 follows the committed history, not row 0"),
        (lambda: flow.commit_path(pool, [slot], [[0, 1, 3, 4]]), "has 4 pending rows"),
        (lambda: flow.commit_path(pool, [slot], torch.tensor([[0, -1, 3]])), "path .0, -1, 3. for slot"),
        (lambda: flow.commit_path(pool, [slot], [[0], [0]]), "one list for each of 1 slots"),
        (
            lambda: flow.commit_path(pool, [slot], torch.tensor([[0.9, 1.0]])),
            "paths must be integers, got torch.float32",
        ),
        (lambda: flow.commit(pool, [slot], 3), "row 2 follows row 0, not row 1; accept a path .* with commit_path"),
    ]
    for verb, message in refused:
        with pytest.raises(ValueError, match=message):
            verb()
    assert same(before, slot_bits(pool, slot, "ring"))
    flow.commit(pool, [slot], 2)  # the first two are a chain
    with pytest.raises(ValueError, match="has 0 pending rows"):
        flow.commit_path(pool, [slot], [[0]])


# ---- teeth


def every_token_is_an_ancestor(patch: Patch) -> None:
    patch.setattr(algebra, "lineage", lambda parents: algebra.chain(parents.shape[1], parents.device))


def siblings_are_ancestors_of_siblings(patch: Patch) -> None:
    original = algebra.lineage

    def lineage(parents: torch.Tensor) -> torch.Tensor:
        aunts = parents.unsqueeze(2) == parents.unsqueeze(1)
        return original(parents) | (aunts & algebra.chain(parents.shape[1], parents.device))

    patch.setattr(algebra, "lineage", lineage)


def decays_sum_over_rows(patch: Patch) -> None:
    original = algebra.path_sums

    def path_sums(log_decay: torch.Tensor, paths: torch.Tensor | None = None) -> torch.Tensor:
        sums = original(log_decay)
        return sums if paths is None else sums[:, sums.shape[1] - paths.shape[1] :]

    patch.setattr(algebra, "path_sums", path_sums)


def conv_reads_the_rows_before(patch: Patch) -> None:
    conv = sys.modules["replayssm.flow.conv"]
    patch.setattr(conv, "conv_paths", lambda step, joined, width: joined.unfold(1, width, 1))


def nothing_is_compacted(patch: Patch) -> None:
    patch.setattr(sys.modules["replayssm.flow.commit"], "_compact", lambda *_: None)


def compacted_backwards(patch: Patch) -> None:
    """The path's rows in reverse order, as a compaction that stores downwards while it loads would mix them up."""
    commit = sys.modules["replayssm.flow.commit"]
    original = commit._compact  # type: ignore[attr-defined]
    patch.setattr(commit, "_compact", lambda pool, slots, path: original(pool, slots, path.flip(1)))


def stored_while_loading(patch: Patch) -> None:
    """Rows are moved one by one, in descending order: a row is overwritten before it has moved itself."""
    commit = sys.modules["replayssm.flow.commit"]
    original = commit._compact  # type: ignore[attr-defined]

    def one_by_one(pool: object, slots: torch.Tensor, path: torch.Tensor) -> None:
        for place in reversed(range(path.shape[1])):
            alone = torch.arange(path.shape[1]).expand_as(path).clone()
            alone[:, place] = path[:, place]
            original(pool, slots, alone)

    patch.setattr(commit, "_compact", one_by_one)


def ring_is_compacted_and_carry_is_not(patch: Patch) -> None:
    patch.setattr(cursor, "carry_row", lambda position, rows: torch.zeros_like(position))


FAULTS: tuple[Callable[[Patch], None], ...] = (
    every_token_is_an_ancestor,
    siblings_are_ancestors_of_siblings,
    decays_sum_over_rows,
    conv_reads_the_rows_before,
    nothing_is_compacted,
    compacted_backwards,
    stored_while_loading,
    ring_is_compacted_and_carry_is_not,
)


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_in_trees_is_seen(fault: Callable[[Patch], None], recurrence: str, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        grow(recurrence)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_without_a_fault_it_is_green(recurrence: str) -> None:
    grow(recurrence)


def grow(recurrence: str) -> None:
    """Trees of six tokens, of which a path that skips rows is accepted, on steps that flush and others."""
    machine = script(recurrence, window=9, verify_len=6)
    machine.acquire(choice=None)
    machine.prompt([Row(0, tokens=5)], loaded=False)
    for accept in (6, 3, 5, 6, 6):
        machine.run_step([Row(0, tokens=6, tree=BUSHY)])
        machine.run_commit([Row(0, accept=accept)])
        machine.check()
