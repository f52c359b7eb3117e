"""The tests can fail: faults of many kinds are put in, one at a time, and the state machine must go red.

A ring with one row fewer is not among them: this back end reads a flush's records before it writes the step's tokens.
Kernels do both in one launch, and `test_cursor.py` holds the rows to be disjoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from replayssm import flow
from replayssm.flow import algebra
from replayssm.flow.step import Step
from replayssm.recurrences.delta import DeltaRule
from replayssm.state import cursor
from replayssm.state.formats import CastFormat, Nvfp4Format
from replayssm.state.pool import LayerState, StatePool

from .machine import Machine, Row, machine_for
from .setups import RECURRENCES, bits
from .test_each_invariant import script

Patch = pytest.MonkeyPatch


# ---- one number changed in a running pool


def midway(recurrence: str) -> Machine:
    """Two sequences with committed and pending records, just before a step."""
    machine = script(recurrence)
    for _ in range(2):
        machine.acquire(choice=None)
    machine.prompt([Row(0, tokens=5), Row(1, tokens=3)], loaded=False)
    machine.run_step([Row(0, tokens=4), Row(1, tokens=2)])
    machine.run_commit([Row(0, accept=3), Row(1, accept=2)])
    machine.run_step([Row(0, tokens=4), Row(1, tokens=4)])
    machine.check()
    return machine


def finish(machine: Machine) -> None:
    """Everything that the machine would do next."""
    machine.run_commit([Row(0, accept=2), Row(1, accept=4)])
    machine.check()
    machine.materialize_all()
    machine.run_step([Row(0, tokens=3), Row(1, tokens=3)])
    machine.check()


def live_rows(machine: Machine, slot: int, pending: bool) -> list[int]:
    counters = machine.pool.cursor.get(slot)
    first = counters["length"] if pending else 0
    count = counters["pending"] if pending else counters["length"]
    return [cursor.ring_row(counters["start"], first + j, machine.pool.ring_rows) for j in range(count)]


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_the_script_itself_is_green(recurrence: str) -> None:
    finish(midway(recurrence))


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_corrupt_ring_row_is_seen(recurrence: str, pending: bool) -> None:
    """Every field of every live row matters: one element, changed in its sixth digit, on one layer."""
    fields = [f.name for f in midway(recurrence).model.layout.ring_fields]
    for name in fields:
        for row in range(2):
            machine = midway(recurrence)
            slot = machine.usable()[1]
            target = machine.pool.layers[0].tensors[f"ring.{name}"][slot, live_rows(machine, slot, pending)[row]]
            changed = target.reshape(-1).clone()
            changed[0] = changed[0] * (1 + 1e-5) + 1e-5
            target.copy_(changed.reshape(target.shape))
            with pytest.raises(AssertionError, match="off by"):
                finish(machine)


def check_and_finish(machine: Machine) -> None:
    machine.check()  # compares all counters but `start`, which only shows in what is read next
    finish(machine)


@pytest.mark.parametrize("counter", ["start", "length", "position", "pending"])
def test_a_corrupt_cursor_is_seen(counter: str) -> None:
    for change in (1, -1):
        machine = midway("gdn")
        slot = machine.usable()[0]
        value = getattr(machine.pool.cursor, counter)
        value[slot] = (value[slot] + change) % machine.pool.ring_rows
        with pytest.raises(AssertionError):
            check_and_finish(machine)


def test_a_skipped_commit_is_seen(monkeypatch: Patch) -> None:
    machine = midway("gdn")
    monkeypatch.setattr(flow, "commit", lambda pool, slots, accepted: None)
    with pytest.raises(AssertionError):
        finish(machine)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_shifted_carry_is_seen(recurrence: str) -> None:
    machine = midway(recurrence)
    carry = machine.pool.layers[0].tensors["carry.conv"][machine.usable()[0]]
    carry.copy_(carry.roll(1, 0))
    with pytest.raises(AssertionError, match="convolution"):
        finish(machine)


def test_a_write_to_another_slot_is_seen(monkeypatch: Patch) -> None:
    machine = midway("mamba2")
    original = flow.verify

    def trampling(pool: StatePool, layer: int, step: Step, inputs: dict) -> torch.Tensor:
        pool.layers[layer].tensors["checkpoint"][4, 0, 0, 0] = 1  # slot 4 is free here, and full of NaN
        return original(pool, layer, step, inputs)

    monkeypatch.setattr(flow, "verify", trampling)
    with pytest.raises(AssertionError, match="of another slot has changed"):
        finish(machine)


# ---- faults in the code, found by random interleavings


def skip_a_commit(patch: Patch) -> None:
    original = flow.commit

    def commit(pool: StatePool, slots: list[int], accepted: list[int]) -> None:
        original(pool, slots, [0 if count == 2 else count for count in accepted])

    patch.setattr(flow, "commit", commit)


def count_one_too_few(patch: Patch) -> None:
    patch.setattr(cursor, "commit", lambda n, p, a: (n + a - (a > 2).long(), p + a))


def corrupt_a_written_row(patch: Patch) -> None:
    verify = sys.modules["replayssm.flow.verify"]
    original = verify.put_rows  # type: ignore[attr-defined]

    def put_rows(target: torch.Tensor, index: tuple, values: torch.Tensor, active: torch.Tensor) -> None:
        original(
            target,
            index,
            values * (1 + 1e-6 * (torch.arange(len(values)) == 1).reshape(-1, *[1] * (values.dim() - 1))),
            active,
        )

    patch.setattr(verify, "put_rows", put_rows)


def flush_when_full(patch: Patch) -> None:
    patch.setattr(cursor, "due", lambda length, tokens, window, forced=False: forced | (length >= window))
    patch.setattr(Machine, "check_ring_fits", lambda *_: None)


def read_beyond_length(patch: Patch) -> None:
    patch.setattr(
        Step, "history_mask", property(lambda self: torch.ones(len(self.slots), self.window, dtype=torch.bool))
    )


def flush_folds_the_whole_window(patch: Patch) -> None:
    def everything(self: Step) -> torch.Tensor:
        return (self.folded > 0).unsqueeze(1).expand(-1, self.window)

    patch.setattr(Step, "fold_mask", property(everything))


def padding_becomes_slot_0(patch: Patch) -> None:
    rows = sys.modules["replayssm.state.rows"]
    original = rows.put_rows  # type: ignore[attr-defined]

    def put_rows(target: torch.Tensor, index: tuple, values: torch.Tensor, active: torch.Tensor) -> None:
        original(target, tuple(i.clamp(min=0) for i in index), values, active | (index[0] < 0))

    for module in ("replayssm.flow.verify", "replayssm.flow.conv", "replayssm.state.pool"):
        patch.setattr(sys.modules[module], "put_rows", put_rows)


def carry_one_row_off(patch: Patch) -> None:
    conv = sys.modules["replayssm.flow.conv"]
    original = conv._window  # type: ignore[attr-defined]
    patch.setattr(
        conv, "_window", lambda state, slots, positions, active: original(state, slots, positions + 1, active)
    )


def fork_without_the_ring(patch: Patch) -> None:
    def copy(self: StatePool, src: int, dst: int) -> None:
        for layer in self.layers:
            layer.tensors["checkpoint"][dst].copy_(layer.tensors["checkpoint"][src])

    patch.setattr(StatePool, "_copy_tensors", copy)


def reset_keeps_the_cursor(patch: Patch) -> None:
    original = cursor.Cursor.set

    def keep(self: cursor.Cursor, slot: int, **values: int) -> None:
        if values.get("position") == 0 and "start" in values:
            values = {"window": values["window"], "pending": 0}
        original(self, slot, **values)

    patch.setattr(cursor.Cursor, "set", keep)


def fresh_slot_reads_memory(patch: Patch) -> None:
    patch.setattr(Step, "empty", property(lambda self: torch.zeros(len(self.slots), dtype=torch.bool)))


def fold_in_bf16(patch: Patch) -> None:
    original = algebra.fold
    patch.setattr(algebra, "fold", lambda *args: original(*args).bfloat16().to(args[0].dtype))


def flush_reads_the_read_copy(patch: Patch) -> None:
    original = LayerState.state
    patch.setattr(LayerState, "state", lambda self, slots, kind: original(self, slots, self.read_kind))


def infinite_out_of_range(patch: Patch) -> None:
    patch.setattr(CastFormat, "encode", lambda self, state, noise=None: {"": state.to(self.dtype)})


def clamped_to_zero(patch: Patch) -> None:
    original = CastFormat.encode
    patch.setattr(
        CastFormat, "encode", lambda self, x, noise=None: original(self, x.where(x.abs() < self.limit, 0), noise)
    )


def clamped_in_silence(patch: Patch) -> None:
    patch.setattr(CastFormat, "saturated", lambda self, state: torch.zeros(len(state), dtype=torch.int64))


def read_copy_left_behind(patch: Patch) -> None:
    original = StatePool.store

    def store(self: StatePool, layer: int, slots: torch.Tensor, *rest: torch.Tensor) -> None:
        tensors = self.layers[layer].tensors
        old = tensors["read_copy"].clone()
        original(self, layer, slots, *rest)
        stale = bits(old)[slots] != 0
        if stale.any():
            tensors["read_copy"].copy_(torch.where(old.isnan(), tensors["read_copy"], old))

    patch.setattr(StatePool, "store", store)


def nibbles_swapped(patch: Patch) -> None:
    original = Nvfp4Format.decode
    patch.setattr(
        Nvfp4Format,
        "decode",
        lambda self, parts, dtype: original(
            self, dict(parts) | {"": parts[""] << 16 | parts[""] >> 16 & 0xFFFF}, dtype
        ),
    )


def key_rounded(patch: Patch) -> None:
    original = DeltaRule.key
    patch.setattr(
        DeltaRule, "key", lambda self, record: original(self, record).bfloat16().to(record["k_inv_norm"].dtype)
    )


def beta_rounded(patch: Patch) -> None:
    patch.setattr(DeltaRule, "rate", lambda self, record: record["beta"].bfloat16().to(record["beta"].dtype))


def exponents_not_differences(patch: Patch) -> None:
    def decay(later: torch.Tensor, earlier: torch.Tensor, reaches: torch.Tensor) -> torch.Tensor:
        product = later.float().exp().unsqueeze(2) * (-earlier).float().exp().unsqueeze(1)
        return (product * reaches[..., None, None]).double()

    patch.setattr(algebra, "decay_between", decay)


FAULTS: list[tuple[Callable[[Patch], None], str, str]] = [
    (skip_a_commit, "gdn", "exact"),
    (count_one_too_few, "mamba2", "exact"),
    (corrupt_a_written_row, "mamba2", "exact"),
    (corrupt_a_written_row, "kda", "exact"),
    (flush_when_full, "mamba2", "exact"),
    (read_beyond_length, "gdn", "exact"),
    (flush_folds_the_whole_window, "mamba2", "exact"),
    (padding_becomes_slot_0, "kda", "exact"),
    (carry_one_row_off, "gdn", "fp32"),
    (fork_without_the_ring, "gdn", "exact"),
    (reset_keeps_the_cursor, "gdn", "exact"),
    (fresh_slot_reads_memory, "mamba2", "low precision"),
    (fold_in_bf16, "mamba2", "fp32"),
    (fold_in_bf16, "gdn", "fp32"),
    (flush_reads_the_read_copy, "mamba2", "read copy"),
    (flush_reads_the_read_copy, "gdn", "read copy"),
    (read_copy_left_behind, "kda", "read copy"),
    (flush_reads_the_read_copy, "gdn", "two precisions"),
    (flush_reads_the_read_copy, "mamba2", "two precisions"),
    (nibbles_swapped, "mamba2", "two precisions"),
    (infinite_out_of_range, "gdn", "low precision"),
    (infinite_out_of_range, "mamba2", "read copy"),
    (clamped_to_zero, "kda", "low precision"),
    (clamped_to_zero, "mamba2", "read copy"),
    (clamped_in_silence, "mamba2", "low precision"),
    (clamped_in_silence, "mamba2", "read copy"),
    (key_rounded, "gdn", "fp32"),
    (beta_rounded, "kda", "fp32"),
    (exponents_not_differences, "kda", "fp32"),
]


@pytest.mark.parametrize(("fault", "recurrence", "mode"), FAULTS, ids=[f"{f.__name__}-{r}" for f, r, _ in FAULTS])
def test_a_fault_in_the_code_is_found(
    fault: Callable[[Patch], None], recurrence: str, mode: str, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    quick = settings(
        max_examples=400,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
        stateful_step_count=30,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine_for(recurrence, mode), settings=quick)
