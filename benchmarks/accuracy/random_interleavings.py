"""Many random interleavings of every verb against the fp64 oracle: the long form of tests/core/test_invariants.py.

    python benchmarks/accuracy/random_interleavings.py --examples 10000 --processes 2 \
        --json benchmarks/accuracy/results/random_interleavings.json
    python benchmarks/accuracy/random_interleavings.py --every-pair --examples 1000 --processes 1 \
        --json benchmarks/accuracy/results/every_pair.json

Each example is a random model, configuration and sequence of up to 30 verbs; outputs, states, cursors and untouched
memory are compared after each. Examples differ from those of the test run: the seed is an option. With --every-pair
each combination of checkpoint and read copy is a mode of its own, all with the same number of examples.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import hypothesis
import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.core.machine import EVERY_PAIR, machine_for  # noqa: E402
from tests.core.setups import RECURRENCES  # noqa: E402
from tests.core.test_invariants import SHARE  # noqa: E402

import replayssm  # noqa: E402

PART = 100  # examples that a process takes at a time
STEPS = 30


@dataclass
class Counts:
    """What some examples did."""

    recurrence: str
    mode: str
    examples: int = 0
    verbs: int = 0
    row_steps: int = 0
    tokens: int = 0
    flushes: int = 0
    folded_records: int = 0
    clamped: int = 0  # examples that end with a slot in which elements were clamped
    failures: list[str] = field(default_factory=list)


def run_part(job: tuple[str, str, int, int]) -> Counts:
    """Run some examples of one recurrence and mode."""
    recurrence, mode, examples, seed = job
    torch.set_num_threads(1)
    counts = Counts(recurrence, mode)
    base = machine_for(recurrence, mode)

    def teardown(machine: object) -> None:
        if not hasattr(machine, "pool"):
            return
        tally = machine.pool.tally
        counts.examples += 1
        counts.verbs += machine.verbs  # type: ignore[attr-defined]
        counts.row_steps += tally.row_steps
        counts.tokens += tally.new_records
        counts.flushes += tally.flushes
        counts.folded_records += tally.folded_records
        counts.clamped += bool(machine.pool.cursor.saturated.any())

    machine = hypothesis.seed(seed)(type(base.__name__, (base,), {"teardown": teardown}))
    options = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    try:
        run_state_machine_as_test(machine, settings=options)
    except (AssertionError, ValueError, RuntimeError, IndexError, TypeError, BaseExceptionGroup) as error:
        found = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
        counts.failures += ["\n".join([repr(e), *getattr(e, "__notes__", [])]) for e in found]
    return counts


def source_digest() -> str:
    """SHA-256 over what was tested, to tell it from the commit when files were changed since."""
    digest = hashlib.sha256()
    for folder in ("src/replayssm/state", "src/replayssm/flow", "src/replayssm/recurrences", "tests/core"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every-pair", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    share = dict.fromkeys(EVERY_PAIR, 1.0) if arguments.every_pair else SHARE
    total = sum(share.values()) * len(RECURRENCES)
    jobs = []
    for recurrence, mode in itertools.product(RECURRENCES, share):
        wanted = -(-round(arguments.examples * share[mode] * 1000) // round(total * 1000))
        for part in range(0, wanted, PART):
            jobs.append((recurrence, mode, min(PART, wanted - part), arguments.seed * 1_000_003 + len(jobs)))
    began, digest, commit = time.monotonic(), source_digest(), git("rev-parse", "--short", "HEAD")
    merged: dict[tuple[str, str], Counts] = {}
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for number, counts in enumerate(pool.imap_unordered(run_part, jobs), 1):
            key = (counts.recurrence, counts.mode)
            into = merged.setdefault(key, Counts(*key))
            for name in ("examples", "verbs", "row_steps", "tokens", "flushes", "folded_records", "clamped"):
                setattr(into, name, getattr(into, name) + getattr(counts, name))
            into.failures += counts.failures
            done = sum(c.examples for c in merged.values())
            failed = sum(len(c.failures) for c in merged.values())
            print(
                f"{number}/{len(jobs)} parts, {done} examples, {failed} failures, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    rows = [merged[key] for key in sorted(merged)]
    result = {
        "conditions": {
            "replayssm": replayssm.__version__,
            "commit": commit,
            "source_sha256": digest,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "hypothesis": hypothesis.__version__,
            "device": "cpu",
            "backend": "torch",
            "verbs_per_example": f"up to {STEPS}",
            "seed": arguments.seed,
            "command": " ".join(["python", "benchmarks/accuracy/random_interleavings.py", *sys.argv[1:]]),
        },
        "examples": sum(row.examples for row in rows),
        "failures": sum(len(row.failures) for row in rows),
        "seconds": round(time.monotonic() - began),
        "rows": [asdict(row) for row in rows],
    }
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("examples", "failures", "seconds")}))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
