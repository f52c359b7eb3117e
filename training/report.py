"""Write the model cards and the plot of the loss from the records of the runs.

    python report.py --models MODELS --results RESULTS

Reads ``MODELS/<folder>/training.json`` and ``RESULTS/<folder>.json`` (loss curves written with ``train.py --curve``);
writes ``MODELS/<folder>/README.md`` and ``RESULTS/loss.svg``. No number is typed in by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from families import FAMILIES, WRITES, Family

CARD = """---
license: other
library_name: transformers
pipeline_tag: text-generation
language: en
---

# {folder}

{title}, {parameters:,} parameters, bf16, context of {length:,} tokens in training.
{purpose}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from replayssm import models

folder = models.path("{folder}")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
```

## Figures

| | |
|---|---|
| class | `{architecture}` |
| bits per byte, held-out documents | {bits_per_byte} |
| known words in sampled text (temperature {temperature}) | {sampled:.1%} |
| known words in greedy text | {greedy:.1%} |
| same share in the held-out text / from an untrained model | {heldout:.1%} / {untrained:.1%} |
| training tokens (passes over the corpus) | {tokens:,} ({epochs}) |
| last training loss (nats per token) | {final_loss} |
| training time, of it set-up and compilation | {wall} s, {setup} s |
| device | {device}{neighbours} |

`training.json` has the command, versions, data hashes and three samples; `evaluate.py` in the repository's `training`
folder defines the figures. {prompts} held-out prompts of {prompt_tokens} tokens, {new_tokens} new tokens each, seed 0.
{notes}
## Sample

Prompt: {prompt!r}

> {sample}

## Data and licence

Trained only on openly licensed documentation (Python, PostgreSQL, SQLite, CMake, Django, SQLAlchemy and other
projects); `training/README.md` in the repository lists every package with its licence (PSF-2.0, PostgreSQL, public
domain, BSD, MIT, Apache-2.0). The weights are released under the repository's licence; text that repeats a passage of
the training data stays under that project's licence.
"""


def card(family: Family, record: dict[str, Any]) -> str:
    """The model card of one record."""
    figures = record["evaluation"]
    sample = figures["samples"][0]
    was_alone = family.purpose == WRITES and "shared_with" not in record["conditions"]
    return CARD.format(
        folder=family.folder,
        notes="".join(f"\nNote: {note}\n" for note in record.get("notes", [])),
        title=family.title,
        purpose=family.purpose,
        neighbours="" if was_alone else family.neighbours,
        length=record["settings"]["length"],
        architecture=record["architecture"],
        parameters=record["parameters"],
        bits_per_byte=figures["bits_per_byte"],
        sampled=figures["known_word_share_sampled"],
        greedy=figures["known_word_share_greedy"],
        heldout=figures["known_word_share_heldout_text"],
        untrained=figures["known_word_share_untrained"],
        temperature=figures["temperature"],
        tokens=record["tokens"],
        epochs=record["epochs"],
        final_loss=record["final_loss"],
        wall=round(record["setup_seconds"] + record["train_seconds"], 1),
        setup=record["setup_seconds"],
        device=record["conditions"]["device"],
        prompts=figures["prompts"],
        prompt_tokens=figures["prompt_tokens"],
        new_tokens=figures["new_tokens"],
        prompt=sample["prompt"],
        sample=sample["sampled"].strip().replace("\n", "\n> "),
    )


def plot(curves: dict[str, dict[str, Any]], path: Path) -> None:
    """Training loss over training time, one line a model."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "replayssm"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, curve in curves.items():
        points = curve["points"]
        axes.plot([p["seconds"] for p in points], [p["loss"] for p in points], label=name, linewidth=1.2)
    axes.set(xlabel="seconds of training", ylabel="loss, nats per token", ylim=(1.8, 5))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args(arguments)
    curves = {}
    for family in FAMILIES.values():
        folder = options.models / family.folder
        if (folder / "training.json").exists():
            (folder / "README.md").write_text(card(family, json.loads((folder / "training.json").read_text())))
            if family.purpose == WRITES:  # the draft model was trained elsewhere: its seconds are others
                curves[family.folder] = json.loads((options.results / f"{family.folder}.json").read_text())
    plot(curves, options.results / "loss.svg")


if __name__ == "__main__":
    main()
