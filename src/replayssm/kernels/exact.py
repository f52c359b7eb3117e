"""Arithmetic that the templates share, and that keeps fp32 exactness on tensor cores (docs/numerics.md).

Products of 16-bit keys and queries are exact and summed in fp32. A fold multiplies raw 16-bit keys with write vectors
split into three 16-bit parts, so tensor cores lose nothing; the decay of a fold has a low part, because the same
rounded factor applied at every flush would drift; sums of log decays only ever add values of one sign.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.kernels.formats import state_rows


@triton.jit
def cut(x):
    """The first 8 bits of the significands of `x` fp32, as bf16, and what they leave over; both exact."""
    # cutting bits off is integer work at full rate; rounding is not, and three parts of 8 bits are exact either way
    bits = x.to(tl.int32, bitcast=True)
    part = (bits & -65536).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - part


@triton.jit
def split_dot(key, x):
    """key @ x for a bf16 `key` and an fp32 `x`, exact to fp32: x is the sum of three bf16 parts, smallest first."""
    high, rest = cut(x)
    middle, rest = cut(rest)
    low, _ = cut(rest)
    return tl.dot(key, high, tl.dot(key, middle, tl.dot(key, low)))


@triton.jit
def state_dot(a, x):
    """a @ x of an operand from the model and an fp32 one, exact to fp32."""
    if a.dtype == tl.bfloat16:
        return split_dot(a, x)
    else:
        return tl.dot(a.to(tl.float32), x, input_precision="tf32x3")


@triton.jit
def exact_dot(a, b):
    """a @ b of two operands of one dtype: exact products for 16-bit dtypes, fp32-class otherwise."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b)


@triton.jit
def high_low(log_decay):
    """exp(log_decay) as the sum of two fp32 numbers."""
    decay = tl.exp(log_decay.to(tl.float64))
    high = decay.to(tl.float32)
    return high, (decay - high.to(tl.float64)).to(tl.float32)


@triton.jit
def newest_first(WP: tl.constexpr):
    """Records [WP] from the last to the first: sums since a record then run forward, which takes fewer exchanges."""
    return WP - 1 - tl.arange(0, WP)


@triton.jit
def head_weights(
    ring, layer_params, slot, start, records, g, heads,
    N: tl.constexpr, WP: tl.constexpr, RING_ROWS: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, IN_ORDER: tl.constexpr = False,
):  # fmt: skip
    """(weights [HEADS, WP], log decay [HEADS]) of the oldest `records` records, for `heads` [HEADS, 1] of key head g.

    A weight takes raw key x raw write vector to the state after the newest of the records; zero beyond them. They
    are in the order `newest_first`, or from the first to the last if IN_ORDER. The log decay is that of all records
    together.
    """
    j = (tl.arange(0, WP) if IN_ORDER else newest_first(WP))[None, :]
    rows, later_rows = (start + j) % RING_ROWS, (start + j + 1) % RING_ROWS
    key_scale, write_scale = RECORD_SCALES(ring, slot, rows, g, heads, j < records)
    first = RECORD_DECAY(ring, layer_params, slot, start % RING_ROWS, heads, 0, records > 0, N)
    later = RECORD_DECAY(ring, layer_params, slot, later_rows, heads, 0, j + 1 < records, N)
    weights = tl.exp(tl.cumsum(later, 1, reverse=IN_ORDER)) * key_scale * write_scale
    return weights, tl.sum(first, 1) + tl.sum(later, 1)


@triton.jit
def channel_keys(
    keys, ring, layer_params, slot, start, records, g, h, n, n_mask,
    N: tl.constexpr, WP: tl.constexpr, RING_ROWS: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
):  # fmt: skip
    """The same for one head with a decay per channel: keys [WP, NP] as they stand in the state, log decay [NP]."""
    j = tl.arange(0, WP)
    rows, later_rows = (start + j) % RING_ROWS, (start + j + 1) % RING_ROWS
    mask = (j < records)[:, None] & n_mask[None, :]
    later_mask = (j + 1 < records)[:, None] & n_mask[None, :]
    raw = tl.load(keys[0] + slot * keys[1] + rows[:, None] * keys[2] + g * keys[3] + n[None, :], mask=mask, other=0)
    key_scale, write_scale = RECORD_SCALES(ring, slot, rows, g, h, j < records)
    first = RECORD_DECAY(ring, layer_params, slot, start % RING_ROWS, h, n, n_mask & (records > 0), N)
    later = RECORD_DECAY(ring, layer_params, slot, later_rows[:, None], h, n[None, :], later_mask, N)
    scaled = raw.to(tl.float32) * (key_scale * write_scale)[:, None]
    return scaled * tl.exp(tl.cumsum(later, 0, reverse=True)), first + tl.sum(later, 0)


@triton.jit
def channel_answers(
    head, column, keys, ring, layer_params, slot, start, records, empty, g, h, p,
    N: tl.constexpr, P: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr, RING_ROWS: tl.constexpr,
    SCALED: tl.constexpr, RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
):  # fmt: skip
    """(decayed S)^T k [WP, P] of the same records, at columns `p` of the checkpoint that `head` points to.

    A few channels at a time, read once more: the operands of one product over all of them would not fit into registers.
    """
    CHANNELS: tl.constexpr = 16
    j = tl.arange(0, WP)
    rows = (start + j) % RING_ROWS
    key_rows = keys[0] + slot * keys[1] + rows[:, None] * keys[2] + g * keys[3]
    key_scale, _ = RECORD_SCALES(ring, slot, rows, g, h, j < records)
    answer = tl.zeros([WP, p.shape[0]], tl.float32)
    for first in tl.range(0, NP, CHANNELS, num_stages=1):
        n = first + tl.arange(0, CHANNELS)
        mask = (j < records)[:, None] & (n < N)[None, :]
        log_decay = RECORD_DECAY(ring, layer_params, slot, rows[:, None], h, n[None, :], mask, N)
        probe = tl.load(key_rows + n[None, :], mask=mask, other=0).to(tl.float32) * tl.exp(tl.cumsum(log_decay, 0))
        S = state_rows(head, column, n, p, (n < N)[:, None] & (p < P)[None, :], P, SCALED)
        answer = tl.dot(probe, S, answer, input_precision="tf32x3")
    return tl.where(empty, 0.0, answer * key_scale[:, None])


@triton.jit
def fold_head(S, raw_keys, weighted, high, low):
    """A state [NP, P] after records with raw keys [NP, WP] and weighted write vectors [WP, P]; decay high + low."""
    return high * S + (low * S + state_dot(raw_keys, weighted))


@triton.jit
def fold_channel(S, scaled_keys, writes, log_decay):
    """The same for a decay per channel: keys [WP, NP] of `channel_keys`, write vectors [WP, P]."""
    high, low = high_low(log_decay)
    added = tl.dot(tl.trans(scaled_keys), writes, input_precision="tf32x3")
    return high[:, None] * S + (low[:, None] * S + added)


@triton.jit
def solved_writes(answer, values, solve, WP: tl.constexpr):
    """Write vectors [WP, P] of a delta rule's window from its values [WP, P] and what the checkpoint answers its keys.

    `solve` is what the first launch made of the window: the matrix [WP, WP] that takes errors to write vectors.
    """
    j = tl.arange(0, WP)
    matrix = tl.load(solve + j[:, None] * WP + j[None, :])
    return tl.dot(matrix, values - answer, input_precision="tf32x3")


@triton.jit
def nearest(S, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """S fp32 rounded to a narrower dtype, and the same in fp32 again. NATIVE: on a GPU that converts pairs."""
    if NATIVE and dtype == tl.bfloat16:
        # numbers that are stored and used further would be converted one by one, at a quarter of the rate
        narrow = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [S], tl.bfloat16, is_pure=True, pack=2
        )
    else:
        narrow = S.to(dtype)
    return narrow, narrow.to(tl.float32)


@triton.jit
def clamp(S, saturated, LIMIT: tl.constexpr, COUNT: tl.constexpr):
    """S within the largest number of its format; elements beyond are added to the counter `saturated`."""
    # a silent inf would turn the rest of the sequence into NaN; NaN itself stays
    # one maximum: Triton 3.6 fails on a reduction of two behind a tensor memory product (compute capability 10.0)
    largest = tl.max(tl.reshape(tl.abs(S), [S.shape[0] * S.shape[1]], can_reorder=True), 0)
    if largest > LIMIT:  # almost never, so that nothing else has to count
        over = tl.abs(S) > LIMIT
        if COUNT:
            clamped = tl.sum(tl.reshape(over.to(tl.int32), [S.shape[0] * S.shape[1]], can_reorder=True), 0)
            tl.atomic_add(saturated, clamped.to(tl.int64))
        S = tl.where(over, tl.where(S > 0, LIMIT, -LIMIT), S)
    return S
