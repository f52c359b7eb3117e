"""The Mamba authors' own `selective_state_update`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mamba_ssm
from mamba_ssm.ops.triton import selective_state_update as module
from torch import Tensor

from peers.base import Peer, PeerRun, power_of_2, sweep
from replayssm.bench.candidate import Config
from replayssm.bench.cases import Case

kernel: Any = module._selective_scan_update_kernel


class MambaSsm(Peer):
    """The wrapper uses BLOCK_SIZE_M 4 with 4 warps (8 above a state of 128)."""

    name = "mamba_ssm selective_state_update"
    package = "mamba-ssm"
    recurrence = "mamba2"

    def package_version(self) -> str:
        return mamba_ssm.__version__

    def refuses(self, case: Case) -> str | None:
        H, N, P = case.model.geometry.state_shape
        wide = (case.batch + 1) * H * N * P >= 2**31
        return super().refuses(case) or ("its 32-bit offsets would leave the states" if wide else None)

    def configs(self, case: Case) -> Sequence[Config]:
        widest = min(64, power_of_2(case.model.geometry.value_dim))
        own = {"BLOCK_SIZE_M": 4, "num_warps": 4 if case.model.geometry.key_dim <= 128 else 8}
        blocks = [block for block in (4, 8, 16, 32, 64) if block <= widest]
        return [own, *(c for c in sweep(BLOCK_SIZE_M=blocks, num_warps=(1, 2, 4)) if c != own)]

    def launch(self, run: PeerRun, layer: int, config: Config) -> Tensor:
        geometry, case = run.case.model.geometry, run.case
        H, _, P = geometry.state_shape
        given = {name: x.flatten(0, 1) for name, x in run.inputs.of(layer, ("x", "B", "C", "dt_raw")).items()}
        x, B, C, dt = given.values()
        params, states, out = run.inputs.params, run.states[layer], run.outputs[layer].flatten(0, 1)
        grid = (-(-P // config["BLOCK_SIZE_M"]), case.batch, H)
        kernel[grid](
            *(states, x, dt, params["dt_bias"], params["A"], B, C, params["D"], None, out, run.indices[:, 0]),
            *(case.batch, H, P, geometry.key_dim, H // geometry.key_heads),
            *states.stride(),
            *x.stride(),
            *(dt.stride(0), dt.stride(1), 0),
            *(1, 0),
            *(1, 0, 0),
            *B.stride(),
            *C.stride(),
            *(1, 0),
            *(0, 0, 0),
            *out.stride(),
            True,  # DT_SOFTPLUS
            True,  # TIE_HDIM
            **config,
        )
        return out


PEERS = (MambaSsm,)
