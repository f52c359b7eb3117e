"""`replayssm tune`: find the fastest tiles for this GPU, among those that are right, and write them to its table.

Each candidate is first held to the torch back end over some steps with flushes, rejections and padding; one that is
wrong, or does not compile, gets no number. Times are of whole flush cycles with a cold L2 (`bench.timing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from torch import Tensor

from replayssm import flow
from replayssm.bench.timing import Timer, rotation, rotation_layers, timer_for
from replayssm.kernels.formats import PAIR_SUM_ERROR
from replayssm.kernels.launch import Choice, Tile, has_single, in_columns, launch_verify, read_codes, workspace
from replayssm.kernels.tuned import Measured, Shape, heuristic
from replayssm.kernels.verify import FLUSH_ROWS, STEP_ROWS
from replayssm.state import cursor
from replayssm.state.layout import StateLayout
from replayssm.state.plan import COLUMNS
from replayssm.state.pool import LayerState, StatePool

STATE_LIMITS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2, "fp8": 6e-2}
"""Allowed difference from the torch back end: a single tf32 product (1e-3) must not pass for fp32."""

COPY_LIMIT = 1e-2
"""The same of a read copy, in which the last bit of a checkpoint may decide between two neighbouring codes."""

ONE_LAUNCH = Tile(32), Tile(32, 2), Tile(64, 2, 2), Tile(64, 1, 2), Tile(16), Tile(32, 1, 2)
"""Tiles of launches over all rows of one token."""

CHECKED_ROWS = (3, -1, 0, 4, 1)


def tune(
    layout: StateLayout,
    batches: Sequence[int],
    tokens: int,
    device: torch.device,
    *,
    candidates: Sequence[Choice] | None = None,
    timer: Timer | None = None,
    workers: int = 1,
    log: Callable[[str], None] = print,
) -> list[Measured]:
    """The fastest right choice of a layer at each batch.

    Args:
        layout: the layer and its configuration, whose window is the one in force.
        batches: rows.
        tokens: tokens of a row in a step, all of them accepted.
        device: where to measure.
        candidates: choices to try; all that fit the geometry by default.
        timer: how to time; graphs and events on CUDA.
        workers: processes that compile and check candidates; 1 does it here.
        log: receives a line per candidate.
    """
    timer = timer_for(device) if timer is None else timer
    candidates = list(candidates_for(layout, tokens)) if candidates is None else list(candidates)
    right = []
    for choice, found in zip(candidates, _check_all(layout, tokens, candidates, device, workers), strict=True):
        if isinstance(found, str):
            log(f"{choice}: {found}")
        elif wrong := found.wrong(layout):
            log(f"{choice}: wrong, {wrong} from the torch back end")
        else:
            right.append(choice)
    rows = []
    for batch in batches:
        bench = _Bench(layout, batch, tokens, device, timer)
        # record by record is for a window in force of 1: every row folds in every step
        times = {choice: bench.us(choice, plain=choice.form == "recurrent") for choice in right}
        if not times:
            raise RuntimeError("no candidate is right; run the kernel tests on this machine")
        best = min(times, key=lambda choice: times[choice])
        window = 1 if best.form == "recurrent" else layout.config.window
        for choice, us in sorted(times.items(), key=lambda item: item[1])[:5]:
            log(f"batch {batch} {us:8.2f} us  {choice}")
        rows.append(Measured(Shape.of(layout), batch, tokens, layout.config.window, best, times[best], window))
    return rows


def candidates_for(layout: StateLayout, tokens: int) -> Iterator[Choice]:
    """The heuristic's choices, single launches, pairs of a step and a flush launch, and the recurrence as written.

    Where steps read codes only pairs.
    """
    seen: set[Choice] = set()

    def new(choice: Choice) -> Iterator[Choice]:
        if choice not in seen and all(_fits(layout, tile) for tile in (choice.step, choice.flush) if tile):
            seen.add(choice)
            yield choice

    for batch in (1, 10**6):
        yield from new(heuristic(layout, batch, tokens)[0])
    codes = read_codes(layout) is not None
    for block_p, warps in () if codes else ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (64, 2)):
        yield from new(Choice(Tile(block_p, 1, warps), form="recurrent"))
    for tile in ONE_LAUNCH if tokens == 1 and not codes else ():
        yield from new(Choice(tile))
        if has_single(layout, tokens) and tile.units == 1:
            yield from new(Choice(tile, form="single"))
    if in_columns(layout, tokens, STEP_ROWS.value):
        steps = [Tile(32), Tile(64), Tile(16), Tile(32, 2), Tile(16, 2)]
    elif codes:
        steps = [Tile(64), Tile(64, 1, 2), Tile(32), Tile(32, 2), Tile(16)]
    elif tokens == 1:
        steps = [Tile(32, 2), Tile(64, 1, 2), Tile(64, 4, 2), Tile(32), Tile(64), Tile(64, 2), Tile(16)]
    else:
        steps = [
            Tile(32, 8, 2, 3),
            Tile(64, 8, 4, 3),
            Tile(64, 4, 4, 2),
            Tile(32, 1, 4),
            Tile(64, 1, 4),
            Tile(16, 1, 2),
        ]
    if in_columns(layout, tokens, FLUSH_ROWS.value):
        flushes = [Tile(32), Tile(32, 4), Tile(16), Tile(16, 4), Tile(32, 1, 2)]
    elif codes and tokens == 1:
        flushes = [Tile(16, 8, 2, 2), Tile(16, 4, 2, 2), Tile(16, 1, 4)]
    elif tokens == 1:
        flushes = [Tile(32, 8, 2, 3), Tile(32, 4, 2, 3), Tile(32, 8, 4, 3)]
    else:
        flushes = [Tile(16, 8, 1, 2), Tile(16, 8, 2, 3), Tile(16, 8, 2, 2), Tile(16, 1, 4)]
    for step in steps:
        yield from new(Choice(step, flushes[0]))
    for flush in flushes:
        yield from new(Choice(steps[0], flush))


def _fits(layout: StateLayout, tile: Tile) -> bool:
    geometry = layout.geometry
    columns = max(16, 1 << (geometry.value_dim - 1).bit_length())
    return tile.block_p <= columns and geometry.heads * math.ceil(geometry.value_dim / tile.block_p) % tile.units == 0


def _check_all(
    layout: StateLayout, tokens: int, candidates: Sequence[Choice], device: torch.device, workers: int
) -> list[Errors | str]:
    """What `check` says of each candidate, or why it could not. Other processes leave kernels in Triton's cache."""
    if workers == 1:
        return [_attempt(layout, tokens, choice, device) for choice in candidates]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(_attempt, layout, tokens, choice, device) for choice in candidates]
        found: list[Errors | str] = []
        for job in jobs:
            try:
                found.append(job.result())
            except BrokenProcessPool:
                found.append("the process that ran it, or one beside it, died")
    return found


def _attempt(layout: StateLayout, tokens: int, choice: Choice, device: torch.device) -> Errors | str:
    try:
        return check(layout, tokens, choice, device)
    except Exception as error:  # noqa: BLE001 - compilers fail in many ways, and one candidate less is no loss
        return f"{type(error).__name__}: {str(error)[:200]}"


@dataclass(frozen=True)
class Errors:
    """Largest relative differences from the torch back end: of outputs, of states, and of read copies (0 without)."""

    outputs: float
    states: float
    copies: float

    def wrong(self, layout: StateLayout) -> str:
        """What is further off than is allowed, and how far; empty if nothing is."""
        state = STATE_LIMITS[layout.config.checkpoint_format]
        # write vectors beside a copy are kept in the model's dtype, and a copy may be read with sums in fp16
        beside = 0.0 if layout.read_format is None else PAIR_SUM_ERROR + torch.finfo(layout.model_dtype).eps
        limits = {"outputs": state + beside, "states": state, "copies": COPY_LIMIT}
        found = {name: getattr(self, name) for name, limit in limits.items() if not getattr(self, name) <= limit}
        return ", ".join(f"{name} differ by {error:.1e}" for name, error in found.items())


def check(layout: StateLayout, tokens: int, choice: Choice, device: torch.device) -> Errors:
    """Differences from the torch back end over a window and a half of steps, which both go through with one copy."""
    generator = torch.Generator().manual_seed(0)
    rows, recurrence, geometry = len(CHECKED_ROWS), layout.recurrence, layout.geometry
    _, params = recurrence.draw(geometry, (1,), generator)
    pools = [
        StatePool([LayerState.allocate(layout, 6, device, params)], backend=backend) for backend in ("torch", "triton")
    ]
    theirs, ours = pools
    for pool in pools:
        for _ in range(5):
            pool.acquire()
        for tensor in pool.layers[0].tensors.values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    outputs = copies = 0.0
    for number in range(3 * layout.config.window // (2 * tokens) + 2):
        inputs = _inputs(layout, rows, tokens, device, generator)
        counts = [0 if slot < 0 else max(1, tokens - (number + row) % 2) for row, slot in enumerate(CHECKED_ROWS)]
        steps = [flow.open_step(pool, CHECKED_ROWS, counts, width=tokens) for pool in pools]
        expected = flow.verify(theirs, 0, steps[0], inputs)
        y = torch.full(expected.shape, torch.nan, dtype=expected.dtype, device=device)
        work = workspace(layout, rows, tokens, device)
        launch_verify(
            ours.layers[0], steps[1].plan, inputs, y, choice, work, ours.cursor.saturated, ours.cursor.seed, 0
        )
        outputs = max(outputs, _difference(y, expected))
        folded = steps[0].slots[steps[0].due]
        if layout.read_format is not None and len(folded):
            found = [pool.layers[0].state(folded, "read_copy") for pool in (ours, theirs)]
            copies = max(copies, _difference(*found))
            for name, tensor in ours.layers[0].tensors.items():
                if name.startswith("read_copy"):
                    tensor.copy_(theirs.layers[0].tensors[name])
        for pool, step in zip(pools, steps, strict=True):
            flow.close_step(pool, step)
            flow.commit(pool, CHECKED_ROWS, [max(0, count - number % 2 * (tokens > 1)) for count in counts])
    live = [slot for slot in CHECKED_ROWS if slot >= 0]
    states = [flow.materialize(pool, 0, live) for pool in (ours, theirs)]
    return Errors(outputs, _difference(*states), copies)


def _difference(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref||, infinite where anything is NaN."""
    return float(torch.nan_to_num((out - ref).norm() / ref.norm(), nan=torch.inf))


def _inputs(
    layout: StateLayout, rows: int, tokens: int, device: torch.device, generator: torch.Generator
) -> dict[str, Tensor]:
    drawn, _ = layout.recurrence.draw(layout.geometry, (rows, tokens), generator)
    return {f.name: drawn[f.name].to(layout.dtype_of(f)).to(device) for f in layout.recurrence.inputs}


class _Bench:
    """Layers, inputs and plans of one batch, to time choices on."""

    def __init__(self, layout: StateLayout, batch: int, tokens: int, device: torch.device, timer: Timer) -> None:
        self.layout, self.timer = layout, timer
        generator = torch.Generator().manual_seed(0)
        count = rotation_layers(batch * layout.read_bytes, device)
        few = _inputs(layout, min(batch, 8), tokens, device, generator)
        self.inputs = {n: x.repeat(-(-batch // len(x)), *[1] * (x.dim() - 1))[:batch] for n, x in few.items()}
        _, params = layout.recurrence.draw(layout.geometry, (1,), generator)
        self.layers = [LayerState.allocate(layout, batch, device, params) for _ in range(count)]
        for layer in self.layers:
            for name, tensor in layer.tensors.items():
                # no kernel is timed on zeros, nor on decays that would let states grow
                if not tensor.is_floating_point():
                    tensor.random_(40, 80) if tensor.dtype == torch.uint8 else tensor.random_()
                else:
                    tensor.fill_(-0.05) if name.endswith("log_decay") else tensor.uniform_(0.01, 0.1)
        geometry = layout.geometry
        shape = (batch, tokens, geometry.heads, geometry.value_dim)
        self.y = torch.empty(shape, dtype=layout.model_dtype, device=device)
        self.work = workspace(layout, batch, tokens, device)
        self.saturated = torch.zeros(batch, dtype=torch.int64, device=device)
        lengths = list(range(tokens, layout.config.window + 1, tokens))
        self.cycle = [[lengths[(row + at) % len(lengths)] for row in range(batch)] for at in range(len(lengths))]
        if batch % len(lengths) == 0:
            self.cycle = self.cycle[:1]  # staggered rows look alike in every step
        self.plans = [self._plan(row_lengths, tokens, layout.config.window, device) for row_lengths in self.cycle]
        self.plain = self._plan([tokens] * batch, tokens, tokens, device)

    def us(self, choice: Choice, *, plain: bool = False) -> float:
        """Microseconds per layer and step, averaged over the cycle; `plain` flushes every row in every step."""

        def step_of(plan: Tensor) -> Callable[[int], object]:
            return lambda layer: launch_verify(
                self.layers[layer], plan, self.inputs, self.y, choice, self.work, self.saturated, self.saturated, layer
            )

        steps = [step_of(plan) for plan in ([self.plain] if plain else self.plans)]
        return self.timer.time(*rotation(steps, len(self.layers))).us

    def _plan(self, lengths: list[int], tokens: int, window: int, device: torch.device) -> Tensor:
        rows = []
        folds = [bool(cursor.due(length, tokens, window)) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda row: not folds[row])
        for row, (length, due) in enumerate(zip(lengths, folds, strict=True)):
            start = row * 7 % self.layout.ring_rows
            new_start, history = cursor.settle(start, length, due, self.layout.ring_rows)
            values = {"slot": row, "tokens": tokens, "folded": length - history, "fold_start": start, "due": int(due)}
            values |= {"history": history, "empty": 0, "order": order[row], "due_count": sum(folds)}
            values |= {"start": new_start, "position": 10_000, "tree": 0}
            rows.append([values[name] for name in COLUMNS])
        return torch.tensor(rows, dtype=torch.int64, device=device)
