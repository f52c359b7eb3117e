"""Memory of a sequence, sequences that fit, and the complete decode step of a model on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from replayssm.config import MAX_WINDOW, ReplayConfig
from replayssm.planner.gpus import Gpu
from replayssm.planner.kernels import layer_times, ordinary_us
from replayssm.planner.model import MODEL_DTYPE, ModelSizes
from replayssm.state.layout import StateLayout

WEIGHT_BYTES = MODEL_DTYPE.itemsize
KEPT_FREE = 0.05
"""Of a GPU's memory, for activations, logits and the allocator."""
WINDOWS = (8, 12, 16, 24, 32, 48, 64)
MEASURED = {
    ("fp32", 1, 16),
    *(("fp32", 4, window) for window in (8, 16, 24, 32, 64)),
    ("fp32", 8, 16),
    ("bf16", 1, 16),
    ("fp32+fp8", 1, 32),
    ("fp32+int8", 1, 32),
    ("fp32+nvfp4", 1, 32),
}
"""(precision, tokens of a step, window) with measured rows in the files that the kernel costs come from."""

LAUNCHES = {"recurrent": 6, "attention": 16, "other": 3, "experts": 24}
"""Small launches of a layer beside its matrix products and its state kernel; of routed experts, further ones.

Counted in one decode step of small models, where neighbours are compiled and mixers fused: operators that are no view,
4 and 7 of a recurrent layer of nemotron_h and qwen3_5 (which holds a feed-forward part), 8 and 28 of one with
attention, 3 of a feed-forward one and 27 of one with experts.
"""


def require_work(verify_len: int = 1, accepted: int = 1, **counts: int) -> None:
    """ValueError unless every count is at least 1, and `accepted` tokens of a step of `verify_len` can stay."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if not 1 <= accepted <= verify_len:
        raise ValueError(f"accepted must be in 1..verify_len = {verify_len}, got {accepted}")


def steps_label(verify_len: int, accepted: int) -> str:
    """What a label of something measured or predicted says of its steps, a blank in front: of single tokens nothing."""
    return f" T={verify_len} a={accepted}" if verify_len > 1 else ""


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    Args:
        batch: sequences.
        context: tokens of each.
        verify_len: tokens of each in a step, 1 + drafts.
        accepted: how many of them stay on average.
    """

    batch: int
    context: int
    verify_len: int = 1
    accepted: int = 1

    def __post_init__(self) -> None:
        require_work(self.verify_len, self.accepted, batch=self.batch, context=self.context)


@dataclass(frozen=True)
class Memory:
    """Bytes of one sequence over all layers.

    Args:
        checkpoint, read_copy, ring, carry: of the recurrent layers.
        kv_per_token: keys and values of all attention layers, per token.
        sequence: all of it at the workload's context.
        fit: sequences that fit beside the weights; 0 when even one, or the weights, do not.
    """

    checkpoint: int
    read_copy: int
    ring: int
    carry: int
    kv_per_token: int
    sequence: int
    fit: int


@dataclass(frozen=True)
class StepTime:
    """Microseconds of one complete decode step, by what they are spent on."""

    state: float
    matrices: float
    attention: float
    launches: float

    @property
    def total(self) -> float:
        return self.state + self.matrices + self.attention + self.launches

    @property
    def state_share(self) -> float:
        return self.state / self.total


@dataclass(frozen=True)
class Plan:
    """One precision setting of one workload.

    Args:
        precision: "checkpoint" or "checkpoint+read copy".
        workload: what is decoded.
        window: the one with the fastest step among those measured with this precision and number of tokens, or among
            `WINDOWS` where none was.
        memory, time: with replay.
        ordinary_memory, ordinary_time: of ordinary decoding with the checkpoint's format, and of snapshots where there
            are drafts.
        plain_time: ordinary decoding of single tokens.
        is_measured: whether layers were measured with this precision, window and number of tokens.
    """

    precision: str
    workload: Workload
    window: int
    memory: Memory
    time: StepTime
    ordinary_memory: Memory
    ordinary_time: StepTime
    plain_time: StepTime
    is_measured: bool

    @property
    def gain(self) -> float:
        """How many times faster than the ordinary step with as many tokens."""
        return self.ordinary_time.total / self.time.total

    @property
    def state_gain(self) -> float:
        """The same of the state part alone."""
        return self.ordinary_time.state / self.time.state

    @property
    def tok_s(self) -> float:
        """Tokens per second of all sequences."""
        return self.workload.batch * self.workload.accepted / self.time.total * 1e6

    @property
    def gain_over_plain(self) -> float:
        """Tokens per second over ordinary decoding of single tokens."""
        return self.tok_s * self.plain_time.total / self.workload.batch / 1e6

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data, times in microseconds."""

        def time_of(time: StepTime) -> dict[str, float]:
            return {f"{name}_us": value for name, value in vars(time).items()} | {"total_us": time.total}

        return {
            "precision": self.precision,
            **vars(self.workload),
            "window": self.window,
            "is_measured": self.is_measured,
            "memory_bytes": vars(self.memory),
            "ordinary_memory_bytes": vars(self.ordinary_memory),
            "step": time_of(self.time),
            "ordinary_step": time_of(self.ordinary_time),
            "state_share": self.time.state_share,
            "state_gain": self.state_gain,
            "gain": self.gain,
            "gain_over_plain": self.gain_over_plain,
            "tok_s": self.tok_s,
        }


def plan(model: ModelSizes, gpu: Gpu, precision: str, workload: Workload, window: int | None = None) -> Plan:
    """Predict one setting, with the best window (`Plan.window`) unless one is given.

    Raises:
        ValueError: the precision makes no sense, or the window has no room for the drafts.
    """
    largest = ReplayConfig.of(precision, window=MAX_WINDOW)
    measured = sorted(w for name, tokens, w in MEASURED if (name, tokens) == (precision, workload.verify_len))
    windows = (measured or [w for w in WINDOWS if w >= workload.verify_len]) if window is None else [window]
    configs = [replace(largest, window=w, verify_len=workload.verify_len) for w in windows]
    times = [step_time(model, gpu, workload, _replay_us(model, gpu, config, workload)) for config in configs]
    time, config = min(zip(times, configs, strict=True), key=lambda pair: pair[0].total)
    plain = replace(workload, verify_len=1, accepted=1)
    return Plan(
        precision=precision,
        workload=workload,
        window=config.window,
        memory=_memory(model, gpu, config, workload.context),
        time=time,
        ordinary_memory=_ordinary_memory(model, gpu, config, workload),
        ordinary_time=step_time(model, gpu, workload, _ordinary_us(model, gpu, config, workload)),
        plain_time=step_time(model, gpu, plain, _ordinary_us(model, gpu, config, plain)),
        is_measured=(precision, workload.verify_len, config.window) in MEASURED,
    )


def step_time(model: ModelSizes, gpu: Gpu, workload: Workload, state_us: float) -> StepTime:
    """The complete step around a state part of `state_us`: every neighbour as it is with or without replay."""
    tokens = workload.batch * workload.verify_len

    def product(read: float, multiplied: float, share: float = 1.0) -> float:
        moved = WEIGHT_BYTES * read / gpu.read_gb_s / 1e3
        return gpu.product_us + max(moved, 2 * tokens * multiplied / gpu.matmul_tflops / share / 1e6)

    matrices = sum(product(weights, weights) for weights in model.matrices)
    # experts' weights come in two matrices
    matrices += sum(
        gpu.product_us + product(e.touched(tokens) * e.weights, e.chosen * e.weights, gpu.expert_share)
        for e in model.experts
    )
    kept = workload.batch * workload.context * model.kv_elements * WEIGHT_BYTES
    scores = tokens * workload.context * model.score_flops
    attention = model.attention_layers * (max(kept / gpu.attention_gb_s / 1e3, scores / gpu.matmul_tflops / 1e6))
    others = max(0, model.layers - model.recurrent_layers - model.attention_layers)
    launches = model.recurrent_layers * LAUNCHES["recurrent"] + model.attention_layers * LAUNCHES["attention"]
    launches += others * LAUNCHES["other"] + len(model.experts) * LAUNCHES["experts"]
    return StepTime(state_us, matrices, attention, launches * gpu.launch_us)


def weight_bytes(model: ModelSizes) -> int:
    """All weights in bf16."""
    return WEIGHT_BYTES * model.parameters


def _layouts(model: ModelSizes, config: ReplayConfig) -> list[tuple[StateLayout, int]]:
    return [
        (StateLayout(recurrence, geometry, config, MODEL_DTYPE), count)
        for recurrence, geometry, count in model.recurrent
    ]


def _replay_us(model: ModelSizes, gpu: Gpu, config: ReplayConfig, workload: Workload) -> float:
    return sum(
        count * layer_times(gpu.kernels, layout, workload.batch, workload.accepted).staggered
        for layout, count in _layouts(model, config)
    )


def _ordinary_us(model: ModelSizes, gpu: Gpu, config: ReplayConfig, workload: Workload) -> float:
    return sum(
        count * ordinary_us(gpu.kernels, layout, workload.batch, workload.verify_len)
        for layout, count in _layouts(model, config)
    )


def _memory(model: ModelSizes, gpu: Gpu, config: ReplayConfig, context: int) -> Memory:
    parts = {
        kind: sum(count * layout.bytes_of(kind) for layout, count in _layouts(model, config))
        for kind in ("checkpoint", "read_copy", "ring", "carry")
    }
    return _beside_weights(model, gpu, parts, context)


def _ordinary_memory(model: ModelSizes, gpu: Gpu, config: ReplayConfig, workload: Workload) -> Memory:
    """One state per token of a step: the drafts' are snapshots. The convolution keeps what replay keeps."""
    layouts = _layouts(model, config)
    parts = {
        "checkpoint": sum(count * layout.ordinary_bytes for layout, count in layouts) * workload.verify_len,
        "read_copy": 0,
        "ring": 0,
        "carry": sum(count * layout.bytes_of("carry") for layout, count in layouts),
    }
    return _beside_weights(model, gpu, parts, workload.context)


def _beside_weights(model: ModelSizes, gpu: Gpu, parts: dict[str, int], context: int) -> Memory:
    per_token = model.attention_layers * model.kv_elements * WEIGHT_BYTES
    sequence = sum(parts.values()) + context * per_token
    free = (1 - KEPT_FREE) * gpu.memory_bytes - weight_bytes(model)
    return Memory(**parts, kv_per_token=per_token, sequence=sequence, fit=max(0, int(free // sequence)))


def plans(
    model: ModelSizes, gpu: Gpu, precisions: Sequence[str], workloads: Sequence[Workload], window: int | None = None
) -> list[Plan]:
    """Every precision with every workload."""
    return [plan(model, gpu, precision, workload, window) for precision in precisions for workload in workloads]
