"""A `verify` in one launch that runs record by record: the recurrence as it is written, in registers.

For the smallest batches, where launches and dependent loads cost more than the traffic that replaying saves: with a
window in force of 1 a row folds one record and runs one token, as an ordinary kernel does. It is right for any plan.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.kernels.exact import clamp, high_low, nearest
from replayssm.kernels.plan import EMPTY, FOLD_START, FOLDED, HISTORY, POSITION, SLOT, TOKENS
from replayssm.kernels.prefetch import guessed_row, prefetch, prefetch_records, prefetch_rows
from replayssm.kernels.stochastic import draw, round_to_grid
from replayssm.kernels.verify import unit_columns, zero_units


@triton.jit(do_not_specialize=["layer"])
def recurrent_kernel(
    plan_row, plan, state, state_slot, keys, writes, ring, key, query, value, inputs, layer_params, y, saturated,
    seeds, layer, slots,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr,
    NP: tl.constexpr, BLOCK_P: tl.constexpr, LIMIT: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, SKIP: tl.constexpr, OVERLAP: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr,
    TOKEN_SKIP: tl.constexpr, KEY_SCALE: tl.constexpr, QUERY_SCALE: tl.constexpr, STORE_RECORD: tl.constexpr,
    NATIVE: tl.constexpr, RANDOM: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
    RECORD_SIZES: tl.constexpr,
):  # fmt: skip
    """A program per row, head and BLOCK_P columns; arguments as of `verify_kernel` and `prepare_kernel`.

    `slots` are those of the layer, RECORD_SIZES as `prefetch_records` takes them.
    """
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    pid = tl.program_id(0)
    b = (pid // (tiles * H)).to(tl.int64)
    unit = pid % (tiles * H)
    h = unit // tiles
    g = h // (H // G)
    plan += b * plan_row
    n = tl.arange(0, NP)
    p = unit_columns(unit, P, BLOCK_P)
    n_mask, p_mask = n < N, p < P
    if OVERLAP:
        guessed_slot, guessed_start, folded, history, guessed_empty = guessed_row(plan, slots, RING_ROWS)
        guessed_records = folded + history
        if guessed_slot >= 0:
            # a head's columns lie together, so any share of the memory will do
            share: tl.constexpr = N * P // tiles
            prefetch(state + guessed_slot * state_slot + h * (N * P) + unit % tiles * share, share)
            prefetch_rows(writes, guessed_slot, guessed_start, h, H, 1, 1, H, P)
            prefetch_records(keys, ring, guessed_slot, guessed_start, h, H, 1, 1, RECORD_SIZES)
        gdc_wait()
        gdc_launch_dependents()  # a norm behind this launch has weights to load
        # whatever the guess is, from here on memory may be read, and what it says is asked for beside the plan
        S, raw_k, raw_u, key_scale, write_scale, record_decay = state_and_record(
            guessed_slot, guessed_start, guessed_records > 0, guessed_empty, state, state_slot, keys, writes, ring,
            layer_params, g, h, n, n_mask, p, p_mask, N, P, CHANNEL, RECORD_SCALES, RECORD_DECAY,
        )  # fmt: skip
    slot = tl.load(plan + SLOT)
    # what counts rows is small, and 64-bit remainders are slow
    tokens = tl.load(plan + TOKENS).to(tl.int32)
    folded = tl.load(plan + FOLDED).to(tl.int32)
    start = tl.load(plan + FOLD_START).to(tl.int32)
    history = tl.load(plan + HISTORY).to(tl.int32)
    empty = tl.load(plan + EMPTY) != 0
    # the tokens' memory is asked for before the plan has come, so that one latency covers both
    given = (
        token_inputs(
            b, 0, h, g, n, n_mask, p, p_mask, key, query, value, inputs, layer_params, N, P, TOKEN_DECAY, TOKEN_RATE
        ),
    )
    for t in tl.static_range(1, T):
        later = token_inputs(
            b, t, h, g, n, n_mask, p, p_mask, key, query, value, inputs, layer_params, N, P, TOKEN_DECAY, TOKEN_RATE
        )
        given = given + (later,)  # type: ignore[assignment]
    if SKIP:
        skip = TOKEN_SKIP(layer_params, h)
    if slot < 0:
        zero_units(b, unit, y, P, T, BLOCK_P, 1)
    else:
        key_ring = keys[0] + slot * keys[1] + g * keys[3] + n
        write_ring = writes[0] + slot * writes[1] + h * writes[3] + p
        records = folded + history
        # the first record, which most rows have, comes beside the state; where there is none it changes nothing
        if OVERLAP:
            wrong = (slot != guessed_slot) | (start != guessed_start) | (empty != guessed_empty)
            wrong |= (records > 0) != (guessed_records > 0)
        if not OVERLAP or wrong:
            S, raw_k, raw_u, key_scale, write_scale, record_decay = state_and_record(
                slot, start, records > 0, empty, state, state_slot, keys, writes, ring, layer_params, g, h, n, n_mask,
                p, p_mask, N, P, CHANNEL, RECORD_SCALES, RECORD_DECAY,
            )  # fmt: skip
        S = fold_record(S, raw_k, raw_u, key_scale, write_scale, record_decay)
        for one in range(1, records):
            k, u, k_scale, u_scale, decay = record_inputs(
                slot, (start + one) % RING_ROWS, True, keys, writes, ring, layer_params, g, h, n, n_mask, p, p_mask,
                N, CHANNEL, RECORD_SCALES, RECORD_DECAY,
            )  # fmt: skip
            S = fold_record(S, k, u, k_scale, u_scale, decay)
        if folded > 0:
            if LIMIT > 0:
                S = clamp(S, saturated + slot, LIMIT, True)
            if RANDOM:
                held = tl.load(plan + POSITION) - history
                S = round_to_grid(S, draw(seeds, slot, layer, held, h, 0, p, N, P, NP), MANTISSA, LEAST)
            rounded, S = nearest(S, state.dtype.element_ty, NATIVE)
            state_at = state + slot * state_slot + h * (N * P) + n[:, None] * P + p[None, :]
            tl.store(state_at, rounded, mask=n_mask[:, None] & p_mask[None, :])

        for t in tl.static_range(T):
            live = t < tokens
            raw_k, raw_q, v, log_decay, rate = given[t]
            k, q = raw_k.to(tl.float32), raw_q.to(tl.float32)
            k_scale, q_scale = KEY_SCALE(k), QUERY_SCALE(q, N)
            # of 16-bit numbers the products are exact, so that all threads have the same sum of them to the last bit
            own = tl.sum(k * q, 0) * (k_scale * q_scale)
            k, q = k * k_scale, q * q_scale
            step = tl.exp(log_decay)
            # output and correction take two sums of the state before the token, neither of which waits for the other
            if CHANNEL:
                out = tl.sum(S * (q * step)[:, None], 0)
                answer = tl.sum(S * (k * step)[:, None], 0) if DELTA else 0.0
            else:
                out = tl.sum(S * q[:, None], 0) * step
                answer = tl.sum(S * k[:, None], 0) * step if DELTA else 0.0
            u = (v.to(tl.float32) - answer) * rate
            out += own * u
            if SKIP:
                out += skip * v.to(tl.float32)
            # tokens beyond the row's hold anything; those behind them are beyond it as well
            rounded_y = tl.where(live, out, 0.0).to(y[0].dtype.element_ty)
            tl.store(y[0] + b * y[1] + t * y[2] + h * P + p, rounded_y, mask=p_mask)
            if t + 1 < T:
                S = S * (step[:, None] if CHANNEL else step) + k[:, None] * u[None, :]

            row = (start + records + t) % RING_ROWS
            kept = u.to(writes[0].dtype.element_ty) if DELTA else v.to(writes[0].dtype.element_ty)
            tl.store(write_ring + row * writes[2], kept, mask=p_mask & live)
            if unit % tiles == 0:
                STORE_RECORD(ring, slot, row, g, h, n, k_scale, log_decay, rate, n_mask, live, N)
                if h % (H // G) == 0:
                    tl.store(key_ring + row * keys[2], raw_k, mask=n_mask & live)


@triton.jit
def state_and_record(
    slot, row, real, empty, state, state_slot, keys, writes, ring, layer_params, g, h, n, n_mask, p, p_mask,
    N: tl.constexpr, P: tl.constexpr, CHANNEL: tl.constexpr, RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
):  # fmt: skip
    """A state [NP, P] in fp32, zero if it is `empty` or the slot PAD_SLOT, and `record_inputs` of a record."""
    live = slot >= 0
    raw_k, raw_u, key_scale, write_scale, log_decay = record_inputs(
        slot, row, real & live, keys, writes, ring, layer_params, g, h, n, n_mask, p, p_mask,
        N, CHANNEL, RECORD_SCALES, RECORD_DECAY,
    )  # fmt: skip
    state_at = state + slot * state_slot + h * (N * P) + n[:, None] * P + p[None, :]
    mask = n_mask[:, None] & p_mask[None, :] & live & (not empty)
    S = tl.load(state_at, mask=mask, other=0).to(tl.float32)
    return S, raw_k, raw_u, key_scale, write_scale, log_decay


@triton.jit
def record_inputs(
    slot, row, real, keys, writes, ring, layer_params, g, h, n, n_mask, p, p_mask,
    N: tl.constexpr, CHANNEL: tl.constexpr, RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
):  # fmt: skip
    """(raw key, raw write vector, their scales, log decay) of the record in ring row `row`; of none zeros."""
    rows = row + tl.arange(0, 1)
    mask = (rows >= 0) & real
    key_at = keys[0] + slot * keys[1] + row * keys[2] + g * keys[3] + n
    write_at = writes[0] + slot * writes[1] + row * writes[2] + h * writes[3] + p
    raw_k = tl.load(key_at, mask=n_mask & real, other=0)
    raw_u = tl.load(write_at, mask=p_mask & real, other=0)
    key_scale, write_scale = RECORD_SCALES(ring, slot, rows, g, h, mask)
    log_decay = RECORD_DECAY(
        ring, layer_params, slot, rows, h, n if CHANNEL else 0, n_mask & real if CHANNEL else mask, N
    )
    return raw_k, raw_u, key_scale, write_scale, log_decay


@triton.jit
def fold_record(S, raw_k, raw_u, key_scale, write_scale, log_decay):
    """A state [NP, P] after a record."""
    k, u = raw_k.to(tl.float32) * key_scale, raw_u.to(tl.float32) * write_scale
    # one rounding a record, and none of the decay, which would be the same one every time
    high, low = high_low(log_decay)
    return high[:, None] * S + (low[:, None] * S + k[:, None] * u[None, :])


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
