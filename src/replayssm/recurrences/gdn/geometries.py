"""Gated DeltaNet layers of published models, and small ones for tests, by the ids that tests and benchmarks use."""

from __future__ import annotations

from replayssm.recurrences.base import Geometry, Layers


def _layers(key_heads: int, heads: int, conv_channels: int, count: int, dim: int = 128) -> Layers:
    return Layers(Geometry(heads, key_heads, dim, dim, conv_channels), count)


GEOMETRIES = {
    "qwen3.5-4b": _layers(16, 32, 8192, 24),
    "qwen3.5-9b": _layers(16, 32, 8192, 24),
    "qwen3.5-27b": _layers(16, 48, 10240, 48),
    "qwen3.5-35b-a3b": _layers(16, 32, 8192, 30),
    "qwen3.5-122b-a10b": _layers(16, 64, 12288, 36),
    "qwen3.5-397b-a17b": _layers(16, 64, 12288, 45),
    "qwen3-next-80b-a3b": _layers(16, 32, 8192, 36),
    "tiny-gdn": _layers(2, 4, 128, 2, 16),
    "small-gdn": _layers(2, 4, 512, 2, 64),
}
