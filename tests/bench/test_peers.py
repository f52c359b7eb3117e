"""The peers' kernels, where `fetch_peers.py` has put them: all import, and are right when interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replayssm.bench.rows import Report

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".carry" / "peers"

ORDINARY = {
    "vllm selective_state_update",
    "mamba_ssm selective_state_update",
    "fla fused_recurrent_simple_gla",
    "vllm gdn packed decode",
    "vllm gdn fused_recurrent",
    "vllm gdn fused_sigmoid_gating",
    "fla fused_recurrent_gated_delta_rule",
    "vllm kda fused_recurrent",
    "fla fused_recurrent_kda",
}
SNAPSHOTS = {
    "vllm selective_state_update, snapshots",
    "vllm gdn fused_sigmoid_gating, snapshots",
    "vllm gdn fused_recurrent, snapshots",
    "vllm kda fused_recurrent, snapshots",
    "fla fused_recurrent_kda, snapshots",
}


@pytest.mark.skipif(not (PEERS / "vllm").is_dir(), reason="needs benchmarks/kernels/fetch_peers.py to have run")
def test_every_peer_is_right_in_the_interpreter(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(PEERS)])}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "bench" / "dry_run.py"), "kernels", str(tmp_path)]
    command += ["--device", "cpu", "--backend", "torch"]
    for stage in ("baseline", "bits16", "kda", "kda_more", "snapshots"):
        command += ["--stage", stage]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    report = Report.load(tmp_path / "kernels.json")
    assert report.refusals == []
    found = {what: {row.name for row in report.rows if row.what == what} for what in ("ordinary", "snapshot")}
    assert found == {"ordinary": ORDINARY, "snapshot": SNAPSHOTS}
