"""Kimi Delta Attention, token by token. Runs in the dtype of the state, fp64 included.

Per head (no sharing):

    k <- k / sqrt(sum k^2 + 1e-6)     q <- q / sqrt(sum q^2 + 1e-6) / sqrt(N)
    S <- diag(exp(log_decay)) S       S [N, P], one decay per row
    u  = beta (v - S^T k)             u [P]
    S <- S + k u^T
    y  = S^T q                        y [P]

| symbol    | shape     | meaning                                   |
|-----------|-----------|-------------------------------------------|
| q, k      | [T, H, N] | before normalisation                      |
| v         | [T, H, P] | value                                     |
| log_decay | [T, H, N] | natural log, per token and channel, <= 0  |
| beta      | [T, H]    | write strength, after sigmoid             |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def recurrent(inputs: Mapping[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Advance `state` [H, N, P] over T tokens; returns y [T, H, P] and the new state."""
    dtype, (heads, key_dim, _) = state.dtype, state.shape
    q, k, v, log_decay, beta = (inputs[name].to(dtype) for name in ("q", "k", "v", "log_decay", "beta"))
    q = q / torch.sqrt(q.square().sum(-1, keepdim=True) + 1e-6) / key_dim**0.5
    k = k / torch.sqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    group = heads // k.shape[1]
    q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    outputs = []
    for t in range(q.shape[0]):
        state = torch.exp(log_decay[t])[:, :, None] * state
        u = beta[t, :, None] * (v[t] - torch.einsum("hnp,hn->hp", state, k[t]))
        state = state + k[t, :, :, None] * u[:, None, :]
        outputs.append(torch.einsum("hnp,hn->hp", state, q[t]))
    return torch.stack(outputs), state
