"""The Triton template of `verify`: decode and drafts, with the flush fused for rows that are due.

A program owns one batch row, HEADS state heads of one key head, and BLOCK_P columns of their states; every column of a
state is independent of the others, corrections included. It reads the state once, for two probes (q and k), and writes
it back only where the row is due. Recurrences come in as small jitted functions (`recurrences/<name>/triton.py`).

Exactness (docs/numerics.md): products of 16-bit keys and queries are exact and summed in fp32; the fold multiplies raw
16-bit keys with write vectors split into three 16-bit parts, so tensor cores lose nothing; the decay of a fold has a
low part, because the same rounded factor applied at every flush would drift; sums of log decays only ever add values of
one sign.
"""

from __future__ import annotations

import triton
import triton.language as tl

# columns of the plan, one row per batch row (kernels/plan.py writes it)
SLOT, TOKENS, FOLDED, FOLD_START = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
HISTORY, EMPTY, ORDER, DUE_COUNT = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)

# which rows a launch takes: all of them; those that are not due; those that are, from the plan's order
ALL_ROWS, STEP_ROWS, FLUSH_ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def split_dot(key, x, acc):
    """acc + key @ x for a 16-bit `key` and an fp32 `x`, exact to fp32: x is the sum of three 16-bit parts."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    acc = tl.dot(key, low, acc)
    acc = tl.dot(key, middle, acc)
    return tl.dot(key, high, acc)


@triton.jit
def exact_dot(a, b):
    """a @ b of two operands that both come from the model: exact products for 16-bit dtypes, fp32-class otherwise."""
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
def raw_products(
    key_tile, key_tile_mask, key_at, query_at, key_stride, query_stride, tokens, n_mask,
    T: tl.constexpr, TP: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Products of this step's raw queries and keys [TP] with the ring's raw keys [WP] and with each other."""
    kept = tl.load(key_tile, mask=key_tile_mask, other=0)
    if T == 1:
        k = tl.load(key_at, mask=n_mask & (tokens > 0), other=0).to(tl.float32)
        q = tl.load(query_at, mask=n_mask & (tokens > 0), other=0).to(tl.float32)
        past_q = tl.sum(kept.to(tl.float32) * q[None, :], 1)[None, :]
        past_k = past_q
        if DELTA:
            past_k = tl.sum(kept.to(tl.float32) * k[None, :], 1)[None, :]
        new_q = tl.sum(k * q, 0) + tl.zeros([TP, TP], tl.float32)
        new_k = new_q
    else:
        i_draft = tl.arange(0, TP)
        token_mask = (i_draft < tokens)[:, None] & n_mask[None, :]
        k_tile = tl.load(key_at[None, :] + i_draft[:, None] * key_stride, mask=token_mask, other=0)
        q_tile = tl.load(query_at[None, :] + i_draft[:, None] * query_stride, mask=token_mask, other=0)
        past_q = exact_dot(q_tile, tl.trans(kept))
        new_q = exact_dot(q_tile, tl.trans(k_tile))
        past_k, new_k = past_q, new_q
        if DELTA:
            past_k = exact_dot(k_tile, tl.trans(kept))
            new_k = exact_dot(k_tile, tl.trans(k_tile))
    return past_q, past_k, new_q, new_k


@triton.jit
def verify_kernel(
    plan_row,
    plan, state, state_slot, keys, writes, ring, key, query, value, inputs, layer_params, y,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr,
    NP: tl.constexpr, TP: tl.constexpr, WP: tl.constexpr, BLOCK_P: tl.constexpr, HEADS: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, SKIP: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr,
    TOKEN_SKIP: tl.constexpr, KEY_SCALE: tl.constexpr, QUERY_SCALE: tl.constexpr, STORE_RECORD: tl.constexpr,
):  # fmt: skip
    """See the module. Shapes: B rows, T tokens, H heads, G key heads, N key dim, P value dim, W window (WP padded).

    | argument | shape                | in/out | meaning                                                        |
    |----------|----------------------|--------|----------------------------------------------------------------|
    | plan     | [B, 6] int64         | in     | slot, tokens, folded, fold_start, history, empty               |
    | state    | [slots, H, N, P]     | in/out | checkpoint; written where folded > 0                           |
    | keys     | [slots, rows, G, N]  | in/out | ring of raw keys: (pointer, slot, row and head stride)         |
    | writes   | [slots, rows, H, P]  | in/out | ring of write vectors (delta rules) or raw values              |
    | ring     | tuple of such        | in/out | the recurrence's other ring fields                             |
    | key, query, value | [B, T, ...] | in     | this step's raw tokens: (pointer, row stride, token stride)    |
    | inputs   | tuple of such        | in     | the recurrence's other inputs                                  |
    | layer_params | tuple of pointers    | in     | per-layer constants                                            |
    | y        | [B, T, H, P]         | out    | outputs, zero beyond each row's tokens                         |
    """
    parts: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P // TILES * (H // HEADS)
    pid = tl.program_id(0)
    if MODE == FLUSH_ROWS:
        # few rows are due in a step, and only the device knows which: a fixed grid walks through them
        work = tl.load(plan + DUE_COUNT).to(tl.int32) * parts
        for item in range(pid, work, tl.num_programs(0)):
            row = tl.load(plan + item // parts * plan_row + ORDER)
            verify_rows(
                row, item % parts, plan + row * plan_row, state, state_slot, keys, writes, ring, key, query, value,
                inputs, layer_params, y, H, G, N, P, T, RING_ROWS, NP, TP, WP, BLOCK_P, HEADS, TILES, STAGES, MODE,
                DELTA, CHANNEL, SKIP, RECORD_SCALES, RECORD_DECAY, TOKEN_DECAY, TOKEN_RATE, TOKEN_SKIP, KEY_SCALE,
                QUERY_SCALE, STORE_RECORD,
            )  # fmt: skip
    else:
        row = (pid // parts).to(tl.int64)
        verify_rows(
            row, pid % parts, plan + row * plan_row, state, state_slot, keys, writes, ring, key, query, value, inputs,
            layer_params, y, H, G, N, P, T, RING_ROWS, NP, TP, WP, BLOCK_P, HEADS, TILES, STAGES, MODE, DELTA,
            CHANNEL, SKIP, RECORD_SCALES, RECORD_DECAY, TOKEN_DECAY, TOKEN_RATE, TOKEN_SKIP, KEY_SCALE, QUERY_SCALE,
            STORE_RECORD,
        )  # fmt: skip


@triton.jit
def zero_rows(b, y, first_head, first_tile, P: tl.constexpr, T: tl.constexpr, BLOCK_P: tl.constexpr,
              HEADS: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The outputs of a padded row."""
    for t in tl.static_range(T):
        for i in range(HEADS * TILES):
            p = (first_tile + i % TILES) * BLOCK_P + tl.arange(0, BLOCK_P)
            at = y[0] + b * y[1] + t * y[2] + (first_head + i // TILES) * P + p
            tl.store(at, tl.zeros([BLOCK_P], tl.float32).to(y[0].dtype.element_ty), mask=p < P)


@triton.jit
def verify_rows(
    b, part,
    plan, state, state_slot, keys, writes, ring, key, query, value, inputs, layer_params, y,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr,
    NP: tl.constexpr, TP: tl.constexpr, WP: tl.constexpr, BLOCK_P: tl.constexpr, HEADS: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, SKIP: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr,
    TOKEN_SKIP: tl.constexpr, KEY_SCALE: tl.constexpr, QUERY_SCALE: tl.constexpr, STORE_RECORD: tl.constexpr,
):  # fmt: skip
    """HEADS heads and TILES column blocks of batch row b, whose row of the plan `plan` points to."""
    parts: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P // TILES
    first_tile = part % parts * TILES
    first_head = part // parts * HEADS
    slot = tl.load(plan + SLOT)
    folded = tl.load(plan + FOLDED)
    if slot < 0:
        zero_rows(b, y, first_head, first_tile, P, T, BLOCK_P, HEADS, TILES)
    elif MODE != STEP_ROWS or folded == 0:
        verify_live(
            b, first_head, first_tile, slot, folded, plan, state, state_slot, keys, writes, ring, key, query, value,
            inputs, layer_params, y, H, G, N, P, T, RING_ROWS, NP, TP, WP, BLOCK_P, HEADS, TILES, STAGES, MODE, DELTA,
            CHANNEL, SKIP, RECORD_SCALES, RECORD_DECAY, TOKEN_DECAY, TOKEN_RATE, TOKEN_SKIP, KEY_SCALE, QUERY_SCALE,
            STORE_RECORD,
        )  # fmt: skip


@triton.jit
def verify_live(
    b, first_head, first_tile, slot, folded,
    plan, state, state_slot, keys, writes, ring, key, query, value, inputs, layer_params, y,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr,
    NP: tl.constexpr, TP: tl.constexpr, WP: tl.constexpr, BLOCK_P: tl.constexpr, HEADS: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, SKIP: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr,
    TOKEN_SKIP: tl.constexpr, KEY_SCALE: tl.constexpr, QUERY_SCALE: tl.constexpr, STORE_RECORD: tl.constexpr,
):  # fmt: skip
    """The same for a live row of this launch's mode."""
    g = first_head // (H // G)
    n = tl.arange(0, NP)
    n_mask = n < N
    tokens = tl.load(plan + TOKENS)
    start = tl.load(plan + FOLD_START)
    history = tl.load(plan + HISTORY)
    empty = tl.load(plan + EMPTY) != 0

    # a due row has records to fold and no history, any other row the reverse: one set of rows serves both
    records = folded + history
    j = tl.arange(0, WP)
    j_mask = j < records
    rows = (start + j) % RING_ROWS
    later_rows = (start + j + 1) % RING_ROWS
    later_mask = j + 1 < records
    i_draft = tl.arange(0, TP)
    draft_start = start + records

    key_tile = keys[0] + slot * keys[1] + rows[:, None] * keys[2] + g * keys[3] + n[None, :]
    key_tile_mask = j_mask[:, None] & n_mask[None, :]
    key_at = key[0] + b * key[1] + g * N + n
    query_at = query[0] + b * query[1] + g * N + n

    # products of raw keys and queries, shared by the units of this program; a lone unit asks for its state first
    shared: tl.constexpr = HEADS * TILES > 1 and not CHANNEL
    if shared:
        past_q, past_k, new_q, new_k = raw_products(
            key_tile, key_tile_mask, key_at, query_at, key[2], query[2], tokens, n_mask, T, TP, DELTA
        )

    for i in tl.range(0, HEADS * TILES, num_stages=STAGES):
        h = first_head + i // TILES
        tile = first_tile + i % TILES
        p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
        p_mask = p < P
        state_at = state + slot * state_slot + h * (N * P) + n[:, None] * P + p[None, :]
        state_mask = n_mask[:, None] & p_mask[None, :]
        raw = tl.load(state_at, mask=state_mask & (not empty), other=0, eviction_policy="evict_first")
        S = raw.to(tl.float32)
        past = tl.load(
            writes[0] + slot * writes[1] + rows[:, None] * writes[2] + h * writes[3] + p[None, :],
            mask=j_mask[:, None] & p_mask[None, :],
            other=0,
        ).to(tl.float32)
        if not CHANNEL and not shared:
            past_q, past_k, new_q, new_k = raw_products(
                key_tile, key_tile_mask, key_at, query_at, key[2], query[2], tokens, n_mask, T, TP, DELTA
            )
        key_scale, write_scale = RECORD_SCALES(ring, slot, rows, g, h, j_mask)
        if CHANNEL:
            first_mask = (j == 0)[:, None] & key_tile_mask
            first = RECORD_DECAY(ring, layer_params, slot, rows[:, None], h, n[None, :], first_mask, N)
            later = RECORD_DECAY(
                ring, layer_params, slot, later_rows[:, None], h, n[None, :], later_mask[:, None] & n_mask[None, :], N
            )
            total = tl.sum(first, 0) + tl.sum(later, 0)
            after = tl.cumsum(later, 0, reverse=True)  # log decay from each record to the newest
            kept = tl.load(key_tile, mask=key_tile_mask, other=0).to(tl.float32)
            kept = kept * key_scale[:, None] * tl.exp(after)
        else:
            first = RECORD_DECAY(ring, layer_params, slot, rows, h, 0, (j == 0) & j_mask, N)
            later = RECORD_DECAY(ring, layer_params, slot, later_rows, h, 0, later_mask, N)
            total = tl.sum(first, 0) + tl.sum(later, 0)
            weight = tl.exp(tl.cumsum(later, 0, reverse=True)) * key_scale
        past = past * write_scale[:, None]

        if MODE != STEP_ROWS and folded > 0:
            high, low = high_low(total)
            if CHANNEL:
                added = tl.dot(tl.trans(kept), past, input_precision="tf32x3")
                S = high[:, None] * S + (low[:, None] * S + added)
            else:
                turned = tl.load(
                    keys[0] + slot * keys[1] + rows[None, :] * keys[2] + g * keys[3] + n[:, None],
                    mask=j_mask[None, :] & n_mask[:, None],
                    other=0,
                )
                weighted = weight[:, None] * past
                if turned.dtype == tl.bfloat16:
                    S = high * S + split_dot(turned, weighted, low * S)
                else:
                    added = tl.dot(turned.to(tl.float32), weighted, input_precision="tf32x3")
                    S = high * S + (low * S + added)
            rounded = S.to(state.dtype.element_ty)
            tl.store(state_at, rounded, mask=state_mask)
            S = rounded.to(tl.float32)

        # outputs: after a fold there is no history, whatever the rows above hold
        shown = j < history
        if CHANNEL:
            kept = tl.where(shown[:, None], kept, 0.0)
            decay = tl.where(history > 0, tl.exp(total), tl.full([NP], 1.0, tl.float32))
            drafts = tl.zeros([TP, NP], tl.float32)
        else:
            weight = tl.where(shown, weight, 0.0)
            decay = tl.where(history > 0, tl.exp(total), 1.0)
            reach = tl.full([TP], 1.0, tl.float32)
        draft_scale = tl.zeros([TP], tl.float32)
        written = tl.zeros([TP, BLOCK_P], tl.float32)
        for t in tl.static_range(T):
            live = t < tokens
            q = tl.load(query_at + t * query[2], mask=n_mask & live, other=0).to(tl.float32)
            k = tl.load(key_at + t * key[2], mask=n_mask & live, other=0).to(tl.float32)
            v = tl.load(value[0] + b * value[1] + t * value[2] + h * P + p, mask=p_mask & live, other=0)
            log_decay = TOKEN_DECAY(inputs, layer_params, b, t, h, n, n_mask, live, N)
            rate = TOKEN_RATE(inputs, b, t, h, live)
            q_scale = QUERY_SCALE(q, N)
            k_scale = KEY_SCALE(k)
            step = tl.exp(log_decay)
            decay *= step
            if CHANNEL:
                q, k = q * q_scale, k * k_scale
                kept *= step[None, :]
                drafts = tl.where((i_draft == t)[:, None], k[None, :], drafts * step[None, :])
                to_q = tl.sum(kept * q[None, :], 1)
                draft_q = tl.sum(drafts * q[None, :], 1)
                out = tl.sum(S * (decay * q)[:, None], 0)
            else:
                weight *= step
                reach = tl.where(i_draft < t, reach * step, 1.0)
                draft_scale = tl.where(i_draft == t, k_scale, draft_scale)
                picked = (tl.arange(0, TP) == t)[:, None]
                to_q = tl.sum(tl.where(picked, past_q, 0.0), 0) * weight * q_scale
                draft_q = tl.sum(tl.where(picked, new_q, 0.0), 0) * reach * draft_scale * q_scale
                out = tl.sum(S * q[:, None], 0) * (decay * q_scale)
            out += tl.sum(to_q[:, None] * past, 0)
            u = v.to(tl.float32)
            if DELTA:
                if CHANNEL:
                    to_k = tl.sum(kept * k[None, :], 1)
                    draft_k = tl.sum(drafts * k[None, :], 1)
                    answer = tl.sum(S * (decay * k)[:, None], 0)
                else:
                    to_k = tl.sum(tl.where(picked, past_k, 0.0), 0) * weight * k_scale
                    draft_k = tl.sum(tl.where(picked, new_k, 0.0), 0) * reach * draft_scale * k_scale
                    answer = tl.sum(S * k[:, None], 0) * (decay * k_scale)
                answer += tl.sum(to_k[:, None] * past, 0)
                if T > 1:
                    answer += tl.sum(tl.where(i_draft < t, draft_k, 0.0)[:, None] * written, 0)
                u = u - answer
            u = u * rate
            if T > 1:
                written = tl.where((i_draft == t)[:, None], u[None, :], written)
                out += tl.sum(tl.where(i_draft <= t, draft_q, 0.0)[:, None] * written, 0)
            else:
                out += tl.sum(draft_q, 0) * u
            if SKIP:
                out += TOKEN_SKIP(layer_params, h) * v.to(tl.float32)
            out = tl.where(live, out, 0.0)
            tl.store(y[0] + b * y[1] + t * y[2] + h * P + p, out.to(y[0].dtype.element_ty), mask=p_mask)

            row = (draft_start + t) % RING_ROWS
            kept_write = u if DELTA else v
            write_at = writes[0] + slot * writes[1] + row * writes[2] + h * writes[3] + p
            tl.store(write_at, kept_write.to(writes[0].dtype.element_ty), mask=p_mask & live)
            if tile == 0:
                STORE_RECORD(ring, slot, row, g, h, n, k_scale, log_decay, rate, n_mask, live, N)
                if h % (H // G) == 0:
                    raw_k = tl.load(key_at + t * key[2], mask=n_mask & live, other=0)
                    tl.store(keys[0] + slot * keys[1] + row * keys[2] + g * keys[3] + n, raw_k, mask=n_mask & live)
