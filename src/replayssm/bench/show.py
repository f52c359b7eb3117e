"""Tables and plots from result rows; both read the JSON format and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from replayssm.bench.rows import Conditions, Report, Row

COLUMNS = ("kernel", "view", "W", "T/a", "us", "range", "x floor", "x ordinary", "x snapshot", "GB/s", "err y", "err S")


def cells(row: Row) -> tuple[str, ...]:
    """The columns of one row."""

    def number(value: float | None, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    steps = f"{row.verify_len}/{row.accepted}" if row.verify_len > 1 else ""
    config = ",".join(str(value) for value in row.config.values())
    name = f"{row.name} ({config})" if config else row.name
    if "ratio" in row.detail:
        name += f" [median of alternated ratios {row.detail['ratio']:.2f}]"
    if "p99_over_p50" in row.detail:
        name += f" [p99/p50 {row.detail['p99_over_p50']:.3f}]"
    return (
        name,
        row.view,
        "" if row.window is None else str(row.window),
        steps,
        number(row.us),
        f"{row.low_us:.1f}-{row.high_us:.1f}",
        number(row.over_floor),
        number(row.over_ordinary),
        number(row.over_snapshot),
        number(row.gb_s, ".0f"),
        number(row.y_error, ".0e"),
        number(row.state_error, ".0e"),
    )


def groups(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by (geometry, format of the state, batch), in the order in which they came."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row.geometry}, {row.format.partition('+')[0]} state, batch {row.batch}", []).append(row)
    return list(found.items())


def headline(conditions: Conditions) -> str:
    """One line with the conditions that a reader needs beside any number."""
    copy = "" if conditions.copy_gb_s is None else f", copy {conditions.copy_gb_s:.0f} GB/s"
    c = conditions
    versions = f"driver {c.driver}, torch {c.torch_version}, triton {c.triton_version}, replayssm {c.replayssm_version}"
    return f"{c.gpu}, {versions} at {c.commit}{copy}, {c.date}: {c.command}"


def markdown(report: Report) -> str:
    """All rows as Markdown tables, with the conditions and what was refused."""
    lines = [headline(report.conditions), ""]
    for title, rows in groups(report.rows):
        lines += [f"### {title}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [_line(cells(row)) for row in rows]
        lines.append("")
    if report.refusals:
        lines += ["### Refused", ""]
        lines += [f"- {r.case}: {r.name} {dict(r.config) or ''}: {r.reason}" for r in report.refusals]
        lines.append("")
    return "\n".join(lines)


def print_tables(report: Report) -> None:
    """The same for a terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 200, markup=False)
    console.print(headline(report.conditions), style="dim", highlight=False)
    for title, rows in groups(report.rows):
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(COLUMNS):
            table.add_column(column, justify="left" if i < 2 else "right")
        for row in rows:
            table.add_row(*cells(row))
        console.print(table)
    for r in report.refusals:
        text = f"refused: {r.case}: {r.name} {dict(r.config) or ''}: {r.reason}"
        console.print(text, style="yellow", highlight=False)


def plot(report: Report, path: Path) -> None:
    """Speed over the best ordinary kernel by batch, one panel per geometry and format, one line per variant."""
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("plots need matplotlib: install replayssm[plot]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    steady = _steady(report.rows)
    panels = sorted({(row.geometry, row.format) for row in steady})
    if not panels:
        raise RuntimeError("there are no replay rows beside ordinary ones to plot")
    width = min(3, len(panels))
    height = -(-len(panels) // width)
    figure, axes = pyplot.subplots(height, width, figsize=(5 * width, 3.6 * height), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (geometry, form) in zip(axes.flat, panels, strict=False):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in steady:
            if (row.geometry, row.format) == (geometry, form) and row.over_ordinary is not None:
                steps = f", T={row.verify_len} a={row.accepted}" if row.verify_len > 1 else ""
                lines.setdefault(f"{row.name}, W={row.window}{steps}", []).append((row.batch, row.over_ordinary))
        for label, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axis.axhline(1, color="grey", linewidth=0.8)
        batches = sorted({batch for points in lines.values() for batch, _ in points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.set_xlabel("batch")
        axis.set_ylabel("times the best ordinary kernel")
        axis.set_title(f"{geometry}, {form}", fontsize=10)
        axis.legend(fontsize=7)
    figure.suptitle(f"{report.conditions.gpu}, {report.conditions.date[:10]}, {report.conditions.commit}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _steady(rows: Iterable[Row]) -> list[Row]:
    """One row per replay configuration: staggered where there is one, else the mean over the cycle."""
    chosen: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row.what == "replay" and row.view in ("cycle", "staggered") and row.ordinary_us is not None:
            key = (row.name, row.geometry, row.batch, row.format, row.window, row.verify_len, row.accepted)
            if row.view == "staggered" or key not in chosen:
                chosen[key] = row
    return list(chosen.values())


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"
