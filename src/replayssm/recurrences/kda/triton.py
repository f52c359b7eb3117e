"""Kimi Delta Attention for the Triton templates: one decay per key channel."""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.recurrences.delta_triton import (
    key_scale,
    query_scale,
    record_scales,
    store_norm,
    token_rate,
    token_skip,
)
from replayssm.recurrences.gates_triton import sigmoid, softplus
from replayssm.recurrences.triton_form import TritonForm


@triton.jit
def record_decay(ring, params, slot, rows, h, n, mask, N: tl.constexpr):
    decay, slot_stride, row_stride, head_stride = ring[1]
    return tl.load(decay + slot * slot_stride + rows * row_stride + h * head_stride + n, mask=mask, other=0)


@triton.jit
def token_decay(inputs, params, b, t, h, n, n_mask, live, N: tl.constexpr):
    decay, batch_stride, token_stride = inputs[0]
    return tl.load(decay + b * batch_stride + t * token_stride + h * N + n, mask=n_mask & live, other=0)


@triton.jit
def store_record(ring, slot, row, g, h, n, k_scale, log_decay, rate, n_mask, live, N: tl.constexpr):
    store_norm(ring, slot, row, g, k_scale, live)
    decay, slot_stride, row_stride, head_stride = ring[1]
    tl.store(decay + slot * slot_stride + row * row_stride + h * head_stride + n, log_decay, mask=n_mask & live)


@triton.jit
def gate(inputs, params, out, b, t, item, e, mask, CONSTANTS: tl.constexpr, H: tl.constexpr, N: tl.constexpr):
    """log_decay of raw f [H, N], A_log [H] and dt_bias [H, N]; beta of raw b [H]. CONSTANTS: the bound, 0 for none."""
    h = e // N
    f, batch_stride, token_stride = inputs[0]
    raw = tl.load(f + b * batch_stride + t * token_stride + e, mask=mask, other=0).to(tl.float32)
    rate = tl.exp(tl.load(params[0] + h, mask=mask, other=0).to(tl.float32))
    shifted = raw + tl.load(params[1] + e, mask=mask, other=0).to(tl.float32)
    if CONSTANTS[0] < 0:
        log_decay = CONSTANTS[0] * sigmoid(rate * shifted)
    else:
        log_decay = -rate * softplus(shifted)
    tl.store(out[0] + item * (H * N) + e, log_decay, mask=mask)
    first = mask & (e % N == 0)
    beta, batch_stride, token_stride = inputs[1]
    raw = tl.load(beta + b * batch_stride + t * token_stride + h, mask=first, other=0).to(tl.float32)
    tl.store(out[1] + item * H + h, sigmoid(raw), mask=first)


TRITON = TritonForm(
    key="k",
    query="q",
    value="v",
    rate="beta",
    key_ring="k",
    write_ring="u",
    ring=("k_inv_norm", "log_decay"),
    inputs=("log_decay", "beta"),
    params=(),
    skip=False,
    record_scales=record_scales,
    record_decay=record_decay,
    token_decay=token_decay,
    token_rate=token_rate,
    token_skip=token_skip,
    key_scale=key_scale,
    query_scale=query_scale,
    store_record=store_record,
    gate=gate,
)
