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

Where one token reads a copy as pairs of fp16 numbers (kernels/formats.py), `probes` [B, G, 2, N] fp16 holds the query
and the key in that form, scaled by powers of two which the weights of the state then take back.

In a tree of drafts a token's decays are those on its path, and drafts that are not on it have the weight 0. The second
launch takes these weights as it takes a chain's, and knows nothing of trees.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.kernels.drafts import quad_rows, quads_left, quads_right
from replayssm.kernels.exact import channel_keys, exact_dot, head_weights, high_low, newest_first
from replayssm.kernels.formats import store_probe
from replayssm.kernels.plan import FOLD_START, FOLDED, HISTORY, SLOT, TOKENS, TREE
from replayssm.kernels.prefetch import guessed_row, prefetch, prefetch_records, prefetch_rows


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
    plan_row, plan, reads, slots, keys, writes, ring, rates, key, query, inputs, layer_params, weights, probes,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr,
    NP: tl.constexpr, TP: tl.constexpr, WP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, OVERLAP: tl.constexpr, IS_TREE: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr,
    KEY_SCALE: tl.constexpr, QUERY_SCALE: tl.constexpr, STORE_RECORD: tl.constexpr, SOLVES: tl.constexpr,
    PROBE_BITS: tl.constexpr, FACTOR: tl.constexpr, AHEAD: tl.constexpr, READ_SIZE: tl.constexpr,
    RECORD_SIZES: tl.constexpr,
):  # fmt: skip
    """A program per row and HEADS heads of one key head. See the module.

    Shapes: B rows, T tokens (TP padded), H heads, G key heads, N key dim (NP padded), window padded to WP.

    | argument | shape                | in/out | meaning                                                        |
    |----------|----------------------|--------|----------------------------------------------------------------|
    | plan     | [B, columns] int64   | in     | `state.plan.COLUMNS`; rows lie `plan_row` apart                |
    | reads    | [slots, H, READ_SIZE] | hint  | states that the second launch will read: (pointer, slot stride) |
    | slots    | int                  | in     | of the layer                                                   |
    | keys     | [slots, rows, G, N]  | in/out | ring of raw keys: (pointer, slot, row and head stride)         |
    | writes   | [slots, rows, H, P]  | hint   | ring of write vectors: the same                                |
    | rates    | [slots, rows, H]     | in/out | ring of rates, with SOLVES: the same                           |
    | ring     | tuple of such        | in/out | the recurrence's other ring fields, write vectors excepted     |
    | key, query | [B, T, G, N]       | in     | this step's raw tokens: (pointer, row stride, token stride)    |
    | inputs   | tuple of such        | in     | the recurrence's other inputs                                  |
    | layer_params | tuple of pointers | in    | per-layer constants                                            |
    | weights  | [B, H, T, BLOCK] fp32 | out   | see the module                                                 |
    | probes   | as the module says   | out    | the same; written when CHANNEL or PROBE_BITS                   |
    """
    pid = tl.program_id(0)
    b = (pid // (H // HEADS)).to(tl.int64)
    h = pid % (H // HEADS) * HEADS
    g = h // (H // G)
    plan += b * plan_row
    if OVERLAP:
        if b < AHEAD[0]:  # rows whose records, and whose states, the L2 has room for
            slot, _, _, _, _ = guessed_row(plan, slots, RING_ROWS)
            if slot >= 0:
                prefetch_records(keys, ring, slot, 0, h, H, RING_ROWS, HEADS, RECORD_SIZES)
                if b < AHEAD[1]:
                    prefetch_rows(writes, slot, 0, h, H, RING_ROWS, HEADS, H, P)
                    prefetch(reads[0] + slot * reads[1] + h * READ_SIZE, HEADS * READ_SIZE)
        # once everything earlier has ended, the second launch may start and ask for its states
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(plan + SLOT)
    if slot >= 0:
        n = tl.arange(0, NP)
        n_mask = n < N
        # what counts rows is small, and 64-bit remainders are slow
        tokens = tl.load(plan + TOKENS).to(tl.int32)
        folded = tl.load(plan + FOLDED).to(tl.int32)
        start = tl.load(plan + FOLD_START).to(tl.int32)
        history = tl.load(plan + HISTORY).to(tl.int32)
        # a due row has records to fold and no history, any other row the reverse: one set of rows serves both
        records = folded + history
        tree = tl.load(plan + TREE) if IS_TREE else 0
        out = weights + (b * H + h) * (T * BLOCK)
        key_at = key[0] + b * key[1] + g * N
        query_at = query[0] + b * query[1] + g * N
        if CHANNEL:
            channel_tokens(
                b, h, g, slot, tokens, folded, start, records, tree, n, n_mask, keys, ring, rates, key_at + n, key[2],
                query_at + n, query[2], inputs, layer_params, out, probes + (b * H + h) * (T * 2 * N) + n,
                N, T, RING_ROWS, TP, WP, BLOCK, IS_TREE, RECORD_SCALES, RECORD_DECAY, TOKEN_DECAY, TOKEN_RATE,
                KEY_SCALE, QUERY_SCALE, STORE_RECORD, SOLVES,
            )  # fmt: skip
        elif T == 1:
            head_token(
                b, h, g, slot, tokens, folded, start, records, n, n_mask, keys, ring, rates, key_at, query_at, inputs,
                layer_params, out, probes + (b * G + g) * N, H // G, N, RING_ROWS, WP, HEADS, BLOCK, DELTA,
                RECORD_SCALES, RECORD_DECAY, TOKEN_DECAY, TOKEN_RATE, KEY_SCALE, QUERY_SCALE, STORE_RECORD, SOLVES,
                PROBE_BITS, FACTOR,
            )  # fmt: skip
        else:
            head_tokens(
                b, h, g, slot, tokens, folded, start, records, tree, n, n_mask, keys, ring, rates, key_at, key[2],
                query_at, query[2], inputs, layer_params, out,
                H // G, N, T, RING_ROWS, TP, WP, HEADS, BLOCK, DELTA, IS_TREE, RECORD_SCALES, RECORD_DECAY, TOKEN_DECAY,
                TOKEN_RATE, KEY_SCALE, QUERY_SCALE, STORE_RECORD, SOLVES,
            )  # fmt: skip


@triton.jit
def store_rates(rates, slot, rows, h, rate, mask):
    """Keep tokens' rates in the ring, for a fold that solves them again."""
    tl.store(rates[0] + slot * rates[1] + rows * rates[2] + h * rates[3], rate, mask=mask)


@triton.jit
def key_products(key_rows, row_mask, query_at, key_at, n, live, N: tl.constexpr, TWO: tl.constexpr):
    """(K q, K k) [WP] of ring rows of keys, which `key_rows` [WP, 1] points to; K k only when TWO.

    Some channels after the other: sums over few channels need few registers and few exchanges between threads.
    """
    CHUNK: tl.constexpr = min(n.shape[0], 16)
    c = tl.arange(0, CHUNK)
    q_sums = tl.zeros([key_rows.shape[0], CHUNK], tl.float32)
    k_sums = q_sums
    for first in tl.static_range(0, N, CHUNK):
        inside = (first + c < N) & live
        kept = tl.load(key_rows + (first + c)[None, :], mask=row_mask & inside[None, :], other=0).to(tl.float32)
        q_sums += kept * tl.load(query_at + first + c, mask=inside, other=0).to(tl.float32)[None, :]
        if TWO:
            k_sums += kept * tl.load(key_at + first + c, mask=inside, other=0).to(tl.float32)[None, :]
    return tl.sum(q_sums, 1), tl.sum(k_sums, 1)


@triton.jit
def head_token(
    b, h, g, slot, tokens, folded, start, records, n, n_mask, keys, ring, rates, key_at, query_at, inputs,
    layer_params, out, probe,
    GROUP: tl.constexpr, N: tl.constexpr, RING_ROWS: tl.constexpr, WP: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, DELTA: tl.constexpr, RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr,
    TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr, KEY_SCALE: tl.constexpr, QUERY_SCALE: tl.constexpr,
    STORE_RECORD: tl.constexpr, SOLVES: tl.constexpr, PROBE_BITS: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """Weights of one token for heads with one decay each; they share the products of raw keys and queries."""
    j = newest_first(WP)
    rows = (start + j) % RING_ROWS
    live = tokens > 0
    key_rows = keys[0] + slot * keys[1] + rows[:, None] * keys[2] + g * keys[3]
    past_q, past_k = key_products(key_rows, (j < records)[:, None], query_at, key_at, n, live, N, DELTA)
    heads = h + tl.arange(0, HEADS)[:, None]
    weight, log_decay = head_weights(
        ring, layer_params, slot, start, records, g, heads, N, WP, RING_ROWS, RECORD_SCALES, RECORD_DECAY
    )
    out += (heads - h) * BLOCK
    scalars: tl.constexpr = (WP + 1) * (2 if DELTA else 1)
    decay = tl.exp(log_decay)[:, None]
    if folded > 0:
        store_fold(out, j, weight, log_decay, scalars)
        # after a fold there is no history
        decay = tl.full([HEADS, 1], 1.0, tl.float32)
    raw_k = tl.load(key_at + n, mask=n_mask & live, other=0)
    k = raw_k.to(tl.float32)
    q = tl.load(query_at + n, mask=n_mask & live, other=0).to(tl.float32)
    k_scale, q_scale = KEY_SCALE(k), QUERY_SCALE(q, N)
    log_step = TOKEN_DECAY(inputs, layer_params, b, 0, heads, n, n_mask, live, N)
    rate = TOKEN_RATE(inputs, b, 0, heads, live)
    step = tl.exp(log_step)
    decay *= step
    weight *= step
    if folded == 0:
        tl.store(out + j[None, :], weight * (past_q * q_scale)[None, :])
        if DELTA:
            tl.store(out + WP + j[None, :], weight * (past_k * k_scale)[None, :])
    own = tl.zeros([HEADS, 1], tl.float32) + tl.sum(k * q, 0) * (k_scale * q_scale)
    tl.store(out + (2 if DELTA else 1) * WP, own)
    q_decay, k_decay = decay * q_scale, decay * k_scale
    if PROBE_BITS > 0:  # noqa: SIM102 (what is constant, and what is not)
        if folded == 0:  # a row that is due reads its checkpoint, with raw probes
            probe_at = probe.to(tl.pointer_type(tl.float16)) + n
            q_decay *= store_probe(q, probe_at, n_mask, PROBE_BITS, FACTOR)
            if DELTA:
                k_decay *= store_probe(k, probe_at + N, n_mask, PROBE_BITS, FACTOR)
    tl.store(out + scalars, q_decay)
    if DELTA:
        tl.store(out + scalars + 1, k_decay)
    tl.store(out + scalars + 2, rate)

    row = (start + records) % RING_ROWS
    STORE_RECORD(ring, slot, row, g, heads, n, k_scale, log_step, rate, n_mask, live, N)
    if SOLVES:
        store_rates(rates, slot, row, heads, rate, live)
    if h % GROUP == 0:
        tl.store(keys[0] + slot * keys[1] + row * keys[2] + g * keys[3] + n, raw_k, mask=n_mask & live)


@triton.jit
def parent_of(tree, t):
    """The token that token t follows, -1 for the committed history (`state.cursor.parents_of`)."""
    return t - 1 - ((tree >> (4 * t)) & 15)


@triton.jit
def lineage(tree, t, T: tl.constexpr):
    """[TP] for the tokens t = 0..TP - 1: a bit for each token on the path to it, its own included."""
    bits = tl.zeros(t.shape, tl.int32)
    for s in tl.static_range(T):
        above = tl.sum(tl.where(t == parent_of(tree, s), bits, 0), 0)
        bits = tl.where(t == s, above | (1 << s), bits)
    return bits


@triton.jit
def head_tokens(
    b, h, g, slot, tokens, folded, start, records, tree, n, n_mask, keys, ring, rates, key_at, key_token, query_at,
    query_token, inputs, layer_params, out,
    GROUP: tl.constexpr, N: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr, TP: tl.constexpr,
    WP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, DELTA: tl.constexpr, IS_TREE: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr,
    KEY_SCALE: tl.constexpr, QUERY_SCALE: tl.constexpr, STORE_RECORD: tl.constexpr, SOLVES: tl.constexpr,
):  # fmt: skip
    """The same for several tokens, all of them at once: one after the other, each would wait for its loads."""
    D: tl.constexpr = 16  # rows that tensor cores take at least, and columns
    C: tl.constexpr = max(8, (2 if DELTA else 1) * TP)
    NP: tl.constexpr = n.shape[0]
    j, i, t, c = newest_first(WP), tl.arange(0, D), tl.arange(0, TP), tl.arange(0, C)
    live = (t < tokens)[None, :]
    # operands as lanes load them (kernels/drafts.py): ring rows and keys in rows, queries (and keys) in columns
    channel = quad_rows(NP)
    kept_row = WP - 1 - row_of(WP)
    kept_at = keys[0] + slot * keys[1] + (start + kept_row) % RING_ROWS * keys[2] + g * keys[3]
    kept_at += channel[:, :, :, :, None]
    inside = channel[:, :, :, :, None] < N
    kept = quads_left(tl.load(kept_at, mask=(kept_row < records) & inside, other=0), True)
    k_at = key_at + row_of(D) * key_token + channel[:, :, :, :, None]
    k_tile = quads_left(tl.load(k_at, mask=(row_of(D) < tokens) & inside, other=0), True)
    if DELTA:
        kind, c_token = c % 2, c // 2
        columns_at = tl.where(kind > 0, key_at + c_token * key_token, query_at + c_token * query_token)
    else:
        kind, c_token = c * 0, c
        columns_at = query_at + c_token * query_token
    mask = (c_token < tokens)[None, :, None, None] & (channel < N)
    columns = quads_right(tl.load(columns_at[None, :, None, None] + channel, mask=mask, other=0), True)
    raw_mask = (t < tokens)[:, None] & n_mask[None, :]
    raw_k = tl.load(key_at + t[:, None] * key_token + n[None, :], mask=raw_mask, other=0)
    heads = h + tl.arange(0, HEADS)[:, None]
    log_step = TOKEN_DECAY(inputs, layer_params, b, t[None, :], heads, n, n_mask, live, N)
    rate = TOKEN_RATE(inputs, b, t[None, :], heads, live)
    weight, log_decay = head_weights(
        ring, layer_params, slot, start, records, g, heads, N, WP, RING_ROWS, RECORD_SCALES, RECORD_DECAY
    )
    k_scale = tl.zeros([D], tl.float32) + KEY_SCALE(tl.trans(k_tile.to(tl.float32)))
    k_scale = first_rows(tl.where(i < TP, k_scale, 0.0)[:, None], TP)
    k_scale = tl.reshape(k_scale, [TP])
    q_scale = tl.zeros([C], tl.float32) + QUERY_SCALE(columns.to(tl.float32), N)
    factor = q_scale
    if DELTA:
        factor = tl.where(kind > 0, tl.zeros([C], tl.float32) + KEY_SCALE(columns.to(tl.float32)), q_scale)
    q_scale = tl.reshape(by_kind(tl.where(c_token < TP, q_scale, 0.0)[None, :], TP, DELTA)[0], [TP])
    past_q, past_k = by_kind(exact_dot(kept, columns) * factor[None, :], TP, DELTA)
    new = first_rows(exact_dot(k_tile, columns) * factor[None, :], TP)
    new_q, new_k = by_kind(new, TP, DELTA)

    # the decay from the checkpoint to each token, and from each draft to each token behind it: both are sums along the
    # path and no differences of sums, which would carry the rounding errors of what came before
    total = tl.zeros([HEADS, TP], tl.float32)
    between = tl.zeros([HEADS, TP, TP], tl.float32)
    if IS_TREE:
        path = lineage(tree, t, T)
    for s in tl.static_range(T):
        one = tl.sum(tl.where((t == s)[None, :], log_step, 0.0), 1)
        # which tokens have s on their path, and which are on the path to s
        if IS_TREE:
            to = ((path >> s) & 1) != 0
            since = ((tl.sum(tl.where(t == s, path, 0), 0) >> t) & 1 != 0) & (t != s)
        else:
            to, since = t >= s, t < s
        total += tl.where(to[None, :], one[:, None], 0.0)
        between += tl.where(since[None, None, :] & to[None, :, None], one[:, None, None], 0.0)

    scalars: tl.constexpr = (WP + T) * (2 if DELTA else 1)
    out += (heads - h) * (T * BLOCK)
    if folded > 0:
        store_fold(out, j, weight, log_decay, scalars)
        log_decay = tl.zeros([HEADS], tl.float32)  # after a fold there is no history
    token = out + t[None, :] * BLOCK
    in_step = (t < T)[None, :]
    decay = tl.exp(log_decay[:, None] + total)
    from_past = tl.exp(total)[:, :, None] * weight[:, None, :]
    from_draft = tl.exp(between) * k_scale[None, None, :]
    if IS_TREE:
        on_path = ((path[:, None] >> t[None, :]) & 1) != 0
        from_draft = tl.where(on_path[None, :, :], from_draft, 0.0)
    past_at = token[:, :, None] + j[None, None, :]
    past_mask = (in_step & (folded == 0))[:, :, None]
    drafts_at = token[:, :, None] + (2 if DELTA else 1) * WP + t[None, None, :]
    draft_mask = in_step[:, :, None] & in_step[:, None, :]
    tl.store(past_at, from_past * tl.trans(past_q)[None, :, :], mask=past_mask)
    tl.store(drafts_at, from_draft * tl.trans(new_q)[None, :, :], mask=draft_mask)
    tl.store(token + scalars, decay * q_scale[None, :], mask=in_step)
    if DELTA:
        tl.store(past_at + WP, from_past * tl.trans(past_k)[None, :, :], mask=past_mask)
        tl.store(drafts_at + T, from_draft * tl.trans(new_k)[None, :, :], mask=draft_mask)
        tl.store(token + scalars + 1, decay * k_scale[None, :], mask=in_step)
    tl.store(token + scalars + 2, rate, mask=in_step)

    row = (start + records + t) % RING_ROWS
    STORE_RECORD(ring, slot, row[None, :], g, heads, n, k_scale[None, :], log_step, rate, n_mask, live, N)
    if SOLVES:
        store_rates(rates, slot, row[None, :], heads, rate, live)
    if h % GROUP == 0:
        ring_at = keys[0] + slot * keys[1] + row[:, None] * keys[2] + g * keys[3] + n[None, :]
        tl.store(ring_at, raw_k, mask=raw_mask)


@triton.jit
def first_rows(matrix, ROWS: tl.constexpr):
    """The first ROWS rows of `matrix` [D, X], whose other rows are zero."""
    D: tl.constexpr = matrix.shape[0]
    if D == ROWS:
        return matrix
    else:
        return tl.sum(tl.reshape(matrix, [D // ROWS, ROWS, matrix.shape[1]]), 0)


@triton.jit
def row_of(ROWS: tl.constexpr):
    """Rows [1, 8, 1, 1, ROWS / 8] of the matrix that `quads_left` makes of a tile with one row in each column."""
    return tl.arange(0, 8)[None, :, None, None, None] + 8 * tl.arange(0, ROWS // 8)[None, None, None, None, :]


@triton.jit
def by_kind(product, TP: tl.constexpr, DELTA: tl.constexpr):
    """(queries', keys') columns [X, TP] each of a product [X, C], whose other columns are zero; twice the only ones."""
    X: tl.constexpr = product.shape[0]
    if DELTA:
        q, k = tl.split(tl.reshape(product, [X, product.shape[1] // 2, 2]))
    else:
        q, k = product, product
    WIDE: tl.constexpr = q.shape[1] // TP
    return tl.sum(tl.reshape(q, [X, WIDE, TP]), 1), tl.sum(tl.reshape(k, [X, WIDE, TP]), 1)


@triton.jit
def store_fold(out, j, weight, log_decay, SCALARS: tl.constexpr):
    """What a fold needs, into the first block of heads: `weight` [HEADS, WP] and the decay [HEADS] as high + low."""
    tl.store(out + j[None, :], weight)
    high, low = high_low(log_decay)
    tl.store(out + SCALARS + 3, high[:, None])
    tl.store(out + SCALARS + 4, low[:, None])


@triton.jit
def channel_tokens(
    b, h, g, slot, tokens, folded, start, records, tree, n, n_mask, keys, ring, rates, key_at, key_token, query_at,
    query_token, inputs, layer_params, out, probe,
    N: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr, TP: tl.constexpr, WP: tl.constexpr,
    BLOCK: tl.constexpr, IS_TREE: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_DECAY: tl.constexpr, TOKEN_RATE: tl.constexpr,
    KEY_SCALE: tl.constexpr, QUERY_SCALE: tl.constexpr, STORE_RECORD: tl.constexpr, SOLVES: tl.constexpr,
):  # fmt: skip
    """Weights and probes of one head with a decay per channel. Rules of this kind are delta rules."""
    j, i = tl.arange(0, WP), tl.arange(0, TP)
    # a row that is due folds in the second launch, and has no history after it
    history = tl.where(folded > 0, 0, records)
    kept, log_decay = channel_keys(
        keys, ring, layer_params, slot, start, history, g, h, n, n_mask,
        N, WP, RING_ROWS, RECORD_SCALES, RECORD_DECAY,
    )  # fmt: skip
    # loads first and stores last: a load may not move before a store, and every token would wait for its own
    live = (i < tokens)[:, None]
    tile_mask = n_mask[None, :] & live
    raw_k = tl.load(key_at[None, :] + i[:, None] * key_token, mask=tile_mask, other=0)
    raw_q = tl.load(query_at[None, :] + i[:, None] * query_token, mask=tile_mask, other=0)
    log_step = TOKEN_DECAY(inputs, layer_params, b, i[:, None], h, n[None, :], n_mask[None, :], live, N)
    rate = TOKEN_RATE(inputs, b, i, h, i < tokens)
    k_scale = tl.zeros([TP], tl.float32) + KEY_SCALE(tl.trans(raw_k.to(tl.float32)))
    q_scale = tl.zeros([TP], tl.float32) + QUERY_SCALE(tl.trans(raw_q.to(tl.float32)), N)
    k_tile, q_tile = raw_k.to(tl.float32) * k_scale[:, None], raw_q.to(tl.float32) * q_scale[:, None]
    steps = tl.exp(log_step)

    decay = tl.exp(log_decay)
    drafts = tl.zeros([TP, kept.shape[1]], tl.float32)
    decays = drafts
    past_q = tl.zeros([TP, WP], tl.float32)
    past_k = past_q
    new_q = tl.zeros([TP, TP], tl.float32)
    new_k = new_q
    if IS_TREE:
        path = lineage(tree, i, T)
        fresh_kept, fresh_decay = kept, decay
    for t in tl.static_range(T):
        here = (i == t)[:, None]
        if IS_TREE and t > 0:  # noqa: SIM102 (what is constant, and what is not)
            if parent_of(tree, t) != t - 1:  # a branch begins: walk down to it again
                kept, decay, drafts = fresh_kept, fresh_decay, drafts * 0
                above = tl.sum(tl.where(i == t, path, 0), 0)
                for s in range(t):
                    if (above >> s) & 1 != 0:
                        step = pick(steps, s)
                        decay *= step
                        kept *= step[None, :]
                        drafts = tl.where((i == s)[:, None], pick(k_tile, s)[None, :], drafts * step[None, :])
        k, q, step = pick(k_tile, t), pick(q_tile, t), pick(steps, t)
        decay *= step
        kept *= step[None, :]
        drafts = tl.where(here, k[None, :], drafts * step[None, :])
        decays = tl.where(here, decay[None, :], decays)
        past_q = tl.where(here, tl.sum(kept * q[None, :], 1)[None, :], past_q)
        past_k = tl.where(here, tl.sum(kept * k[None, :], 1)[None, :], past_k)
        new_q = tl.where(here, tl.sum(drafts * q[None, :], 1)[None, :], new_q)
        new_k = tl.where(here, tl.sum(drafts * k[None, :], 1)[None, :], new_k)
    in_step = i < T
    token = out + i[:, None] * BLOCK
    tl.store(token + j[None, :], past_q, mask=in_step[:, None])
    tl.store(token + WP + j[None, :], past_k, mask=in_step[:, None])
    draft_mask = in_step[:, None] & in_step[None, :]
    tl.store(token + 2 * WP + i[None, :], new_q, mask=draft_mask)
    tl.store(token + 2 * WP + T + i[None, :], new_k, mask=draft_mask)
    tl.store(out + i * BLOCK + 2 * (WP + T) + 2, rate, mask=in_step)
    probe_at = probe[None, :] + i[:, None] * (2 * N)
    probe_mask = in_step[:, None] & n_mask[None, :]
    tl.store(probe_at, decays * q_tile, mask=probe_mask)
    tl.store(probe_at + N, decays * k_tile, mask=probe_mask)

    row = (start + records + i) % RING_ROWS
    STORE_RECORD(
        ring, slot, row[:, None], g, h, n[None, :], k_scale[:, None], log_step, rate[:, None], n_mask[None, :], live, N
    )
    if SOLVES:
        store_rates(rates, slot, row, h, rate, i < tokens)
    ring_at = keys[0] + slot * keys[1] + row[:, None] * keys[2] + g * keys[3] + n[None, :]
    tl.store(ring_at, raw_k, mask=tile_mask)
