"""flash-linear-attention's recurrent kernels, launched with their state updated in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fla
import torch
from fla.ops.common import fused_recurrent as gla_ops
from fla.ops.gated_delta_rule import fused_recurrent as gdn_ops
from fla.ops.kda import fused_recurrent as kda_ops
from torch import Tensor

from peers.base import Peer, PeerRun, power_of_2, sweep
from peers.inputs import LOWER_BOUND
from replayssm.bench.candidate import Config
from replayssm.bench.cases import Case

gdn_kernel: Any = gdn_ops.fused_recurrent_gated_delta_rule_fwd_kernel
kda_kernel: Any = kda_ops.fused_recurrent_kda_fwd_kernel
gla_kernel: Any = gla_ops.fused_recurrent_fwd_kernel.fn.fn  # below the autotuner, which would advance the state


class Fla(Peer):
    package = "fla-core"
    axes = "NP"

    def package_version(self) -> str:
        return fla.__version__


class FlaGdn(Fla):
    """Gates from their raw inputs; the wrapper uses BV 8 and one warp, and a new state each step."""

    name = "fla fused_recurrent_gated_delta_rule"
    recurrence = "gdn"

    def configs(self, case: Case) -> Sequence[Config]:
        widest = power_of_2(case.model.geometry.value_dim)
        return sweep(BV=[block for block in (8, 16, 32, 64) if block <= widest], num_warps=(1, 2, 4))

    def launch(self, run: PeerRun, layer: int, config: Config) -> Tensor:
        geometry, case = run.case.model.geometry, run.case
        given, params = run.inputs.of(layer, ("q", "k", "v", "gate_raw", "beta_raw")), run.inputs.params
        states = run.states[layer, 1:]
        gdn_kernel[(-(-geometry.value_dim // config["BV"]) * case.batch * geometry.heads,)](
            q=given["q"],
            k=given["k"],
            v=given["v"],
            g=given["gate_raw"],
            gk=None,
            gv=None,
            beta=given["beta_raw"],
            A_log=params["A_log"],
            dt_bias=params["dt_bias"],
            o=run.outputs[layer],
            h0=states,
            ht=states,
            cu_seqlens=None,
            scale=geometry.key_dim**-0.5,
            T=1,
            H=geometry.key_heads,
            HV=geometry.heads,
            K=geometry.key_dim,
            V=geometry.value_dim,
            BK=power_of_2(geometry.key_dim),
            IS_BETA_HEADWISE=True,  # here: one beta per head
            USE_QK_L2NORM_IN_KERNEL=True,
            APPLY_BETA_SIGMOID=True,
            ALLOW_NEG_EIGVAL=False,
            STATE_V_FIRST=False,
            num_stages=3,
            **config,
        )
        return run.outputs[layer]


class FlaKda(Fla):
    """`gate` says whether the kernel computes the gate from its raw bf16 input or reads log_decay in fp32.

    The wrapper uses BV 32, 4 warps and 2 stages.
    """

    name = "fla fused_recurrent_kda"
    recurrence = "kda"

    def configs(self, case: Case) -> Sequence[Config]:
        widest = power_of_2(case.model.geometry.value_dim)
        own = {"gate": "given", "BV": min(32, widest), "num_warps": 4}
        blocks = [block for block in (8, 16, 32, 64, 128) if block <= widest]
        return [own, *(c for c in sweep(gate=("given", "raw"), BV=blocks, num_warps=(1, 2, 4)) if c != own)]

    def launch(self, run: PeerRun, layer: int, config: Config) -> Tensor:
        geometry, case = run.case.model.geometry, run.case
        raw = config["gate"] == "raw"
        given = run.inputs.of(layer, ("q", "k", "v", "gate_raw" if raw else "log_decay", "beta"))
        q, k, v, gate, beta = given.values()
        params, states = run.inputs.params, run.states[layer]
        bounded = raw and case.geometry.startswith("glm")
        kda_kernel[(-(-geometry.value_dim // config["BV"]) * case.batch * geometry.heads,)](
            q=q,
            k=k,
            v=v,
            g=gate,
            beta=beta,
            A_log=params["A_log"] if raw else None,
            dt_bias=params["dt_bias"] if raw else None,
            o=run.outputs[layer],
            h0=states,
            ht=states,
            cu_seqlens=run.starts,
            ssm_state_indices=run.indices,
            num_accepted_tokens=run.accepted if self.what == "snapshot" else None,
            lower_bound=LOWER_BOUND if bounded else None,
            scale=geometry.key_dim**-0.5,
            N=case.batch,
            T=case.batch * case.verify_len,
            H=geometry.key_heads,
            HV=geometry.heads,
            K=geometry.key_dim,
            V=geometry.value_dim,
            BK=power_of_2(geometry.key_dim),
            BV=config["BV"],
            stride_init_state_token=states.stride(0),
            stride_final_state_token=states.stride(0),
            stride_indices_seq=run.indices.stride(0),
            stride_indices_tok=run.indices.stride(1),
            INPLACE_FINAL_STATE=True,
            IS_BETA_HEADWISE=False,  # here: one beta per value channel
            USE_QK_L2NORM_IN_KERNEL=True,
            USE_GATE_IN_KERNEL=raw,
            APPLY_BETA_SIGMOID=False,
            ALLOW_NEG_EIGVAL=False,
            STATE_V_FIRST=False,
            num_warps=config["num_warps"],
            num_stages=2,
        )
        return run.outputs[layer]


class FlaKdaSnapshots(FlaKda):
    name = "fla fused_recurrent_kda, snapshots"
    what = "snapshot"

    def configs(self, case: Case) -> Sequence[Config]:
        return [config for config in super().configs(case) if config["gate"] == "given"]


class FlaSimpleGla(Fla):
    """Mamba-2 as gated linear attention: B and C repeated for every head, dt x as the value, no D term.

    Repeating and multiplying are not counted, so this is a little better than a layer could have it.
    """

    name = "fla fused_recurrent_simple_gla"
    recurrence = "mamba2"

    def configs(self, case: Case) -> Sequence[Config]:
        widest = power_of_2(case.model.geometry.value_dim)
        return sweep(BV=[block for block in (8, 16, 32, 64) if block <= widest], num_warps=(1, 2, 4, 8))

    def refuses(self, case: Case) -> str | None:
        return super().refuses(case) or ("repeated keys would not fit in memory" if case.batch > 1024 else None)

    def launch(self, run: PeerRun, layer: int, config: Config) -> Tensor:
        geometry, case = run.case.model.geometry, run.case
        q, k, v, gate = _expanded(run)
        states = run.states[layer, 1:]
        out = run.outputs[layer]
        gla_kernel[(-(-geometry.value_dim // config["BV"]) * case.batch * geometry.heads,)](
            q=q[layer],
            k=k[layer],
            v=v[layer],
            g=gate[layer],
            g_gamma=None,
            gk=None,
            gv=None,
            o=out,
            h0=states,
            ht=states,
            cu_seqlens=None,
            scale=1.0,
            B=case.batch,
            T=1,
            H=geometry.heads,
            K=geometry.key_dim,
            V=geometry.value_dim,
            BK=power_of_2(geometry.key_dim),
            REVERSE=False,
            USE_G=True,
            USE_G_GAMMA=False,
            USE_GK=False,
            USE_GV=False,
            USE_INITIAL_STATE=True,
            STORE_FINAL_STATE=True,
            IS_VARLEN=False,
            STATE_V_FIRST=False,
            **config,
        )
        return out


def _expanded(run: PeerRun) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, log_decay) of all layers with one key head per head; made once per run."""
    known: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = run.__dict__.setdefault("expanded", {})
    if 0 not in known:
        fields, geometry = run.inputs.fields, run.case.model.geometry
        run.inputs.params["D"].zero_()  # the kernel has no such term, so the check must not expect it
        value = (fields["dt"].unsqueeze(-1) * fields["x"].float()).to(torch.bfloat16)
        known[0] = (
            geometry.expand_heads(fields["C"], 3).contiguous(),
            geometry.expand_heads(fields["B"], 3).contiguous(),
            value,
            fields["dt"] * run.inputs.params["A"],
        )
    return known[0]


PEERS = (FlaGdn, FlaKda, FlaKdaSnapshots, FlaSimpleGla)
