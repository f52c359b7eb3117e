"""`replayssm plan`: what decoding a model takes on a GPU, and what replay gains there, without the GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from replayssm.cli.errors import CliError
from replayssm.planner.gpus import Fit, Gpu, find_gpu
from replayssm.planner.model import ModelSizes, config_of, fewer_layers, read_fields, sizes_of
from replayssm.planner.step import Plan, Workload, plans, weight_bytes

USUAL = ("fp32", "bf16", "fp32+fp8", "fp32+nvfp4")
MIB = 2**20
WIDTH = 130
"""Characters that the tables need."""


@dataclass(frozen=True)
class Request:
    """The command's options.

    Args:
        model: an id, a config.json, or a folder that holds one.
        gpu: name in `planner.gpus.GPUS`.
        batches: sequences, one prediction for each.
        context: tokens of each sequence.
        precisions: as `replayssm eval` names them.
        verify_len, accepted: tokens of a speculative step, and how many of them stay; 1 leaves it out.
        window: to predict for; None searches for the best, among those measured where any was.
        layers: of the model, the first ones; None for all.
        as_json: print JSON instead of tables.
    """

    model: str
    gpu: str
    batches: Sequence[int]
    context: int
    precisions: Sequence[str]
    verify_len: int
    accepted: int
    window: int | None
    layers: int | None
    as_json: bool


def run(request: Request) -> None:
    """Predict and print."""
    try:
        gpu = find_gpu(request.gpu)
        fields = fewer_layers(read_fields(request.model), request.layers)
        model = sizes_of(request.model, config_of(fields))
        steps = [(1, 1)] if request.verify_len == 1 else [(1, 1), (request.verify_len, request.accepted)]
        workloads = [Workload(batch, request.context, *tokens) for tokens in steps for batch in request.batches]
        found = plans(model, gpu, request.precisions, workloads, request.window)
    except ValueError as error:
        raise CliError(str(error)) from None
    if request.as_json:
        sys.stdout.write(json.dumps(to_json(model, gpu, found), indent=2) + "\n")
    else:
        show(model, gpu, found)


def to_json(model: ModelSizes, gpu: Gpu, found: Sequence[Plan]) -> dict[str, object]:
    """Everything as plain data."""
    recurrent = [
        {
            "recurrence": recurrence.title,
            "layers": count,
            "heads": g.heads,
            "key_dim": g.key_dim,
            "value_dim": g.value_dim,
        }
        for recurrence, g, count in model.recurrent
    ]
    return {
        "model": model.name,
        "parameters": model.parameters,
        "weight_bytes": weight_bytes(model),
        "recurrent_layers": recurrent,
        "attention_layers": model.attention_layers,
        "gpu": asdict(gpu),
        "plans": [plan.to_json() for plan in found],
    }


def show(model: ModelSizes, gpu: Gpu, found: Sequence[Plan]) -> None:
    """Print tables on standard output."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)  # a narrow terminal breaks lines, but no figure is cut short
    weights = weight_bytes(model)
    layers = ", ".join(f"{count} {recurrence.title}" for recurrence, _, count in model.recurrent)
    console.print(
        f"{model.name}: {model.parameters / 1e9:.2f} B weights, {weights / 1e9:.1f} GB in bf16; {layers} layers, "
        f"{model.attention_layers} with attention; {gpu.name}, {gpu.memory_bytes / 1e9:.0f} GB"
    )
    if weights > gpu.memory_bytes:
        console.print(
            f"The weights do not fit on one {gpu.name}: times are those of a GPU that had room for them, and --layers "
            "counts what fits beside the first layers only."
        )
    context = found[0].workload.context
    memory = _table(f"MiB of a sequence of {context} tokens", "precision", "step", "checkpoint", "read copy", "ring")
    for heading in ("carry", "keys, values", "all", "fit", "ordinary: all", "fit"):
        memory.add_column(heading, justify="right")
    seen = set()
    for plan in found:
        kind = (plan.precision, plan.workload.verify_len, plan.window)
        if kind in seen:
            continue
        seen.add(kind)
        m, o = plan.memory, plan.ordinary_memory
        sizes = (m.checkpoint, m.read_copy, m.ring, m.carry, context * m.kv_per_token, m.sequence)
        cells = [f"{size / MIB:.1f}" for size in sizes]
        memory.add_row(plan.precision, _step(plan), *cells, str(m.fit), f"{o.sequence / MIB:.1f}", str(o.fit))
    console.print(memory)
    times = _table("predicted step", "precision", "step", "batch", "window", "ms", "ordinary ms")
    for heading in ("state part", "gain", "of the state", "tokens/s", "over plain"):
        times.add_column(heading, justify="right")
    for plan in found:
        batch = str(plan.workload.batch) + ("" if plan.workload.batch <= plan.memory.fit else " (does not fit)")
        times.add_row(
            plan.precision + ("" if plan.is_measured else " *"),
            _step(plan),
            batch,
            str(plan.window),
            f"{plan.time.total / 1e3:.2f}",
            f"{plan.ordinary_time.total / 1e3:.2f}",
            f"{plan.time.state_share:.0%}",
            f"{plan.gain:.2f}x",
            f"{plan.state_gain:.2f}x",
            f"{plan.tok_s:,.0f}",
            f"{plan.gain_over_plain:.2f}x",
        )
    console.print(times)
    for line in _conditions(gpu, found):
        console.print(line)


def _conditions(gpu: Gpu, found: Sequence[Plan]) -> list[str]:
    lines = [
        _accuracy("Layer times", gpu.fit),
        _accuracy("Complete steps", gpu.step_fit),
        f"{gpu.name}: {gpu.note}.",
    ]
    if not all(plan.is_measured for plan in found):
        lines.append("* No layer was measured with this precision, window and number of tokens.")
    if any(plan.workload.verify_len > 1 for plan in found):
        lines.append(
            "With drafts, ordinary means a snapshot of the state per token; over plain counts accepted tokens."
        )
    return lines


def _accuracy(what: str, fit: Fit) -> str:
    return (
        f"{what}: {fit.rows} measured rows of an H200 ({', '.join(fit.sources)}) differ from the prediction by "
        f"{fit.median:.1%} in the median and {fit.worst:.0%} at most, {fit.beyond} of them by more than 15 %."
    )


def _step(plan: Plan) -> str:
    work = plan.workload
    return "1 token" if work.verify_len == 1 else f"{work.verify_len}, {work.accepted} stay"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < 2 else "right")
    return table
