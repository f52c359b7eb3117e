"""Decode steps of vLLM with and without the plug-in: two processes with the same settings, one after the other.

The model has random weights, which a loader of ours fills in before vLLM measures memory: constant ones would compute
nothing but zeros. A step is timed once every request of the batch is past its prompt, and none ends while it is timed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from replayssm import ReplayConfig
from replayssm.bench.rows import Conditions, Refusal, Report, Row
from replayssm.bench.show import headline
from replayssm.bench.timing import spread, wall_laps
from replayssm.planner.model import config_of, fewer_layers, read_fields
from replayssm.planner.step import require_work

LOAD_FORMAT = "replayssm_random"
WARM_UP = 24
COMPARED_ROWS, COMPARED = 8, 8
"""How many rows' first tokens are compared between the sides, and how many tokens of each."""
DRAFTED = 256
"""Tokens that models with drafts know: of so few each is in a prompt, and a look-up finds drafts for every step."""
LEAST_ALIKE = 0.25
"""Allowed share of compared tokens before rows first differ. bf16 rounding alone turns a near tie now and then, behind
which a row goes on differently; a step that computes something else agrees on the first token only, the prompt's."""
SIDES = ("ordinary", "replay")
STATES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Formats of states that vLLM has, and how it calls them. Beside any other the ordinary side has fp32."""
OWN = {
    "model": "it is the command's argument",
    "speculative_config": "draft_len says how many tokens are guessed",
    "mamba_ssm_cache_dtype": "precision says how states are kept",
}
"""Arguments of `vllm.LLM` that rows of results would not show, and what to use instead."""
DETAILS = ("context", "tok_s", "p50_us", "p99_over_p50", "blocks", "tokens")


@dataclass(frozen=True)
class EngineRequest:
    """The options.

    Args:
        model: an id, a config.json, or a folder that holds one.
        layers: its first layers only; None for all.
        batches: rows of a step, every one measured in the same engine.
        context: tokens of each prompt.
        precision, window: how replay keeps the state; without it states are kept in the checkpoint's format.
        draft_len: tokens that n-gram speculation guesses, 0 for none.
        steps: steps to time.
        options: further arguments of `vllm.LLM`, for both sides; those in OWN are not among them.
    """

    model: str
    layers: int | None = None
    batches: Sequence[int] = (1, 32, 128, 256)
    context: int = 1024
    precision: str = "fp32"
    window: int = 16
    draft_len: int = 0
    steps: int = 96
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        require_work(batches=min(self.batches, default=0), context=self.context, steps=self.steps)
        if self.options is not None and not isinstance(self.options, Mapping):
            raise ValueError(f"options must be an object with arguments of vllm.LLM, got {self.options!r}")
        for name, instead in OWN.items():
            if name in (self.options or {}):
                raise ValueError(f"options must not set {name}: {instead}")
        additional = (self.options or {}).get("additional_config", {})
        if not isinstance(additional, Mapping) or "replayssm" in additional:
            raise ValueError(
                f"additional_config must be an object without replayssm, which one side gets, got {additional!r}"
            )
        ReplayConfig.of(self.precision, window=self.window, verify_len=1 + self.draft_len)


def run(request: EngineRequest, json_out: Path | None, commit: str | None = None) -> Report:
    """Measure both sides, each in a process of its own.

    Raises:
        ValueError: there is no such model, or it is no language model.
    """
    given, fields = Path(request.model), read_fields(request.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report(Conditions.collect(device, commit), json_out)
    name = given.name if given.exists() else request.model
    ordinary: dict[int, Mapping[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if given.is_dir() and request.layers is None:
            folder = str(given)
        else:
            save_config(fewer_layers(fields, request.layers), Path(folder))
        for side in SIDES:
            command = [sys.executable, "-m", "replayssm.bench.engine", folder, side, json.dumps(asdict(request))]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=_environment())
            found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"batch"')]
            for one in found:
                _report(report, name, request, side, one, ordinary)
            if done.returncode or len(found) < len(request.batches):
                reason = f"the engine's process ended with status {done.returncode} after {len(found)} batches"
                report.refuse(Refusal(f"engine {side}", side, name, {}, reason))
    return report


def save_config(fields: Mapping[str, Any], folder: Path) -> None:
    """config.json as vLLM reads it: with the name of the class that transformers builds from it.

    Raises:
        ValueError: that is no language model.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(fields)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"transformers has no language model of the configuration {config.model_type}")
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)


def _environment() -> dict[str, str]:
    # the engine in the process itself, unless the environment says otherwise: its steps are called one by one
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    ours["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # our lines are on the other one
    if importlib.util.find_spec("flashinfer") is None:
        ours["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM takes it for installed wherever there is a GPU
    return ours | os.environ


def _report(
    report: Report,
    model: str,
    request: EngineRequest,
    side: str,
    found: Mapping[str, Any],
    ordinary: dict[int, Mapping[str, Any]],
) -> None:
    """Add a row for what one side's process has found; refuse one whose text is not that of the ordinary side."""
    batch = found["batch"]
    if "reason" in found:
        report.refuse(Refusal(f"engine {side}", side, f"{model} B={batch}", {}, found["reason"]))
        return
    detail = {name: found[name] for name in DETAILS}
    if side == "ordinary":
        ordinary[batch] = found
    row = Row(
        what=f"engine {side}",
        name="vLLM" if side == "ordinary" else "vLLM with replay",
        version=found["version"],
        geometry=model,
        batch=batch,
        format=request.precision if side == "replay" else ordinary_format(request.precision),
        view="engine",
        us=found["us"],
        low_us=found["low_us"],
        high_us=found["high_us"],
        window=request.window if side == "replay" else None,
        verify_len=1 + request.draft_len,
        detail=detail,
    )
    beside = ordinary.get(batch)
    if side == "replay" and beside is not None:
        alike = agreement(found["text"], beside["text"])
        row = replace(row, ordinary_us=beside["us"], detail=detail | {"agreement": alike})
        if alike < LEAST_ALIKE:
            reason = f"rows differ from vLLM's own behind {alike:.0%} of their first {COMPARED} tokens"
            report.refuse(Refusal(row.what, row.name, f"{model} B={batch}", {}, reason))
            return
    report.add(row)


def ordinary_format(precision: str) -> str:
    """Format of states beside replay of a precision: its checkpoint's, or fp32 where vLLM has no such states."""
    checkpoint = precision.partition("+")[0]
    return checkpoint if checkpoint in STATES else "fp32"


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The mean share of a row's tokens in front of the first that differs between two sides, 0 to 1."""
    shares = []
    for a, b in zip(ours, theirs, strict=True):
        differ = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        shares.append((differ[0] if differ else len(a)) / len(a))
    return sum(shares) / len(shares)


def print_table(report: Report) -> None:
    """All rows of a report that are steps of an engine."""
    console = Console(width=None if Console().is_terminal else 160, highlight=False, markup=False)
    console.print(headline(report.conditions), style="dim")
    table = Table()
    for heading in ("model", "batch", "context", "precision", "engine", "ms", "p99/p50", "tok/s", "x ordinary"):
        table.add_column(heading)
    for row in (row for row in report.rows if row.view == "engine"):
        table.add_row(
            row.geometry,
            str(row.batch),
            f"{row.detail['context']:.0f}",
            row.format + ("" if row.window is None else f" W={row.window}"),
            f"{row.name} {row.version}",
            f"{row.us / 1e3:.3f}",
            f"{row.detail['p99_over_p50']:.3f}",
            f"{row.detail['tok_s']:,.0f}",
            "" if row.over_ordinary is None else f"{row.over_ordinary:.2f}",
        )
    console.print(table)
    for refusal in report.refusals:
        console.print(f"refused: {refusal.case}: {refusal.name}: {refusal.reason}", style="yellow")


# ---- in the engine's process


def measure(folder: str, side: str, request: EngineRequest) -> None:
    """Print one JSON line per batch: what was found, or the reason why nothing was."""
    import vllm
    from vllm import LLM

    tokens = DRAFTED if request.draft_len else None
    register_random_weights(tokens)
    register_text_model(Path(folder))
    options: dict[str, Any] = {
        "model": folder,
        "skip_tokenizer_init": True,
        "load_format": LOAD_FORMAT,
        "dtype": "bfloat16",
        "mamba_ssm_cache_dtype": STATES[ordinary_format(request.precision)],
        "enable_prefix_caching": False,
        "max_num_seqs": max(request.batches),
        "max_model_len": request.context + (WARM_UP + request.steps + 64) * (1 + request.draft_len),
        "compilation_config": {"cudagraph_capture_sizes": sorted({*request.batches})},
    }
    if request.draft_len:
        sizes = sorted({batch * (1 + request.draft_len) for batch in request.batches} | {*request.batches})
        options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": request.draft_len,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        }
    given = dict(request.options or {})
    # FlashInfer's scan of prompts, which are not timed, would be compiled first
    additional: dict[str, Any] = {"gdn_prefill_backend": "triton"} | dict(given.get("additional_config", {}))
    if side == "replay":
        additional["replayssm"] = {"precision": request.precision, "window": request.window}
    engine = LLM(**options | given | {"additional_config": additional}).llm_engine
    vocabulary = tokens or engine.vllm_config.model_config.get_vocab_size()
    blocks = engine.vllm_config.cache_config.num_gpu_blocks or 0
    for batch in sorted(request.batches):
        try:
            found = _steps(engine, request, batch, vocabulary)
        except NotTogether as error:
            found = {"reason": str(error)}
        print(json.dumps({"batch": batch, "version": vllm.__version__, "blocks": blocks} | found), flush=True)


class NotTogether(Exception):
    """The rows of a batch did not all decode in each of the steps."""


def _steps(engine: Any, request: EngineRequest, batch: int, vocabulary: int) -> dict[str, Any]:
    running = _Running(engine, torch.Generator().manual_seed(batch), vocabulary)
    try:
        running.begin(batch, request.context)
        for _ in range(WARM_UP):
            running.step()
        before = sum(running.lengths.values())
        times = wall_laps(running.step, request.steps)
        produced = sum(running.lengths.values()) - before
    finally:
        running.end()
    if produced < batch * request.steps:
        raise NotTogether(
            f"{request.steps} steps of {batch} rows brought {produced} tokens: rows waited for room in the cache"
        )
    while len(running.texts) < COMPARED_ROWS:  # of the steps of small batches, too, enough is compared
        running.begin(batch, request.context)
        for _ in range(COMPARED):
            running.step()
        running.end()
    total = sum(times)
    return {
        "us": total / len(times),
        "low_us": min(times),
        "high_us": max(times),
        **spread(times),
        "tok_s": 1e6 * produced / total,
        "tokens": produced,
        "context": request.context,
        "text": list(running.texts.values())[:COMPARED_ROWS],
    }


class _Running:
    """Requests with random prompts in an engine.

    Args:
        engine: vLLM's, in this process.
        generator: of the prompts.
        vocabulary: number of tokens.
    """

    def __init__(self, engine: Any, generator: torch.Generator, vocabulary: int) -> None:
        self.engine, self.generator, self.vocabulary = engine, generator, vocabulary
        self.lengths: dict[str, int] = {}
        self.texts: dict[str, list[int]] = {}
        """The first tokens that each request has got, in the order in which they were added."""
        self._names: list[str] = []

    def begin(self, batch: int, context: int) -> None:
        """Add so many requests, and go on until the prompts of all are done."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True, detokenize=False)
        self.lengths, self._names = {}, [f"{batch}-{len(self.texts) + row}" for row in range(batch)]
        for name in self._names:
            tokens = torch.randint(self.vocabulary, (context,), generator=self.generator).tolist()
            self.texts[name] = []
            self.engine.add_request(name, {"prompt_token_ids": tokens}, params)
        while len(self.lengths) < batch:
            self.step()

    def step(self) -> None:
        """One step of the engine.

        Raises:
            NotTogether: a request has ended, which only those do that have as many tokens as the engine allows.
        """
        for output in self.engine.step():
            if output.finished:
                raise NotTogether(
                    "a row was as long as max_model_len allows before all had decoded together: the cache has no room "
                    "for so many, or their prompts take too many steps (options max_model_len, max_num_batched_tokens)"
                )
            tokens = output.outputs[0].token_ids
            self.lengths[output.request_id] = len(tokens)
            if len(self.texts[output.request_id]) < COMPARED:
                self.texts[output.request_id] = list(tokens[:COMPARED])

    def end(self) -> None:
        """Take all of them out again."""
        self.engine.abort_request(self._names)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def register_text_model(folder: Path) -> None:
    """Let vLLM know the architecture of a text model that it has, but under another name."""
    from vllm.model_executor.models.registry import ModelRegistry

    for name in json.loads((folder / "config.json").read_text())["architectures"]:
        if name.startswith("Qwen3_5") and name not in ModelRegistry.get_supported_archs():
            from replayssm.bench.engine_models import TEXT_MODELS

            ModelRegistry.register_model(name, TEXT_MODELS[name])


def register_random_weights(tokens: int | None = None) -> None:
    """A load format of vLLM whose weights are random numbers of a trained model's size, the same every time.

    A model says the first `tokens` only: the logits of all others are 0, and one of so many is larger.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class RandomLoader(DummyModelLoader):
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            for number, (name, parameter) in enumerate(model.named_parameters()):
                fill(name, parameter.data, torch.Generator(parameter.device).manual_seed(number))
                if tokens is not None and {"lm_head", "embed_tokens", "embeddings"} & {*name.split(".")}:
                    parameter.data[tokens:] = 0

    register_model_loader(LOAD_FORMAT)(RandomLoader)


def fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Random numbers for one parameter of a model, by its name."""
    last = name.rsplit(".", 1)[-1]
    if last == "A":  # as the engine keeps it, -exp(A_log)
        weight.uniform_(1, 16, generator=generator).neg_()
    elif last == "A_log":
        weight.uniform_(1, 16, generator=generator).log_()
    elif last == "dt_bias":
        weight.uniform_(-4.6, -2.3, generator=generator)
    elif weight.dim() >= 2:
        weight.normal_(0, 0.5 if "conv1d" in name else 0.02, generator=generator)
    elif last == "bias":
        weight.zero_()
    else:
        weight.fill_(1)


if __name__ == "__main__":
    measure(sys.argv[1], sys.argv[2], EngineRequest(**json.loads(sys.argv[3])))
