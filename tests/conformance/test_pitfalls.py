"""Kinds of faults that users met elsewhere, each as a small scenario with the right behaviour, for every recurrence.

Padding, strides, bad input and benchmarks have their own tests; the numbers are those of the project's list of faults.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from replayssm import ReplayConfig, flow
from replayssm.recurrences import Geometry, Recurrence, get, registry
from replayssm.state.layout import StateLayout
from replayssm.state.pool import LayerState, SaturationWarning, StatePool
from replayssm.state.slots import PAD_SLOT
from replayssm.state.snapshot import restore, snapshot

from .suite import Bench, close, geometry_of

FP64 = {"checkpoint_format": "fp64"}


@pytest.fixture(params=list(registry()))
def recurrence(request: pytest.FixtureRequest) -> Recurrence:
    return get(request.param)


def test_fault_01_a_recycled_slot_starts_from_nothing(recurrence: Recurrence) -> None:
    """Preempted in mid-window, the slot is taken by another request, the first resumes elsewhere."""
    bench = Bench(recurrence, ReplayConfig(window=5, **FP64), slots=3)
    for _ in range(8):
        bench.advance([1, 1, 1], [1, 1, 1], [0, 1, 2])
    kept, old = snapshot(bench.pool, bench.slots[1]), bench.slots[1]
    bench.pool.release(old)
    bench.slots[2], freed = bench.pool.acquire(), bench.slots[2]
    assert bench.slots[2] == old
    bench.position[2] = 0
    bench.pool.release(freed)
    bench.slots[1] = restore(bench.pool, kept)
    for _ in range(8):
        bench.advance([1, 1, 1], [1, 1, 1], [0, 1, 2])
    bench.check_states()


def test_fault_02_03_a_copy_takes_ring_and_cursor_along(recurrence: Recurrence) -> None:
    bench = Bench(recurrence, ReplayConfig(window=6, **FP64))
    for _ in range(9):
        bench.advance([1, 1, 1], [1, 1, 1], [0, 1, 2])
    assert int(bench.pool.cursor.length[bench.slots[0]]) > 0, "the scenario needs a slot in mid-window"
    twin = bench.pool.fork(bench.slots[0])
    bench.pool.release(bench.slots[0])
    bench.slots[0] = bench.pool.move(twin)
    for _ in range(9):
        bench.advance([1, 1, 1], [1, 1, 1], [0, 1, 2])
    bench.check_states()


def test_fault_04_a_forced_flush_folds_only_what_is_there(recurrence: Recurrence) -> None:
    bench = Bench(recurrence, ReplayConfig(window=8, **FP64))
    for forced in (True, False, True, True, False):
        bench.advance([1, 1, 1], [1, 1, 1], [0, 1, 2], forced=forced)
        flow.flush(bench.pool, [bench.slots[2]])
    bench.check_states()


def test_fault_05_all_layers_see_one_cursor(recurrence: Recurrence) -> None:
    """The cursor moves once per step, after the last layer: two layers with the same inputs stay the same."""
    geometry = geometry_of(recurrence)
    inputs, params = recurrence.draw(geometry, (1, 20), torch.Generator().manual_seed(0))
    pool = StatePool.allocate(
        recurrence, geometry, ReplayConfig(window=3), slots=1, model_dtype=torch.float32, params=[params, params]
    )
    slot = pool.acquire()
    for t in range(20):
        before = pool.cursor.get(slot)
        with flow.step(pool, [slot]) as step:
            outputs = []
            for layer in (0, 1):
                outputs.append(flow.verify(pool, layer, step, {n: x[:, t : t + 1] for n, x in inputs.items()}))
                assert pool.cursor.get(slot) == before
        assert torch.equal(*outputs)
        flow.commit(pool, [slot], 1)
    assert torch.equal(*(flow.materialize(pool, layer, [slot]) for layer in (0, 1)))


def test_fault_06_a_prompt_of_one_token_is_a_prompt(recurrence: Recurrence) -> None:
    """The phase decides and not the shape: prompts of 1 and of verify_len tokens go to the checkpoint."""
    bench = Bench(recurrence, ReplayConfig(window=4, verify_len=3, **FP64))
    counts = [1, 3, 2]
    inputs, width = bench.batch(counts, [0, 1, 2])
    with flow.prompt(bench.pool, bench.slots, counts, width=width) as step:
        flow.prefill(bench.pool, 0, step, inputs)
    bench.position = counts
    assert bench.pool.cursor.pending.tolist()[:3] == [0, 0, 0]
    assert bench.pool.cursor.length.tolist()[:3] == [0, 0, 0]
    bench.advance([1, 3, 2], [1, 2, 0], [0, 1, 2])
    bench.check_states()


def test_fault_07_a_row_without_drafts_is_the_same_path(recurrence: Recurrence) -> None:
    bench = Bench(recurrence, ReplayConfig(window=6, verify_len=4, **FP64))
    for tokens in ([4, 1, 1], [1, 4, 0], [0, 1, 4], [1, 1, 1]):
        bench.advance(tokens, [min(1, t) for t in tokens], [0, 1, 2])
    bench.check_states()


def test_fault_08_accepting_nothing_changes_nothing(recurrence: Recurrence) -> None:
    """Also on a step that flushed, where the cursor has moved already."""
    bench = Bench(recurrence, ReplayConfig(window=4, verify_len=3, stagger=False, **FP64))
    bench.advance([3, 3, 3], [3, 3, 3], [0, 1, 2])
    for _ in range(3):  # the first of these flushes
        before = flow.materialize(bench.pool, 0, bench.slots)
        bench.advance([3, 3, 3], [0, 0, 0], [0, 1, 2])
        close(flow.materialize(bench.pool, 0, bench.slots), before)
    bench.advance([2, 3, 1], [2, 1, 1], [0, 1, 2])
    bench.check_states()


def test_fault_09_commit_is_one_shot(recurrence: Recurrence) -> None:
    bench = Bench(recurrence, ReplayConfig(window=6, verify_len=3, **FP64))
    bench.advance([3, 3, 3], [1, 2, 3], [0, 1, 2])
    with pytest.raises(ValueError, match="has 0 pending rows"):
        flow.commit(bench.pool, [bench.slots[0]], 1)
    bench.check_states()


def test_fault_10_rejecting_everything_is_plain_decoding(recurrence: Recurrence) -> None:
    """For many steps, two drafts are offered and none is kept: outputs and state of plain decoding."""
    bench = Bench(recurrence, ReplayConfig(window=5, verify_len=3, **FP64))
    for _ in range(60):
        bench.advance([3, 3, 3], [1, 1, 1], [0, 1, 2])
    bench.check_states()


def test_fault_11_accepted_counts_belong_to_slots(recurrence: Recurrence) -> None:
    """The batch is reordered between the step and its commit."""
    bench = Bench(recurrence, ReplayConfig(window=5, verify_len=3, **FP64))
    inputs, width = bench.batch([3, 3, 3], [0, 1, 2])
    with flow.step(bench.pool, bench.slots, 3, width=width) as step:
        flow.verify(bench.pool, 0, step, inputs)
    flow.commit(bench.pool, [bench.slots[2], PAD_SLOT, bench.slots[0], bench.slots[1]], [3, 0, 1, 2])
    bench.position = [1, 2, 3]
    bench.check_states()


def test_fault_12_a_window_too_small_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="verify_len 5 is larger than window 4"):
        ReplayConfig(window=4, verify_len=5)


def test_fault_13_14_padding_reads_and_writes_nothing(recurrence: Recurrence) -> None:
    """Slot 0 is a live slot, the pool's memory is NaN, and every batch has padding in the middle."""
    bench = Bench(recurrence, ReplayConfig(window=3, **FP64))
    untouched = {n: t[4].clone() for n, t in bench.pool.layers[0].tensors.items()}
    for _ in range(9):
        bench.advance([1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0, -1, 1, -1, 2])
    bench.check_states()
    for name, tensor in bench.pool.layers[0].tensors.items():
        assert torch.equal(tensor[4].isnan(), untouched[name].isnan())
    y = torch.zeros(0)
    inputs, width = bench.batch([1, 1], [-1, -1])
    with flow.step(bench.pool, [PAD_SLOT, PAD_SLOT], width=width) as step:
        y = flow.verify(bench.pool, 0, step, inputs)
    assert torch.equal(y, torch.zeros_like(y))


def test_fault_15_slots_inside_an_engines_pages(recurrence: Recurrence) -> None:
    """The same tokens through own memory and through strided pages with foreign bytes between the slots."""
    geometry = geometry_of(recurrence)
    inputs, params = recurrence.draw(geometry, (2, 12), torch.Generator().manual_seed(0))
    layout = StateLayout(recurrence, geometry, ReplayConfig(window=4), torch.float32)
    pages = torch.full((3, layout.page_bytes + 640), 0xFF, dtype=torch.uint8)
    own = StatePool([LayerState.allocate(layout, 3, "cpu", params)])
    paged = StatePool([LayerState.in_pages(layout, pages[:, :-128], params)])
    results = []
    for pool in (own, paged):
        slots = [pool.acquire(), pool.acquire()]
        for t in range(12):
            with flow.step(pool, slots) as step:
                y = flow.verify(pool, 0, step, {n: x[:, t : t + 1] for n, x in inputs.items()})
            flow.commit(pool, slots, 1)
        results.append((y, flow.materialize(pool, 0, slots)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert bool((pages[:, layout.page_bytes :] == 0xFF).all()), "bytes of others were written"


def test_fault_16_17_slots_lie_far_apart_under_one_index(recurrence: Recurrence) -> None:
    """Slot x stride passes 2^31 elements in every tensor, ring and checkpoint alike. The memory is never touched."""
    geometry = geometry_of(recurrence)
    layout = StateLayout(recurrence, geometry, ReplayConfig(window=3), torch.float32)
    inputs, params = recurrence.draw(geometry, (1, 8), torch.Generator().manual_seed(0))
    try:
        pages = torch.empty(2, 2**33 + 128, dtype=torch.uint8)
    except RuntimeError as error:
        pytest.skip(f"this machine does not lend 16 GiB of addresses: {error}")
    far = StatePool([LayerState.in_pages(layout, pages, params)])
    near = StatePool([LayerState.allocate(layout, 2, "cpu", params)])
    assert far.layers[0].tensors["checkpoint"].stride(0) > 2**31
    results = []
    for pool in (far, near):
        slot = pool.acquire(1)
        for t in range(8):
            with flow.step(pool, torch.tensor([slot], dtype=torch.int32)) as step:
                y = flow.verify(pool, 0, step, {n: x[:, t : t + 1] for n, x in inputs.items()})
            flow.commit(pool, torch.tensor([slot], dtype=torch.int32), 1)
        results.append((y, flow.materialize(pool, 0, [slot])))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_fault_18_19_only_exact_boundaries_are_published(recurrence: Recurrence) -> None:
    """Rejected drafts are in no boundary, and a boundary inside the accepted window takes exactly that many."""
    bench = Bench(recurrence, ReplayConfig(window=8, verify_len=4, stagger=False, **FP64))
    bench.advance([4, 4, 4], [4, 3, 1], [0, 1, 2])
    bench.advance([4, 4, 4], [3, 1, 2], [0, 1, 2])
    for row, slot in enumerate(bench.slots):
        for records in range(int(bench.pool.cursor.length[slot]) + 1):
            close(flow.materialize(bench.pool, 0, [slot], records)[0], bench.reference(row, records)[1])
    taken = flow.materialize_into(bench.pool, [bench.slots[0]], 5)
    close(flow.materialize(bench.pool, 0, taken)[0], bench.reference(0, 5)[1])


def test_fault_20_rows_of_a_prompt_batch_start_at_their_own_token(recurrence: Recurrence) -> None:
    """Prompts of different lengths in one batch, in two chunks that end at different places."""
    bench = Bench(recurrence, ReplayConfig(window=4, **FP64))
    for counts in ([17, 3, 40], [20, 5, 1]):
        inputs, width = bench.batch(counts, [0, 1, 2])
        with flow.prompt(bench.pool, bench.slots, counts, width=width) as step:
            flow.prefill(bench.pool, 0, step, inputs)
        bench.position = [p + c for p, c in zip(bench.position, counts, strict=True)]
        bench.check_states()


def test_fault_21_a_snapshot_in_mid_window_brings_its_ring(recurrence: Recurrence) -> None:
    """Into a pool with another window and ring origin."""
    bench = Bench(recurrence, ReplayConfig(window=6, verify_len=2, **FP64))
    for _ in range(9):
        bench.advance([2, 2, 2], [1, 2, 1], [0, 1, 2])
    data = [snapshot(bench.pool, slot) for slot in bench.slots]
    other = Bench(recurrence, ReplayConfig(window=9, verify_len=3, **FP64))
    for slot in other.slots:
        other.pool.release(slot)
    other.slots, other.position = [restore(other.pool, d) for d in data], list(bench.position)
    for _ in range(6):
        other.advance([3, 3, 3], [3, 1, 2], [0, 1, 2])
    other.check_states()


def test_fault_22_rounded_records_do_not_pile_up(recurrence: Recurrence) -> None:
    """A bf16 model over 1,500 tokens: the state error stays where it was after 100, far below a bf16 rounding."""
    geometry = geometry_of(recurrence)
    inputs, params = recurrence.draw(geometry, (1500,), torch.Generator().manual_seed(0))
    layout = StateLayout(recurrence, geometry, ReplayConfig(window=16, verify_len=16), torch.bfloat16)
    inputs = {f.name: inputs[f.name].to(layout.dtype_of(f)) for f in recurrence.inputs}
    pool = StatePool([LayerState.allocate(layout, 1, "cpu", params)])
    slot, exact = pool.acquire(), torch.zeros(geometry.state_shape, dtype=torch.float64)
    errors = []
    for begin in range(0, 1500, 15):
        chunk = {n: x[begin : begin + 15] for n, x in inputs.items()}
        with flow.step(pool, [slot], 15) as step:
            flow.verify(pool, 0, step, {n: x[None] for n, x in chunk.items()})
        flow.commit(pool, [slot], 15)
        exact = recurrence.recurrent(chunk, params, exact, geometry)[1]
        errors.append(float((flow.materialize(pool, 0, [slot])[0].double() - exact).norm() / exact.norm()))
    assert max(errors) < 1e-6, "u and the checkpoint are kept in fp32: a rounding to bf16 would show as 1e-3"


def test_fault_23_gates_and_readout_stay_in_fp32(recurrence: Recurrence) -> None:
    """A bf16 model: everything that is not a stored activation is computed and returned in fp32."""
    geometry = geometry_of(recurrence)
    layout = StateLayout(recurrence, geometry, ReplayConfig(window=4), torch.bfloat16)
    for field in layout.ring_fields:
        assert layout.dtype_of(field) == (torch.bfloat16 if field.dtype == "model" else torch.float32)
    inputs, params = recurrence.draw(geometry, (1, 40), torch.Generator().manual_seed(0))
    kinds = {f.name: layout.dtype_of(f) for f in recurrence.inputs}
    inputs = {n: x.to(kinds[n]) for n, x in inputs.items()}
    pool = StatePool([LayerState.allocate(layout, 1, "cpu", params)])
    slot = pool.acquire()
    outputs = []
    for t in range(40):
        with flow.step(pool, [slot]) as step:
            outputs.append(flow.verify(pool, 0, step, {n: x[:, t : t + 1] for n, x in inputs.items()})[0, 0])
        flow.commit(pool, [slot], 1)
    start = torch.zeros(geometry.state_shape, dtype=torch.float64)
    expected = recurrence.recurrent({n: x[0] for n, x in inputs.items()}, params, start, geometry)[0]
    assert outputs[0].dtype == torch.float32
    error = float((torch.stack(outputs).double() - expected).norm() / expected.norm())
    assert error < 1e-6, f"{error:.1e}: a bf16 step anywhere would show as 1e-3"


def test_fault_24_every_verb_computes_one_state(recurrence: Recurrence) -> None:
    """The same tokens by prefill, by verify with drafts and token by token: states agree to rounding, in fp64."""
    by = {
        "prefill": ReplayConfig(window=4, **FP64),
        "decode": ReplayConfig(window=4, **FP64),
        "drafts": ReplayConfig(window=7, verify_len=5, **FP64),
        "read copy": ReplayConfig(window=6, verify_len=2, read_format="bf16", **FP64),
    }
    for name, config in by.items():
        bench = Bench(recurrence, config, rows=1)
        if name == "prefill":
            inputs, width = bench.batch([40], [0])
            with flow.prompt(bench.pool, bench.slots, 40, width=width) as step:
                flow.prefill(bench.pool, 0, step, inputs)
            bench.position = [40]
        while bench.position[0] < 40:
            count = min(config.verify_len, 40 - bench.position[0])
            inputs, width = bench.batch([count], [0])
            with flow.step(bench.pool, bench.slots, count, width=width) as step:
                flow.verify(bench.pool, 0, step, inputs)
            flow.commit(bench.pool, bench.slots, count)
            bench.position[0] += count
        bench.check_states()


def test_fault_25_a_checkpoint_out_of_range_saturates_and_says_so() -> None:
    recurrence = next(r for r in registry().values() if not r.delta_rule)
    geometry = Geometry(2, 2, 4, 3)
    inputs, params = recurrence.draw(geometry, (1, 6), torch.Generator().manual_seed(0))
    inputs = {n: x * 3e3 if x.dim() == 4 else x.abs() + 1 for n, x in inputs.items()}
    config = ReplayConfig(window=1, checkpoint_format="fp16", stagger=False)
    pool = StatePool.allocate(recurrence, geometry, config, slots=2, model_dtype=torch.float32, params=[params])
    slot, quiet = pool.acquire(), pool.acquire()
    for t in range(6):
        with flow.step(pool, [slot]) as step:
            y = flow.verify(pool, 0, step, {n: x[:, t : t + 1] for n, x in inputs.items()})
        flow.commit(pool, [slot], 1)
    assert bool(y.isfinite().all())
    assert bool(pool.layers[0].tensors["checkpoint"][slot].isfinite().all())
    with pytest.warns(SaturationWarning, match="elements were clamped to the range of fp16"):
        pool.release(slot)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.release(quiet)


def test_fault_26_strong_decays_do_not_overflow(recurrence: Recurrence) -> None:
    """Decays of e^-60 a token: e^+G of a window would be far beyond fp32."""
    if not recurrence.delta_rule:
        pytest.skip("the decay is a product of two inputs there; the property tests draw strong ones")
    geometry = geometry_of(recurrence)
    inputs, params = recurrence.draw(geometry, (1, 64), torch.Generator().manual_seed(0))
    inputs["log_decay"] = torch.where(torch.rand(inputs["log_decay"].shape) < 0.3, -60.0, -0.01)
    pool = StatePool.allocate(
        recurrence, geometry, ReplayConfig(window=32, verify_len=8), slots=1, model_dtype=torch.float32, params=[params]
    )
    slot = pool.acquire()
    outputs = []
    for t in range(0, 64, 8):
        with flow.step(pool, [slot], 8) as step:
            outputs.append(flow.verify(pool, 0, step, {n: x[:, t : t + 8] for n, x in inputs.items()})[0])
        flow.commit(pool, [slot], 8)
    start = torch.zeros(geometry.state_shape, dtype=torch.float64)
    expected = recurrence.recurrent({n: x[0] for n, x in inputs.items()}, params, start, geometry)[0]
    error = float((torch.cat(outputs).double() - expected).norm() / expected.norm())
    assert error < 1e-6


def test_fault_30_one_object_sizes_everything(recurrence: Recurrence) -> None:
    """The pool holds exactly the bytes that the layout says, the ring included and no snapshot per draft."""
    geometry = geometry_of(recurrence)
    for config in (ReplayConfig(window=5), ReplayConfig(window=9, verify_len=4, read_format="fp16")):
        layout = StateLayout(recurrence, geometry, config, torch.bfloat16)
        state = LayerState.allocate(layout, 3, "cpu", recurrence.draw(geometry, (1,), torch.Generator())[1])
        held = sum(t.untyped_storage().nbytes() for t in state.tensors.values())
        assert held == 3 * layout.slot_bytes
        assert layout.ring_rows == config.window + config.verify_len
        assert layout.page_bytes >= layout.slot_bytes
