"""The plan of a step: one row of int64 numbers per batch row, on the device, that every layer of the step works from.

It is one tensor because one small launch can then write all of it, and a kernel finds all of it through one pointer.
"""

from __future__ import annotations

COLUMNS = {
    "slot": "slot of the row, PAD_SLOT on padded rows",
    "tokens": "new tokens of the row, 0..T; 0 on padded rows",
    "folded": "committed records that the row's flush folds before its tokens run, 0 where nothing is due",
    "fold_start": "physical ring row of the oldest of those",
    "history": "committed records in the ring that outputs read, after the flush",
    "empty": "1 where the checkpoint held no token before this step: its memory is undefined and stands for zero",
    "order": "entry i is the i-th row to run: rows that fold first, then the others, each in batch order",
    "due_count": "how many rows fold, the same in every row",
    "start": "physical ring row of the oldest record of the history; drafts follow at start + history",
    "position": "tokens committed before this step",
    "due": "1 where the row's ring is emptied by this step, which may be empty already",
    "tree": "how the row's tokens descend from each other, as `cursor.tree_code` puts it; 0 for a chain",
}
"""Column -> meaning. Kernels read the first eight; `flow.step.Step` has all of them by name."""

COLUMN = {name: index for index, name in enumerate(COLUMNS)}
"""Column -> index."""
