"""One model step: everything the layers share, computed once before the first of them, and settled after the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.flow import algebra
from replayssm.flow.backend import kernels_of
from replayssm.state import cursor as arithmetic
from replayssm.state.plan import COLUMN, COLUMNS
from replayssm.state.pool import StatePool
from replayssm.state.rows import host_visible
from replayssm.state.slots import PAD_SLOT


@dataclass(frozen=True)
class Step:
    """What every layer of one step needs to know. B rows, T = `width` tokens.

    Args:
        plan: int64 [B, columns], everything that differs from row to row; `state.plan.COLUMNS` says what. The
            properties name its columns, as views [B].
        width: T, the padded number of tokens. Tokens of a row beyond its own number are ignored.
        is_prompt: True when the step's tokens go straight into the checkpoint.
        window: configured window, the padded number of history rows.
        ring_rows: physical rows of the ring.
        is_tree: whether some row's tokens may be no chain.
        folds: False where the host knows that no row folds, so that nothing is launched to find that out.
        is_full: True where it knows that every row has `width` tokens and, with `folds`, that every row folds.
    """

    plan: Tensor
    width: int
    is_prompt: bool
    window: int
    ring_rows: int
    is_tree: bool = False
    folds: bool = True
    is_full: bool = False

    @property
    def slots(self) -> Tensor:
        """int64 [B]: slot of each row, PAD_SLOT on padded rows."""
        return self._column("slot")

    @property
    def tokens(self) -> Tensor:
        """int64 [B]: new tokens of each row, 0..T; 0 on padded rows."""
        return self._column("tokens")

    @property
    def folded(self) -> Tensor:
        """int64 [B]: committed records that this row's flush folds before its tokens run, 0 where nothing is due."""
        return self._column("folded")

    @property
    def fold_start(self) -> Tensor:
        """int64 [B]: physical ring row of the oldest of those."""
        return self._column("fold_start")

    @property
    def history(self) -> Tensor:
        """int64 [B]: committed records in the ring that outputs read, after the flush."""
        return self._column("history")

    @property
    def start(self) -> Tensor:
        """int64 [B]: physical ring row of the oldest of those; drafts follow at start + history."""
        return self._column("start")

    @property
    def position(self) -> Tensor:
        """int64 [B]: tokens committed before this step."""
        return self._column("position")

    @property
    def due(self) -> Tensor:
        """bool [B]: the row's ring is emptied by this step."""
        return self._column("due") != 0

    @property
    def parents(self) -> Tensor:
        """int64 [B, T]: the token of the row that each token follows, -1 for the committed history."""
        return arithmetic.parents_of(self._column("tree"), self.width)

    def _column(self, name: str) -> Tensor:
        return self.plan[:, COLUMN[name]]

    @property
    def token_mask(self) -> Tensor:
        """bool [B, T]: real tokens."""
        return torch.arange(self.width, device=self.tokens.device) < self.tokens.unsqueeze(1)

    @property
    def descends(self) -> Tensor:
        """bool [B, T, T], or [1, T, T] for chains: whether a token is another or comes after it on one path."""
        return algebra.lineage(self.parents) if self.is_tree else algebra.chain(self.width, self.plan.device)

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
        return self._column("empty") != 0

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


def on_device(pool: StatePool, value: int | bool | Tensor) -> Tensor:
    """`value` as a tensor of the pool's device. A number is filled in there: copies from the host break graphs."""
    return value if isinstance(value, Tensor) else torch.full((), value, device=pool.device)


def per_row(
    pool: StatePool, value: int | Sequence[int] | Tensor, rows: int, name: str, limits: tuple[int, int] | None = None
) -> int | Tensor:
    """`value` for every row, or int64 [B] on the pool's device; within `limits` where the host can see it."""
    if not isinstance(value, int):
        value = torch.as_tensor(value, device=pool.device)
        if value.shape != (rows,) or (rows and value.is_floating_point()):  # torch takes no rows for floating ones
            raise ValueError(f"{name} must be an integer or {rows} integers, one per row, got {list(value.shape)}")
        value = value.long()
    if limits is not None and rows and (isinstance(value, int) or host_visible(value)):
        low, high = limits
        least, most = (value, value) if isinstance(value, int) else (int(value.min()), int(value.max()))
        if least < low or most > high:
            given = value if isinstance(value, int) else value.tolist()
            raise ValueError(f"{name} must be in {low}..{high} for every row, got {given}")
    return value


def open_step(
    pool: StatePool,
    slots: Sequence[int] | Tensor,
    tokens: int | Sequence[int] | Tensor = 1,
    *,
    width: int | None = None,
    window: int | Sequence[int] | Tensor | None = None,
    forced: bool | Sequence[bool] | Tensor = False,
    is_prompt: bool = False,
    parents: Sequence[Sequence[int]] | Tensor | None = None,
) -> Step:
    """Decide who flushes, and where every row reads and writes. Changes nothing.

    Args:
        pool: the pool.
        slots: slot of each row, PAD_SLOT for padding. A sequence of ints is validated; a device tensor is trusted.
        tokens: new tokens of each row, 0..verify_len (any number for prompts). Pending rows that were never
            committed are dropped, as if 0 had been accepted.
        width: padded number of tokens T of the layers' inputs; the largest of `tokens` where the host knows it.
        window: window in force of each row, 1..config.window; a smaller one flushes earlier. By default the configured
            one, or what the kernels' table says of this batch: 1 where replaying does not win.
        forced: flush these rows whatever their length.
        is_prompt: the tokens are a prompt (or a chunk of one): rows are flushed and tokens go to the checkpoint. A row
            without any is treated as padding.
        parents: for a draft tree, [B, T]: which earlier token of the row each token follows, -1 where that is the
            committed history. Entries beyond a row's tokens mean nothing. By default each token follows the one before
            it. A path of the tree is accepted with `commit_path`.

    Raises:
        SlotError: a slot is unknown, not in use, broken, or comes twice.
        ValueError: tokens, windows or parents are out of range.
    """
    config = pool.config
    index = batch_of(pool, slots)
    rows = len(index)
    if width is None:
        width = tokens if isinstance(tokens, int) else max([0, *torch.as_tensor(tokens).tolist()])
    limit = width if is_prompt else config.verify_len
    if width > limit:
        raise ValueError(f"a step has at most verify_len = {limit} tokens per row, got {width}; raise verify_len")
    counts = per_row(pool, tokens, rows, "tokens", (0, width))
    if is_prompt:  # a row without prompt tokens is left alone like padding: it has no state to take its ring's place
        index = torch.where(on_device(pool, counts) > 0, index, PAD_SLOT)
    if window is not None:
        window = per_row(pool, window, rows, "window in force", (1, config.window))
    must: bool | Tensor
    if isinstance(forced, bool):
        must = forced or is_prompt
    else:
        must = torch.as_tensor(forced, device=pool.device).bool() | is_prompt
        if must.shape != (rows,):
            raise ValueError(f"forced must be a bool or {rows} bools, one per row, got {list(must.shape)}")
    tree = None
    if parents is not None:
        if is_prompt:
            raise ValueError("a prompt has no parents: its tokens follow each other; drafts come in their own step")
        tree = arithmetic.tree_code(_checked(pool, parents, rows, width, counts))
    kernels = kernels_of(pool)
    if kernels is None:
        plan = plan_rows(pool, index, counts, width, config.window if window is None else window, must, tree)
    else:
        plan = kernels.plan_rows(index, counts, width, window, must, tree)
    return Step(plan, width, is_prompt, config.window, pool.ring_rows, is_tree=tree is not None)


def _checked(
    pool: StatePool, parents: Sequence[Sequence[int]] | Tensor, rows: int, width: int, tokens: int | Tensor
) -> Tensor:
    """`parents` as int64 [B, T] on the pool's device, checked; beyond a row's tokens, as in a chain."""
    given = torch.as_tensor(parents, device=pool.device)
    shape = (rows, width)
    if given.shape != shape or (given.numel() and given.is_floating_point()):  # torch takes no tokens for floating ones
        raise ValueError(f"parents must be integers {list(shape)}, one per token of each row, got {list(given.shape)}")
    place = torch.arange(width, device=pool.device)
    given = torch.where(place < on_device(pool, tokens).reshape(-1, 1), given.long(), place - 1)
    wrong = (given < -1) | (given >= place)
    if host_visible(wrong) and bool(wrong.any()):
        row, token = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"token {token} of row {row} has parent {int(given[row, token])}: a parent is an earlier token of the row, "
            "or -1 for the committed history"
        )
    return torch.minimum(given.clamp(min=-1), place - 1)


def plan_rows(
    pool: StatePool,
    slots: Tensor,
    tokens: int | Tensor,
    width: int,
    window: int | Tensor,
    forced: bool | Tensor,
    tree: Tensor | None = None,
) -> Tensor:
    """The plan of a step, int64 [B, columns]; arguments as in `open_step`, checked."""
    live, at, cursor = slots != PAD_SLOT, slots.clamp(min=0), pool.cursor
    counts = torch.where(live, on_device(pool, tokens).clamp(0, width), 0)
    start, length, position = (torch.where(live, c[at], 0) for c in (cursor.start, cursor.length, cursor.position))
    in_force = torch.minimum(cursor.window[at], on_device(pool, window))
    is_due = live & arithmetic.due(length, counts, in_force, forced)
    new_start, history = arithmetic.settle(start, length, is_due, pool.ring_rows)
    folded = length - history
    folds = folded > 0
    columns = {
        "slot": slots,
        "tokens": counts,
        "folded": folded,
        "fold_start": start,
        "history": history,
        "empty": position == length,
        "order": torch.argsort(folds, descending=True, stable=True),
        "due_count": folds.sum().expand(len(slots)),
        "start": new_start,
        "position": position,
        "due": is_due,
        "tree": torch.zeros_like(slots) if tree is None else torch.where(live, tree, 0),
    }
    return torch.stack([columns[name].long() for name in COLUMNS], 1)


def close_step(pool: StatePool, done: Step) -> None:
    """After the last layer: move the cursors of rows that flushed, and note the rows now pending.

    Padded rows add zero to slot 0, so that no row needs to be picked on the host.
    """
    kernels = kernels_of(pool)
    if kernels is not None:
        kernels.close_step(done.plan, is_prompt=done.is_prompt)
        return
    cursor, at = pool.cursor, done.slots.clamp(min=0)
    live = done.slots != PAD_SLOT
    added = done.tokens if done.is_prompt else torch.zeros_like(done.tokens)
    pending = torch.zeros_like(done.tokens) if done.is_prompt else done.tokens
    target = {
        "start": done.start,
        "length": done.history,
        "position": done.position + added,
        "pending": pending,
        "tree": done._column("tree"),
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
    kernels = kernels_of(pool)
    if kernels is not None:
        kernels.settle_flush(done.plan)
        return
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
    parents: Sequence[Sequence[int]] | Tensor | None = None,
) -> Iterator[Step]:
    """`open_step` ... `close_step`; when the body raises, the slots are broken until reset or restore."""
    opened = open_step(pool, slots, tokens, width=width, window=window, forced=forced, parents=parents)
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
