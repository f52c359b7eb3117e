"""This library as a candidate: the layer kernel of `flow.verify` at every phase of the flush cycle.

The step's plan is computed beforehand for each phase, with the cursor set to it, so that a launch is what one layer
costs. `live` is a whole step instead: plan, all layers, settling and commit, with the cursor moving by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from replayssm import ReplayConfig, __version__
from replayssm.bench.candidate import Config, View, What
from replayssm.bench.cases import Case
from replayssm.bench.geometries import Model
from replayssm.bench.reference import Errors, recurrent, relative_error, sample_rows
from replayssm.bench.timing import Step as Launch
from replayssm.bench.timing import rotation_layers
from replayssm.flow import close_step, commit, load, materialize, open_step, prompt, verify
from replayssm.flow.step import Step
from replayssm.planner.model import MODEL_DTYPE
from replayssm.recurrences import Geometry
from replayssm.state.cursor import Phase
from replayssm.state.layout import StateLayout, Tally
from replayssm.state.pool import StatePool

STATE_LIMITS = {"fp64": 1e-12, "fp32": 2e-5, "fp16": 3e-3, "bf16": 2e-2}
"""Allowed state error by checkpoint format: single tf32 products (1e-3) must not pass for fp32; a 16-bit checkpoint is
rounded at each of the check's few flushes."""

OUTPUT_LIMIT = 1e-2
"""Allowed output error when outputs are rounded to bf16, or the checkpoint is 16 bit."""

READ_LIMITS = {"fp16": 3e-3, "bf16": 2e-2, "fp8": 8e-2, "int8": 5e-2, "nvfp4": 2.5e-1}
"""Allowed output error by read-copy format."""


LaunchLayer = Callable[[StatePool, int, Step, Mapping[str, Tensor], Tensor | None, Config], Tensor]
"""(pool, layer, step, inputs, out, config) -> y: how one layer of a step is run; arguments as of `flow.verify`."""


def through_flow(
    pool: StatePool, layer: int, step: Step, inputs: Mapping[str, Tensor], out: Tensor | None, config: Config
) -> Tensor:
    """The public way, with whatever the pool's back end chooses."""
    return verify(pool, layer, step, inputs, out)


class Replay:
    """The library's own kernels.

    Args:
        backend: back end of the pool, "triton" or "torch".
        name: how rows call this variant.
        launch: how a layer is run, where it is not `flow.verify`: a kernel under development, or one whose launch
            parameters are swept.
        configs: what `launch` is to be tried with; the best that is right gets the row.
        options: further fields of `ReplayConfig`, for variants.
    """

    what: What = "replay"
    version = __version__

    def __init__(
        self,
        backend: str = "triton",
        name: str = "replay",
        launch: LaunchLayer = through_flow,
        configs: Sequence[Config] = ({},),
        **options: Any,
    ) -> None:
        self.backend, self.name, self.options = backend, name, options
        self.launch, self.configs = launch, configs

    def refuses(self, case: Case) -> str | None:
        try:
            self.config(case)
        except (ValueError, TypeError) as error:
            return str(error)
        return None

    def config(self, case: Case) -> ReplayConfig:
        """The pool's configuration for a case."""
        return ReplayConfig.of(case.format, window=case.window, verify_len=case.verify_len, **self.options)

    def setup(self, case: Case, device: torch.device, layers: int | None = None) -> PreparedReplay:
        """`layers`: at least so many; by default as many as a cold cache needs."""
        return PreparedReplay(self, case, device, layers or 1)


class PreparedReplay:
    """A pool of enough layers, its slots in the middle of a conversation."""

    def __init__(self, replay: Replay, case: Case, device: torch.device, least_layers: int) -> None:
        self.case, self.device = case, device
        self.configs, self._run = replay.configs, replay.launch
        config = replay.config(case)
        model = case.model
        geometry = self._geometry(model)
        self.layout = StateLayout(model.replayed, geometry, config, MODEL_DTYPE)
        self.layers = max(least_layers, rotation_layers(case.batch * self.layout.read_bytes, device))
        self._generator = torch.Generator(device).manual_seed(0)
        drawn, self.params = self._draw(self.layers, case.batch, case.verify_len)
        self.inputs = [{name: x[layer] for name, x in drawn.items()} for layer in range(self.layers)]
        shape = (self.layers, case.batch, case.verify_len, geometry.heads, geometry.value_dim)
        self._outputs = torch.empty(shape, dtype=MODEL_DTYPE, device=device)
        chosen: dict[str, Any] = {} if replay.backend == "torch" else {"backend": replay.backend}
        self.pool = StatePool.allocate(
            model.replayed,
            geometry,
            config,
            slots=case.batch,
            model_dtype=MODEL_DTYPE,
            device=device,
            params=[self.params] * self.layers,
            **chosen,
        )
        self.slots = [self.pool.acquire() for _ in range(case.batch)]
        self._slots = torch.tensor(self.slots, device=device)
        self._filled = False
        if self.pool.backend == "triton":
            # the cycle to time is the one that rows go through: short where the kernels' table says so
            from replayssm.kernels.ops import window_in_force

            in_force = window_in_force(sorted(set(self.pool.layout_numbers)), case.batch, case.verify_len)
            self.case = case.with_(window=min(case.window, max(in_force, case.verify_len)))
        self._window = None if self.case.window == case.window else self.case.window

    @staticmethod
    def _geometry(model: Model) -> Geometry:
        """Sizes of a layer of the pool."""
        return model.timed

    # ---- what is right

    def check(self, config: Config) -> Errors:
        """Decode past two flushes and compare outputs and states of the first and the last layer with fp64."""
        steps = 2 * len(self.case.cycle()) + 2
        worst = Errors(0.0, 0.0)
        for layer in {0, self.layers - 1}:
            worst = worst.worst(self._check_layer(layer, steps, config))
        return worst.require(self.limits())

    def limits(self) -> Errors:
        """Allowed errors of this format."""
        case = self.case
        state = STATE_LIMITS[case.checkpoint_format]
        return Errors(max(OUTPUT_LIMIT, READ_LIMITS.get(case.read_format or "", 0.0)), state)

    def _check_layer(self, layer: int, steps: int, config: Config) -> Errors:
        case, model = self.case, self.case.model
        rows = sample_rows(case.batch)
        state = self._restart([layer])[rows].double()
        worst = 0.0
        for number in range(steps):
            drawn, _ = self._draw(1, case.batch, case.verify_len)
            inputs = {name: x[0] for name, x in drawn.items()}
            step = open_step(self.pool, self._slots, case.verify_len)
            out = self._outputs[layer].fill_(torch.nan) if number % 3 == 2 else None
            y = self._run(self.pool, layer, step, inputs, out, config)
            close_step(self.pool, step)
            commit(self.pool, self._slots, case.accepted)
            chosen = {name: x[rows] for name, x in inputs.items()}
            expected, _ = recurrent(model, chosen, self.params, state)
            kept = {name: x[:, : case.accepted] for name, x in chosen.items()}
            _, state = recurrent(model, kept, self.params, state)
            error = relative_error(y[rows], expected)
            if out is None:
                worst = max(worst, error)
            else:  # rounded to bf16, as it will be timed
                Errors(error, 0.0).require(self.limits())
        out = materialize(self.pool, layer, [self.slots[row] for row in rows])
        return Errors(worst, relative_error(out, state))

    def _restart(self, layers: Sequence[int]) -> Tensor:
        """New random states in these layers, as after a prompt; returns them (the same in each)."""
        for slot in self.slots:
            self.pool.slots.mend(slot)
        cursor = self.pool.cursor
        for counter in (cursor.start, cursor.length, cursor.position, cursor.pending):
            counter.zero_()
        turns = torch.arange(self.case.batch, device=self.device)
        phases = self.pool.config.window - turns % (self.pool.config.window - self.case.verify_len + 1)
        cursor.window.copy_(phases)
        shape = (self.case.batch, *self.layout.geometry.state_shape)
        state = torch.randn(shape, generator=self._generator, device=self.device)
        if self.case.checkpoint_format in ("fp16", "bf16"):
            state = state.to(self.case.state_dtype).float()
        with prompt(self.pool, self._slots, 1, width=1) as step:
            for layer in layers:
                load(self.pool, layer, step, state)
        return state

    # ---- what is timed

    def views(self, config: Config) -> Mapping[str, View]:
        self._fill(config)
        cycle = self.case.cycle()
        aligned = [self._at([phase] * self.case.batch) for phase in cycle]

        def view(steps: Sequence[Step], phases: Sequence[Phase]) -> View:
            return View([self._launch(step, config) for step in steps], self._bytes(phases), self._window)

        views = {"cycle": view(aligned, cycle)}
        if len(cycle) > 1:
            middle = (len(cycle) - 1) // 2
            views["step"] = view([aligned[middle]], [cycle[middle]])
            if self.case.batch > 1:
                views["staggered"] = view([self._at(mix) for mix in self._mixes(cycle)], cycle)
            if self.case.verify_len > 1 and self.pool.backend == "triton":
                phase = cycle[middle]
                views["tree"] = view([self._at([phase] * self.case.batch, tree=True)], [phase])
                views["path"] = self._path()
        views["flush"] = view(aligned[-1:], cycle[-1:])
        return views

    def live(self, config: Config) -> Callable[[], None]:
        """One whole step with the cursor moving by itself, flushes staggered as `acquire` does it."""
        self._fill(config)
        case, pool = self.case, self.pool

        def body() -> None:
            step = open_step(pool, self._slots, case.verify_len)
            for layer in range(self.layers):
                self._run(pool, layer, step, self.inputs[layer], self._outputs[layer], config)
            close_step(pool, step)
            commit(pool, self._slots, case.accepted)

        return body

    def _fill(self, config: Config) -> None:
        """Real records in every ring row: no kernel is timed on zeros."""
        if self._filled:
            return
        self._filled = True
        self._restart(range(self.layers))
        body = self.live(config)
        for _ in range(-(-self.layout.ring_rows // self.case.accepted)):
            body()

    def _mixes(self, cycle: list[Phase]) -> list[list[Phase]]:
        """Phases of each row in the successive steps of a staggered batch; one step where all of them look alike."""
        size, batch = len(cycle), self.case.batch
        steps = 1 if batch % size == 0 else size
        return [[cycle[(row * max(1, size // batch) + at) % size] for row in range(batch)] for at in range(steps)]

    def _path(self) -> View:
        """Acceptance of the last branch of such a tree: its ring rows move together, in every layer."""
        from replayssm.kernels.compact import launch_compact

        case, path = self.case, [self.case.verify_len - 1]
        while path[0] > 0:
            path.insert(0, (path[0] - 1) // 2)
        paths = torch.tensor([path] * case.batch, device=self.device)

        def launch(layer: int) -> None:
            launch_compact(self._slots, paths, self.pool.cursor, self.pool.layers[layer])

        return View([launch], 2.0 * case.batch * (len(path) - 1) * self.layout.record_bytes, self._window)

    def _at(self, phases: Sequence[Phase], tree: bool = False) -> Step:
        """The plan of a step whose rows are at these phases, each row with its ring at another origin.

        The tokens are a chain, or a tree in which two follow each one.
        """
        pool, cursor = self.pool, self.pool.cursor
        lengths = torch.tensor([phase.length for phase in phases], device=self.device)
        cursor.length.copy_(lengths)
        cursor.start.copy_(torch.arange(self.case.batch, device=self.device) * 7 % pool.ring_rows)
        cursor.position.copy_(lengths + 10_000)
        cursor.window.fill_(self.case.window)
        cursor.pending.zero_()
        width = self.case.verify_len
        parents = [[(place - 1) // 2 for place in range(width)]] * self.case.batch if tree else None
        step = open_step(pool, self._slots, width, parents=parents)
        if step.due.tolist() != [phase.due for phase in phases]:
            raise AssertionError("the plan does not flush where the cycle says so")
        return step

    def _launch(self, step: Step, config: Config) -> Launch:
        def launch(layer: int) -> object:
            return self._run(self.pool, layer, step, self.inputs[layer], self._outputs[layer], config)

        return launch

    def _bytes(self, phases: Sequence[Phase]) -> float:
        """Bytes of one launch, averaged over steps at these phases: state and ring, inputs and outputs."""
        case = self.case
        due = [phase.length for phase in phases if phase.due]
        tally = Tally(
            row_steps=len(phases),
            new_records=len(phases) * case.verify_len,
            history_records=sum(phase.length for phase in phases if not phase.due),
            flushes=len(due),
            folded_records=sum(due),
        )
        traffic = self.layout.traffic(tally)
        return case.batch * (traffic.read_bytes + traffic.written_bytes) / len(phases) + case.io_bytes

    def _draw(self, layers: int, rows: int, tokens: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Random inputs [layers, rows, tokens, ...] in their storage dtypes, and one layer's constants."""
        recurrence = self.layout.recurrence
        with self.device:
            inputs, params = recurrence.draw(self.layout.geometry, (layers, rows, tokens), self._generator)
        stored = {f.name: inputs[f.name].to(self.layout.dtype_of(f)) for f in recurrence.inputs}
        return stored, {name: x.float() for name, x in params.items()}
