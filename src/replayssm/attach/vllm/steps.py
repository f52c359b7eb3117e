"""The life cycle of slots that an engine owns, without the engine.

An engine schedules: every step it says which slots run, with how many tokens, which of them start anew, and how many
tokens of its last step it kept. Everything else is the cursor's, which lives beside the slots and is addressed by slot.

All of a step's cursor arithmetic is done when it opens: what is pending is committed, the plan is made, and the cursor
is settled at once. Layers read the plan alone, so no layer can see another one's cursor, however the engine splits the
model into graphs, pieces or pipeline stages; and nothing has to happen after a last layer that nobody can name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.flow.commit import commit
from replayssm.flow.step import Step, close_step, open_step
from replayssm.state import cursor as arithmetic
from replayssm.state.pool import StatePool
from replayssm.state.slots import PAD_SLOT


class EngineSteps:
    """Steps over a pool whose slots belong to an engine.

    Args:
        pool: the pool; all of its slots count as in use from now on.
    """

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self._turns = 0
        self._certain = torch.zeros(pool.slots.slots, dtype=torch.int64, device=pool.device)
        pool.slots.take_all()

    def restart(self, slots: Tensor) -> None:
        """These slots [n] begin a sequence: whatever they held is forgotten. None of them may be PAD_SLOT."""
        cursor, config = self.pool.cursor, self.pool.config
        turns = torch.arange(self._turns, self._turns + len(slots), device=slots.device)
        self._turns += len(slots)
        for _, counter in cursor.items():
            counter[slots] = 0
        # the seed of stochastic rounding: an engine gives no number that stays with a sequence
        cursor.seed[slots] = turns
        self._certain[slots] = 1
        cursor.window[slots] = (
            arithmetic.first_window(turns, config.window, config.verify_len)
            if config.stagger
            else turns.new_full(turns.shape, config.window)
        )

    def accept(self, slots: Tensor, accepted: Tensor) -> None:
        """Commit what these slots [B] have pending: the first `accepted` [B] of their rows, keyed by slot.

        A slot that has nothing pending, because its tokens were certain, is left alone whatever the number says.
        """
        at = slots.clamp(min=0)
        commit(self.pool, slots, accepted.long().clamp(min=0).minimum(self.pool.cursor.pending[at]))

    def kept(self, slots: Tensor, accepted: Tensor) -> Tensor:
        """How many tokens [B] of its last step each slot [B] kept, at least 1; `accepted` where they were drafts."""
        certain = self._certain[slots.clamp(min=0)]
        return torch.where(certain > 0, certain, accepted).clamp(min=1)

    def decode(self, slots: Tensor, tokens: int | Tensor, width: int, certain: bool | Tensor) -> Step:
        """Open a step whose tokens go to the ring.

        Args:
            slots: [B], PAD_SLOT for padding.
            tokens: new tokens of each row, 1..verify_len.
            width: padded number of tokens.
            certain: of each row, whether all of its tokens stay: a token that the engine sampled, or a prompt's. They
                are committed with the step; drafts wait for `accept`.
        """
        step = open_step(self.pool, slots, tokens, width=width)
        close_step(self.pool, step)
        if certain is True:
            commit(self.pool, slots, step.tokens)
        else:
            rows = torch.as_tensor(certain, device=slots.device).expand(slots.shape)
            commit(self.pool, torch.where(rows, slots, PAD_SLOT), step.tokens)
            self._note(slots, torch.where(rows, step.tokens, 0))
        return step

    def prompt(self, slots: Tensor, tokens: Tensor, width: int) -> Step:
        """Open a step whose tokens [B] go to the checkpoint; the engine's own scan runs them."""
        step = open_step(self.pool, slots, tokens, width=width, is_prompt=True)
        close_step(self.pool, step)
        self._note(slots, torch.ones_like(step.tokens))
        return step

    def _note(self, slots: Tensor, tokens: Tensor) -> None:
        """Remember how many tokens of this step are certain. Padded rows add zero to slot 0."""
        at = slots.clamp(min=0).long()
        self._certain.index_add_(0, at, torch.where(slots != PAD_SLOT, tokens - self._certain[at], 0))
