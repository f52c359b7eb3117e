"""What a GPU can do. Every number says where it comes from; `benchmarks/planner/fit.py` finds those of the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class KernelCosts:
    """What the terms of `planner.kernels` cost.

    Args:
        launch_us: a replay step over almost nothing.
        ramp_us, ramp_half_us: what a step takes longer because the GPU is not full at its begin and end; half of it is
            there when the work itself takes ramp_half_us.
        draft_launch_us: what a step with drafts takes longer, however small: its launches wait for one another, where a
            single token may do with one.
        draft_us: of a million elements of a state for each draft, once for what outputs read and again for what a delta
            rule reads.
        draft_ring_us: with drafts, of a million elements of a ring's write vectors, all rows of its padded window, once
            or twice as well.
        draft_fold_us: with drafts, of a million elements of a delta rule's ring beyond 16 rows in a flush.
        read_gb_s: bytes of a step that does not flush.
        fold_gb_s: bytes of a flush, which reads and writes.
        cast_us, probe_us: of a million elements of a state in 16 bits; the second once for what outputs read and again
            for what a delta rule reads.
        fold_cast_us: of a million elements of such a state in a flush.
        code_launch_us: what a step that reads 8 or 4 bits takes longer, however small; twice where windows are solved
            again, which is a launch more.
        code_us, code_probe_us, code_fold_us: the same as above of a state in 8 or 4 bits.
        code_solve_us: of a million elements of such a copy in a flush of a delta rule, which solves its window again.
        channel_us: of a million decayed key channels of records in the ring.
        stagger: time of a step in which some rows flush, over the sum of its parts.
        ordinary_launch_us, ordinary_gb_s: of an ordinary kernel, which reads and writes the state.
    """

    launch_us: float
    ramp_us: float
    ramp_half_us: float
    draft_launch_us: float
    draft_us: float
    draft_ring_us: float
    draft_fold_us: float
    read_gb_s: float
    fold_gb_s: float
    cast_us: float
    probe_us: float
    fold_cast_us: float
    code_launch_us: float
    code_us: float
    code_probe_us: float
    code_fold_us: float
    code_solve_us: float
    channel_us: float
    stagger: float
    ordinary_launch_us: float
    ordinary_gb_s: float

    def with_memory(self, ratio: float) -> KernelCosts:
        """The same kernels on the same processor with memory `ratio` times as fast."""
        rates = ("read_gb_s", "fold_gb_s", "ordinary_gb_s")
        return replace(self, **{name: ratio * getattr(self, name) for name in rates})


@dataclass(frozen=True)
class Fit:
    """How far predicted times are from measured ones.

    Args:
        rows: measured rows.
        median, worst: of the relative differences.
        beyond: how many rows differ by more than 15 %.
        sources: files of the rows, in `benchmarks`; of rows that are in several, those in the last one count.
    """

    rows: int
    median: float
    worst: float
    beyond: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Args:
        name: as the command line calls it.
        memory_bytes: all of its memory.
        read_gb_s: large reads.
        launch_us: a small launch in a CUDA graph.
        product_us: what a matrix product takes besides its bytes or its arithmetic.
        matmul_tflops: bf16 products, as they are reached.
        expert_share: of that rate, what the products of many routed experts reach, each with its few tokens.
        attention_gb_s: keys and values.
        kernels: costs of the state's kernels.
        fit: how well predicted layers agree with measured ones.
        step_fit: the same of complete steps.
        note: where the numbers come from.
    """

    name: str
    memory_bytes: float
    read_gb_s: float
    launch_us: float
    product_us: float
    matmul_tflops: float
    expert_share: float
    attention_gb_s: float
    kernels: KernelCosts
    fit: Fit
    step_fit: Fit
    note: str


READ_GB_S = 4600
ATTENTION_SHARE = 0.7
"""Of that rate, for keys and values: what contexts of 4,096 and 16,384 tokens add to a step (`step_fit`)."""
PRODUCT_US, MATMUL_SHARE = 8.0, 0.64
"""The second is of the data sheet's rate. Both are what the rows without a state part leave for products of 1, 8 and
256 tokens (`step_fit`)."""

EXPERT_SHARE = 0.19
"""From one model: 512 experts with 88 tokens each take 4 ms a layer, what sorts tokens around them included."""

PARTS = ("", "-bits16", "-reads", "-drafts", "-drafts-small", "-draft-windows", "-hints")
NEXT_DAY = ("one-launch", "one-launch-small", "one-launch-bits16")
KERNEL_SOURCES = (
    *(f"kernels/results/2026-11-30-h200{part}.json" for part in PARTS),
    *(f"kernels/results/2026-12-01-h200-{part}.json" for part in NEXT_DAY),
)
STEP_PARTS = ("nano", "qwen", "nano-contexts", "qwen-contexts", "nano-drafts", "qwen-drafts", "super-drafts")
STEP_SOURCES = tuple(f"steps/results/2026-11-30-h200-{part}.json" for part in STEP_PARTS)

H200 = Gpu(
    name="h200",
    memory_bytes=141e9,
    read_gb_s=READ_GB_S,
    launch_us=1.75,
    product_us=PRODUCT_US,
    matmul_tflops=MATMUL_SHARE * 989,
    expert_share=EXPERT_SHARE,
    attention_gb_s=ATTENTION_SHARE * READ_GB_S,
    kernels=KernelCosts(
        launch_us=3.57,
        ramp_us=3.101,
        ramp_half_us=1.084,
        draft_launch_us=10.51,
        draft_us=0.04121,
        draft_ring_us=1.173,
        draft_fold_us=9.213,
        read_gb_s=READ_GB_S,
        fold_gb_s=3114,
        cast_us=0.2067,
        probe_us=0.235,
        fold_cast_us=1.791,
        code_launch_us=1.133,
        code_us=0.2323,
        code_probe_us=0.08695,
        code_fold_us=4.153,
        code_solve_us=3.918,
        channel_us=10.56,
        stagger=1.064,
        ordinary_launch_us=2.426,
        ordinary_gb_s=3861,
    ),
    fit=Fit(rows=331, median=0.052, worst=0.562, beyond=27, sources=KERNEL_SOURCES),
    step_fit=Fit(rows=61, median=0.042, worst=0.101, beyond=0, sources=STEP_SOURCES),
    note="memory and bf16 rate from the data sheet, 64 % of which products reach in the measured steps, beside 8 us "
    "each; reads and launches from the read floors of the measured files",
)

MEMORY_OF_H100 = 3350 / 4800
"""Rates of the data sheets (SXM); the processor is the same."""

H100 = replace(
    H200,
    name="h100",
    memory_bytes=80e9,
    read_gb_s=MEMORY_OF_H100 * H200.read_gb_s,
    attention_gb_s=MEMORY_OF_H100 * H200.attention_gb_s,
    kernels=H200.kernels.with_memory(MEMORY_OF_H100),
    note="not measured: the H200's numbers, with rates of memory in the ratio of the data sheets",
)

GPUS = {gpu.name: gpu for gpu in (H200, H100)}


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`; ValueError naming all of them where there is none."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise ValueError(f"no GPU is called {name!r}; there are: {', '.join(GPUS)}") from None
