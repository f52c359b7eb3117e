"""Kimi Delta Attention, token by token. Runs in the dtype of the state, fp64 included.

The decay meets the key before the state is read: the flow does the same, so that window 1 agrees bit for bit.

Per head (no sharing):

    k <- k / sqrt(sum k^2 + 1e-6)     q <- q / sqrt(sum q^2 + 1e-6) / sqrt(N)
    u  = beta (v - S^T (exp(log_decay) * k))    u [P], what the decayed state answers for k, taken from v
    S <- diag(exp(log_decay)) S + k u^T         S [N, P], one decay per row
    y  = S^T q                                  y [P]

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
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    group = heads // k.shape[1]
    q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    outputs = []
    for t in range(q.shape[0]):
        decay = torch.exp(log_decay[t])
        u = beta[t, :, None] * (v[t] - torch.einsum("hnp,hn->hp", state, k[t] * decay))
        state = decay[:, :, None] * state + k[t, :, :, None] * u[:, None, :]
        outputs.append(torch.einsum("hnp,hn->hp", state, q[t]))
    return torch.stack(outputs), state
