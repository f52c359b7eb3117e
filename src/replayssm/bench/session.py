"""Measuring candidates case by case: sweep, check, time, compare, write down; what fails is noted and not fatal."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from replayssm.bench.candidate import Candidate, Config, Prepared
from replayssm.bench.cases import Case
from replayssm.bench.floors import Floors
from replayssm.bench.reference import CheckFailed, Errors
from replayssm.bench.replay import Replay
from replayssm.bench.rows import Conditions, Refusal, Report, Row, best
from replayssm.bench.timing import Timer, Timing, rotation, spread, timer_for
from replayssm.planner.step import steps_label

STEPS_BYTES = 60e9
"""Most memory for the layers of a whole step."""


class DeviceLost(Exception):
    """The device no longer answers (an earlier kernel crashed it): the run must end."""


class Session:
    """One run on one device.

    Args:
        device: where to measure.
        report: where results go.
        seconds: time box; `expired` says when it is over. None for no limit.
        log: receives a line per result.
        timer: how to time; by default that of the device.
        max_configs: how many configurations of each candidate to try; None for all.
    """

    def __init__(
        self,
        device: torch.device,
        report: Report,
        seconds: float | None = None,
        log: Callable[[str], None] = print,
        timer: Timer | None = None,
        max_configs: int | None = None,
    ) -> None:
        self.device, self.report, self.log = device, report, log
        self.max_configs = max_configs
        self.timer = timer_for(device) if timer is None else timer
        self.floors = Floors(self.timer, device)
        self._begin, self._seconds = time.monotonic(), seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self._begin

    @property
    def expired(self) -> bool:
        """Whether the time box is used up."""
        return self._seconds is not None and self.elapsed > self._seconds

    # ---- conditions

    def measure_copy(self) -> float:
        """The copy bandwidth, into the report's conditions."""
        rate = self.floors.copy_gb_s()
        self.report.conditions = replace(self.report.conditions, copy_gb_s=rate)
        self.report.save()
        self.log(f"[{self.elapsed:5.0f}s] copy {rate:.0f} GB/s")
        return rate

    def measure_floor(self, case: Case) -> Row:
        """The time to read this case's states once."""
        us = self.floors.us(case.state_bytes)
        row = self._row("read floor", "read kernel", "", case, "step", Timing(us, us, us, 0), case.state_bytes)
        return self._add(replace(row, window=None))

    # ---- candidates

    def measure(self, candidate: Candidate, case: Case, views: Sequence[str] | None = None) -> list[Row]:
        """Rows of the candidate's best configuration, one per view; none where it refuses, fails or is wrong."""
        reason = candidate.refuses(case)
        if reason is not None:
            if candidate.what == "replay":
                self._refuse(candidate, case, {}, reason)
            return []
        found: list[Row] = []
        self._give_back()
        with self._noted(candidate, case, {}):
            prepared = candidate.setup(case, self.device)
            chosen = self._sweep(candidate, case, prepared)
            if chosen is None:
                return []
            config, errors = chosen
            for name, view in prepared.views(config).items():
                if views is not None and name not in views:
                    continue
                timing = self.timer.time(*rotation(view.steps, prepared.layers))
                row = self._row(candidate.what, candidate.name, candidate.version, case, name, timing, view.bytes)
                row = replace(row, config=dict(config), y_error=errors.y, state_error=errors.state)
                if view.window is not None:
                    row = replace(row, detail={"window_in_force": float(view.window)})
                found.append(self._add(row))
        return found

    def _sweep(self, candidate: Candidate, case: Case, prepared: Prepared) -> tuple[Config, Errors] | None:
        """The fastest configuration that is right; wrong or failing ones are noted."""
        best_us, chosen = float("inf"), None
        configs = prepared.configs[: self.max_configs]
        for config in configs:
            with self._noted(candidate, case, config):
                errors = prepared.check(config)
                if len(configs) == 1:
                    return config, errors
                view = next(iter(prepared.views(config).values()))
                us = self.timer.time(*rotation(view.steps, prepared.layers), samples=7).us
                if us < best_us:
                    best_us, chosen = us, (config, errors)
        return chosen

    def alternate(self, candidate: Candidate, rivals: Sequence[Candidate], case: Case, rounds: int = 5) -> Row | None:
        """The candidate's steady state against the best of its rivals, launched in turn: the median of the ratios.

        Both run with the configuration that was best when they were measured alone.
        """
        measured = best(row for row in self.report.rows if row.what == "replay" and self._is_of(row, candidate, case))
        config = None if measured is None else measured.config
        ordinary = self.best_ordinary(case)
        if ordinary is None:
            return None
        rival = next(r for r in rivals if r.name == ordinary.name)
        plain = case.with_(verify_len=1, accepted=1, format=case.checkpoint_format)
        self._give_back()
        with self._noted(candidate, case, {}):
            ours = candidate.setup(case, self.device)
            config = ours.configs[0] if config is None else config
            errors = ours.check(config)
            views = ours.views(config)
            name = "staggered" if "staggered" in views else "cycle"
            theirs = rival.setup(plain, self.device)
            theirs.check(ordinary.config)
            step = theirs.views(ordinary.config)["step"]
            bodies = [rotation(views[name].steps, ours.layers), rotation(step.steps, theirs.layers)]
            mine, other = self.timer.alternate(bodies, rounds)
            ratios = sorted(b / a for a, b in zip(mine, other, strict=True))
            timing = Timing.of(mine)
            row = self._row("alternated", candidate.name, candidate.version, case, name, timing, views[name].bytes)
            middle = ratios[len(ratios) // 2]
            detail = {"ratio": middle, "ratio_low": ratios[0], "ratio_high": ratios[-1]}
            ordinary_us = Timing.of(other).us
            row = replace(row, config=dict(config), ordinary_us=ordinary_us, detail=detail)
            row = replace(row, y_error=errors.y, state_error=errors.state)
            return self._add(row)
        return None

    def measure_steps(self, candidate: Replay, case: Case, count: int = 1000) -> Row | None:
        """Whole steps of the model's layers with the cursor moving: median and 99th percentile, per layer.

        The plan, which is made once per step, counts here; it is spread over as many layers as memory allows.
        """
        self._give_back()
        with self._noted(candidate, case, {}):
            affordable = int(STEPS_BYTES / (1.4 * case.state_bytes))  # ring and read copy besides
            prepared = candidate.setup(case, self.device, min(case.model.layers, affordable))
            errors = prepared.check({})
            times = [us / prepared.layers for us in self.timer.series(prepared.live({}), count)]
            detail = spread(times) | {"layers": float(prepared.layers)}
            timing = Timing(detail["p50_us"], min(times), max(times), len(times))
            row = self._row("steps", candidate.name, candidate.version, case, "live", timing, None)
            row = replace(row, y_error=errors.y, state_error=errors.state, detail=detail)
            return self._add(row)
        return None

    # ---- comparisons

    def best_ordinary(self, case: Case) -> Row | None:
        """The fastest ordinary kernel measured in this run for the case's geometry, batch and state dtype."""
        return self._best("ordinary", case, 1)

    def best_snapshot(self, case: Case) -> Row | None:
        """The same of the snapshot kernels, for the case's verify_len."""
        return self._best("snapshot", case, case.verify_len)

    def _best(self, what: str, case: Case, verify_len: int) -> Row | None:
        wanted = (what, case.geometry, case.batch, case.checkpoint_format, verify_len)
        return best(
            row for row in self.report.rows if (row.what, row.geometry, row.batch, row.format, row.verify_len) == wanted
        )

    # ---- helpers

    @staticmethod
    def _is_of(row: Row, candidate: Candidate, case: Case) -> bool:
        """Whether a row is of this very candidate and case."""
        ours = (candidate.name, case.geometry, case.batch, case.format, case.window, case.verify_len, case.accepted)
        return ours == (row.name, row.geometry, row.batch, row.format, row.window, row.verify_len, row.accepted)

    def _row(
        self, what: str, name: str, version: str, case: Case, view: str, timing: Timing, moved: float | None
    ) -> Row:
        ours = what in ("replay", "alternated", "steps")
        compared = ours and view != "path"  # that is no step
        ordinary = self.best_ordinary(case) if compared else None
        snapshot = self.best_snapshot(case) if compared and case.verify_len > 1 else None
        return Row(
            what=what,
            name=name,
            version=version,
            geometry=case.geometry,
            batch=case.batch,
            format=case.format,
            view=view,
            us=timing.us,
            low_us=timing.low,
            high_us=timing.high,
            window=case.window if ours else None,
            verify_len=case.verify_len,
            accepted=case.accepted,
            bytes=moved,
            floor_us=None if moved is None else self.floors.us(moved),
            ordinary_us=None if ordinary is None else ordinary.us,
            snapshot_us=None if snapshot is None else snapshot.us,
        )

    def _add(self, row: Row) -> Row:
        self.report.add(row)
        steps = steps_label(row.verify_len, row.accepted)
        window = "" if row.window is None else f" W={row.window}"
        ratios = [
            f"{value:.2f}x {label}"
            for value, label in (
                (row.over_floor, "floor"),
                (row.over_ordinary, "over ordinary"),
                (row.over_snapshot, "over snapshots"),
            )
            if value is not None
        ]
        detail = " ".join(f"{name}={value:.3f}" for name, value in row.detail.items())
        config = " ".join(f"{name}={value}" for name, value in row.config.items())
        self.log(
            f"[{self.elapsed:5.0f}s] {row.geometry} B={row.batch} {row.format}{window}{steps} | {row.name} {row.view}: "
            f"{row.us:.2f} us  {', '.join(ratios)} {detail} {config}".rstrip()
        )
        return row

    @contextmanager
    def _noted(self, candidate: Candidate, case: Case, config: Config) -> Iterator[None]:
        """Whatever goes wrong inside becomes a refusal, unless the device is lost."""
        try:
            yield
        except (KeyboardInterrupt, DeviceLost):
            raise
        except Exception as error:  # noqa: BLE001 - a peer or a kernel under development may raise anything
            reason = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
            self._refuse(candidate, case, config, " ".join(reason.split())[:400])
            self._require_device()
            gc.collect()  # the trace kept the case's memory alive

    def _refuse(self, candidate: Candidate, case: Case, config: Config, reason: str) -> None:
        self.report.refuse(Refusal(candidate.what, candidate.name, str(case), dict(config), reason))
        self.log(f"[{self.elapsed:5.0f}s] REFUSED {case} | {candidate.name} {dict(config) or ''}: {reason}")

    def _require_device(self) -> None:
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLost(str(error).splitlines()[0]) from None

    def _give_back(self) -> None:
        """Return cached memory: cases differ too much in size for blocks to be used again."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def open_session(
    device: torch.device,
    path: Path | None,
    seconds: float | None = None,
    commit: str | None = None,
    max_configs: int | None = None,
) -> Session:
    """A session whose report goes to `path`."""
    return Session(device, Report(Conditions.collect(device, commit), path), seconds, max_configs=max_configs)
