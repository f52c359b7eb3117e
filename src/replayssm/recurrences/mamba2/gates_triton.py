"""`Mamba2.step_size` in one launch, for engines whose decode step counts them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.recurrences.softplus_triton import softplus


@triton.jit
def step_size_kernel(raw, raw_row, bias, out, H: tl.constexpr, BLOCK: tl.constexpr):
    """A program per token. raw [n, H], rows `raw_row` apart; bias [H]; out [n, H] fp32."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    mask = h < H
    x = tl.load(raw + token * raw_row + h, mask=mask, other=0).to(tl.float32)
    x += tl.load(bias + h, mask=mask, other=0).to(tl.float32)
    tl.store(out + token * H + h, softplus(x), mask=mask)


def step_size(raw: Tensor, bias: Tensor) -> Tensor:
    """As `Mamba2.step_size` of raw [B, T, H]."""
    rows, heads = raw.flatten(0, 1), raw.shape[-1]
    out = torch.empty(raw.shape, dtype=torch.float32, device=raw.device)
    block = triton.next_power_of_2(heads)
    step_size_kernel[(len(rows),)](rows, rows.stride(0), bias, out, H=heads, BLOCK=block, num_warps=1)
    return out
