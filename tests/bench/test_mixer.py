"""The mixer's benchmark without a GPU: what it checks, and a dry run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the kernels here are interpreted", allow_module_level=True)

from .. import interpreter

interpreter.switch_on()

from replayssm.bench.cases import Case  # noqa: E402
from replayssm.bench.mixer import Mixed, PreparedMixer  # noqa: E402
from replayssm.bench.reference import CheckFailed  # noqa: E402
from replayssm.bench.rows import Report  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def prepared(name: str) -> PreparedMixer:
    return Mixed().setup(Case(name, 2, window=4), CPU)


def test_the_check_passes_on_the_kernels_and_fails_where_they_are_wrong() -> None:
    right = prepared("tiny-gdn")
    errors = right.check({})
    assert errors.y <= 1e-2
    projected, weights = right._layers[0]
    swapped = replace(weights, constants=(1.5,))
    mix = right._mix

    def wrong(pool, layer, step, inputs, out, config):  # type: ignore[no-untyped-def]
        right._layers[0] = (projected, swapped if pool.backend == "triton" else weights)
        return mix(pool, layer, step, inputs, out, config)

    right._mix = wrong  # type: ignore[method-assign]
    with pytest.raises(CheckFailed, match="from those of the torch back end"):
        right.check({})


def test_dry_run(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "mixer" / "run.py"), str(tmp_path)]
    command += ["--device", "cpu", "--backend", "torch", "--commit", "test"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = Report.load(tmp_path / "mixer.json")
    assert not report.refusals
    mixed = [row for row in report.rows if row.name == "mixer"]
    assert {(row.geometry, row.verify_len) for row in mixed} == {
        (name, length) for name in ("tiny-mamba2", "tiny-gdn", "tiny-kda") for length in (1, 4)
    }
    assert all(row.detail["over_replay"] > 0 and row.y_error is not None for row in mixed)
