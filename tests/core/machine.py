"""A hypothesis state machine that interleaves every verb at random and compares with the fp64 oracle after each.

The machine keeps one oracle `Sequence` per live slot and predicts every cursor from the flush rule. Around each verb it
demands that whatever the verb must not touch keeps its bits; after it, all memory that nothing may read is filled with
NaN again, so that a read of a stale row turns outputs and states to NaN.

Modes, by what the checkpoint is kept in: "exact" (fp64, where faults stand out from rounding), "fp32", "read copy" (the
state must stay exact, outputs follow the copy's precision), "low precision" (one rounding per flush; values beyond the
format's range are clamped and counted) and "two precisions" (the pairs that are meant to be used). `EVERY_PAIR` has
all.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from replayssm import ReplayConfig, flow
from replayssm.recurrences import get
from replayssm.state.pool import SaturationWarning
from replayssm.state.slots import PAD_SLOT, SlotError
from replayssm.state.snapshot import restore, snapshot

from . import oracle
from .setups import BEYOND_FP16, REGIMES, TOKENS, Model, Setup, bits, exact, geometry_for, grid, poison

MODES: dict[str, tuple[tuple[str, str | None], ...]] = {
    "exact": (("fp64", None),),
    "fp32": (("fp32", None),),
    "read copy": (("fp64", "fp32"), ("fp32", "fp16"), ("fp32", "bf16"), ("fp64", "bf16")),
    "low precision": (("fp16", None), ("bf16", None)),
    "two precisions": (("fp32", "fp8"), ("fp32", "int8"), ("fp32", "nvfp4"), ("fp16", "nvfp4"), ("fp8", "nvfp4")),
}
"""(checkpoint_format, read_format) of each mode."""


def legal(checkpoint: str, read_copy: str | None) -> bool:
    """Whether the configuration takes this pair."""
    try:
        ReplayConfig(checkpoint_format=checkpoint, read_format=read_copy)
    except ValueError:
        return False
    return True


EVERY_PAIR = {
    f"{checkpoint} + {read_copy}" if read_copy else checkpoint: ((checkpoint, read_copy),)
    for checkpoint in ("fp32", "fp16", "bf16", "fp8", "int8", "nvfp4")
    for read_copy in (None, "fp16", "bf16", "fp8", "int8", "nvfp4")
    if legal(checkpoint, read_copy)
}
"""Each combination as a mode of its own; int8 and NVFP4 alone are one copy that reads and recurrence share."""


@st.composite
def setups(draw: st.DrawFn, recurrence: str, mode: str) -> Setup:
    """A random configuration and tiny model."""
    window = draw(st.one_of(st.integers(1, 6), st.integers(1, 64), st.sampled_from((1, 2, 16, 64))), label="window")
    verify_len = draw(st.integers(1, min(window, 16)), label="verify_len")
    checkpoint, read_copy = draw(st.sampled_from((MODES | EVERY_PAIR)[mode]), label="formats")
    rounding, key_dim = "nearest", 4
    if checkpoint not in ("fp64", "fp32") and mode != "low precision":  # which looks for values out of range
        rounding = draw(st.sampled_from(("nearest", "stochastic")), label="rounding")
    if "nvfp4" in (checkpoint, read_copy):  # one block of key rows, or several
        key_dim = draw(st.sampled_from((16, 32)), label="key_dim")
    config = ReplayConfig(
        window=window,
        verify_len=verify_len,
        checkpoint_format=checkpoint,
        read_format=read_copy,
        rounding=rounding,
        carry_history=draw(st.booleans(), label="carry_history"),
        stagger=draw(st.booleans(), label="stagger"),
    )
    regimes = (*REGIMES, BEYOND_FP16, BEYOND_FP16) if "fp16" in (checkpoint, read_copy) else REGIMES
    model_dtypes = ("fp64", "fp32", "bf16") if checkpoint == "fp64" else ("fp32", "bf16")
    return Setup(
        recurrence,
        config,
        geometry_for(
            recurrence,
            key_heads=draw(st.sampled_from((1, 2)), label="key_heads"),
            conv=draw(st.booleans(), label="conv"),
            conv_width=draw(st.sampled_from((4, 2)), label="conv_width"),
            key_dim=key_dim,
        ),
        model_dtype=draw(st.sampled_from(model_dtypes), label="model dtype"),
        regime=draw(st.sampled_from(regimes), label="regime"),
        paged=draw(st.booleans(), label="paged"),
        seed=draw(st.integers(0, 2**16), label="seed"),
    )


@dataclass(frozen=True)
class Row:
    """One row of a batch, in raw draws: `pick` chooses a slot, the counts wrap around whatever is possible."""

    pick: int
    tokens: int = 1
    window: int = 0  # 0: none asked for
    forced: bool = False
    accept: int | None = None  # None: leave pending
    tree: tuple[int, ...] | None = None  # None: a chain

    def parents(self, tokens: int) -> list[int]:
        """Of so many tokens, each one's parent."""
        if self.tree is None:
            return oracle.chain(tokens)
        return [self.tree[t % len(self.tree)] % (t + 1) - 1 for t in range(tokens)]


PAD_PICK = 9
_has_free = precondition(lambda self: len(self.live) < self.setup.slots)
_has_usable = precondition(lambda self: self.usable())
# one draw for a whole tree: a list for each row would leave examples too little room for verbs
_trees = st.one_of(st.none(), st.integers(0, 2**16).map(lambda seed: tuple(Random(seed).choices(range(999), k=16))))
_picks = st.one_of(st.integers(0, 4), st.integers(0, 4), st.just(PAD_PICK))
_rows = st.lists(
    st.builds(
        Row,
        pick=_picks,
        tokens=st.one_of(st.integers(0, 16), st.sampled_from((0, 1, 16))),
        window=st.one_of(st.just(0), st.just(0), st.integers(1, 64)),
        forced=st.sampled_from((False, False, False, True)),
        accept=st.one_of(st.none(), st.integers(0, 16), st.just(16)),
        tree=_trees,
    ),
    min_size=1,
    max_size=5,
)


class Machine(RuleBasedStateMachine):
    """Subclasses set `recurrence` and `mode`."""

    recurrence = "mamba2"
    mode = "exact"
    verbs = 0  # rules that this example has run

    # ---- set-up

    @initialize(data=st.data())
    def start(self, data: Any) -> None:
        self.begin(data.draw(setups(self.recurrence, self.mode), label="setup"))
        for _ in range(data.draw(st.integers(1, 3), label="slots in use")):
            self.acquire(choice=None)

    def begin(self, setup: Setup) -> None:
        """Start from a given setup; scripted tests call this in place of `start`."""
        self.setup, self.config = setup, setup.config
        self.model = Model(setup)
        self.pool = self.model.pool()
        self.live: dict[int, oracle.Sequence] = {}
        self.broken: set[int] = set()
        self.saved: list[tuple[bytes, oracle.Sequence]] = []
        self.fresh = 0
        self.layers = range(setup.layers)
        self.poison()

    # ---- choosing

    def usable(self) -> list[int]:
        return sorted(set(self.live) - self.broken)

    def pick(self, number: int) -> int:
        usable = self.usable()
        return usable[number % len(usable)]

    def batch(self, rows: Sequence[Row]) -> list[tuple[int, Row]]:
        """Rows with their slots, each slot once."""
        usable, taken, found = self.usable(), set(), []
        for row in rows:
            slot = PAD_SLOT if row.pick == PAD_PICK or not usable else usable[row.pick % len(usable)]
            if slot in taken:
                continue
            if slot != PAD_SLOT:
                taken.add(slot)
            found.append((slot, row))
        return found

    def new_tokens(self, count: int) -> list[int]:
        self.fresh += count
        return [(self.fresh - count + i) % TOKENS for i in range(count)]

    # ---- life cycle

    @_has_free
    @rule(choice=st.one_of(st.none(), st.integers(0, 4)))
    def acquire(self, choice: int | None) -> None:
        free = self.free()
        wanted = None if choice is None else free[choice % len(free)]
        with self.untouched(except_slots=free):
            slot = self.pool.acquire(wanted, seed=self.fresh)
        assert slot in free if wanted is None else slot == wanted
        self.adopt(slot, self.model.sequence())

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 4))
    def reset(self, number: int) -> None:
        slot = sorted(self.live)[number % len(self.live)]
        with self.untouched(except_slots=[slot]):
            self.pool.reset(slot)
        self.adopt(slot, self.model.sequence())

    @precondition(lambda self: len(self.live) > 2)
    @rule(number=st.integers(0, 4))
    def release(self, number: int) -> None:
        slot = sorted(self.live)[number % len(self.live)]
        with self.untouched(except_slots=[slot]):
            self.give_back(slot)
        self.forget(slot)

    def give_back(self, slot: int) -> None:
        """Release, which warns exactly when elements were clamped."""
        clamped = int(self.pool.cursor.saturated[slot])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.pool.release(slot)
        messages = [str(w.message) for w in caught if issubclass(w.category, SaturationWarning)]
        assert len(messages) == (clamped > 0)
        assert all(f"slot {slot}: {clamped} " in message for message in messages)

    def adopt(self, slot: int, sequence: oracle.Sequence) -> None:
        """A verb has put `sequence` into `slot`; the phase of its first flush is the pool's own choice."""
        sequence.window = int(self.pool.cursor.window[slot])
        assert self.config.verify_len <= sequence.window <= self.config.window
        if not self.config.stagger:
            assert sequence.window == self.config.window
        self.live[slot] = sequence
        self.broken.discard(slot)
        self.poison()

    def forget(self, slot: int) -> None:
        del self.live[slot]
        self.broken.discard(slot)
        self.poison()

    @_has_free
    @_has_usable
    @rule(number=st.integers(0, 4), into=st.integers(0, 4), back=st.one_of(st.none(), st.integers(0, 64)))
    def fork(self, number: int, into: int, back: int | None) -> None:
        src, free = self.pick(number), self.free()
        sequence = self.live[src]
        records = None if back is None else max(0, sequence.length - back)
        dst = None if into % 2 else free[into % len(free)]
        if not self.reaches(sequence, records):
            with self.untouched(), self.refused("set carry_history=True"):
                self.pool.fork(src, dst, records)
            return
        with self.untouched(except_slots=free):
            slot = self.pool.fork(src, dst, records)
        kept = sequence.length if records is None else records
        self.adopt(slot, sequence.copy(sequence.folded + kept))

    @_has_free
    @_has_usable
    @rule(number=st.integers(0, 4), into=st.integers(0, 4))
    def move(self, number: int, into: int) -> None:
        src, free = self.pick(number), self.free()
        dst = None if into % 2 else free[into % len(free)]
        with self.untouched(except_slots=[src, *free]):
            slot = self.pool.move(src, dst)
        assert slot in free
        sequence = self.live.pop(src)
        self.adopt(slot, sequence)

    @_has_usable
    @rule(picks=st.lists(st.integers(0, 4), min_size=5, max_size=5))
    def gather(self, picks: list[int]) -> None:
        """Go on in a new pool whose slots continue slots of this one, repeated, reordered or dropped."""
        usable = self.usable()
        index = [usable[pick % len(usable)] for pick in picks[: self.setup.slots]]
        with self.untouched():
            pool = self.pool.gather(torch.tensor(index))
        self.pool, self.setup = pool, replace(self.setup, paged=False)
        live = {slot: self.live[src].copy() for slot, src in enumerate(index)}
        for slot, src in enumerate(index):
            live[slot].pending, live[slot].parents = list(self.live[src].pending), list(self.live[src].parents)
        self.live, self.broken = live, set()
        self.poison()

    @_has_usable
    @rule(number=st.integers(0, 4), preempt=st.booleans())
    def save(self, number: int, preempt: bool) -> None:
        slot = self.pick(number)
        with self.untouched():
            data = snapshot(self.pool, slot)
        self.saved = [*self.saved[-2:], (data, self.live[slot].copy())]
        if preempt:
            self.give_back(slot)
            self.forget(slot)

    @_has_free
    @precondition(lambda self: self.saved)
    @rule(number=st.integers(0, 4), into=st.integers(0, 4))
    def resume(self, number: int, into: int) -> None:
        free = self.free()
        data, sequence = self.saved[number % len(self.saved)]
        with self.untouched(except_slots=free):
            slot = restore(self.pool, data, None if into % 2 else free[into % len(free)])
        self.adopt(slot, sequence.copy())

    def free(self) -> list[int]:
        return sorted(set(range(self.setup.slots)) - set(self.live))

    def reaches(self, sequence: oracle.Sequence, records: int | None) -> bool:
        """Whether a copy that keeps `records` of the ring still has its convolution window."""
        goes_back = records is not None and records < sequence.length
        return self.config.carry_history or not self.model.channels or not goes_back

    # ---- prompts

    @rule(rows=_rows)
    def prefill(self, rows: list[Row]) -> None:
        self.prompt(rows, loaded=False)

    @rule(rows=_rows)
    def load(self, rows: list[Row]) -> None:
        self.prompt(rows, loaded=True)

    def prompt(self, rows: list[Row], loaded: bool) -> None:
        batch = self.batch(rows)
        numbers = [[] if slot == PAD_SLOT else self.new_tokens(row.tokens) for slot, row in batch]
        slots = [slot for slot, _ in batch]
        tokens = grid(numbers)
        with (
            self.untouched(except_slots=[slot for slot, new in zip(slots, numbers, strict=True) if new], cursors=slots),
            flow.prompt(self.pool, slots, [len(new) for new in numbers]) as step,
        ):
            for layer in self.layers:
                self.run_conv(layer, step, slots, numbers, tokens, append_only=loaded)
                if not loaded:
                    y = flow.prefill(self.pool, layer, step, self.model.inputs(layer, tokens))
                    self.check_outputs(layer, slots, numbers, y, through_read_copy=False)
                    continue
                after = torch.full((len(slots), *self.setup.geometry.state_shape), torch.nan, dtype=torch.float64)
                for row, (slot, new) in enumerate(zip(slots, numbers, strict=True)):
                    if new:
                        after[row] = torch.from_numpy(self.live[slot].outputs(layer, new)[-1].state)
                flow.load(self.pool, layer, step, after)
        for slot, new in zip(slots, numbers, strict=True):
            if new:  # a row without prompt tokens is left alone
                sequence = self.live[slot]
                sequence.pending = []
                if loaded:
                    sequence.load(new)
                else:
                    sequence.fold()
                    sequence.extend(new)
                    sequence.fold()
        self.poison()

    # ---- steps

    @rule(rows=_rows, order=st.randoms(use_true_random=False))
    def step(self, rows: list[Row], order: Any) -> None:
        self.run_step(rows)
        chosen = [Row(r.pick, accept=r.accept) for r in rows if r.accept is not None]
        order.shuffle(chosen)
        if chosen:
            self.run_commit(chosen)

    @_has_usable
    @rule(turns=st.integers(1, 24), tokens=st.integers(0, 15), rejected=st.integers(0, 2), tree=_trees)
    def decode(self, turns: int, tokens: int, rejected: int, tree: tuple[int, ...] | None) -> None:
        """Every usable slot decodes for a while, so that windows fill and flush and rings wrap."""
        new = 1 + tokens % self.config.verify_len
        accept = max(0, new - rejected) if turns % 2 else 16
        rows = [Row(pick, tokens=new, accept=accept, tree=tree) for pick in range(len(self.usable()))]
        for _ in range(turns):
            self.run_step(rows)
            self.run_commit(rows)

    @rule(rows=_rows)
    def commit(self, rows: list[Row]) -> None:
        self.run_commit(rows)

    def run_step(self, rows: list[Row]) -> None:
        batch = self.batch(rows)
        slots = [slot for slot, _ in batch]
        limit = self.config.verify_len + 1
        numbers = [[] if slot == PAD_SLOT else self.new_tokens(row.tokens % limit) for slot, row in batch]
        asked = [row.window if 0 < row.window <= self.config.window else self.config.window for _, row in batch]
        forced = [row.forced for _, row in batch]
        due = {
            slot
            for slot, new, window, must in zip(slots, numbers, asked, forced, strict=True)
            if slot != PAD_SLOT and (must or self.live[slot].length + len(new) > min(window, self.live[slot].window))
        }
        folds = {slot for slot in due if self.live[slot].length}
        tokens = grid(numbers)
        parents = [row.parents(len(new)) for (_, row), new in zip(batch, numbers, strict=True)]
        wide = [above + [0] * (tokens.shape[1] - len(above)) for above in parents]
        has_tree = any(row.tree is not None for _, row in batch)
        self.check_ring_fits(slots, numbers)
        active = [slot for slot, new in zip(slots, numbers, strict=True) if new or slot in folds]
        with self.untouched(except_slots=active, cursors=slots, kept={s: s in folds for s in active}):
            counts = [len(new) for new in numbers]
            with flow.step(
                self.pool, slots, counts, window=asked, forced=forced, parents=wide if has_tree else None
            ) as step:
                outputs = []
                for layer in self.layers:
                    self.run_conv(layer, step, slots, numbers, tokens, parents)
                    outputs.append(flow.verify(self.pool, layer, step, self.model.inputs(layer, tokens)))
            for slot in slots:
                if slot == PAD_SLOT:
                    continue
                sequence = self.live[slot]
                sequence.pending, sequence.parents = [], []
                if slot in due:
                    sequence.fold()
                    sequence.window = self.config.window
            for layer, y in enumerate(outputs):
                self.check_outputs(layer, slots, numbers, y, through_read_copy=True, parents=parents)
        for slot, new, above in zip(slots, numbers, parents, strict=True):
            if slot != PAD_SLOT:
                self.live[slot].pending, self.live[slot].parents = new, above
        self.poison()

    def run_commit(self, rows: list[Row]) -> None:
        batch = self.batch(rows)
        slots = [slot for slot, _ in batch]
        pending = [0 if slot == PAD_SLOT else len(self.live[slot].pending) for slot in slots]
        accepted = [
            (row.accept or 0) % (p + 1) if row.accept != 16 else p for (_, row), p in zip(batch, pending, strict=True)
        ]
        above = [[] if slot == PAD_SLOT else self.live[slot].parents for slot in slots]
        # of a tree, the path to the last of so many rows
        paths = [oracle.path(parents, count - 1) for parents, count in zip(above, accepted, strict=True)]
        if all(path == list(range(count)) for path, count in zip(paths, accepted, strict=True)):
            with self.untouched(cursors=slots):
                flow.commit(self.pool, slots, accepted)
        else:
            moved = [slot for slot in slots if slot != PAD_SLOT]
            with self.untouched(except_slots=moved, cursors=slots, kept=dict.fromkeys(moved, False)):
                flow.commit_path(self.pool, slots, paths)
        for slot, path in zip(slots, paths, strict=True):
            if slot != PAD_SLOT:
                sequence = self.live[slot]
                numbers, sequence.pending, sequence.parents = sequence.pending, [], []
                sequence.extend([numbers[place] for place in path])
        self.poison()

    @rule(rows=_rows)
    def flush(self, rows: list[Row]) -> None:
        slots = [slot for slot, _ in self.batch(rows)]
        folds = [slot for slot in slots if slot != PAD_SLOT and self.live[slot].length]
        with self.untouched(except_slots=folds, cursors=slots, kept=dict.fromkeys(folds, True)):
            flow.flush(self.pool, slots)
        for slot in folds:
            self.live[slot].fold()
        self.poison()

    @rule(rows=_rows)
    def fail(self, rows: list[Row]) -> None:
        """A step raises between its layers: its slots are refused until they are reset or released."""
        batch = [(slot, row) for slot, row in self.batch(rows) if slot != PAD_SLOT][:2]
        slots = [slot for slot, _ in batch]
        numbers = [self.new_tokens(min(row.tokens, self.config.verify_len)) for _, row in batch]
        tokens = grid(numbers)
        with (
            self.untouched(except_slots=slots),
            self.refused("between its layers", RuntimeError),
            flow.step(self.pool, slots, [len(new) for new in numbers], forced=True) as step,
        ):
            flow.verify(self.pool, 0, step, self.model.inputs(0, tokens))
            raise RuntimeError("between its layers")
        self.broken |= set(slots)
        for slot in slots:
            for use in (lambda s: flow.flush(self.pool, [s]), self.pool.fork, lambda s: snapshot(self.pool, s)):
                with self.untouched(), self.refused("is broken", SlotError):
                    use(slot)
        self.poison()

    # ---- reading

    @_has_usable
    @rule()
    def materialize_all(self) -> None:
        """Every boundary of every live slot, exactly."""
        usable = self.usable()
        wanted = [(slot, n) for slot in usable for n in range(self.live[slot].length + 1)]
        with self.untouched():
            for layer in self.layers:
                states = flow.materialize(self.pool, layer, [s for s, _ in wanted], [n for _, n in wanted])
                for (slot, n), state in zip(wanted, states, strict=True):
                    self.check_state(layer, self.live[slot], self.live[slot].folded + n, state)

    @_has_free
    @_has_usable
    @rule(number=st.integers(0, 4), records=st.integers(0, 64), into=st.integers(0, 4))
    def materialize_into(self, number: int, records: int, into: int) -> None:
        src, free = self.pick(number), self.free()
        sequence = self.live[src]
        records %= sequence.length + 1
        dst = None if into % 2 else [free[into % len(free)]]
        if not self.reaches(sequence, records):
            with self.untouched(), self.refused("set carry_history=True"):
                flow.materialize_into(self.pool, [src], [records], dst)
            return
        with self.untouched(except_slots=free):
            (slot,) = flow.materialize_into(self.pool, [src], [records], dst)
        other = sequence.copy(sequence.folded + records)
        other.store()
        self.adopt(slot, other)

    # ---- checks

    @invariant()
    def check(self) -> None:
        """Cursors as predicted; the logical state of every slot as the oracle's."""
        if not hasattr(self, "pool"):
            return
        self.verbs += 1
        cursor, usable = self.pool.cursor, self.usable()
        assert self.pool.slots.live == set(self.live)
        for slot in usable:
            sequence, counters = self.live[slot], cursor.get(slot)
            expected = {
                "length": sequence.length,
                "position": len(sequence.tokens),
                "pending": len(sequence.pending),
                "window": sequence.window,
            }
            assert {name: counters[name] for name in expected} == expected, f"cursor of slot {slot}"
            least, most = sequence.clamped
            assert least <= counters["saturated"] <= most, f"clamped elements of slot {slot}"
            assert 0 <= counters["start"] < self.pool.ring_rows
            assert counters["length"] <= self.config.window
        if not usable:
            return
        for layer in self.layers:
            for slot, state in zip(usable, flow.materialize(self.pool, layer, usable), strict=True):
                self.check_state(layer, self.live[slot], len(self.live[slot].tokens), state)

    def check_ring_fits(self, slots: list[int], numbers: list[list[int]]) -> None:
        for slot, new in zip(slots, numbers, strict=True):
            if slot != PAD_SLOT:
                assert int(self.pool.cursor.length[slot]) + len(new) <= self.pool.ring_rows

    def check_state(self, layer: int, sequence: oracle.Sequence, tokens: int, state: Tensor) -> None:
        error = np.sqrt(np.square(exact(state) - sequence.state(layer, tokens)).sum((1, 2)))
        bound = sequence.error(layer, tokens)
        assert (error <= bound).all(), f"layer {layer}: state after {tokens} tokens is off by {error}, allowed {bound}"

    def check_outputs(
        self,
        layer: int,
        slots: list[int],
        numbers: list[list[int]],
        y: Tensor,
        through_read_copy: bool,
        parents: list[list[int]] | None = None,
    ) -> None:
        """Outputs of a step: within the bound on real tokens, exactly zero elsewhere."""
        assert y.dtype == self.pool.layers[layer].layout.compute_dtype
        if parents is None:
            parents = [oracle.chain(len(new)) for new in numbers]
        for slot, new, above, got in zip(slots, numbers, parents, y, strict=True):
            assert not got[len(new) :].any(), f"layer {layer}, slot {slot}: padding has an output"
            if not new:
                continue
            sequence = self.live[slot]
            if not through_read_copy:
                # a prompt continues from the checkpoint, into which the ring was folded first
                sequence = sequence.copy()
                sequence.fold()
            gross, drift, path = sequence.gross(layer), sequence.drift_at(layer), sequence.path(layer)
            if through_read_copy:
                drift = drift + sequence.read_at(layer)
            bounds = [(gross, drift, path)]  # of the history; that of token t is entry t + 1
            for t, want in enumerate(sequence.outputs(layer, new, above)):
                gross, drift, path = bounds[above[t] + 1]
                gross, drift, path = want.kept * gross + want.added, want.kept * drift, path + want.path
                bounds.append((gross, drift, path))
                error = np.sqrt(np.square(exact(got[t]) - want.y).sum(1))
                bound = sequence.eps(path) * (gross * want.probe + want.bypass) + drift * want.probe + sequence.floor
                assert (error <= bound).all(), f"layer {layer}, slot {slot}, token {t}: off by {error}, allowed {bound}"

    def run_conv(
        self,
        layer: int,
        step: flow.Step,
        slots: list[int],
        numbers: list[list[int]],
        tokens: Tensor,
        parents: list[list[int]] | None = None,
        append_only: bool = False,
    ) -> None:
        """The layer's convolution, against the oracle's."""
        spec = self.model.layers[layer]
        if spec.conv_inputs is None or spec.oracle_conv is None or spec.conv_weight is None:
            return
        raw = spec.conv_inputs[tokens]
        if append_only:
            flow.conv_append(self.pool, layer, step, raw)
            return
        out = flow.causal_conv(self.pool, layer, step, raw, spec.conv_weight, spec.conv_bias)
        inputs, weight, bias = spec.oracle_conv
        lag = weight.shape[1] - 1
        # sum and activation each round once to the model's dtype; SiLU stretches an error by at most 1.1
        eps = 4 * torch.finfo(out.dtype).eps
        for row, (slot, new, got) in enumerate(zip(slots, numbers, out, strict=True)):
            assert not got[len(new) :].any()
            if not new:
                continue
            above = oracle.chain(len(new)) if parents is None else parents[row]
            for t in range(len(new)):
                path = self.live[slot].tokens[-lag:] + [new[place] for place in oracle.path(above, t)]
                want, gross = oracle.conv(inputs[path], weight, bias)
                assert (np.abs(exact(got[t]) - want) <= eps * gross).all(), f"layer {layer}, slot {slot}: convolution"

    @contextmanager
    def refused(self, message: str, kind: type[Exception] = ValueError) -> Iterator[None]:
        with pytest.raises(kind, match=re.escape(message)):
            yield

    # ---- memory

    @contextmanager
    def untouched(
        self,
        except_slots: Sequence[int] = (),
        cursors: Sequence[int] = (),
        kept: dict[int, bool] | None = None,
    ) -> Iterator[None]:
        """Every slot keeps its bits, except `except_slots`; cursors of `cursors` may move as well.

        Args:
            kept: of an excepted slot, whether it folds. Where it does not, checkpoint, read copy, committed records
                and committed carry rows keep their bits, so that only the step's own rows were written; where it does,
                all but checkpoint and read copy.
        """
        before = [{name: tensor.clone() for name, tensor in layer.tensors.items()} for layer in self.pool.layers]
        counters = {name: tensor.clone() for name, tensor in self.pool.cursor.items()}
        own = self.committed_rows() if kept else {}
        gaps = self.gaps()
        yield
        same = [slot for slot in range(self.setup.slots) if slot not in except_slots]
        for index, layer in enumerate(self.pool.layers):
            for name, tensor in layer.tensors.items():
                old, new = bits(before[index][name]), bits(tensor)
                if torch.equal(old, new):
                    continue
                assert torch.equal(old[same], new[same]), f"layer {index}: {name} of another slot has changed"
                for slot, folds in (kept or {}).items():
                    if name.split(".")[0] in ("checkpoint", "read_copy"):
                        intact = folds or torch.equal(old[slot], new[slot])
                    else:
                        mask = own[name.split(".")[0]][slot]
                        intact = torch.equal(old[slot][mask], new[slot][mask])
                    assert intact, f"layer {index}, slot {slot}: {name} has changed where it must not"
        for old_gap, gap in zip(gaps, self.gaps(), strict=True):
            assert torch.equal(old_gap, gap), "bytes between the tensors of a page have changed"
        unmoved = [slot for slot in same if slot not in cursors]
        for name, tensor in self.pool.cursor.items():
            assert torch.equal(counters[name][unmoved], tensor[unmoved]), f"cursor {name} of another slot has changed"

    def gaps(self) -> list[Tensor]:
        """The bytes of every page that belong to no tensor."""
        if not self.setup.paged:
            return []
        layout, found = self.model.layout, []
        owned = torch.zeros(layout.page_bytes + 64, dtype=torch.bool)
        for spec in layout.tensors:
            owned[layout.page_offsets[spec.name] : layout.page_offsets[spec.name] + spec.bytes] = True
        for layer in self.pool.layers:
            tensor = layer.tensors["checkpoint"]
            pages = torch.empty(0, dtype=torch.uint8).set_(
                tensor.untyped_storage(), 0, (self.setup.slots, layout.page_bytes + 64)
            )
            found.append(pages[:, ~owned].clone())
        return found

    def committed_rows(self, pending: bool = False) -> dict[str, Tensor]:
        """bool [slots, rows] of ring and carry: rows that later steps may read, pending ones included if asked."""
        cursor, layout = self.pool.cursor, self.model.layout
        ring = np.zeros((self.setup.slots, layout.ring_rows), dtype=bool)
        carry = np.zeros((self.setup.slots, layout.carry_rows), dtype=bool)
        for slot in self.usable():
            sequence, start = self.live[slot], int(cursor.start[slot])
            length, position = sequence.length, len(sequence.tokens)
            drafts = len(sequence.pending) if pending else 0
            ring[slot, np.arange(start, start + length + drafts) % layout.ring_rows] = True
            lag = layout.conv_lag + (length if self.config.carry_history else 0)
            carry[slot, np.arange(max(0, position - lag), position + drafts) % layout.carry_rows] = True
        return {"ring": torch.from_numpy(ring), "carry": torch.from_numpy(carry)}

    def poison(self) -> None:
        """NaN into everything that must not be read before it is written."""
        rows = self.committed_rows(pending=True)
        usable = self.usable()
        empty = torch.ones(self.setup.slots, dtype=torch.bool)
        empty[[slot for slot in usable if self.live[slot].folded]] = False
        for layer in self.pool.layers:
            for name, tensor in layer.tensors.items():
                kind = name.split(".")[0]
                unread = ~rows[kind] if kind in rows else empty
                poison(tensor, unread.reshape(*unread.shape, *[1] * (tensor.dim() - unread.dim())))


def machine_for(recurrence: str, mode: str) -> type[Machine]:
    """The machine of one recurrence and mode."""
    assert get(recurrence)
    name = f"{recurrence}_{mode}".replace(" ", "_")
    return type(name, (Machine,), {"recurrence": recurrence, "mode": mode})
