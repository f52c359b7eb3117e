"""`GatedDeltaNet.gates` in one launch, for engines whose decode step counts them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.recurrences.softplus_triton import softplus


@triton.jit
def gates_kernel(a, a_row, b, b_row, A_log, dt_bias, log_decay, beta, H: tl.constexpr, BLOCK: tl.constexpr):
    """A program per token. a, b [n, H], rows `a_row` and `b_row` apart; A_log, dt_bias [H]; outputs [n, H] fp32."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    mask = h < H
    x = tl.load(a + token * a_row + h, mask=mask, other=0).to(tl.float32)
    x += tl.load(dt_bias + h, mask=mask, other=0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + h, mask=mask, other=0).to(tl.float32))
    tl.store(log_decay + token * H + h, -rate * softplus(x), mask=mask)
    y = tl.load(b + token * b_row + h, mask=mask, other=0).to(tl.float32)
    tl.store(beta + token * H + h, tl.sigmoid(y), mask=mask)


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """As `GatedDeltaNet.gates` of a, b [B, T, H]."""
    a_rows, b_rows, heads = a.flatten(0, 1), b.flatten(0, 1), a.shape[-1]
    log_decay, beta = torch.empty(2, *a.shape, dtype=torch.float32, device=a.device).unbind()
    block = triton.next_power_of_2(heads)
    gates_kernel[(len(a_rows),)](
        a_rows, a_rows.stride(0), b_rows, b_rows.stride(0), A_log, dt_bias, log_decay, beta,
        H=heads, BLOCK=block, num_warps=1,
    )  # fmt: skip
    return log_decay, beta
