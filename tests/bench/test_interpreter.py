"""The repaired interpreter agrees with torch bit for bit in the formats that the stock one gets wrong."""

from __future__ import annotations

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("kernels are interpreted only where there is no GPU", allow_module_level=True)

from .. import interpreter

interpreter.switch_on()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

SPECIAL = [0.0, -0.0, 1.98, 1.984375, 447.0, 448.0, 500.0, -1e30, 6e-8, 2.0**-9, 2.0**-10, 65504.0, 3e38, float("inf")]
SIZE = 256


@triton.jit
def copy_kernel(source, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def mixed_kernel(a, b, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(target + at, x * y + y - x)


@triton.jit
def larger_kernel(a, b, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(target + at, tl.where(x > y, x, y))


@triton.jit
def dot_kernel(a, b, target, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(target + m[:, None] * N + n[None, :], tl.dot(x, y))


def values(scale: float = 1.0) -> torch.Tensor:
    drawn = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)) * scale
    drawn[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return drawn


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_stores_round_to_nearest_even(dtype: torch.dtype, scale: float) -> None:
    source, target = values(scale), torch.empty(SIZE, dtype=dtype)
    copy_kernel[(1,)](source, target, SIZE)
    saturating = dtype.itemsize == 1
    limit = torch.finfo(dtype).max
    assert same_bits(target, (source.clamp(-limit, limit) if saturating else source).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_loads_widen_exactly(dtype: torch.dtype) -> None:
    bits = torch.arange(SIZE, dtype=torch.int32)
    source = (bits.to(torch.uint8) if dtype.itemsize == 1 else (bits * 257).to(torch.uint16)).view(dtype)
    target = torch.empty(SIZE)
    copy_kernel[(1,)](source, target, SIZE)
    expected = source.float()
    assert torch.equal(target.nan_to_num(nan=0.5), expected.nan_to_num(nan=0.5))


def test_integers_become_values_not_bits() -> None:
    source, target = torch.arange(SIZE, dtype=torch.int32) * 37, torch.empty(SIZE, dtype=torch.bfloat16)
    copy_kernel[(1,)](source, target, SIZE)
    assert torch.equal(target, source.to(torch.bfloat16))
    back = torch.empty(SIZE, dtype=torch.int32)
    copy_kernel[(1,)](target, back, SIZE)
    assert torch.equal(back, target.int())


def test_elementwise_bf16_rounds_after_each_operation() -> None:
    a, b = values().clamp(-1e3, 1e3).to(torch.bfloat16), values().flip(0).clamp(-1e3, 1e3).to(torch.bfloat16)
    target = torch.empty(SIZE, dtype=torch.bfloat16)
    mixed_kernel[(1,)](a, b, target, SIZE)
    assert torch.equal(target, a * b + b - a)


def test_comparisons_compare_values() -> None:
    a, b = values().to(torch.bfloat16), values().flip(0).to(torch.bfloat16)
    target = torch.empty(SIZE, dtype=torch.bfloat16)
    larger_kernel[(1,)](a, b, target, SIZE)
    assert torch.equal(target, torch.maximum(a, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_dots_of_narrow_operands(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(16, 32, generator=generator).to(dtype), torch.randn(32, 64, generator=generator).to(dtype)
    target = torch.empty(16, 64)
    dot_kernel[(1,)](a, b, target, 16, 32, 64)
    torch.testing.assert_close(target.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
