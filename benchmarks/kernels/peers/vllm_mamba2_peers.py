"""vLLM's `selective_state_update`: the ordinary Mamba-2 step, and its speculative form with one state per draft."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor
from vllm.model_executor.layers.mamba.ops.mamba_ssm import override_ssm_config, selective_state_update

import vllm
from peers.base import Peer, PeerRun, power_of_2, sweep
from replayssm.bench.candidate import Config
from replayssm.bench.cases import Case


class VllmMamba2(Peer):
    """With raw bf16 dt, softplus and D in the kernel, as the layer calls it.

    Its launch configuration is (BLOCK_SIZE_M, num_warps), from a tuned table where there is one (head_dim 64, state
    128) and from a default elsewhere: the empty configuration. The others go through the package's own override.
    """

    name = "vllm selective_state_update"
    package = "vllm"
    recurrence = "mamba2"
    raw = True
    """Whether dt comes before bias and softplus, as the layer has it, or after them."""

    def package_version(self) -> str:
        return vllm.__version__

    @property
    def dt(self) -> str:
        return "dt_raw" if self.raw else "dt"

    def configs(self, case: Case) -> Sequence[Config]:
        widest = min(64, power_of_2(case.model.geometry.value_dim))
        blocks = [block for block in (4, 8, 16, 32, 64) if block <= widest]
        return [{}, *sweep(BLOCK_SIZE_M=blocks, num_warps=(1, 2, 4, 8))]

    def launch(self, run: PeerRun, layer: int, config: Config) -> Tensor:
        geometry = run.case.model.geometry
        H, N, P = geometry.state_shape
        given = {name: x.flatten(0, 1) for name, x in run.inputs.of(layer, ("x", "B", "C", self.dt)).items()}
        params = run.inputs.params
        out = run.outputs[layer].flatten(0, 1)
        speculative = {}
        if self.what == "snapshot":
            speculative = {"num_accepted_tokens": run.accepted, "cu_seqlens": run.starts}
        chosen = override_ssm_config((config["BLOCK_SIZE_M"], config["num_warps"])) if config else nullcontext()
        with chosen:
            selective_state_update(
                run.states[layer],
                given["x"],
                given[self.dt].unsqueeze(-1).expand(-1, -1, P),
                params["A"].view(H, 1, 1).expand(-1, P, N),
                given["B"],
                given["C"],
                params["D"].view(H, 1).expand(-1, P),
                params["dt_bias"].view(H, 1).expand(-1, P),
                dt_softplus=self.raw,
                state_batch_indices=run.indices,
                dst_state_batch_indices=run.indices,
                out=out,
                **speculative,
            )
        return out


class VllmMamba2Snapshots(VllmMamba2):
    name = "vllm selective_state_update, snapshots"
    what = "snapshot"

    def configs(self, case: Case) -> Sequence[Config]:
        widest = min(64, power_of_2(case.model.geometry.value_dim))
        blocks = [block for block in (4, 8, 16, 32) if block <= widest]
        return [{}, *sweep(BLOCK_SIZE_M=blocks, num_warps=(1, 2, 4))]


class VllmMamba2Given(VllmMamba2):
    """For layers that have computed dt already; `dt_bias` is zero."""

    raw = False


class VllmMamba2SnapshotsGiven(VllmMamba2Snapshots):
    raw = False


PEERS = (VllmMamba2, VllmMamba2Snapshots)
