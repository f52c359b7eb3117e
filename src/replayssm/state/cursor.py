"""The cursor of a slot, and its arithmetic: the only place where a flush is decided or a ring row is computed.

The functions are pure and work on ints and on integer tensors alike, so that they are tested without a pool. The rule
is a deadline: with `length` committed records, `tokens` of this row and `window` in force,

    due = forced or length + tokens > window

computed once per step before the first layer. A due row folds exactly ring[0:length] before its own tokens run; the
cursor moves (`settle`) after the last layer, and `commit` only adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


def due(length: IntOrTensor, tokens: IntOrTensor, window: IntOrTensor, forced: bool | Tensor = False) -> bool | Tensor:
    """Whether a row must fold its ring before this step's tokens."""
    return forced | (length + tokens > window)


def ring_row(start: IntOrTensor, offset: IntOrTensor, ring_rows: int) -> IntOrTensor:
    """Physical ring row of the record `offset` places after the oldest; drafts follow the committed records."""
    return (start + offset) % ring_rows


def carry_row(position: IntOrTensor, carry_rows: int) -> IntOrTensor:
    """Physical carry row of the token at `position`."""
    return position % carry_rows


def settle(start: IntOrTensor, length: IntOrTensor, is_due: bool | Tensor, ring_rows: int) -> tuple:
    """(start, length) after the last layer of a step: a due row's records are in the checkpoint now."""
    if isinstance(length, Tensor):
        moved = torch.where(torch.as_tensor(is_due), length, 0)
    else:
        moved = length if is_due else 0
    return ring_row(start, moved, ring_rows), length - moved


def commit(length: IntOrTensor, position: IntOrTensor, accepted: IntOrTensor) -> tuple:
    """(length, position) after `accepted` of the pending rows became real."""
    return length + accepted, position + accepted


@dataclass(frozen=True)
class Phase:
    """One step of the flush cycle of a row.

    Args:
        length: committed records at the start of the step.
        due: whether the row flushes in it.
    """

    length: int
    due: bool


def cycle(window: int, verify_len: int, accepted: int) -> list[Phase]:
    """The steps of a row from one flush to the next in the steady state, the flushing one last."""
    phases, length = [], accepted
    while not due(length, verify_len, window):
        phases.append(Phase(length, False))
        length += accepted
    return [*phases, Phase(length, True)]


def tree_code(parents: Tensor) -> Tensor:
    """The shape of each row's tree as one number [B], which is 0 for a chain.

    Four bits per token say how far its parent lies before the token in front of it: enough for the 16 tokens that a
    step may have, and one more counter moves with the slot like any other.

    Args:
        parents: int64 [B, T], the parent of each token, -1 for the committed history.
    """
    place = torch.arange(parents.shape[1], device=parents.device)
    return ((place - 1 - parents) << 4 * place).sum(1)


def parents_of(code: Tensor, tokens: int) -> Tensor:
    """The parents [B, tokens] that `tree_code` put into `code` [B]."""
    place = torch.arange(tokens, device=code.device)
    return place - 1 - ((code.unsqueeze(1) >> 4 * place) & 15)


def first_window(turn: IntOrTensor, window: int, verify_len: int) -> IntOrTensor:
    """Window in force until the first flush of the slot acquired `turn`-th: verify_len..window, round robin.

    Batches that start together would otherwise flush together, which doubles the slowest step.
    """
    return window - turn % (window - verify_len + 1)


@dataclass
class Cursor:
    """Device-resident counters of every slot, int64 [slots] each; advanced once per model step, never per layer.

    They may be strided, all in the same way; `saturated`, to which kernels add, is contiguous.

    Args:
        start: physical ring row of the oldest committed record.
        length: committed records in the ring.
        position: tokens committed since acquire; position - length of them are in the checkpoint.
        pending: ring rows written by the last step and not yet committed.
        tree: how those descend from each other, as `tree_code` puts it.
        window: window in force until the next flush.
        saturated: elements of checkpoint and read copy clamped to their format's range since acquire; copies of the
            sequence start with its count.
        seed: of the request, for stochastic rounding; copies of the sequence have it, too.
    """

    start: Tensor
    length: Tensor
    position: Tensor
    pending: Tensor
    tree: Tensor
    window: Tensor
    saturated: Tensor
    seed: Tensor

    @classmethod
    def allocate(cls, slots: int, device: torch.device | str) -> Cursor:
        """Counters for `slots` slots, all zero."""
        return cls(*(torch.zeros(slots, dtype=torch.int64, device=device) for _ in fields(cls)))

    @classmethod
    def of(cls, counters: Tensor) -> Cursor:
        """Use the caller's int64 [slots, counters or more], which may be part of something larger.

        The count of clamped elements stays outside: it is no part of a sequence's state.
        """
        given = dict(zip((f.name for f in fields(cls)), counters.unbind(1), strict=False))
        return cls(**given | {"saturated": torch.zeros(len(counters), dtype=torch.int64, device=counters.device)})

    @property
    def apart(self) -> int:
        """How far the counters of one slot and the next lie apart, in elements."""
        return self.start.stride(0)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every counter."""
        return ((f.name, getattr(self, f.name)) for f in fields(self))

    def set(self, slot: int, **values: int) -> None:
        """Write the named counters of one slot."""
        for name, value in values.items():
            getattr(self, name)[slot] = value

    def get(self, slot: int) -> dict[str, int]:
        """All counters of one slot as ints (waits for the device)."""
        return {name: int(tensor[slot]) for name, tensor in self.items()}

    def copy(self, src: int, dst: int) -> None:
        """Copy every counter of slot `src` to slot `dst`."""
        for _, tensor in self.items():
            tensor[dst] = tensor[src]
