"""Train one small hybrid model on the documentation corpus within a fixed wall time.

    python train.py --family gdn --data DATA --out MODELS/gdn-tiny --seconds 300

The learning rate follows the elapsed share of the time budget (linear warm-up, then cosine to zero), so the same
command makes full use of a fast or a slow device. Weights are fp32, products run in bf16 autocast, scans in fp32
(``scan.py``); the folder is saved in bf16 and evaluated as saved, with the stock transformers code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
import torch.nn.functional as F
from families import FAMILIES, build_model
from scan import use_fast_scans
from torch import Tensor

SYNC_EVERY = 10  # steps between two reads of the loss; bounds how far the host runs ahead of the clock


@dataclass(frozen=True)
class Settings:
    """Everything that defines a run besides the family and the data."""

    seconds: float = 300.0  # from the start of the program to the end of training
    batch: int = 32
    length: int = 1024
    learning_rate: float = 4e-3
    warmup_share: float = 0.03
    weight_decay: float = 0.1
    clip: float = 1.0
    beta2: float = 0.95
    seed: int = 0
    compile_layers: bool = True
    cuda_graph: bool = True
    device: str = "cuda"

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.batch < 1 or self.length < 2:
            raise ValueError(f"seconds, batch and length must be positive, got {self}")


def learning_rate_at(share: float, peak: float, warmup: float) -> float:
    """Warm-up from 0 to ``peak`` over the first ``warmup`` share of the budget, then a cosine to 0."""
    if share < warmup:
        return peak * share / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (share - warmup) / (1 - warmup))))


def window_starts(total: int, length: int, batch: int, seed: int) -> Iterator[np.ndarray]:
    """Endless batches of window starts ``[batch]``: each epoch visits disjoint windows in random order, shifted anew."""
    generator = np.random.default_rng(seed)
    if total < length * (batch + 1) + 1:
        raise ValueError(f"{total} tokens are too few for {batch} windows of {length}")
    while True:
        shift = int(generator.integers(length))
        starts = np.arange(shift, total - length - 1, length)
        generator.shuffle(starts)
        for first in range(0, len(starts) - batch + 1, batch):
            yield starts[first : first + batch]


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norms, gates, decays, biases), convolution taps and embeddings do not."""
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and "embed" not in name
        (decayed if is_matrix else free).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of ``hidden [B, T, D]`` against ``targets [B, T]``."""
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).float(), targets.flatten())


class Trainer:
    """Holds the static tensors of one training step, eager, compiled or captured as a CUDA graph."""

    def __init__(self, model: torch.nn.Module, tokens: Tensor, settings: Settings) -> None:
        self.model, self.tokens, self.settings = model, tokens, settings
        device = tokens.device
        self.starts = torch.zeros(settings.batch, dtype=torch.int64, device=device)
        self.offsets = torch.arange(settings.length + 1, device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.rate = torch.zeros((), device=device)
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, settings.weight_decay),
            lr=self.rate if on_gpu else 0.0,
            betas=(0.9, settings.beta2),
            fused=on_gpu,
            capturable=on_gpu,
        )
        self.head_loss: Callable[[Tensor, Tensor, Tensor], Tensor] = head_loss
        self.graph: torch.cuda.CUDAGraph | None = None

    def compile_layers(self) -> None:
        """Compile each decoder layer and the loss; layers of one kind share the compiled code."""
        for layer in self.model.model.layers:
            layer.compile(dynamic=False)
        self.head_loss = torch.compile(head_loss, dynamic=False)

    def forward_backward(self) -> Tensor:
        """Loss of the windows at ``starts``; leaves gradients in the parameters."""
        window = self.tokens[self.starts[:, None] + self.offsets].long()
        mask = {"full_attention": None, "linear_attention": None}  # packed stream: causal, no padding
        with torch.autocast(self.tokens.device.type, dtype=torch.bfloat16, cache_enabled=False):
            hidden = self.model.model(input_ids=window[:, :-1], attention_mask=mask, use_cache=False).last_hidden_state
            loss = self.head_loss(hidden, self.model.lm_head.weight, window[:, 1:])
        loss.backward()
        return loss.detach()

    def step_eager(self) -> None:
        """One optimizer step; adds its loss to ``loss_sum``."""
        loss = self.forward_backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip, foreach=True)
        self.optimizer.step()
        self.loss_sum += loss

    def prepare(self) -> None:
        """Warm up at learning rate 0 (this compiles) and capture the step when asked to."""
        if self.tokens.device.type != "cuda":
            self.forward_backward()
            self.optimizer.zero_grad(set_to_none=True)
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.optimizer.zero_grad(set_to_none=True)
                self.step_eager()
        torch.cuda.current_stream().wait_stream(side)
        if self.settings.cuda_graph:
            self.optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step_eager()
            self.graph = graph
        torch.cuda.synchronize()
        self.loss_sum.zero_()

    def step(self, starts: np.ndarray, rate: float) -> None:
        """One step on the windows at ``starts`` with learning rate ``rate``."""
        self.starts.copy_(torch.from_numpy(starts))
        if self.tokens.device.type == "cuda":
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        if self.graph is not None:
            self.graph.replay()
        else:
            self.optimizer.zero_grad(set_to_none=True)
            self.step_eager()


def save_model(model: torch.nn.Module, tokenizer_folder: Path, out: Path) -> None:
    """Write a bf16 copy of the model, its tokenizer and a greedy generation config."""
    from transformers import GenerationConfig

    out.mkdir(parents=True, exist_ok=True)
    copy = type(model)(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())  # rounds to bf16; tied weights stay tied and are stored once
    copy.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    copy.save_pretrained(out)
    for path in tokenizer_folder.iterdir():
        shutil.copy(path, out / path.name)


def train(
    name: str, data: Path, out: Path, settings: Settings, started: float, overrides: dict[str, Any]
) -> dict[str, Any]:
    """Train until ``settings.seconds`` after ``started``; saves half-way and at the end; returns the record."""
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    vocab_size = json.loads((data / "manifest.json").read_text())["vocab_size"]
    family = FAMILIES[name]
    use_fast_scans(family.model_type)
    model = build_model(name, vocab_size, **overrides).to(settings.device).train()
    stream = np.fromfile(data / "train.bin", dtype=np.uint16)
    tokens = torch.from_numpy(stream.astype(np.int32)).to(settings.device)
    trainer = Trainer(model, tokens, settings)
    if settings.compile_layers:
        trainer.compile_layers()
    trainer.prepare()

    first = time.monotonic()
    budget = started + settings.seconds - first
    if budget <= 0:
        raise TimeoutError(f"set-up took {first - started:.1f} s, more than the {settings.seconds} s of the whole run")
    print(f"[{name}] ready after {first - started:.1f} s; {budget:.1f} s left to train", flush=True)
    curve: list[dict[str, float]] = []
    half_saved = False
    next_report = 0.0
    step = 0
    share = 0.0
    for starts in window_starts(len(stream), settings.length, settings.batch, settings.seed):
        trainer.step(starts, learning_rate_at(share, settings.learning_rate, settings.warmup_share))
        step += 1
        share = (time.monotonic() - first) / budget
        if step % SYNC_EVERY == 0:
            loss = trainer.loss_sum.item() / SYNC_EVERY
            trainer.loss_sum.zero_()
            elapsed = time.monotonic() - first
            curve.append({"step": step, "seconds": round(elapsed, 2), "loss": round(loss, 4)})
            if not math.isfinite(loss):
                raise FloatingPointError(f"loss is {loss} at step {step}")
            if elapsed >= next_report:
                rate = step * settings.batch * settings.length / elapsed
                print(f"[{name}] {elapsed:6.1f} s step {step} loss {loss:.4f} {rate / 1e3:.0f} k tokens/s", flush=True)
                next_report = elapsed + (4.0 if elapsed < 20 else 25.0)
            if share >= 0.5 and not half_saved:
                save_model(model, data / "tokenizer", out)
                half_saved = True
            if share >= 1.0:
                break
    save_model(model, data / "tokenizer", out)
    tail = [point["loss"] for point in curve[-20:]]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": step,
        "tokens": step * settings.batch * settings.length,
        "epochs": round(step * settings.batch * settings.length / len(stream), 2),
        "final_loss": round(sum(tail) / len(tail), 4),
        "setup_seconds": round(first - started, 1),
        "train_seconds": round(time.monotonic() - first, 1),
        "curve": curve,
    }


def thin(curve: list[dict[str, float]], points: int = 200) -> list[dict[str, float]]:
    """At most ``points`` points: means of the loss over equal runs of entries."""
    width = max(1, math.ceil(len(curve) / points))
    groups = [curve[first : first + width] for first in range(0, len(curve), width)]
    return [group[-1] | {"loss": round(sum(p["loss"] for p in group) / len(group), 4)} for group in groups]


def conditions(device: str) -> dict[str, str]:
    """Card and versions of this process."""
    import transformers

    card = torch.cuda.get_device_name() if device == "cuda" else platform.machine() + " CPU"
    return {
        "device": card,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def source_hash() -> str:
    """Hash of the scripts of this folder, in name order."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line; every field of :class:`Settings` has an option."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(FAMILIES), required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder written by data.py")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--curve", type=Path, help="where to write the loss curve (default: OUT/loss_curve.json)")
    parser.add_argument("--commit", default="unknown", help="revision of this repository, for the record")
    parser.add_argument("--config", type=json.loads, default={}, help="config values to replace, as JSON (for tests)")
    parser.add_argument("--no-evaluate", action="store_true")
    defaults = Settings()
    for key in ("seconds", "learning_rate", "warmup_share", "weight_decay", "clip", "beta2"):
        parser.add_argument(f"--{key.replace('_', '-')}", type=float, default=getattr(defaults, key))
    for key in ("batch", "length", "seed"):
        parser.add_argument(f"--{key}", type=int, default=getattr(defaults, key))
    parser.add_argument("--no-compile", dest="compile_layers", action="store_false")
    parser.add_argument("--no-graph", dest="cuda_graph", action="store_false")
    parser.add_argument("--device", default=defaults.device)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train, save, evaluate as saved, write ``training.json`` and the loss curve."""
    started = time.monotonic()
    options = parse_arguments(arguments)
    settings = Settings(**{key: getattr(options, key) for key in Settings.__dataclass_fields__})
    record = train(options.family, options.data, options.out, settings, started, options.config)
    curve = thin(record.pop("curve"))
    curve_path = options.curve or options.out / "loss_curve.json"
    curve_path.write_text(json.dumps({"family": options.family, "points": curve}) + "\n")

    manifest = json.loads((options.data / "manifest.json").read_text())
    places = {str(options.data): "DATA", str(options.out): "OUT", str(curve_path): "CURVE"}
    words = [places.get(word, word) for word in (sys.argv[1:] if arguments is None else arguments)]
    command = "python train.py " + shlex.join(words)
    result: dict[str, Any] = {
        "family": options.family,
        "architecture": FAMILIES[options.family].model_class,
        **record,
        "conditions": conditions(settings.device),
        "command": command,
        "commit": options.commit,
        "source_sha256": source_hash(),
        "data_sha256": manifest["train_sha256"],
        "heldout_sha256": manifest["heldout_sha256"],
        "settings": {key: getattr(settings, key) for key in Settings.__dataclass_fields__},
    }
    path = options.out / "training.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    if not options.no_evaluate:
        use_fast_scans(FAMILIES[options.family].model_type, enable=False)
        result["evaluation"] = evaluate.evaluate(options.out, options.data, settings.device)
    result["wall_seconds"] = round(time.monotonic() - started, 1)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"[{options.family}] " + json.dumps({k: v for k, v in result.items() if k != "settings"}), flush=True)


if __name__ == "__main__":
    main()
