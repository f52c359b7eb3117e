"""Who owns which slot. Plain host-side bookkeeping, without a device and without tensors."""

from __future__ import annotations

from collections.abc import Iterable

PAD_SLOT = -1
"""Marks a padded row of a batch: no memory touched, output zero."""


class SlotError(ValueError):
    """A slot was used in a way that its life cycle forbids; nothing was changed."""


class SlotTable:
    """Live, free and broken slots of a pool of `slots`."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a pool needs at least 1 slot, got {slots}")
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._live: set[int] = set()
        self._broken: dict[int, str] = {}
        self.turns = 0  # slots acquired so far: the round robin of the flush phases

    @property
    def live(self) -> frozenset[int]:
        """Slots acquired and not yet released, broken ones included."""
        return frozenset(self._live)

    @property
    def free(self) -> int:
        """How many slots can still be acquired."""
        return len(self._free)

    def acquire(self, slot: int | None = None) -> int:
        """Take a free slot, or the given one when an engine chose it."""
        if slot is None:
            if not self._free:
                raise SlotError(f"all {self.slots} slots are in use: release one or allocate a larger pool")
            slot = self._free.pop()
        else:
            self._in_pool(slot)
            if slot in self._live:
                raise SlotError(f"slot {slot} is already in use: release it first")
            self._free.remove(slot)
        self._live.add(slot)
        self.turns += 1
        return slot

    def take_all(self) -> None:
        """Every slot is in use from now on: an engine, which has a table of its own, decides by whom."""
        self._free.clear()
        self._live.update(range(self.slots))

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self._in_pool(slot)
        if slot not in self._live:
            raise SlotError(f"slot {slot} is not in use: it was never acquired, or was released already")
        self._live.remove(slot)
        self._broken.pop(slot, None)
        self._free.append(slot)

    def mark_broken(self, slots: Iterable[int], reason: str) -> None:
        """Refuse these slots until they are reset: some of their layers have moved on, others have not."""
        self._broken.update((slot, reason) for slot in slots)

    def mend(self, slot: int) -> None:
        """A reset or restore has made every layer of the slot agree again."""
        self._broken.pop(slot, None)

    def require_live(self, slot: int, allow_broken: bool = False) -> None:
        """SlotError unless the slot is in use and not broken."""
        self._in_pool(slot)
        if slot not in self._live:
            raise SlotError(f"slot {slot} is not in use: acquire it first")
        if slot in self._broken and not allow_broken:
            raise SlotError(
                f"slot {slot} is broken: a step failed between its layers ({self._broken[slot]}); reset or restore it"
            )

    def require_batch(self, slots: Iterable[int]) -> None:
        """SlotError unless every slot is live or PAD_SLOT, and none comes twice."""
        seen: set[int] = set()
        for slot in slots:
            if slot == PAD_SLOT:
                continue
            self.require_live(slot)
            if slot in seen:
                raise SlotError(f"slot {slot} comes twice in one batch")
            seen.add(slot)

    def _in_pool(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise SlotError(f"slot {slot} does not exist: the pool has slots 0..{self.slots - 1}")
