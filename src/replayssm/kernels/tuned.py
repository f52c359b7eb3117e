"""Which tiles a launch uses: the row of a measured table that is nearest, or a rule where nothing was measured.

The tables are `tuned/<gpu>.json`, one a GPU, written by `replayssm tune`. They never name a recurrence: what matters to
a kernel is the kind of decay, whether there is a correction, and sizes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from replayssm.kernels.launch import Choice, Tile, in_columns, is_random, padded_window, read_codes, solves_again
from replayssm.kernels.verify import FLUSH_ROWS, STEP_ROWS
from replayssm.state.layout import StateLayout

FORMAT, VERSION = "replayssm-tuned-kernels", 2
FOLDER = Path(__file__).with_suffix("")


@dataclass(frozen=True)
class Shape:
    """What a kernel sees of a layer.

    Args:
        decay: "head" or "channel".
        delta_rule: whether write vectors are corrected.
        heads, key_heads, key_dim, value_dim: the geometry.
        model_dtype: of activations, as in "bfloat16".
        checkpoint_format: name in `state.formats.FORMATS`.
        read_format: the same of the read copy, or None.
    """

    decay: str
    delta_rule: bool
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    model_dtype: str
    checkpoint_format: str
    read_format: str | None = None

    @classmethod
    def of(cls, layout: StateLayout) -> Shape:
        """The shape of a layer."""
        recurrence, geometry = layout.recurrence, layout.geometry
        return cls(
            decay=recurrence.decay,
            delta_rule=recurrence.delta_rule,
            heads=geometry.heads,
            key_heads=geometry.key_heads,
            key_dim=geometry.key_dim,
            value_dim=geometry.value_dim,
            model_dtype=str(layout.model_dtype).removeprefix("torch."),
            checkpoint_format=layout.config.checkpoint_format,
            read_format=layout.config.read_format,
        )


@dataclass(frozen=True)
class Measured:
    """One row of a table.

    Args:
        shape: of the layer.
        batch, tokens, window: what was measured: rows, tokens of a row per step, configured window.
        choice: the fastest that was right.
        us: its microseconds per layer and step, averaged over the flush cycle.
        window_in_force: the window to decode with: 1 where replaying does not win at this batch.
    """

    shape: Shape
    batch: int
    tokens: int
    window: int
    choice: Choice
    us: float
    window_in_force: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Measured:
        flush = row["choice"]["flush"]
        step, form = Tile(**row["choice"]["step"]), row["choice"]["form"]
        choice = Choice(step, None if flush is None else Tile(**flush), form)
        return cls(**{**row, "shape": Shape(**row["shape"]), "choice": choice})

    def distance(self, batch: int, tokens: int, window: int) -> float:
        """How far this measurement is from a case: doublings, of which those of the tokens count most."""

        def doublings(a: int, b: int) -> float:
            return abs(math.log2(max(1, a) / max(1, b)))  # a batch may be empty

        return 16 * doublings(self.tokens, tokens) + 4 * doublings(self.window, window) + doublings(self.batch, batch)


@dataclass(frozen=True)
class Decision:
    """What a launch will use, and why.

    Args:
        choice: the tiles.
        window_in_force: see `Measured`.
        us: microseconds of the measurement it rests on, None without one.
        reason: one sentence.
    """

    choice: Choice
    window_in_force: int
    us: float | None
    reason: str

    def __str__(self) -> str:
        names = {"prepared": "step ", "single": "all in one launch", "recurrent": "record by record"}
        lines = [f"{names[self.choice.form]}  {self.choice.step}"]
        if self.choice.form == "prepared":
            lines.append(f"flush  {self.choice.flush or 'in the same launch'}")
        lines.append(f"window in force {self.window_in_force}" + ("" if self.us is None else f", {self.us:.1f} us"))
        return "\n".join([*lines, f"because {self.reason}"])


def choose(layout: StateLayout, batch: int, tokens: int) -> Choice:
    """The tiles for a step of `batch` rows with `tokens` tokens each, on the current device."""
    return explain(layout, batch, tokens).choice


def explain(layout: StateLayout, batch: int, tokens: int) -> Decision:
    """The same with its reason; print it."""
    return decide(layout, batch, tokens, current_gpu())


@cache
def decide(layout: StateLayout, batch: int, tokens: int, gpu: str | None) -> Decision:
    """The same for a GPU by name, None for a machine without one."""
    window, shape = layout.config.window, Shape.of(layout)
    # one token and several are different kernels
    rows = [row for row in table(gpu) if row.shape == shape and (row.tokens == 1) == (tokens == 1)]
    if rows:
        row = min(rows, key=lambda row: row.distance(batch, tokens, window))
        reason = f"it was the fastest measured on {gpu} at batch {row.batch}, {row.tokens} tokens, window {row.window}"
        choice = row.choice
        if choice.form == "single" and window > max(16, row.window):  # its registers would not hold such a ring
            choice, reason = replace(choice, step=_single(layout)), f"{reason}; a longer ring takes more warps"
        # a window of 1 was measured to win; the window of the row is only the one that it was measured with
        in_force = window if row.window_in_force == row.window else min(row.window_in_force, window)
        return Decision(choice, in_force, row.us, reason)
    choice, rule = heuristic(layout, batch, tokens)
    where = f"the table of {gpu}" if gpu else "no GPU, so no table"
    in_force = 1 if choice.form == "recurrent" and gpu else window
    lacking = " has no row of this shape" if gpu else ""
    return Decision(choice, in_force, None, f"{rule} ({where}{lacking})")


RECURRENT_UNITS = 2048
"""Up to this many units of 16 columns (four rows of a large layer) an H200 has less to write than to wait for."""

SINGLE_UNITS = 4 * RECURRENT_UNITS
"""Up to this many of them, launches that wait for each other cost it more than weights that many programs compute."""


def heuristic(layout: StateLayout, batch: int, tokens: int) -> tuple[Choice, str]:
    """Tiles without a measurement, and the rule they come from.

    Of the tiles that did well on an H200 (docs/experiments.md), those that compile without spills for its compute
    capability, 9.0; the tests hold layers of real models to it. Where nothing fits (16 tokens, long keys) they spill.
    """
    geometry, recurrence = layout.geometry, layout.recurrence
    channel = recurrence.decay == "channel"
    if read_codes(layout) is not None:
        step = _fit(layout, 64, 1, 1) if tokens == 1 else _drafts(layout, tokens)
        if in_columns(layout, tokens, FLUSH_ROWS.value):
            flush = _column_fold(layout)
        elif channel:  # a fold holds decays of all channels besides
            flush = _fit(layout, 32, 1, 4 if layout.config.window <= 16 else 8)
        elif tokens > 1 and solves_again(layout):  # a matrix, too, and codes and scales
            flush = _fit(layout, 16, 1, 4)
        else:  # these and random numbers need registers
            crowded = tokens > 1 or solves_again(layout) or is_random(layout)
            flush = _fit(layout, 16 if crowded else 32, 8, 2, 2)
        return Choice(step, flush), "codes are read: rows that fold get a launch of their own"
    if tokens > 1:
        wide = _fit(layout, 32, 8, 2, 3), _fit(layout, 16, 8, 2, 2)
        step, flush = (_fit(layout, 32, 1, 4), _fit(layout, 16, 1, 4)) if channel else wide
        if in_columns(layout, tokens, STEP_ROWS.value):
            step = _drafts(layout, tokens)
        if in_columns(layout, tokens, FLUSH_ROWS.value):
            flush = _column_fold(layout)
        return Choice(step, flush), "several tokens: rows that fold get a launch of their own"
    units = batch * geometry.heads * math.ceil(geometry.value_dim / 16)
    if channel:
        if units <= RECURRENT_UNITS:
            return Choice(_fit(layout, 16, 1, 1), form="recurrent"), "few rows: record by record"
        step, flush = _fit(layout, 32, 2, 1), _fit(layout, 32, 8, 4, 3)
        return Choice(step, flush), "many rows: those that fold get a launch of their own"
    if units <= SINGLE_UNITS:
        return Choice(_single(layout), form="single"), "few rows: all in one launch"
    step = _fit(layout, 32, 1, min(2, _ring_registers(layout)) if layout.model_dtype.itemsize == 4 else 1)
    return Choice(step), "many rows: weights first, then steps and folds in one launch"


def _fit(layout: StateLayout, block_p: int, units: int, num_warps: int, num_stages: int = 1) -> Tile:
    """The tile, cut to what the geometry has; longer state columns take more warps, so that registers suffice."""
    geometry = layout.geometry
    block_p = min(block_p, max(16, 1 << (geometry.value_dim - 1).bit_length()))
    longer = max(1, geometry.key_dim // 128)
    units = math.gcd(units, geometry.heads * math.ceil(geometry.value_dim / block_p))
    return Tile(block_p, units, num_warps * longer, num_stages if units > 1 else 1)


def _ring_registers(layout: StateLayout) -> int:
    """What a program holds of a ring, in units of 16 rows of 16-bit keys."""
    return padded_window(layout) // 16 * (layout.model_dtype.itemsize // 2)


def _single(layout: StateLayout) -> Tile:
    """The tile of a single launch, which holds a state and all of the ring's keys: longer ones take more warps."""
    long = layout.geometry.key_dim > 128
    return _fit(layout, 16 if long else 32, 1, max(min(4, _ring_registers(layout)), 2 if long else 1))


def _drafts(layout: StateLayout, tokens: int) -> Tile:
    """The tile of a step of several tokens: one warp (kernels/drafts.py), whose registers hold all of a unit."""
    geometry = layout.geometry
    crowded = tokens > 4 or layout.recurrence.decay == "channel" or geometry.key_dim > 128
    half = geometry.value_dim % 32 or (crowded and read_codes(layout) is None)
    return Tile(16 if half else 32)


def _column_fold(layout: StateLayout) -> Tile:
    """The tile of a flush in columns, which goes through the key rows in parts: a unit at a time, so that all programs
    have as many and a copy is rounded from what is in the L2.
    """
    return Tile(_fit(layout, 32, 1, 1).block_p)


@cache
def table(gpu: str | None) -> tuple[Measured, ...]:
    """The measured rows of a GPU, none where it was never tuned."""
    if gpu is None or not path_of(gpu).is_file():
        return ()
    return load(path_of(gpu))


def load(path: Path) -> tuple[Measured, ...]:
    """The rows of a file; ValueError when it is none of ours."""
    data = json.loads(path.read_text())
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise ValueError(f"{path.name} is no table of tuned kernels of version {VERSION}")
    return tuple(map(Measured.from_json, data["rows"]))


def save(path: Path, rows: tuple[Measured, ...], conditions: Mapping[str, Any]) -> None:
    """Write a table; rows of `path` that were measured again are replaced, others stay."""
    key = {(row.shape, row.batch, row.tokens, row.window) for row in rows}
    kept = tuple(r for r in (load(path) if path.is_file() else ()) if (r.shape, r.batch, r.tokens, r.window) not in key)
    lines = ",\n  ".join(json.dumps(row.to_json()) for row in (*kept, *rows))
    head = json.dumps({"format": FORMAT, "version": VERSION, "conditions": dict(conditions)}, indent=1)[:-2]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')
    partial.replace(path)
    table.cache_clear()
    decide.cache_clear()


def path_of(gpu: str) -> Path:
    """Where the table of a GPU is, by the name that torch gives it: "NVIDIA H200" is in `nvidia-h200.json`."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def current_gpu() -> str | None:
    """Name of the current CUDA device."""
    return _gpu(torch.cuda.current_device()) if torch.cuda.is_available() else None


@cache
def _gpu(index: int) -> str:
    return torch.cuda.get_device_name(index)
