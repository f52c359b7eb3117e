"""Gates, gated norm and the whole of `mix` on the kernels against the torch back end."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from replayssm import ReplayConfig, flow
from replayssm.kernels import convolve, ops
from replayssm.recurrences import Geometry, get
from replayssm.recurrences.mixer import Mixer, Norm, Projected
from replayssm.state.layout import StateLayout
from replayssm.state.pool import StatePool

from ..attach.helpers import assert_close, forward, new_cache, prompt
from ..attach.models import build
from .harness import DEVICE, DTYPES, SPLIT, bits, error, poison, tiles

ROWS = (-1, 3, 0, 1)


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # else torch's differs by 1e-3


# name -> constants of the gates that layers come with
VARIANTS = [("mamba2", ()), ("gdn", (1.0,)), ("gdn", (2.0,)), ("kda", (0.0,)), ("kda", (-5.0,))]


def mixer_of(name: str) -> Mixer:
    found: Mixer = importlib.import_module(f"replayssm.recurrences.{name}.mixer").MIXER
    return found


class Layer:
    """One layer with random weights on both back ends."""

    def __init__(self, name: str, constants: tuple[float, ...], dtype: str, verify_len: int = 1) -> None:
        self.mixer, self.dtype = mixer_of(name), DTYPES[dtype]
        self.generator = torch.Generator(DEVICE).manual_seed(1)
        heads, key_heads, N, P = 4, 4 if name == "kda" else 2, 16, 24
        self.geometry = Geometry(heads, key_heads, N, P, conv_channels=heads * P + 2 * key_heads * N)
        config, recurrence = ReplayConfig(5, verify_len), get(name)
        _, weights = self.mixer.draw(self.geometry, (1, 1), self.dtype, self.generator)
        self.weights = replace(weights, constants=constants)
        _, params = recurrence.draw(self.geometry, (1,), torch.Generator().manual_seed(1))
        self.pools = {}
        for backend in ("torch", "triton"):
            pool = StatePool.allocate(
                recurrence,
                self.geometry,
                config,
                slots=5,
                model_dtype=self.dtype,
                params=[params],
                device=DEVICE,
                backend=backend,
            )
            for tensor in pool.layers[0].tensors.values():
                poison(tensor)
            for _ in range(4):
                pool.acquire()
            self.pools[backend] = pool

    def projected(self, rows: int, tokens: int) -> Projected:
        return self.mixer.draw(self.geometry, (rows, tokens), self.dtype, self.generator)[0]


@pytest.mark.parametrize("verify_len", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "constants"), VARIANTS)
def test_mix_agrees_with_torch(name: str, constants: tuple[float, ...], dtype: str, verify_len: int) -> None:
    layer = Layer(name, constants, dtype, verify_len)
    tolerance = 1e-5 if dtype == "fp32" else 2 * torch.finfo(torch.bfloat16).eps
    for number in range(4):
        counts = [0, verify_len, max(1, verify_len - 1), 1]
        parents = [[-1, 0, 0]] * len(ROWS) if verify_len == 3 and number % 2 else None
        projected, outputs = layer.projected(len(ROWS), verify_len), {}
        for backend, pool in layer.pools.items():
            opened = flow.step(pool, ROWS, counts, width=verify_len, forced=number == 2, parents=parents)
            with tiles(SPLIT), opened as step:
                outputs[backend] = flow.mix(pool, 0, step, layer.mixer, layer.weights, projected)
            if parents is None:
                flow.commit(pool, ROWS, [0, *[(count + 1) // 2 for count in counts[1:]]])
            else:
                flow.commit_path(pool, ROWS, [[], [0, 2], [0, 1], [0]])
        live = torch.arange(verify_len) < torch.tensor(counts).unsqueeze(1)
        assert error(outputs["triton"][live], outputs["torch"][live]) <= tolerance
        assert outputs["triton"].dtype == layer.dtype
        carries = [bits(pool.layers[0].tensors["carry.conv"]) for pool in layer.pools.values()]
        assert torch.equal(*carries)
    states = [flow.materialize(pool, 0, [3, 0, 1]) for pool in layer.pools.values()]
    assert error(*states) <= tolerance


def test_the_gate_of_the_norm_is_there_before_the_recurrence_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm's launch reads it before it waits for the one in front, which must not be a copy of it."""
    layer, seen = Layer("gdn", (1.0,), "fp32", 3), []
    projected = layer.projected(len(ROWS), 3)
    strided = replace(projected, z=projected.z.transpose(0, 2).contiguous().transpose(0, 2))
    whole = ops.Kernels.gated_norm

    def gated_norm(self: ops.Kernels, y: torch.Tensor, z: torch.Tensor, norm: Norm) -> torch.Tensor:
        seen.append(z)
        return whole(self, y, z, norm)

    monkeypatch.setattr(ops.Kernels, "gated_norm", gated_norm)
    outputs = []
    for given, slot in ((strided, 0), (projected, 1)):
        rows = replace(given, **{n: tuple(x[:1] for x in getattr(given, n)) for n in ("conv", "gates")}, z=given.z[:1])
        with flow.step(layer.pools["triton"], [slot], 3) as step:
            outputs.append(flow.mix(layer.pools["triton"], 0, step, layer.mixer, layer.weights, rows))
    assert torch.equal(*outputs)
    assert [z.stride(-1) for z in seen] == [1, 1]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("name", "constants"), VARIANTS)
def test_gates_are_right_over_their_whole_range(name: str, constants: tuple[float, ...]) -> None:
    """Also where 1 + e^x loses e^x, beyond the threshold, and in more than one block."""
    geometry = Geometry(700, 700, 2, 2, conv_channels=16) if name != "kda" else Geometry(64, 64, 16, 4, 16)
    layout = StateLayout(get(name), geometry, ReplayConfig(4), torch.float32)
    fields = [field for field in layout.recurrence.inputs if field.dtype == "exact"]
    raw, sizes = torch.linspace(-60, 40, 2 * 1400), [field.shape(geometry) for field in fields]
    given = [raw[: 2 * torch.Size(size).numel()].view(2, 1, -1).to(DEVICE) for size in sizes]
    generator = torch.Generator().manual_seed(0)
    shapes = {"mamba2": [(700,)], "gdn": [(700,), (700,)], "kda": [(64,), (1024,)]}[name]
    params = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    found = [torch.full((2, 1, *size), torch.nan, device=DEVICE) for size in sizes]
    plan = torch.zeros(2, 12, dtype=torch.int64, device=DEVICE)
    plan[:, 0] = -1
    x, weight = torch.zeros(2, 1, 16, device=DEVICE), torch.zeros(16, 4, device=DEVICE)
    convolve.launch_convolve(
        layout,
        torch.zeros(1, 4, 16, device=DEVICE),
        plan,
        [x],
        weight,
        None,
        "silu",
        torch.empty_like(x),
        gate_inputs=given,
        gate_params=params,
        gate_constants=constants,
        gates=found,
    )
    # in a launch of their own they are the same, also as parts of something wider
    alone = [torch.full_like(gate, torch.nan) for gate in found]
    parts = [torch.cat([torch.full_like(x, torch.nan), x], 2)[..., x.shape[2] :] for x in given]
    convolve.launch_gates(layout, parts, params, constants, alone)
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(alone, found, strict=True))
    wide = mixer_of(name).gates(tuple(given), tuple(params), constants, geometry)
    for field, ours in zip(fields, found, strict=True):
        # a bounded gate has its rate inside of a sigmoid, which then rounds its argument
        least = 1e-12 if min(constants, default=0) < 0 else 1e-37
        assert ((ours - wide[field.name]).abs() <= 1e-5 * wide[field.name].abs() + least).all(), field.name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("groups", "size", "shared", "gate", "gate_first"),
    [
        (2, 1500, False, "silu", True),
        (1, 96, False, "silu", True),
        (1, 96, False, "silu", False),
        (20, 128, True, "silu", False),
        (3, 24, True, "sigmoid", False),
        (1, 2100, None, "silu", True),
        (1, 2048, None, "silu", True),
    ],
)
def test_gated_norm(groups: int, size: int, shared: bool | None, gate: Any, gate_first: bool, dtype: str) -> None:
    """`shared` is None for a gate without a norm."""
    generator = torch.Generator().manual_seed(2)
    width = groups * size
    y = torch.randn(2, 3, width, generator=generator).to(DEVICE)
    z = torch.randn(2, 4, width + 8, generator=generator).to(DEVICE, DTYPES[dtype])[:, 1:, 8:]
    weight = None
    if shared is not None:
        weight = torch.randn(size if shared else width, generator=generator).to(DEVICE, DTYPES[dtype])
    norm = Norm(size, weight, 1e-5, gate, gate_first)
    out = torch.full((2, 3, width), torch.nan, dtype=z.dtype, device=DEVICE)
    ops.gated_norm_op(y.unsqueeze(2), z, weight, out, size, 1e-5, gate_first, gate == "sigmoid")
    expected = norm(y.double().unsqueeze(2), z.double())
    assert error(out, expected) <= (1e-6 if dtype == "fp32" else torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("family", ["nemotron_h", "falcon_h1", "qwen3_5", "kimi_linear"])
def test_whole_models_on_the_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode and several tokens at once, as the plain model and as the same without fusing."""
    from replayssm import attach, detach
    from replayssm.attach.transformers import attached

    monkeypatch.setattr(attached, "StatePool", partial(StatePool, backend="triton"))
    model, ids = build(family).to(DEVICE), prompt(4).to(DEVICE)
    expected = forward(model, torch.cat([prompt(6).to(DEVICE), ids], 1))[:, 6:].log_softmax(-1)
    for fuse in (None, False):
        attach(model, ReplayConfig(window=4, verify_len=3), fused=fuse)
        held = new_cache(model)
        forward(model, prompt(6).to(DEVICE), held)
        parts = [forward(model, ids[:, :1], held, 6), forward(model, ids[:, 1:4], held, 7)]
        detach(model)
        assert_close(torch.cat(parts, 1).log_softmax(-1), expected, 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("verify_len", [1, 4])
@pytest.mark.parametrize(("name", "constants"), VARIANTS)
def test_a_graph_of_steps_equals_eager_ones(name: str, constants: tuple[float, ...], verify_len: int) -> None:
    layers = [Layer(name, constants, "bf16", verify_len) for _ in range(2)]
    slots, count = torch.tensor(ROWS, device=DEVICE), torch.tensor([0, 1, 1, 1], device=DEVICE)
    fed = [layers[0].projected(len(ROWS), verify_len) for _ in range(9)]
    given = layers[0].projected(len(ROWS), verify_len)

    def step(layer: Layer, projected: Projected) -> torch.Tensor:
        pool = layer.pools["triton"]
        opened = flow.open_step(pool, slots, verify_len)
        y = flow.mix(pool, 0, opened, layer.mixer, layer.weights, projected)
        flow.close_step(pool, opened)
        flow.commit(pool, slots, count)
        return y

    def put(projected: Projected) -> None:
        for target, source in zip(_tensors(given), _tensors(projected), strict=True):
            target.copy_(source)

    expected = [step(layers[0], projected) for projected in fed]
    found = []
    for projected in fed[:2]:
        put(projected)
        found.append(step(layers[1], given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(layers[1], given)
    for projected in fed[2:]:
        put(projected)
        graph.replay()
        found.append(y.clone())
    assert all(torch.equal(a[1:], b[1:]) for a, b in zip(found, expected, strict=True))
    ours, theirs = (layer.pools["triton"].layers[0].tensors for layer in layers)
    assert all(torch.equal(bits(tensor.contiguous()), bits(theirs[n].contiguous())) for n, tensor in ours.items())


def _tensors(projected: Projected) -> tuple[torch.Tensor, ...]:
    return (*projected.conv, *projected.gates, projected.z)


def test_a_prompt_is_refused() -> None:
    layer = Layer("gdn", (1.0,), "fp32")
    pool = layer.pools["torch"]
    with flow.prompt(pool, [0], 2) as step, pytest.raises(ValueError, match="a prompt goes through"):
        flow.mix(pool, 0, step, layer.mixer, layer.weights, layer.projected(1, 2))


def test_a_wrong_norm_is_found() -> None:
    """What `attach` compares on random numbers tells apart what `Norm` can say."""
    norm = Norm(8, torch.ones(16), 1e-5, "silu", True)
    y, z = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 16)
    for other in (
        replace(norm, size=16),
        replace(norm, gate="sigmoid"),
        replace(norm, gate_first=False),
        replace(norm, weight=None),
    ):
        assert not torch.allclose(norm(y, z), other(y, z), rtol=1e-2)
