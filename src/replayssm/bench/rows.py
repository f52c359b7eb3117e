"""The one format of every kernel benchmark result: rows, what was refused and why, and the conditions of the run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Row:
    """One measured number with everything needed to read it.

    Args:
        what: "ordinary", "snapshot", "replay", "alternated", "steps" or "read floor"; of whole models "model replay",
            "model unfused", "model ordinary", "model snapshot" and "model neighbours", of vLLM "engine ordinary" and
            "engine replay".
        name: the kernel: a peer, or a variant of ours.
        version: package and version it comes from.
        geometry, batch, format, window, verify_len, accepted: the case; window is None for kernels without one.
        view: "step", "cycle" (mean over all phases, all rows at one phase), "staggered" (rows at all phases),
            "flush" (all rows flush), "tree" (as "step", two drafts behind each token), "path" (the ring rows of one of
            its branches move together) or "live" (whole steps); "model" is the complete step of a
            model, "engine" one of vLLM.
        config: launch configuration, the best of those swept.
        us: microseconds per layer and launch, the median; of a model, those of a step, the mean over flushes.
        low_us, high_us: fastest and slowest sample.
        bytes: what the launch must move.
        floor_us: time to read that many bytes with the read kernel of the same run.
        ordinary_us: the best ordinary kernel of the same run, geometry, batch and state dtype; one token per step.
        snapshot_us: the best snapshot kernel of the same run, also with the same verify_len.
        y_error, state_error: relative errors against fp64 of this very configuration.
        detail: further numbers, by name.
    """

    what: str
    name: str
    version: str
    geometry: str
    batch: int
    format: str
    view: str
    us: float
    low_us: float
    high_us: float
    window: int | None = None
    verify_len: int = 1
    accepted: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    bytes: float | None = None
    floor_us: float | None = None
    ordinary_us: float | None = None
    snapshot_us: float | None = None
    y_error: float | None = None
    state_error: float | None = None
    detail: Mapping[str, float] = field(default_factory=dict)

    @property
    def over_ordinary(self) -> float | None:
        """How many times faster than the best ordinary kernel."""
        return None if self.ordinary_us is None else self.ordinary_us / self.us

    @property
    def over_snapshot(self) -> float | None:
        """How many times faster than the best snapshot kernel."""
        return None if self.snapshot_us is None else self.snapshot_us / self.us

    @property
    def over_floor(self) -> float | None:
        """Time relative to reading the same bytes: 1 is the limit."""
        return None if self.floor_us is None else self.us / self.floor_us

    @property
    def gb_s(self) -> float | None:
        """Bytes moved per second, in GB."""
        return None if self.bytes is None else self.bytes / self.us / 1e3

    def to_json(self) -> dict[str, Any]:
        """The fields, and the ratios for readers without this library."""
        ratios = {name: getattr(self, name) for name in ("over_ordinary", "over_snapshot", "over_floor", "gb_s")}
        return asdict(self) | ratios

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


@dataclass(frozen=True)
class Refusal:
    """Something that was asked for and has no number, with the reason."""

    what: str
    name: str
    case: str
    config: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class Conditions:
    """Where, when and how the rows were measured."""

    gpu: str
    driver: str
    sm_count: int
    l2_bytes: int
    torch_version: str
    cuda_version: str
    triton_version: str
    python_version: str
    replayssm_version: str
    commit: str
    command: str
    date: str
    copy_gb_s: float | None = None

    @classmethod
    def collect(cls, device: torch.device, commit: str | None = None) -> Conditions:
        """Everything but the copy bandwidth."""
        import triton

        from replayssm import __version__

        gpu, driver, sms, l2 = "none", "none", 0, 0
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            gpu, sms, l2 = properties.name, properties.multi_processor_count, properties.L2_cache_size
            driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        return cls(
            gpu=gpu,
            driver=driver or "unknown",
            sm_count=sms,
            l2_bytes=l2,
            torch_version=torch.__version__,
            cuda_version=torch.version.cuda or "none",
            triton_version=triton.__version__,
            python_version=platform.python_version(),
            replayssm_version=__version__,
            commit=commit or os.environ.get("REPLAYSSM_COMMIT") or _commit(),
            command=" ".join(_without_folders(word) for word in sys.argv),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )


@dataclass
class Report:
    """All results of a run; written to its file after every row, so that a run that is cut off leaves what it had."""

    conditions: Conditions
    path: Path | None = None
    rows: list[Row] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        self.save()
        return row

    def refuse(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)
        self.save()

    def save(self) -> None:
        """Replace the file in one move."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "format": "replayssm-kernel-benchmark",
            "version": FORMAT_VERSION,
            "conditions": asdict(self.conditions),
            "rows": [row.to_json() for row in self.rows],
            "refused": [asdict(refusal) for refusal in self.refusals],
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=1) + "\n")
        partial.replace(self.path)

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a file; ValueError when it is none of ours."""
        try:
            data = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        known = {"format": "replayssm-kernel-benchmark", "version": FORMAT_VERSION}
        if not isinstance(data, dict) or {name: data.get(name) for name in known} != known:
            raise ValueError(f"{path} is no kernel benchmark of format version {FORMAT_VERSION}")
        try:
            return cls(
                Conditions(**data["conditions"]),
                None,
                [Row.from_json(row) for row in data["rows"]],
                [Refusal(**refusal) for refusal in data["refused"]],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is a kernel benchmark with fields missing or unknown: {error}") from None


def best(rows: Iterable[Row]) -> Row | None:
    """The fastest row, None of none."""
    return min(rows, key=lambda row: row.us, default=None)


def _without_folders(word: str) -> str:
    """A word of a command line, fit to be published: absolute paths lose their folders."""
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else word


def _commit() -> str:
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+changes" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
