"""Read copies as the kernels write and read them, bit for bit what the formats say."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels.drafts import load_words, words_dot
from replayssm.kernels.formats import (
    PAIR_SUM_ERROR,
    TRITON_FORMATS,
    format_constants,
    pair_sums,
    probe_bits,
    round_copy,
    scaled_codes,
    state_rows,
    store_probe,
    word_sums,
)
from replayssm.kernels.verify import load_copy
from replayssm.state.formats import FORMATS
from replayssm.state.formats.base import LARGEST_SCALED

from .harness import DEVICE, bits, error

H, P, BLOCK_P = 3, 24, 16


@triton.jit
def write_kernel(
    states, copy, saturated,
    N: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr,
    CODE: tl.constexpr, LARGEST_CODE: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    head = states + h * (N * P)
    round_copy(head, (), copy, 1, h, p, saturated, N, P, False, CODES, BLOCKS, CODE, LARGEST_CODE)


@triton.jit
def checkpoint_kernel(states, words, scales, rounded, again, N: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """An fp8 checkpoint of `states` [H, N, P], what it means, and what is read of it."""
    h = tl.program_id(0)
    n, p = tl.arange(0, N), tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    at, mask = h * (N * P) + n[:, None] * P + p[None, :], (p < P)[None, :]
    codes, column, S = scaled_codes(tl.load(states + at, mask=mask, other=0), 0, False, 3, -6)
    head = words + h * (N // 4 * P)
    tl.store(head + tl.arange(0, N // 4)[:, None] * P + p[None, :], codes, mask=mask)
    tl.store(scales + h * P + p, column, mask=p < P)
    tl.store(rounded + at, S, mask=mask)
    tl.debug_barrier()
    tl.store(again + at, state_rows(head, column, n, p, mask, P, True), mask=mask)


@triton.jit
def read_kernel(
    copy, probes, packed, sums, dots,
    N: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, ROWS: tl.constexpr, CODES: tl.constexpr,
    BLOCKS: tl.constexpr, FACTOR: tl.constexpr, VALUE: tl.constexpr, NATIVE: tl.constexpr, PROBE_BITS: tl.constexpr,
    TILE: tl.constexpr, TILE_FACTOR: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    words, scales, column = load_copy(copy, 1, h, p, N, P, ROWS, CODES, BLOCKS)
    if PROBE_BITS > 0:
        n = tl.arange(0, N)
        at = packed + tl.program_id(1) * (2 * N) + h * (4 * N)
        q_factor = store_probe(tl.load(probes + n).to(tl.float32), at + n, n < N, PROBE_BITS, FACTOR)
        k_factor = store_probe(tl.load(probes + N + n).to(tl.float32), at + N + n, n < N, PROBE_BITS, FACTOR)
        tl.debug_barrier()
        q_at = at.to(tl.pointer_type(tl.int64))
        q, k = pair_sums(words, scales, column, q_at, q_at + N // 4, N, CODES, BLOCKS, VALUE, True)
        q *= q_factor
        k *= k_factor
    else:
        live = tl.full([1], True, tl.int1)
        q, k = word_sums(words, scales, column, probes, probes + N, live, N, CODES, BLOCKS, VALUE, FACTOR, NATIVE, True)
    out = sums + h * (2 * P) + p
    tl.store(out, tl.sum(q, 0), mask=p < P)
    tl.store(out + P, tl.sum(k, 0), mask=p < P)
    J: tl.constexpr = BLOCK_P // 8
    eight, together, c = tl.arange(0, 8), tl.arange(0, J), tl.arange(0, 8)
    columns = tl.program_id(1) * BLOCK_P + eight[None, :, None, None] * J + together[None, None, None, :]
    words, scales = load_words(copy, 1, h, columns, columns < P, N, P, CODES, BLOCKS)
    probe = (probes + c % 2 * N)[None, :, None, None]
    found = words_dot(
        words, scales, probe, (c < 2)[None, :, None, None],
        N, 8, CODES, BLOCKS, FACTOR, VALUE, NATIVE, TILE, TILE_FACTOR,
    )  # fmt: skip
    row = tl.arange(0, J * 8)
    p = tl.program_id(1) * BLOCK_P + row % 8 * J + row // 8
    found *= tl.load(copy[1][0] + copy[1][1] + h * P + p, mask=p < P, other=0)[:, None]
    tl.store(dots + h * (2 * P) + c[None, :] * P + p[:, None], found, mask=(c < 2)[None, :] & (p < P)[:, None])


def state(seed: int, keys: int) -> Tensor:
    """[1, H, N, P] of many magnitudes, ties, zeros, values too small and too large for codes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, H, keys, P, generator=generator) * 10.0 ** (
        torch.rand(1, H, keys, 1, generator=generator) * 8 - 6
    )
    x[0, 1] = torch.randint(-48, 49, (keys, P), generator=generator) / 8
    x[0, 1, 0] = 6 * 448 / 64
    x[0, 0, :, 3] = 0
    x[0, 0, :16, 4] = -0.0
    x[0, 2, 5, 6], x[0, 2, 9, 6], x[0, 2, 3, 7] = 1.5 * LARGEST_SCALED, -torch.inf, 2.0**-149
    x[0, 2, :, 8] = 2.0**-140
    return x


def parts_of(name: str, keys: int) -> dict[str, Tensor]:
    """Two slots full of ones in every bit."""
    return {
        suffix: torch.full((2, *shape), -1 if dtype == torch.int32 else 255, device=DEVICE).to(dtype)
        for suffix, (shape, dtype) in FORMATS[name].parts((H, keys, P)).items()
    }


def copy_argument(name: str, parts: dict[str, Tensor]) -> tuple[tuple[Tensor, int], ...]:
    return tuple((parts[suffix], parts[suffix].stride(0)) for suffix in TRITON_FORMATS[name].parts)


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("name", list(TRITON_FORMATS))
def test_what_is_written_is_what_the_format_says(name: str, keys: int) -> None:
    x, parts = state(keys, keys).to(DEVICE), parts_of(name, keys)
    constants = format_constants(name, keys)
    saturated = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    write_kernel[(H, 2)](
        x, copy_argument(name, parts), saturated, keys, P, BLOCK_P,
        constants["CODES"], constants["BLOCKS"], constants["CODE"], constants["LARGEST_CODE"],
    )  # fmt: skip
    expected = FORMATS[name].encode(x)
    before = parts_of(name, keys)
    for suffix, part in expected.items():
        assert torch.equal(bits(parts[suffix][1:].contiguous()), bits(part)), suffix
        assert torch.equal(bits(parts[suffix][:1].contiguous()), bits(before[suffix][:1])), "another slot"
    assert saturated.tolist() == [0, int(FORMATS[name].saturated(x))]


@pytest.mark.parametrize("keys", [64, 256])
def test_an_fp8_checkpoint_is_what_the_format_says(keys: int) -> None:
    form, x = FORMATS["fp8"], state(keys, keys).clamp(-LARGEST_SCALED, LARGEST_SCALED).to(DEVICE)
    x[0, 1, 7, 5] = torch.nan
    parts = parts_of("fp8", keys)
    rounded, again = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    checkpoint_kernel[(H, 2)](x, parts[""][1], parts[".scale"][1], rounded, again, keys, P, BLOCK_P)
    expected = form.encode(x)
    assert torch.equal(bits(parts[".scale"][1]), bits(expected[".scale"][0]))
    numbers = expected[".scale"][0].isfinite().unsqueeze(1)  # the codes of a NaN's column say nothing
    assert torch.equal(torch.where(numbers, parts[""][1], 0), torch.where(numbers, expected[""][0], 0))
    decoded = form.decode(expected, torch.float32)
    for found in (rounded, again):
        assert torch.equal(found.nan_to_num(3.0), decoded.nan_to_num(3.0))


@pytest.mark.parametrize("name", list(TRITON_FORMATS))
def test_a_nan_stays_in_its_column_and_is_read(name: str) -> None:
    x, parts = state(0, 64), parts_of(name, 64)
    x[0, 1, 7, 5], x[0, 1, 9, 5] = torch.nan, 1.5 * LARGEST_SCALED
    x, constants = x.to(DEVICE), format_constants(name, 64)
    saturated = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    write_kernel[(H, 2)](
        x, copy_argument(name, parts), saturated, 64, P, BLOCK_P,
        constants["CODES"], constants["BLOCKS"], constants["CODE"], constants["LARGEST_CODE"],
    )  # fmt: skip
    read = FORMATS[name].decode({suffix: part[1:] for suffix, part in parts.items()}, torch.float32)
    assert read[0, 1, :, 5].isnan().all()
    assert int(read.isnan().sum()) == 64
    assert saturated.tolist() == [0, int(FORMATS[name].saturated(x))]


def read(
    name: str, keys: int, rows: int, dtype: torch.dtype, native: bool, packed: bool, size: float = 1.0
) -> tuple[float, float]:
    """Relative errors of sums over a random state and of products with it, beside those of the decoded state.

    `size` is that of its elements.
    """
    form = FORMATS[name]
    generator = torch.Generator().manual_seed(1)
    spread = 10.0 ** (torch.rand(1, H, keys, 1, generator=generator) * 3 - 3)
    x = (torch.randn(1, H, keys, P, generator=generator) * spread * size).to(DEVICE)
    parts, encoded = parts_of(name, keys), form.encode(x)
    for suffix, part in encoded.items():
        parts[suffix][1] = part[0]
    probes = torch.randn(2, keys, generator=generator).to(dtype).to(DEVICE)
    probes[1] *= 1e-3
    memory = torch.empty(H, 2, 2, keys, dtype=torch.float16, device=DEVICE)
    sums, dots = (torch.full((H, 2, P), torch.nan, device=DEVICE) for _ in range(2))
    constants = format_constants(name, keys, native)
    read_kernel[(H, 2)](
        copy_argument(name, parts), probes, memory, sums, dots, keys, P, BLOCK_P, rows,
        constants["CODES"], constants["BLOCKS"], constants["FACTOR"], constants["VALUE"], constants["NATIVE"],
        probe_bits(name) if packed else 0, constants["TILE"], constants["TILE_FACTOR"],
    )  # fmt: skip
    expected = torch.einsum("in,hnp->hip", probes.double(), form.decode(encoded, torch.float64)[0])
    return max(error(sums[:, i], expected[:, i]) for i in range(2)), error(dots, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("keys", "rows"), [(64, 4), (128, 4), (128, 8)])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", list(TRITON_FORMATS))
def test_sums_are_those_of_the_decoded_state(
    name: str, native: bool, keys: int, rows: int, dtype: torch.dtype, interpreted_pairs: None
) -> None:
    assert max(read(name, keys, rows, dtype, native, packed=False)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("keys", "rows"), [(64, 4), (128, 4), (128, 2), (256, 8)])
@pytest.mark.parametrize("name", list(TRITON_FORMATS))
def test_sums_of_pairs_are_as_exact_as_fp16(
    name: str, keys: int, rows: int, dtype: torch.dtype, interpreted_pairs: None
) -> None:
    found, _ = read(name, keys, rows, dtype, native=True, packed=True)
    assert found < PAIR_SUM_ERROR


@pytest.mark.parametrize("size", [2.0**-80, 2.0**115])
@pytest.mark.parametrize("way", ["by bits", "native", "packed"])
@pytest.mark.parametrize("name", list(TRITON_FORMATS))
def test_sums_of_tiny_and_huge_states(name: str, way: str, size: float, interpreted_pairs: None) -> None:
    packed = way == "packed"
    found = read(name, 64, 4, torch.bfloat16, way != "by bits", packed, size)
    assert max(found) < (PAIR_SUM_ERROR if packed else 1e-6)
