"""The page of complete decode steps: made from the committed results, whole, and in need of nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replayssm.bench.html import render
from replayssm.bench.rows import Report
from replayssm.cli.app import app

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks"
FILES = sorted((RESULTS / "steps" / "results").glob("*.json"))
EMPTY = {"meta", "rect", "line"}


class Page(HTMLParser):
    """Fails where a tag is not closed or something would be fetched; keeps cells of tables and texts of charts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[list[str]] = []
        self.drawn: list[str] = []
        self.bars = 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "img", "iframe", "object"}
        assert not {"src", "href", "xlink:href", "data"} & {name for name, _ in attrs}
        self.bars += tag == "rect"
        if tag == "tr":
            self.cells.append([])
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert "url(" not in data and "@import" not in data
        if self.open[-1:] == ["td"]:
            self.cells[-1].append(data)
        elif self.open[-1:] == ["text"]:
            self.drawn.append(data)


def test_the_page_has_every_row_and_refusal() -> None:
    reports = [Report.load(path) for path in FILES]
    text = render(reports)
    page = Page(text)
    lines = [set(line) for line in page.cells]
    rows = [row for report in reports for row in report.rows]
    assert len(rows) > 8
    for row in rows:
        detail = row.detail
        numbers = {row.name, f"{row.us / 1e3:.3f}", f"{detail['tok_s']:,.0f}", f"{detail['allocated_bytes'] / 1e9:.1f}"}
        numbers |= {f"{detail['p50_us'] / 1e3:.3f}", f"{detail['p99_us'] / 1e3:.3f}", f"{detail['p99_over_p50']:.3f}"}
        if "state_share" in detail:
            numbers |= {f"{detail['state_us'] / 1e3:.3f}", f"{detail['state_share']:.0%}"}
        if row.over_ordinary is not None:
            numbers.add(f"{row.over_ordinary:.2f}")
            assert f"{row.over_ordinary:.2f}" in page.drawn
        assert any(numbers <= line for line in lines), (row.name, numbers)
        assert f"{row.us / 1e3:.3f}" in page.drawn
    for report in reports:
        assert report.conditions.commit in text and report.conditions.driver in text
        for refusal in report.refusals:
            assert any({refusal.name, refusal.reason} <= line for line in lines)
    assert page.bars > 3 * len(rows)  # a step's bar has two parts


def test_words_of_results_are_text() -> None:
    (report, *_) = (Report.load(path) for path in FILES)
    report.rows = [replace(report.rows[0], name="<b>&", geometry='"<i>')]
    assert "<b>" not in render([report]) and "<i>" not in render([report])


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "new" / "steps.html"
    done = CliRunner().invoke(app, ["bench", "report", *map(str, FILES), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_text(encoding="utf-8") == render([Report.load(path) for path in FILES])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: [data], "is no kernel benchmark"),
        (lambda data: None, "is no kernel benchmark"),
        (lambda data: {**data, "rows": [{"name": "one"}]}, "fields missing or unknown"),
        (lambda data: {name: data[name] for name in data if name != "refused"}, "fields missing or unknown: 'refused'"),
    ],
)
def test_files_that_are_no_results_are_named(change: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(change(json.loads(FILES[0].read_text()))))
    with pytest.raises(ValueError, match=f"changed.json .*{reason}"):
        Report.load(path)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("kernels/results/2026-11-30-h200.json", "no complete decode steps"),
        ("speculation/results/memory.json", "no kernel benchmark"),
        ("nothing.json", "/nothing.json: No such file or directory\n"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(file: str, reason: str, tmp_path: Path) -> None:
    out = tmp_path / "steps.html"
    done = CliRunner().invoke(app, ["bench", "report", str(RESULTS / file), "--out", str(out)])
    assert done.exit_code == 2 and not out.exists()
    assert reason in done.stderr and done.stderr.count("\n") == 1
