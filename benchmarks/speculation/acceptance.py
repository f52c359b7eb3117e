"""Acceptance on real text: the bundled draft model and prompt look-up, drafting for a bundled model.

    python benchmarks/speculation/acceptance.py --json benchmarks/speculation/results/acceptance.json

Every run continues the same prompts, one sequence at a time, and keeps the text that was written beside its numbers:
a text that repeats itself is easily guessed. Greedy runs must write what plain decoding writes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src")]

import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from replayssm import ReplayConfig, __version__, attach, models  # noqa: E402
from replayssm.decode import DraftModel, PromptLookup, Sampling, decode  # noqa: E402

PROMPTS = (
    "The open function returns a file object. It is used to",
    "To install the package, run the following command:",
    "A transaction that was started with BEGIN is",
    "If the argument is not given, the default value is used. The",
)
SHAPES = {
    "chain of 4": (4, 1),
    "chain of 8": (8, 1),
    "tree of 8, 2 branches": (8, 2),
    "tree of 15, 3 branches": (15, 3),
}
WINDOW = 16


def load(name: str) -> tuple[Any, Any]:
    folder = models.path(name)
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()


def one_run(
    target: Any, tokenizer: Any, draft: Any, draft_len: int, branches: int, temperature: float | None, new: int
) -> dict[str, Any]:
    """All prompts with one way of drafting; `draft` None looks up in the text."""
    texts, steps, drafted, accepted, written = [], 0, 0, 0, 0
    begin = time.perf_counter()
    for number, prompt in enumerate(PROMPTS):
        sampling = None if temperature is None else Sampling(temperature, seed=number)
        proposer = PromptLookup(branches=branches) if draft is None else DraftModel(draft, branches, sampling)
        ids = tokenizer(prompt)["input_ids"]
        rounds = list(
            decode(target, [ids], max_new_tokens=new, proposer=proposer, draft_len=draft_len, sampling=sampling)
        )
        tokens = [token for r in rounds for token in r.tokens[0]]
        if sampling is None and tokens != plain(target, ids, new):
            raise AssertionError(f"drafts changed the text behind {prompt!r}")
        texts.append(tokenizer.decode(tokens))
        steps += len(rounds) - 1
        drafted += sum(r.drafted[0] for r in rounds)
        accepted += sum(r.accepted[0] for r in rounds)
        written += len(tokens) - 1  # the first token comes from the prompt's forward
    return {
        "drafts": drafted,
        "accepted": accepted,
        "acceptance": round(accepted / drafted, 4) if drafted else None,
        "steps": steps,
        "tokens_per_step": round(written / steps, 3),
        "seconds": round(time.perf_counter() - begin, 2),
        "texts": texts,
    }


def plain(target: Any, ids: Sequence[int], new: int) -> list[int]:
    return [token for r in decode(target, [ids], max_new_tokens=new) for token in r.tokens[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT, choices=models.names())
    parser.add_argument("--draft-model", default=models.DRAFT, choices=models.names())
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    (tokenizer, target), (_, draft) = load(options.model), load(options.draft_model)
    for model in (target, draft):
        attach(model, ReplayConfig(window=WINDOW, verify_len=WINDOW))
    rows = []
    for drafter in (options.draft_model, "prompt look-up"):
        for shape, (draft_len, branches) in SHAPES.items():
            for temperature in (None, 0.8):
                guesser = draft if drafter == options.draft_model else None
                row = {"drafter": drafter, "shape": shape, "temperature": temperature}
                row |= one_run(target, tokenizer, guesser, draft_len, branches, temperature, options.tokens)
                rows.append(row)
                print({name: value for name, value in row.items() if name != "texts"}, flush=True)
                print("   ", repr(row["texts"][0]), flush=True)
    report = {
        "conditions": {
            "replayssm": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "device": "cpu",
            "dtype": "fp32",
            "window": WINDOW,
            "model": options.model,
            "new_tokens": options.tokens,
        },
        "prompts": PROMPTS,
        "rows": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
