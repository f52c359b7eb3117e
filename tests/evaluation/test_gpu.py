"""On a CUDA device: formats encode to the bytes of a CPU, and the graphs of an evaluation decode the same text."""

from __future__ import annotations

import pytest
import torch

from replayssm.evaluate.precision import Precision
from replayssm.evaluate.replay import LayerReplay
from replayssm.recurrences import Geometry, get
from replayssm.state.formats import FORMATS
from replayssm.state.formats.stochastic import noise

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_formats_encode_the_same_bytes(name: str, stochastic: bool) -> None:
    if stochastic and name in ("fp64", "fp32"):
        pytest.skip("not rounded")
    generator, form = torch.Generator().manual_seed(0), FORMATS[name]
    state = torch.randn(3, 4, 80, 24, generator=generator) * torch.rand(3, 4, 80, 24, generator=generator) ** 8
    state[0, 0, :16] = 0
    state[1, 2, 5, 3] = 1e38
    random = [None, None]
    if stochastic:
        seed, folded = torch.tensor([1, 2**40, -3]), torch.tensor([16, 32, 48])
        random = [noise(seed.to(d), 3, folded.to(d), (4, 80, 24)) for d in ("cpu", "cuda")]
        assert torch.equal(random[0], random[1].cpu())
    here, there = form.encode(state, random[0]), form.encode(state.cuda(), random[1])
    for suffix, part in here.items():
        assert torch.equal(part.view(torch.uint8), there[suffix].cpu().view(torch.uint8)), suffix
    found = form.decode(there, torch.float32).cpu()
    assert torch.equal(form.decode(here, torch.float32), found)


@pytest.mark.parametrize("recurrence", ["mamba2", "gdn", "kda"])
def test_graphs_decode_the_same_text(recurrence: str) -> None:
    geometry, rule = Geometry(4, 4, 32, 32), get(recurrence)
    names = ("fp32", "nvfp4", "fp32+nvfp4", "fp8-stochastic+nvfp4", "fp32+int8")
    configs = [Precision(name).config(16) for name in names]
    inputs, params = rule.draw(geometry, (2, 1000), torch.Generator().manual_seed(0))
    repeated = {name: x.repeat(len(names), *[1] * (x.dim() - 1)) for name, x in inputs.items()}
    runs = []
    for device in ("cpu", "cuda"):
        layer = LayerReplay(rule, geometry, params, configs, 2, torch.float32, torch.device(device, 0), 1)
        moved = {name: x.to(device) for name, x in repeated.items()}
        runs.append(layer.run(moved))
    here, there = (run.outputs.unflatten(0, (len(names), 2)).cpu() for run in runs)
    error = (here - there).flatten(1).norm(dim=1) / here.flatten(1).norm(dim=1)
    assert float(error[0]) < 1e-5
    # a number next to a midpoint may be rounded to either side; on average the errors agree
    assert (error < 0.1).all()
    assert torch.allclose(runs[0].state_error, runs[1].state_error.cpu(), rtol=0.3, atol=1e-6)
    assert torch.allclose(runs[0].half_life, runs[1].half_life.cpu(), rtol=1e-4)
