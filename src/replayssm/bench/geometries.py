"""Recurrent layers of published models, by the ids that tests and benchmarks use."""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.recurrences import Geometry, Recurrence, get


@dataclass(frozen=True)
class Model:
    """The recurrent layers of one model.

    Args:
        recurrence: name in `replayssm.recurrences`.
        geometry: sizes of one layer. Kernels are timed without the convolution, so `conv_channels` is for reference.
        layers: recurrent layers of the model.
    """

    recurrence: str
    geometry: Geometry
    layers: int

    @property
    def replayed(self) -> Recurrence:
        """The recurrence itself."""
        return get(self.recurrence)


def _mamba2(heads: int, value_dim: int, key_dim: int, groups: int, conv_channels: int, layers: int) -> Model:
    return Model("mamba2", Geometry(heads, groups, key_dim, value_dim, conv_channels), layers)


def _gdn(key_heads: int, heads: int, conv_channels: int, layers: int, dim: int = 128) -> Model:
    return Model("gdn", Geometry(heads, key_heads, dim, dim, conv_channels), layers)


def _kda(heads: int, conv_channels: int, layers: int, dim: int = 128) -> Model:
    return Model("kda", Geometry(heads, heads, dim, dim, conv_channels), layers)


MODELS: dict[str, Model] = {
    "nemotron3-nano-4b": _mamba2(96, 80, 128, 8, 9728, 21),
    "nemotron3-nano-30b": _mamba2(64, 64, 128, 8, 6144, 23),
    "nemotron3-super-120b": _mamba2(128, 64, 128, 8, 10240, 40),
    "nemotron3-ultra-550b": _mamba2(256, 64, 128, 8, 18432, 48),
    "nemotron-h-8b": _mamba2(128, 64, 128, 8, 10240, 24),
    "nemotron-h-56b": _mamba2(256, 64, 256, 8, 20480, 54),
    "bamba-9b": _mamba2(128, 64, 128, 1, 8448, 29),
    "granite4-h-small": _mamba2(128, 64, 128, 1, 8448, 36),
    "falcon-h1-34b": _mamba2(32, 128, 256, 2, 5120, 72),
    "mamba2-2.7b": _mamba2(80, 64, 128, 1, 5376, 64),
    "qwen3.5-4b": _gdn(16, 32, 8192, 24),
    "qwen3.5-9b": _gdn(16, 32, 8192, 24),
    "qwen3.5-27b": _gdn(16, 48, 10240, 48),
    "qwen3.5-35b-a3b": _gdn(16, 32, 8192, 30),
    "qwen3.5-122b-a10b": _gdn(16, 64, 12288, 36),
    "qwen3.5-397b-a17b": _gdn(16, 64, 12288, 45),
    "qwen3-next-80b-a3b": _gdn(16, 32, 8192, 36),
    "kimi-linear-48b-a3b": _kda(32, 12288, 20),
    "glm-5.3-flash": _kda(64, 24576, 34),
    # for tests
    "tiny-mamba2": _mamba2(4, 64, 16, 1, 288, 2),
    "small-mamba2": _mamba2(8, 64, 64, 2, 768, 2),
    "odd-mamba2": _mamba2(6, 80, 96, 3, 1056, 2),
    "tiny-gdn": _gdn(2, 4, 128, 2, 16),
    "small-gdn": _gdn(2, 4, 512, 2, 64),
    "tiny-kda": _kda(2, 96, 2, 16),
    "small-kda": _kda(2, 384, 2, 64),
}


def find(name: str) -> Model:
    """The model called `name`; ValueError naming all of them where there is none."""
    try:
        return MODELS[name]
    except KeyError:
        raise ValueError(f"no geometry is called {name!r}; there are: {', '.join(MODELS)}") from None
