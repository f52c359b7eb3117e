"""Whether what was timed is right: errors against the recurrence's own definition in fp64, on some of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.bench.geometries import Model

MAX_ROWS = 8
"""Rows compared per check: the first, the last and some between; fp64 states of all rows would not fit in the lease."""


class CheckFailed(Exception):
    """The outputs or the state of what was to be timed are wrong: no number is reported."""


@dataclass(frozen=True)
class Errors:
    """Relative Frobenius errors against fp64, the worst row's. NaN anywhere counts as infinite.

    Args:
        y: of the outputs.
        state: of the state afterwards.
    """

    y: float
    state: float

    def worst(self, other: Errors) -> Errors:
        """Both together."""
        return Errors(max(self.y, other.y), max(self.state, other.state))

    def require(self, limit: Errors) -> Errors:
        """These errors, or CheckFailed where one is above its limit."""
        if not (self.y <= limit.y and self.state <= limit.state):
            raise CheckFailed(
                f"error against fp64: y {self.y:.1e} (limit {limit.y:.0e}), "
                f"state {self.state:.1e} (limit {limit.state:.0e})"
            )
        return self


def sample_rows(batch: int) -> list[int]:
    """Which rows a check compares."""
    count = min(batch, MAX_ROWS)
    return sorted({round(i * (batch - 1) / max(count - 1, 1)) for i in range(count)})


def recurrent(
    model: Model, inputs: Mapping[str, Tensor], params: Mapping[str, Tensor], state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition over T tokens of R rows, in the dtype of `state`.

    Args:
        model: whose recurrence.
        inputs: fields [R, T, ...].
        params: fields of one layer.
        state: [R, H, N, P].

    Returns:
        y [R, T, H, P] and the states after the last token.
    """

    def row(fields: dict[str, Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
        return model.replayed.recurrent(fields, params, start, model.geometry)

    y, after = torch.vmap(row)(dict(inputs), state)
    return y, after


def relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref|| of the worst row (first dim), in fp64."""
    difference = (out.double() - ref.double()).flatten(1).norm(dim=1)
    error = difference / ref.double().flatten(1).norm(dim=1).clamp(min=1e-300)
    return float(torch.nan_to_num(error, nan=torch.inf).max())
