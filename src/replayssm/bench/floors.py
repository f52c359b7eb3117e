"""What memory allows: the time to read a number of bytes once with a cold L2, and the bandwidth of a copy."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
import triton
import triton.language as tl

from replayssm.bench.timing import Timer, rotation, rotation_layers

BLOCKS = ((2048, 2), (2048, 4), (4096, 4), (8192, 4), (8192, 8), (16384, 8))
"""(words per program, warps) that the read kernel is tried with."""

SIZES = tuple(2**20 * 2**i for i in range(12))
"""Bytes at which the floor is measured: 1 MiB to 2 GiB; between them it is interpolated."""


@triton.jit
def read_kernel(source, sink, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load `words` int32 words and use them, storing (almost) nothing."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + offsets, mask=offsets < words, other=0)
    total = tl.sum(values, axis=0)
    if total == 0x5EED5EED:
        tl.store(sink, total)


class Floors:
    """Read floors by size, measured when first asked for.

    Args:
        timer: how to time.
        device: where.
    """

    def __init__(self, timer: Timer, device: torch.device) -> None:
        self._timer, self._device = timer, device
        self._measured: dict[int, float] = {}
        self._sink = torch.zeros(1, dtype=torch.int32, device=device)

    def us(self, bytes_read: float) -> float:
        """Microseconds to read this many bytes in one launch: interpolated, and beyond the sizes at the last rate."""
        if self._device.type != "cuda":
            return bytes_read / 1e6
        sizes = SIZES
        at = min(max(bisect_left(sizes, bytes_read), 1), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        begin, end = self.measure(low), self.measure(high)
        return begin + (end - begin) * (bytes_read - low) / (high - low)

    def measure(self, size: int) -> float:
        """Microseconds of the best configuration of the read kernel on `size` bytes."""
        if size not in self._measured:
            layers = rotation_layers(size, self._device)
            words = size // 4
            buffer = torch.randint(-(2**31), 2**31 - 1, (layers, words), dtype=torch.int32, device=self._device)
            best = float("inf")
            for block, warps in BLOCKS:

                def step(layer: int, block: int = block, warps: int = warps) -> None:
                    self.launch(buffer[layer], block, warps)

                best = min(best, self._timer.time(*rotation([step], layers), samples=9).us)
            self._measured[size] = best
        return self._measured[size]

    def launch(self, source: torch.Tensor, block: int, warps: int) -> None:
        """One launch over all of `source`, int32 and contiguous."""
        grid = (triton.cdiv(source.numel(), block),)
        kernel: Any = read_kernel
        kernel[grid](source, self._sink, source.numel(), BLOCK=block, num_warps=warps)

    def copy_gb_s(self, size: int = 2**32) -> float:
        """GB/s of a large device-to-device copy, bytes read and written counted."""
        if self._device.type != "cuda":
            size = 2**20
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)

        def body() -> None:
            target.copy_(source)

        return 2 * size / self._timer.time(body, 1, samples=9).us / 1e3
