"""A `verify` in one launch that runs record by record: the recurrence as it is written, in registers.

For the smallest batches, where launches and dependent loads cost more than the traffic that replaying saves: with a
window in force of 1 a row folds one record and runs one token, as an ordinary kernel does. It is right for any plan.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.kernels.exact import clamp, high_low
from replayssm.kernels.plan import EMPTY, FOLD_START, FOLDED, HISTORY, POSITION, SLOT, TOKENS
from replayssm.kernels.stochastic import draw, round_to_grid
from replayssm.kernels.verify import unit_columns, zero_units


@triton.jit(do_not_specialize=["layer"])
def recurrent_kernel(
    plan_row, plan, state, state_slot, keys, writes, ring, key, query, value, inputs, layer_params, y, saturated,
    seeds, layer,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr,
    NP: tl.constexpr, BLOCK_P: tl.constexpr, LIMIT: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, SKIP: tl.constexpr, OVERLAP: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr,
    TOKEN_SKIP: tl.constexpr, KEY_SCALE: tl.constexpr, QUERY_SCALE: tl.constexpr, STORE_RECORD: tl.constexpr,
    RANDOM: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """A program per row, head and BLOCK_P columns; arguments as of `verify_kernel` and `prepare_kernel`."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()  # a norm behind this launch has weights to load
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    pid = tl.program_id(0)
    b = (pid // (tiles * H)).to(tl.int64)
    unit = pid % (tiles * H)
    h = unit // tiles
    g = h // (H // G)
    plan += b * plan_row
    slot = tl.load(plan + SLOT)
    tokens = tl.load(plan + TOKENS)
    folded = tl.load(plan + FOLDED)
    start = tl.load(plan + FOLD_START)
    history = tl.load(plan + HISTORY)
    empty = tl.load(plan + EMPTY) != 0
    n = tl.arange(0, NP)
    p = unit_columns(unit, P, BLOCK_P)
    n_mask, p_mask = n < N, p < P
    # the first token's memory is asked for before the plan has come, so that one latency covers both
    first = token_inputs(
        b, 0, h, g, n, n_mask, p, p_mask, key, query, value, inputs, layer_params, N, P, TOKEN_DECAY, TOKEN_RATE
    )
    if slot < 0:
        zero_units(b, unit, y, P, T, BLOCK_P, 1)
    else:
        mask = n_mask[:, None] & p_mask[None, :]
        state_at = state + slot * state_slot + h * (N * P) + n[:, None] * P + p[None, :]
        S = tl.load(state_at, mask=mask & (not empty), other=0).to(tl.float32)
        key_ring = keys[0] + slot * keys[1] + g * keys[3] + n
        write_ring = writes[0] + slot * writes[1] + h * writes[3] + p
        everywhere = tl.full([1], True, tl.int1)
        channels = n_mask if CHANNEL else everywhere
        for record in range(folded + history):
            row = (start + record + tl.arange(0, 1)) % RING_ROWS
            at = (start + record) % RING_ROWS
            key_scale, write_scale = RECORD_SCALES(ring, slot, row, g, h, everywhere)
            k = tl.load(key_ring + at * keys[2], mask=n_mask, other=0).to(tl.float32) * key_scale
            u = tl.load(write_ring + at * writes[2], mask=p_mask, other=0).to(tl.float32) * write_scale
            # one rounding a record, and none of the decay, which would be the same one every time
            high, low = high_low(RECORD_DECAY(ring, layer_params, slot, row, h, n if CHANNEL else 0, channels, N))
            S = high[:, None] * S + (low[:, None] * S + k[:, None] * u[None, :])
        if folded > 0:
            if LIMIT > 0:
                S = clamp(S, saturated + slot, LIMIT, True)
            if RANDOM:
                held = tl.load(plan + POSITION) - history
                S = round_to_grid(S, draw(seeds, slot, layer, held, h, p, N, P, NP), MANTISSA, LEAST)
            rounded = S.to(state.dtype.element_ty)
            tl.store(state_at, rounded, mask=mask)
            S = rounded.to(tl.float32)

        for t in tl.static_range(T):
            live = t < tokens
            if t == 0:
                raw_k, raw_q, v, log_decay, rate = first
            else:
                raw_k, raw_q, v, log_decay, rate = token_inputs(
                    b, t, h, g, n, n_mask, p, p_mask, key, query, value, inputs, layer_params, N, P,
                    TOKEN_DECAY, TOKEN_RATE,
                )  # fmt: skip
            k, q = raw_k.to(tl.float32), raw_q.to(tl.float32)
            k_scale = KEY_SCALE(k)
            k, q = k * k_scale, q * QUERY_SCALE(q, N)
            if CHANNEL:
                S = S * tl.exp(log_decay)[:, None]
            else:
                S = S * tl.exp(log_decay)
            u = v.to(tl.float32)
            if DELTA:
                u -= tl.sum(S * k[:, None], 0)
            u *= rate
            S += k[:, None] * u[None, :]
            out = tl.sum(S * q[:, None], 0)
            if SKIP:
                out += TOKEN_SKIP(layer_params, h) * v.to(tl.float32)
            # tokens beyond the row's hold anything; those behind them are beyond it as well
            rounded_y = tl.where(live, out, 0.0).to(y[0].dtype.element_ty)
            tl.store(y[0] + b * y[1] + t * y[2] + h * P + p, rounded_y, mask=p_mask)

            row = (start + folded + history + t) % RING_ROWS
            kept = u.to(writes[0].dtype.element_ty) if DELTA else v.to(writes[0].dtype.element_ty)
            tl.store(write_ring + row * writes[2], kept, mask=p_mask & live)
            if unit % tiles == 0:
                STORE_RECORD(ring, slot, row, g, h, n, k_scale, log_decay, rate, n_mask, live, N)
                if h % (H // G) == 0:
                    tl.store(key_ring + row * keys[2], raw_k, mask=n_mask & live)


@triton.jit
def token_inputs(
    b, t, h, g, n, n_mask, p, p_mask, key, query, value, inputs, layer_params,
    N: tl.constexpr, P: tl.constexpr, TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr,
):  # fmt: skip
    """(raw key, raw query, value, log decay, rate) of token t, whether it is one of the row's or not."""
    raw_k = tl.load(key[0] + b * key[1] + t * key[2] + g * N + n, mask=n_mask, other=0)
    raw_q = tl.load(query[0] + b * query[1] + t * query[2] + g * N + n, mask=n_mask, other=0)
    v = tl.load(value[0] + b * value[1] + t * value[2] + h * P + p, mask=p_mask, other=0)
    log_decay = TOKEN_DECAY(inputs, layer_params, b, t, h, n, n_mask, b >= 0, N)
    return raw_k, raw_q, v, log_decay, TOKEN_RATE(inputs, b, t, h, b >= 0)
