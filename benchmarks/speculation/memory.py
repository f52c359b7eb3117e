"""Memory of a sequence with drafts: one checkpoint and a ring, against a snapshot of the state per token of a step.

    PYTHONPATH=src python benchmarks/speculation/memory.py --json benchmarks/speculation/results/memory.json

Nothing is measured: sizes are the layout's, which a test compares with the tensors of a pool, and `fit` is what they
leave of a GPU's memory beside bf16 weights, keys and values. Where all weights do not fit on one GPU, `fit` is that of
the first layers that `benchmarks/steps` runs, which keep the ratio of the kinds of layers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from replayssm import __version__
from replayssm.planner.gpus import Gpu, find_gpu
from replayssm.planner.model import config_of, fewer_layers, known_configs, sizes_of
from replayssm.planner.step import KEPT_FREE, Memory, Workload, plan, weight_bytes

MODELS = {"nemotron3-super-120b": 22, "qwen3.5-122b-a10b": 8, "nemotron3-nano-4b": None, "qwen3.5-4b": None}
"""Each with the layers that are taken where all of them do not fit."""
VERIFY_LENS = (4, 8)
CONTEXT, WINDOW, FORMAT = 1024, 16, "fp32"


def rows(name: str, layers: int | None, gpu: Gpu) -> list[dict[str, Any]]:
    """Bytes of a sequence of the whole model, and sequences that fit, by tokens of a step."""
    fields, found = known_configs()[name], []
    whole = sizes_of(name, config_of(fields))
    part = sizes_of(name, config_of(fewer_layers(fields, layers)))
    for tokens in VERIFY_LENS:
        work = Workload(1, CONTEXT, tokens, tokens)
        of_whole, of_part = (plan(model, gpu, FORMAT, work, WINDOW) for model in (whole, part))
        replay, snapshots = of_whole.memory, of_whole.ordinary_memory
        fit = {"replay": of_part.memory.fit, "snapshots": of_part.ordinary_memory.fit}
        found.append(
            {
                "model": name,
                "verify_len": tokens,
                "recurrent_layers": whole.recurrent_layers,
                "replay_bytes": {kind: getattr(replay, kind) for kind in ("checkpoint", "ring", "carry")},
                "snapshot_bytes": {"states": snapshots.checkpoint, "carry": snapshots.carry},
                "snapshots_over_replay": round(_states(snapshots) / _states(replay), 2),
                "kv_bytes": CONTEXT * replay.kv_per_token,
                "weight_bytes": weight_bytes(whole),
                "fit": fit | {"layers": part.layers, "of": whole.layers, "weight_bytes": weight_bytes(part)},
                "fit_ratio": round(fit["replay"] / fit["snapshots"], 2),
            }
        )
    return found


def _states(memory: Memory) -> int:
    return memory.checkpoint + memory.ring + memory.carry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gpu, found = find_gpu(options.gpu), []
    for name, layers in MODELS.items():
        found += rows(name, layers, gpu)
        for row in found[-len(VERIFY_LENS) :]:
            print(json.dumps(row))
    if options.json is not None:
        conditions = {
            "gpu": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "kept_free": KEPT_FREE,
            "format": FORMAT,
            "window": WINDOW,
            "context": CONTEXT,
            "replayssm": __version__,
            "command": f"benchmarks/speculation/memory.py --gpu {gpu.name}",
        }
        options.json.write_text(json.dumps({"conditions": conditions, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
