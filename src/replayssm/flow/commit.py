"""commit: make some of the pending rows of each slot real. Moves cursors; rejection costs nothing.

Of a chain the first rows stay where they are. Of a tree a path stays, whose rows are moved together first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.flow.backend import kernels_of
from replayssm.flow.step import batch_of, on_device, per_row
from replayssm.state import cursor as arithmetic
from replayssm.state.pool import StatePool
from replayssm.state.rows import host_visible, put_rows
from replayssm.state.slots import PAD_SLOT


def commit(pool: StatePool, slots: Sequence[int] | Tensor, accepted: int | Sequence[int] | Tensor) -> None:
    """Accept the first tokens of the last step, all layers at once. One-shot: nothing is pending afterwards.

    Args:
        pool: the pool.
        slots: [B], keyed by slot and not by the batch order of the step; PAD_SLOT rows are ignored.
        accepted: how many of each slot's pending rows stay, 0..pending. 0 leaves the logical state as it was.

    Raises:
        ValueError: accepted is out of range, or the rows are no chain (device tensors are clamped and trusted instead:
            the host does not wait for them).
    """
    index = batch_of(pool, slots)
    count = per_row(pool, accepted, len(index), "accepted")
    if host_visible(index):
        each = torch.as_tensor(count).expand(len(index))
        _require_pending(pool, index, each)
        # no cursor says more, but one in an engine's pages that nobody has reset, and memory for that is not to be had
        most = min(pool.config.verify_len, max([0, *each.tolist()]))
        _require_path(pool, index, torch.arange(most).expand(len(index), -1), each)
    _advance(pool, index, count)


def commit_path(pool: StatePool, slots: Sequence[int] | Tensor, paths: Sequence[Sequence[int]] | Tensor) -> None:
    """Accept a path of the last step's draft tree in each slot. One-shot: nothing is pending afterwards.

    The path's ring rows and convolution inputs move to where a chain would have put them, so that a committed sequence
    never shows that its tokens were drafted in a tree.

    Args:
        pool: the pool.
        slots: [B], as in `commit`.
        paths: for each slot the pending rows that stay, from a row that follows the committed history downwards, each
            the parent of the next; none to accept nothing. As a tensor, [B, D] with -1 behind the last of them.

    Raises:
        ValueError: a path is no such chain (paths on a device are trusted: the host does not wait for them).
    """
    index = batch_of(pool, slots)
    path = paths if isinstance(paths, Tensor) else _padded(paths, pool.device)
    if path.is_floating_point():
        raise ValueError(f"paths must be integers, got {path.dtype}")
    path = path.long().contiguous()
    if path.dim() != 2 or len(path) != len(index):
        raise ValueError(f"paths must be one list for each of {len(index)} slots, or [B, D], got {list(path.shape)}")
    count = (path >= 0).sum(1)
    if host_visible(index):
        _require_path(pool, index, path, count)
    _compact(pool, index, path)
    _advance(pool, index, count)


def _advance(pool: StatePool, index: Tensor, count: int | Tensor) -> None:
    kernels = kernels_of(pool)
    if kernels is not None:
        kernels.commit(index, count)
        return
    live, at, cursor = index != PAD_SLOT, index.clamp(min=0), pool.cursor
    pending = torch.where(live, cursor.pending[at], 0)
    kept = torch.minimum(on_device(pool, count).clamp(min=0), pending)
    length, position = arithmetic.commit(cursor.length[at], cursor.position[at], kept)
    cursor.length.index_add_(0, at, length - cursor.length[at])
    cursor.position.index_add_(0, at, position - cursor.position[at])
    cursor.pending.index_add_(0, at, -pending)


def _compact(pool: StatePool, slots: Tensor, path: Tensor) -> None:
    """Move the pending rows of `path` [B, D] to the first pending rows, in ring and carry."""
    at, place = slots.clamp(min=0), torch.arange(path.shape[1], device=path.device)
    moves = (slots != PAD_SLOT).unsqueeze(1) & (path >= 0) & (path != place)
    if host_visible(moves) and not bool(moves.any()):
        return
    kernels = kernels_of(pool)
    if kernels is not None:
        kernels.compact(slots, path)
    behind = (pool.cursor.start + pool.cursor.length)[at].unsqueeze(1)
    position = pool.cursor.position[at].unsqueeze(1)
    kept = path.clamp(min=0)
    owner = at.unsqueeze(1).expand_as(path)
    for layer in pool.layers:
        for name, tensor in layer.tensors.items():
            kind = name.split(".")[0]
            if kind == "ring" and kernels is None:
                source, target = (arithmetic.ring_row(behind, row, pool.ring_rows) for row in (kept, place))
            elif kind == "carry":
                source, target = (
                    arithmetic.carry_row(position + row, layer.layout.carry_rows) for row in (kept, place)
                )
            else:
                continue
            # all rows are read before one is written: a row may move to where another came from
            values = tensor[owner, source].flatten(0, 1)
            put_rows(tensor, (owner.flatten(), target.flatten()), values, moves.flatten())


def _padded(paths: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    depth = max([0, *map(len, paths)])
    rows = [[*path, *[-1] * (depth - len(path))] for path in paths]
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(rows), depth)


def _require_pending(pool: StatePool, slots: Tensor, count: Tensor) -> None:
    live = slots != PAD_SLOT
    pending = torch.where(live, pool.cursor.pending[slots.clamp(min=0)], 0)
    wrong = live & ((count < 0) | (count > pending))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"accepted {int(count[row])} for slot {int(slots[row])}, which has {int(pending[row])} pending rows"
        )


def _require_path(pool: StatePool, slots: Tensor, path: Tensor, count: Tensor) -> None:
    """ValueError unless the first `count` [B] entries of `path` [B, D] lead down the tree from the history."""
    live, at = slots != PAD_SLOT, slots.clamp(min=0)
    pending = torch.where(live, pool.cursor.pending[at], 0).unsqueeze(1)
    used = live.unsqueeze(1) & (torch.arange(path.shape[1]) < count.unsqueeze(1))
    known = (path >= 0) & (path < pending)
    before = torch.cat([torch.full_like(path[:, :1], -1), path[:, :-1]], 1)
    parents = arithmetic.parents_of(pool.cursor.tree[at], pool.config.verify_len)
    parent = parents.gather(1, torch.where(known, path, 0))
    wrong = used & (~known | (parent != before))
    if not bool(wrong.any()):
        return
    row, place = wrong.nonzero()[0].tolist()
    given, slot = path[row].tolist(), int(slots[row])
    if not known[row, place]:
        raise ValueError(f"path {given} for slot {slot}, which has {int(pending[row])} pending rows")
    raise ValueError(
        f"path {given} for slot {slot} is none of its draft tree: row {given[place]} follows "
        f"{_named(int(parent[row, place]))}, not {_named(int(before[row, place]))}; accept a path from the committed "
        "history downwards with commit_path"
    )


def _named(row: int) -> str:
    return "the committed history" if row < 0 else f"row {row}"
