"""What the products of several tokens are made of."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replayssm.kernels.drafts import tf32_halves

from .harness import DEVICE


@triton.jit
def halves_kernel(x, parts, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    high, low = tf32_halves(tl.load(x + i))
    tl.store(parts + i, high)
    tl.store(parts + SIZE + i, low)


def test_two_parts_lose_no_more_than_the_last_bit() -> None:
    """With what tensor cores cut off of a tf32 operand: everything behind its first 11 bits."""
    generator = torch.Generator().manual_seed(0)
    size = 4096
    x = torch.randn(size, generator=generator) * 10.0 ** (torch.rand(size, generator=generator) * 20 - 10)
    parts = torch.empty(2, size, device=DEVICE)
    halves_kernel[(1,)](x.to(DEVICE), parts, size)
    assert torch.equal(parts.cpu().double().sum(0), x.double())
    cut = (parts.cpu().view(torch.int32) & -8192).view(torch.float32)
    assert torch.equal(cut[0], parts[0].cpu())
    last_bit = 2.0 ** (x.abs().double().log2().floor() - 23)
    errors = (cut.double().sum(0) - x.double()) / last_bit
    assert errors.abs().max() <= 1
    assert errors.mean().abs() < 0.05 and errors.square().mean().sqrt() < 0.55
