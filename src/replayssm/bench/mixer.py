"""Everything between a layer's projections as a candidate: convolution and gates, `flow.verify`, norm and gate.

Beside `Replay`, which is the middle part alone, its rows say what the neighbours cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from replayssm import __version__
from replayssm.bench.candidate import Config, View, What
from replayssm.bench.cases import Case
from replayssm.bench.geometries import Model
from replayssm.bench.reference import CheckFailed, Errors, relative_error
from replayssm.bench.replay import PreparedReplay, Replay
from replayssm.flow import mix
from replayssm.flow.step import Step
from replayssm.planner.model import MODEL_DTYPE
from replayssm.recurrences import Geometry
from replayssm.recurrences.binding import bindings
from replayssm.recurrences.mixer import Mixer
from replayssm.state.cursor import Phase
from replayssm.state.pool import StatePool

LIMIT = 2e-2
"""Allowed difference of the back ends' outputs, which are bf16."""


class Mixed:
    """The kernels between the projections.

    Args:
        backend: back end of the pool, "triton" or "torch".
        name: how rows call this variant.
    """

    what: What = "replay"
    version = __version__

    def __init__(self, backend: str = "triton", name: str = "mixer") -> None:
        self.name, self._replay = name, Replay(backend, name)

    def refuses(self, case: Case) -> str | None:
        return self._replay.refuses(case)

    def setup(self, case: Case, device: torch.device) -> PreparedMixer:
        return PreparedMixer(self._replay, case, device, 1)


class PreparedMixer(PreparedReplay):
    """The same pool with carries, and for each layer what its projections put out."""

    def __init__(self, replay: Replay, case: Case, device: torch.device, least_layers: int) -> None:
        super().__init__(replay, case, device, least_layers)
        self._mixer = mixer_of(case.model)
        shape, geometry = (case.batch, case.verify_len), self.layout.geometry
        self._layers = [self._mixer.draw(geometry, shape, MODEL_DTYPE, self._generator) for _ in range(self.layers)]
        self._run = self._mix

    @staticmethod
    def _geometry(model: Model) -> Geometry:
        return model.geometry

    def _mix(
        self,
        pool: StatePool,
        layer: int,
        step: Step,
        inputs: Mapping[str, Tensor],
        out: Tensor | None,
        config: Config,
    ) -> Tensor:
        projected, weights = self._layers[layer]
        return mix(pool, layer, step, self._mixer, weights, projected)

    def check(self, config: Config) -> Errors:
        """Outputs of the first layer against the torch back end, in the middle of the cycle and at its end."""
        self._fill(config)
        cycle, worst = self.case.cycle(), 0.0
        for phase in (cycle[(len(cycle) - 1) // 2], cycle[-1]):
            step = self._at([phase] * self.case.batch)
            found = {}
            backend = self.pool.backend
            # torch goes first: a row that is due is folded twice, which the second back end must not see
            kept = {name: tensor.clone() for name, tensor in self.pool.layers[0].tensors.items()}
            for name in ("torch", backend):
                self.pool.backend = name
                found[name] = self._mix(self.pool, 0, step, {}, None, config)
                for tensor, value in kept.items():
                    self.pool.layers[0].tensors[tensor].copy_(value)
            worst = max(worst, relative_error(found[backend], found["torch"]))
        if not worst <= LIMIT:
            raise CheckFailed(f"outputs differ by {worst:.1e} from those of the torch back end, allowed {LIMIT:.0e}")
        return Errors(worst, 0.0)

    def views(self, config: Config) -> Mapping[str, View]:
        return {name: view for name, view in super().views(config).items() if name != "path"}

    def _bytes(self, phases: Sequence[Phase]) -> float:
        """Those of `verify`, the convolution's inputs, carry and outputs, and what the norm reads and writes."""
        case, geometry = self.case, self.layout.geometry
        conv = geometry.conv_channels * (self.layout.conv_lag + 3 * case.verify_len)
        norm = geometry.heads * geometry.value_dim * 4 * case.verify_len
        return super()._bytes(phases) + case.batch * MODEL_DTYPE.itemsize * (conv + norm)


def mixer_of(model: Model) -> Mixer:
    """The mixer of a model's recurrence; ValueError where it has none."""
    for recurrence, binding in bindings().values():
        if recurrence.name == model.recurrence and binding.mixer is not None:
            return binding.mixer
    raise ValueError(f"{model.replayed.title} has no mixer")
