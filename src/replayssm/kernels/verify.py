"""The second launch of a `verify`, decode and drafts alike: one pass over the states, the flush fused for due rows.

A unit of work is BLOCK_P columns of one head's state: every column is independent of the others, corrections included.
With the weights of the first launch (kernels/prepare.py) an output is a few weighted sums; the state is read once, for
two probes (q and k), and written back only where the row is due. Where one launch takes all rows, those fold in columns
(kernels/drafts.py) if the state can: that takes no more registers than a step.

With a read copy, rows that are not due never see the checkpoint: the copy's words stand in its place, as those of an
fp8 checkpoint do for the numbers that they mean. Rows that are due fold into the checkpoint, which is what their
outputs then read; their copies are rounded from what the fold has stored, when all its registers are free again. Delta
rules beside a read copy solve the window again for a fold (kernels/solve.py), because the ring's write vectors were
corrected against the old copy.

A state or a ring row is read once in a step, what is written is read soon: the eviction hints keep the former from
pushing the latter out of the L2 before its lines are full (measured in docs/experiments.md).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.kernels.drafts import append, draft_units, fold_units
from replayssm.kernels.exact import (
    channel_answers,
    channel_keys,
    clamp,
    fold_channel,
    fold_head,
    nearest,
    solved_writes,
    state_dot,
)
from replayssm.kernels.formats import (
    block_scale,
    column_scales,
    copy_at,
    pair_sums,
    round_copy,
    scaled_codes,
    state_rows,
    word_sums,
)
from replayssm.kernels.plan import (
    DUE_COUNT,
    EMPTY,
    FOLD_START,
    FOLDED,
    HISTORY,
    ORDER,
    POSITION,
    SLOT,
    TOKENS,
    row_in_turn,
)
from replayssm.kernels.prefetch import earlier_done, earlier_done_unless
from replayssm.kernels.stochastic import draw, round_to_grid

# which rows a launch takes: all of them, in turn; those that are not due; those that are, from the plan's order
ALL_ROWS, STEP_ROWS, FLUSH_ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["layer"])
def verify_kernel(
    plan_row, plan, state, state_slot, state_scale, copy, keys, writes, values, ring, key, query, value, layer_params,
    weights, probes, solves, y, saturated, seeds, layer,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr,
    NP: tl.constexpr, TP: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr, IN_COLUMNS: tl.constexpr,
    BLOCK_P: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr, LIMIT: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, SKIP: tl.constexpr, OVERLAP: tl.constexpr,
    FOLDS_FIRST: tl.constexpr, RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_SKIP: tl.constexpr,
    CODES: tl.constexpr, BLOCKS: tl.constexpr, FACTOR: tl.constexpr, VALUE: tl.constexpr, NATIVE: tl.constexpr,
    TILE: tl.constexpr, TILE_FACTOR: tl.constexpr, ROWS: tl.constexpr, PROBE_BITS: tl.constexpr, CODE: tl.constexpr,
    LARGEST_CODE: tl.constexpr, SCALED: tl.constexpr, HAS_COPY: tl.constexpr, RANDOM: tl.constexpr,
    MANTISSA: tl.constexpr, LEAST: tl.constexpr, FOLD_TP: tl.constexpr,
):  # fmt: skip
    """See the module. Shapes: B rows, T tokens, H heads, G key heads, N key dim, P value dim; padded NP, TP, WP.

    | argument | shape                | in/out | meaning                                                        |
    |----------|----------------------|--------|----------------------------------------------------------------|
    | plan     | [B, columns] int64   | in     | `state.plan.COLUMNS`; rows lie `plan_row` apart                |
    | state    | [slots, H, N, P]     | in/out | checkpoint; written where rows fold. Of fp8 the words          |
    | state_scale | [slots, H, P] fp32 | in/out | of fp8 the scales: (pointer, slot stride)                     |
    | copy     | tuple                | in/out | parts of what steps read words of: (pointer, slot stride) each |
    | keys     | [slots, rows, G, N]  | in     | ring of raw keys: (pointer, slot, row and head stride)         |
    | writes   | [slots, rows, H, P]  | in/out | ring of write vectors (delta rules) or raw values              |
    | values   | [slots, rows, H, P]  | in/out | ring of raw values, which folds solve again; else `writes`     |
    | ring     | tuple of such        | in     | the recurrence's other ring fields                             |
    | key, query | [B, T, G, N]       | in     | this step's raw tokens: (pointer, row stride, token stride)    |
    | value    | [B, T, H, P]         | in     | the same                                                       |
    | layer_params | tuple of pointers | in    | per-layer constants                                            |
    | weights, probes, solves | see prepare.py, solve.py | in | of the launches before                          |
    | y        | [B, T, H, P]         | out    | outputs, zero beyond each row's tokens                         |
    | saturated | [slots] int64       | in/out | counts elements beyond LIMIT, where that is not 0              |
    | seeds    | [slots] int64        | in     | of the random numbers, when RANDOM: (pointer, stride)          |
    | layer    | int                  | in     | number of the layer in its pool, for the same                  |

    FOLD_TP are the columns of products of a fold in columns within a launch of all rows, 0 where folds are in rows.
    """
    parts: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P * H // UNITS
    pid = tl.program_id(0)
    # the plan is older than the first launch, which has let the others start after all before it had ended
    due = tl.load(plan + DUE_COUNT).to(tl.int32)
    if MODE == FLUSH_ROWS:
        if OVERLAP and FOLDS_FIRST:
            if due == 0:
                gdc_launch_dependents()  # nobody here needs anything
            if (due > 0) | (pid == 0):  # whoever waits for this launch counts on those before it having ended as well
                gdc_wait()
        if OVERLAP:
            gdc_launch_dependents()
        # few rows are due in a step, and only the device knows which: a fixed grid walks through their units, a few at
        # a time, and as many in each program
        units: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P * H
        share = tl.maximum(1, tl.cdiv(due * units, tl.num_programs(0)))
        count = tl.cdiv(share, tl.cdiv(share, UNITS))
        chunks = tl.cdiv(units, count)
        for item in range(pid, due * chunks, tl.num_programs(0)):
            b = tl.load(plan + item // chunks * plan_row + ORDER)
            row = plan + b * plan_row
            first = item % chunks * count
            last = tl.minimum(first + count, units)
            slot = tl.load(row + SLOT)
            if IN_COLUMNS:
                fold_units(
                    b, first, last, slot, row, state, state_slot, keys, writes, values, key, query, value, layer_params,
                    weights, probes, solves, y, saturated, seeds, layer, H, G, N, P, T, RING_ROWS, NP, TP, WP, BLOCK,
                    BLOCK_P, LIMIT, DELTA, SKIP, TOKEN_SKIP, HAS_COPY, RANDOM, MANTISSA, LEAST,
                )  # fmt: skip
            else:
                verify_units(
                    b, first, last, slot, tl.load(row + FOLDED), due, row, state,
                    state_slot, state_scale, copy, keys, writes, values, ring, key, query, value, layer_params, weights,
                    probes, solves, y, saturated, seeds, layer, H, G, N, P, T, RING_ROWS, NP, TP, WP, BLOCK, BLOCK_P,
                    STAGES, MODE, LIMIT, DELTA, CHANNEL, SKIP, False, RECORD_SCALES, RECORD_DECAY, TOKEN_SKIP,
                    CODES, BLOCKS, FACTOR, VALUE, NATIVE, ROWS, PROBE_BITS, SCALED, HAS_COPY, RANDOM, MANTISSA, LEAST,
                )  # fmt: skip
            if HAS_COPY:
                tl.debug_barrier()  # what other threads have stored is read, from here on also ahead
                # one warp has room for all codes of 16 columns
                columns: tl.constexpr = min(BLOCK_P, 16) if IN_COLUMNS else BLOCK_P
                shares: tl.constexpr = units // H * (BLOCK_P // columns)
                for item in tl.range(first * shares * H // units, last * shares * H // units, num_stages=STAGES):
                    h = item // shares
                    head = state + slot * state_slot + h * ((N // 4 if SCALED else N) * P)
                    p = item % shares * columns + tl.arange(0, columns)
                    round_copy(
                        head, state_scale, copy, slot, h, p, saturated, N, P, SCALED, CODES, BLOCKS, CODE, LARGEST_CODE
                    )
    else:
        # flushes that come first let this launch start when they may themselves
        known = tl.where(MODE == STEP_ROWS and FOLDS_FIRST, due, 0)
        if MODE == ALL_ROWS:
            b = row_in_turn(plan, plan_row, pid // parts, tl.num_programs(0) // parts, due, UNITS > 1)
        else:
            b = (pid // parts).to(tl.int64)
        row = plan + b * plan_row
        slot = tl.load(row + SLOT)
        folded = tl.load(row + FOLDED)
        if slot < 0:
            zero_units(b, pid % parts, y, P, T, BLOCK_P, UNITS)
        elif FOLD_TP > 0 and folded > 0:
            earlier_done(OVERLAP)
            fold_units(
                b, pid % parts * UNITS, pid % parts * UNITS + UNITS, slot, row, state, state_slot, keys, writes, values,
                key, query, value, layer_params, weights, probes, solves, y, saturated, seeds, layer, H, G, N, P, T,
                RING_ROWS, NP, FOLD_TP, WP, BLOCK, BLOCK_P, LIMIT, DELTA, SKIP, TOKEN_SKIP, HAS_COPY, RANDOM,
                MANTISSA, LEAST,
            )  # fmt: skip
        elif IN_COLUMNS:
            if folded == 0:
                draft_units(
                    b, pid % parts * UNITS, slot, known, row, state, state_slot, copy, writes, values, key, query,
                    value, layer_params, weights, probes, y, H, G, N, P, T, RING_ROWS, NP, TP, WP, BLOCK, BLOCK_P,
                    UNITS, STAGES, OVERLAP, DELTA, CHANNEL, SKIP, TOKEN_SKIP, CODES, BLOCKS,
                    FACTOR, VALUE, NATIVE, TILE, TILE_FACTOR, HAS_COPY,
                )  # fmt: skip
        elif MODE == ALL_ROWS or folded == 0:
            verify_units(
                b, pid % parts * UNITS, pid % parts * UNITS + UNITS, slot, folded, known, row, state, state_slot,
                state_scale, copy, keys, writes, values, ring, key, query, value, layer_params, weights, probes, solves,
                y, saturated, seeds, layer, H, G, N, P, T, RING_ROWS, NP, TP, WP, BLOCK, BLOCK_P, STAGES,
                STEP_ROWS if FOLD_TP > 0 else MODE, LIMIT, DELTA, CHANNEL, SKIP, OVERLAP, RECORD_SCALES, RECORD_DECAY,
                TOKEN_SKIP, CODES, BLOCKS, FACTOR, VALUE, NATIVE, ROWS, PROBE_BITS, SCALED, HAS_COPY, RANDOM, MANTISSA,
                LEAST,
            )  # fmt: skip
        if MODE == ALL_ROWS or not FOLDS_FIRST:
            earlier_done(OVERLAP)  # also where nothing needed it
        elif OVERLAP:  # noqa: SIM102 (what is constant, and what is not)
            if pid == tl.num_programs(0) - 1:  # one program that waits for the flushes is enough, and late it is short
                gdc_wait()
    if MODE == FLUSH_ROWS and OVERLAP and not FOLDS_FIRST:
        # whoever waits for this launch counts on the one before it having ended as well
        gdc_wait()


@triton.jit
def zero_units(
    b, part, y, P: tl.constexpr, T: tl.constexpr, BLOCK_P: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """The outputs of a padded row."""
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    for t in tl.static_range(T):
        for i in range(UNITS):
            unit = part * UNITS + i
            p = unit_columns(unit, P, BLOCK_P)
            at = y[0] + b * y[1] + t * y[2] + unit // tiles * P + p
            tl.store(at, tl.zeros([BLOCK_P], tl.float32).to(y[0].dtype.element_ty), mask=p < P)


@triton.jit
def verify_units(
    b, first, last, slot, folded, known,
    plan, state, state_slot, state_scale, copy, keys, writes, values, ring, key, query, value, layer_params, weights,
    probes, solves, y, saturated, seeds, layer,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr,
    NP: tl.constexpr, TP: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr, LIMIT: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, SKIP: tl.constexpr, OVERLAP: tl.constexpr,
    RECORD_SCALES: tl.constexpr, RECORD_DECAY: tl.constexpr, TOKEN_SKIP: tl.constexpr,
    CODES: tl.constexpr, BLOCKS: tl.constexpr, FACTOR: tl.constexpr, VALUE: tl.constexpr, NATIVE: tl.constexpr,
    ROWS: tl.constexpr, PROBE_BITS: tl.constexpr, SCALED: tl.constexpr, HAS_COPY: tl.constexpr, RANDOM: tl.constexpr,
    MANTISSA: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Units first..last - 1 of the live batch row b, whose row of the plan `plan` points to.

    `known` is not 0 where the weights are there already.
    """
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    scalars: tl.constexpr = (WP + T) * (2 if DELTA else 1)
    # only shapes that do not fill their tiles pay for masks
    ragged: tl.constexpr = NP != N or P % BLOCK_P != 0
    n, j = tl.arange(0, NP), tl.arange(0, WP)
    n_mask = n < N
    # what counts rows is small, and 64-bit remainders are slow
    folded = folded.to(tl.int32)
    tokens = tl.load(plan + TOKENS).to(tl.int32)
    start = tl.load(plan + FOLD_START).to(tl.int32)
    history = tl.load(plan + HISTORY).to(tl.int32)
    empty = tl.load(plan + EMPTY) != 0
    # a due row has records to fold and no history, any other row the reverse: one set of rows serves both
    records = folded + history
    ring_rows = (start + j) % RING_ROWS
    state += slot * state_slot
    # what the ring's rows brought: to outputs their write vectors, to a fold that solves them again their values
    solved: tl.constexpr = MODE == FLUSH_ROWS and HAS_COPY and DELTA
    past_ring = values if solved else writes
    past_at = past_ring[0] + slot * past_ring[1] + ring_rows[:, None] * past_ring[2]
    words: tl.constexpr = MODE == STEP_ROWS and CODES > 0

    if STAGES > 1:
        earlier_done_unless(known, OVERLAP)  # a pipelined loop would load later units' weights before a wait in it
    for unit in tl.range(first, last, num_stages=STAGES):
        h = unit // tiles
        g = h // (H // G)
        p = unit_columns(unit, P, BLOCK_P)
        p_mask = p < P
        head = state + h * ((N // 4 if SCALED else N) * P)
        state_at = head + n[:, None] * P + p[None, :]
        column, scales = 1.0, 1.0
        if words:
            S, scales, column = load_copy(copy, slot, h, p, N, P, ROWS, CODES, BLOCKS)
        elif SCALED:
            column = column_scales(state_scale, slot, h, p, P, SCALED)
            S = tl.where(empty, 0.0, state_rows(head, column, n, p, p_mask[None, :], P, SCALED))
        elif ragged:
            state_mask = n_mask[:, None] & p_mask[None, :]
            S = tl.load(state_at, mask=state_mask & (not empty), other=0, eviction_policy="evict_first")
        elif MODE == STEP_ROWS:
            S = tl.load(state_at, eviction_policy="evict_first")  # whatever an empty checkpoint holds is dropped below
        else:
            S = tl.load(state_at, mask=not empty, other=0, eviction_policy="evict_first")
        if not words:
            S = S.to(tl.float32)
        if words:
            past = load_past(past_ring, slot, h, start, records, p, P, RING_ROWS, WP, ROWS)
        else:
            past_mask = (j < records)[:, None]
            if ragged:
                past_mask &= p_mask[None, :]
            past_from = past_at + h * past_ring[3] + p[None, :]
            past = tl.load(past_from, mask=past_mask, other=0, eviction_policy="evict_first").to(tl.float32)
        if STAGES == 1:
            earlier_done_unless(known, OVERLAP)
        weight = weights + (b * H + h) * (T * BLOCK)
        solve = solves + (b * H + h) * ((WP + 1) * WP)

        if MODE == FLUSH_ROWS or (MODE == ALL_ROWS and folded > 0):
            if CHANNEL:
                if solved:
                    answer = channel_answers(
                        head, column, keys, ring, layer_params, slot, start, folded, empty, g, h, p,
                        N, P, NP, WP, RING_ROWS, SCALED, RECORD_SCALES, RECORD_DECAY,
                    )  # fmt: skip
                    past = solved_writes(answer, past, solve, WP)
                scaled, log_decay = channel_keys(
                    keys, ring, layer_params, slot, start, folded, g, h, n, n_mask,
                    N, WP, RING_ROWS, RECORD_SCALES, RECORD_DECAY,
                )  # fmt: skip
                S = fold_channel(S, scaled, past, log_decay)
            else:
                keys_at = keys[0] + slot * keys[1] + ring_rows[None, :] * keys[2] + g * keys[3] + n[:, None]
                keys_mask = (j < folded)[None, :]
                if NP != N:
                    keys_mask &= n_mask[:, None]
                raw_keys = tl.load(keys_at, mask=keys_mask, other=0)
                if solved:
                    answer = state_dot(tl.trans(raw_keys), S) * tl.load(solve + WP * WP + j)[:, None]
                    past = solved_writes(answer, past, solve, WP)
                weighted = tl.load(weight + j)[:, None] * past
                S = fold_head(S, raw_keys, weighted, tl.load(weight + scalars + 3), tl.load(weight + scalars + 4))
            if LIMIT > 0:
                S = clamp(S, saturated + slot, LIMIT, True)
            noise = 0
            if RANDOM:
                held = tl.load(plan + POSITION) - history
                noise = draw(seeds, slot, layer, held, h, 0, p, N, P, NP)
            if SCALED:
                codes, column, S = scaled_codes(S, noise, RANDOM, MANTISSA, LEAST)
                words_at = head + tl.arange(0, N // 4)[:, None] * P + p[None, :]
                tl.store(words_at, codes, mask=p_mask[None, :], eviction_policy="evict_last")
                tl.store(state_scale[0] + slot * state_scale[1] + h * P + p, column, mask=p_mask)
            else:
                if RANDOM:
                    S = round_to_grid(S, noise, MANTISSA, LEAST)
                rounded, S = nearest(S, state.dtype.element_ty, NATIVE)
                if ragged:
                    tl.store(state_at, rounded, mask=state_mask, eviction_policy="evict_last")
                else:
                    tl.store(state_at, rounded, eviction_policy="evict_last")

        if T == 1:
            one_token(
                b, h, g, p, n, S, scales, column, past, tokens, empty, (start + records) % RING_ROWS,
                j < history, slot, writes, values, key, query, value, layer_params, weight, probes, y, H, G, N, P,
                NP, WP, MODE, DELTA, CHANNEL, SKIP, TOKEN_SKIP, CODES, BLOCKS, FACTOR, VALUE, NATIVE, PROBE_BITS,
                HAS_COPY,
            )  # fmt: skip
        else:
            several_tokens(
                b, h, g, p, n, S, past, tokens, empty, start + records, j < history, slot, writes, values, key, query,
                value, layer_params, weight, probes, y, H, N, P, T, RING_ROWS, TP, WP, BLOCK, MODE, DELTA, CHANNEL,
                SKIP, TOKEN_SKIP, HAS_COPY,
            )  # fmt: skip


@triton.jit
def unit_columns(unit, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Columns of a unit."""
    return unit % ((P + BLOCK_P - 1) // BLOCK_P) * BLOCK_P + tl.arange(0, BLOCK_P)


@triton.jit
def one_token(
    b, h, g, p, n, S, scales, column, past, tokens, empty, ring_row, shown, slot, writes, values, key, query, value,
    layer_params, weight, probes, y,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr,
    MODE: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr, SKIP: tl.constexpr, TOKEN_SKIP: tl.constexpr,
    CODES: tl.constexpr, BLOCKS: tl.constexpr, FACTOR: tl.constexpr, VALUE: tl.constexpr, NATIVE: tl.constexpr,
    PROBE_BITS: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    """Output and write vector of a unit's only token, on one or two weighted sums over columns of S and of `past`.

    Beside a read copy both are tuples of tiles of a few rows, and the sums over rows come last.
    """
    words: tl.constexpr = CODES > 0 and MODE == STEP_ROWS
    scalars: tl.constexpr = (WP + 1) * (2 if DELTA else 1)
    j = tl.arange(0, WP)
    live = tokens > 0
    probe_mask = n < N
    value_mask = p < P
    if not CHANNEL:
        probe_mask &= live
    v = tl.load(value[0] + b * value[1] + h * P + p, mask=value_mask & live, other=0)
    # with a decay per channel probes hold the weights of the state, else they are raw and shared by a group
    if CHANNEL:
        q_at = probes + (b * H + h) * (2 * N)
        k_at = q_at + N
    else:
        q_at = query[0] + b * query[1] + g * N
        k_at = key[0] + b * key[1] + g * N
    if words and PROBE_BITS > 0:
        q_at = (probes + (b * G + g) * N).to(tl.pointer_type(tl.int64))
        out, answer = pair_sums(S, scales, column, q_at, q_at + N // 4, N, CODES, BLOCKS, VALUE, DELTA)
    elif words:
        probe_live = live | CHANNEL
        out, answer = word_sums(
            S, scales, column, q_at, k_at, probe_live, N, CODES, BLOCKS, VALUE, FACTOR, NATIVE, DELTA
        )
    else:
        out = tl.sum(S * tl.load(q_at + n, mask=probe_mask, other=0).to(tl.float32)[:, None], 0)
        if DELTA:
            answer = tl.sum(S * tl.load(k_at + n, mask=probe_mask, other=0).to(tl.float32)[:, None], 0)
    if not CHANNEL:
        out *= tl.load(weight + scalars)
    if MODE == STEP_ROWS:
        out = tl.where(empty, 0.0, out)
    if words:
        out = add_past(out, past, weight)
    elif MODE != FLUSH_ROWS:
        out += tl.sum(tl.load(weight + j, mask=shown, other=0)[:, None] * past, 0)
    u = v.to(tl.float32)
    if DELTA:
        if not CHANNEL:
            answer *= tl.load(weight + scalars + 1)
        if MODE == STEP_ROWS:
            answer = tl.where(empty, 0.0, answer)
        if words:
            answer = add_past(answer, past, weight + WP)
        elif MODE != FLUSH_ROWS:
            answer += tl.sum(tl.load(weight + WP + j, mask=shown, other=0)[:, None] * past, 0)
        u -= answer
    u *= tl.load(weight + scalars + 2)
    out += tl.load(weight + (2 if DELTA else 1) * WP) * u
    if SKIP:
        out += TOKEN_SKIP(layer_params, h) * v.to(tl.float32)
    rounded = tl.where(live, out, 0.0).to(y[0].dtype.element_ty)
    tl.store(y[0] + b * y[1] + h * P + p, rounded, mask=value_mask, eviction_policy="evict_last")
    kept = u if DELTA else v
    append(writes, slot, h, ring_row, p, kept, value_mask & live)
    if HAS_COPY and DELTA:
        append(values, slot, h, ring_row, p, v, value_mask & live)


@triton.jit
def load_copy(
    copy, slot, h, p, N: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr
):
    """Words [N / CODES, P] of the read copy, scales of their blocks and of columns.

    Words are a tuple of tiles of ROWS rows; so are scales, one for each block where the words have several tiles, else
    one for each word.
    """
    rows: tl.constexpr = N // CODES
    mask = (p < P)[None, :]
    # what an empty copy holds is dropped later
    words = ()
    at = copy_at(copy[0], slot, h, tl.arange(0, ROWS), p, rows, P)
    for tile in tl.static_range(rows // ROWS):
        word = tl.load(at + tile * (ROWS * P), mask=mask, other=0, eviction_policy="evict_first")
        words = words + (word,)  # type: ignore[assignment]
    column = tl.load(copy[1][0] + slot * copy[1][1] + h * P + p, mask=p < P, other=0)
    scales = ()
    if BLOCKS > 1:
        at = copy_at(copy[2], slot, h, tl.arange(0, ROWS) % BLOCKS, p, BLOCKS, P)
        for tile in tl.static_range(BLOCKS // ROWS):
            scale = tl.load(at + tile * (ROWS * P), mask=mask, other=0)
            scales = scales + (block_scale(scale),)  # type: ignore[assignment]
    return words, scales, column


@triton.jit
def load_past(
    ring, slot, h, start, records, p, P: tl.constexpr, RING_ROWS: tl.constexpr, WP: tl.constexpr, ROWS: tl.constexpr
):
    """Columns `p` of the oldest `records` write vectors, zero beyond them, as a tuple of tiles [ROWS, P]."""
    past = ()
    row = tl.arange(0, ROWS)
    at = ring[0] + slot * ring[1] + h * ring[3] + p[None, :]
    for tile in tl.static_range(WP // ROWS):
        j = start + tile * ROWS + row
        j -= tl.where(j >= RING_ROWS, RING_ROWS, 0)  # beyond the records it may need more, and nothing is read
        mask = (row < records - tile * ROWS)[:, None] & (p < P)[None, :]
        write = tl.load(at + j[:, None] * ring[2], mask=mask, other=0, eviction_policy="evict_first")
        past = past + (write,)  # type: ignore[assignment]
    return past


@triton.jit
def add_past(sums, past, weight):
    """Sums [P] over the rows of `sums` [ROWS, P] and of the write vectors `past`, whose weights `weight` points to."""
    ROWS: tl.constexpr = sums.shape[0]
    at = weight + tl.arange(0, ROWS)
    for tile in tl.static_range(len(past)):
        taken = tl.load(at + tile * ROWS)  # zero beyond the history
        sums += taken[:, None] * past[tile].to(tl.float32)
    return tl.sum(sums, 0)


@triton.jit
def several_tokens(
    b, h, g, p, n, S, past, tokens, empty, ring_start, shown, slot, writes, values, key, query, value, layer_params,
    weight, probes, y,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RING_ROWS: tl.constexpr, TP: tl.constexpr,
    WP: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr,
    SKIP: tl.constexpr, TOKEN_SKIP: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    """The same for T tokens at once, as products with TP rows, where kernels/drafts.py does not have them in columns.

    Outputs and corrections are the same sums with other weights: row i of a matrix is the output of token i, or from
    LATER on the correction and write vector of token i - LATER; only delta rules keep the two apart.
    """
    LATER: tl.constexpr = TP // 2 if DELTA else 0
    scalars: tl.constexpr = (WP + T) * (2 if DELTA else 1)
    i, j = tl.arange(0, TP), tl.arange(0, WP)
    corrects = i >= LATER
    kind = corrects.to(tl.int32) if DELTA else i * 0
    t_row = i - LATER * kind
    in_step, live = t_row < T, t_row < tokens
    token = weight + t_row * BLOCK

    probe_live = (in_step if CHANNEL else live)[:, None]
    if CHANNEL:
        probe_at = probes + (((b * H + h) * T + t_row) * 2 + kind)[:, None] * N
    else:
        probe_at = query[0] + b * query[1] + t_row[:, None] * query[2] + g * N
        if DELTA:
            k_at = key[0] + b * key[1] + t_row[:, None] * key[2] + g * N
            probe_at = tl.where(corrects[:, None], k_at, probe_at)
    out = state_dot(tl.load(probe_at + n[None, :], mask=probe_live & (n < N)[None, :], other=0), S)
    if not CHANNEL:
        out *= tl.load(token + scalars + kind, mask=in_step, other=0)[:, None]
    if MODE == STEP_ROWS:
        out = tl.where(empty, 0.0, out)
    if MODE != FLUSH_ROWS:
        past_at = (token + kind * WP)[:, None] + j[None, :]
        past_weight = tl.load(past_at, mask=in_step[:, None] & shown[None, :], other=0)
        out += tl.dot(past_weight, past, input_precision="tf32x3")

    value_mask = (corrects & live)[:, None] & (p < P)[None, :]
    v_at = value[0] + b * value[1] + t_row[:, None] * value[2] + h * P + p[None, :]
    v = tl.load(v_at, mask=value_mask, other=0)
    rate = tl.load(token + scalars + 2, mask=corrects & in_step, other=0)
    u = v.to(tl.float32)
    drafts: tl.constexpr = (2 if DELTA else 1) * WP
    if DELTA:
        u = (u - out) * rate[:, None]
        for t in tl.static_range(1, T):  # forward substitution
            to_k = tl.load(weight + t * BLOCK + drafts + T + t_row, mask=corrects & (t_row < t), other=0)
            known = tl.sum(to_k[:, None] * u, 0) * tl.load(weight + t * BLOCK + scalars + 2)
            u -= tl.where((corrects & (t_row == t))[:, None], known[None, :], 0.0)
    else:
        u *= rate[:, None]
    draft_mask = (in_step & (kind == 0) if DELTA else in_step)[:, None] & corrects[None, :]
    draft_mask &= t_row[None, :] <= t_row[:, None]
    draft_weight = tl.load((token + drafts)[:, None] + t_row[None, :], mask=draft_mask, other=0)
    out += tl.dot(draft_weight, u, input_precision="tf32x3")
    if SKIP:
        out += TOKEN_SKIP(layer_params, h) * v.to(tl.float32)

    y_mask = (in_step & (kind == 0))[:, None] & (p < P)[None, :]
    y_at = y[0] + b * y[1] + t_row[:, None] * y[2] + h * P + p[None, :]
    rounded = tl.where(live[:, None], out, 0.0).to(y[0].dtype.element_ty)
    tl.store(y_at, rounded, mask=y_mask, eviction_policy="evict_last")
    rows = ((ring_start + t_row) % RING_ROWS)[:, None]
    kept = u if DELTA else v
    append(writes, slot, h, rows, p[None, :], kept, value_mask)
    if HAS_COPY and DELTA:
        append(values, slot, h, rows, p[None, :], v, value_mask)
