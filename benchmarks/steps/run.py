"""The complete decode step of models with random weights: ours, and the same runner with ordinary kernels of others.

    python benchmarks/kernels/fetch_peers.py                       # once, with a network
    PYTHONPATH=src:.carry/peers python benchmarks/steps/run.py OUT --stage nano --stage qwen

OUT/steps-STAGE.json is rewritten after every row. Each kernel runs with the configuration that is fastest on the layer
alone, found first. It takes what the layer has computed: gates, step sizes, queries, keys and values, as views of what
the convolution has left where the kernel takes strides, and as copies otherwise. States are its own, taken over from
the runner, so that it must put out what ours does.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
FAMILIES = ("nemotron_h", "qwen3_5", "qwen3_5_moe", "kimi_linear")

# transformers would take the peers' packages, of which only some files are here, for fast paths of its own
path = list(sys.path)
sys.path[:] = [folder for folder in path if not (Path(folder) / "fla").is_dir()]
for family in FAMILIES:
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")
sys.path[:] = [str(HERE.parent / "kernels"), *path]

from peers.base import Peer, PeerRun  # noqa: E402 - the folder of kernel benchmarks is no package
from peers.fla_peers import FlaKda, FlaKdaSnapshots  # noqa: E402
from peers.inputs import Inputs  # noqa: E402
from peers.vllm_delta_peers import (  # noqa: E402
    VllmKda,
    VllmKdaSnapshots,
    VllmRecurrent,
    VllmRecurrentSnapshots,
)
from peers.vllm_mamba2_peers import VllmMamba2Given, VllmMamba2SnapshotsGiven  # noqa: E402

from replayssm import ReplayConfig, flow  # noqa: E402
from replayssm.attach.transformers.sequences import Sequences  # noqa: E402
from replayssm.bench import html  # noqa: E402
from replayssm.bench.candidate import Config  # noqa: E402
from replayssm.bench.cases import Case  # noqa: E402
from replayssm.bench.geometries import MODELS, Model  # noqa: E402
from replayssm.bench.rows import Conditions, Report  # noqa: E402
from replayssm.bench.session import Session  # noqa: E402
from replayssm.bench.step_cli import Request, run  # noqa: E402
from replayssm.bench.steps import Side, StepCase, replace_verify  # noqa: E402
from replayssm.planner.model import MODEL_DTYPE, config_of, read_fields, sizes_of  # noqa: E402

TAKING = (
    VllmMamba2Given,
    VllmMamba2SnapshotsGiven,
    VllmRecurrent,
    VllmRecurrentSnapshots,
    VllmKda,
    VllmKdaSnapshots,
    FlaKda,
    FlaKdaSnapshots,
)
"""Kernels that take what a layer has computed already. Those that compute gates themselves would save it launches."""

SUPER, QWEN, KIMI = "nemotron3-super-120b", "qwen3.5-122b-a10b", "kimi-linear-48b-a3b"

READ_WINDOW = 32
"""Window beside a read copy: a fold costs ten steps that read it."""


@dataclass(frozen=True)
class Stage:
    """A model, with what is measured of it."""

    model: str
    batches: Sequence[int] = (256, 64, 8, 1)
    layers: int | None = None
    contexts: Sequence[int] = (1024,)
    formats: Sequence[str] = ("fp32", "fp32+fp8", "fp32+nvfp4")
    verify_len: int = 1
    accepted: int = 1


STAGES = {
    "nano": Stage("nemotron3-nano-4b"),
    "qwen": Stage("qwen3.5-4b"),
    "nano-drafts": Stage("nemotron3-nano-4b", (256, 64), verify_len=4, accepted=3),
    "qwen-drafts": Stage("qwen3.5-4b", (256, 64), verify_len=4, accepted=3),
    "super": Stage(SUPER, (512, 256), 22),
    "super-drafts": Stage(SUPER, (512,), 11, verify_len=4, accepted=3),  # 22 with four snapshots each do not fit
    "qwen-large": Stage(QWEN, (512, 256), 8),
    "kimi": Stage(KIMI, (256, 64), 8),
    "nano-contexts": Stage("nemotron3-nano-4b", (64,), contexts=(4096, 16384), formats=("fp32",)),
    "nano-64k": Stage("nemotron3-nano-4b", (32,), contexts=(65536,), formats=("fp32",)),
    "qwen-contexts": Stage("qwen3.5-4b", (64,), contexts=(4096, 16384), formats=("fp32",)),
}


@dataclass(frozen=True)
class LiveCase(Case):
    """A layer inside a model, which need not be one of the known ones."""

    layer: Model | None = None

    def __post_init__(self) -> None: ...

    @property
    def model(self) -> Model:
        assert self.layer is not None
        return self.layer


class LiveRun(PeerRun):
    """A peer's memory for the layers of a model, filled with the states that the model's sequences hold."""

    def __init__(self, peer: Peer, case: Case, sequences: Sequences) -> None:
        self.peer, self.case, self.device = peer, case, sequences.pool.device
        self.layers = len(sequences.pool.layers)
        batch, tokens, (H, N, P) = case.batch, case.verify_len, case.model.geometry.state_shape
        inner = (P, N) if peer.axes == "PN" else (N, P)
        options: dict[str, Any] = {"dtype": case.state_dtype, "device": self.device}
        self.states = torch.zeros((self.layers, 1 + batch * tokens, H, *inner), **options)
        self.outputs = torch.empty((self.layers, batch, tokens, H, P), dtype=MODEL_DTYPE, device=self.device)
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        self.indices = 1 + torch.arange(batch * tokens, **ints).view(batch, tokens)
        self.accepted = torch.full((batch,), case.accepted, **ints)
        self.starts = torch.arange(batch + 1, **ints) * tokens
        assert sequences.rows is not None
        for ordinal in range(self.layers):
            state = flow.materialize(sequences.pool, ordinal, sequences.rows.tolist())
            state = state.transpose(-1, -2) if peer.axes == "PN" else state
            self.states[ordinal, self.indices[:, case.accepted - 1].long()] = state.to(case.state_dtype)


class PeerSide:
    """A kernel of another package in a model.

    Args:
        peer: the kernel.
        session: measures its configurations on a layer alone.
    """

    fused: bool | None = None

    def __init__(self, peer: Peer, session: Session) -> None:
        self.peer, self.session = peer, session
        self.what, self.name, self.version = f"model {peer.what}", peer.name, peer.version

    def config(self, case: StepCase) -> ReplayConfig:
        return replace(case.config(), read_format=None)

    def take(self, case: StepCase, sequences: Sequences) -> None:
        layer = sequences.pool.layers[0].layout
        model = Model(layer.recurrence.name, layer.geometry, len(sequences.pool.layers))
        form = case.config().checkpoint_format
        live = LiveCase(case.model, case.batch, form, 16, case.verify_len, case.accepted, model)
        reason = self.peer.refuses(live)
        if reason is not None:
            raise ValueError(reason)
        config, peer_run = self._fastest(live), LiveRun(self.peer, live, sequences)
        # of kernels that add a bias even to what has one
        no_bias = {"dt_bias": torch.zeros(layer.geometry.heads, device=peer_run.device)}
        params = [state.params | no_bias for state in sequences.pool.layers]
        exact = {field.name for field in layer.recurrence.inputs if field.dtype == "exact"}

        def verify(ordinal: int, inputs: Mapping[str, Tensor]) -> Tensor:
            sequences.advanced = True
            given = {name: x.float() if name in exact else x for name, x in inputs.items()}
            if not self.peer.takes_views:
                given = {name: x.contiguous() for name, x in given.items()}
            by_layer: dict[str, Any] = {name: {ordinal: x} for name, x in given.items()}
            peer_run.inputs = Inputs(by_layer, params[ordinal])
            y = self.peer.launch(peer_run, ordinal, config)
            return y.view(live.batch, live.verify_len, *model.geometry.state_shape[::2])

        replace_verify(sequences, verify)

    def _fastest(self, case: LiveCase) -> Config:
        """The configuration that is fastest on one layer alone; of layers that are not known, the package's own."""
        if case.geometry not in MODELS:
            return self.peer.configs(case)[0]
        alone = Case(case.geometry, case.batch, case.format, 16, case.verify_len, case.accepted)
        known = [row for row in self.session.report.rows if (row.name, row.batch) == (self.peer.name, case.batch)]
        known = [row for row in known if (row.format, row.verify_len) == (case.format, case.verify_len)]
        rows = known or self.session.measure(self.peer, alone)
        if not rows:
            raise ValueError(f"no configuration of {self.peer.name} is right on a layer alone")
        return rows[0].config


def peers_of(recurrence: str, session: Session, case: StepCase) -> list[Side]:
    """Ordinary kernels, or with drafts those that keep snapshots."""
    what = "ordinary" if case.verify_len == 1 else "snapshot"
    peers = [taking() for taking in TAKING]
    return [PeerSide(peer, session) for peer in peers if peer.what == what and peer.recurrence == recurrence]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for steps-STAGE.json and kernels.json")
    parser.add_argument("--stage", action="append", choices=list(STAGES), help="only these stages, in the order given")
    parser.add_argument("--batch", type=int, action="append", help="only these batches of the stages")
    parser.add_argument("--format", action="append", help="only these precisions of the stages")
    parser.add_argument("--max-configs", type=int, help="try only the first so many configurations of each kernel")
    parser.add_argument("--steps", type=int, default=1000, help="steps to time")
    parser.add_argument("--commit", help="what the conditions say was measured, where there is no git")
    parser.add_argument("--report", type=Path, help="an HTML file of all stages, rewritten after each")
    parser.add_argument("--toy", type=Path, help="a dry run on the CPU with this config.json in place of every model")
    options = parser.parse_args()
    device = torch.device("cpu" if options.toy else "cuda")
    kernels = Report(Conditions.collect(device, options.commit), options.out / "kernels.json")
    session = Session(device, kernels, max_configs=options.max_configs)
    status, reports = 0, []
    for name in options.stage or STAGES:
        stage = STAGES[name]
        print(f"--- {name}", flush=True)
        request = Request(
            model=str(options.toy or stage.model),
            layers=None if options.toy else stage.layers,
            batches=(2,) if options.toy else [b for b in stage.batches if b in (options.batch or stage.batches)],
            contexts=(64,) if options.toy else stage.contexts,
            formats=[form for form in stage.formats if form in (options.format or stage.formats)],
            window=16,
            verify_len=stage.verify_len,
            accepted=stage.accepted,
            steps=options.steps,
            device=device.type,
            json_out=options.out / f"steps-{name}.json",
            commit=options.commit,
            read_window=READ_WINDOW,
        )
        recurrence = sizes_of(name, config_of(read_fields(request.model))).recurrent[0][0].name
        report = run(request, partial(peers_of, recurrence, session))
        status |= bool(report.refusals)
        reports.append(report)
        if options.report is not None:
            html.write(reports, options.report)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
