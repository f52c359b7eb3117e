"""vLLM's delta-rule decode kernels: Gated DeltaNet packed, given gates, fused gates and snapshots; Kimi's KDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from vllm.third_party.flash_linear_attention.ops import fused_recurrent as recurrent_ops
from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating as gating_ops

import vllm
from peers.base import Peer, PeerRun, power_of_2, sweep
from replayssm.bench.candidate import Config
from replayssm.bench.cases import Case

packed_kernel: Any = recurrent_ops.fused_recurrent_gated_delta_rule_packed_decode_kernel
recurrent_kernel: Any = recurrent_ops.fused_recurrent_gated_delta_rule_fwd_kernel
gating_kernel: Any = gating_ops.fused_sigmoid_gating_delta_rule_update_kernel


class VllmDelta(Peer):
    """The wrappers fix BV and num_warps; launching the kernels themselves lets both be swept."""

    package = "vllm"
    own: tuple[int, int]
    """(BV, num_warps) that the package's wrapper uses."""

    def package_version(self) -> str:
        return vllm.__version__

    def configs(self, case: Case) -> Sequence[Config]:
        widest = power_of_2(case.model.geometry.value_dim)
        own = {"BV": min(self.own[0], widest), "num_warps": self.own[1]}
        blocks = [block for block in (8, 16, 32, 64, 128) if block <= widest]
        return [own, *(c for c in sweep(BV=blocks, num_warps=(1, 2, 4)) if c != own)]

    def sizes(self, run: PeerRun, layer: int, config: Config) -> dict[str, Any]:
        """Arguments that all these kernels share."""
        geometry, states = run.case.model.geometry, run.states[layer]
        return {
            "o": run.outputs[layer],
            "h0": states,
            "ht": states,
            "ssm_state_indices": run.indices,
            "scale": geometry.key_dim**-0.5,
            "stride_init_state_token": states.stride(0),
            "stride_final_state_token": states.stride(0),
            "stride_indices_seq": run.indices.stride(0),
            "H": geometry.key_heads,
            "HV": geometry.heads,
            "K": geometry.key_dim,
            "V": geometry.value_dim,
            "BK": power_of_2(geometry.key_dim),
            "USE_QK_L2NORM_IN_KERNEL": True,
            "num_stages": 3,
            **config,
        }

    def rows_end_to_end(self, run: PeerRun, config: Config) -> tuple[tuple[int, int, int], dict[str, Any]]:
        """Grid and arguments of the kernels that take rows laid end to end."""
        geometry, case = run.case.model.geometry, run.case
        arguments = {
            "cu_seqlens": run.starts,
            "num_accepted_tokens": run.accepted if self.what == "snapshot" else None,
            "N": case.batch,
            "T": case.batch * case.verify_len,
            "B": 1,
            "stride_indices_tok": run.indices.stride(1),
            "INPLACE_FINAL_STATE": True,
        }
        return (1, -(-geometry.value_dim // config["BV"]), case.batch * geometry.heads), arguments


class VllmPacked(VllmDelta):
    """The layer's plain decode: q, k and v packed, gates from their raw inputs (beta is rounded to bf16)."""

    name = "vllm gdn packed decode"
    recurrence = "gdn"
    own = (32, 1)

    def launch(self, run: PeerRun, layer: int, config: Config) -> Tensor:
        geometry, batch = run.case.model.geometry, run.case.batch
        given, params = run.inputs.of(layer, ("packed", "gate_raw", "beta_raw")), run.inputs.params
        packed, gate, beta = (x.squeeze(1) for x in given.values())
        packed_kernel[(-(-geometry.value_dim // config["BV"]), batch * geometry.heads)](
            mixed_qkv=packed,
            a=gate,
            b=beta,
            A_log=params["A_log"],
            dt_bias=params["dt_bias"],
            stride_mixed_qkv_tok=packed.stride(0),
            stride_a_tok=gate.stride(0),
            stride_b_tok=beta.stride(0),
            SOFTPLUS_THRESHOLD=20.0,
            **self.sizes(run, layer, config),
        )
        return run.outputs[layer]


class VllmRecurrent(VllmDelta):
    """Gates already computed, in fp32."""

    name = "vllm gdn fused_recurrent"
    recurrence = "gdn"
    own = (32, 1)
    is_kda = False

    def launch(self, run: PeerRun, layer: int, config: Config) -> Tensor:
        given = run.inputs.of(layer, ("q", "k", "v", "log_decay", "beta"))
        grid, arguments = self.rows_end_to_end(run, config)
        recurrent_kernel[grid](
            q=given["q"],
            k=given["k"],
            v=given["v"],
            g=given["log_decay"],
            beta=given["beta"],
            IS_BETA_HEADWISE=False,  # the kernel's word for one beta per value channel
            IS_KDA=self.is_kda,
            **arguments,
            **self.sizes(run, layer, config),
        )
        return run.outputs[layer]


class VllmGating(VllmDelta):
    """Gates from their raw inputs, q, k and v apart: the layer's decode where rows differ in length."""

    name = "vllm gdn fused_sigmoid_gating"
    recurrence = "gdn"
    own = (32, 4)

    def launch(self, run: PeerRun, layer: int, config: Config) -> Tensor:
        given, params = run.inputs.of(layer, ("q", "k", "v", "gate_raw", "beta_raw")), run.inputs.params
        grid, arguments = self.rows_end_to_end(run, config)
        gating_kernel[grid](
            A_log=params["A_log"],
            a=given["gate_raw"],
            b=given["beta_raw"],
            dt_bias=params["dt_bias"],
            beta=1.0,
            threshold=20.0,
            q=given["q"],
            k=given["k"],
            v=given["v"],
            IS_KDA=False,
            **arguments,
            **self.sizes(run, layer, config),
        )
        return run.outputs[layer]


class VllmSnapshots(VllmGating):
    """The layer's speculative step: what vLLM runs when it verifies drafts."""

    name = "vllm gdn fused_sigmoid_gating, snapshots"
    what = "snapshot"


class VllmRecurrentSnapshots(VllmRecurrent):
    name = "vllm gdn fused_recurrent, snapshots"
    what = "snapshot"


class VllmKda(VllmRecurrent):
    """Kimi's decode; the gate comes from a kernel of its own, which is not counted."""

    name = "vllm kda fused_recurrent"
    recurrence = "kda"
    own = (8, 1)
    is_kda = True


class VllmKdaSnapshots(VllmKda):
    """The same kernel with its speculative indices, which vLLM's Kimi layer does not use yet."""

    name = "vllm kda fused_recurrent, snapshots"
    what = "snapshot"


PEERS = (VllmPacked, VllmRecurrent, VllmGating, VllmSnapshots, VllmRecurrentSnapshots, VllmKda, VllmKdaSnapshots)
