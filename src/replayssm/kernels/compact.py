"""Acceptance of a path of a draft tree: its ring rows move behind the committed ones, in one launch a layer.

An index of the rows that count would be less to write, but would leave holes in the ring. The program of a slot and
head has all rows of the path in hand before it stores the first: a row may move to where another one came from.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from replayssm.state.cursor import Cursor
from replayssm.state.layout import StateLayout
from replayssm.state.pool import LayerState

NUM_WARPS = 1


@triton.jit
def compact_kernel(
    slots, path, path_row, start, length, each, fields,
    D: tl.constexpr, DP: tl.constexpr, RING_ROWS: tl.constexpr, HEADS: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """A program per row of the batch and head.

    | argument | shape              | in/out | meaning                                                            |
    |----------|--------------------|--------|--------------------------------------------------------------------|
    | slots    | [B] int64          | in     | (pointer, stride); PAD_SLOT on padded rows                         |
    | path     | [B, D] int64       | in     | pending rows that stay, in order; negative behind the last of them |
    | start, length | [slots] int64 | in     | the cursor; slots lie `each` apart                                 |
    | fields   | [slots, rows, heads, size] | in/out | ring fields: (pointer, slot, row and head stride) each     |

    HEADS is the most heads of a field; SIZES has each field's heads and elements of a head.
    """
    b = (tl.program_id(0) // HEADS).to(tl.int64)
    h = tl.program_id(0) % HEADS
    slot = tl.load(slots[0] + b * slots[1]).to(tl.int64)
    if slot >= 0:
        d = tl.arange(0, DP)
        row = tl.load(path + b * path_row + d, mask=d < D, other=-1)
        moves = (row >= 0) & (row != d)
        behind = tl.load(start + slot * each) + tl.load(length + slot * each)
        source, target = (behind + row) % RING_ROWS, (behind + d) % RING_ROWS
        for f in tl.static_range(len(fields)):
            if h < SIZES[f][0]:
                at = fields[f][0] + slot * fields[f][1] + h * fields[f][3]
                EP: tl.constexpr = triton.next_power_of_2(SIZES[f][1])
                e = tl.arange(0, EP)
                mask = moves[:, None] & (e < SIZES[f][1])[None, :]
                kept = tl.load(at + source[:, None] * fields[f][2] + e[None, :], mask=mask, other=0)
                tl.debug_barrier()  # a thread may store where another one has yet to load
                tl.store(at + target[:, None] * fields[f][2] + e[None, :], kept, mask=mask)


@cache
def constants(layout: StateLayout, depth: int) -> dict[str, Any]:
    """Compile-time arguments for paths of at most `depth` rows."""
    sizes = tuple(_size(field.shape(layout.geometry)) for field in layout.ring_fields)
    return {
        "D": depth,
        "DP": triton.next_power_of_2(depth),
        "RING_ROWS": layout.ring_rows,
        "HEADS": max(heads for heads, _ in sizes),
        "SIZES": sizes,
    }


def _size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Heads of a field, and elements of a head."""
    return shape[0], math.prod(shape[1:])


def launch_compact(slots: Tensor, path: Tensor, cursor: Cursor, layer: LayerState) -> None:
    """Move the rows of `path` [B, D]; see `compact_kernel`."""
    batch, depth = path.shape
    if not batch or not depth:
        return
    given = constants(layer.layout, depth)
    rings = [layer.tensors[f"ring.{field.name}"] for field in layer.layout.ring_fields]
    compact_kernel[(batch * given["HEADS"],)](
        (slots, slots.stride(0)),
        path,
        path.stride(0),
        cursor.start,
        cursor.length,
        cursor.apart,
        tuple((ring, ring.stride(0), ring.stride(1), ring.stride(2)) for ring in rings),
        **given,
        num_warps=NUM_WARPS,
    )
