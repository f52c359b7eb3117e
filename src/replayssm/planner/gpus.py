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
        read_gb_s: bytes of a step that does not flush.
        fold_gb_s: bytes of a flush, which reads and writes.
        cast_us, probe_us: of a million elements of a state in fewer than 32 bits; the second once for what outputs read
            and again for what a delta rule reads.
        fold_cast_us: of a million elements of such a state in a flush.
        channel_us: of a million decayed key channels of records in the ring.
        stagger: time of a step in which some rows flush, over the sum of its parts.
        ordinary_launch_us, ordinary_gb_s: of an ordinary kernel, which reads and writes the state.
    """

    launch_us: float
    ramp_us: float
    ramp_half_us: float
    read_gb_s: float
    fold_gb_s: float
    cast_us: float
    probe_us: float
    fold_cast_us: float
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
    """How far the prediction of a layer's time is from measurements.

    Args:
        rows: measured rows.
        median, worst: of the relative differences.
        beyond: how many rows differ by more than 15 %.
        source: the file of the rows, in `benchmarks/kernels/results`.
    """

    rows: int
    median: float
    worst: float
    beyond: int
    source: str


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Args:
        name: as the command line calls it.
        memory_bytes: all of its memory.
        read_gb_s: large reads.
        launch_us: a small launch in a CUDA graph.
        matmul_tflops: bf16 products, as they are reached.
        kernels: costs of the state's kernels.
        fit: how well these agree with measurements.
        note: where the numbers come from.
    """

    name: str
    memory_bytes: float
    read_gb_s: float
    launch_us: float
    matmul_tflops: float
    kernels: KernelCosts
    fit: Fit
    note: str


MATMUL_SHARE = 0.7
"""Of the data sheet's rate: assumed, since no complete step has been measured yet."""

H200 = Gpu(
    name="h200",
    memory_bytes=141e9,
    read_gb_s=4600,
    launch_us=1.75,
    matmul_tflops=MATMUL_SHARE * 989,
    kernels=KernelCosts(
        launch_us=3.402,
        ramp_us=11.118,
        ramp_half_us=10.097,
        read_gb_s=4600,
        fold_gb_s=3471.6,
        cast_us=0.286,
        probe_us=0.338,
        fold_cast_us=2.067,
        channel_us=10.0,
        stagger=1.063,
        ordinary_launch_us=2.477,
        ordinary_gb_s=4009.7,
    ),
    fit=Fit(rows=73, median=0.039, worst=0.299, beyond=3, source="2026-11-30-h200.json"),
    note="memory and bf16 rate from the data sheet, reads and launches from the read floors of the measured file",
)

MEMORY_OF_H100 = 3350 / 4800
"""Rates of the data sheets (SXM); the processor is the same."""

H100 = replace(
    H200,
    name="h100",
    memory_bytes=80e9,
    read_gb_s=MEMORY_OF_H100 * H200.read_gb_s,
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
