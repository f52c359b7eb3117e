"""The invariants one by one, where a direct test says more than a random one: mostly equality of bits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

from replayssm import ReplayConfig, flow
from replayssm.recurrences import Geometry, get
from replayssm.recurrences.base import tolerance
from replayssm.state.pool import StatePool
from replayssm.state.slots import PAD_SLOT

from .machine import MODES, Machine, Row, machine_for
from .setups import DTYPES, RECURRENCES, Model, Setup, bits, exact, geometry_for, grid

FORMATS = [("fp64", None), ("fp32", None), ("fp32", "fp16"), ("fp16", None), ("bf16", None), *MODES["two precisions"]]


def script(
    recurrence: str, conv: bool = True, checkpoint: str = "fp64", read_copy: str | None = None, **config: object
) -> Machine:
    """The state machine, to be driven by hand: every verb still checks itself against the oracle."""
    options = {"window": 8, "verify_len": 4, "stagger": False} | config
    machine = Machine()
    machine.begin(
        Setup(
            recurrence,
            ReplayConfig(checkpoint_format=checkpoint, read_format=read_copy, **options),  # type: ignore[arg-type]
            geometry_for(recurrence, conv=conv, key_dim=16 if read_copy == "nvfp4" else 4),
            seed=7,
        )
    )
    return machine


def slot_bits(pool: StatePool, slot: int, kind: str) -> list[Tensor]:
    """Bits of the tensors of a kind ("checkpoint", "read_copy", "ring", "carry") of one slot, every layer."""
    return [
        bits(tensor)[slot].clone()
        for layer in pool.layers
        for name, tensor in layer.tensors.items()
        if name.split(".")[0] == kind
    ]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run(
    pool: StatePool,
    model: Model,
    slots: Sequence[int],
    numbers: list[list[int]],
    width: int | None = None,
    **options: object,
) -> list[Tensor]:
    """One step over all layers; the outputs of each."""
    tokens = grid(numbers, width)
    with flow.step(pool, slots, [len(n) for n in numbers], width=width, **options) as step:  # type: ignore[arg-type]
        return [flow.verify(pool, layer, step, model.inputs(layer, tokens)) for layer in range(len(pool.layers))]


# ---- 1


@pytest.mark.parametrize("checkpoint", ["fp64", "fp32"])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_1_prompts_longer_than_a_chunk(recurrence: str, checkpoint: str) -> None:
    """Rows that end inside, at and behind the borders of the scan's chunks of 64, then the next chunk of the prompt."""
    machine = script(recurrence, checkpoint=checkpoint)
    for _ in range(4):
        machine.acquire(choice=None)
    for tokens in ((150, 64, 65, 3), (1, 128, 63, 0)):
        machine.prompt([Row(pick, tokens=count) for pick, count in enumerate(tokens)], loaded=False)
        machine.check()
        machine.run_step([Row(pick, tokens=3) for pick in range(4)])
        machine.run_commit([Row(pick, accept=2) for pick in range(4)])
        machine.check()


# ---- 1 and 4, on the path that a device takes


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_any_interleaving_without_looking_at_values(recurrence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU and inside a graph the host picks no rows: the same machine over that path."""
    hide_values(monkeypatch)
    profile = settings()
    few = max(1, profile.max_examples // 20)
    run_state_machine_as_test(
        machine_for(recurrence, "exact"), settings=settings(profile, max_examples=few, stateful_step_count=30)
    )


def hide_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: no value of a tensor decides what the host does next."""
    for module in ("state.rows", "flow.step", "flow.commit", "flow.flush"):
        monkeypatch.setattr(sys.modules[f"replayssm.{module}"], "host_visible", lambda x: False)


# ---- 3


@pytest.mark.parametrize(("checkpoint", "read_copy"), FORMATS)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_3_only_a_flush_writes_the_checkpoint(recurrence: str, checkpoint: str, read_copy: str | None) -> None:
    machine = script(recurrence, checkpoint=checkpoint, read_copy=read_copy)
    pool = machine.pool
    for _ in range(2):
        machine.acquire(choice=None)
    machine.prompt([Row(0, tokens=5), Row(1, tokens=3)], loaded=False)
    for step in range(12):
        due = int(pool.cursor.length[4]) + 1 > 8
        before = slot_bits(pool, 4, "checkpoint") + slot_bits(pool, 4, "read_copy")
        machine.run_step([Row(1, tokens=1), Row(0, tokens=step % 5)])
        after = slot_bits(pool, 4, "checkpoint") + slot_bits(pool, 4, "read_copy")
        assert same(before, after) is not due
        machine.run_commit([Row(0, accept=16), Row(1, accept=1)])
        machine.check()


@pytest.mark.parametrize(("checkpoint", "read_copy"), FORMATS)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_3_a_flush_keeps_the_logical_state(recurrence: str, checkpoint: str, read_copy: str | None) -> None:
    """Bit for bit; a low-precision checkpoint differs by exactly its one rounding."""
    machine = script(recurrence, checkpoint=checkpoint, read_copy=read_copy)
    pool = machine.pool
    machine.acquire(choice=None)
    machine.acquire(choice=None)
    machine.prompt([Row(0, tokens=5), Row(1, tokens=3)], loaded=False)
    for _ in range(2):
        machine.run_step([Row(0, tokens=4), Row(1, tokens=3)])
        machine.run_commit([Row(0, accept=3), Row(1, accept=2)])
    slots = machine.usable()
    before = [flow.materialize(pool, layer, slots) for layer in machine.layers]
    machine.flush([Row(0), Row(1)])
    after = [flow.materialize(pool, layer, slots) for layer in machine.layers]
    form = pool.layers[0].layout.checkpoint_format
    rounded = [form.decode(form.encode(x), x.dtype) for x in before]
    for want, got in zip(rounded, after, strict=True):
        assert torch.equal(want, got)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outputs_go_where_they_are_wanted(dtype: torch.dtype) -> None:
    """Into a slice of a caller's buffer, in its dtype; padding is zero there too and the rest is left alone."""
    model = Model(Setup("gdn", ReplayConfig(window=4, verify_len=3), geometry_for("gdn"), seed=1))
    pool, other = model.pool(), model.pool()
    slots = [pool.acquire(), PAD_SLOT]
    other.acquire(slots[0])
    tokens = grid([[0, 1], []], 3)
    (want, *_) = run(other, model, slots, [[0, 1], []], width=3)
    buffer = torch.full((2, 5, 2, 2), 7.0, dtype=dtype)
    with flow.step(pool, slots, [2, 0], width=3) as step:
        got = flow.verify(pool, 0, step, model.inputs(0, tokens), out=buffer[:, 1:4])
        assert got.data_ptr() == buffer[:, 1:4].data_ptr()
        flow.verify(pool, 1, step, model.inputs(1, tokens))
    assert torch.equal(buffer[:, 1:4], want.to(dtype))
    assert bool((buffer[:, [0, 4]] == 7).all())
    refused = (buffer[:, :3].transpose(2, 3), "contiguous within a token"), (buffer[:, :2], "out must be floating")
    for wrong, message in refused:
        with pytest.raises(ValueError, match=message):
            flow.verify(pool, 0, step, model.inputs(0, tokens), out=wrong)


# ---- 6


@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_6_commit_then_verify_equals_a_fresh_slot(recurrence: str, accepted: int) -> None:
    """Whatever was rejected leaves no trace."""
    model = Model(
        Setup(
            recurrence,
            ReplayConfig(window=8, verify_len=4, checkpoint_format="fp64", stagger=False),
            geometry_for(recurrence),
            seed=3,
        )
    )
    used, fresh = model.pool(), model.pool()
    slot, other = used.acquire(), fresh.acquire()
    path: list[int] = []
    for number in range(0, 60, 4):
        drafts = [number, number + 1, number + 2, number + 3]
        run(used, model, [slot], [drafts])
        flow.commit(used, [slot], accepted)
        path += drafts[:accepted]
    for number in path:
        run(fresh, model, [other], [[number]])
        flow.commit(fresh, [other], 1)
    got, want = (run(pool, model, [at], [[100, 101, 102]]) for pool, at in ((used, slot), (fresh, other)))
    for a, b in zip(got, want, strict=True):
        # both are within the recurrence's tolerance of the exact outputs, which are of order 1 to 10 here
        assert (a - b).abs().max() <= 10 * tolerance(torch.float64) * max(1, float(b.abs().max()))


# ---- 7


@pytest.mark.parametrize("place", ["first", "middle", "last", "everywhere", "only"])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_7_padding_touches_nothing(recurrence: str, place: str) -> None:
    """Outputs zero, and not one bit of any slot: slot 0 and the pool's last slot are live and stay as they were."""
    machine = script(recurrence, checkpoint="fp32", read_copy="fp16")
    for slot in (0, 4, 2):
        machine.acquire(choice=machine.free().index(slot))
    rows = {
        "first": [Row(9), Row(1), Row(2)],
        "middle": [Row(1), Row(9), Row(2)],
        "last": [Row(1), Row(2), Row(9)],
        "everywhere": [Row(9), Row(1), Row(9), Row(9), Row(2), Row(9)],
        "only": [Row(9), Row(9)],
    }[place]
    rows = [Row(row.pick, tokens=3, forced=True) for row in rows]
    for number in range(3):
        machine.prompt([Row(0, tokens=4 + number)], loaded=False)
        machine.run_step(rows)  # the machine compares the bits of every slot that is not in the batch
        machine.run_commit(rows[::-1])
        machine.flush(rows)
        machine.check()


# ---- 8


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_8_row_order_and_padding_change_no_bit(recurrence: str) -> None:
    """Same batch shape, rows permuted, padding elsewhere: outputs, states and memory are equal bit for bit.

    Matrices are small enough for torch to multiply them itself. For larger ones it calls MKL, whose result for one
    matrix depends on its place in memory and so in the batch, by an ulp, unless MKL_CBWR asks for reproducible results.
    """
    config = ReplayConfig(window=6, verify_len=3, stagger=False)
    geometry = Geometry(4, 4 if get(recurrence).decay == "channel" else 2, 4, 3)
    model = Model(Setup(recurrence, config, geometry, model_dtype="bf16", seed=5))
    orders = ([0, 1, 2, PAD_SLOT], [2, PAD_SLOT, 0, 1], [PAD_SLOT, 1, 2, 0])
    pools = [model.pool() for _ in orders]
    for pool in pools:
        for slot in range(3):
            pool.acquire(slot)
    for step in range(12):
        counts = {PAD_SLOT: 0} | {slot: (step + slot) % 4 for slot in range(3)}
        kept = {slot: n if step % 3 else n // 2 for slot, n in counts.items()}
        outputs = []
        for pool, order in zip(pools, orders, strict=True):
            numbers = [[17 * step + 5 * slot + i for i in range(counts[slot])] for slot in order]
            forced = [slot == step % 5 for slot in order]
            ys = run(pool, model, order, numbers, width=3, forced=forced)
            outputs.append({slot: [y[order.index(slot)] for y in ys] for slot in range(3)})
            flow.commit(pool, order[::-1], [kept[slot] for slot in order[::-1]])
        for other in outputs[1:]:
            for slot in range(3):
                assert same(outputs[0][slot], other[slot])
        for pool in pools[1:]:
            assert all(
                torch.equal(a, b) for (_, a), (_, b) in zip(pools[0].cursor.items(), pool.cursor.items(), strict=True)
            )
            for slot in range(3):
                for kind in ("checkpoint", "ring"):
                    assert same(slot_bits(pools[0], slot, kind), slot_bits(pool, slot, kind))


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_8_the_flush_phase_changes_nothing(recurrence: str) -> None:
    """The same tokens with every phase of the first flush, and with no flush at all: outputs to tolerance."""
    model = Model(
        Setup(recurrence, ReplayConfig(window=16, checkpoint_format="fp64"), geometry_for(recurrence), slots=17, seed=9)
    )
    pool = model.pool()
    slots = [pool.acquire() for _ in range(17)]
    assert len(set(pool.cursor.window[slots].tolist())) == 16
    for number in range(40):
        for y in run(pool, model, slots, [[number]] * 17):
            spread = (y - y[:1]).abs().max()
            assert spread <= 10 * tolerance(torch.float64) * max(1, float(y.abs().max()))
        flow.commit(pool, slots, 1)


# ---- 9


def device_pool(model: Model, device: str) -> StatePool:
    """The model's pool on a device, slots 0..4 live."""
    layout, setup = model.layout, model.setup
    pool = StatePool.allocate(
        layout.recurrence,
        setup.geometry,
        setup.config,
        slots=setup.slots,
        model_dtype=layout.model_dtype,
        device=device,
        params=model.params,
    )
    for slot in range(setup.slots):
        pool.acquire(slot)
    return pool


def whole_step(
    pool: StatePool,
    slots: Tensor,
    tokens: Tensor,
    accepted: Tensor,
    forced: Tensor,
    inputs: list[dict[str, Tensor]],
    width: int,
) -> list[Tensor]:
    """A step as an engine would capture it: device tensors only."""
    opened = flow.open_step(pool, slots, tokens, width=width, forced=forced)
    ys = [flow.verify(pool, layer, opened, x) for layer, x in enumerate(inputs)]
    flow.close_step(pool, opened)
    flow.commit(pool, slots, accepted)
    return ys


def batches(
    model: Model, device: str, steps: int
) -> list[tuple[Tensor, Tensor, Tensor, Tensor, list[dict[str, Tensor]]]]:
    """Random arguments of `whole_step`: ragged rows, padding, forced flushes, partial acceptance."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for step in range(steps):
        slots = torch.randperm(5, generator=generator)[:4]
        slots[step % 4] = PAD_SLOT
        tokens = torch.randint(0, 4, (4,), generator=generator)
        accepted = (tokens * torch.rand(4, generator=generator)).round().long()
        accepted[slots == PAD_SLOT] = 0
        forced = torch.rand(4, generator=generator) < 0.2
        numbers = torch.randint(0, 200, (4, 3), generator=generator)
        inputs = [{n: x.to(device) for n, x in model.inputs(layer, numbers).items()} for layer in range(2)]
        found.append((slots.to(device), tokens.to(device), accepted.to(device), forced.to(device), inputs))
    return found


def graph_model(recurrence: str) -> Model:
    return Model(
        Setup(recurrence, ReplayConfig(window=5, verify_len=3, read_format="bf16"), geometry_for(recurrence), seed=2)
    )


def assert_pools_equal(a: StatePool, b: StatePool) -> None:
    for (name, x), (_, y) in zip(a.cursor.items(), b.cursor.items(), strict=True):
        assert torch.equal(x, y), name
    for first, second in zip(a.layers, b.layers, strict=True):
        for name, tensor in first.tensors.items():
            assert torch.equal(bits(tensor), bits(second.tensors[name])), name


@pytest.mark.gpu
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_9_graph_replay_equals_eager(recurrence: str) -> None:
    model = graph_model(recurrence)
    eager, captured = device_pool(model, "cuda"), device_pool(model, "cuda")
    arguments = batches(model, "cuda", 20)
    slots, tokens, accepted, forced, inputs = arguments[0]
    static = (
        slots.clone(),
        tokens.clone(),
        accepted.clone(),
        forced.clone(),
        [{n: x.clone() for n, x in each.items()} for each in inputs],
    )
    static[0].fill_(PAD_SLOT)  # warming up and capturing must leave every slot alone
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            whole_step(captured, *static, width=3)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = whole_step(captured, *static, width=3)
    for batch in arguments:
        for target, source in zip(static[:4], batch[:4], strict=True):
            target.copy_(source)
        for target, source in zip(static[4], batch[4], strict=True):
            for name in target:
                target[name].copy_(source[name])
        graph.replay()
        expected = whole_step(eager, *batch, width=3)
        assert same([bits(y) for y in replayed], [bits(y) for y in expected])
    assert_pools_equal(eager, captured)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_9_a_step_brings_no_number_from_the_host(recurrence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from the host cannot be captured in a CUDA graph; numbers must be filled in on the device."""
    model = graph_model(recurrence)
    pool, arguments = device_pool(model, "cpu"), batches(model, "cpu", 6)
    hide_values(monkeypatch)

    def refuse(make: Callable) -> Callable:
        def made(value: object, *rest: object, **options: object) -> Tensor:
            assert isinstance(value, Tensor), f"{value!r} was copied from the host"
            return make(value, *rest, **options)

        return made

    monkeypatch.setattr(torch, "as_tensor", refuse(torch.as_tensor))
    monkeypatch.setattr(torch, "tensor", refuse(torch.tensor))
    for batch in arguments:
        whole_step(pool, *batch, width=3)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_9_the_path_without_host_decisions_equals_eager(recurrence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph captures, on the CPU: no branch on a value, and the same bits."""
    model = graph_model(recurrence)
    eager, hidden = device_pool(model, "cpu"), device_pool(model, "cpu")
    arguments = batches(model, "cpu", 20)
    expected = [whole_step(eager, *batch, width=3) for batch in arguments]
    hide_values(monkeypatch)
    got = [whole_step(hidden, *batch, width=3) for batch in arguments]
    for a, b in zip(expected, got, strict=True):
        assert same([bits(y) for y in a], [bits(y) for y in b])
    assert_pools_equal(eager, hidden)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_9_the_step_can_be_traced_whole(recurrence: str) -> None:
    """torch.compile finds no branch on a value in a step (fullgraph), and the traced step has the same bits."""
    model = graph_model(recurrence)
    eager, traced = device_pool(model, "cpu"), device_pool(model, "cpu")
    compiled = torch.compile(whole_step, fullgraph=True, backend="eager", dynamic=False)
    for batch in batches(model, "cpu", 6):
        expected, got = whole_step(eager, *batch, width=3), compiled(traced, *batch, width=3)
        assert same([bits(y) for y in expected], [bits(y) for y in got])
    assert_pools_equal(eager, traced)


# ---- 10


def per_token(recurrence: str) -> Callable[[Model, int, Tensor, int], Tensor]:
    """The plain recurrence's state after one more token, through the package's reference."""

    def advance(model: Model, layer: int, state: Tensor, number: int) -> Tensor:
        inputs = {name: x[:, 0].to(state.dtype) for name, x in model.inputs(layer, torch.tensor([[number]])).items()}
        params = {name: x.to(state.dtype) for name, x in model.params[layer].items()}
        return get(recurrence).recurrent(inputs, params, state, model.setup.geometry)[1]

    return advance


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_10_window_1_is_the_plain_recurrence_bit_for_bit(recurrence: str, key_heads: int) -> None:
    """In fp64, where the flow rounds nothing besides: checkpoint and ring together are the reference's state.

    This holds for one association of the operations, which references and flow share: the decay meets the key before
    the state is read, u = beta (v - S^T (d k)), and S <- d S + k u^T is a product, a product and a sum.
    """
    advance = per_token(recurrence)
    for geometry in (
        geometry_for(recurrence, key_heads),
        Geometry(4, 4 if get(recurrence).decay == "channel" else 2, 32, 16),
    ):
        model = Model(
            Setup(recurrence, ReplayConfig(window=1, checkpoint_format="fp64"), geometry, model_dtype="fp64", seed=4)
        )
        pool = model.pool()
        slot = pool.acquire()
        states = [torch.zeros(geometry.state_shape, dtype=torch.float64) for _ in pool.layers]
        for number in range(60):
            run(pool, model, [slot], [[number]])
            flow.commit(pool, [slot], 1)
            for layer, state in enumerate(states):
                states[layer] = advance(model, layer, state, number)
                assert torch.equal(flow.materialize(pool, layer, [slot])[0], states[layer]), f"token {number}"


@pytest.mark.parametrize("checkpoint", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_10_window_1_rounds_once_per_token(recurrence: str, checkpoint: str) -> None:
    """With a narrower checkpoint, each token's exact update of the stored state is rounded once.

    The write vector is computed in fp32 (as the ring keeps it), so an element may round the other way when the exact
    value lies within fp32's error of a tie: the stored state is within one spacing of the rounding everywhere.
    """
    geometry = Geometry(2, 2, 16, 8)
    model = Model(
        Setup(recurrence, ReplayConfig(window=1, checkpoint_format=checkpoint, stagger=False), geometry, seed=4)
    )
    pool, dtype, advance = model.pool(), DTYPES.get(checkpoint, torch.float16), per_token(recurrence)
    slot = pool.acquire()
    stored = [torch.zeros(geometry.state_shape, dtype=torch.float64) for _ in pool.layers]
    for number in range(30):
        run(pool, model, [slot], [[number]])
        flow.commit(pool, [slot], 1)
        flow.flush(pool, [slot])
        for layer, state in enumerate(stored):
            want, got = advance(model, layer, state, number), pool.layers[layer].tensors["checkpoint"][slot].double()
            size = exact(want.abs().amax())
            spacing = torch.finfo(dtype).eps * want.abs() / 2 + 16 * torch.finfo(torch.float32).eps * float(size)
            assert ((got - want).abs() <= spacing).all(), f"token {number}"
            stored[layer] = got
