"""The tables of the README say what the committed results say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from replayssm.bench.rows import Report, Row

ROOT = Path(__file__).resolve().parents[2]
GEOMETRIES = {"Nemotron-3 Super": "nemotron3-super-120b", "Qwen3.5 122B": "qwen3.5-122b-a10b"}
WAYS = {
    # what a line begins with: format, window, tokens of a step, how many of them stay
    "": ("fp32", 16, 1, 1),
    "fp32 recurrence, NVFP4 reads, window 32": ("fp32+nvfp4", 32, 1, 1),
    "fp32 recurrence, fp8 reads, window 32": ("fp32+fp8", 32, 1, 1),
    "bf16 states": ("bf16", 16, 1, 1),
    "fp32, drafts: 4 tokens a step, 3 stay": ("fp32", 16, 4, 3),
    "fp32, drafts: 8 tokens a step, 5 stay": ("fp32", 16, 8, 5),
}


def lines() -> Iterator[tuple[str, str, int, str, str, str]]:
    """(way, layer, batch, ordinary, together, staggered) of both tables of kernels; empty cells repeat those above."""
    way = layer = ""
    columns = 0
    for text in (ROOT / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in text.strip("|").split("|")]
        if not text.startswith("|"):
            columns = 0
        elif cells[0] in ("layer of", "way"):
            columns, way, layer = len(cells), "", ""
        elif columns and not cells[0].startswith("---"):
            if columns == 6:
                way = cells.pop(0) or way
            layer = cells[0] or layer
            yield way, layer, int(cells[1]), cells[2], cells[3], cells[4]


LINES = list(lines())


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    reports = (ROOT / "benchmarks" / "kernels" / "results").glob("*.json")
    kept = [path for path in reports if "sketches" not in path.name]
    return [row for path in kept for row in Report.load(path).rows if row.what == "replay"]


def test_both_tables_are_read() -> None:
    assert {way for way, *_ in LINES} == set(WAYS)
    assert len(LINES) > 25


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(map(str, line[:3])).strip())
def test_every_number_was_measured(line: tuple[str, str, int, str, str, str], rows: list[Row]) -> None:
    way, layer, batch, other, *ours = line
    geometry = next(name for title, name in GEOMETRIES.items() if layer.startswith(title))
    assert any(ours)
    for view, cell in zip(("cycle", "staggered"), ours, strict=True):
        if not cell:  # no row of the run was left for it
            continue
        found = {
            f"{rounded(us, other)}: {rounded(row.us, cell.split(', ')[0])}, {us / row.us:.2f}x"
            for row in rows
            if (row.geometry, row.batch, row.view) == (geometry, batch, view)
            and (row.format, row.window, row.verify_len, row.accepted) == WAYS[way]
            and (us := row.ordinary_us if row.verify_len == 1 else row.snapshot_us) is not None
        }
        assert f"{other}: {cell}" in found, f"{view}: {sorted(found)}"


def rounded(us: float, as_in: str) -> str:
    """With as many decimals as a cell has."""
    return f"{us:,.{len(as_in.partition('.')[2])}f}"
