"""Mamba-2 layers of published models, and small ones for tests, by the ids that tests and benchmarks use."""

from __future__ import annotations

from replayssm.recurrences.base import Geometry, Layers


def _layers(heads: int, value_dim: int, key_dim: int, groups: int, conv_channels: int, count: int) -> Layers:
    return Layers(Geometry(heads, groups, key_dim, value_dim, conv_channels), count)


GEOMETRIES = {
    "nemotron3-nano-4b": _layers(96, 80, 128, 8, 9728, 21),
    "nemotron3-nano-30b": _layers(64, 64, 128, 8, 6144, 23),
    "nemotron3-super-120b": _layers(128, 64, 128, 8, 10240, 40),
    "nemotron3-ultra-550b": _layers(256, 64, 128, 8, 18432, 48),
    "nemotron-h-8b": _layers(128, 64, 128, 8, 10240, 24),
    "nemotron-h-56b": _layers(256, 64, 256, 8, 20480, 54),
    "bamba-9b": _layers(128, 64, 128, 1, 8448, 29),
    "granite4-h-small": _layers(128, 64, 128, 1, 8448, 36),
    "falcon-h1-34b": _layers(32, 128, 256, 2, 5120, 72),
    "mamba2-2.7b": _layers(80, 64, 128, 1, 5376, 64),
    "tiny-mamba2": _layers(4, 64, 16, 1, 288, 2),
    "small-mamba2": _layers(8, 64, 64, 2, 768, 2),
    "odd-mamba2": _layers(6, 80, 96, 3, 1056, 2),
}
