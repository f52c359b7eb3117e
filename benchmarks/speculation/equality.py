"""Greedy speculative text against plain greedy text, for every family that attaches: the long form of tests/decode.

    python benchmarks/speculation/equality.py --tokens 256 --json benchmarks/speculation/results/equality.json

Tiny random models in fp32 whose state matters. Drafts are right for a number of tokens that changes from step to step,
and wrong behind them; trees have three branches at each place, the right one at a place that changes. The second part
rejects everything for 200 steps and compares log-probabilities with plain decoding, in fp64.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import transformers  # noqa: E402
from tests.attach.helpers import attached, generate, prompt  # noqa: E402
from tests.attach.models import FAMILIES, build  # noqa: E402
from tests.decode.helpers import Dictated, plain_text, room, run  # noqa: E402
from tests.decode.test_decode import DRAFTS, RIGHT, TREES  # noqa: E402

from replayssm import __version__  # noqa: E402
from replayssm.decode import Session  # noqa: E402

PROMPT = 18
STEPS = 200
DENSE = ("qwen3_5", "olmo_hybrid", "falcon_h1", "bamba")  # without experts, which have no fp64


def built(family: str, tokens: int, **options: Any) -> Any:
    """A tiny model. An indexer that picks some keys must pick all: among equals it picks others for several tokens."""
    model = build(family, **options)
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 4 * (PROMPT + tokens)
    return model


def greedy(tokens: int) -> Iterator[dict[str, Any]]:
    """One row per family, shape and draft length."""
    ids = prompt(PROMPT, seed=PROMPT)[0].tolist()
    for family in FAMILIES:
        model = built(family, tokens)
        (text,) = plain_text(model, [ids], tokens)
        for shape, branches in (("chain", 1), ("tree", 3)):
            if shape == "tree" and family not in TREES:
                yield {"family": family, "shape": shape, "refused": "its attention takes no tree"}
                continue
            for drafts in DRAFTS:
                with attached(model, **room(drafts)):
                    found = run(model, [ids], tokens, Dictated([text], RIGHT["some"], branches), draft_len=drafts)
                yield {
                    "family": family,
                    "shape": shape,
                    "draft_len": drafts,
                    "tokens": len(found.tokens[0]),
                    "equal": found.tokens[0] == text[len(ids) :],
                    "steps": len(found.rounds) - 1,
                    "drafted": found.drafted,
                    "accepted": found.accepted,
                }


def rejecting() -> Iterator[dict[str, Any]]:
    """One row per dense family and shape."""
    ids = prompt(PROMPT, seed=PROMPT)
    step = Session.step
    for family in DENSE:
        model = built(family, STEPS + 1, dtype=torch.float64)
        tokens, expected = generate(model, ids, STEPS + 1)
        text = ids[0].tolist() + tokens[0].tolist()
        for shape, branches in (("chain", 1), ("tree", 3)):
            seen: list[torch.Tensor] = []

            def recording(self: Session, *args: Any, seen: list[torch.Tensor] = seen) -> torch.Tensor:
                seen.append(step(self, *args))
                return seen[-1]

            Session.step = recording  # type: ignore[method-assign]
            try:
                with attached(model, **room(8), checkpoint_format="fp64"):
                    proposer = Dictated([text], RIGHT["none"], branches)
                    found = run(model, [ids[0].tolist()], STEPS + 1, proposer, draft_len=8)
            finally:
                Session.step = step  # type: ignore[method-assign]
            log_chances = torch.stack([logits[0, 0].float().log_softmax(-1) for logits in seen])
            yield {
                "family": family,
                "shape": shape,
                "steps": len(seen),
                "accepted": found.accepted,
                "drafted": found.drafted,
                "equal": found.tokens == [text[PROMPT:]],
                "largest_difference": float((log_chances - expected[0, 1:]).abs().max()),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()
    rows, rejected = [], []
    for row in greedy(options.tokens):
        rows.append(row)
        print(row, flush=True)
    for row in rejecting():
        rejected.append(row)
        print(row, flush=True)
    report = {
        "conditions": {
            "replayssm": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "device": "cpu",
            "seconds": round(time.perf_counter() - begin, 1),
        },
        "greedy": {"dtype": "fp32", "window": 16, "prompt_tokens": PROMPT, "rows": rows},
        "rejecting_everything": {"dtype": "fp64", "window": 16, "draft_len": 8, "rows": rejected},
    }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [row for row in rows + rejected if not row.get("equal", True)]
    print(f"{len(rows) + len(rejected)} rows, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
