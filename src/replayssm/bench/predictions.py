"""What the planner predicts beside the measured rows of `replayssm bench` and `benchmarks`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from replayssm.bench.cases import Case
from replayssm.bench.rows import Report, Row, best
from replayssm.bench.steps import PerTokenSide
from replayssm.planner.gpus import Fit, Gpu, KernelCosts
from replayssm.planner.kernels import layer_times, ordinary_us
from replayssm.planner.model import config_of, fewer_layers, known_configs, sizes_of
from replayssm.planner.step import Workload, plan, step_time, steps_label

LIMIT = 0.15
"""What a prediction may be off."""

WINDOW_OF = {False: 16, True: 32}
"""The window that labels leave out, without and with a read copy."""


@dataclass(frozen=True)
class Difference:
    """One row: which, what was measured, what is predicted."""

    label: str
    measured_us: float
    predicted_us: float

    @property
    def relative(self) -> float:
        return self.predicted_us / self.measured_us - 1


def differences(costs: KernelCosts, reports: Iterable[Report]) -> list[Difference]:
    """Every row of a replay kernel, and the best ordinary and snapshot kernel of each case.

    What several reports measured is taken from the last one: kernels get faster.
    """
    rows = {_label(row): row for report in reports for row in _rows(report)}
    return [Difference(label, row.us, _predicted(costs, row)) for label, row in rows.items()]


def step_differences(gpu: Gpu, reports: Iterable[Report]) -> list[Difference]:
    """Every row of a complete step of a known model, as `replayssm bench step` writes them.

    A plan knows no layers that are not fused: their rows are compared with those that are.
    """
    found, known = [], known_configs()
    for row in (row for report in reports for row in report.rows):
        if row.view != "model" or row.geometry not in known:
            continue
        model = sizes_of(row.geometry, config_of(fewer_layers(known[row.geometry], int(row.detail["layers"]))))
        work = Workload(row.batch, int(row.detail["context"]), row.verify_len, row.accepted)
        if row.what == "model neighbours":
            time = step_time(model, gpu, work, 0.0)
        elif row.name == PerTokenSide.name:
            time = plan(model, gpu, row.format.partition("+")[0], work, 1).time
        else:
            planned = plan(model, gpu, row.format, work, row.window or 16)
            time = planned.time if row.what in ("model replay", "model unfused") else planned.ordinary_time
        label = f"{_label(row)} {row.name}, context {work.context}"
        found.append(Difference(label, row.us, time.total))
    return found


def summary(found: Sequence[Difference], sources: Sequence[str]) -> Fit:
    """How far all of them are off."""
    sizes = [abs(row.relative) for row in found]
    beyond = sum(size > LIMIT for size in sizes)
    return Fit(len(found), round(statistics.median(sizes), 3), round(max(sizes), 3), beyond, tuple(sources))


def _rows(report: Report) -> Iterator[Row]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in report.rows:
        # an in-force window other than the case's is a choice that the prediction does not make
        # and the path of a tree moves ring rows, which is no step
        if row.what in ("replay", "steps") and "window_in_force" not in row.detail and row.view != "path":
            yield row
        elif row.what in ("ordinary", "snapshot"):
            groups.setdefault((row.what, row.geometry, row.batch, row.format, row.verify_len), []).append(row)
    for rows in groups.values():
        fastest = best(rows)
        assert fastest is not None
        yield fastest


def _predicted(costs: KernelCosts, row: Row) -> float:
    case = Case(row.geometry, row.batch, row.format, row.window or 16, row.verify_len, row.accepted)
    layout = case.layout
    if row.what in ("ordinary", "snapshot"):
        return ordinary_us(costs, layout, case.batch, case.verify_len)
    times = layer_times(costs, layout, case.batch, case.accepted)
    # a tree is as many tokens as a chain
    return float(getattr(times, {"live": "staggered", "tree": "step"}.get(row.view, row.view)))


def _label(row: Row) -> str:
    steps = steps_label(row.verify_len, row.accepted)
    window = "" if row.window in (None, WINDOW_OF["+" in row.format]) else f" W={row.window}"
    return f"{row.geometry} B={row.batch} {row.format} {row.what} {row.view}{window}{steps}"
