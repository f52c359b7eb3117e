"""Mamba-2 for the Triton templates: which tensors play which part, and the small functions that differ."""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.recurrences.gates_triton import softplus
from replayssm.recurrences.triton_form import TritonForm


@triton.jit
def record_scales(ring, slot, rows, g, h, mask):
    """Factors of a record's key and write vector: u = dt x."""
    dt, slot_stride, row_stride, head_stride = ring[0]
    scale = tl.load(dt + slot * slot_stride + rows * row_stride + h * head_stride, mask=mask, other=0)
    return tl.full(scale.shape, 1.0, tl.float32), scale


@triton.jit
def record_decay(ring, params, slot, rows, h, n, mask, N: tl.constexpr):
    dt, slot_stride, row_stride, head_stride = ring[0]
    return tl.load(dt + slot * slot_stride + rows * row_stride + h * head_stride, mask=mask, other=0) * tl.load(
        params[0] + h
    )


@triton.jit
def token_decay(inputs, params, b, t, h, n, n_mask, live, N: tl.constexpr):
    return token_rate(inputs, b, t, h, live) * tl.load(params[0] + h)


@triton.jit
def token_rate(inputs, b, t, h, live):
    dt, batch_stride, token_stride = inputs[0]
    return tl.load(dt + b * batch_stride + t * token_stride + h, mask=live, other=0)


@triton.jit
def token_skip(params, h):
    return tl.load(params[1] + h)


@triton.jit
def unit_scale(k):
    return 1.0


@triton.jit
def query_scale(q, N: tl.constexpr):
    return 1.0


@triton.jit
def store_record(ring, slot, row, g, h, n, key_scale, log_decay, rate, n_mask, live, N: tl.constexpr):
    dt, slot_stride, row_stride, head_stride = ring[0]
    tl.store(dt + slot * slot_stride + row * row_stride + h * head_stride, rate, mask=live)


@triton.jit
def gate(inputs, params, out, b, t, item, e, mask, CONSTANTS: tl.constexpr, H: tl.constexpr, N: tl.constexpr):
    """dt of the raw dt and its bias, both [H]."""
    dt, batch_stride, token_stride = inputs[0]
    raw = tl.load(dt + b * batch_stride + t * token_stride + e, mask=mask, other=0).to(tl.float32)
    bias = tl.load(params[0] + e, mask=mask, other=0).to(tl.float32)
    tl.store(out[0] + item * H + e, softplus(raw + bias), mask=mask)


TRITON = TritonForm(
    key="B",
    query="C",
    value="x",
    rate="",
    key_ring="B",
    write_ring="x",
    ring=("dt",),
    inputs=("dt",),
    params=("A", "D"),
    skip=True,
    record_scales=record_scales,
    record_decay=record_decay,
    token_decay=token_decay,
    token_rate=token_rate,
    token_skip=token_skip,
    key_scale=unit_scale,
    query_scale=query_scale,
    store_record=store_record,
    gate=gate,
)
