"""Everything between the projections of a recurrent layer, beside the replay kernels alone, on one GPU.

    PYTHONPATH=src python benchmarks/mixer/run.py OUT --seconds 300

OUT/mixer.json is rewritten after every row. A row called "mixer" carries, as `over_replay`, its time over that of the
row called "replay" of the same case and view. `--device cpu --backend torch` makes a dry run on tiny geometries.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from replayssm.bench.cases import Case
from replayssm.bench.mixer import Mixed
from replayssm.bench.replay import Replay
from replayssm.bench.rows import Row
from replayssm.bench.session import DeviceLost, Session, open_session

GEOMETRIES = ("nemotron3-super-120b", "qwen3.5-122b-a10b", "kimi-linear-48b-a3b", "nemotron3-nano-4b", "qwen3.5-4b")
TINY = ("tiny-mamba2", "tiny-gdn", "tiny-kda")
BATCHES = (256, 1, 64, 8)
VIEWS = ("cycle", "step", "staggered", "flush", "tree")


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Plain decode first, then four drafts at a time."""
    names = TINY if options.device == "cpu" else options.geometry or GEOMETRIES
    batches = (2,) if options.device == "cpu" else options.batch or BATCHES
    for verify_len, accepted in ((1, 1), (4, 3)):
        for batch in batches:
            for name in names:
                yield Case(name, batch, verify_len=verify_len, accepted=accepted)


def measure(session: Session, case: Case, backend: str) -> None:
    """Both candidates, and the second one's time over the first one's."""
    alone = {row.view: row for row in session.measure(Replay(backend), case, VIEWS)}
    for row in session.measure(Mixed(backend), case, VIEWS):
        if row.view in alone:
            ratio = row.us / alone[row.view].us
            session.report.rows[session.report.rows.index(row)] = _with(row, ratio)
            session.log(f"{case} {row.view}: {ratio:.3f}x the replay kernels alone")
    session.report.save()


def _with(row: Row, ratio: float) -> Row:
    return replace(row, detail={**row.detail, "over_replay": ratio})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for mixer.json")
    parser.add_argument("--seconds", type=float, default=300, help="stop starting new measurements after this long")
    parser.add_argument("--geometry", action="append", help="only these geometries")
    parser.add_argument("--batch", action="append", type=int, help="only these batches")
    parser.add_argument("--backend", default="triton", choices=("triton", "torch"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="what the conditions say was measured, where there is no git")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Error: torch sees no CUDA GPU on this machine; --device cpu makes a dry run", file=sys.stderr)
        return 2
    session = open_session(torch.device(options.device), options.out / "mixer.json", options.seconds, options.commit)
    try:
        session.measure_copy()
        for case in cases(options):
            if session.expired:
                print(f"stopped after {session.elapsed:.0f} s", flush=True)
                break
            measure(session, case, options.backend)
    except DeviceLost as lost:
        print(f"the device is lost, no more can be measured: {lost}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
