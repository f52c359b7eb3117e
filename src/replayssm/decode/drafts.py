"""A draft: a tree of guessed tokens behind the last certain token of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Draft:
    """Guessed tokens of one sequence. One branch is a chain; nothing in it is a row that decodes plainly.

    Args:
        tokens: the guesses, parents before children; siblings differ.
        parents: the guess that each one follows, -1 for the certain token.
        chances: of each guess the distribution [vocabulary] that it was drawn from, given the earlier siblings; None
            where it was not drawn but chosen.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[Tensor | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, chance: Tensor | None = None) -> int:
        """Append a guess; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)
        return len(self.tokens) - 1

    def children(self, parent: int) -> list[int]:
        """The guesses that follow `parent`, in the order in which they were made."""
        return [number for number, above in enumerate(self.parents) if above == parent]

    def depth(self, number: int) -> int:
        """How many guesses lead to this one, itself included; 0 for the certain token, -1."""
        return 0 if number < 0 else 1 + self.depth(self.parents[number])
