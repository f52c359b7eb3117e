"""Random numbers and stochastic rounding of the kernels, bit for bit those of torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from replayssm.kernels.stochastic import draw, round_to_grid
from replayssm.state.formats import FORMATS, stochastic

from .harness import DEVICE, bits

SLOTS, H, P, BLOCK_P = 3, 2, 24, 16


@triton.jit(do_not_specialize=["layer"])
def draw_kernel(
    seeds, layer, tokens, out,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) // H
    h = tl.program_id(0) % H
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    for first in range(0, N, ROWS):
        n = first + tl.arange(0, ROWS)
        noise = draw(seeds, slot, layer, tl.load(tokens + slot), h, first, p, N, P, ROWS)
        at = out + ((slot * H + h) * N + n[:, None]) * P + p[None, :]
        tl.store(at, noise.to(tl.int64), mask=(n < N)[:, None] & (p < P)[None, :])


@triton.jit
def round_kernel(x, noise, out, SIZE: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, round_to_grid(tl.load(x + at), tl.load(noise + at).to(tl.uint32), MANTISSA, LEAST))


@pytest.mark.parametrize(("keys", "rows"), [(64, 64), (64, 16), (22, 32), (22, 8)])
def test_the_stream_is_that_of_the_format(keys: int, rows: int) -> None:
    seeds = torch.tensor([0, -(2**63) + 5, 2**40 + 3], device=DEVICE)
    tokens = torch.tensor([7, 2**33 + 1, 16], device=DEVICE)
    out = torch.full((SLOTS, H, keys, P), -1, dtype=torch.int64, device=DEVICE)
    apart = torch.stack([seeds, seeds * 0], 1)[:, 0]  # seeds that do not lie side by side
    for layer in (0, 1, 40):
        draw_kernel[(SLOTS * H, 2)]((apart, apart.stride(0)), layer, tokens, out, H, keys, P, rows, BLOCK_P)
        assert torch.equal(out, stochastic.noise(seeds, layer, tokens, (H, keys, P)))


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8"])
def test_rounding_is_that_of_the_format(name: str) -> None:
    grid, generator = FORMATS[name].grid, torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator) * 10.0 ** (torch.rand(4096, generator=generator) * 12 - 9)
    x[:6] = torch.tensor([0.0, -0.0, torch.nan, 2.0**-149, -(2.0**-130), 448.0])
    noise = torch.randint(2**32, (4096,), generator=generator)
    noise[6:8] = torch.tensor([0, 2**32 - 1])
    x, noise = x.to(DEVICE), noise.to(DEVICE)
    out = torch.empty_like(x)
    round_kernel[(4,)](x, noise, out, 1024, grid.mantissa, grid.least_exponent)
    assert torch.equal(bits(out), bits(stochastic.round_to_grid(x, noise, grid)))
