"""Proposers for tests, and one run of the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replayssm.decode import Draft, Proposer, Round, decode

from ..attach.helpers import attached
from ..attach.models import VOCABULARY


def wrong(token: int, by: int = 1) -> int:
    """Another token, none of the special ones."""
    return 3 + (token - 3 + by) % 87


class Dictated:
    """Knows the texts. At length n the first `right(n)` tokens of a draft are those of the text, all others wrong.

    Args:
        texts: the whole text of each row.
        right: text length -> right guesses.
        branches: siblings at each place; the right one stands at a place that changes with the length.
    """

    def __init__(self, texts: Sequence[Sequence[int]], right: Callable[[int], int], branches: int = 1) -> None:
        self.texts = texts
        self.right = right
        self.branches = branches

    def propose(self, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Draft]:
        return [
            self._draft(list(whole[len(text) :]), len(text), length)
            for whole, text, length in zip(self.texts, texts, lengths, strict=True)
        ]

    def _draft(self, coming: list[int], at: int, length: int) -> Draft:
        draft, spine = Draft(), -1
        for place, token in enumerate(coming):
            count = min(self.branches, length - len(draft))
            if count < 1:
                break
            siblings = [wrong(token, 1 + i) for i in range(count)]
            taken = (at + place) % count
            if place < self.right(at):
                siblings[taken] = token
            first = len(draft)
            for sibling in siblings:
                draft.add(sibling, spine)
            spine = first + taken
            # a branch off the path, so that rows of the path have others between them
            if self.branches > 1 and count > 1 and len(draft) < length:
                draft.add(wrong(token, 7), first + (taken + 1) % count)
        return draft


@dataclass
class Outcome:
    """One run: the new tokens of each row, and its rounds."""

    tokens: list[list[int]]
    rounds: list[Round]

    @property
    def accepted(self) -> int:
        return sum(sum(r.accepted) for r in self.rounds)

    @property
    def drafted(self) -> int:
        return sum(sum(r.drafted) for r in self.rounds)


def run(
    model: Any, prompts: Sequence[Sequence[int]], new: int, proposer: Proposer | None = None, **options: Any
) -> Outcome:
    """Decode with an attached model."""
    rounds = list(decode(model, prompts, max_new_tokens=new, proposer=proposer, **options))
    return Outcome([text_of(rounds, row) for row in range(len(prompts))], rounds)


def text_of(rounds: Sequence[Round], row: int) -> list[int]:
    """The new tokens of one row."""
    return [token for r in rounds for token in r.tokens[row]]


def plain_text(model: Any, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """The whole greedy text of each prompt, one by one, of the model as it is without us."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(ids, max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(ids))
        found.append(out[0].tolist())
    return found


def room(drafts: int, window: int = 16) -> dict[str, int]:
    """Options of `attach` for drafts of this length."""
    return {"window": window, "verify_len": 1 + drafts}


__all__ = ["VOCABULARY", "Dictated", "Outcome", "attached", "plain_text", "room", "run", "text_of", "wrong"]
