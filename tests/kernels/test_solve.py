"""The matrix that solves a window again."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from replayssm.kernels.solve import substitute

from .harness import DEVICE, error


@triton.jit
def substitute_kernel(matrix, rate, WP: tl.constexpr):
    substitute(matrix, tl.load(rate + tl.arange(0, WP)), WP)


@pytest.mark.parametrize("window", [16, 32, 64])
@pytest.mark.parametrize("near", [False, True], ids=["random keys", "near-equal keys"])
def test_a_window_is_solved_by_substitution(window: int, near: bool) -> None:
    """Near-equal keys are what inverting by doubling fails for: its terms grow far beyond what they sum up to."""
    generator = torch.Generator().manual_seed(window)
    keys = torch.randn(window, 64, generator=generator, dtype=torch.float64) * (0.1 if near else 1.0)
    keys += 1.0 if near else 0.0
    keys /= keys.norm(dim=1, keepdim=True)
    rate = torch.rand(window, generator=generator, dtype=torch.float64)
    rate[-3:] = 0.0  # rows beyond the records
    lower = torch.tril(rate.unsqueeze(1) * (keys @ keys.T), -1)
    expected = torch.linalg.solve_triangular(torch.eye(window) + lower, torch.diag(rate), upper=False)
    found = lower.float().to(DEVICE)
    substitute_kernel[(1,)](found, rate.float().to(DEVICE), window, num_warps=max(1, window // 32))
    assert error(found.cpu(), expected) < 1e-6
