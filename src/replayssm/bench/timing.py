"""Timing launches with a cold L2: CUDA-graph replays of a rotation over layers, device events, the median.

A kernel's memory must not be in the L2 from its last launch, so launches go round over enough layers that their states
together exceed the cache by far. Clocks are left as found: compare numbers of one run only.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

ROTATION_BYTES = 400e6
"""At least this much memory between two launches on the same layer; an H200 has 60 MB of L2."""

MIN_GRAPH_US = 1500.0
"""A replay shorter than this repeats its launches, so that the start of the graph does not count."""

REPLAYS = 15

Step = Callable[[int], object]
"""Launches one step of the given layer."""


def rotation_layers(bytes_per_launch: float, device: torch.device) -> int:
    """How many layers to rotate over; 2 on the CPU, where nothing is timed in earnest."""
    if device.type != "cuda":
        return 2
    return max(2, min(512, math.ceil(ROTATION_BYTES / bytes_per_launch)))


def rotation(steps: Sequence[Step], layers: int) -> tuple[Callable[[], None], int]:
    """(body, launches): all steps in turn, each launch on the next layer, until every layer was used."""
    launches = len(steps) * math.ceil(layers / len(steps))

    def body() -> None:
        for i in range(launches):
            steps[i % len(steps)](i % layers)

    return body, launches


@dataclass(frozen=True)
class Timing:
    """Microseconds per launch: median, and the fastest and slowest of the samples."""

    us: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Timing:
        return cls(statistics.median(values), min(values), max(values), len(values))


def device_laps(body: Callable[[], None], count: int) -> list[float]:
    """Microseconds of the GPU's work in each of `count` consecutive runs of a body."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        body()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]


def wall_laps(body: Callable[[], None], count: int) -> list[float]:
    """The same by the wall clock."""
    marks = [time.perf_counter()]
    for _ in range(count):
        body()
        marks.append(time.perf_counter())
    return [(b - a) * 1e6 for a, b in pairwise(marks)]


def spread(laps: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile of laps in microseconds, and the second over the first, as rows have them."""
    ordered = sorted(laps)
    p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50_us": p50, "p99_us": p99, "p99_over_p50": p99 / p50}


class Timer(Protocol):
    """Times a body of launches."""

    def time(self, body: Callable[[], None], launches: int, samples: int = REPLAYS) -> Timing:
        """Time per launch."""

    def alternate(self, bodies: Sequence[tuple[Callable[[], None], int]], rounds: int) -> list[list[float]]:
        """Time per launch of several bodies in turn, `rounds` medians for each."""

    def series(self, body: Callable[[], None], count: int) -> list[float]:
        """Microseconds of each of `count` consecutive runs of a body."""


class CudaTimer:
    """Graph replays between device events."""

    def time(self, body: Callable[[], None], launches: int, samples: int = REPLAYS) -> Timing:
        graph, repeats = self._graph(body)
        return Timing.of([us / (launches * repeats) for us in self._replay(graph, samples)])

    def alternate(self, bodies: Sequence[tuple[Callable[[], None], int]], rounds: int) -> list[list[float]]:
        graphs = [(*self._graph(body), launches) for body, launches in bodies]
        found: list[list[float]] = [[] for _ in bodies]
        for _ in range(rounds):
            for values, (graph, repeats, launches) in zip(found, graphs, strict=True):
                values.append(statistics.median(self._replay(graph, 7)) / (launches * repeats))
        return found

    def series(self, body: Callable[[], None], count: int) -> list[float]:
        graph = self._capture(body, 1)
        for _ in range(64):  # past the first flushes, into the steady state
            graph.replay()
        return device_laps(graph.replay, count)

    def _graph(self, body: Callable[[], None]) -> tuple[torch.cuda.CUDAGraph, int]:
        body()  # compiles and allocates
        graph = self._capture(body, 1)
        once = min(self._replay(graph, 3))
        repeats = min(16, math.ceil(MIN_GRAPH_US / max(once, 1.0)))
        return (graph, 1) if repeats == 1 else (self._capture(body, repeats), repeats)

    @staticmethod
    def _capture(body: Callable[[], None], repeats: int) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph would collect garbage and give back memory at each of hundreds of captures
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                for _ in range(repeats):
                    body()
            except BaseException:
                with suppress(RuntimeError):  # the capture is invalid by now, but must be left
                    graph.capture_end()
                raise
            graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    @staticmethod
    def _replay(graph: torch.cuda.CUDAGraph, samples: int) -> list[float]:
        """Microseconds of each replay."""
        graph.replay()
        begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(samples)] for _ in range(2))
        for begin, end in zip(begins, ends, strict=True):
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in zip(begins, ends, strict=True)]


class WallTimer:
    """One eager run by the wall clock: exercises the harness without a GPU. Its numbers mean nothing."""

    def time(self, body: Callable[[], None], launches: int, samples: int = REPLAYS) -> Timing:
        return Timing.of([us / launches for us in wall_laps(body, 1)])

    def alternate(self, bodies: Sequence[tuple[Callable[[], None], int]], rounds: int) -> list[list[float]]:
        return [[us / launches for us in wall_laps(body, 1)] for body, launches in bodies]

    def series(self, body: Callable[[], None], count: int) -> list[float]:
        return wall_laps(body, min(count, 4))


def timer_for(device: torch.device) -> Timer:
    """The timer of a device."""
    return CudaTimer() if device.type == "cuda" else WallTimer()
