"""A `verify` of one token in a single launch: every program computes the weights of its own head.

A step of few rows takes little more than its launches wait for each other. One launch waits once, and all that it
reads of its pool (a state, and the ring's write vectors, keys and scalars) it asks for before that; what is left is the
token. The weights of the ring (kernels/prepare.py) are computed by every program that works on the head, on tensor
cores, while its state is on the way. Rows that are due go first and fold in columns (kernels/drafts.py), which takes
about as many registers as a step.

Nothing that writes a pool may be the last launch before such a step, unless that waits for it as a whole: the launch of
a plan does.

For states that are numbers and have one decay per head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.kernels.drafts import (
    FOLD_CHUNK,
    append,
    fold_tile,
    fold_tiles,
    load_records,
    product_columns,
    quad_rows,
    quads_left,
    quads_right,
    tokens_last,
    tokens_of,
)
from replayssm.kernels.exact import exact_dot, head_weights, high_low
from replayssm.kernels.plan import EMPTY, FOLD_START, FOLDED, HISTORY, ORDER, POSITION, SLOT, TOKENS
from replayssm.kernels.prefetch import guessed_row, guessed_turn, prefetch, prefetch_records, prefetch_rows
from replayssm.kernels.prepare import by_kind, row_of
from replayssm.kernels.verify import unit_columns, zero_units


@triton.jit(do_not_specialize=["layer"])
def single_kernel(
    plan_row, plan, state, state_slot, slots, keys, writes, ring, key, query, value, inputs, layer_params, y, saturated,
    seeds, layer,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, RING_ROWS: tl.constexpr, NP: tl.constexpr,
    WP: tl.constexpr, BLOCK_P: tl.constexpr, LIMIT: tl.constexpr, DELTA: tl.constexpr,
    SKIP: tl.constexpr, OVERLAP: tl.constexpr, RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
    TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr, TOKEN_SKIP: tl.constexpr, KEY_SCALE: tl.constexpr,
    QUERY_SCALE: tl.constexpr, STORE_RECORD: tl.constexpr, RANDOM: tl.constexpr, MANTISSA: tl.constexpr,
    LEAST: tl.constexpr, RECORD_SIZES: tl.constexpr,
):  # fmt: skip
    """A program per row, head and BLOCK_P columns. Arguments as of `verify_kernel` and `prepare_kernel`.

    `slots` are those of the layer, RECORD_SIZES as `prefetch_records` takes them.
    """
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    turn = tl.program_id(0) // (tiles * H)
    unit = tl.program_id(0) % (tiles * H)
    h = unit // tiles
    g = h // (H // G)
    n, p = tl.arange(0, NP), unit_columns(unit, P, BLOCK_P)
    order_at = plan + turn.to(tl.int64) * plan_row + ORDER
    if OVERLAP:
        # a pool is not written by the launch before this one: between two steps there are launches that do not overlap
        guessed = guessed_turn(order_at, tl.num_programs(0) // (tiles * H))
        row = plan + guessed * plan_row
        slot, start, folded, history, _ = guessed_row(row, slots, RING_ROWS)
        S, past, kept, weight, log_decay = step_memory(
            (slot >= 0) & (folded == 0), slot, start, history, h, g, n, p, state, state_slot, keys, writes, ring,
            layer_params, N, P, NP, WP, RING_ROWS, BLOCK_P, RECORD_SCALES, RECORD_DECAY,
        )  # fmt: skip
        if (slot >= 0) & (folded > 0):
            # a head's columns lie together, so any share of the memory will do
            share: tl.constexpr = N * P // tiles
            prefetch(state + slot * state_slot + h * (N * P) + unit % tiles * share, share)
            if unit % tiles == 0:
                prefetch_rows(writes, slot, 0, h, H, RING_ROWS, 1, H, P)
                prefetch_records(keys, ring, slot, 0, h, H, RING_ROWS, 1, RECORD_SIZES)
        gdc_wait()
        gdc_launch_dependents()
        # the guess is right for all layers of a step but the first, and its row read beside the one that says so
        b = tl.load(order_at)
        found = planned(row)
        if b != guessed:
            found = planned(plan + b * plan_row)
        wrong = (found[0] != slot) | (found[1] != start) | (found[3] != history) | (folded != 0)
    else:
        b = tl.load(order_at)
        found = planned(plan + b * plan_row)
    slot, start, folded, history, tokens, empty = found
    if slot < 0:
        zero_units(b, unit, y, P, 1, BLOCK_P, 1)
    else:
        # a due row has records to fold and no history, any other row the reverse
        ring_row = (start + folded + history) % RING_ROWS
        key_at, query_at = key[0] + b * key[1] + g * N, query[0] + b * query[1] + g * N
        live = tokens > 0
        mask = (n < N) & live
        raw_k = tl.load(key_at + n, mask=mask, other=0)
        k, q = raw_k.to(tl.float32), tl.load(query_at + n, mask=mask, other=0).to(tl.float32)
        k_scale, q_scale = KEY_SCALE(k), QUERY_SCALE(q, N)
        own = tl.sum(k * q, 0) * (k_scale * q_scale)
        log_step = TOKEN_DECAY(inputs, layer_params, b, 0, h, n, n < N, live, N)
        rate, step = TOKEN_RATE(inputs, b, 0, h, live), tl.exp(log_step)
        to_out, to_answer = q_scale * step, k_scale * step
        if folded > 0:
            held = tl.load(plan + b * plan_row + POSITION) - history
            fold_due(
                b, h, g, unit % tiles * BLOCK_P, slot, start, folded, live, empty, held, state + slot * state_slot,
                keys, writes, ring, key_at, query_at, value, layer_params, y, saturated + slot, seeds, layer, to_out,
                to_answer, own, rate, ring_row, N, P, RING_ROWS, NP, WP, BLOCK_P, LIMIT, DELTA, SKIP,
                RECORD_SCALES, RECORD_DECAY, TOKEN_SKIP, RANDOM, MANTISSA, LEAST,
            )  # fmt: skip
        else:
            if not OVERLAP or wrong:
                S, past, kept, weight, log_decay = step_memory(
                    True, slot, start, history, h, g, n, p, state, state_slot, keys, writes, ring, layer_params,
                    N, P, NP, WP, RING_ROWS, BLOCK_P, RECORD_SCALES, RECORD_DECAY,
                )  # fmt: skip
            past_q, past_k = ring_products(kept, key_at, query_at, live, N, NP, WP, DELTA)
            decay = tl.exp(log_decay)
            probe = tl.load(query_at + n, mask=mask, other=0).to(tl.float32)
            out = tl.sum(S * probe[:, None], 0) * (decay * to_out)
            out = tl.where(empty, 0.0, out) + tl.sum((weight * (past_q * to_out))[:, None] * past, 0)
            answer = 0.0
            if DELTA:
                probe = tl.load(key_at + n, mask=mask, other=0).to(tl.float32)
                answer = tl.sum(S * probe[:, None], 0) * (decay * to_answer)
                answer = tl.where(empty, 0.0, answer) + tl.sum((weight * (past_k * to_answer))[:, None] * past, 0)
            finish_token(
                b, h, p, p < P, slot, ring_row, live, out, answer, own, rate, writes, value, layer_params, y,
                P, DELTA, SKIP, TOKEN_SKIP,
            )  # fmt: skip
        if unit % tiles == 0:
            STORE_RECORD(ring, slot, ring_row, g, h, n, k_scale, log_step, rate, n < N, live, N)
            if h % (H // G) == 0:
                tl.store(keys[0] + slot * keys[1] + ring_row * keys[2] + g * keys[3] + n, raw_k, mask=mask)


@triton.jit
def planned(row):
    """(slot, start, folded, history, tokens, whether the checkpoint is empty) of the plan's row at `row`."""
    # what counts rows is small, and 64-bit remainders are slow
    start, folded = tl.load(row + FOLD_START).to(tl.int32), tl.load(row + FOLDED).to(tl.int32)
    history, tokens = tl.load(row + HISTORY).to(tl.int32), tl.load(row + TOKENS).to(tl.int32)
    return tl.load(row + SLOT), start, folded, history, tokens, tl.load(row + EMPTY) != 0


@triton.jit
def step_memory(
    real, slot, start, records, h, g, n, p, state, state_slot, keys, writes, ring, layer_params,
    N: tl.constexpr, P: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr, RING_ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr, RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
):  # fmt: skip
    """What a row that is not due reads of its pool, where it is `real`, at columns `p` of a head: state [NP, BLOCK_P],
    write vectors [WP, BLOCK_P] and raw keys of the ring, the ring's weights [WP] and its log decay.
    """
    records = tl.where(real, records, 0)
    mask, j = real, tl.arange(0, WP)
    past_mask = (j < records)[:, None]
    if NP != N or P % BLOCK_P != 0:  # only shapes that do not fill their tiles pay for masks
        mask = real & (n < N)[:, None] & (p < P)[None, :]
        past_mask &= (p < P)[None, :]
    state_at = state + slot * state_slot + h * (N * P) + n[:, None] * P + p[None, :]
    S = tl.load(state_at, mask=mask, other=0, eviction_policy="evict_first").to(tl.float32)
    past_at = writes[0] + slot * writes[1] + ((start + j) % RING_ROWS)[:, None] * writes[2] + h * writes[3] + p[None, :]
    past = tl.load(past_at, mask=past_mask, other=0, eviction_policy="evict_first").to(tl.float32)
    # keys as lanes load them for products (kernels/drafts.py), with ring rows in rows
    channel, row = quad_rows(NP)[:, :, :, :, None], row_of(WP)
    kept_at = keys[0] + slot * keys[1] + (start + row) % RING_ROWS * keys[2] + g * keys[3] + channel
    kept = tl.load(kept_at, mask=(row < records) & (channel < N), other=0)
    weight, log_decay = one_head(
        ring, layer_params, slot, start, records, g, h, N, WP, RING_ROWS, RECORD_SCALES, RECORD_DECAY
    )
    return S, past, kept, weight, log_decay


@triton.jit
def one_head(
    ring, layer_params, slot, start, records, g, h,
    N: tl.constexpr, WP: tl.constexpr, RING_ROWS: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
):  # fmt: skip
    """`head_weights` of one head, from the first record to the last: [WP], and a number."""
    heads = h + tl.arange(0, 1)[:, None]
    weight, log_decay = head_weights(
        ring, layer_params, slot, start, records, g, heads, N, WP, RING_ROWS, RECORD_SCALES, RECORD_DECAY, True
    )
    return tl.sum(weight, 0), tl.sum(log_decay, 0)


@triton.jit
def ring_products(
    kept, key_at, query_at, live, N: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr, DELTA: tl.constexpr
):  # fmt: skip
    """(K q, K k) [WP] of raw keys with the token's, which are two of eight columns; K q twice where not DELTA."""
    channel, c = quad_rows(NP), tl.arange(0, 8)
    at = tl.where(c == 1, key_at, query_at)[None, :, None, None] + channel
    used = (c < (2 if DELTA else 1))[None, :, None, None] & live
    columns = quads_right(tl.load(at, mask=used & (channel < N), other=0), True)
    past_q, past_k = by_kind(exact_dot(quads_left(kept, True), columns), 1, DELTA)
    return tl.reshape(past_q, [WP]), tl.reshape(past_k, [WP])


@triton.jit
def fold_due(
    b, h, g, first, slot, start, folded, live, empty, held, state, keys, writes, ring, key_at, query_at, value,
    layer_params, y, saturated, seeds, layer, to_out, to_answer, own, rate, ring_row,
    N: tl.constexpr, P: tl.constexpr, RING_ROWS: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr,
    BLOCK_P: tl.constexpr, LIMIT: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_SKIP: tl.constexpr, RANDOM: tl.constexpr,
    MANTISSA: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """BLOCK_P columns from `first` on of a head whose row is due; `held` are the tokens in the new checkpoint."""
    J: tl.constexpr = BLOCK_P // 8
    p = first + tl.arange(0, 8)[None, :, None, None] * J + tl.arange(0, J)[None, None, None, :]
    p_mask, j = p < P, tl.arange(0, WP)
    head = state + h * (N * P)
    CHUNK: tl.constexpr = min(NP, FOLD_CHUNK)
    S = ()  # all of it at once, so that one latency covers it
    for part in tl.static_range(NP // CHUNK):
        tile = fold_tile(head, part * CHUNK, p, empty, N, P, CHUNK)
        S = S + (tile,)  # type: ignore[assignment]
    records = quad_rows(WP, True)[:, :, :, :, None]
    past = load_records(writes, slot, h, start, folded, records, p, p_mask, RING_ROWS)
    weight, log_decay = one_head(
        ring, layer_params, slot, start, folded, g, h, N, WP, RING_ROWS, RECORD_SCALES, RECORD_DECAY
    )
    weighted = quads_left(past.to(tl.float32), True) * weight[None, :]
    high, low = high_low(log_decay)
    key_rows = keys[0] + slot * keys[1] + ((start + j) % RING_ROWS)[:, None] * keys[2] + g * keys[3]
    c_token, kind = product_columns(8, DELTA)
    found = fold_tiles(
        S, head, first, key_rows, folded, weighted, high, low, tl.where(kind > 0, key_at, query_at),
        (c_token < 1) & live, saturated, seeds, slot, layer, held, h, N, P, LIMIT, RANDOM, MANTISSA, LEAST,
    )  # fmt: skip
    out, answer = tokens_last(found, DELTA, False)
    token = tokens_of(1)  # of which there is one
    finish_token(
        b, h, p + token * 0, p_mask & (token == 0), slot, ring_row, live, out * to_out, answer * to_answer, own, rate,
        writes, value, layer_params, y, P, DELTA, SKIP, TOKEN_SKIP,
    )  # fmt: skip


@triton.jit
def finish_token(
    b, h, p, mask, slot, ring_row, live, out, answer, own, rate, writes, value, layer_params, y,
    P: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr, TOKEN_SKIP: tl.constexpr,
):  # fmt: skip
    """From what the token takes of the state and the ring in columns `p`, to its output and write vector."""
    v = tl.load(value[0] + b * value[1] + h * P + p, mask=mask & live, other=0)
    x = v.to(tl.float32)
    u = (x - answer) * rate if DELTA else x * rate
    out += own * u
    if SKIP:
        out += TOKEN_SKIP(layer_params, h) * x
    rounded = tl.where(live, out, 0.0).to(y[0].dtype.element_ty)
    tl.store(y[0] + b * y[1] + h * P + p, rounded, mask=mask, eviction_policy="evict_last")
    append(writes, slot, h, ring_row, p, u if DELTA else v, mask & live)
