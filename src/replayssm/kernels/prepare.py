"""The first launch of a `verify`: everything about a step's tokens that needs no state.

What an output takes from the state, from the ring and from drafts are sums whose weights depend on keys, queries and
decays only, the same for all columns of a state. One small launch computes the weights of all heads, appends keys and
the other scalar records to the ring, and leaves to the second launch (kernels/verify.py) one pass over states and write
vectors, which then runs at the speed of the memory whatever the recurrence. Recurrences come in as small jitted
functions (`recurrences/<name>/triton.py`).

The weights of a row's head are a block of floats per token t, in this order (`block_size`):

| floats | meaning                                                                                       |
|--------|-----------------------------------------------------------------------------------------------|
| WP     | of the ring's write vectors in output t; in the first block of a row that is due: in its fold |
| WP     | delta rules: the same in the correction of token t                                            |
| T      | of the drafts' write vectors in output t (those of drafts up to t count)                      |
| T      | delta rules: the same in the correction of token t (drafts before t)                          |
| 5      | of the state in output t, and in the correction; rate of t; decay of the fold as high + low   |

A decay per channel cannot be drawn out of a product with the state: then `probes` [B, H, T, 2, N] holds the query and
the key of each token with all decays in them, and the weights of the state are not used.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.kernels.exact import channel_keys, exact_dot, head_weights, high_low
from replayssm.kernels.plan import FOLD_START, FOLDED, HISTORY, SLOT, TOKENS


def block_size(tokens: int, window: int, delta_rule: bool) -> int:
    """Floats of a token's weights, a multiple of a memory sector of 32 bytes; `window` is the padded one."""
    kinds = 2 if delta_rule else 1
    return -(-(kinds * (window + tokens) + 5) // 8) * 8


@triton.jit
def pick(matrix, t):
    """Row t of `matrix` [TP, X]."""
    rows = tl.arange(0, matrix.shape[0])
    return tl.sum(tl.where((rows == t)[:, None], matrix, 0.0), 0)


@triton.jit
def prepare_kernel(
    plan_row, plan, keys, ring, key, query, inputs, layer_params, weights, probes,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr,
    NP: tl.constexpr, TP: tl.constexpr, WP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, OVERLAP: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr,
    KEY_SCALE: tl.constexpr, QUERY_SCALE: tl.constexpr, STORE_RECORD: tl.constexpr,
):  # fmt: skip
    """A program per row and HEADS heads of one key head. See the module.

    Shapes: B rows, T tokens (TP padded), H heads, G key heads, N key dim (NP padded), window padded to WP.

    | argument | shape                | in/out | meaning                                                        |
    |----------|----------------------|--------|----------------------------------------------------------------|
    | plan     | [B, columns] int64   | in     | `state.plan.COLUMNS`; rows lie `plan_row` apart                |
    | keys     | [slots, rows, G, N]  | in/out | ring of raw keys: (pointer, slot, row and head stride)         |
    | ring     | tuple of such        | in/out | the recurrence's other ring fields, write vectors excepted     |
    | key, query | [B, T, G, N]       | in     | this step's raw tokens: (pointer, row stride, token stride)    |
    | inputs   | tuple of such        | in     | the recurrence's other inputs                                  |
    | layer_params | tuple of pointers | in    | per-layer constants                                            |
    | weights  | [B, H, T, BLOCK] fp32 | out   | see the module                                                 |
    | probes   | [B, H, T, 2, N] fp32 | out    | the same; written when CHANNEL                                 |
    """
    if OVERLAP:
        # once everything earlier has ended, the second launch may start and ask for its states
        gdc_wait()
        gdc_launch_dependents()
    parts: tl.constexpr = H // HEADS
    b = (tl.program_id(0) // parts).to(tl.int64)
    h = tl.program_id(0) % parts * HEADS
    g = h // (H // G)
    plan += b * plan_row
    slot = tl.load(plan + SLOT)
    if slot >= 0:
        n = tl.arange(0, NP)
        n_mask = n < N
        tokens = tl.load(plan + TOKENS)
        folded = tl.load(plan + FOLDED)
        start = tl.load(plan + FOLD_START)
        history = tl.load(plan + HISTORY)
        # a due row has records to fold and no history, any other row the reverse: one set of rows serves both
        records = folded + history
        out = weights + (b * H + h) * (T * BLOCK)
        key_at = key[0] + b * key[1] + g * N + n
        query_at = query[0] + b * query[1] + g * N + n
        if CHANNEL:
            channel_tokens(
                b, h, g, slot, tokens, folded, start, records, n, n_mask, keys, ring, key_at, key[2], query_at,
                query[2], inputs, layer_params, out, probes + (b * H + h) * (T * 2 * N) + n,
                N, T, RING_ROWS, TP, WP, BLOCK, RECORD_SCALES, RECORD_DECAY, TOKEN_DECAY, TOKEN_RATE,
                KEY_SCALE, QUERY_SCALE, STORE_RECORD,
            )  # fmt: skip
        else:
            head_tokens(
                b, h, g, slot, tokens, folded, start, records, n, n_mask, keys, ring, key_at, key[2], query_at,
                query[2], inputs, layer_params, out,
                H // G, N, T, RING_ROWS, TP, WP, HEADS, BLOCK, DELTA, RECORD_SCALES, RECORD_DECAY, TOKEN_DECAY,
                TOKEN_RATE, KEY_SCALE, QUERY_SCALE, STORE_RECORD,
            )  # fmt: skip


@triton.jit
def head_tokens(
    b, h, g, slot, tokens, folded, start, records, n, n_mask, keys, ring, key_at, key_token, query_at, query_token,
    inputs, layer_params, out,
    GROUP: tl.constexpr, N: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr, TP: tl.constexpr,
    WP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, DELTA: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr,
    KEY_SCALE: tl.constexpr, QUERY_SCALE: tl.constexpr, STORE_RECORD: tl.constexpr,
):  # fmt: skip
    """Weights of heads with one decay each; they share the products of raw keys and queries."""
    j, i = tl.arange(0, WP), tl.arange(0, TP)
    rows = (start + j) % RING_ROWS
    key_tile = keys[0] + slot * keys[1] + rows[:, None] * keys[2] + g * keys[3] + n[None, :]
    kept = tl.load(key_tile, mask=(j < records)[:, None] & n_mask[None, :], other=0)
    if T > 1:
        token_mask = (i < tokens)[:, None] & n_mask[None, :]
        k_tile = tl.load(key_at[None, :] + i[:, None] * key_token, mask=token_mask, other=0)
        q_tile = tl.load(query_at[None, :] + i[:, None] * query_token, mask=token_mask, other=0)
        past_q, new_q = exact_dot(q_tile, tl.trans(kept)), exact_dot(q_tile, tl.trans(k_tile))
        past_k, new_k = past_q, new_q
        if DELTA:
            past_k, new_k = exact_dot(k_tile, tl.trans(kept)), exact_dot(k_tile, tl.trans(k_tile))

    heads = h + tl.arange(0, HEADS)[:, None]
    weight, log_decay = head_weights(
        ring, layer_params, slot, start, records, g, heads, N, WP, RING_ROWS, RECORD_SCALES, RECORD_DECAY
    )
    out += (heads - h) * (T * BLOCK)
    scalars: tl.constexpr = (WP + T) * (2 if DELTA else 1)
    decay = tl.exp(log_decay)[:, None]
    if folded > 0:
        tl.store(out + j[None, :], weight)
        high, low = high_low(log_decay)
        tl.store(out + scalars + 3, high[:, None])
        tl.store(out + scalars + 4, low[:, None])
        # after a fold there is no history
        decay = tl.full([HEADS, 1], 1.0, tl.float32)
        weight = tl.zeros([HEADS, WP], tl.float32)
    reach = tl.full([HEADS, TP], 1.0, tl.float32)
    draft_scale = tl.zeros([TP], tl.float32)
    for t in tl.static_range(T):
        live = t < tokens
        raw_k = tl.load(key_at + t * key_token, mask=n_mask & live, other=0)
        k = raw_k.to(tl.float32)
        q = tl.load(query_at + t * query_token, mask=n_mask & live, other=0).to(tl.float32)
        k_scale, q_scale = KEY_SCALE(k), QUERY_SCALE(q, N)
        log_step = TOKEN_DECAY(inputs, layer_params, b, t, heads, n, n_mask, live, N)
        rate = TOKEN_RATE(inputs, b, t, heads, live)
        step = tl.exp(log_step)
        decay *= step
        weight *= step
        if T == 1:
            to_q = tl.sum(kept.to(tl.float32) * q[None, :], 1)
        else:
            to_q = pick(past_q, t)
        if folded == 0 or t > 0:
            tl.store(out + j[None, :], weight * (to_q * q_scale)[None, :])
        drafts = out + (2 if DELTA else 1) * WP
        if T == 1:
            tl.store(drafts, tl.zeros([HEADS, 1], tl.float32) + tl.sum(k * q, 0) * (k_scale * q_scale))
        else:
            # the products with earlier drafts, which decays have weakened since
            reach = tl.where((i < t)[None, :], reach * step, 1.0)
            draft_scale = tl.where(i == t, k_scale, draft_scale)
            to_draft = reach * (pick(new_q, t) * draft_scale * q_scale)[None, :]
            tl.store(drafts + i[None, :], to_draft, mask=(i < T)[None, :])
        if DELTA:
            if T == 1:
                to_k = tl.sum(kept.to(tl.float32) * k[None, :], 1)
            else:
                to_k = pick(past_k, t)
            tl.store(out + WP + j[None, :], weight * (to_k * k_scale)[None, :])
            if T > 1:
                to_draft = reach * (pick(new_k, t) * draft_scale * k_scale)[None, :]
                tl.store(drafts + T + i[None, :], to_draft, mask=(i < T)[None, :])
        tl.store(out + scalars, decay * q_scale)
        if DELTA:
            tl.store(out + scalars + 1, decay * k_scale)
        tl.store(out + scalars + 2, rate)
        out += BLOCK

        row = (start + records + t) % RING_ROWS
        STORE_RECORD(ring, slot, row, g, heads, n, k_scale, log_step, rate, n_mask, live, N)
        if h % GROUP == 0:
            tl.store(keys[0] + slot * keys[1] + row * keys[2] + g * keys[3] + n, raw_k, mask=n_mask & live)


@triton.jit
def channel_tokens(
    b, h, g, slot, tokens, folded, start, records, n, n_mask, keys, ring, key_at, key_token, query_at, query_token,
    inputs, layer_params, out, probe,
    N: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr, TP: tl.constexpr, WP: tl.constexpr,
    BLOCK: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr,
    KEY_SCALE: tl.constexpr, QUERY_SCALE: tl.constexpr, STORE_RECORD: tl.constexpr,
):  # fmt: skip
    """Weights and probes of one head with a decay per channel. Rules of this kind are delta rules."""
    j, i = tl.arange(0, WP), tl.arange(0, TP)
    # a row that is due folds in the second launch, and has no history after it
    history = tl.where(folded > 0, 0, records)
    kept, log_decay = channel_keys(
        keys, ring, layer_params, slot, start, history, g, h, n, n_mask,
        N, WP, RING_ROWS, RECORD_SCALES, RECORD_DECAY,
    )  # fmt: skip
    decay = tl.exp(log_decay)
    drafts = tl.zeros([TP, kept.shape[1]], tl.float32)
    for t in tl.static_range(T):
        live = t < tokens
        raw_k = tl.load(key_at + t * key_token, mask=n_mask & live, other=0)
        k = raw_k.to(tl.float32)
        q = tl.load(query_at + t * query_token, mask=n_mask & live, other=0).to(tl.float32)
        k_scale = KEY_SCALE(k)
        k, q = k * k_scale, q * QUERY_SCALE(q, N)
        log_step = TOKEN_DECAY(inputs, layer_params, b, t, h, n, n_mask, live, N)
        rate = TOKEN_RATE(inputs, b, t, h, live)
        step = tl.exp(log_step)
        decay *= step
        kept *= step[None, :]
        drafts = tl.where((i == t)[:, None], k[None, :], drafts * step[None, :])
        tl.store(out + j, tl.sum(kept * q[None, :], 1))
        tl.store(out + WP + j, tl.sum(kept * k[None, :], 1))
        tl.store(out + 2 * WP + i, tl.sum(drafts * q[None, :], 1), mask=i < T)
        tl.store(out + 2 * WP + T + i, tl.sum(drafts * k[None, :], 1), mask=i < T)
        tl.store(out + 2 * (WP + T) + 2, rate)
        tl.store(probe, decay * q, mask=n_mask)
        tl.store(probe + N, decay * k, mask=n_mask)
        out += BLOCK
        probe += 2 * N

        row = (start + records + t) % RING_ROWS
        STORE_RECORD(ring, slot, row, g, h, n, k_scale, log_step, rate, n_mask, live, N)
        tl.store(keys[0] + slot * keys[1] + row * keys[2] + g * keys[3] + n, raw_k, mask=n_mask & live)
