"""What a recurrence's `triton.py` tells the kernel templates: which tensor plays which part, and what differs.

Every vector is a raw row times a scalar (key = raw k * key scale, write vector = raw x * dt, ...), so the templates
load rows themselves and ask the recurrence for scalars only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TritonForm:
    """Names are fields of the recurrence; functions are `@triton.jit`.

    In the functions `h` is one head, or a column [HEADS, 1] of heads that share key head g; `rows` is one ring row or a
    tile of them. What comes back has the shape that both give when broadcast; masks are scalars or of that shape.

    Args:
        key, query, value: inputs that are the raw key [G, N], query [G, N] and value [H, P].
        rate: input, and ring field of that name, that a delta rule multiplies its errors with; "" for others.
        key_ring, write_ring: ring fields with the raw key and with the write vector (or the raw value).
        ring, inputs, params: the other ring fields, inputs and parameters, in the order in which the functions see
            them: ring fields as (pointer, slot stride, row stride, head stride), inputs as (pointer, batch stride,
            token stride), params as bare pointers.
        skip: whether `token_skip` counts.
        record_scales: (ring, slot, rows, g, h, mask) -> (key scale, write scale) of ring records.
        record_decay: (ring, params, slot, rows, h, n, mask, N) -> log decay of ring records.
        token_decay: (inputs, params, b, t, h, n, n_mask, live, N) -> log decay of a new token.
        token_rate: (inputs, b, t, h, live) -> factor of the write vector: dt, or beta.
        token_skip: (params, h) -> weight of the value that bypasses the state.
        key_scale, query_scale: (raw vector [, N]) -> factor. Vectors are [NP] or the columns of [NP, vectors], in fp32;
            their elements come in any order, zeros among them where N is padded.
        store_record: (ring, slot, row, g, h, n, key scale, log decay, rate, n_mask, live, N); writes `ring`.
        gate: (gate inputs, params, outputs, b, t, item, e, mask, constants, H, N) of the recurrence's `Mixer`; writes
            entries `e` of token `item` to the outputs, None where there is no mixer.
    """

    key: str
    query: str
    value: str
    rate: str
    key_ring: str
    write_ring: str
    ring: tuple[str, ...]
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    skip: bool
    record_scales: Any
    record_decay: Any
    token_decay: Any
    token_rate: Any
    token_skip: Any
    key_scale: Any
    query_scale: Any
    store_record: Any
    gate: Any = None
