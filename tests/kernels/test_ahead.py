"""Kernels compile for every supported GPU without one being there, and those of sm_90 keep everything in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("ahead_of_time.py")
SOURCE = Path(__file__).parents[2] / "src"
TUNED_CHOICES = 3  # of each table; `python tests/kernels/ahead_of_time.py 90` compiles all of them


PARTS = {80: 1, 90: 4, 100: 2}
"""Processes per compute capability: they share the workers evenly."""


@pytest.mark.parametrize(("capability", "part"), [(c, part) for c, parts in PARTS.items() for part in range(parts)])
def test_kernels_compile_and_do_not_spill(capability: int, part: int, tmp_path: Path) -> None:
    # a process of its own: this one interprets kernels
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, str(SCRIPT), *map(str, (capability, TUNED_CHOICES, part, PARTS[capability]))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) > 6
    # where a launch may start early it hints at what it will read
    hints = {name for name, taken in found.items() if taken.get("hints")}
    hinting = {name for name in found if name.endswith(("prepare", "recurrent", "single", "tree"))}
    assert hints == (hinting if capability >= 90 else set())
    if capability == 90:
        spilled = {name: taken for name, taken in found.items() if taken["spill_bytes"]}
        assert not spilled
        assert all(taken["tensor_core"] for name, taken in found.items() if name.endswith(("flush", "fold")))
