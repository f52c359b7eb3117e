"""The life cycle of slots that an engine owns, without the engine.

An engine schedules: every step it says which blocks of its cache run, with how many tokens, which of them start anew,
and how many tokens of its last step it kept. A block is a slot. Everything else is the cursor's, which lives beside the
slots and is addressed by slot.

All of a step's cursor arithmetic is done when it opens: what is pending is committed, the plan is made, and the cursor
is settled at once. Layers read the plan alone, so no layer can see another one's cursor, however the engine splits the
model into graphs, pieces or pipeline stages; and nothing has to happen after a last layer that nobody can name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.attach.vllm.clamped import ClampWatch
from replayssm.flow.backend import kernels_of
from replayssm.flow.commit import commit
from replayssm.flow.prefill import state_before
from replayssm.flow.step import Step, close_step, open_step
from replayssm.state import cursor as arithmetic
from replayssm.state.plan import COLUMNS
from replayssm.state.pool import StatePool
from replayssm.state.slots import PAD_SLOT


@dataclass(frozen=True)
class StepMemory:
    """What a captured graph reads of a step: memory that stays, for up to R rows.

    Args:
        plan: int64 [R, columns].
        blocks: int32 [R], the rows' blocks as the engine numbers them.
        kept: int32 [R], how many tokens of its last step each row kept, at least 1.
    """

    plan: Tensor
    blocks: Tensor
    kept: Tensor

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str) -> StepMemory:
        plan = torch.zeros(rows, len(COLUMNS), dtype=torch.int64, device=device)
        blocks, kept = torch.zeros(2, rows, dtype=torch.int32, device=device).unbind()
        return cls(plan, blocks, kept)

    def rows(self, count: int) -> StepMemory:
        """The first `count` rows."""
        return StepMemory(self.plan[:count], self.blocks[:count], self.kept[:count])


class EngineSteps:
    """Steps over a pool whose slots belong to an engine.

    Args:
        pool: the pool; all of its slots count as in use from now on.
        null: the engine's number of no block, which marks padded rows.
        certain: int64 [slots], strided as the cursor is: how many tokens a slot's last step had if all of them were
            certain, else 0. Memory of its own by default.
    """

    def __init__(self, pool: StatePool, null: int = 0, certain: Tensor | None = None) -> None:
        self.pool = pool
        self.null = null
        self.certain = torch.ones_like(pool.cursor.start) if certain is None else certain
        self._turns = self._step = 0
        self._last = torch.zeros(pool.slots.slots, dtype=torch.int64, device=pool.device)
        """Per slot, the number of the last step that it was in."""
        self._watch = ClampWatch(pool)
        pool.slots.take_all()

    def warm_up(self) -> None:
        """Compile what a prompt launches, by one without rows: an engine warms up with decoding alone."""
        blocks = torch.full((1,), self.null, device=self.pool.device)
        step, _ = self.prompt(blocks, torch.zeros_like(blocks), 1)
        state_before(self.pool, 0, step)

    def restart(self, blocks: Tensor) -> None:
        """These blocks [n] begin a sequence: whatever they held is forgotten. None of them may be `null`."""
        cursor, config, slots = self.pool.cursor, self.pool.config, blocks.long()
        turns = torch.arange(self._turns, self._turns + len(slots), device=slots.device)
        self._turns += len(slots)
        for name, counter in cursor.items():
            if name != "saturated":  # which the watch adds up over all sequences
                counter[slots] = 0
        self.certain[slots] = 1
        # of stochastic rounding: an engine gives no number that stays with a sequence
        cursor.seed[slots] = turns
        cursor.window[slots] = (
            arithmetic.first_window(turns, config.window, config.verify_len)
            if config.stagger
            else torch.full_like(turns, config.window)
        )

    def accepted(self, blocks: Tensor, said: Tensor | None, computed: Tensor) -> Tensor:
        """How many tokens of its last step each row [B] of this step kept; called once per step, for all of its rows.

        An engine says so of the rows of the step before. A row that was left out of that one (there was no room for it)
        it has forgotten: vLLM then says 1. Before a step without drafts some versions of it say nothing at all. What it
        has computed of the sequence still shows it.

        Args:
            blocks: [B].
            said: [B], the engine's word, or None.
            computed: [B], tokens of each sequence that stand before this step.
        """
        slots = blocks.long()
        self._step += 1
        kept = computed - self.pool.cursor.position[slots]
        if said is not None:
            kept = torch.where(self._last[slots] == self._step - 1, said, kept)
        self._last[slots] = self._step
        return kept.int()

    def decode(
        self,
        memory: StepMemory,
        blocks: Tensor,
        width: int = 1,
        *,
        starts: Tensor | None = None,
        accepted: Tensor | None = None,
        certain: Tensor | None = None,
    ) -> Step:
        """Open a step whose tokens go to the ring; what its graph reads is written to `memory`, of B rows.

        Args:
            memory: of B rows.
            blocks: [B], any stride.
            width: padded number of tokens.
            starts: [B + 1], where each row's tokens begin; None where every row has one.
            accepted: [B], how many tokens of its last step each row kept. It counts for drafts only: a row whose
                tokens were all certain kept them, whatever the number says.
            certain: bool [B], whether all of a row's tokens stay: those that the engine sampled, and a prompt's. They
                are committed with the step; drafts wait for the next one. None where no row has drafts.
        """
        self._watch.step()
        kernels = kernels_of(self.pool)
        if kernels is not None:
            kernels.engine_step(
                memory.plan,
                memory.blocks,
                memory.kept,
                self.certain,
                self.null,
                blocks,
                width,
                starts,
                accepted,
                certain,
            )
        else:
            self._decode(memory, blocks, width, starts, accepted, certain)
        return Step(memory.plan, width, False, self.pool.config.window, self.pool.ring_rows)

    def prompt(self, blocks: Tensor, tokens: Tensor, width: int, accepted: Tensor | None = None) -> tuple[Step, Tensor]:
        """Open a step whose tokens [B] go to the checkpoint; the engine's own scan runs them.

        Returns:
            The step, and int64 [B], how many tokens of its last step each row kept, at least 1.
        """
        self._watch.step()
        slots = self._slots(blocks)
        kept = self._accept(slots, accepted)
        step = open_step(self.pool, slots, tokens, width=width, is_prompt=True)
        close_step(self.pool, step)
        self._note(slots, torch.ones_like(step.tokens))
        return step, kept

    def _slots(self, blocks: Tensor) -> Tensor:
        return torch.where(blocks == self.null, PAD_SLOT, blocks.long())

    def _decode(
        self,
        memory: StepMemory,
        blocks: Tensor,
        width: int,
        starts: Tensor | None,
        accepted: Tensor | None,
        certain: Tensor | None,
    ) -> None:
        """`decode` in the verbs of the flow, which is what it means."""
        slots = self._slots(blocks)
        memory.blocks.copy_(blocks)
        memory.kept.copy_(self._accept(slots, accepted))
        step = open_step(self.pool, slots, 1 if starts is None else starts.diff(), width=width)
        close_step(self.pool, step)
        real = slots if certain is None else torch.where(certain, slots, PAD_SLOT)
        commit(self.pool, real, step.tokens)
        self._note(slots, step.tokens if certain is None else torch.where(certain, step.tokens, 0))
        memory.plan.copy_(step.plan)

    def _accept(self, slots: Tensor, accepted: Tensor | None) -> Tensor:
        """Commit what is pending, keyed by slot; how many tokens [B] of their last step the slots kept."""
        at = slots.clamp(min=0)
        given = torch.ones_like(slots) if accepted is None else accepted.long()
        if accepted is not None:
            commit(self.pool, slots, given.clamp(min=0).minimum(self.pool.cursor.pending[at]))
        known = self.certain[at]
        return torch.where((slots != PAD_SLOT) & (known > 0), known, given).clamp(min=1)

    def _note(self, slots: Tensor, tokens: Tensor) -> None:
        """Remember how many tokens of this step are certain. Padded rows add zero to slot 0."""
        at = slots.clamp(min=0)
        self.certain.index_add_(0, at, torch.where(slots != PAD_SLOT, tokens - self.certain[at], 0))
