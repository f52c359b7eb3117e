"""What `replayssm bench step` and `benchmarks/steps/run.py` share: from options to cases, one model, and a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from replayssm.bench import html
from replayssm.bench.rows import Conditions, Report
from replayssm.bench.show import headline
from replayssm.bench.steps import (
    PerTokenSide,
    ReplaySide,
    Side,
    StepBench,
    StepCase,
    UnfusedSide,
    build_model,
)
from replayssm.planner.model import config_of, fewer_layers, keeps_keys, read_fields
from replayssm.planner.step import require_work

Others = Callable[[StepCase], Sequence[Side]]
"""Sides to measure beside the library's own."""


@dataclass(frozen=True)
class Request:
    """The options.

    Args:
        model: an id, a config.json, or a folder that holds one.
        layers: its first layers only; None for all.
        batches, contexts, formats: every combination is measured, large batches first.
        window, verify_len, accepted: as in `StepCase`.
        read_window: window of formats with a read copy, whose folds cost more; `window` where it is None.
        report_out: where a page of charts goes in the end, or None.
        steps: steps to time.
        device: "cuda", or "cpu" for a dry run.
        json_out: where rows go, or None.
        commit: what the conditions say was measured, where there is no git.
    """

    model: str
    layers: int | None
    batches: Sequence[int]
    contexts: Sequence[int]
    formats: Sequence[str]
    window: int
    verify_len: int
    accepted: int
    steps: int
    device: str
    json_out: Path | None
    commit: str | None = None
    read_window: int | None = None
    report_out: Path | None = None

    def cases(self) -> list[StepCase]:
        """What is measured; ValueError where that makes no sense."""
        name = Path(self.model).name if Path(self.model).exists() else self.model
        return [
            StepCase(name, batch, context, form, self._window(form), self.verify_len, self.accepted)
            for context in self.contexts
            for batch in sorted(self.batches, reverse=True)
            for form in self.formats
        ]

    def _window(self, form: str) -> int:
        return self.read_window if self.read_window is not None and "+" in form else self.window


def run(request: Request, others: Others = lambda case: ()) -> Report:
    """Measure and print; the report has every row, and what was refused.

    Raises:
        ValueError: there is no such model or device, or a case makes no sense.
    """
    cases = request.cases()
    fields = read_fields(request.model)
    require_work(steps=request.steps)
    if request.device not in ("cuda", "cpu"):
        raise ValueError(f'device must be "cuda" or "cpu", got {request.device!r}')
    if request.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("bench step needs a CUDA GPU, and torch sees none here; --device cpu makes a dry run")
    device = torch.device(request.device)
    part, attention = fewer_layers(fields, request.layers), keeps_keys(config_of(fields))
    if True in attention and not any(attention[: request.layers]):
        raise ValueError(
            f"none of the first {request.layers} layers of {request.model} is one of attention, in which transformers "
            f"counts the tokens of a cache; --layers {1 + attention.index(True)} is the fewest"
        )
    report = Report(Conditions.collect(device, request.commit), request.json_out)
    bench = StepBench(build_model(part, device), report, request.steps)
    for case in cases:
        # a window of 1 has no room for drafts, and no read copy
        plain = [PerTokenSide()] if case.verify_len == 1 else []
        # the neighbours are the same whatever format is read
        unfused: list[Side] = [UnfusedSide()] if case.format == request.formats[0] else []
        bench.measure(case, [*others(case), *plain, ReplaySide(), *unfused])
    print_table(report)
    if request.report_out is not None:
        html.write([report], request.report_out)
    return report


def print_table(report: Report) -> None:
    """All rows of a report that are complete steps."""
    console = Console(width=None if Console().is_terminal else 200, highlight=False, markup=False)
    console.print(headline(report.conditions), style="dim")
    table = Table()
    for heading in (
        "model",
        "batch",
        "context",
        "precision",
        "T/a",
        "state part by",
        "ms",
        "p99/p50",
        "state",
        "tok/s",
    ):
        table.add_column(heading)
    for heading in ("x ordinary", "x snapshot", "GB"):
        table.add_column(heading, justify="right")
    for row in (row for row in report.rows if row.view == "model"):
        detail = row.detail
        ratios = ["" if ratio is None else f"{ratio:.2f}" for ratio in (row.over_ordinary, row.over_snapshot)]
        table.add_row(
            row.geometry,
            str(row.batch),
            f"{detail['context']:.0f}",
            row.format + ("" if row.window is None else f" W={row.window}"),
            f"{row.verify_len}/{row.accepted}",
            row.name,
            f"{row.us / 1e3:.3f}",
            f"{detail['p99_over_p50']:.3f}",
            f"{detail['state_share']:.0%}" if "state_share" in detail else "",
            f"{detail['tok_s']:,.0f}",
            *ratios,
            f"{detail['allocated_bytes'] / 1e9:.1f}",
        )
    console.print(table)
    for refusal in report.refusals:
        console.print(f"refused: {refusal.case}: {refusal.name}: {refusal.reason}", style="yellow")
