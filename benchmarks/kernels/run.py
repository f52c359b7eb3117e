"""Kernels of this library against the ordinary kernels of other packages, in one time-boxed run on one GPU.

    python benchmarks/kernels/fetch_peers.py                       # once, with a network
    PYTHONPATH=src:.carry/peers python benchmarks/kernels/run.py OUT --seconds 400

Stages run in order of importance and OUT/kernels.json is rewritten after every row, so a run that is cut off still
leaves what it had. `--stage` picks some of them; ratios are always against ordinary kernels of the same run, so a stage
that compares measures the ordinary kernels it needs first. A kernel that fails or is wrong is listed with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from peers import all_peers  # noqa: E402 - the folder of this script is no package

from replayssm.bench.candidate import Candidate  # noqa: E402
from replayssm.bench.cases import Case  # noqa: E402
from replayssm.bench.replay import Replay  # noqa: E402
from replayssm.bench.rows import Report  # noqa: E402
from replayssm.bench.session import DeviceLost, Session, open_session  # noqa: E402
from replayssm.bench.show import markdown, plot  # noqa: E402

SUPER, QWEN, KIMI = "nemotron3-super-120b", "qwen3.5-122b-a10b", "kimi-linear-48b-a3b"
OTHERS = ("nemotron3-nano-4b", "qwen3.5-4b", "glm-5.3-flash", "nemotron-h-56b")
TINY = {SUPER: "tiny-mamba2", QWEN: "tiny-gdn", KIMI: "tiny-kda"}
BATCHES = (1, 8, 64, 256)
DRAFTS = ((4, 3), (8, 5))


class Expired(Exception):
    """The time box is used up."""


class Run:
    """A session with its candidates, and the stages that may be asked for."""

    def __init__(self, session: Session, peers: list[Candidate], ours: list[Candidate], options: argparse.Namespace):
        self.session, self.peers, self.ours, self.options = session, peers, ours, options
        self._done: set[Case] = set()

    # ---- stages, by importance

    def baseline(self) -> None:
        """Floors and fp32 ordinary kernels of the two main geometries."""
        for case in self.cases((SUPER, QWEN), BATCHES):
            self.session.measure_floor(case)
            self.ordinary(case)

    def main(self) -> None:
        """Our kernels there."""
        self.replay(self.cases((SUPER, QWEN), (256, 64, 1, 8)))

    def alternated(self) -> None:
        """Our steady state and the best ordinary kernel in turn, five times."""
        for case in self.cases((SUPER, QWEN), BATCHES):
            self.ordinary(case)
            for candidate in self.ours:
                self.require_time()
                self.session.alternate(candidate, self.peers, case)

    def bits16(self) -> None:
        """16-bit states."""
        self.replay(self.cases((SUPER, QWEN), (256, 64, 1, 8), formats=("bf16",)))

    def kda(self) -> None:
        """Kimi Delta Attention."""
        self.replay(self.cases((KIMI,), (256, 64, 1, 8)))

    def snapshots(self) -> None:
        """The speculative step of the ordinary kernels, with one state stored per draft."""
        for case in self.cases((SUPER, QWEN), (64, 256, 8, 1), steps=DRAFTS):
            self.speculative(case)

    def verify(self) -> None:
        """Ours, beside snapshots and the ordinary plain step."""
        for case in self.cases((SUPER, QWEN), (64, 256, 8, 1, 512), steps=DRAFTS):
            self.speculative(case)
            self.replay([case])

    def windows(self) -> None:
        """Other windows of plain decode."""
        self.replay(self.cases((SUPER, QWEN), (1, 8), windows=(1,)))
        for window in (32, 64, 24, 8):
            self.replay(self.cases((SUPER, QWEN), (256, 64), windows=(window,)))

    def draft_windows(self) -> None:
        """Windows of verifying four tokens."""
        for case in self.cases((SUPER, QWEN), (256, 64), windows=(16, 32, 24, 64, 8), steps=DRAFTS[:1]):
            self.speculative(case)
            self.replay([case])

    def reads(self) -> None:
        """Low-precision read copies beside an fp32 checkpoint."""
        for batches, windows in (((256, 64), (32,)), ((8, 1), (32,)), ((256, 64), (16, 64))):
            for form in ("fp32+nvfp4", "fp32+fp8", "fp32+int8"):
                self.replay(self.cases((SUPER, QWEN), batches, formats=(form,), windows=windows))

    def steps(self) -> None:
        """Times of 1,000 consecutive steps."""
        for case in self.cases((SUPER, QWEN, KIMI), (256,)):
            for candidate in self.ours:
                self.require_time()
                if isinstance(candidate, Replay):
                    self.session.measure_steps(candidate, case)

    def others(self) -> None:
        """The other geometries."""
        self.replay(self.cases(OTHERS, (256, 64, 1, 8)))

    def large(self) -> None:
        """Batch 512 and the batches between."""
        self.replay(self.cases((SUPER, QWEN), (512, 2, 4, 16, 32, 128)))

    def kda_more(self) -> None:
        """KDA in 16 bit and with drafts."""
        self.replay(self.cases((KIMI,), (256, 64), formats=("bf16",)))
        for case in self.cases((KIMI,), (64, 256), steps=DRAFTS[:1]):
            self.speculative(case)
            self.replay([case])

    # ---- parts

    def replay(self, cases: Iterable[Case]) -> None:
        """The ordinary kernels of each case, then ours."""
        for case in cases:
            self.ordinary(case)
            for candidate in self.ours:
                self.require_time()
                self.session.measure(candidate, case)

    def ordinary(self, case: Case) -> None:
        """Every ordinary kernel of the case's geometry, batch and state dtype, once per run."""
        self._peers(case.with_(verify_len=1, accepted=1, window=16, format=case.checkpoint_format), "ordinary")

    def speculative(self, case: Case) -> None:
        """Every snapshot kernel of the case, once per run."""
        self._peers(case.with_(window=16, format=case.checkpoint_format), "snapshot")

    def _peers(self, case: Case, what: str) -> None:
        if case in self._done or (self.options.quick and case.batch not in BATCHES):
            return
        known = self.session.best_ordinary(case) if what == "ordinary" else self.session.best_snapshot(case)
        if known is not None:  # from --baselines
            return
        for peer in self.peers:
            if peer.what == what and any(part in peer.name for part in self.options.peer or [""]):
                self.require_time()
                self.session.measure(peer, case)
        self._done.add(case)

    def cases(
        self,
        geometries: Iterable[str],
        batches: Iterable[int],
        formats: Iterable[str] = ("fp32",),
        windows: Iterable[int] = (16,),
        steps: Iterable[tuple[int, int]] = ((1, 1),),
    ) -> list[Case]:
        """Every combination that the command line leaves in, batches outermost: the important ones of all first."""
        options = self.options
        names = [g for g in geometries if not options.geometry or g in options.geometry]
        chosen = [b for b in batches if not options.batch or b in options.batch]
        if options.device == "cpu":
            names, chosen = sorted({TINY.get(name, "odd-mamba2") for name in names}), [2]
        return [
            Case(name, batch, form, window, *tokens)
            for form in formats
            for tokens in steps
            for window in windows
            for batch in chosen
            for name in names
        ]

    def require_time(self) -> None:
        if self.session.expired:
            raise Expired


STAGES: dict[str, Callable[[Run], None]] = {
    "baseline": Run.baseline,
    "main": Run.main,
    "alternated": Run.alternated,
    "bits16": Run.bits16,
    "kda": Run.kda,
    "snapshots": Run.snapshots,
    "verify": Run.verify,
    "windows": Run.windows,
    "draft_windows": Run.draft_windows,
    "reads": Run.reads,
    "steps": Run.steps,
    "others": Run.others,
    "large": Run.large,
    "kda_more": Run.kda_more,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for kernels.json, kernels.md and kernels.png")
    parser.add_argument("--seconds", type=float, default=400, help="stop starting new measurements after this long")
    parser.add_argument("--stage", action="append", choices=list(STAGES), help="only these stages, in the order given")
    parser.add_argument("--geometry", action="append", help="only these geometries of the stages")
    parser.add_argument("--batch", action="append", type=int, help="only these batches of the stages")
    parser.add_argument("--peer", action="append", help="only peers whose name contains this, or another that is given")
    parser.add_argument("--backend", default="triton", help='our back end, "triton" or "torch"; "none" for peers only')
    parser.add_argument(
        "--option", action="append", default=[], help="a ReplayConfig field for our variant: name=value"
    )
    parser.add_argument("--max-configs", type=int, help="try only the first so many configurations of each kernel")
    parser.add_argument("--baselines", type=Path, help="while developing: ordinary rows of an earlier kernels.json")
    parser.add_argument("--quick", action="store_true", help="no ordinary kernels at batches other than 1, 8, 64, 256")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run on tiny geometries")
    parser.add_argument("--commit", help="what the conditions say was measured, where there is no git")
    options = parser.parse_args()
    if options.device == "cpu" and options.max_configs is None:
        options.max_configs = 1
    return options


def variants(options: argparse.Namespace) -> list[Candidate]:
    """Our candidates: the plain one, and with --option one more."""
    if options.backend == "none":
        return []
    found: list[Candidate] = [Replay(options.backend)]
    if options.option:
        given: dict[str, object] = {}
        for text in options.option:
            name, _, value = text.partition("=")
            given[name] = {"true": True, "false": False}.get(value.lower(), int(value) if value.isdigit() else value)
        found.append(Replay(options.backend, f"replay {' '.join(options.option)}", **given))
    return found


def main() -> int:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Error: torch sees no CUDA GPU on this machine; --device cpu makes a dry run", file=sys.stderr)
        return 2
    peers, missing = all_peers()
    device, path = torch.device(options.device), options.out / "kernels.json"
    session = open_session(device, path, options.seconds, options.commit, options.max_configs)
    if options.baselines:
        earlier = [row for row in Report.load(options.baselines).rows if row.what in ("ordinary", "snapshot")]
        session.report.rows += [replace(row, name=f"{row.name} [earlier run]") for row in earlier]
    for name, reason in missing:
        print(f"peers of {name} cannot be imported: {reason}", flush=True)
    print(f"peers: {', '.join(peer.name for peer in peers)}", flush=True)
    run = Run(session, peers, variants(options), options)
    status = 0
    try:
        session.measure_copy()
        for name in options.stage or STAGES:
            print(f"--- {name}", flush=True)
            STAGES[name](run)
    except Expired:
        print(f"stopped after {session.elapsed:.0f} s", flush=True)
    except DeviceLost as lost:
        print(f"the device is lost, no more can be measured: {lost}", flush=True)
        status = 1
    session.report.save()
    (options.out / "kernels.md").write_text(markdown(session.report))
    try:
        plot(session.report, options.out / "kernels.png")
    except RuntimeError as reason:
        print(f"no plot: {reason}")
    return status


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    raise SystemExit(main())
