"""What is measured: geometry, batch, format and way of stepping, and the cycle of phases that follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from replayssm.bench.geometries import Model, find
from replayssm.config import ReplayConfig
from replayssm.planner.model import MODEL_DTYPE
from replayssm.planner.step import require_work, steps_label
from replayssm.state.cursor import Phase, cycle
from replayssm.state.formats import FORMATS
from replayssm.state.layout import StateLayout, Tally


@dataclass(frozen=True)
class Case:
    """One point of the benchmark.

    Args:
        geometry: id in `geometries.MODELS`.
        batch: rows.
        format: checkpoint format, or "checkpoint+read_copy", as in "fp32+fp8".
        window: window in force.
        verify_len: tokens per step.
        accepted: tokens of each step that stay, 1..verify_len; the rest are rejected.
    """

    geometry: str
    batch: int
    format: str = "fp32"
    window: int = 16
    verify_len: int = 1
    accepted: int = 1

    def __post_init__(self) -> None:
        find(self.geometry)
        require_work(self.verify_len, self.accepted, batch=self.batch)
        ReplayConfig(self.window, self.verify_len)

    @property
    def model(self) -> Model:
        return find(self.geometry)

    @property
    def checkpoint_format(self) -> str:
        return self.format.partition("+")[0]

    @property
    def read_format(self) -> str | None:
        return self.format.partition("+")[2] or None

    @property
    def layout(self) -> StateLayout:
        """Of one layer as it is timed; ValueError where the format makes no sense."""
        config = ReplayConfig.of(self.format, window=self.window, verify_len=self.verify_len)
        return StateLayout(self.model.replayed, self.model.timed, config, MODEL_DTYPE)

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of an ordinary kernel's state: that of the checkpoint."""
        return FORMATS[self.checkpoint_format].dtype

    @property
    def state_bytes(self) -> int:
        """Bytes of one layer's states of all rows, as an ordinary kernel keeps them."""
        H, N, P = self.model.geometry.state_shape
        return self.batch * H * N * P * self.state_dtype.itemsize

    @property
    def io_bytes(self) -> int:
        """Bytes of one layer's inputs and outputs of all rows and tokens."""
        return self.batch * self.verify_len * self.layout.io_bytes

    def cycle(self) -> list[Phase]:
        """The steps of a row from one flush to the next in the steady state, the flushing one last."""
        return cycle(self.window, self.verify_len, self.accepted)

    def tally(self) -> Tally:
        """Counts of one whole cycle of all rows."""
        cycle = self.cycle()
        history = sum(phase.length for phase in cycle if not phase.due)
        return Tally(
            row_steps=self.batch * len(cycle),
            new_records=self.batch * len(cycle) * self.verify_len,
            history_records=self.batch * history,
            flushes=self.batch,
            folded_records=self.batch * cycle[-1].length,
        )

    def with_(self, **changes: Any) -> Case:
        """The same case with some fields changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        steps = steps_label(self.verify_len, self.accepted)
        return f"{self.geometry} B={self.batch} {self.format} W={self.window}{steps}"


def product(
    geometries: list[str], batches: list[int], formats: list[str], windows: list[int], steps: list[tuple[int, int]]
) -> Iterator[Case]:
    """Every combination; `steps` are pairs (verify_len, accepted)."""
    for geometry in geometries:
        for batch in batches:
            for form in formats:
                for window in windows:
                    for verify_len, accepted in steps:
                        if verify_len <= window:
                            yield Case(geometry, batch, form, window, verify_len, accepted)
