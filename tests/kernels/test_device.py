"""On a GPU: conformance at slices of real layers, and what only a device shows. `pytest -m gpu tests/kernels`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from replayssm import ReplayConfig, flow
from replayssm.attach.vllm.clamped import EVERY, ClampWatch
from replayssm.kernels import launch, ops
from replayssm.kernels.exact import nearest
from replayssm.kernels.launch import Choice, Tile, form_of
from replayssm.kernels.tuned import choose
from replayssm.recurrences import Geometry, get
from replayssm.recurrences.base import Recurrence
from replayssm.state.layout import StateLayout
from replayssm.state.pool import SaturationWarning, StatePool

from .harness import Case, run, tiles

pytestmark = pytest.mark.gpu

SLICES = {
    "mamba2": [Geometry(32, 2, 128, 64), Geometry(24, 2, 128, 80), Geometry(8, 2, 256, 128), Geometry(32, 1, 128, 64)],
    "gdn": [Geometry(16, 4, 128, 128), Geometry(8, 2, 64, 96)],
    "kda": [Geometry(8, 8, 128, 128)],
}
ROWS = (3, -1, 0, 4, 1, -1)
CHOICES = {
    "step and flush": Choice(Tile(32, 2, 1), Tile(32, 8, 2, 3)),
    "pipelined": Choice(Tile(32, 2, 2, 2), Tile(16, 2, 2, 2)),
}


def cases() -> list[Case]:
    found = []
    for name, geometries in SLICES.items():
        for geometry in geometries:
            base = Case(name, geometry, window=16, rows=ROWS, steps=40)
            layout = base.layout
            choices = [choose(layout, 1, 1), choose(layout, 4096, 1)]
            choices += CHOICES.values()
            found += [replace(base, choice=choice) for choice in dict.fromkeys(choices)]
            found += [
                replace(base, verify_len=4, choice=choose(layout, 1, 4)),
                replace(base, verify_len=4, choice=choose(layout, 4096, 4), paged=True),
                replace(base, verify_len=8, choice=choose(layout, 4096, 8)),
                replace(base, window=5, model_dtype="fp16", checkpoint_format="fp16"),
                replace(base, window=1, checkpoint_format="bf16", paged=True),
                replace(base, window=64, model_dtype="fp32", choice=choose(layout, 1, 1)),
            ]
            trees = replace(base, trees=True, steps=12)
            found.append(replace(trees, verify_len=8, choice=choose(layout, 4096, 8)))
            found.append(replace(trees, verify_len=4, choice=choose(layout, 1, 4), paged=True))
            random = replace(base, checkpoint_format="fp16", rounding="stochastic")
            found += [replace(random, choice=choose(random.layout, rows, 1)) for rows in (1, 256)]
            if geometry.key_dim & geometry.key_dim - 1:
                continue  # no codes
            for read_format in ("fp8", "int8", "nvfp4"):
                for tokens in (1, 4):
                    beside = replace(base, read_format=read_format, verify_len=tokens, window=32)
                    found.append(replace(beside, choice=choose(beside.layout, 256, tokens)))
            found.append(replace(base, read_format="nvfp4", checkpoint_format="fp16", choice=found[-2].choice))
            for read_format, tokens in ((None, 1), (None, 4), ("nvfp4", 1), ("nvfp4", 4)):
                scaled = replace(base, checkpoint_format="fp8", read_format=read_format, verify_len=tokens)
                found.append(replace(scaled, choice=choose(scaled.layout, 256, tokens)))
            found.append(replace(found[-1], rounding="stochastic"))
    return found


@pytest.mark.parametrize("number", range(len(cases()) if torch.cuda.is_available() else 0))
def test_kernels_agree_with_torch(number: int) -> None:
    case = cases()[number]
    print(case, case.choice)
    run(case)


def pool_of(
    name: str, slots: int, config: ReplayConfig, seed: int = 0, geometry: Geometry | None = None, layers: int = 1
) -> StatePool:
    """A pool on the device with random states, as after a prompt."""
    recurrence, geometry = get(name), geometry or SLICES[name][0]
    generator = torch.Generator().manual_seed(seed)
    _, params = recurrence.draw(geometry, (1,), generator)
    pool = StatePool.allocate(
        recurrence, geometry, config, slots=slots, model_dtype=torch.bfloat16, device="cuda", params=[params] * layers
    )
    assert pool.backend == "triton"
    slots_taken = [pool.acquire() for _ in range(slots)]
    state = torch.randn(slots, *geometry.state_shape, generator=generator).cuda()
    with flow.prompt(pool, slots_taken, 1, width=1) as step:
        for layer in range(layers):
            flow.load(pool, layer, step, state)
    return pool


def draw(layout: StateLayout, rows: int, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    inputs, _ = layout.recurrence.draw(layout.geometry, (rows, tokens), torch.Generator().manual_seed(seed))
    return {f.name: inputs[f.name].to(layout.dtype_of(f)).cuda() for f in layout.recurrence.inputs}


def snapshot(pool: StatePool) -> list[torch.Tensor]:
    counters = [counter for _, counter in pool.cursor.items()]
    return [t.contiguous().clone() for t in (*pool.layers[0].tensors.values(), *counters, pool.counts)]


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("tokens", [1, 4])
def test_graph_replay_equals_eager(name: str, tokens: int) -> None:
    """A captured step decides for itself which rows flush: nothing in it depends on the host."""
    config, rows = ReplayConfig(window=6, verify_len=tokens), 6
    eager, captured = pool_of(name, rows, config), pool_of(name, rows, config)
    slots = torch.tensor([3, 0, 5, -1, 1, 2], device="cuda")
    accepted = torch.tensor([1, tokens, 1, 0, tokens, 1], device="cuda")
    layout = eager.layers[0].layout
    static = draw(layout, rows, tokens, 0)

    def step(pool: StatePool) -> torch.Tensor:
        opened = flow.open_step(pool, slots, tokens)
        y = flow.verify(pool, 0, opened, static)
        flow.close_step(pool, opened)
        flow.commit(pool, slots, accepted)
        return y

    step(eager)
    step(captured)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(captured)
    for number in range(25):
        for field, x in draw(layout, rows, tokens, number + 1).items():
            static[field].copy_(x)
        graph.replay()
        assert torch.equal(out, step(eager))
    for ours, theirs in zip(snapshot(captured), snapshot(eager), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "tokens", "read_format"),
    [*((name, 2, None) for name in SLICES), ("mamba2", 1, "nvfp4"), ("gdn", 1, "nvfp4"), ("gdn", 1, "fp8")],
)
@pytest.mark.parametrize("batch", [1, 64])
def test_a_thousand_launches_agree_bit_for_bit(name: str, tokens: int, read_format: str | None, batch: int) -> None:
    """Races would show as different bits."""
    pool = pool_of(name, batch, ReplayConfig(window=4, verify_len=tokens, read_format=read_format))
    layout, slots = pool.layers[0].layout, torch.arange(batch, device="cuda")
    for number in range(2):
        inputs = draw(layout, batch, tokens, number)
        opened = flow.open_step(pool, slots, tokens)
        flow.verify(pool, 0, opened, inputs)
        flow.close_step(pool, opened)
        flow.commit(pool, slots, tokens)
    inputs = draw(layout, batch, tokens, 9)
    forced = torch.arange(batch, device="cuda") % 2 == 0
    opened = flow.open_step(pool, slots, tokens, window=4, forced=forced)
    before = {name: tensor.clone() for name, tensor in pool.layers[0].tensors.items()}
    first, between = None, torch.zeros(1, device="cuda")
    for _ in range(1000):
        for field, tensor in pool.layers[0].tensors.items():
            tensor.copy_(before[field])
        between.zero_()  # as a plan's launch would: a step may read its pool before the launch in front of it has ended
        found = [flow.verify(pool, 0, opened, inputs), *(t.clone() for t in pool.layers[0].tensors.values())]
        if first is None:
            first = found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))


OVERLAPPING = [("fp32", 1, 6), ("fp32", 1, 40), ("bf16", 1, 40), ("fp32+nvfp4", 1, 40), ("fp32", 4, 40)]
"""Precision, tokens of a row, rows: of six the launch that does everything, of forty those of many rows."""


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize(("precision", "tokens", "rows"), OVERLAPPING)
@pytest.mark.parametrize("processors", [None, 1], ids=["all", "one"])
def test_launches_that_overlap_change_no_bit(
    name: str, precision: str, tokens: int, rows: int, processors: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers behind each other, each with the outputs of the one before as values, one workspace, in one graph: what a
    launch reads ahead, or without a wait of its own, must be there. Folds once on all multiprocessors, once on one.
    """
    if processors is not None:
        monkeypatch.setattr(launch, "processors", lambda device: processors)
    form, stock = ReplayConfig.of(precision, window=6, verify_len=tokens), launch.run

    def one_by_one(*given, launch_pdl=False, **options):  # type: ignore[no-untyped-def]
        stock(*given, **options)  # the same kernel: where nothing may overlap, none waits

    found = []
    for run_with in (stock, one_by_one):
        monkeypatch.setattr(launch, "run", run_with)
        pool = pool_of(name, rows, form, layers=6)
        layout, slots = pool.layers[0].layout, torch.arange(rows, device="cuda")
        choice = choose(layout, 4096 if rows > 6 else 1, tokens)
        monkeypatch.setattr(ops, "choose", lambda layout, batch, tokens, choice=choice: choice)
        static = draw(layout, rows, tokens, 0)
        value = form_of(layout.recurrence).value
        outputs = [torch.empty_like(static[value]) for _ in pool.layers]

        def step(pool=pool, static=static, value=value, outputs=outputs, slots=slots) -> None:  # type: ignore[no-untyped-def]
            opened = flow.open_step(pool, slots, tokens)
            given = static
            for number, out in enumerate(outputs):
                flow.verify(pool, number, opened, given, out)
                given = static | {value: out}
            flow.close_step(pool, opened)
            flow.commit(pool, slots, tokens)

        step()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        seen = []
        for number in range(60):
            for field, x in draw(layout, rows, tokens, number % 7 + 1).items():
                static[field].copy_(x)
            graph.replay()
            seen.append(outputs[-1].clone())
        found.append([*seen, *(t.clone() for layer in pool.layers for t in layer.tensors.values())])
    assert all(bool(x.isfinite().all()) for x in found[0][:60])
    for overlapping, alone in zip(*found, strict=True):
        assert torch.equal(overlapping.contiguous().view(torch.uint8), alone.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("slow", [False, True], ids=["drawn decay", "slow decay"])
@pytest.mark.parametrize("window", [16, 1])
def test_the_state_stays_exact(name: str, slow: bool, window: int) -> None:
    """Relative Frobenius error against fp64 after 4,096 tokens (docs/numerics.md).

    At a window in force of 1, which small batches may get, every token is rounded: as in an ordinary fp32 recurrence.
    """
    geometry = Geometry(4, 4 if name == "kda" else 2, 128, 64)
    pool = pool_of(name, 2, ReplayConfig(window=16), geometry=geometry)
    layout, slots = pool.layers[0].layout, torch.arange(2, device="cuda")
    recurrence: Recurrence = layout.recurrence
    params = {field: x.double() for field, x in pool.layers[0].params.items()}
    exact = flow.materialize(pool, 0, [0, 1]).double()
    ordinary, plain = exact.float(), dict(pool.layers[0].params)
    length = 512
    for part in range(4096 // length):
        inputs = draw(layout, 2, length, part)
        if slow:
            decay = inputs["dt" if name == "mamba2" else "log_decay"]
            decay.mul_(1e-3)
        for t in range(length):
            opened = flow.open_step(pool, slots, 1, window=window)
            flow.verify(pool, 0, opened, {field: x[:, t : t + 1] for field, x in inputs.items()})
            flow.close_step(pool, opened)
            flow.commit(pool, slots, 1)
        for row in range(2):
            chosen = {field: x[row].double() for field, x in inputs.items()}
            exact[row] = recurrence.recurrent(chosen, params, exact[row], geometry)[1]
            if window == 1:
                chosen = {field: x[row].float() for field, x in inputs.items()}
                ordinary[row] = recurrence.recurrent(chosen, plain, ordinary[row], geometry)[1]
    ours = flow.materialize(pool, 0, [0, 1]).double()
    error = float((ours - exact).norm() / exact.norm())
    limit = 1e-6 if window > 1 else float((ordinary.double() - exact).norm() / exact.norm())
    assert error <= limit, f"{error:.1e}, allowed {limit:.1e}"


def test_row_order_and_padding_change_no_bit() -> None:
    config = ReplayConfig(window=4)
    first, second = pool_of("gdn", 6, config), pool_of("gdn", 6, config)
    layout = first.layers[0].layout
    orders = ([0, 1, 2, 3], [3, -1, 1, 0, 2])
    with tiles(Choice(Tile(16, 1, 2))):
        for number in range(9):
            inputs = draw(layout, 4, 1, number)
            outputs = []
            for pool, order in zip((first, second), orders, strict=True):
                with flow.step(pool, order) as step:
                    given = {field: x[[max(slot, 0) for slot in order]] for field, x in inputs.items()}
                    y = flow.verify(pool, 0, step, given)
                flow.commit(pool, order, [int(slot >= 0) for slot in order])
                outputs.append(torch.stack([y[order.index(slot)] for slot in range(4)]))
            assert torch.equal(*outputs)


def test_compiled_by_inductor_equals_eager() -> None:
    config = ReplayConfig(window=3)
    eager, compiled = pool_of("mamba2", 4, config), pool_of("mamba2", 4, config)
    slots, layout = torch.arange(4, device="cuda"), eager.layers[0].layout

    def step(pool: StatePool, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        opened = flow.open_step(pool, slots, 1)
        y = flow.verify(pool, 0, opened, inputs)
        flow.close_step(pool, opened)
        flow.commit(pool, slots, 1)
        return 2 * y

    fast = torch.compile(lambda inputs: step(compiled, inputs), fullgraph=True)
    for number in range(7):
        inputs = draw(layout, 4, 1, number)
        assert torch.equal(fast(inputs), step(eager, inputs))
    for ours, theirs in zip(snapshot(compiled), snapshot(eager), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_clamped_elements_of_an_engine_are_read_while_its_steps_go_on() -> None:
    config, device = ReplayConfig(checkpoint_format="fp16"), torch.device("cuda")
    geometry = Geometry(1, 1, 64, 32)
    pool = StatePool.allocate(get("gdn"), geometry, config, slots=4, model_dtype=torch.bfloat16, device=device)
    watch = ClampWatch(pool)
    pool.cursor.saturated[2] = 3
    for _ in range(2 * EVERY - 1):
        watch.step()  # the count is on its way
    torch.cuda.synchronize()
    with pytest.warns(SaturationWarning, match="^3 checkpoint elements were clamped"):
        watch.step()


@triton.jit
def nearest_kernel(x, narrow, wide, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rounded, again = nearest(tl.load(x + at), narrow.dtype.element_ty, NATIVE)
    tl.store(narrow + at, rounded)
    tl.store(wide + at, again)


@pytest.mark.parametrize("native", [True, False])
def test_states_are_rounded_in_pairs_as_one_by_one(native: bool) -> None:
    """Every kind of number, and ties: each as torch rounds it."""
    if native and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("pairs are converted from compute capability 8.9 on")
    generator = torch.Generator("cuda").manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=generator, device="cuda").to(torch.int32)
    bits[::2] = (bits[::2] & -65536) | 0x8000
    x = bits.view(torch.float32)
    x[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    narrow, wide = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x)
    nearest_kernel[(len(x) // 1024,)](x, narrow, wide, 1024, native)
    expected = x.to(torch.bfloat16)
    assert torch.equal(narrow.isnan(), expected.isnan())
    assert torch.equal(narrow.nan_to_num(), expected.nan_to_num())
    assert torch.equal(wide.nan_to_num(), expected.float().nan_to_num())
