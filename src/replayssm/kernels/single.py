"""A `verify` of one token in a single launch: every program computes the weights of its own head.

A step of few rows takes little more than its launches wait for each other. One launch waits once, and all that it reads
of its pool (a state, and the ring's write vectors, keys and scalars) it asks for before that; what is left is the token.
The weights of the ring (kernels/prepare.py) are computed by every program that works on the head, on tensor cores, while
its state is on the way. Rows that are due go first. They and all others have the token in a column of products
(kernels/drafts.py), so that they start alike: what a fold changes is in the registers where a step has it as well.

For states that are numbers and have one decay per head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.kernels.drafts import (
    FOLD_CHUNK,
    append,
    columns_dot,
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
from replayssm.kernels.prefetch import guessed_row, guessed_turn
from replayssm.kernels.prepare import row_of
from replayssm.kernels.verify import zero_units


@triton.jit(do_not_specialize=["layer"])
def single_kernel(
    plan_row, plan, state, state_slot, slots, keys, writes, ring, key, query, value, inputs, layer_params, y, saturated,
    seeds, layer,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, RING_ROWS: tl.constexpr, NP: tl.constexpr,
    WP: tl.constexpr, BLOCK_P: tl.constexpr, LIMIT: tl.constexpr, DELTA: tl.constexpr,
    SKIP: tl.constexpr, OVERLAP: tl.constexpr, RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
    TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr, TOKEN_SKIP: tl.constexpr, KEY_SCALE: tl.constexpr,
    QUERY_SCALE: tl.constexpr, STORE_RECORD: tl.constexpr, RANDOM: tl.constexpr, MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """A program per row, head and BLOCK_P columns. Arguments as of `verify_kernel` and `prepare_kernel`; `slots` are those of the
    layer.
    """
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    turn = tl.program_id(0) // (tiles * H)
    unit = tl.program_id(0) % (tiles * H)
    h = unit // tiles
    g = h // (H // G)
    first = unit % tiles * BLOCK_P
    order_at = plan + turn.to(tl.int64) * plan_row + ORDER
    if OVERLAP:
        # a pool is not written by the launch before this one: between two steps there are launches that do not overlap
        guessed = guessed_turn(order_at, tl.num_programs(0) // (tiles * H))
        row = plan + guessed * plan_row
        slot, start, folded, history, empty = guessed_row(row, slots, RING_ROWS)
        records = (folded + history).to(tl.int32)
        S, past, kept, weight, log_decay = pool_memory(
            slot >= 0, slot, start, records, empty, h, g, first, state, state_slot, keys, writes, ring, layer_params,
            N, P, NP, WP, RING_ROWS, BLOCK_P, RECORD_SCALES, RECORD_DECAY,
        )  # fmt: skip
        gdc_wait()
        gdc_launch_dependents()
        # the guess is right for all layers of a step but the first, and its row read beside the one that says so
        b = tl.load(order_at)
        found = planned(row)
        if b != guessed:
            found = planned(plan + b * plan_row)
        missing = (found[0] != slot) | (found[1] != start) | (found[2] + found[3] != records) | (found[5] != empty)
    else:
        b = tl.load(order_at)
        found = planned(plan + b * plan_row)
        missing = True
    slot, start, folded, history, tokens, empty = found
    if slot < 0:
        zero_units(b, unit, y, P, 1, BLOCK_P, 1)
    else:
        records = folded + history
        if missing:  # again, all of it
            S, past, kept, weight, log_decay = pool_memory(
                True, slot, start, records, empty, h, g, first, state, state_slot, keys, writes, ring, layer_params,
                N, P, NP, WP, RING_ROWS, BLOCK_P, RECORD_SCALES, RECORD_DECAY,
            )  # fmt: skip
        n, live = tl.arange(0, NP), tokens > 0
        key_at, query_at = key[0] + b * key[1] + g * N, query[0] + b * query[1] + g * N
        mask = (n < N) & live
        raw_k = tl.load(key_at + n, mask=mask, other=0)
        k, q = raw_k.to(tl.float32), tl.load(query_at + n, mask=mask, other=0).to(tl.float32)
        k_scale, q_scale = KEY_SCALE(k), QUERY_SCALE(q, N)
        own = tl.sum(k * q, 0) * (k_scale * q_scale)
        log_step = TOKEN_DECAY(inputs, layer_params, b, 0, h, n, n < N, live, N)
        rate, step = TOKEN_RATE(inputs, b, 0, h, live), tl.exp(log_step)

        # the token is one column of eight, with delta rules two: what the query takes, and the key
        c_token, kind = product_columns(8, DELTA)
        probe, used = tl.where(kind > 0, key_at, query_at), (c_token < 1) & live
        factor = tl.where(kind > 0, k_scale * step, q_scale * step)
        weighted = quads_left(past.to(tl.float32), True) * weight[None, :]
        head = state + slot * state_slot + h * (N * P)
        if folded > 0:
            high, low = high_low(log_decay)
            held = tl.load(plan + b * plan_row + POSITION) - history
            key_rows = keys[0] + slot * keys[1] + ((start + tl.arange(0, WP)) % RING_ROWS)[:, None] * keys[2] + g * keys[3]
            taken = fold_tiles(
                S, head, first, key_rows, folded, weighted, high, low, probe, used, saturated + slot, seeds, slot, layer,
                held, h, N, P, LIMIT, RANDOM, MANTISSA, LEAST,
            )  # fmt: skip
        else:
            taken, products = state_and_ring(S, kept, probe, used, N)
            taken *= tl.exp(log_decay)
            taken += tl.dot(weighted, products, input_precision="tf32x3")
        out, answer = tokens_last(taken * factor[None, :], DELTA, False)

        token = tokens_of(1)  # of which there is one
        J: tl.constexpr = BLOCK_P // 8
        p = first + tl.arange(0, 8)[None, :, None, None] * J + tl.arange(0, J)[None, None, None, :] + token * 0
        here = (p < P) & (token == 0)
        v = tl.load(value[0] + b * value[1] + h * P + p, mask=here & live, other=0)
        x = v.to(tl.float32)
        u = (x - answer) * rate if DELTA else x * rate
        out += own * u
        if SKIP:
            out += TOKEN_SKIP(layer_params, h) * x
        rounded = tl.where(live, out, 0.0).to(y[0].dtype.element_ty)
        tl.store(y[0] + b * y[1] + h * P + p, rounded, mask=here, eviction_policy="evict_last")
        ring_row = (start + records) % RING_ROWS
        append(writes, slot, h, ring_row, p, u if DELTA else v, here & live)
        if first == 0:
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
def pool_memory(
    real, slot, start, records, empty, h, g, first, state, state_slot, keys, writes, ring, layer_params,
    N: tl.constexpr, P: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr, RING_ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr, RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
):  # fmt: skip
    """What a unit reads of its pool, where that is `real`; zeros otherwise.

    The state's columns as tiles of `fold_columns`, the ring's write vectors and its raw keys as lanes load
    them (kernels/drafts.py), its weights [WP] and its log decay.
    """
    J: tl.constexpr = BLOCK_P // 8
    CHUNK: tl.constexpr = min(NP, FOLD_CHUNK)
    records = tl.where(real, records, 0)
    p = first + tl.arange(0, 8)[None, :, None, None] * J + tl.arange(0, J)[None, None, None, :]
    head = state + slot * state_slot + h * (N * P)
    S, kept = (), ()
    key_row = row_of(WP)
    key_rows = keys[0] + slot * keys[1] + (start + key_row) % RING_ROWS * keys[2] + g * keys[3]
    for part in tl.static_range(NP // CHUNK):
        tile = fold_tile(head, part * CHUNK, p, empty | (not real), N, P, CHUNK)
        S = S + (tile,)  # type: ignore[assignment]
        n = quad_rows(CHUNK, True)[:, :, :, :, None] + part * CHUNK
        keys_tile = tl.load(key_rows + n, mask=(key_row < records) & (n < N), other=0)
        kept = kept + (keys_tile,)  # type: ignore[assignment]
    j = quad_rows(WP, True)[:, :, :, :, None]
    past = load_records(writes, slot, h, start, records, j, p, p < P, RING_ROWS)
    weight, log_decay = head_weights(
        ring, layer_params, slot, start, records, g, h + tl.arange(0, 1)[:, None],
        N, WP, RING_ROWS, RECORD_SCALES, RECORD_DECAY, True,
    )  # fmt: skip
    return S, past, kept, tl.sum(weight, 0), tl.sum(log_decay, 0)


@triton.jit
def state_and_ring(S, kept, probe, live, N: tl.constexpr):
    """Products with what `probe` [TP] points to, where `live`: of a state [columns, TP], and of the ring's keys [WP, TP].

    Both in tiles of CHUNK key rows, as `pool_memory` loads them.
    """
    CHUNK: tl.constexpr = S[0].shape[2] * 16
    WIDE: tl.constexpr = S[0].dtype.primitive_bitwidth == 16
    rows = quad_rows(CHUNK, True)
    found, products = 0.0, 0.0
    for part in tl.static_range(len(S)):
        row = rows + part * CHUNK
        taken = tl.load(probe[None, :, None, None] + row, mask=live[None, :, None, None] & (row < N), other=0)
        found += columns_dot(quads_left(S[part], WIDE), quads_right(taken, WIDE))
        products += exact_dot(quads_left(kept[part], True), quads_right(taken, True))
    return found, products
