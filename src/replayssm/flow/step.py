"""One model step: everything the layers share, computed once before the first of them, and settled after the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.state import cursor as arithmetic
from replayssm.state.pool import StatePool
from replayssm.state.rows import host_visible
from replayssm.state.slots import PAD_SLOT


@dataclass(frozen=True)
class Step:
    """What every layer of one step needs to know. Tensors are int64 [B] unless said; B rows, T = `width` tokens.

    Args:
        slots: slot of each row, PAD_SLOT on padded rows.
        tokens: new tokens of each row, 0..T; 0 on padded rows. Tokens beyond it are ignored.
        width: T, the padded number of tokens.
        folded: committed records that this row's flush folds before its tokens run, 0 where nothing is due.
        fold_start: physical ring row of the oldest of those.
        history: committed records in the ring that outputs read, after the flush.
        start: physical ring row of the oldest of those; drafts follow at start + history.
        position: tokens committed before this step.
        due: bool, whether the row's ring is emptied by this step.
        is_prompt: True when the step's tokens go straight into the checkpoint.
        window: configured window, the padded number of history rows.
        ring_rows: physical rows of the ring.
    """

    slots: Tensor
    tokens: Tensor
    width: int
    folded: Tensor
    fold_start: Tensor
    history: Tensor
    start: Tensor
    position: Tensor
    due: Tensor
    is_prompt: bool
    window: int
    ring_rows: int

    @property
    def token_mask(self) -> Tensor:
        """bool [B, T]: real tokens."""
        return torch.arange(self.width, device=self.tokens.device) < self.tokens.unsqueeze(1)

    @property
    def history_mask(self) -> Tensor:
        """bool [B, window]: committed records that outputs read."""
        return torch.arange(self.window, device=self.tokens.device) < self.history.unsqueeze(1)

    @property
    def history_rows(self) -> Tensor:
        """int64 [B, window]: physical rows of the history; masked entries are other valid rows."""
        offsets = torch.arange(self.window, device=self.start.device)
        return arithmetic.ring_row(self.start.unsqueeze(1), offsets, self.ring_rows)

    @property
    def fold_mask(self) -> Tensor:
        """bool [B, window]: records to fold."""
        return torch.arange(self.window, device=self.tokens.device) < self.folded.unsqueeze(1)

    @property
    def fold_rows(self) -> Tensor:
        """int64 [B, window]: physical rows of the records to fold."""
        offsets = torch.arange(self.window, device=self.start.device)
        return arithmetic.ring_row(self.fold_start.unsqueeze(1), offsets, self.ring_rows)

    @property
    def draft_rows(self) -> Tensor:
        """int64 [B, T]: physical rows that this step's tokens are written to."""
        offsets = torch.arange(self.width, device=self.start.device)
        return arithmetic.ring_row((self.start + self.history).unsqueeze(1), offsets, self.ring_rows)

    @property
    def empty_before(self) -> Tensor:
        """bool [B]: the checkpoint held no token before this step; its memory is undefined and stands for zero."""
        return self.position == self.folded + self.history

    @property
    def empty(self) -> Tensor:
        """bool [B]: the same after this step's flush."""
        return self.position == self.history


def batch_of(pool: StatePool, slots: Sequence[int] | Tensor) -> Tensor:
    """Slots as int64 [B] on the pool's device; validated where the host can see them."""
    if not isinstance(slots, Tensor):
        pool.slots.require_batch(slots)
        return torch.tensor(list(slots), dtype=torch.int64, device=pool.device)
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots must be an integer tensor [B], got {slots.dtype} {list(slots.shape)}")
    if slots.device != pool.device:
        raise ValueError(f"slots are on {slots.device}, the pool on {pool.device}")
    if host_visible(slots):
        pool.slots.require_batch(slots.tolist())
    return slots.long()


def per_row(pool: StatePool, value: int | Sequence[int] | Tensor, rows: int, name: str) -> Tensor:
    """`value` as int64 [B] on the pool's device."""
    if isinstance(value, int):
        return torch.full((rows,), value, dtype=torch.int64, device=pool.device)
    tensor = torch.as_tensor(value, device=pool.device)
    if tensor.shape != (rows,) or tensor.is_floating_point():
        raise ValueError(f"{name} must be an integer or {rows} integers, one per row, got {list(tensor.shape)}")
    return tensor.long()


def open_step(
    pool: StatePool,
    slots: Sequence[int] | Tensor,
    tokens: int | Sequence[int] | Tensor = 1,
    *,
    width: int | None = None,
    window: int | Sequence[int] | Tensor | None = None,
    forced: bool | Sequence[bool] | Tensor = False,
    is_prompt: bool = False,
) -> Step:
    """Decide who flushes, and where every row reads and writes. Changes nothing.

    Args:
        pool: the pool.
        slots: slot of each row, PAD_SLOT for padding. A sequence of ints is validated; a device tensor is trusted.
        tokens: new tokens of each row, 0..verify_len (any number for prompts). Pending rows that were never
            committed are dropped, as if 0 had been accepted.
        width: padded number of tokens T of the layers' inputs; the largest of `tokens` where the host knows it.
        window: window in force of each row, 1..config.window; a smaller one flushes earlier.
        forced: flush these rows whatever their length.
        is_prompt: the tokens are a prompt (or a chunk of one): rows are flushed and tokens go to the checkpoint.

    Raises:
        SlotError: a slot is unknown, not in use, broken, or comes twice.
        ValueError: tokens or windows are out of range.
    """
    config = pool.config
    index = batch_of(pool, slots)
    rows = len(index)
    live = index != PAD_SLOT
    counts = per_row(pool, tokens, rows, "tokens")
    if width is None:
        width = tokens if isinstance(tokens, int) else max([0, *torch.as_tensor(tokens).tolist()])
    limit = width if is_prompt else config.verify_len
    if width > limit:
        raise ValueError(f"a step has at most verify_len = {limit} tokens per row, got {width}; raise verify_len")
    if host_visible(counts) and rows and not (int(counts.min()) >= 0 and int(counts.max()) <= width):
        raise ValueError(f"tokens must be in 0..{width} for every row, got {counts.tolist()}")
    counts = torch.where(live, counts.clamp(0, width), 0)

    at = index.clamp(min=0)
    cursor = pool.cursor
    start, length, position = (torch.where(live, c[at], 0) for c in (cursor.start, cursor.length, cursor.position))
    in_force = cursor.window[at]
    if window is not None:
        asked = per_row(pool, window, rows, "window")
        if host_visible(asked) and rows and not (int(asked.min()) >= 1 and int(asked.max()) <= config.window):
            raise ValueError(f"window in force must be in 1..{config.window} for every row, got {asked.tolist()}")
        in_force = torch.minimum(in_force, asked)
    if isinstance(forced, bool):
        must = torch.full((rows,), forced or is_prompt, device=pool.device)
    else:
        must = torch.as_tensor(forced, device=pool.device).bool() | is_prompt
        if must.shape != (rows,):
            raise ValueError(f"forced must be a bool or {rows} bools, one per row, got {list(must.shape)}")
    is_due = live & torch.as_tensor(arithmetic.due(length, counts, in_force, must))
    new_start, new_length = arithmetic.settle(start, length, is_due, pool.ring_rows)
    return Step(
        slots=index,
        tokens=counts,
        width=width,
        folded=length - new_length,
        fold_start=start,
        history=new_length,
        start=new_start,
        position=position,
        due=is_due,
        is_prompt=is_prompt,
        window=config.window,
        ring_rows=pool.ring_rows,
    )


def close_step(pool: StatePool, done: Step) -> None:
    """After the last layer: move the cursors of rows that flushed, and note the rows now pending.

    Padded rows add zero to slot 0, so that no row needs to be picked on the host.
    """
    cursor, at = pool.cursor, done.slots.clamp(min=0)
    live = done.slots != PAD_SLOT
    added = done.tokens if done.is_prompt else torch.zeros_like(done.tokens)
    pending = torch.zeros_like(done.tokens) if done.is_prompt else done.tokens
    target = {
        "start": done.start,
        "length": done.history,
        "position": done.position + added,
        "pending": pending,
        # the phase given at acquire holds for one flush only; loading a prompt is not that flush
        "window": torch.where(done.due & (not done.is_prompt), pool.config.window, cursor.window[at]),
    }
    for name, value in target.items():
        counter = getattr(cursor, name)
        counter.index_add_(0, at, torch.where(live, value - counter[at], 0))
    if not done.is_prompt:
        pool.count(
            ((done.tokens > 0) | (done.folded > 0)).sum(),
            done.tokens.sum(),
            done.history.sum(),
            (done.folded > 0).sum(),
            done.folded.sum(),
        )


def settle_flush(pool: StatePool, done: Step) -> None:
    """Move the cursors of rows that were flushed between steps; what is pending stays so."""
    cursor, at = pool.cursor, done.slots.clamp(min=0)
    for name, value in (("start", done.start), ("length", done.history)):
        counter = getattr(cursor, name)
        counter.index_add_(0, at, torch.where(done.slots != PAD_SLOT, value - counter[at], 0))
    flushed = (done.folded > 0).sum()
    nothing = torch.zeros_like(flushed)
    pool.count(flushed, nothing, nothing, flushed, done.folded.sum())


@contextmanager
def step(
    pool: StatePool,
    slots: Sequence[int] | Tensor,
    tokens: int | Sequence[int] | Tensor = 1,
    *,
    width: int | None = None,
    window: int | Sequence[int] | Tensor | None = None,
    forced: bool | Sequence[bool] | Tensor = False,
) -> Iterator[Step]:
    """`open_step` ... `close_step`; when the body raises, the slots are broken until reset or restore."""
    opened = open_step(pool, slots, tokens, width=width, window=window, forced=forced)
    with guarded(pool, opened):
        yield opened
    close_step(pool, opened)


@contextmanager
def prompt(
    pool: StatePool, slots: Sequence[int] | Tensor, tokens: int | Sequence[int] | Tensor, *, width: int | None = None
) -> Iterator[Step]:
    """A step whose tokens are a prompt (or the next chunk of one) and go straight into the checkpoint."""
    opened = open_step(pool, slots, tokens, width=width, is_prompt=True)
    with guarded(pool, opened):
        yield opened
    close_step(pool, opened)


@contextmanager
def guarded(pool: StatePool, opened: Step) -> Iterator[None]:
    """Mark the step's slots broken when the body raises: some layers have folded, others have not."""
    try:
        yield
    except BaseException as error:
        touched = [slot for slot in opened.slots.tolist() if slot != PAD_SLOT]
        pool.slots.mark_broken(touched, f"{type(error).__name__}: {error}")
        raise
