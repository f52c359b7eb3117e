"""The time of one recurrent layer's step.

A step takes a launch and its work, and the work is what is longest: moving its bytes, or converting and multiplying the
elements of its states. A flush has costs of its own. Which tiles a kernel uses, and whether its second launch runs
beside the first, is not in it; `Gpu.fit` says how much that makes.
"""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.planner.gpus import KernelCosts
from replayssm.state.cursor import cycle
from replayssm.state.layout import StateLayout


@dataclass(frozen=True)
class LayerTimes:
    """Microseconds of one layer by view, as benchmarks name them: without and with a flush, and over the cycle.

    Args:
        step: in the middle of the window, no row flushes.
        flush: every row flushes.
        cycle: mean over the window, all rows at one phase.
        staggered: rows at all phases.
    """

    step: float
    flush: float
    cycle: float
    staggered: float


def layer_times(costs: KernelCosts, layout: StateLayout, rows: int, accepted: int) -> LayerTimes:
    """Times of a layer for `rows` rows of verify_len tokens, of which `accepted` stay."""
    config, geometry = layout.config, layout.geometry
    phases = cycle(config.window, config.verify_len, accepted)
    histories = [phase.length for phase in phases if not phase.due]
    steps, drafts = len(phases), config.verify_len - 1
    middle = phases[(steps - 1) // 2].length
    mean = sum(histories) / max(1, len(histories))
    new_bytes = rows * config.verify_len * (layout.io_bytes + layout.record_bytes)
    millions = rows * geometry.heads * geometry.key_dim * geometry.value_dim / 1e6
    probes = 2 if layout.recurrence.delta_rule else 1
    read = layout.read_format or layout.checkpoint_format
    padded = max(16, 1 << (config.window - 1).bit_length())
    ring = rows * geometry.heads * geometry.value_dim * padded / 1e6
    drafted = probes * (millions * drafts * costs.draft_us + (ring * costs.draft_ring_us if drafts else 0.0))

    def step(history: float) -> float:
        moved = new_bytes + rows * (layout.read_bytes + history * layout.record_bytes)
        converted = 0.0
        if read.bits_per_element < 16:
            converted = millions * (costs.code_us + probes * costs.code_probe_us)
        elif read.bits_per_element < 32:
            converted = millions * (costs.cast_us + probes * costs.probe_us)
        channels = 0.0
        if layout.recurrence.decay == "channel":
            channels = rows * geometry.heads * geometry.key_dim * history / 1e6
        return max(moved / costs.read_gb_s / 1e3, converted) + drafted + channels * costs.channel_us

    moved = new_bytes + rows * phases[-1].length * layout.record_bytes
    moved += rows * (2 * layout.bytes_of("checkpoint") + layout.bytes_of("read_copy"))
    converted = 0.0
    if read.bits_per_element < 16:
        solved = costs.code_solve_us if layout.recurrence.delta_rule else 0.0
        converted = millions * (costs.code_fold_us + solved)
    elif min(read.bits_per_element, layout.checkpoint_format.bits_per_element) < 32:
        converted = millions * costs.fold_cast_us
    fold = max(moved / costs.fold_gb_s / 1e3, converted) + drafted
    if drafts and layout.recurrence.delta_rule:
        fold += (1 - 16 / padded) * ring * costs.draft_fold_us

    def launched(work: float) -> float:
        launch = costs.launch_us + (costs.draft_launch_us if drafts else 0.0)
        if read.bits_per_element < 16:
            launch += probes * costs.code_launch_us
        return launch + work + costs.ramp_us * work / (work + costs.ramp_half_us)

    flushing = launched(fold)
    return LayerTimes(
        step=launched(step(middle)) if histories else flushing,
        flush=flushing,
        cycle=((steps - 1) * launched(step(mean)) + flushing) / steps,
        staggered=costs.stagger * launched(((steps - 1) * step(mean) + fold) / steps),
    )


def ordinary_us(costs: KernelCosts, layout: StateLayout, rows: int, tokens: int = 1) -> float:
    """An ordinary kernel: reads a state and writes one per token, which for drafts are snapshots."""
    moved = (1 + tokens) * layout.ordinary_bytes + tokens * layout.io_bytes
    return costs.ordinary_launch_us + rows * moved / costs.ordinary_gb_s / 1e3
