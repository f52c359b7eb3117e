"""The convolution's kernel against the torch back end: the same outputs, and the same carry bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from replayssm import ReplayConfig, flow
from replayssm.kernels import convolve
from replayssm.recurrences import Geometry, get
from replayssm.state.layout import StateLayout
from replayssm.state.pool import LayerState, StatePool

from .harness import DEVICE, DTYPES, bits, path_to, poison

SLOTS = 5
ROWS = (-1, 3, 0, -1, 1)


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # else torch's differs by 1e-3


@dataclass(frozen=True)
class Conv:
    """One configuration. With several `parts` the inputs come as several tensors side by side."""

    parts: tuple[int, ...] = (72,)
    width: int = 4
    verify_len: int = 1
    dtype: str = "bf16"
    weight_dtype: str = "bf16"
    bias: bool = True
    activation: str | None = "silu"
    paged: bool = False
    history: bool = False
    trees: bool = False

    @property
    def layout(self) -> StateLayout:
        geometry = Geometry(2, 1, 16, 16, conv_channels=sum(self.parts), conv_width=self.width)
        config = ReplayConfig(4, self.verify_len, carry_history=self.history)
        return StateLayout(get("gdn"), geometry, config, DTYPES[self.dtype])

    def __str__(self) -> str:
        flags = [name for name in ("bias", "paged", "history", "trees") if getattr(self, name)]
        shown = [self.dtype, f"C{'+'.join(map(str, self.parts))}", f"W{self.width}", f"T{self.verify_len}"]
        return "-".join([*shown, f"weights {self.weight_dtype}", str(self.activation), *flags])


CASES = [
    Conv(),
    Conv(paged=True, activation=None, parts=(600,)),
    Conv(dtype="fp32", weight_dtype="fp32", bias=False),
    Conv(dtype="fp16", weight_dtype="fp16", parts=(64, 513), verify_len=3),
    Conv(weight_dtype="fp32", verify_len=2, activation="swish"),
    Conv(verify_len=4, history=True),
    Conv(width=2, verify_len=3),
    Conv(width=3, parts=(16, 16, 40), paged=True),
    Conv(verify_len=4, trees=True, dtype="fp32", weight_dtype="fp32", parts=(40, 24)),
    Conv(verify_len=4, trees=True, width=3, paged=True),
]


def pool_of(case: Conv, backend: str) -> StatePool:
    """A pool whose unused memory is poisoned, with every slot but the last in use."""
    layout = case.layout
    if case.paged:
        pages = torch.full((SLOTS, layout.page_bytes + 128), 255, dtype=torch.uint8, device=DEVICE)
        state = LayerState.in_pages(layout, pages, {})
    else:
        wide = {
            s.name: s.view(torch.zeros(SLOTS, torch.Size(s.shape).numel(), dtype=s.dtype, device=DEVICE))
            for s in layout.tensors
        }
        # carry rows that do not lie together
        shape = (SLOTS, layout.carry_rows, 2, layout.geometry.conv_channels)
        wide["carry.conv"] = torch.zeros(shape, dtype=layout.model_dtype, device=DEVICE)[:, :, 1]
        state = LayerState.of(layout, wide, {})
    for tensor in state.tensors.values():
        poison(tensor)
    pool = StatePool([state], backend=backend)
    for _ in range(SLOTS - 1):
        pool.acquire()
    return pool


def drawn(case: Conv, shape: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """The parts of a step's inputs, as slices of something larger."""
    return [
        torch.randn(*shape, part + 16, generator=generator).to(DEVICE, DTYPES[case.dtype])[..., 8 : 8 + part]
        for part in case.parts
    ]


@pytest.mark.parametrize("items", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution_agrees_with_torch(case: Conv, items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolve, "tokens_each", lambda *_: items)
    generator = torch.Generator().manual_seed(3)
    pools = {name: pool_of(case, name) for name in ("torch", "triton")}
    channels, T = sum(case.parts), case.verify_len
    weight = torch.randn(channels, case.width, generator=generator).to(DEVICE, DTYPES[case.weight_dtype])
    bias = torch.randn(channels, generator=generator).to(weight) if case.bias else None
    eps = torch.finfo(DTYPES[case.weight_dtype]).eps + torch.finfo(DTYPES[case.dtype]).eps
    for number in range(pools["torch"].layers[0].layout.carry_rows // T + 3):  # around the carry
        x = drawn(case, (len(ROWS), T), generator)
        counts = [0 if slot < 0 else int(torch.randint(0, T + 1, (), generator=generator)) for slot in ROWS]
        counts = [max(1, c) if number % 3 and ROWS[i] >= 0 else c for i, c in enumerate(counts)]
        beyond = torch.arange(T) >= torch.tensor(counts).unsqueeze(1)
        for part in x:
            part[beyond.to(DEVICE)] = torch.nan
        parents = None
        if case.trees:
            parents = [[int(torch.randint(-1, t, (), generator=generator)) for t in range(T)] for _ in ROWS]
        outputs = {}
        for name, pool in pools.items():
            with flow.step(pool, ROWS, counts, width=T, parents=parents) as step:
                outputs[name] = flow.causal_conv(pool, 0, step, x, weight, bias, case.activation)
            if parents is None:
                flow.commit(pool, ROWS, [(c + 1) // 2 for c in counts])
            else:
                flow.commit_path(pool, ROWS, [path_to(c - 1, above) for c, above in zip(counts, parents, strict=True)])
        ours, theirs = outputs["triton"].double(), outputs["torch"].double()
        assert not ours[beyond.to(DEVICE)].any()
        scale = theirs.abs() + 4 * (weight.double().abs().sum(1) if case.weight_dtype == "fp32" else 0.01)
        if bias is not None:
            scale += bias.double().abs()  # on a GPU torch rounds the sum before it adds the bias, and again after it
        assert ((ours - theirs).abs() <= 2 * eps * scale).all()
        carries = [bits(pools[name].layers[0].tensors["carry.conv"].contiguous()) for name in pools]
        assert torch.equal(*carries)


def test_a_plain_sum_in_fp64_is_what_comes_out() -> None:
    """Chain, from the start of a sequence on: zeros stand for what was before it."""
    case = Conv(dtype="fp32", weight_dtype="fp32", verify_len=3, activation=None)
    generator = torch.Generator().manual_seed(0)
    pool = pool_of(case, "triton")
    weight = torch.randn(72, 4, generator=generator).to(DEVICE)
    fed, found = [], []
    for _ in range(5):
        (x,) = drawn(case, (1, 3), generator)
        with flow.step(pool, [2], 3) as step:
            y = flow.causal_conv(pool, 0, step, x, weight, None, None)
        flow.commit(pool, [2], 2)
        fed.append(x[0, :2])
        found.append(y[0, :2])
    padded = torch.nn.functional.pad(torch.cat(fed).double(), (0, 0, 3, 0))
    expected = torch.einsum("tck,ck->tc", padded.unfold(0, 4, 1), weight.double())
    assert (torch.cat(found).double() - expected).abs().max() <= 1e-5


def test_what_does_not_fit_is_refused() -> None:
    case = replace(CASES[0], parts=(32,))
    pool = pool_of(case, "triton")
    weight, x = torch.zeros(32, 4, dtype=torch.bfloat16, device=DEVICE), torch.zeros(1, 1, 32, device=DEVICE)
    step = flow.open_step(pool, [0], 1)
    with pytest.raises(ValueError, match="conv inputs must be"):
        flow.causal_conv(pool, 0, step, x, weight)
    with pytest.raises(ValueError, match="conv weights must be"):
        flow.causal_conv(pool, 0, step, x.bfloat16(), weight[:, :3])
    with pytest.raises(ValueError, match="conv bias must be"):
        flow.causal_conv(pool, 0, step, x.bfloat16(), weight, torch.zeros(32, device=DEVICE))
    with pytest.raises(ValueError, match="activation must be"):
        flow.causal_conv(pool, 0, step, x.bfloat16(), weight, None, "relu")
