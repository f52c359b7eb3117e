"""Runs of `drive.py` from a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROMPT_LENGTHS = (1, 2, 7, 19, 40, 3)


def prompts(lengths: Sequence[int] = PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 96, (n,), generator=generator).tolist() for n in lengths]


def spec(model: Path, replay: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """One run: 40 tokens after each of the prompts, with the plug-in's options or without it."""
    own = {
        name: options.pop(name)
        for name in ("prompts", "tokens", "logprobs", "fault", "times", "like")
        if name in options
    }
    arguments = {"model": str(model), "dtype": "float32"} | options
    if replay is not None:
        arguments["additional_config"] = {"replayssm": dict(replay)}
    return {"options": arguments, "prompts": prompts(), "tokens": 40} | own


def environment() -> dict[str, str]:
    """Variables of a process that runs vLLM."""
    folders = [str(ROOT / "src"), *([] if torch.cuda.is_available() else [str(HERE / "stubs")])]
    given = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([*folders, *([given] if given else [])]), "OMP_NUM_THREADS": "1"}


def drive(*runs: dict[str, Any], variables: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """What the engines of these runs say, each {"tokens", ...} or {"error"}.

    They share a process as far as vLLM allows it: after one with drafts the next does not start.
    """
    found: list[dict[str, Any]] = []
    while len(found) < len(runs):
        rest = runs[len(found) :]
        last = next((i for i, run in enumerate(rest) if "speculative_config" in run["options"]), len(rest) - 1)
        found += _one_process(rest[: last + 1], variables or {})
    return found


def _one_process(runs: Sequence[dict[str, Any]], variables: Mapping[str, str]) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"runs": runs}, file)
        file.flush()
        done = subprocess.run(
            [sys.executable, str(HERE / "drive.py"), file.name],
            capture_output=True,
            text=True,
            env=environment() | dict(variables),
            timeout=900,
        )
    mark = "RESULT "
    found = [json.loads(line[len(mark) :]) for line in done.stdout.splitlines() if line.startswith(mark)]
    if any("error" in each for each in found):
        print(done.stderr[-6000:], file=sys.stderr)  # a test that expected no error shows it
    assert len(found) == len(runs), done.stdout[-2000:] + done.stderr[-6000:]
    return found


def difference(stock: dict[str, Any], ours: dict[str, Any]) -> tuple[int, float]:
    """How many tokens come before the first different one of each row, and how far their log-probabilities differ."""
    compared, most = 0, 0.0
    for i, (a, b) in enumerate(zip(stock["tokens"], ours["tokens"], strict=True)):
        same = next((t for t, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        compared += same
        pairs = zip(stock["logprobs"][i][:same], ours["logprobs"][i][:same], strict=True)
        most = max([most, *(abs(x - y) for x, y in pairs)])
    return compared, most
