"""Stochastic rounding: the published generator, its stream, and numbers rounded without bias."""

from __future__ import annotations

import pytest
import torch

from replayssm.state.formats import FORMATS
from replayssm.state.formats.cast import GRIDS
from replayssm.state.formats.scaled import E4M3_GRID
from replayssm.state.formats.stochastic import Grid, noise, philox, round_to_grid

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_numbers(key: tuple, counter: tuple, expected: tuple) -> None:
    """The known answers that its authors publish with Random123."""
    as_tensors = [tuple(torch.tensor(word) for word in words) for words in (key, counter)]
    assert tuple(int(word) for word in philox(*as_tensors)) == expected


def test_the_stream_depends_on_request_layer_element_and_flush_alone() -> None:
    seeds, folded, shape = torch.tensor([7, -3, 2**40 + 7]), torch.tensor([16, 32, 16]), (3, 10, 5)
    whole = noise(seeds, 2, folded, shape)
    assert whole.shape == (3, *shape)
    assert int(whole.min()) >= 0
    assert int(whole.max()) <= ONES
    for row in (2, 0, 1):
        assert torch.equal(noise(seeds[row : row + 1], 2, folded[row : row + 1], shape)[0], whole[row])
    others = [noise(seeds, 3, folded, shape), noise(seeds, 2, folded + 1, shape), noise(seeds + 1, 2, folded, shape)]
    for other in (*others, whole[[2, 0, 1]]):
        assert (other == whole).float().mean() < 0.01
    quads = ((1 * 3 + 9 // 4) * 5 + 4, 2, 32, 0)  # head 1, key row 9, column 4
    word = philox((torch.tensor(-3 & ONES), torch.tensor(-1 & ONES)), tuple(torch.tensor(w) for w in quads))[9 % 4]
    assert int(whole[1, 1, 9, 4]) == int(word)


@pytest.mark.parametrize("grid", [*GRIDS.values(), E4M3_GRID, Grid(1, 0), Grid(7, 7)])
def test_rounds_down_or_up_with_the_right_probability(grid: Grid) -> None:
    exponents = torch.arange(grid.least_exponent - 30, grid.least_exponent + 6)
    x = ((1 + torch.rand(36, dtype=torch.float64)) * 2.0**exponents).float()
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, 1.0, -1.5 * 2.0**grid.least_exponent])])
    unit = 2.0 ** (torch.frexp(x).exponent - 1).clamp(min=grid.least_exponent).double() / 2.0**grid.mantissa
    exact = x.double() / unit
    down = round_to_grid(x, torch.full(x.shape, ONES), grid).double() / unit
    up = round_to_grid(x, torch.zeros(x.shape, dtype=torch.int64), grid).double() / unit
    assert torch.equal(down, exact.trunc())
    assert torch.equal(
        up.abs(), torch.where((exact.abs().frac() * 2**32).floor() > 0, exact.abs().ceil(), exact.abs().trunc())
    )
    share = (exact.abs().frac() * 2**32).floor().long()  # of 2^32 noises, how many round up
    last, first = share.sub(1).clamp(min=0), share.clamp(max=ONES)
    assert torch.equal(round_to_grid(x, first, grid).double() / unit, down)
    assert torch.equal((round_to_grid(x, last, grid).double() / unit).abs(), up.abs())
    assert torch.equal(round_to_grid(x, first, grid).signbit(), x.signbit())
    assert round_to_grid(torch.tensor([torch.nan]), torch.zeros(1, dtype=torch.int64), grid).isnan().all()


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8", "int8", "nvfp4"])
def test_the_mean_is_right_where_nearest_is_not(name: str) -> None:
    """Over 512 flushes of one state; the deviation of a mean is the step / sqrt(512), and NVFP4 may saturate."""
    form, generator = FORMATS[name], torch.Generator().manual_seed(0)
    state = torch.randn(1, 1, 32, 4, generator=generator)
    random = noise(torch.zeros(512, dtype=torch.int64), 0, torch.arange(512), (1, 32, 4))
    each = form.decode(form.encode(state.expand(512, -1, -1, -1), random), torch.float32)
    bias = (each.mean(0) - state[0]).norm() / state.norm()
    nearest = (form.decode(form.encode(state), torch.float32) - state).norm() / state.norm()
    assert bias < nearest / 5
    spread = each.std(0).norm() / state.norm()
    assert nearest < spread < 2 * nearest
