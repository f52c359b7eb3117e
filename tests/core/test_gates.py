"""The gates: one function each, in fp32 whatever the model's dtype, against the formulas in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replayssm.recurrences import get

RAW = np.linspace(-40, 60, 257)


def raised(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Raw gate inputs [..., 257 spread over -40..60 in the last dim]."""
    return torch.from_numpy(RAW).to(dtype).expand(*shape, len(RAW))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


def agrees(got: torch.Tensor, want: np.ndarray) -> None:
    """fp32 out; relative error of a few roundings: the sum with the bias, the exponential, the logarithm, a product.

    A sum's rounding of |x| eps is a relative error of |x| eps once exponentiated, here up to 60 eps.
    """
    assert got.dtype == torch.float32
    eps = torch.finfo(torch.float32).eps
    assert (np.abs(got.double().numpy() - want) <= 64 * eps * np.abs(want) + torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_step_size(dtype: torch.dtype) -> None:
    raw, bias = raised(dtype=dtype), torch.linspace(-1, 1, len(RAW)).to(dtype)
    x = raw.double().numpy() + bias.double().numpy()
    agrees(get("mamba2").step_size(raw, bias), softplus(x))  # type: ignore[attr-defined]
    large = get("mamba2").step_size(torch.tensor([20.5, 300.0]), torch.zeros(2))  # type: ignore[attr-defined]
    assert large.tolist() == [20.5, 300.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decay_and_rate_per_head(dtype: torch.dtype) -> None:
    raw = raised(dtype=dtype)
    A_log, bias = torch.linspace(-2, 2, len(RAW)).to(dtype), torch.linspace(-1, 1, len(RAW)).to(dtype)
    log_decay, beta = get("gdn").gates(raw, raw, A_log, bias)  # type: ignore[attr-defined]
    x = raw.double().numpy()
    agrees(log_decay, -np.exp(A_log.double().numpy()) * softplus(x + bias.double().numpy()))
    agrees(beta, 1 / (1 + np.exp(-x)))
    assert bool(((beta >= 0) & (beta <= 1)).all())


@pytest.mark.parametrize("bound", [None, -5.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decay_per_channel(dtype: torch.dtype, bound: float | None) -> None:
    """Two heads; the bounded gate stays within its bound for any input."""
    raw = raised(2, dtype=dtype)
    A_log, bias = torch.tensor([-1.0, 0.5]).to(dtype), torch.linspace(-1, 1, len(RAW)).to(dtype).expand(2, -1)
    got = get("kda").log_decay_of_gate(raw, A_log, bias, bound)  # type: ignore[attr-defined]
    rate = np.exp(A_log.double().numpy())[:, None]
    x = raw.double().numpy() + bias.double().numpy()
    want = -rate * softplus(x) if bound is None else bound / (1 + np.exp(-rate * x))
    if bound is not None:
        assert bool(((got >= bound) & (got <= 0)).all())
    # the rate multiplies the sum before it is exponentiated, and with it the sum's rounding
    eps = torch.finfo(torch.float32).eps
    assert got.dtype == torch.float32
    assert (np.abs(got.double().numpy() - want) <= 128 * eps * np.abs(want) + torch.finfo(torch.float32).tiny).all()
