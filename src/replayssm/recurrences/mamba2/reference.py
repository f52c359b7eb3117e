"""Mamba-2, token by token. Runs in the dtype of the state, fp64 included.

Per head h of group g = h // (H / G):

    S <- exp(dt A) S + B (dt x)^T          S [N, P]
    y  = S^T C + D x                       y [P]

| symbol | shape     | meaning                                |
|--------|-----------|----------------------------------------|
| x      | [T, H, P] | input, after conv and activation       |
| B, C   | [T, G, N] | write and read directions              |
| dt     | [T, H]    | step size after bias and softplus      |
| A, D   | [H]       | decay rate (< 0), weight of the bypass |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def recurrent(inputs: Mapping[str, Tensor], params: Mapping[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Advance `state` [H, N, P] over T tokens; returns y [T, H, P] and the new state."""
    dtype, heads = state.dtype, state.shape[0]
    x, B, C, dt = (inputs[name].to(dtype) for name in ("x", "B", "C", "dt"))
    A, D = params["A"].to(dtype), params["D"].to(dtype)
    group = heads // B.shape[1]
    B, C = B.repeat_interleave(group, dim=1), C.repeat_interleave(group, dim=1)
    outputs = []
    for t in range(x.shape[0]):
        decay = torch.exp(dt[t] * A)
        write = dt[t, :, None] * x[t]
        state = decay[:, None, None] * state + B[t, :, :, None] * write[:, None, :]
        outputs.append(torch.einsum("hnp,hn->hp", state, C[t]) + D[:, None] * x[t])
    return torch.stack(outputs), state
