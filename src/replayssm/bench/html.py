"""One HTML file of complete decode steps, from result files: charts as inline SVG, tables, nothing to fetch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from replayssm.bench.rows import Report, Row

COLOURS = {
    "model replay": "#1f6fb2",
    "model unfused": "#6fa8d6",
    "model ordinary": "#d9822b",
    "model snapshot": "#b5472f",
    "model neighbours": "#8a8a8a",
}
LABEL, PANEL, GAP, NUMBER, LINE = 350, 210, 16, 64, 24
"""Widths of a chart's parts, and the height of its bars' lines, in pixels."""

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; font-size: 13px; margin: 0.6em 0 1.6em; }
td, th { padding: 2px 10px 2px 0; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top; }
td.text, th.text { text-align: left; }
svg { font: 12px system-ui, sans-serif; max-width: 100%; height: auto; }
h2 { border-bottom: 2px solid #ddd; margin-top: 2em; }
"""

HOW = """Each model has its real sizes and random weights in bf16. One runner decodes with every side, which differ in
what advances the recurrent states; "no state part" advances none. Times are means over whole flush cycles. A bar of
milliseconds is faint where the same step without a state part would end, and full for the state part behind that; the
thin line reaches from the median to the 99th percentile. Memory is the most that was allocated: sides of other
packages keep states of their own beside the runner's. Rows exist only where the outputs of every recurrent layer agree
with single tokens on the torch back end."""


@dataclass(frozen=True)
class Column:
    """What a table, or a panel of a chart, says of a row.

    Args:
        title: what it is, with its unit.
        value: None where a row has none.
        form: how the number is written.
    """

    title: str
    value: Callable[[Row], float | None]
    form: str

    def text(self, row: Row) -> str:
        value = self.value(row)
        return "" if value is None else format(value, self.form)


def _detail(name: str, scale: float = 1.0) -> Callable[[Row], float | None]:
    return lambda row: row.detail[name] * scale if name in row.detail else None


def _slot_bytes(row: Row) -> float | None:
    """Of rows that decode with the runner's own states; kernels of other packages have theirs."""
    return row.detail["slot_bytes"] / 2**20 if row.name.startswith("replay") else None


MS = Column("ms per step", lambda row: row.us / 1e3, ".3f")
TOKENS = Column("tokens/s", _detail("tok_s"), ",.0f")
MEMORY = Column("GB allocated", _detail("allocated_bytes", 1e-9), ".1f")
GAINS = (
    Column("times the best ordinary step", lambda row: row.over_ordinary, ".2f"),
    Column("times the best step with snapshots", lambda row: row.over_snapshot, ".2f"),
)
COLUMNS = (
    MS,
    Column("p50", _detail("p50_us", 1e-3), ".3f"),
    Column("p99", _detail("p99_us", 1e-3), ".3f"),
    Column("p99/p50", _detail("p99_over_p50"), ".3f"),
    Column("state part (SSM layers), ms", _detail("state_us", 1e-3), ".3f"),
    Column("its share", _detail("state_share"), ".0%"),
    TOKENS,
    *(Column(gain.title.replace("times", "x"), gain.value, gain.form) for gain in GAINS),
    Column("MiB of states per sequence", _slot_bytes, ".1f"),
    MEMORY,
    Column("error of outputs", lambda row: row.y_error, ".0e"),
)


def write(reports: Sequence[Report], path: Path) -> None:
    """Write `render(reports)` to a file.

    Raises:
        ValueError: no report has a complete step, measured or refused.
        OSError: the file cannot be written.
    """
    text = render(reports)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def render(reports: Sequence[Report]) -> str:
    """The page: an overview of gains, then each report with its conditions, groups of rows, and what was refused.

    Raises:
        ValueError: no report has a complete step, measured or refused.
    """
    steps = [row for report in reports for row in _steps(report)]
    if not steps and not any(refusal.what in COLOURS for report in reports for refusal in report.refusals):
        raise ValueError("there are no complete decode steps in these results; `replayssm bench step` measures them")
    gains = [row for row in steps if any(gain.value(row) is not None for gain in GAINS)]
    parts = ["<h1>Complete decode steps</h1>", f"<p>{escape(HOW)}</p>"]
    if gains:
        used = [gain for gain in GAINS if any(gain.value(row) is not None for row in gains)]
        parts += ["<h2>Replay over the best other step</h2>", _chart(gains, used, _long_label)]
    for report in reports:
        parts.append(_section(report))
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Complete decode steps</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _steps(report: Report) -> list[Row]:
    return [row for row in report.rows if row.view == "model"]


def _section(report: Report) -> str:
    conditions = {name.replace("_", " "): value for name, value in asdict(report.conditions).items() if value}
    groups: dict[str, list[Row]] = {}
    for row in _steps(report):
        groups.setdefault(_group(row), []).append(row)
    names = dict.fromkeys(row.geometry for row in _steps(report))
    parts = [
        f"<h2>{escape(', '.join([*names, report.conditions.gpu, report.conditions.date[:10]]))}</h2>",
        "<p>" + "; ".join(f"{escape(name)} {escape(str(value))}" for name, value in conditions.items()) + "</p>",
    ]
    for title, rows in groups.items():
        rows.sort(key=_precision)  # the order in which they came, within a precision
        columns = [column for column in COLUMNS if any(column.text(row) for row in rows)]
        head = ("precision", "state part by", "version", *(column.title for column in columns))
        cells = [(_precision(row), row.name, row.version, *(column.text(row) for column in columns)) for row in rows]
        parts += [f"<h3>{escape(title)}</h3>", _chart(rows, (MS, TOKENS, MEMORY), _label), _table(head, cells)]
    if report.refusals:
        refused = [(refusal.case, refusal.name, refusal.reason) for refusal in report.refusals]
        parts += ["<h3>Refused</h3>", _table(("case", "state part by", "reason"), refused)]
    return "\n".join(parts)


def _group(row: Row) -> str:
    steps = f", {row.verify_len} tokens a step of which {row.accepted} stay" if row.verify_len > 1 else ""
    where = f"{row.detail['layers']:.0f} layers, batch {row.batch}, context {row.detail['context']:.0f}"
    return f"{row.geometry}, {where}{steps}"


def _precision(row: Row) -> str:
    """Formats of the states, and the window; only replay reads copies of them."""
    if row.what in ("model ordinary", "model snapshot"):
        return row.format.partition("+")[0]
    return row.format if row.window is None else f"{row.format} W={row.window}"


def _label(row: Row) -> str:
    return f"{_precision(row)}: {row.name}"


def _long_label(row: Row) -> str:
    steps = f" T={row.verify_len}/{row.accepted}" if row.verify_len > 1 else ""
    return f"{row.geometry} B={row.batch} C={row.detail['context']:.0f}{steps} {_precision(row)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = (' class="text"' if place < 3 else "" for place in range(len(cells)))
        return (
            "<tr>"
            + "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
            + "</tr>"
        )

    return "\n".join(["<table>", line("th", head), *(line("td", row) for row in rows), "</table>"])


def _chart(rows: Sequence[Row], panels: Sequence[Column], label: Callable[[Row], str]) -> str:
    """A line per row, with one bar from zero for each panel."""
    width, height = LABEL + len(panels) * (PANEL + NUMBER + GAP), (len(rows) + 1) * LINE + 4
    out = [f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">']
    for at, row in enumerate(rows, 1):
        out.append(f'<text x="{LABEL - 8}" y="{at * LINE + 16}" text-anchor="end">{escape(label(row))}</text>')
    for place, panel in enumerate(panels):
        left = LABEL + place * (PANEL + NUMBER + GAP)
        out.append(f'<text x="{left}" y="16" font-weight="bold">{escape(panel.title)}</text>')
        ends = [max(panel.value(row) or 0.0, _late(row) if panel is MS else 0.0) for row in rows]
        scale = PANEL / max(*ends, 1e-9)
        for at, (row, end) in enumerate(zip(rows, ends, strict=True), 1):
            out += _bar(row, panel, left, at * LINE, scale)
            out.append(f'<text x="{left + end * scale + 5:.1f}" y="{at * LINE + 16}">{panel.text(row)}</text>')
    return "\n".join([*out, "</svg>"])


def _bar(row: Row, panel: Column, left: float, top: float, scale: float) -> list[str]:
    def part(begin: float, end: float, opacity: float) -> str:
        size = f'x="{left + begin * scale:.1f}" y="{top + 4}" width="{(end - begin) * scale:.1f}" height="{LINE - 8}"'
        return f'<rect {size} fill="{COLOURS[row.what]}" fill-opacity="{opacity}"/>'

    value = panel.value(row)
    if value is None:
        return []
    if panel is not MS:
        return [part(0, value, 1)]
    # noise may take less time than the step without a state part
    rest = min(value, (row.us - row.detail.get("state_us", 0.0)) / 1e3)
    faint = [part(0, rest, 0.35)] + ([part(rest, value, 1)] if rest < value else [])
    y, median, late = top + LINE / 2, left + row.detail["p50_us"] / 1e3 * scale, left + _late(row) * scale
    return [*faint, f'<line x1="{median:.1f}" y1="{y}" x2="{late:.1f}" y2="{y}" stroke="#222"/>']


def _late(row: Row) -> float:
    return row.detail["p99_us"] / 1e3
