"""Units of kernels/verify.py with tokens in the columns of products: steps, and folds.

`launch.in_columns` says which launches are made of these.

Tensor cores take each operand from the registers of certain lanes. What is summed over (key rows, ring rows) may come
in any order, and so may columns: here they come in the order in which lanes load them from memory, 16 bytes at a time,
so that states and codes go from memory to products without an exchange between lanes and without shared memory. For
that

- a tile begins with a dimension of 4 and one of 8, which become the lanes, and ends with what lies together in memory;
- columns of a state are the rows of a product and tokens its columns, of which 8 are the fewest;
- delta rules have a token's output and its correction in neighbouring columns, and so in the same lane.

The layouts are the compiler's choice: another one, or more than one warp, costs time and changes nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.kernels.exact import clamp, cut, split_dot
from replayssm.kernels.formats import first_keys, word_tile
from replayssm.kernels.plan import EMPTY, FOLD_START, FOLDED, HISTORY, POSITION, TOKENS
from replayssm.kernels.prefetch import earlier_done_unless
from replayssm.kernels.stochastic import draw, round_to_grid

FOLD_CHUNK = tl.constexpr(32)
"""Key rows that a fold takes at a time: all of them, and what it adds to them, are more than the registers hold."""


@triton.jit
def quad_rows(ROWS: tl.constexpr, IN_ORDER: tl.constexpr = False):
    """Row numbers [4, 1, ROWS / 16, 4] of a tile [4, C, ROWS / 16, 4], or of one with a further dimension.

    IN_ORDER: those that make `quads_left` and `quads_right`, if WIDE, have their rows in order. Otherwise each lane
    has four neighbours.
    """
    lane, rest = tl.arange(0, 4)[:, None, None, None], tl.arange(0, ROWS // 16)[None, None, :, None] * 16
    four = tl.arange(0, 4)[None, None, None, :]
    if IN_ORDER:
        return lane * 2 + rest + four % 2 + four // 2 * 8
    else:
        return lane * 4 + rest + four


@triton.jit
def quads_left(tile, WIDE: tl.constexpr):
    """A tile [4, 8, R, 4, J] of R x 16 rows and 8 x J columns as the left operand of a product [J x 8, R x 16].

    WIDE: whether a lane has two neighbours of the rows, as products with 16-bit operands take them, or one.
    """
    R: tl.constexpr = tile.shape[2]
    J: tl.constexpr = tile.shape[4]
    if WIDE:
        split = tl.permute(tl.reshape(tile, [4, 8, R, 2, 2, J]), [5, 1, 2, 3, 0, 4])
    else:
        split = tl.permute(tl.reshape(tile, [4, 8, R, 2, 2, J]), [5, 1, 2, 3, 4, 0])
    return tl.reshape(split, [J * 8, R * 16])


@triton.jit
def columns_last(matrix):
    """The tile [4, 8, R, 4, J] that `quads_left`, if WIDE, makes `matrix` of."""
    J: tl.constexpr = matrix.shape[0] // 8
    R: tl.constexpr = matrix.shape[1] // 16
    split = tl.permute(tl.reshape(matrix, [J, 8, R, 2, 4, 2]), [4, 1, 2, 3, 5, 0])
    return tl.reshape(split, [4, 8, R, 4, J])


@triton.jit
def quads_right(tile, WIDE: tl.constexpr):
    """A tile [4, C, R, 4] as the right operand [R x 16, C], rows in the order of `quads_left`."""
    C: tl.constexpr = tile.shape[1]
    R: tl.constexpr = tile.shape[2]
    if WIDE:
        split = tl.permute(tl.reshape(tile, [4, C, R, 2, 2]), [2, 3, 0, 4, 1])
    else:
        split = tl.permute(tl.reshape(tile, [4, C, R, 2, 2]), [2, 3, 4, 0, 1])
    return tl.reshape(split, [R * 16, C])


@triton.jit
def tf32_halves(x):
    """Two fp32 numbers that make x: its first 11 bits, rounded to nearest, and the rest, which has 12 bits at most."""
    high = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def dot_halves(a, b):
    """a @ b of an fp32 `a` and a `b` of 11 bits or fewer, in two products.

    Tensor cores cut a 12th bit off: of a term at most its last bit is wrong, in both directions alike
    (docs/numerics.md).
    """
    high, low = tf32_halves(a)
    return tl.dot(high, b, tl.dot(low, b, input_precision="tf32"), input_precision="tf32")


@triton.jit
def rows_dot(S, probe, live, N: tl.constexpr):
    """Products [J x 8, TP] of a state's columns [4, 8, NP / 16, 4, J] with probes, which `probe` [TP] points to."""
    NP: tl.constexpr = S.shape[2] * 16
    n = quad_rows(NP)
    taken = tl.load(probe[None, :, None, None] + n, mask=live[None, :, None, None] & (n < N), other=0)
    if taken.dtype == tl.float32:
        return tl.dot(quads_left(S.to(tl.float32), False), quads_right(taken, False), input_precision="tf32x3")
    else:
        return columns_dot(quads_left(S, True), quads_right(taken, True))


@triton.jit
def columns_dot(S, taken):
    """S @ taken of numbers of a state and of probes, products exact but for the last bit of fp32."""
    if taken.dtype == tl.float32:
        return tl.dot(S.to(tl.float32), taken, input_precision="tf32x3")
    elif S.dtype == taken.dtype:
        return tl.dot(S, taken)
    elif S.dtype == tl.float32:
        return dot_halves(S, taken.to(tl.float32))
    else:  # both have 11 bits or fewer
        return tl.dot(S.to(tl.float32), taken.to(tl.float32), input_precision="tf32")


@triton.jit
def probe_pointers(
    b, h, g, t_row, kind, query, key, probes,
    H: tl.constexpr, N: tl.constexpr, T: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr,
):  # fmt: skip
    """Pointers to the first element of what tokens `t_row` multiply states with: the query, or where `kind` the key."""
    if CHANNEL:
        at = probes + (((b * H + h) * T + t_row) * 2 + kind) * N
    else:
        at = query[0] + b * query[1] + t_row * query[2] + g * N
        if DELTA:
            at = tl.where(kind > 0, key[0] + b * key[1] + t_row * key[2] + g * N, at)
    return at


@triton.jit
def load_words(
    copy, slot, h, p, p_mask, N: tl.constexpr, P: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Words [D, 8, R / D, J] of columns `p` [1, 8, 1, J], and codes of their blocks' scales where there are such."""
    R: tl.constexpr = N // CODES
    D: tl.constexpr = min(4, R)
    d, rest = tl.arange(0, D)[:, None, None, None], tl.arange(0, R // D)[None, None, :, None]
    r = rest * D + d
    at = copy[0][0] + slot * copy[0][1] + h * (R * P)
    words = tl.load(at + r * P + p, mask=p_mask & (r >= 0), other=0, eviction_policy="evict_first")
    scales = 0
    if BLOCKS > 1:
        at = copy[2][0] + slot * copy[2][1] + h * (BLOCKS * P)
        if BLOCKS % D == 0:  # both words of a block are in the same lane
            half = tl.arange(0, BLOCKS // D)[None, None, :, None] * D + d
            scales = tl.load(at + half * P + p, mask=p_mask & (half >= 0), other=0).to(tl.int32)
            scales = tl.reshape(tl.permute(tl.join(scales, scales), [0, 1, 4, 2, 3]), words.shape)
        else:
            scales = tl.load(at + r % BLOCKS * P + p, mask=p_mask & (r >= 0), other=0).to(tl.int32)
    return words, scales


@triton.jit
def words_dot(
    words, scales, probe, live,
    N: tl.constexpr, TP: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr, FACTOR: tl.constexpr,
    VALUE: tl.constexpr, NATIVE: tl.constexpr, TILE: tl.constexpr, TILE_FACTOR: tl.constexpr,
):  # fmt: skip
    """Products [J x 8, TP] of words with probes, which `probe` [1, TP, 1, 1] points to where they are live.

    Scales of columns are not in them.
    """
    D: tl.constexpr = words.shape[0]
    J: tl.constexpr = words.shape[3]
    r = tl.arange(0, words.shape[2])[None, None, :, None] * D + tl.arange(0, D)[:, None, None, None]
    key = first_keys(r, N, CODES, BLOCKS) + tl.arange(0, CODES)[None, None, None, :]
    taken = tl.load(probe + key, mask=live & (key >= 0), other=0)
    taken = tl.reshape(tl.permute(taken, [2, 0, 3, 1]), [N, TP])
    codes = word_tile(words, scales, CODES, BLOCKS, FACTOR, VALUE, NATIVE, TILE)
    codes = tl.reshape(tl.permute(codes, [3, 1, 2, 0, 4]), [J * 8, N])
    if taken.dtype == tl.bfloat16:
        found = tl.dot(codes, taken)
    else:
        found = split_dot(codes, taken.to(tl.float32))
    return found * TILE_FACTOR if NATIVE else found


@triton.jit
def tokens_last(product, DELTA: tl.constexpr, MORE: tl.constexpr):
    """A product [J x 8, TP] as outputs and corrections, [4, 8, TH, J] each: token i + 4 k at [i, :, k].

    Without corrections the columns that delta rules keep them in are those of tokens from 4 on, if there are MORE.
    """
    J: tl.constexpr = product.shape[0] // 8
    TH: tl.constexpr = product.shape[1] // 8
    split = tl.reshape(product, [J, 8, TH, 4, 2])
    first, second = tl.split(tl.permute(split, [3, 1, 2, 0, 4]))
    if MORE and not DELTA:
        both = tl.permute(tl.join(first, second), [0, 1, 2, 4, 3])
        first = tl.reshape(both, [4, 8, TH * 2, J])
    return first, second


@triton.jit
def draft_units(
    b, first, slot, known, plan, state, state_slot, copy, writes, values, key, query, value, layer_params, weights,
    probes, y,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr,
    NP: tl.constexpr, TP: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
    UNITS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr, DELTA: tl.constexpr,
    CHANNEL: tl.constexpr, SKIP: tl.constexpr, TOKEN_SKIP: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr,
    FACTOR: tl.constexpr, VALUE: tl.constexpr, NATIVE: tl.constexpr, TILE: tl.constexpr, TILE_FACTOR: tl.constexpr,
    HAS_COPY: tl.constexpr,
):  # fmt: skip
    """Units first..first + UNITS - 1 of the live batch row b, whose row of the plan `plan` points to.

    `known` is not 0 where the weights are there already.
    """
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    # what counts rows is small, and 64-bit remainders are slow
    tokens, history = tl.load(plan + TOKENS).to(tl.int32), tl.load(plan + HISTORY).to(tl.int32)
    start, empty = tl.load(plan + FOLD_START).to(tl.int32), tl.load(plan + EMPTY) != 0
    state += slot * state_slot
    if STAGES > 1:
        earlier_done_unless(known, OVERLAP)  # a pipelined loop would load later units' weights before a wait in it
    for unit in tl.range(first, first + UNITS, num_stages=STAGES):
        h = unit // tiles
        draft_unit(
            b, h, h // (H // G), unit % tiles * BLOCK_P, slot, start, history, tokens, empty, known, state, copy,
            writes, values, key, query, value, layer_params, weights + (b * H + h) * (T * BLOCK), probes, y, H, N, P,
            T, RING_ROWS, NP, TP, WP, BLOCK, BLOCK_P, OVERLAP, DELTA, CHANNEL, SKIP, TOKEN_SKIP, CODES, BLOCKS,
            FACTOR, VALUE, NATIVE, TILE, TILE_FACTOR, HAS_COPY, STAGES == 1,
        )  # fmt: skip


@triton.jit
def draft_unit(
    b, h, g, first, slot, start, records, tokens, empty, known, state, copy, writes, values, key, query, value,
    layer_params, weight, probes, y,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr, NP: tl.constexpr,
    TP: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, SKIP: tl.constexpr, TOKEN_SKIP: tl.constexpr,
    CODES: tl.constexpr, BLOCKS: tl.constexpr, FACTOR: tl.constexpr, VALUE: tl.constexpr, NATIVE: tl.constexpr,
    TILE: tl.constexpr, TILE_FACTOR: tl.constexpr, HAS_COPY: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Outputs and write vectors of a row's tokens in BLOCK_P columns of one head, from column `first` on.

    `weight` points to the head's weights, `records` are the row's history. See `kernels.verify` for all other names.
    """
    J: tl.constexpr = BLOCK_P // 8
    MORE: tl.constexpr = T > 4
    scalars: tl.constexpr = (WP + T) * (2 if DELTA else 1)
    eight, together = tl.arange(0, 8), tl.arange(0, J)
    p = first + eight[None, :, None, None] * J + together[None, None, None, :]
    p_mask = p < P

    # what does not depend on the first launch
    if CODES > 0:
        words, scales = load_words(copy, slot, h, p, p_mask, N, P, CODES, BLOCKS)
        column = tl.load(copy[1][0] + slot * copy[1][1] + h * P + p, mask=p_mask, other=0)
    else:
        n = quad_rows(NP)[:, :, :, :, None]
        state_at = state + h * (N * P) + n * P + p[:, :, :, None, :]
        S = tl.load(state_at, mask=(n < N) & p_mask[:, :, :, None, :], other=0, eviction_policy="evict_first")
    j = quad_rows(WP)
    past = load_records(writes, slot, h, start, records, j[:, :, :, :, None], p, p_mask, RING_ROWS)
    if WAITS:
        earlier_done_unless(known, OVERLAP)

    c_token, kind = product_columns(TP, DELTA)
    c_live = c_token < (T if CHANNEL else tokens)
    probe = probe_pointers(b, h, g, c_token, kind, query, key, probes, H, N, T, DELTA, CHANNEL)
    if CODES > 0:
        found = words_dot(
            words, scales, probe[None, :, None, None], c_live[None, :, None, None],
            N, TP, CODES, BLOCKS, FACTOR, VALUE, NATIVE, TILE, TILE_FACTOR,
        )  # fmt: skip
    else:
        found = rows_dot(S, probe, c_live, N)
    out, answer = tokens_last(found, DELTA, MORE)
    taken = (weight + c_token * BLOCK + kind * WP)[None, :, None, None]
    taken = tl.load(taken + j, mask=(c_token < T)[None, :, None, None] & (j >= 0), other=0)
    if past.dtype == tl.bfloat16:
        found = split_dot(quads_left(past, True), quads_right(taken, True))
    else:
        found = tl.dot(quads_left(past.to(tl.float32), False), quads_right(taken, False), input_precision="tf32x3")
    past_out, past_answer = tokens_last(found, DELTA, MORE)

    t = tokens_of(out.shape[2])
    in_step = t < T
    token = weight + t * BLOCK + scalars
    if CODES > 0:
        out *= column
        answer *= column
    if not CHANNEL:
        out *= tl.load(token, mask=in_step, other=0)
        if DELTA:
            answer *= tl.load(token + 1, mask=in_step, other=0)
    out = tl.where(empty, 0.0, out) + past_out
    answer = tl.where(empty, 0.0, answer) + past_answer
    finish(
        b, h, slot, start + records, p, p_mask, tokens, out, answer, writes, values, value, layer_params, weight, y,
        P, T, RING_ROWS, WP, BLOCK, DELTA, SKIP, TOKEN_SKIP, HAS_COPY,
    )  # fmt: skip


@triton.jit
def load_records(ring, slot, h, start, records, j, p, p_mask, RING_ROWS: tl.constexpr):
    """Columns `p` [1, 8, 1, J] of the ring's records j [4, 1, R, 4, 1], zero beyond the first `records`."""
    row = start + j
    row -= tl.where(row >= RING_ROWS, RING_ROWS, 0)  # beyond the records it may need more, and nothing is read
    at = ring[0] + slot * ring[1] + row * ring[2] + h * ring[3] + p[:, :, :, None, :]
    return tl.load(at, mask=(j < records) & p_mask[:, :, :, None, :], other=0, eviction_policy="evict_first")


@triton.jit
def product_columns(TP: tl.constexpr, DELTA: tl.constexpr):
    """(tokens, kinds) [TP] of the columns of a product, in the order of `tokens_last`. Kind 1 is a correction."""
    c = tl.arange(0, TP)
    if DELTA:
        return c // 8 * 4 + c % 8 // 2, c % 2
    else:
        return c // 8 * 8 + c % 2 * 4 + c % 8 // 2, c * 0


@triton.jit
def tokens_of(TH: tl.constexpr):
    """Tokens [4, 1, TH, 1] of what `tokens_last` returns."""
    return tl.arange(0, 4)[:, None, None, None] + 4 * tl.arange(0, TH)[None, None, :, None]


@triton.jit
def finish(
    b, h, slot, ring_start, p, p_mask, tokens, out, answer, writes, values, value, layer_params, weight, y,
    P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr,
    DELTA: tl.constexpr, SKIP: tl.constexpr, TOKEN_SKIP: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    """From what tokens take from the state and the ring, `out` and `answer` [4, 8, TH, J], to outputs and records."""
    scalars: tl.constexpr = (WP + T) * (2 if DELTA else 1)
    drafts: tl.constexpr = (2 if DELTA else 1) * WP
    t = tokens_of(out.shape[2])
    token = weight + t * BLOCK
    in_step, live = t < T, t < tokens
    v_at = value[0] + b * value[1] + h * P + p
    v = tl.load(v_at + t * value[2], mask=live & p_mask, other=0)
    if SKIP:
        out += TOKEN_SKIP(layer_params, h) * v.to(tl.float32)
    if DELTA:
        rate = tl.load(token + scalars + 2, mask=in_step, other=0)
        u = (v.to(tl.float32) - answer) * rate
        for s in tl.static_range(T):  # forward substitution
            known = tl.sum(tl.sum(tl.where(t == s, u, 0.0), 2), 0)[None, :, None, :]
            to_k = tl.load(token + drafts + T + s, mask=in_step & (t > s), other=0)
            u -= to_k * rate * known
            out += tl.load(token + drafts + s, mask=in_step & (t >= s), other=0) * known
        kept = u
    else:
        for s in tl.static_range(T):
            to_q = tl.load(token + drafts + s, mask=in_step & (t >= s), other=0)
            draft = tl.load(v_at + t * 0 + s * value[2], mask=(s < tokens) & p_mask & in_step, other=0)
            out += to_q * tl.load(weight + s * BLOCK + scalars + 2) * draft.to(tl.float32)
        kept = v

    rounded = tl.where(live, out, 0.0).to(y[0].dtype.element_ty)
    y_at = y[0] + b * y[1] + t * y[2] + h * P + p
    tl.store(y_at, rounded, mask=in_step & p_mask, eviction_policy="evict_last")
    rows = (ring_start + t) % RING_ROWS
    append(writes, slot, h, rows, p, kept, live & p_mask)
    if HAS_COPY and DELTA:
        append(values, slot, h, rows, p, v, live & p_mask)


@triton.jit
def left_parts_dot(a, b):
    """a @ b of an fp32 `a` and an operand from the model, exact to fp32."""
    if b.dtype == tl.bfloat16:
        high, rest = cut(a)
        middle, rest = cut(rest)
        low, _ = cut(rest)
        return tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b)))
    else:
        return tl.dot(a, b.to(tl.float32), input_precision="tf32x3")


@triton.jit
def fold_units(
    b, first, last, slot, plan, state, state_slot, keys, writes, values, key, query, value, layer_params, weights,
    probes, solves, y, saturated, seeds, layer,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr,
    NP: tl.constexpr, TP: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
    LIMIT: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr, TOKEN_SKIP: tl.constexpr, HAS_COPY: tl.constexpr,
    RANDOM: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Units first..last - 1 of the row b, which is due: their records are folded, and what tokens take is the result's.

    Of states with one decay per head that are numbers. As in `draft_units`, with key rows in order and as the columns
    of products: what a fold leaves then lies where the next product takes it from.
    """
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    tokens, folded = tl.load(plan + TOKENS).to(tl.int32), tl.load(plan + FOLDED).to(tl.int32)
    start, empty = tl.load(plan + FOLD_START).to(tl.int32), tl.load(plan + EMPTY) != 0
    held = tl.load(plan + POSITION) - tl.load(plan + HISTORY)
    state += slot * state_slot
    for unit in tl.range(first, last, num_stages=1):
        h = unit // tiles
        fold_unit(
            b, h, h // (H // G), unit % tiles * BLOCK_P, slot, start, folded, tokens, empty, held, state, keys, writes,
            values, key, query, value, layer_params, weights + (b * H + h) * (T * BLOCK), probes,
            solves + (b * H + h) * ((WP + 1) * WP), y, saturated + slot, seeds, layer, H, N, P, T, RING_ROWS, NP, TP,
            WP, BLOCK, BLOCK_P, LIMIT, DELTA, SKIP, TOKEN_SKIP, HAS_COPY, RANDOM, MANTISSA, LEAST,
        )  # fmt: skip


@triton.jit
def fold_unit(
    b, h, g, first, slot, start, folded, tokens, empty, held, state, keys, writes, values, key, query, value,
    layer_params, weight, probes, solve, y, saturated, seeds, layer,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr, NP: tl.constexpr,
    TP: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, LIMIT: tl.constexpr,
    DELTA: tl.constexpr, SKIP: tl.constexpr, TOKEN_SKIP: tl.constexpr, HAS_COPY: tl.constexpr, RANDOM: tl.constexpr,
    MANTISSA: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """BLOCK_P columns of one head, from column `first` on; `held` are the tokens in the new checkpoint."""
    J: tl.constexpr = BLOCK_P // 8
    solved: tl.constexpr = HAS_COPY and DELTA
    scalars: tl.constexpr = (WP + T) * (2 if DELTA else 1)
    p = first + tl.arange(0, 8)[None, :, None, None] * J + tl.arange(0, J)[None, None, None, :]
    p_mask = p < P
    CHUNK: tl.constexpr = min(NP, FOLD_CHUNK)
    j = tl.arange(0, WP)
    records = quad_rows(WP, True)[:, :, :, :, None]
    past = load_records(values if solved else writes, slot, h, start, folded, records, p, p_mask, RING_ROWS)
    past = quads_left(past.to(tl.float32), True)
    key_rows = keys[0] + slot * keys[1] + ((start + j) % RING_ROWS)[:, None] * keys[2] + g * keys[3]
    if solved:
        n, rows = tl.arange(0, CHUNK), quad_rows(CHUNK, True)
        head = state + h * (N * P) + p[:, :, :, None, :]
        answer = tl.zeros([BLOCK_P, WP], tl.float32)
        for at in tl.range(0, NP, CHUNK, num_stages=1):
            raw_keys = tl.load(key_rows + at + n[None, :], mask=(j < folded)[:, None] & (at + n < N)[None, :], other=0)
            row = at + rows[:, :, :, :, None]
            S = tl.load(head + row * P, mask=(row < N) & p_mask[:, :, :, None, :] & (not empty), other=0)
            answer += left_parts_dot(quads_left(S.to(tl.float32), True), tl.trans(raw_keys))
        matrix = tl.load(solve + j[None, :] * WP + j[:, None])
        answer = past - answer * tl.load(solve + WP * WP + j)[None, :]
        past = tl.dot(answer, matrix, input_precision="tf32x3")
    weighted = past * tl.load(weight + j)[None, :]
    c_token, kind = product_columns(TP, DELTA)
    probe = probe_pointers(b, h, g, c_token, kind, query, key, probes, H, N, T, DELTA, False)
    found = fold_columns(
        state + h * (N * P), first, key_rows, folded, weighted, tl.load(weight + scalars + 3),
        tl.load(weight + scalars + 4), probe, c_token < tokens, empty, saturated, seeds, slot, layer, held, h, N, P, NP,
        LIMIT, RANDOM, MANTISSA, LEAST,
    )  # fmt: skip
    out, answer = tokens_last(found, DELTA, T > 4)
    t = tokens_of(out.shape[2])
    token = weight + t * BLOCK + scalars
    out *= tl.load(token, mask=t < T, other=0)
    if DELTA:
        answer *= tl.load(token + 1, mask=t < T, other=0)
    finish(
        b, h, slot, start + folded, p, p_mask, tokens, out, answer, writes, values, value, layer_params, weight, y,
        P, T, RING_ROWS, WP, BLOCK, DELTA, SKIP, TOKEN_SKIP, HAS_COPY,
    )  # fmt: skip


@triton.jit
def fold_columns(
    head, first, key_rows, folded, weighted, high, low, probe, live, empty, saturated, seeds, slot, layer, held, h,
    N: tl.constexpr, P: tl.constexpr, NP: tl.constexpr, LIMIT: tl.constexpr, RANDOM: tl.constexpr,
    MANTISSA: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Fold into a head's columns from `first` on, as many as `weighted` [columns, WP] has; products with the result.

    `weighted` are the write vectors of the first `folded` of the raw keys that `key_rows` [WP, 1] points to, times
    their weights; the decay of the state is high + low. The products [columns, TP] are with what `probe` [TP] points
    to, where `live`. `held` are the tokens in the new checkpoint.
    """
    COLUMNS: tl.constexpr = weighted.shape[0]
    J: tl.constexpr = COLUMNS // 8
    CHUNK: tl.constexpr = min(NP, FOLD_CHUNK)
    p = first + tl.arange(0, 8)[None, :, None, None] * J + tl.arange(0, J)[None, None, None, :]
    found = tl.zeros([COLUMNS, probe.shape[0]], tl.float32)
    for at in tl.range(0, NP, CHUNK, num_stages=1):
        S = fold_tile(head, at, p, empty, N, P, CHUNK)
        found += fold_rows(
            S, head, at, first, p, key_rows, folded, weighted, high, low, probe, live, saturated, seeds, slot, layer,
            held, h, N, P, CHUNK, LIMIT, RANDOM, MANTISSA, LEAST,
        )  # fmt: skip
    return found


@triton.jit
def fold_tiles(
    tiles, head, first, key_rows, folded, weighted, high, low, probe, live, saturated, seeds, slot, layer, held, h,
    N: tl.constexpr, P: tl.constexpr, LIMIT: tl.constexpr, RANDOM: tl.constexpr, MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """The same with a state that has been loaded, as one of `fold_tile` after the other."""
    CHUNK: tl.constexpr = tiles[0].shape[2] * 16
    COLUMNS: tl.constexpr = weighted.shape[0]
    J: tl.constexpr = COLUMNS // 8
    p = first + tl.arange(0, 8)[None, :, None, None] * J + tl.arange(0, J)[None, None, None, :]
    found = tl.zeros([COLUMNS, probe.shape[0]], tl.float32)
    for part in tl.static_range(len(tiles)):
        found += fold_rows(
            tiles[part], head, part * CHUNK, first, p, key_rows, folded, weighted, high, low, probe, live, saturated,
            seeds, slot, layer, held, h, N, P, CHUNK, LIMIT, RANDOM, MANTISSA, LEAST,
        )  # fmt: skip
    return found


@triton.jit
def fold_tile(head, at, p, empty, N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr):
    """Key rows at..at + CHUNK - 1 of columns `p` of a head's state, zero where that is empty."""
    row = quad_rows(CHUNK, True)[:, :, :, :, None] + at
    mask = (row < N) & (p < P)[:, :, :, None, :] & (not empty)
    return tl.load(head + p[:, :, :, None, :] + row * P, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def fold_rows(
    S, head, at, first, p, key_rows, folded, weighted, high, low, probe, live, saturated, seeds, slot, layer, held, h,
    N: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, LIMIT: tl.constexpr, RANDOM: tl.constexpr,
    MANTISSA: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Fold into the rows of `fold_tile` and store them; their products with the probes."""
    COLUMNS: tl.constexpr = weighted.shape[0]
    J: tl.constexpr = COLUMNS // 8
    j, c, n = tl.arange(0, weighted.shape[1]), tl.arange(0, COLUMNS), tl.arange(0, CHUNK) + at
    rows = quad_rows(CHUNK, True) + at
    S = quads_left(S.to(tl.float32), True)
    raw_keys = tl.load(key_rows + n[None, :], mask=(j < folded)[:, None] & (n < N)[None, :], other=0)
    S = high * S + (low * S + left_parts_dot(weighted, raw_keys))
    if LIMIT > 0:
        S = clamp(S, saturated, LIMIT, True)
    if RANDOM:
        noise = draw(seeds, slot, layer, held, h, at, first + c % 8 * J + c // 8, N, P, CHUNK)
        S = round_to_grid(S, tl.trans(noise), MANTISSA, LEAST)
    rounded = S.to(head.dtype.element_ty)
    row = rows[:, :, :, :, None]
    store_at, mask = head + p[:, :, :, None, :] + row * P, (row < N) & (p < P)[:, :, :, None, :]
    tl.store(store_at, columns_last(rounded), mask=mask, eviction_policy="evict_last")
    probe_mask = live[None, :, None, None] & (rows < N)
    taken = quads_right(tl.load(probe[None, :, None, None] + rows, mask=probe_mask, other=0), True)
    return columns_dot(rounded, taken)


@triton.jit
def append(ring, slot, h, row, p, x, mask):
    """Put `x` into columns p of ring row(s) `row`."""
    at = ring[0] + slot * ring[1] + row * ring[2] + h * ring[3] + p
    tl.store(at, x.to(ring[0].dtype.element_ty), mask=mask, eviction_policy="evict_last")
