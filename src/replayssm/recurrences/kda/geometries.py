"""Kimi Delta Attention layers of published models, and small ones for tests, by the ids that benchmarks use."""

from __future__ import annotations

from replayssm.recurrences.base import Geometry, Layers


def _layers(heads: int, conv_channels: int, count: int, dim: int = 128) -> Layers:
    return Layers(Geometry(heads, heads, dim, dim, conv_channels), count)


GEOMETRIES = {
    "kimi-linear-48b-a3b": _layers(32, 12288, 20),
    "glm-5.3-flash": _layers(64, 24576, 34),
    "tiny-kda": _layers(2, 96, 2, 16),
    "small-kda": _layers(2, 384, 2, 64),
}
