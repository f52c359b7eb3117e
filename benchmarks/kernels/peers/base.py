"""What all adapters share: state memory, slots, the check against fp64, and the bytes of an ordinary step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from peers.inputs import Inputs, draw
from replayssm.bench.candidate import Config, View, What
from replayssm.bench.cases import Case
from replayssm.bench.reference import Errors, recurrent, relative_error, sample_rows
from replayssm.bench.timing import rotation_layers
from replayssm.planner.model import MODEL_DTYPE

LIMITS = {"fp32": Errors(1e-2, 5e-3), "fp16": Errors(1e-2, 5e-3), "bf16": Errors(1e-2, 1e-2)}
"""Allowed errors by state format. Outputs are bf16, and some kernels round beta to bf16 whatever the state is."""


class Peer(ABC):
    """One kernel of another package.

    A peer of kind "ordinary" runs one token per step and rewrites each state; one of kind "snapshot" runs the
    `verify_len` tokens of a speculative step and stores the state after each of them, in a slot of its own.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    what: ClassVar[What] = "ordinary"
    recurrence: ClassVar[str]
    axes: ClassVar[Literal["PN", "NP"]] = "PN"
    """Order of a state's value (P) and key (N) dims in memory, outermost first."""
    takes_views: ClassVar[bool] = False
    """Whether inputs may be views whose tokens lie apart."""
    state_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float16, torch.bfloat16)

    @property
    def version(self) -> str:
        return f"{self.package} {self.package_version()}"

    @abstractmethod
    def package_version(self) -> str:
        """Version of the package that the kernel comes from."""

    def refuses(self, case: Case) -> str | None:
        """Why this kernel cannot run the case, or None."""
        if case.model.recurrence != self.recurrence:
            return f"a kernel for {self.recurrence}"
        if (case.verify_len > 1) != (self.what == "snapshot"):
            return "runs one token per step" if self.what == "ordinary" else "runs speculative steps only"
        if case.state_dtype not in self.state_dtypes:
            return f"has no {case.checkpoint_format} state"
        return None

    @abstractmethod
    def configs(self, case: Case) -> Sequence[Config]:
        """Its own configurations for this case, the one that the package would choose first."""

    @abstractmethod
    def launch(self, run: PeerRun, layer: int, config: Config) -> Tensor:
        """One step of one layer in place; returns y, [B, T, H, P] after a view."""

    def setup(self, case: Case, device: torch.device) -> PeerRun:
        return PeerRun(self, case, device)


class PeerRun:
    """Memory of one case: states of all layers and slots, inputs, and the index tensors that the kernels take.

    Args:
        states: [layers, slots, H, P, N] or [layers, slots, H, N, P]; slot 0 is nobody's, as vLLM has it.
        outputs: [layers, B, T, H, P].
        indices: int32 [B, T], the slot of each row and token; row b of an ordinary step has indices[b, 0].
        accepted: int32 [B], tokens accepted of the step before: the state is read from indices[b, accepted - 1].
        starts: int32 [B + 1], first token of each row when rows are laid end to end.
    """

    def __init__(self, peer: Peer, case: Case, device: torch.device) -> None:
        self.peer, self.case, self.device = peer, case, device
        batch, tokens = case.batch, case.verify_len
        H, N, P = case.model.geometry.state_shape
        self.layers = rotation_layers(case.state_bytes, device)
        self.configs = list(peer.configs(case))
        self.inputs: Inputs = draw(case, self.layers, device)
        slots = 1 + batch * tokens
        inner = (P, N) if peer.axes == "PN" else (N, P)
        self.states = torch.empty((self.layers, slots, H, *inner), dtype=case.state_dtype, device=device)
        self._generator = torch.Generator(device).manual_seed(2)
        for layer in self.states:
            layer.normal_(generator=self._generator)
        self.outputs = torch.empty((self.layers, batch, tokens, H, P), dtype=MODEL_DTYPE, device=device)
        ints = {"dtype": torch.int32, "device": device}
        self.indices = 1 + torch.arange(batch * tokens, **ints).view(batch, tokens)
        self.accepted = torch.full((batch,), case.accepted, **ints)
        self.starts = torch.arange(batch + 1, **ints) * tokens

    def check(self, config: Config) -> Errors:
        """One step of the first layer against fp64, from its present states."""
        case, model = self.case, self.case.model
        rows = sample_rows(case.batch)
        slots = self.indices.long()[rows]
        states = self.states[0]
        before = self._as_reference(states[slots[:, case.accepted - 1]])
        self.outputs[0].fill_(torch.nan)
        y = self.peer.launch(self, 0, config).view(case.batch, case.verify_len, *model.geometry.state_shape[::2])[rows]
        names = tuple(field.name for field in model.replayed.inputs)
        given = {name: x[rows] for name, x in self.inputs.of(0, names).items()}
        params = {field.name: self.inputs.params[field.name] for field in model.replayed.params}
        expected, after = recurrent(model, given, params, before)
        state = relative_error(self._as_reference(states[slots[:, -1]]), after)
        return Errors(relative_error(y, expected), state).require(LIMITS[case.checkpoint_format])

    def views(self, config: Config) -> Mapping[str, View]:
        def step(layer: int) -> object:
            return self.peer.launch(self, layer, config)

        return {"step": View([step], self.bytes)}

    @property
    def bytes(self) -> float:
        """Each row reads one state and writes one for each of its tokens; inputs and outputs besides."""
        return self.case.state_bytes * (1 + self.case.verify_len) + self.case.io_bytes

    def _as_reference(self, states: Tensor) -> Tensor:
        """[R, H, N, P] in fp64, copied."""
        return (states.transpose(-1, -2) if self.peer.axes == "PN" else states).double().clone()


def sweep(**choices: Sequence[object]) -> list[Config]:
    """Every combination of launch parameters."""
    configs: list[dict[str, object]] = [{}]
    for name, values in choices.items():
        configs = [config | {name: value} for config in configs for value in values]
    return list(configs)


def power_of_2(n: int) -> int:
    """The next power of two, n itself included."""
    return 1 << (n - 1).bit_length()
