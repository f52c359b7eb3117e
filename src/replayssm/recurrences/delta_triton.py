"""What the delta rules share in the Triton templates: l2 norms, beta, and records with an inverse key norm."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def record_scales(ring, slot, rows, g, h, mask):
    """Factors of a record's key and write vector: k / |k|, and u as it is."""
    norm, slot_stride, row_stride, head_stride = ring[0]
    scale = tl.load(norm + slot * slot_stride + rows * row_stride + g * head_stride, mask=mask, other=0)
    return scale, tl.full(scale.shape, 1.0, tl.float32)


@triton.jit
def token_rate(inputs, b, t, h, live):
    beta, batch_stride, token_stride = inputs[1]
    return tl.load(beta + b * batch_stride + t * token_stride + h, mask=live, other=0)


@triton.jit
def token_skip(params, h):
    return 0.0


@triton.jit
def key_scale(k):
    return 1.0 / tl.sqrt_rn(tl.sum(k * k, 0) + 1e-6)


@triton.jit
def query_scale(q, N: tl.constexpr):
    return 1.0 / tl.sqrt_rn((tl.sum(q * q, 0) + 1e-6) * N)


@triton.jit
def store_norm(ring, slot, row, g, scale, live):
    norm, slot_stride, row_stride, head_stride = ring[0]
    tl.store(norm + slot * slot_stride + row * row_stride + g * head_stride, scale, mask=live)
