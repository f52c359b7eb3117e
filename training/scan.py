"""Fast chunked scans for training, exact in fp32, that take the place of the transformers fallbacks.

All three recurrences keep a matrix state ``S`` per head (``[K, V]``) and differ in decay and write rule:

    delta rule   S_t = D_t S_{t-1} + beta_t k_t (v_t - (D_t S_{t-1})^T k_t)^T     o_t = S_t^T q_t
                 D_t = exp(g_t) per head (GDN) or diag(exp(g_t)) per channel (KDA)
    Mamba-2      S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T                        y_t = S_t^T C_t + D x_t

A chunk of ``C`` tokens is solved at once: with ``G`` the running sum of the log decays inside the chunk,

    A_ij = beta_i <k_i exp(G_i - G_j), k_j>  (j < i)      P_ij = <q_i exp(G_i - G_j), k_j>  (j <= i)
    T = (I + A)^-1      U = T (beta v)      W = T (beta k exp(G))
    new = U - W S       o = (q exp(G)) S + P new      S <- exp(G_C) S + (k exp(G_C - G))^T new

The functions have the signatures of the transformers callees, so :func:`use_fast_scans` only swaps module globals.
Difference to the stock code: matrix products may run in TF32 on a GPU (the inverse never does).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
SUB_BLOCK = 16


@torch.library.custom_op("replayssm_training::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(strict: Tensor) -> Tensor:
    """``(I + N)^-1`` for a strictly lower triangular ``strict`` = N ``[..., C, C]``, C = 16 * 2^m, in full fp32.

    The 16x16 diagonal blocks come from ``(I - N)(I + N^2)(I + N^4)(I + N^8)``, whose powers stay small enough for fp32;
    pairs of blocks are then joined by ``[[X, 0], [-Y M X, Y]]``.
    """
    allow = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        size = strict.shape[-1]
        lead = strict.shape[:-2]
        step = min(SUB_BLOCK, size)
        blocks = strict.reshape(*lead, size // step, step, size // step, step)
        diagonal = torch.diagonal(blocks, dim1=-4, dim2=-2).movedim(-1, -3)  # [..., size/step, step, step]
        eye = torch.eye(step, dtype=strict.dtype, device=strict.device)
        inverse = eye - diagonal
        power = diagonal
        covered = 2
        while covered < step:
            power = power @ power
            inverse = inverse + inverse @ power
            covered *= 2
        while step < size:
            pairs = size // (2 * step)
            grid = strict.reshape(*lead, pairs, 2, step, pairs, 2, step)
            lower = torch.diagonal(grid[..., 1, :, :, 0, :], dim1=-4, dim2=-2).movedim(-1, -3)
            halves = inverse.reshape(*lead, pairs, 2, step, step)
            first, second = halves[..., 0, :, :], halves[..., 1, :, :]
            corner = -(second @ lower @ first)
            top = torch.cat([first, torch.zeros_like(first)], -1)
            inverse = torch.cat([top, torch.cat([corner, second], -1)], -2)
            step *= 2
        return inverse.reshape(strict.shape).contiguous()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allow


@unit_lower_inverse.register_fake
def _(strict: Tensor) -> Tensor:
    return strict.new_empty(strict.shape)


def _save_inverse(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_backward(ctx: Any, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    transposed = inverse.transpose(-1, -2)
    return -(transposed @ grad @ transposed).tril(-1)


unit_lower_inverse.register_autograd(_inverse_backward, setup_context=_save_inverse)


def _chunked(x: Tensor, pad: int) -> Tensor:
    """``[B, T, H, ...]`` -> fp32 ``[B, H, N, C, ...]``, with zeros after the last token."""
    x = x.float()
    if pad:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad))
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1, CHUNK, *x.shape[3:])


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The chunks of tensors ``[B, H, N, ...]``, one after the other.

    The gradient of one ``unbind`` is one stack; that of an index per chunk fills a tensor of the whole size each time.
    """
    return zip(*(x.unbind(2) for x in tensors), strict=True)


def _pairwise_scalar(rows: list[Tensor], cols: Tensor, total: Tensor) -> list[Tensor]:
    """``<r_i, c_j> exp(G_i - G_j)`` for j <= i, else 0; ``total`` = G ``[B, H, N, C]``."""
    mask = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=cols.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~mask, float("-inf")).exp()
    return [(row @ cols.transpose(-1, -2)) * decay for row in rows]


def _pairwise_channel(rows: list[Tensor], cols: Tensor, total: Tensor) -> list[Tensor]:
    """``sum_d r_id c_jd exp(G_id - G_jd)`` for j <= i, else 0; ``total`` = G ``[B, H, N, C, K]``.

    No exponent is ever positive: pairs within a sub-block take their decay one by one, pairs across sub-blocks split it
    at the first token of the later one. A split inside a sub-block would need exp of a large positive number as soon as
    one step forgets strongly; a cap on it was tried and cost accuracy (``README.md``, KDA).
    """
    blocks = CHUNK // SUB_BLOCK
    shape = (*total.shape[:3], blocks, SUB_BLOCK, total.shape[-1])
    inner = total.reshape(shape)
    mask = torch.ones(SUB_BLOCK, SUB_BLOCK, dtype=torch.bool, device=cols.device).tril()
    decay = (inner[..., :, None, :] - inner[..., None, :, :]).masked_fill(~mask[..., None], float("-inf")).exp()
    decayed_cols = decay * cols.reshape(shape)[..., None, :, :]  # [B, H, N, blocks, i, j, K]
    results = []
    for row in rows:
        within = (row.reshape(shape)[..., :, None, :] * decayed_cols).sum(-1)  # [B, H, N, blocks, i, j]
        parts = [F.pad(within[..., 0, :, :], (0, CHUNK - SUB_BLOCK))]
        for block in range(1, blocks):
            start = block * SUB_BLOCK
            first = total[..., start, None, :]
            left = row[..., start : start + SUB_BLOCK, :] * (total[..., start : start + SUB_BLOCK, :] - first).exp()
            right = cols[..., :start, :] * (first - total[..., :start, :]).exp()
            earlier = left @ right.transpose(-1, -2)
            after = CHUNK - start - SUB_BLOCK
            parts.append(F.pad(torch.cat([earlier, within[..., block, :, :]], -1), (0, after)))
        results.append(torch.cat(parts, -2))
    return results


def delta_rule_chunks(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, normalize: bool, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output ``[B, T, H, V]`` and final state ``[B, H, K, V]`` of the delta rule.

    | tensor      | shape                        | meaning                          |
    |-------------|------------------------------|----------------------------------|
    | query, key  | ``[B, T, H or H / group, K]``| raw when ``normalize``           |
    | value       | ``[B, T, H, V]``             |                                  |
    | g           | ``[B, T, H]`` or ``[B, T, H, K]`` | log decay, <= 0             |
    | beta        | ``[B, T, H]``                | write strength                   |
    """
    group = value.shape[2] // key.shape[2]  # transformers repeats shared key heads itself before 5.23
    query, key = query.repeat_interleave(group, 2), key.repeat_interleave(group, 2)
    batch, length, heads, k_dim = key.shape
    pad = -length % CHUNK
    q, k, v, g, beta = (_chunked(x, pad) for x in (query, key, value, g, beta))
    if normalize:
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6)
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    q = q * k_dim**-0.5
    total = g.cumsum(3)
    k_beta = k * beta[..., None]
    per_channel = total.dim() == 5
    pairwise = _pairwise_channel if per_channel else _pairwise_scalar
    system, scores = pairwise([k_beta, q], k, total)
    if not per_channel:
        total = total[..., None]
    inverse = unit_lower_inverse(system.tril(-1))
    decayed = total.exp()
    fresh = inverse @ (v * beta[..., None])
    reader = inverse @ (k_beta * decayed)
    q = q * decayed
    writer = (k * (total[..., -1:, :] - total).exp()).transpose(-1, -2)
    chunk_decay = decayed[..., -1, :, None]

    state = v.new_zeros(batch, heads, k_dim, v.shape[-1]) if initial_state is None else initial_state.float()
    outputs = []
    for parts in _chunks(fresh, reader, q, scores, writer, chunk_decay):
        new_i, reader_i, q_i, scores_i, writer_i, decay_i = parts
        new = new_i - reader_i @ state
        outputs.append(q_i @ state + scores_i @ new)
        state = state * decay_i + writer_i @ new
    out = torch.stack(outputs, 2).reshape(batch, heads, length + pad, -1)[:, :, :length]
    return out.transpose(1, 2).to(value.dtype), state


def fast_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **unused: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stands in for ``torch_chunk_gated_delta_rule`` (g per head) and ``chunk_kimi_delta_attention`` (g per channel)."""
    with torch.autocast(query.device.type, enabled=False):
        out, state = delta_rule_chunks(query, key, value, g, beta, use_qk_l2norm_in_kernel, initial_state)
    return out, state if output_final_state else None


def fast_mamba2_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **unused: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Stands in for ``mamba2_chunk_scan``.

    | tensor        | shape                 | meaning                              |
    |---------------|-----------------------|--------------------------------------|
    | hidden_states | ``[B, T, H, P]``      | x                                    |
    | dt            | ``[B, T, H]``         | raw step, before bias and softplus   |
    | A, D, dt_bias | ``[H]``               | A < 0                                |
    | B, C          | ``[B, T, G, N]``      | one per group of H / G heads         |
    | result        | ``[B, T, H, P]`` fp32 | and the state ``[B, H, P, N]``       |
    """
    del chunk_size
    with torch.autocast(hidden_states.device.type, enabled=False):
        batch, length, heads, p_dim = hidden_states.shape
        repeat = heads // B.shape[2]
        dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        dt = F.softplus(dt) if dt_softplus else dt
        dt = dt.clamp(dt_limit[0], dt_limit[1])
        pad = -length % CHUNK
        x, steps, b, c = (_chunked(value, pad) for value in (hidden_states, dt, B, C))
        b, c = b.repeat_interleave(repeat, 1), c.repeat_interleave(repeat, 1)
        total = (steps * A.float()[:, None, None]).cumsum(3)
        weighted = x * steps[..., None]
        (scores,) = _pairwise_scalar([c], b, total)
        inside = scores @ weighted
        total = total[..., None]
        writes = (b * (total[..., -1:, :] - total).exp()).transpose(-1, -2) @ weighted  # [B, H, chunks, N, P]
        reader = c * total.exp()
        chunk_decay = total[..., -1:, :].exp()
        if initial_states is None:
            state = x.new_zeros(batch, heads, b.shape[-1], p_dim)
        else:
            state = initial_states.float().transpose(-1, -2)
        before = []
        for decay_i, writes_i in _chunks(chunk_decay, writes):
            before.append(state)
            state = state * decay_i + writes_i
        out = inside + reader @ torch.stack(before, 2)
        if D is not None:
            out = out + x * D.float()[:, None, None, None]
        out = out.reshape(batch, heads, length + pad, p_dim)[:, :, :length].transpose(1, 2)
    return (out, state.transpose(-1, -2)) if return_final_states else out


def fast_causal_conv1d(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **unused: Any
) -> Tensor:
    """Stands in for ``causal_conv1d_fn``: ``[B, D, T]`` with ``weight`` ``[D, taps]``, as shifted sums that fuse well."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation must be None or 'silu', got {activation!r}")
    taps, length = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states.float(), (taps - 1, 0))
    out = sum(padded[..., tap : tap + length] * weight[:, tap, None].float() for tap in range(taps))
    out = out if bias is None else out + bias[:, None].float()
    out = out if activation is None else F.silu(out)
    return out.to(hidden_states.dtype)


_SWAPS = {
    "qwen3_5": {"torch_chunk_gated_delta_rule": fast_delta_rule, "causal_conv1d_fn": fast_causal_conv1d},
    "kimi_linear": {"chunk_kimi_delta_attention": fast_delta_rule, "causal_conv1d_fn": fast_causal_conv1d},
    "nemotron_h": {"mamba2_chunk_scan": fast_mamba2_scan, "causal_conv1d_fn": fast_causal_conv1d},
}


def use_fast_scans(model_type: str, enable: bool = True) -> None:
    """Swap the scan and convolution of a transformers model module for the ones above, or back (``enable=False``).

    ``model_type`` is the module's name: ``qwen3_5``, ``kimi_linear`` or ``nemotron_h``. Works for the whole process.
    """
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    for name, function in _SWAPS[model_type].items():
        stock = f"_stock_{name}"
        if not hasattr(module, stock):
            setattr(module, stock, getattr(module, name))
        setattr(module, name, function if enable else getattr(module, stock))
