"""Small random models for the core tests: a pool, the oracle's view of the same layers, and a stock of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from replayssm import ReplayConfig
from replayssm.recurrences import Geometry, get
from replayssm.recurrences.base import tolerance
from replayssm.state.layout import StateLayout
from replayssm.state.pool import LayerState, StatePool

from .oracle import RULES, OracleLayer, Sequence

RECURRENCES = tuple(RULES)
TOKENS = 256  # drawn tokens; number TOKENS is the filler for everything that must not be read, all NaN
REGIMES = ("plain", "no decay", "slow", "strong", "alike keys")
BEYOND_FP16 = "large values"  # the regime in which some tokens lead out of the range of fp16
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Setup:
    """Everything that an example draws once."""

    recurrence: str
    config: ReplayConfig
    geometry: Geometry = field(default_factory=lambda: Geometry(heads=2, key_heads=1, key_dim=4, value_dim=2))
    model_dtype: str = "fp32"
    regime: str = "plain"
    layers: int = 2
    slots: int = 5
    paged: bool = False
    seed: int = 0


@dataclass
class Layer:
    """What one layer's tokens are, for the pool and for the oracle."""

    inputs: dict[str, Tensor]  # [TOKENS + 1, ...]
    conv_inputs: Tensor | None  # [TOKENS + 1, channels]
    conv_weight: Tensor | None
    conv_bias: Tensor | None
    oracle: OracleLayer
    oracle_conv: tuple[np.ndarray, np.ndarray, np.ndarray] | None  # inputs, weight, bias


def exact(x: Tensor) -> np.ndarray:
    return x.double().numpy()


def geometry_for(
    recurrence: str, key_heads: int = 1, conv: bool = False, conv_width: int = 4, key_dim: int = 4
) -> Geometry:
    """Two heads, sharing keys or not; three channels of convolution where there is one."""
    if get(recurrence).decay == "channel":
        key_heads = 2
    return Geometry(2, key_heads, key_dim, 2, conv_channels=3 if conv else 0, conv_width=conv_width)


def draw_inputs(
    name: str, geometry: Geometry, regime: str, count: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Inputs of `count` tokens in the given regime of decays and keys."""
    H, G, N, P = geometry.heads, geometry.key_heads, geometry.key_dim, geometry.value_dim
    per_channel = get(name).decay == "channel"
    gate = rng.standard_normal((count, H, N) if per_channel else (count, H))
    decay = {
        "plain": np.exp(gate - 2),
        "no decay": np.zeros_like(gate),
        "slow": np.exp(gate - 9),
        "strong": np.where(gate > 0, np.exp(3 * gate), 0.1),  # up to thousands: exp underflows
        "alike keys": np.exp(gate - 5),
        BEYOND_FP16: np.exp(gate - 2),
    }[regime]
    keys = rng.standard_normal((count, G, N))
    if regime == "alike keys":
        keys = rng.standard_normal((1, G, N)) + 0.03 * keys
    keys[rng.random(count) < 0.03] = 0
    values, queries = rng.standard_normal((count, H, P)), rng.standard_normal((count, G, N))
    if regime == BEYOND_FP16:
        values *= 10 ** rng.uniform(2, 6, (count, 1, 1))
    if name == "mamba2":
        return {"x": values, "B": keys, "C": queries, "dt": decay}
    beta = 1 / (1 + np.exp(-rng.standard_normal((count, H)) - (4 if regime == "alike keys" else 0)))
    beta[rng.random(count) < 0.05] = 1
    return {"q": queries, "k": keys, "v": values, "log_decay": -decay, "beta": beta}


def draw_params(name: str, geometry: Geometry, regime: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    if name != "mamba2":
        return {}
    # without decay dt would be 0 and nothing written: there A is what vanishes
    A = np.zeros(geometry.heads) if regime == "no decay" else -np.exp(0.3 * rng.standard_normal(geometry.heads))
    return {"A": A, "D": rng.standard_normal(geometry.heads)}


class Model:
    """The layers of a `Setup`, as a pool sees them and as the oracle does."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        recurrence, geometry = get(setup.recurrence), setup.geometry
        self.layout = StateLayout(recurrence, geometry, setup.config, DTYPES[setup.model_dtype])
        rng = np.random.default_rng(setup.seed)
        self.layers = [self._draw_layer(rng) for _ in range(setup.layers)]
        self.channels = geometry.conv_channels

    def _draw_layer(self, rng: np.random.Generator) -> Layer:
        setup, layout = self.setup, self.layout
        name, geometry = setup.recurrence, setup.geometry
        fields = layout.recurrence.inputs
        drawn = draw_inputs(name, geometry, setup.regime, TOKENS, rng)
        if name == "mamba2" and setup.regime == "no decay":
            drawn["dt"] = np.exp(rng.standard_normal(drawn["dt"].shape) - 2)
        inputs = {f.name: torch.from_numpy(drawn[f.name]).to(layout.dtype_of(f)) for f in fields}
        params = {
            n: torch.from_numpy(p).to(layout.compute_dtype)
            for n, p in draw_params(name, geometry, setup.regime, rng).items()
        }
        oracle = OracleLayer(
            RULES[name],
            {n: exact(p) for n, p in params.items()},
            {n: exact(x) for n, x in inputs.items()},
            geometry.state_shape,
        )
        raw = weight = bias = spec = None
        if geometry.conv_channels:
            shape = (geometry.conv_channels, geometry.conv_width)
            raw, weight, bias = (
                torch.from_numpy(rng.standard_normal(dims)).to(layout.model_dtype)
                for dims in ((TOKENS, shape[0]), shape, shape[:1])
            )
            spec = (exact(raw), exact(weight), exact(bias))
        return Layer(
            {n: _with_filler(x) for n, x in inputs.items()},
            None if raw is None else _with_filler(raw),
            weight,
            bias,
            oracle,
            spec,
        )

    @property
    def params(self) -> list[dict[str, Tensor]]:
        return [{n: torch.from_numpy(p) for n, p in layer.oracle.params.items()} for layer in self.layers]

    def pool(self, slots: int | None = None) -> StatePool:
        """A pool over these layers, its memory full of NaN."""
        slots = self.setup.slots if slots is None else slots
        states = []
        for params in self.params:
            if self.setup.paged:
                # longer pages than needed, all bits set: that is NaN in every format, and a canary in the gaps
                pages = torch.full((slots, self.layout.page_bytes + 64), 255, dtype=torch.uint8)
                states.append(LayerState.in_pages(self.layout, pages, params))
            else:
                states.append(LayerState.allocate(self.layout, slots, "cpu", params))
        pool = StatePool(states)
        for layer in pool.layers:
            for tensor in layer.tensors.values():
                poison(tensor)
        return pool

    def sequence(self) -> Sequence:
        config, compute = self.setup.config, self.layout.compute_dtype
        return Sequence(
            tuple(layer.oracle for layer in self.layers),
            config.checkpoint_format,
            config.read_format,
            tolerance(compute),
            self.layout.ring_rows,
            torch.finfo(compute).tiny,
            stochastic=config.rounding == "stochastic",
            ring_step=0.0 if config.read_format is None else torch.finfo(self.layout.model_dtype).eps / 2,
        )

    def inputs(self, layer: int, numbers: Tensor) -> dict[str, Tensor]:
        """Inputs of tokens [B, T] by number."""
        return {name: x[numbers] for name, x in self.layers[layer].inputs.items()}


def poison(tensor: Tensor, where: Tensor | None = None) -> None:
    """Fill memory with NaN, all of it or where the mask says. Codes of integers get all bits set: NaN in E4M3."""
    value = torch.nan if tensor.dtype.is_floating_point else 255 if tensor.dtype == torch.uint8 else -1
    if where is None:
        tensor.fill_(value)
    else:
        tensor.masked_fill_(where, value)


def _with_filler(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full_like(x[:1], torch.nan)])


def grid(rows: list[list[int]], width: int | None = None) -> Tensor:
    """Token numbers [B, T], with the filler beyond each row's own."""
    width = max([0, *map(len, rows)]) if width is None else width
    return torch.tensor([row + [TOKENS] * (width - len(row)) for row in rows], dtype=torch.int64).reshape(
        len(rows), width
    )


def bits(x: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals NaN and -0 differs from 0."""
    return x.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[x.dtype.itemsize])
