"""The complete decode step of a model with random weights: the same runner, with our state kernels and with others'.

Everything but the state part is one and the same on all sides: projections, convolution, norms, attention, sampling.
A `Side` says what advances the states; `neighbours` advances none, and its time is what the state part is measured
against. Keys and states of a long context are random numbers: no step is timed on zeros, and none waits for a prompt.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from replayssm import ReplayConfig, __version__, attach, flow
from replayssm.attach.transformers.sequences import Sequences
from replayssm.bench.reference import CheckFailed, relative_error
from replayssm.bench.rows import Refusal, Report, Row
from replayssm.bench.timing import device_laps, spread, wall_laps
from replayssm.decode import STATIC, Runner, compile_neighbours
from replayssm.decode.columns import Ragged
from replayssm.decode.runner import WARM_UP
from replayssm.planner.model import MODEL_DTYPE, build, config_of
from replayssm.planner.step import require_work, steps_label
from replayssm.state.cursor import cycle

CHECKED_ROWS, CHECKED_PROMPT, MOST_CHECKED = 2, 5, 256
ALIKE = 160
"""Steps to time where only their mean matters, whole flush cycles of any window."""
CHECK_LIMITS = {"fp32": 1e-1, "fp16": 1e-1, "bf16": 1e-1, "fp8": 3e-1, "int8": 3e-1, "nvfp4": 5e-1}
"""Allowed relative error of any recurrent layer's outputs, by the format that they read: activations are bf16 through
all layers in front of it. A state that is not there makes it 0.5 and more (a test holds that)."""
OTHERS_LIMIT = 1.5e-1
"""The same of kernels that replay nothing: through 32 layers of Qwen3.5 4B fp32 states make 0.09 with those here and
0.11 with vLLM's, whose states are exact on a layer alone."""

CHUNKS, SHORT_CHUNK = ("chunk_size", "mamba_chunk_size"), 8
"""Fields with the chunk of a prompt's scan. Prompts are not timed."""


@dataclass(frozen=True)
class StepCase:
    """One point.

    Args:
        model: id or name for people.
        batch, context: rows, and tokens of each before the first step.
        format: checkpoint format, or "checkpoint+read copy".
        window: window in force.
        verify_len, accepted: tokens of a step, and how many of them stay whatever the model says.
    """

    model: str
    batch: int
    context: int
    format: str = "fp32"
    window: int = 16
    verify_len: int = 1
    accepted: int = 1

    def __post_init__(self) -> None:
        require_work(self.verify_len, self.accepted, batch=self.batch, context=self.context)
        self.config()

    def config(self) -> ReplayConfig:
        return ReplayConfig.of(self.format, window=self.window, verify_len=self.verify_len)

    def __str__(self) -> str:
        steps = steps_label(self.verify_len, self.accepted)
        return f"{self.model} B={self.batch} context={self.context} {self.format} W={self.window}{steps}"


class Side(Protocol):
    """What advances the states of the recurrent layers."""

    what: str
    """ "model replay", "model unfused", "model ordinary", "model snapshot" or "model neighbours"."""
    name: str
    version: str
    fused: bool | None
    """As `attach` takes it: by default the neighbours of the state part are kernels, too, whatever that part is."""

    def config(self, case: StepCase) -> ReplayConfig:
        """How the model is attached; ValueError where the side cannot run the case."""

    def take(self, case: StepCase, sequences: Sequences) -> None:
        """Put itself in the place of `sequences.verify`, from the states that these hold."""


class ReplaySide:
    """This library as it is."""

    what, name, version = "model replay", "replay", __version__
    fused: bool | None = None

    def config(self, case: StepCase) -> ReplayConfig:
        return case.config()

    def take(self, case: StepCase, sequences: Sequences) -> None: ...


class UnfusedSide(ReplaySide):
    """This library inside of the model's own layers: what their convolution, gates and norm cost there."""

    what, name = "model unfused", "replay, layers not fused"
    fused: bool | None = False


class PerTokenSide:
    """This library with a window of 1, the ordinary form: every token reads and writes the state."""

    what, name, version = "model ordinary", "replay, window 1", __version__
    fused: bool | None = None

    def config(self, case: StepCase) -> ReplayConfig:
        if case.verify_len > 1:
            raise ValueError("a window of 1 has no room for drafts")
        return replace(case.config(), window=1, read_format=None)

    def take(self, case: StepCase, sequences: Sequences) -> None: ...


class Neighbours:
    """No state part: outputs are numbers that were drawn once."""

    what, name, version = "model neighbours", "no state part", __version__
    fused: bool | None = None

    def config(self, case: StepCase) -> ReplayConfig:
        return case.config()

    def take(self, case: StepCase, sequences: Sequences) -> None:
        outputs = []
        for layer in sequences.pool.layers:
            geometry = layer.layout.geometry
            shape = (case.batch, case.verify_len, geometry.heads, geometry.value_dim)
            outputs.append(torch.randn(shape, device=layer.device).to(layer.layout.compute_dtype))

        def verify(ordinal: int, inputs: Mapping[str, Tensor]) -> Tensor:
            sequences.advanced = True
            return outputs[ordinal]

        replace_verify(sequences, verify)


def replace_verify(sequences: Sequences, verify: Callable[[int, Mapping[str, Tensor]], Tensor]) -> None:
    """Let another function advance the states of these sequences: (layer, inputs [B, T, ...]) -> y [B, T, H, P]."""
    sequences.__dict__["verify"] = verify


class Scripted(Runner):
    """A runner that keeps so many tokens of each step, right or wrong: random weights guess nothing.

    Args:
        accepted: tokens of each step that stay.
        grows: whether rows get longer by them. Otherwise each step is one at the same length of context, and attention
            reads no columns beyond it.
    """

    def __init__(self, *args: Any, accepted: int, grows: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fixed, self._grows = accepted, grows

    def _accepted(self, chosen: Tensor) -> Tensor:
        return torch.full_like(self.certain, self._fixed)

    def _lengthen(self, accepted: Tensor) -> None:
        if self._grows:
            super()._lengthen(accepted)

    @torch.no_grad()
    def fill(self, context: int) -> None:
        """Go on as if each row had `context` tokens: random keys, values and states."""
        self.certain.fill_(context)
        for layer in self.cache.layers:
            if isinstance(layer, Ragged):
                layer.keys.normal_()
                layer.values.normal_()
        sequences = self._sequences
        assert sequences.rows is not None
        with flow.prompt(sequences.pool, sequences.rows, 1) as step:
            for ordinal, state in enumerate(sequences.pool.layers):
                shape = (len(sequences.rows), *state.layout.geometry.state_shape)
                flow.load(sequences.pool, ordinal, step, torch.randn(shape, device=state.device))


def build_model(fields: Mapping[str, Any], device: torch.device) -> Any:
    """The model of a configuration with random weights in bf16; on a GPU its neighbours are compiled."""
    config = config_of(fields)
    for name in CHUNKS:
        # a scan of prompts pads each to whole chunks, which for a large batch of short ones is more than a GPU holds
        if hasattr(config, name):
            setattr(config, name, SHORT_CHUNK)
    with device:
        model = build(config, dtype=MODEL_DTYPE, attn_implementation=STATIC).eval()
    if device.type == "cuda":
        compile_neighbours(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # as they are drawn by default, little of a state would be seen in what a layer puts out
            if name.rpartition(".")[2] in ("A_log", "dt_bias"):
                parameter.uniform_(-1, 1)
            elif parameter.dim() >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


class StepBench:
    """One model on one device.

    Args:
        model: from `build_model`.
        report: where rows go.
        steps: how many steps to time of exact replay, for their percentiles; of others ALIKE at most.
        log: receives a line per row.
    """

    def __init__(self, model: Any, report: Report, steps: int, log: Callable[[str], None] = print) -> None:
        self.model, self.report, self.steps, self.log = model, report, steps, log
        self.device = model.device
        self._expected: dict[tuple[bool, int, int, int], list[Tensor]] = {}

    def measure(self, case: StepCase, sides: Sequence[Side]) -> list[Row]:
        """Every side of a case, the neighbours first; what fails or is wrong is noted with its reason.

        Other precisions of the same case share their neighbours and ordinary sides, which are measured once.
        """
        rows: list[Row] = []
        for side in (Neighbours(), *sides):
            if side.what != "model replay" and any(row.name == side.name for row in self._beside(case, side.what)):
                continue
            try:
                row = self._side(case, side)
            except Exception as error:  # noqa: BLE001 - a kernel or a graph of another package may raise anything
                reason = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
                self.report.refuse(Refusal(side.what, side.name, str(case), {}, " ".join(reason.split())[:400]))
                self.log(f"REFUSED {case} | {side.name}: {reason}")
            else:
                rows.append(self.report.add(row))
                self.log(f"{case} | {side.name}: {row.us / 1e3:.3f} ms, p99/p50 {row.detail['p99_over_p50']:.3f}")
            self._free()
        return rows

    def _free(self) -> None:
        """Give back the memory of runners that are done: they are in cycles, and two of a large batch do not fit."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _beside(self, case: StepCase, what: str) -> list[Row]:
        """Rows of a kind that a case's may be compared with: the same tokens, and the same format of the checkpoint."""
        wanted = (what, case.model, case.batch, float(case.context), case.verify_len)
        found = [
            row
            for row in self.report.rows
            if (row.what, row.geometry, row.batch, row.detail.get("context"), row.verify_len) == wanted
        ]
        if what == "model neighbours":
            return found
        return [row for row in found if row.format.partition("+")[0] == case.format.partition("+")[0]]

    def _side(self, case: StepCase, side: Side) -> Row:
        config = side.config(case)
        error = None if isinstance(side, Neighbours) else self._check(case, side)
        self._free()
        with _attached(self.model, config, side.fused):
            runner = self._runner(case, side, case.context)
            # the others have no flushes, or are measured for their mean; so are reads, whose steps differ no more
            tail = side.what == "model replay" and config.read_format is None
            steps = self.steps if tail else min(self.steps, ALIKE)
            times = _series(self.device, runner.advance, steps)
            allocated = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
            pool = runner._sequences.pool
            slot_bytes = sum(layer.layout.slot_bytes for layer in pool.layers)
        mean = sum(times) / len(times)  # over whole flush cycles, which a median would not be
        detail = {
            "context": float(case.context),
            **spread(times),
            "steps": float(steps),
            "mean_us": mean,
            "tok_s": case.batch * case.accepted / mean * 1e6,
            "slot_bytes": float(slot_bytes),
            "allocated_bytes": float(allocated),
            "layers": float(self.model.config.get_text_config(decoder=True).num_hidden_layers),
        }
        for row in self._beside(case, "model neighbours"):
            detail |= {"state_us": mean - row.us, "state_share": 1 - row.us / mean}
        replays = side.what == "model replay"
        return Row(
            what=side.what,
            name=side.name,
            version=side.version,
            geometry=case.model,
            batch=case.batch,
            format=case.format,
            view="model",
            us=mean,
            low_us=min(times),
            high_us=max(times),
            window=case.window if replays else None,
            verify_len=case.verify_len,
            accepted=case.accepted,
            ordinary_us=self._fastest(case, "model ordinary") if replays else None,
            snapshot_us=self._fastest(case, "model snapshot") if replays else None,
            y_error=error,
            detail=detail,
        )

    def _fastest(self, case: StepCase, what: str) -> float | None:
        return min((row.us for row in self._beside(case, what)), default=None)

    def _check(self, case: StepCase, side: Side) -> float:
        """Largest relative error of a recurrent layer's outputs, past two flushes, in the batch that is timed.

        Some rows are compared with single tokens in fp32 states on the torch back end.
        """
        steps = 2 * len(cycle(case.window, case.verify_len, case.accepted)) + 2
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        # what the compared rows are fed depends on no other row, so that one answer serves every batch
        rows = max(case.batch, CHECKED_ROWS)
        shape = (rows, steps * case.accepted + case.verify_len)
        fed = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(self.device)
        found = self._outputs(case, side, fed[: case.batch], steps)
        tokens = steps * case.accepted
        reference = ReplaySide()
        self._free()
        # with the same neighbours, which round in other places when they are fused
        reference.fused = self.device.type == "cuda" if side.fused is None else side.fused
        key = (reference.fused, tokens, case.verify_len, case.context)
        if key not in self._expected:
            plain = replace(case, batch=CHECKED_ROWS, format="fp32", window=16, verify_len=1, accepted=1)
            fed = fed[:CHECKED_ROWS]
            self._expected[key] = self._outputs(plain, reference, fed, tokens, torch_backend=True)
        both = zip(found, self._expected[key], strict=True)
        error = max(relative_error(ours, right[: len(ours)]) for ours, right in both)
        config = side.config(case)
        replays = side.what in ("model replay", "model unfused")
        limit = CHECK_LIMITS[config.read_format or config.checkpoint_format] if replays else OTHERS_LIMIT
        if not error <= limit:
            raise CheckFailed(f"outputs differ by {error:.1e} from those of single tokens, allowed {limit:.1e}")
        return error

    def _outputs(
        self, case: StepCase, side: Side, fed: Tensor, steps: int, *, torch_backend: bool = False
    ) -> list[Tensor]:
        """Per recurrent layer, y [rows, tokens, H, P] of given tokens, by steps that keep `accepted` of them.

        Of a large batch only the first rows.
        """
        with _attached(self.model, side.config(case), side.fused):
            runner = self._runner(case, side, None, capture=False)
            sequences = runner._sequences
            if torch_backend:
                sequences.pool.backend = "torch"
            seen: list[list[Tensor]] = [[] for _ in sequences.pool.layers]
            advance = sequences.verify

            def recording(ordinal: int, inputs: Mapping[str, Tensor]) -> Tensor:
                y = advance(ordinal, inputs)
                seen[ordinal].append(y[:CHECKED_ROWS, : case.accepted].float())
                return y

            replace_verify(sequences, recording)
            for step in range(steps):
                at = step * case.accepted
                runner.tokens.copy_(fed[:, at : at + case.verify_len])
                runner.advance()
        return [torch.cat(layer, 1) for layer in seen]

    def _runner(self, case: StepCase, side: Side, context: int | None, capture: bool = True) -> Scripted:
        """A runner in the middle of a text: at a random context of some length, or None, behind a short prompt."""
        # one capacity for both, because attention is compiled for it
        length = max(case.context, CHECKED_PROMPT + MOST_CHECKED * case.accepted)
        runner = Scripted(
            self.model,
            capacity=length + case.verify_len,
            width=case.verify_len,
            capture=capture,
            accepted=case.accepted,
            grows=context is None,
        )
        # the same prompt on every side of a case
        runner.start([list(range(3, 3 + CHECKED_PROMPT))] * case.batch)
        if context is not None:
            runner.fill(context)
        side.take(case, runner._sequences)
        return runner


class _attached:
    """`attach` for the length of a block."""

    def __init__(self, model: Any, config: ReplayConfig, fused: bool | None) -> None:
        self.model, self.config, self.fused = model, config, fused

    def __enter__(self) -> None:
        self.handle = attach(self.model, self.config, fused=self.fused)

    def __exit__(self, *_: object) -> None:
        self.handle.detach()


def _series(device: torch.device, body: Callable[[], None], count: int) -> list[float]:
    """Microseconds of each of `count` consecutive runs, after those that warm up."""
    for _ in range(WARM_UP + 2):
        body()
    return device_laps(body, count) if device.type == "cuda" else wall_laps(body, count)
