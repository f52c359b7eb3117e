"""What every recurrence must do, whatever it is: the flow's outputs and states against the recurrence's own reference.

Everything runs in fp64, where agreement is to rounding and a wrong row or decay is far outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from replayssm import ReplayConfig, flow
from replayssm.recurrences import Geometry, Recurrence
from replayssm.state.layout import StateLayout
from replayssm.state.pool import StatePool
from replayssm.state.snapshot import restore, snapshot

# fp64 rounding is 1e-16; a hundred tokens of sums over a few dozen terms stay below this, any real fault far above it
TOLERANCE = 1e-11
TOKENS = 70


class Bench:
    """A pool of one layer beside the reference's outputs and states for the same tokens."""

    def __init__(self, recurrence: Recurrence, config: ReplayConfig, rows: int = 3, slots: int = 5) -> None:
        self.recurrence, self.geometry = recurrence, geometry_of(recurrence)
        generator = torch.Generator().manual_seed(1)
        drawn, params = recurrence.draw(self.geometry, (rows, TOKENS), generator)
        self.inputs = {name: x.double() for name, x in drawn.items()}
        self.params = {name: x.double() for name, x in params.items()}
        self.pool = StatePool.allocate(
            recurrence, self.geometry, config, slots=slots, model_dtype=torch.float64, params=[self.params]
        )
        for tensor in self.pool.layers[0].tensors.values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1 if tensor.dtype == torch.int8 else 255)
        self.slots = [self.pool.acquire() for _ in range(rows)]
        self.position = [0] * rows

    def reference(self, row: int, tokens: int) -> tuple[Tensor, Tensor]:
        """(y of all tokens so far, state) of the reference."""
        start = torch.zeros(self.geometry.state_shape, dtype=torch.float64)
        if not tokens:
            return torch.zeros(0), start
        taken = {name: x[row, :tokens] for name, x in self.inputs.items()}
        return self.recurrence.recurrent(taken, self.params, start, self.geometry)

    def batch(self, tokens: Sequence[int], order: Sequence[int]) -> tuple[dict[str, Tensor], int]:
        """Inputs of the next tokens of the rows in `order` (-1 is a padded row), NaN beyond each row's tokens."""
        width = max([*tokens, 1])
        made = {}
        for name, x in self.inputs.items():
            made[name] = torch.full((len(order), width, *x.shape[2:]), torch.nan, dtype=torch.float64)
            for i, (row, count) in enumerate(zip(order, tokens, strict=True)):
                if row >= 0:
                    made[name][i, :count] = x[row, self.position[row] : self.position[row] + count]
        return made, width

    def advance(self, tokens: Sequence[int], accepted: Sequence[int], order: Sequence[int], **options: object) -> None:
        """One step and its commit; every output is compared."""
        inputs, width = self.batch(tokens, order)
        slots = [self.slots[row] if row >= 0 else -1 for row in order]
        with flow.step(self.pool, slots, list(tokens), width=width, **options) as step:  # type: ignore[arg-type]
            y = flow.verify(self.pool, 0, step, inputs)
        for i, (row, count) in enumerate(zip(order, tokens, strict=True)):
            live = count if row >= 0 else 0
            assert torch.equal(y[i, live:], torch.zeros_like(y[i, live:])), "outputs beyond the tokens must be zero"
            if live:
                begin = self.position[row]
                close(y[i, :live], self.reference(row, begin + live)[0][begin:])
        flow.commit(self.pool, slots, list(accepted))
        for row, count in zip(order, accepted, strict=True):
            if row >= 0:
                self.position[row] += count

    def check_states(self) -> None:
        """The logical state of every row is the reference's."""
        states = flow.materialize(self.pool, 0, self.slots)
        for row, position in enumerate(self.position):
            close(states[row], self.reference(row, position)[1])


def close(got: Tensor, expected: Tensor) -> None:
    """Relative Frobenius error within TOLERANCE; NaN never passes."""
    scale = max(float(expected.norm()), 1e-30)
    error = float((got - expected).norm()) / scale
    assert error <= TOLERANCE, f"relative error {error:.2e}"


def geometry_of(recurrence: Recurrence) -> Geometry:
    """A small layer; key heads are shared where the recurrence allows it."""
    return Geometry(4, 4 if recurrence.decay == "channel" else 2, 16, 5)


def decodes(recurrence: Recurrence) -> None:
    """Plain decoding, rows in step, through many flushes."""
    bench = Bench(recurrence, ReplayConfig(window=5, checkpoint_format="fp64"))
    for _ in range(23):
        bench.advance([1, 1, 1], [1, 1, 1], [0, 1, 2])
    bench.check_states()


def verifies_ragged_batches(recurrence: Recurrence) -> None:
    """Different numbers of new and accepted tokens, padding anywhere, another order of rows every step."""
    bench = Bench(recurrence, ReplayConfig(window=7, verify_len=4, checkpoint_format="fp64"))
    choose = torch.Generator().manual_seed(2)
    for _ in range(25):
        order = torch.randperm(4, generator=choose).tolist()
        order = [row if row < 3 else -1 for row in order]
        tokens = torch.randint(0, 5, (4,), generator=choose).tolist()
        tokens = [min(t, TOKENS - bench.position[r]) if r >= 0 else t for t, r in zip(tokens, order, strict=True)]
        accepted = [
            int(torch.randint(0, t + 1, (), generator=choose)) if r >= 0 else 0
            for t, r in zip(tokens, order, strict=True)
        ]
        bench.advance(tokens, accepted, order)
        bench.check_states()


def verifies_trees(recurrence: Recurrence) -> None:
    """Two right tokens of each row with two others between and behind them, and the path of the right ones accepted."""
    bench = Bench(recurrence, ReplayConfig(window=7, verify_len=4, checkpoint_format="fp64"))
    for _ in range(15):
        right, _ = bench.batch([2, 2, 2], [0, 1, 2])
        wrong = {name: x.roll(1, 0) for name, x in right.items()}
        inputs = {name: torch.stack([x, wrong[name]], 2).flatten(1, 2) for name, x in right.items()}
        with flow.step(bench.pool, bench.slots, 4, parents=[[-1, 0, 0, 1]] * 3) as step:
            y = flow.verify(bench.pool, 0, step, inputs)
        for row, begin in enumerate(bench.position):
            close(y[row, [0, 2]], bench.reference(row, begin + 2)[0][begin:])
        flow.commit_path(bench.pool, bench.slots, [[0, 2]] * 3)
        bench.position = [position + 2 for position in bench.position]
    bench.check_states()


def prefills_in_chunks(recurrence: Recurrence) -> None:
    """Prompts of different lengths in chunks, with decoding between them."""
    bench = Bench(recurrence, ReplayConfig(window=6, verify_len=2, checkpoint_format="fp64"))
    for counts in ([20, 1, 7], [0, 30, 3], [3, 3, 3]):
        inputs, width = bench.batch(counts, [0, 1, 2])
        with flow.prompt(bench.pool, bench.slots, counts, width=width) as step:
            y = flow.prefill(bench.pool, 0, step, inputs)
        for row, count in enumerate(counts):
            if count:
                begin = bench.position[row]
                close(y[row, :count], bench.reference(row, begin + count)[0][begin:])
            bench.position[row] += count
        bench.advance([2, 1, 2], [2, 1, 1], [0, 1, 2])
        bench.check_states()


def solves_again_from_a_read_copy(recurrence: Recurrence) -> None:
    """With a rounded read copy the state stays exact: nothing that outlives a flush was computed from the copy."""
    for read_format in ("fp16", "fp8", "int8", "nvfp4"):
        config = ReplayConfig(window=5, verify_len=3, checkpoint_format="fp64", read_format=read_format)
        bench = Bench(recurrence, config)
        for _ in range(9):
            inputs, width = bench.batch([3, 2, 3], [0, 1, 2])
            with flow.step(bench.pool, bench.slots, [3, 2, 3], width=width) as step:
                flow.verify(bench.pool, 0, step, inputs)
            flow.commit(bench.pool, bench.slots, [3, 1, 0])
            bench.position = [p + a for p, a in zip(bench.position, [3, 1, 0], strict=True)]
        flow.flush(bench.pool, bench.slots)
        bench.check_states()


def keeps_states_through_a_life(recurrence: Recurrence) -> None:
    """Forced flush, fork, move, snapshot, materialize at every boundary."""
    bench = Bench(recurrence, ReplayConfig(window=6, checkpoint_format="fp64"))
    for _ in range(10):
        bench.advance([1, 1, 1], [1, 1, 1], [0, 1, 2])
    length = int(bench.pool.cursor.length[bench.slots[0]])
    for records in range(length + 1):
        state = flow.materialize(bench.pool, 0, [bench.slots[0]], records)[0]
        close(state, bench.reference(0, bench.position[0] - length + records)[1])
    bench.advance([1, 1, 1], [1, 1, 1], [2, 0, 1], forced=[True, False, True])
    twin = bench.pool.fork(bench.slots[0])
    close(flow.materialize(bench.pool, 0, [twin])[0], bench.reference(0, bench.position[0])[1])
    bench.slots[1] = bench.pool.move(bench.slots[1])
    data = snapshot(bench.pool, bench.slots[2])
    bench.pool.release(bench.slots[2])
    bench.slots[2] = restore(bench.pool, data)
    for _ in range(8):
        bench.advance([1, 1, 1], [1, 1, 1], [0, 1, 2])
    bench.check_states()


def keeps_fields_as_declared(recurrence: Recurrence) -> None:
    """A record has the declared fields and shapes, and the ring's tensors those of the layout."""
    geometry = geometry_of(recurrence)
    inputs, params = recurrence.draw(geometry, (2, 3), torch.Generator().manual_seed(0))
    assert set(inputs) == {f.name for f in recurrence.inputs}
    assert set(params) == {f.name for f in recurrence.params}
    for field in recurrence.inputs:
        assert inputs[field.name].shape == (2, 3, *field.shape(geometry))
    record = recurrence.record(inputs, params)
    for field in recurrence.records:
        assert record[field.name].shape == (2, 3, *field.shape(geometry)), field.name
    log_decay = recurrence.decay_channels(record, params)
    assert log_decay.shape == (2, 3, geometry.heads, recurrence.channels(geometry))
    assert bool((log_decay <= 0).all()), "log_decay is at most 0"
    for config in (ReplayConfig(window=3), ReplayConfig(window=3, read_format="fp16")):
        layout = StateLayout(recurrence, geometry, config, torch.bfloat16)
        names = {spec.name for spec in layout.tensors}
        assert {f"ring.{f.name}" for f in layout.ring_fields} <= names
        assert ("ring.u" in names) == recurrence.delta_rule
        assert layout.ring_rows == 4


def defines_in_the_dtype_of_the_state(recurrence: Recurrence) -> None:
    """Inputs of a bf16 model are raised before anything is computed from them."""
    geometry = geometry_of(recurrence)
    inputs, params = recurrence.draw(geometry, (9,), torch.Generator().manual_seed(4))
    kinds = {field.name: torch.bfloat16 if field.dtype == "model" else torch.float32 for field in recurrence.inputs}
    stored = {name: x.to(kinds[name]) for name, x in inputs.items()}
    raised = {name: x.double() for name, x in stored.items()}
    start = torch.zeros(geometry.state_shape, dtype=torch.float64)
    for got, expected in zip(
        recurrence.recurrent(stored, params, start, geometry),
        recurrence.recurrent(raised, {name: x.double() for name, x in params.items()}, start, geometry),
        strict=True,
    ):
        assert got.dtype == torch.float64
        assert torch.equal(got, expected), "the definition computes in the dtype of the state"


CHECKS: tuple[Callable[[Recurrence], None], ...] = (
    keeps_fields_as_declared,
    defines_in_the_dtype_of_the_state,
    decodes,
    verifies_ragged_batches,
    verifies_trees,
    prefills_in_chunks,
    solves_again_from_a_read_copy,
    keeps_states_through_a_life,
)
