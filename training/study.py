"""The precision study: train one long-memory model of a family and measure, in the same run, what precisions cost it.

    python training/study.py --family gdn --data DATA --out OUT --seconds 100
    python training/study.py --family mamba2 --data DATA --out OUT --seconds 100 --long
    python training/study.py --plot --out OUT

The models have recurrent and feed-forward layers only: an attention layer would answer the recall task without the
state. Their decays start with half-lives spread from hundreds to thousands of tokens. They learn text and recall
together (``recall.py``). Then, with states kept in each of ``PRECISIONS`` (``replayssm.evaluate``, window 16):

| result    | what is measured                                                                                        |
|-----------|---------------------------------------------------------------------------------------------------------|
| `text`    | held-out text of ``--tokens``: KL divergence from fp32 states, by position; agreement, perplexity        |
| `recall`  | share of right answers, by the distance between pair and question                                        |
| `recall_far` | the same in a few rows of ``--tokens``, eight times as long as those of the training                 |
| `long`    | as `text` for one sequence of ``--long-tokens`` and fewer precisions, with ``--long``                    |
| `ratio`   | KL of one shared NVFP4 copy over that of NVFP4 reads beside each recurrence, and what the decays predict |

``OUT/study-FAMILY.json`` is written after each part, and ``OUT/study-FAMILY.pt`` (weights, and the record of the
training) after the training, so that the measurements can also be made elsewhere: ``--trained OUT``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from families import FAMILIES, build_model, set_half_lives
from recall import EXTRA_TOKENS, Rows, weave
from scan import use_fast_scans
from torch import Tensor
from train import Settings, Trainer, conditions, learning_rate_at, source_hash

from replayssm.attach.transformers.find import find_layers
from replayssm.evaluate.forward import logits_of, replayed_forward
from replayssm.evaluate.measure import evaluate
from replayssm.evaluate.precision import Precision

WINDOW = 16
SHARED, READS = "nvfp4", "fp32+nvfp4"
PRECISIONS = ("fp32", SHARED, READS, "fp16+nvfp4", "fp8+nvfp4", "fp8-stochastic+nvfp4")
LONG_PRECISIONS = ("fp32", SHARED, READS, "fp8+nvfp4")
HALF_LIVES = (256.0, 16384.0)
FAR_ROWS = 16
RECALL_ROWS = 4096  # drawn for training; a run of a hundred seconds sees each of them a few times
DENSE = 0.5  # share of them with an event in every cell
DISTANCES = (0, 64, 256, 1024, 2048, 1 << 30)

LAYERS = 2  # enough to recall, and an evaluation decodes them one after the other
_LINEAR = ["linear_attention"] * LAYERS
SHAPES: dict[str, dict[str, Any]] = {
    "gdn": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": LAYERS,
        "layer_types": _LINEAR,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
    },
    "mamba2": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 2 * LAYERS,
        "hybrid_override_pattern": "M-" * LAYERS,
        "mamba_num_heads": 16,
        "n_groups": 4,
    },
    "kda": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": LAYERS,
        "layer_types": _LINEAR,
        "mlp_layer_types": ["dense"] * LAYERS,
        "linear_num_heads": 8,
    },
}
"""What differs from the small models of ``families.py``; heads keep their 64 x 64 states."""


class Weighted(Trainer):
    """A training step whose targets have weights, beside the tokens."""

    def __init__(self, model: torch.nn.Module, tokens: Tensor, weights: Tensor, settings: Settings) -> None:
        super().__init__(model, tokens, settings)
        self.weights = weights

    def forward_backward(self) -> Tensor:
        at = self.starts[:, None] + self.offsets
        window, weights = self.tokens[at].long(), self.weights[at][:, 1:]
        mask = {"full_attention": None, "linear_attention": None}
        with torch.autocast(self.tokens.device.type, dtype=torch.bfloat16, cache_enabled=False):
            hidden = self.model.model(input_ids=window[:, :-1], attention_mask=mask, use_cache=False).last_hidden_state
            logits = F.linear(hidden, self.model.lm_head.weight)
        each = F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten(), reduction="none")
        loss = (each * weights.flatten()).sum() / weights.sum()
        loss.backward()
        return loss.detach()


def batches(text: int, rows: int, length: int, batch: int, seed: int) -> Iterator[np.ndarray]:
    """Endless starts ``[batch]``: an eighth anywhere in ``text`` tokens, the others at recall rows, which lie behind it."""
    rng = np.random.default_rng(seed)
    plain = batch // 8
    while True:
        places = rng.integers(0, text - length - 1, plain)
        yield np.concatenate([places, text + (length + 1) * rng.integers(0, rows, batch - plain)])


def build(name: str, options: argparse.Namespace, vocabulary: int) -> torch.nn.Module:
    """The model, not trained yet."""
    model = build_model(name, vocabulary + EXTRA_TOKENS, **(SHAPES[name] | options.config))
    set_half_lives(model, *HALF_LIVES)
    return model.to(options.device)


def load(name: str, options: argparse.Namespace, vocabulary: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model that an earlier run trained, and its record."""
    saved = torch.load(options.trained / f"study-{name}.pt", map_location=options.device, weights_only=True)
    model = build(name, options, vocabulary)
    model.load_state_dict(saved["weights"])
    return model.eval(), json.loads(saved["record"])


def train(name: str, options: argparse.Namespace, vocabulary: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model trained for ``options.seconds`` after its set-up, and the record of the run."""
    began = time.monotonic()
    settings = Settings(
        seconds=options.seconds,
        batch=options.batch,
        length=options.length,
        learning_rate=options.learning_rate,
        seed=options.seed,
        compile_layers=False,
        cuda_graph=options.device == "cuda",
        device=options.device,
    )
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    model_type = FAMILIES[name].model_type
    use_fast_scans(model_type)
    model = build(name, options, vocabulary).train()
    stream = np.fromfile(options.data / "train.bin", dtype=np.uint16)
    rng = np.random.default_rng(settings.seed)
    woven = weave(stream, vocabulary, options.rows, settings.length + 1, rng, DENSE)
    tokens = np.concatenate([stream.astype(np.int32), woven.tokens.astype(np.int32).reshape(-1)])
    weights = np.concatenate([np.ones(len(stream), dtype=np.float32), woven.weights.reshape(-1)])
    on_device = (torch.from_numpy(x).to(settings.device) for x in (tokens, weights))
    trainer = Weighted(model, *on_device, settings)
    trainer.prepare()
    first = time.monotonic()
    say(name, f"{sum(p.numel() for p in model.parameters()):,} parameters, ready after {first - began:.1f} s")
    share, step, curve = 0.0, 0, []
    for starts in batches(len(stream), options.rows, settings.length, settings.batch, settings.seed):
        trainer.step(starts, learning_rate_at(share, settings.learning_rate, settings.warmup_share))
        step += 1
        if step % 10 == 0 or options.device != "cuda":
            loss = trainer.loss_sum.item() / (10 if options.device == "cuda" else 1)
            trainer.loss_sum.zero_()
            if not math.isfinite(loss):
                raise FloatingPointError(f"loss is {loss} at step {step}")
            share = (time.monotonic() - first) / settings.seconds
            curve.append({"step": step, "seconds": round(time.monotonic() - first, 2), "loss": round(loss, 4)})
            if step % 200 == 0:
                say(name, f"step {step}, {share:.0%}, loss {loss:.3f}")
            if share >= 1:
                break
    use_fast_scans(model_type, enable=False)
    torch.set_float32_matmul_precision("highest")
    del trainer, tokens, weights
    model.zero_grad(set_to_none=True)
    if settings.device == "cuda":  # the graph of the training step has held its memory until now
        gc.collect()
        torch.cuda.empty_cache()
    record = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": step,
        "tokens": step * settings.batch * settings.length,
        "final_loss": curve[-1]["loss"],
        "setup_seconds": round(first - began, 1),
        "conditions": conditions(settings.device),
        "curve": curve[:: max(1, len(curve) // 100)],
    }
    torch.save({"weights": model.state_dict(), "record": json.dumps(record)}, options.out / f"study-{name}.pt")
    return model.eval(), record


def text_rows(data: Path, tokens: int, sequences: int, device: str) -> Tensor:
    """Held-out text ``[sequences, tokens]``."""
    stream = np.fromfile(data / "heldout.bin", dtype=np.uint16)
    if len(stream) < tokens * sequences:
        raise ValueError(f"the held-out text has {len(stream)} tokens, {sequences} x {tokens} are asked for")
    return torch.from_numpy(stream[: tokens * sequences].astype(np.int64)).reshape(sequences, tokens).to(device)


@torch.no_grad()
def answer(model: Any, rows: Rows, device: str, at_once: int) -> dict[str, Any]:
    """Share of right answers in each precision, over all questions and by distance."""
    configs = [Precision(name).config(WINDOW) for name in PRECISIONS]
    right: list[Tensor] = []
    for begin in range(0, len(rows.tokens), at_once):
        mine = (rows.questions[:, 0] >= begin) & (rows.questions[:, 0] < begin + at_once)
        row, position = (
            torch.from_numpy(x).to(device) for x in (rows.questions[mine, 0] - begin, rows.questions[mine, 1])
        )
        ids = torch.from_numpy(rows.tokens[begin : begin + at_once]).to(device)
        hidden = replayed_forward(model, ids, configs).hidden[:, row, position - 1]
        right.append((logits_of(model, hidden).argmax(-1) == ids[row, position]).cpu())
    each, distance = torch.cat(right, 1).double(), torch.from_numpy(rows.questions[:, 2])
    by_distance = {}
    for low, high in pairwise(DISTANCES):
        inside = (distance >= low) & (distance < high)
        if inside.any():
            key = f"{low} to {high}" if high < 1 << 30 else f"{low} and more"
            by_distance[key] = {"questions": int(inside.sum()), "right": each[:, inside].mean(1).tolist()}
    return {
        "rows": len(rows.tokens),
        "tokens": rows.tokens.shape[1],
        "questions": each.shape[1],
        "precisions": list(PRECISIONS),
        "right": each.mean(1).tolist(),
        "by_distance": by_distance,
    }


def ratios(evaluation: dict[str, Any]) -> dict[str, Any]:
    """KL of the shared copy over that of each pair, beside what the half-lives predict.

    A rounding error of variance e enters a shared copy at each flush and is forgotten with the state: after many flushes
    the state has e tau / (2 W) of it besides the newest, where reads alone have e at all but a window's first token. KL
    divergence is proportional to the variance. tau is a head's memory, which a delta rule's overwriting shortens (benchmarks/accuracy/memory.py).
    """
    kl = {row["precision"]: row["kl"] for row in evaluation["rows"]}
    lives, memories = (np.array([x for layer in evaluation[key] for x in layer]) for key in ("half_lives", "memories"))
    reached = np.minimum(memories, evaluation["tokens"])

    def quantiles(x: np.ndarray) -> dict[str, float]:
        return {f"{q}%": float(np.percentile(x, q)) for q in (10, 50, 90, 100)}

    return {
        "measured": {name: kl[SHARED] / kl[name] for name in kl if "+" in name and kl[name] > 0},
        "predicted_mean_over_heads": float((1 + reached / (2 * WINDOW)).mean() * WINDOW / (WINDOW - 1)),
        "half_life_quantiles": quantiles(lives),
        "memory_quantiles": quantiles(memories),
    }


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train and measure one family; results are on disk after each part."""
    vocabulary = json.loads((options.data / "manifest.json").read_text())["vocab_size"]
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "family": name,
        "conditions": conditions(options.device) | {"commit": options.commit, "source_sha256": source_hash()},
        "window": WINDOW,
        "seconds": {},
    }
    path = options.out / f"study-{name}.json"

    def part(key: str, began: float, value: Any) -> None:
        result[key] = rounded(value)
        result["seconds"][key] = round(time.monotonic() - began, 1)
        path.write_text(json.dumps(result, indent=1) + "\n")
        say(name, f"{key}: {result['seconds'][key]} s")

    began = time.monotonic()
    model, record = (train if options.trained is None else load)(name, options, vocabulary)
    part("training", began, record)

    began = time.monotonic()
    stream = np.fromfile(options.data / "heldout.bin", dtype=np.uint16)
    woven = weave(stream, vocabulary, options.questions, options.length, np.random.default_rng(1))
    recall = answer(model, woven, options.device, options.at_once)
    part("recall", began, recall)
    say(name, "recall " + ", ".join(f"{p} {r:.3f}" for p, r in zip(PRECISIONS, recall["right"], strict=True)))

    began = time.monotonic()
    woven = weave(stream, vocabulary, FAR_ROWS, options.tokens, np.random.default_rng(2))
    recall = answer(model, woven, options.device, FAR_ROWS)
    part("recall_far", began, recall)
    say(name, "far " + ", ".join(f"{p} {r:.3f}" for p, r in zip(PRECISIONS, recall["right"], strict=True)))

    began = time.monotonic()
    ids = text_rows(options.data, options.tokens, options.sequences, options.device)
    layers = len(find_layers(model))
    text = evaluate(model, ids, PRECISIONS, window=WINDOW, progress=Progress(name, layers * options.tokens)).as_json()
    part("text", began, text)
    part("ratio", time.monotonic(), ratios(text))
    say(name, "KL " + ", ".join(f"{row['precision']} {row['kl']:.3g}" for row in text["rows"]))
    say(name, json.dumps(result["ratio"]))

    if options.long:
        began = time.monotonic()
        ids = text_rows(options.data, options.long_tokens, 1, options.device)
        progress = Progress(name, layers * options.long_tokens)
        part("long", began, evaluate(model, ids, LONG_PRECISIONS, window=WINDOW, progress=progress).as_json())
        part("long_ratio", time.monotonic(), ratios(result["long"]))
        say(name, json.dumps(result["long_ratio"]))
    return result


def rounded(value: Any) -> Any:
    """Plain data with five significant digits in every float."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in value.items()}
    return [rounded(x) for x in value] if isinstance(value, list) else value


class Progress:
    """Says how far an evaluation is, a few times."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.done, self.began = name, total, 0, time.monotonic()

    def __call__(self, tokens: int) -> None:
        """Count tokens of a layer."""
        before, self.done = self.done, self.done + tokens
        if 8 * before // self.total < 8 * self.done // self.total:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            say(self.name, f"  {self.done / self.total:.0%} after {time.monotonic() - self.began:.1f} s")


def say(name: str, what: str) -> None:
    """A line of progress."""
    print(f"[{name}] {what}", flush=True)


def plot(out: Path) -> None:
    """``OUT/study.svg`` from the results there: KL by position, and shares of right answers, one row per family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [json.loads(path.read_text()) for path in sorted(out.glob("study-*.json"))]
    figure, axes = pyplot.subplots(len(results), 3, figsize=(15, 3.6 * len(results)), squeeze=False)
    for line, result in zip(axes, results, strict=True):
        title = FAMILIES[result["family"]].title.split(" hybrid")[0]
        for axis, key in zip(line, ("text", "long"), strict=False):
            if key not in result:
                axis.set_visible(False)
                continue
            found = result[key]
            for row in found["rows"][1:]:
                positions = [(i + 0.5) * found["stretch"] for i in range(len(row["kl_by_position"]))]
                colour = f"C{PRECISIONS.index(row['precision'])}"  # the same as of the bars
                axis.plot(positions, row["kl_by_position"], colour, label=row["precision"], linewidth=1)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xlabel("position, tokens")
            axis.set_ylabel("KL from fp32 states, nats")
            axis.set_title(f"{title}, {found['sequences']} x {found['tokens']} tokens", fontsize=9)
            axis.legend(fontsize=7)
        recall, axis = result.get("recall_far", result["recall"]), line[2]
        axis.set_title(f"{title}, recall in {recall['rows']} x {recall['tokens']} tokens", fontsize=9)
        groups = recall["by_distance"]
        width = 0.8 / len(recall["precisions"])
        for i, precision in enumerate(recall["precisions"]):
            heights = [group["right"][i] for group in groups.values()]
            axis.bar([x + i * width for x in range(len(groups))], heights, width, label=precision)
        axis.set_xticks([x + 0.4 for x in range(len(groups))], list(groups), fontsize=7)
        axis.set_xlabel("tokens between pair and question")
        axis.set_ylabel("right answers")
        axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(out / "study.svg")
    pyplot.close(figure)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(SHAPES), action="append", default=[], help="may be repeated")
    parser.add_argument("--data", type=Path, help="folder written by data.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0, help="of training, after its set-up, per family")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a training window and a recall row")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=RECALL_ROWS, help="recall rows for training")
    parser.add_argument("--questions", type=int, default=64, help="recall rows for the measurement")
    parser.add_argument("--at-once", type=int, default=32, help="recall rows measured together")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--long", action="store_true", help="measure one long sequence as well")
    parser.add_argument("--long-tokens", type=int, default=131072)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="unknown", help="revision of this repository, for the record")
    parser.add_argument("--config", type=json.loads, default={}, help="config values to replace, as JSON (for tests)")
    parser.add_argument("--trained", type=Path, help="the OUT of an earlier run, whose models are measured again")
    parser.add_argument("--plot", action="store_true", help="draw what is in OUT, and nothing else")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run the families one after the other, or draw their results."""
    options = parse_arguments(arguments)
    if options.plot:
        plot(options.out)
        return
    if not options.family or options.data is None:
        raise SystemExit("name at least one --family, and --data")
    for name in options.family:
        run(name, options)


if __name__ == "__main__":
    main()
