"""The operators: what they declare, and a whole step under torch.compile with fake tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from replayssm import flow
from replayssm.kernels import ops
from replayssm.kernels.launch import Choice, Tile, run, workspace
from replayssm.kernels.plan import DECODE

from .harness import DEVICE, FUSED, SMALL, SPLIT, Case, Twins, bits, error, poison, tiles
from .harness import run as run_case

CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture
def twins() -> Twins:
    twins = Twins(Case("gdn", rows=(3, -1), geometry=replace(SMALL, conv_channels=40)))
    for pool in twins.pools.values():
        for tensor in pool.layers[0].tensors.values():
            tensor.zero_()  # opcheck compares memory before and after, and NaN differs from itself
    return twins


def arguments(twins: Twins) -> dict[str, tuple[object, ...]]:
    """Arguments of every operator."""
    pool = twins.pools["triton"]
    slots = torch.tensor(twins.case.rows, device=DEVICE)
    kernels, number, cursor = ops.Kernels(pool), pool.layout_numbers[0], pool.cursor
    tensors, params = kernels._layer(0)
    inputs = list(twins._draw(1)[0].values())
    tokens = torch.tensor([1, 0], device=DEVICE)
    plan = kernels.plan_rows(slots, 1, 1, 5, False, None)
    y = torch.zeros(2, 1, *twins._heads, device=DEVICE)
    work = workspace(twins.layout, 2, 1, DEVICE).zero_()
    states = torch.zeros(2, *twins.layout.geometry.state_shape, device=DEVICE)
    counters = kernels._counters
    heads = twins.layout.geometry.heads
    raw = [torch.zeros(2, 1, heads, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    bias = [torch.zeros(heads, device=DEVICE) for _ in range(2)]
    gates = [torch.zeros(2, 1, heads, device=DEVICE) for _ in range(2)]
    x = torch.zeros(2, 1, 40, dtype=torch.bfloat16, device=DEVICE)
    weight, z = x.new_ones(40, 4), x.new_ones(2, 1, heads * y.shape[3])
    convolved = (weight, None, "silu", torch.zeros_like(x), raw, bias, [1.0], gates, number, False)
    return {
        "convolve_op": (plan, kernels._carry(0), [x], *convolved),
        "gated_norm_op": (y, z, z[0, 0, : y.shape[3]], torch.zeros_like(z), y.shape[3], 1e-5, False, False),
        "plan_op": (slots, tokens, 0, 1, None, 5, None, True, tokens * 0, counters, pool.ring_rows, [number]),
        "settle_op": (plan, counters, pool.counts, 5, DECODE.value),
        "commit_op": (slots, None, 1, counters),
        "compact_op": (slots, torch.tensor([[1], [-1]], device=DEVICE), counters, tensors, number),
        "verify_op": (plan, tensors, params, inputs, y, work, cursor.saturated, cursor.seed, 0, number, False),
        "fold_op": (plan, tensors, params, cursor.saturated, number),
        "read_op": (plan, tensors, params, states, number),
        "materialize_op": (plan, tensors, params, torch.tensor([1, 2], device=DEVICE), cursor.saturated, number),
    }


NAMES = ("plan_op", "settle_op", "commit_op", "compact_op", "verify_op", "fold_op", "read_op", "materialize_op")


@pytest.mark.parametrize("name", [*NAMES, "convolve_op", "gated_norm_op"])
def test_operators_are_what_they_declare(name: str, twins: Twins) -> None:
    torch.library.opcheck(getattr(ops, name), arguments(twins)[name], test_utils=CHECKS)


def test_torch_is_passed_by_where_nobody_watches(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators of a layer are called by themselves, unless something is differentiated or traced."""
    seen: list[str] = []
    named = {getattr(ops, name): name for name in ("read_op", "gates_op")}
    monkeypatch.setattr(ops, "_PLAIN", {op: lambda *_, n=name: seen.append(n) for op, name in named.items()})
    given = arguments(twins)["read_op"]
    with torch.no_grad():
        ops.call(ops.read_op, *given)
        ops.call(ops.gates_op, [given[0]], [], [], [given[0]], 0)
    assert seen == ["read_op", "gates_op"]
    ops.call(ops.read_op, *given)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        plan, states = (mode.from_tensor(given[i]) for i in (0, 3))
        ops.call(ops.read_op, plan, [], [], states, given[4])
    assert len(seen) == 2


@pytest.mark.filterwarnings("ignore:.*jit.trace:DeprecationWarning")
def test_who_watches_ordinary_tensors_sees_operators(twins: Twins) -> None:
    """Traces of real tensors, a fake mode around them, and transforms: none changes a tensor's Python type."""
    y, z, weight, _, *how = arguments(twins)["gated_norm_op"]

    def norm(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(z)
        ops.call(ops.gated_norm_op, y, z, weight, out, *how)
        return out

    with torch.no_grad():
        assert "replayssm" in str(make_fx(norm, tracing_mode="real")(y, z).graph)
        assert "replayssm" in str(torch.jit.trace(norm, (y, z), check_trace=False).graph)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert norm(y, z).shape == z.shape
        with pytest.raises(RuntimeError, match="replayssm::gated_norm"):
            torch.vmap(norm)(y, z)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", ["mamba2", "kda"])
def test_steps_that_nobody_watches(name: str, paged: bool) -> None:
    with torch.inference_mode():
        run_case(Case(name, verify_len=2, paged=paged, choice=SPLIT, trees=paged))


def test_a_compiled_step_of_a_tree_equals_an_eager_one() -> None:
    """The same with parents and a path, which are tensors then: one graph, and nothing waits for their values."""
    eager, compiled = (Twins(Case("kda", rows=(3, -1, 0), verify_len=4)) for _ in range(2))
    slots = torch.tensor([3, -1, 0], device=DEVICE)

    def whole(twins: Twins, inputs: dict[str, torch.Tensor], parents: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        pool = twins.pools["triton"]
        step = flow.open_step(pool, slots, 4, parents=parents)
        y = flow.verify(pool, 0, step, inputs)
        flow.close_step(pool, step)
        flow.commit_path(pool, slots, path)
        return y

    def compiled_whole(*arguments: object) -> torch.Tensor:
        return whole(compiled, *arguments)  # type: ignore[arg-type]

    graph = torch.compile(compiled_whole, fullgraph=True, backend="aot_eager")
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, -1, 1, 0]], device=DEVICE)
    path = torch.tensor([[0, 1, 3], [-1, -1, -1], [1, 2, -1]], device=DEVICE)
    for _ in range(3):
        inputs, _ = eager._draw(4)
        assert torch.equal(graph(inputs, parents, path), whole(eager, inputs, parents, path))
    for name, tensor in eager.pools["triton"].layers[0].tensors.items():
        assert torch.equal(bits(tensor), bits(compiled.pools["triton"].layers[0].tensors[name])), name


@pytest.mark.parametrize("paged", [False, True])
def test_a_compiled_step_equals_an_eager_one(paged: bool) -> None:
    """Plan, layer, settling and commit in one graph without breaks, with the pool's memory written in place."""
    case = Case("mamba2", rows=(3, -1, 0), paged=paged)
    eager, compiled = Twins(case), Twins(case)
    slots = torch.tensor(case.rows, device=DEVICE)

    def whole(twins: Twins, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        pool = twins.pools["triton"]
        step = flow.open_step(pool, slots, 1)
        y = flow.verify(pool, 0, step, inputs)
        flow.close_step(pool, step)
        flow.commit(pool, slots, 1)
        return y

    def compiled_whole(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return whole(compiled, inputs)

    run = torch.compile(compiled_whole, backend="aot_eager", fullgraph=True)
    # a commit of padded rows is refused where the host can see it
    count = torch.tensor([int(slot >= 0) for slot in case.rows], device=DEVICE)
    for _ in range(3):
        inputs, _ = eager._draw(1)
        pool = eager.pools["triton"]
        step = flow.open_step(pool, slots, 1)
        y = flow.verify(pool, 0, step, inputs)
        flow.close_step(pool, step)
        flow.commit(pool, slots, count)
        assert torch.equal(run(inputs), y)
    for name, tensor in eager.pools["triton"].layers[0].tensors.items():
        assert torch.equal(bits(compiled.pools["triton"].layers[0].tensors[name]), bits(tensor)), name
    for name, counter in eager.pools["triton"].cursor.items():
        assert torch.equal(getattr(compiled.pools["triton"].cursor, name), counter), name


FOLDS = {
    "between steps": (None, 1, "nearest"),
    "record by record": (Choice(Tile(16), form="recurrent"), 1, "nearest"),
    "in one launch": (FUSED, 1, "nearest"),
    "in a launch of its own": (SPLIT, 1, "nearest"),
    "before two tokens": (SPLIT, 2, "nearest"),
    "before two tokens, at random": (SPLIT, 2, "stochastic"),
}


@pytest.mark.parametrize("where", FOLDS)
def test_checkpoints_beyond_their_format_are_clamped_and_counted(where: str) -> None:
    """A flush saturates as the torch back end does."""
    choice, tokens, rounding = FOLDS[where]
    case = Case("mamba2", checkpoint_format="fp16", rows=(0, 3), window=3, verify_len=tokens, rounding=rounding)
    twins = Twins(case)
    for pool in twins.pools.values():
        step = flow.open_step(pool, [0, 3], 1)
        flow.close_step(pool, step)
        flow.commit(pool, [0, 3], 1)
        ring = pool.layers[0].tensors
        for name in ("ring.x", "ring.B"):
            ring[name].fill_(200.0)
        ring["ring.dt"].fill_(3.0)
        ring["ring.x"][..., :3] = -200.0
        ring["ring.x"][..., 5:] = 1.0
        if choice is not None:
            step = flow.open_step(pool, [0, 3], tokens, forced=True)
            with tiles(choice):
                flow.verify(pool, 0, step, twins._draw(tokens)[0])
            flow.close_step(pool, step)
        else:
            flow.flush(pool, [0, 3])
    ours, theirs = (twins.pools[name] for name in ("triton", "torch"))
    assert torch.equal(ours.cursor.saturated, theirs.cursor.saturated) and int(ours.cursor.saturated.sum()) > 0
    assert torch.equal(ours.layers[0].tensors["checkpoint"][[0, 3]], theirs.layers[0].tensors["checkpoint"][[0, 3]])


def test_states_into_other_slots() -> None:
    """Many boundaries at once, one slot several times, into free slots and into a caller's tensor."""
    case = Case("gdn", rows=(0, 3), verify_len=2, window=5)
    twins = Twins(case, slots=9)
    for pool in twins.pools.values():
        for slot in (4, 5, 6, 7):
            pool.release(slot)
    for _ in range(2):
        twins.step([2, 2], [2, 2])
    sources, records = [0, 3, 0, 0], [4, 1, 0, 2]
    for pool in twins.pools.values():
        assert flow.materialize_into(pool, sources, records, [7, 4, 6, 5]) == [7, 4, 6, 5]
    ours, theirs = (twins.pools[name] for name in ("triton", "torch"))
    for name, counter in theirs.cursor.items():
        assert torch.equal(getattr(ours.cursor, name), counter), name
    states = {name: flow.materialize(pool, 0, [7, 4, 6, 5]) for name, pool in twins.pools.items()}
    assert error(states["triton"], states["torch"]) <= case.tolerance
    again = flow.materialize(ours, 0, sources, records)
    assert torch.equal(again, states["triton"])


def test_inputs_of_any_stride_and_outputs_of_any_dtype() -> None:
    twins = Twins(Case("gdn", rows=(0, 3), verify_len=2))
    pool = twins.pools["triton"]
    inputs, _ = twins._draw(2)
    step = flow.open_step(pool, [0, 3], 2)
    y = flow.verify(pool, 0, step, inputs)
    turned = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    assert torch.equal(flow.verify(pool, 0, step, turned), y)
    wide = torch.empty(2, 2, 3, *twins._heads, dtype=torch.bfloat16, device=DEVICE)
    poison(wide)
    out = flow.verify(pool, 0, step, inputs, wide[:, :, 1])
    assert torch.equal(out, y.bfloat16()) and wide[:, :, [0, 2]].isnan().all()
    with pytest.raises(ValueError, match="contiguous within a token"):
        flow.verify(pool, 0, step, inputs, torch.empty(2, 2, *twins._heads[::-1], device=DEVICE).transpose(2, 3))


def test_launches_are_kept_from_hooks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton cannot describe the templates' functions to a compile hook, and would raise: vLLM has such a hook."""
    runtime, seen = triton.knobs.runtime, []

    class Kernel:
        arg_names = ("x", "N")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **given: seen.append((grid, given, runtime.jit_post_compile_hook, runtime.jit_cache_hook))

    def hook(**_: object) -> None: ...

    monkeypatch.setattr(runtime, "jit_post_compile_hook", hook)
    run(Kernel(), 3, {"x": 1}, {"N": 2}, num_warps=4)
    assert seen == [((3,), {"x": 1, "N": 2, "num_warps": 4}, None, None)]
    assert runtime.jit_post_compile_hook is hook
