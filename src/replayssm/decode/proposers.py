"""Who guesses the tokens that a model then verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from replayssm.decode.acceptance import Sampling
from replayssm.decode.drafts import Draft
from replayssm.decode.session import Session


class Proposer(Protocol):
    """Guesses for a batch of texts. The texts of one proposer only ever grow."""

    def propose(self, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Draft]:
        """A draft of at most `lengths[i]` guesses behind each text; an empty one where there is nothing to guess."""


class PromptLookup:
    """Guesses that a text goes on as it did where its last tokens stood before.

    Args:
        longest: tokens that must be the same, at best; fewer are tried down to 1.
        branches: different continuations in a draft; 1 is a chain.
    """

    def __init__(self, longest: int = 3, branches: int = 1) -> None:
        self.longest = longest
        self.branches = _at_least_one(branches)

    def propose(self, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Draft]:
        return [self._look_up(list(text), length) for text, length in zip(texts, lengths, strict=True)]

    def _look_up(self, text: list[int], length: int) -> Draft:
        draft = Draft()
        if length < 1:
            return draft
        begins: list[int] = []  # of continuations that begin with different tokens, the likeliest first
        for same in range(min(self.longest, len(text) - 1), 0, -1):
            tail = text[-same:]
            for end in range(len(text) - 1, same - 1, -1):  # the latest place first
                if text[end - same : end] == tail and text[end] not in (text[begin] for begin in begins):
                    begins.append(end)
                    if len(begins) == self.branches:
                        break
            if len(begins) == self.branches:
                break
        each = [length // len(begins)] * len(begins) if begins else []
        for branch in range(length - sum(each) if begins else 0):
            each[branch] += 1
        for begin, share in zip(begins, each, strict=True):
            parent = -1
            for token in text[begin : begin + share]:
                parent = draft.add(token, parent)
        return draft


class DraftModel:
    """Guesses with a smaller attached model of the same vocabulary.

    The draft model keeps what is certain and nothing else: each of its forwards runs the draft so far behind that, and
    what it wrote is dropped again, as in the model that verifies. Rejected drafts leave no trace. Texts that do not
    continue those before, as in another run of `decode`, are a new start.

    Args:
        model: the draft model, with `replayssm.attach`. A draft is at most 1 + verify_len tokens deep.
        branches: guesses at each place, of which the first is drafted on; 1 is a chain.
        sampling: draw the guesses, without putting back, in place of taking the likeliest. Chance comes from a stream
            of its own, so that it may be the sampling of the loop, or one with the same seed.
        vocabulary: tokens of the model that verifies, where padding has made the draft model's another number: what
            both have is guessed. By default they are as many.
    """

    def __init__(
        self, model: Any, branches: int = 1, sampling: Sampling | None = None, vocabulary: int | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self.session = Session(model)
        self.branches = _at_least_one(branches)
        self.sampling = None if sampling is None else sampling.fork()
        self._held: list[list[int]] = []
        """What the draft model has taken in of each text."""

    def propose(self, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Draft]:
        known = self.session.model.get_input_embeddings().weight.shape[0]
        largest = max(map(max, texts))
        if largest >= known:
            if self.vocabulary is None:
                raise ValueError(
                    f"a text has token {largest}, and the draft model has {known} tokens: use "
                    "DraftModel(vocabulary=...) with the number of the model that verifies"
                )
            # another in the place of one that it lacks: what it guesses is verified anyway
            texts = [[token if token < known else 0 for token in text] for text in texts]
        drafts = [Draft() for _ in texts]
        spines: list[list[int]] = [[] for _ in texts]  # the guesses that are drafted on, by number
        logits = self._catch_up(texts, lengths)
        going = [length > 0 for length in lengths]
        while True:
            for row, (draft, spine) in enumerate(zip(drafts, spines, strict=True)):
                if going[row]:
                    parent, first = spine[-1] if spine else -1, len(draft)
                    self._branch(draft, parent, logits[row], min(self.branches, lengths[row] - first))
                    spine.append(first)
            going = [
                len(draft) < length and len(spine) <= self.session.config.verify_len
                for draft, spine, length in zip(drafts, spines, lengths, strict=True)
            ]
            if not any(going):
                return drafts
            fed = [
                [draft.tokens[number] for number in spine] if goes else []
                for draft, spine, goes in zip(drafts, spines, going, strict=True)
            ]
            found = self.session.step(fed)
            self.session.accept([[] for _ in fed])
            logits = _last(found, fed, logits)

    def _catch_up(self, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Tensor]:
        """Take in what has become certain; logits [vocabulary] behind each text that wants guesses."""
        if not self._go_on(texts, lengths):
            self.session = Session(self.session.model)
            self._held = [list(text) for text in texts]
            return list(self.session.prefill(texts))
        room = self.session.config.verify_len
        logits = [torch.empty(0) for _ in texts]
        while True:
            new = [
                list(text[len(held) : len(held) + room]) if length else []
                for text, held, length in zip(texts, self._held, lengths, strict=True)
            ]
            if not any(new):
                return logits
            found = self.session.step(new)
            self.session.accept([range(len(row)) for row in new])
            logits = _last(found, new, logits)
            self._held = [held + row for held, row in zip(self._held, new, strict=True)]

    def _go_on(self, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> bool:
        """Whether these are the texts that the draft model holds, longer by now where they want guesses."""
        return len(texts) == len(self._held) and all(
            held == list(text[: len(held)]) and (len(held) < len(text) or not length)
            for held, text, length in zip(self._held, texts, lengths, strict=True)
        )

    def _branch(self, draft: Draft, parent: int, logits: Tensor, count: int) -> None:
        """Add `count` different guesses behind `parent`."""
        if self.vocabulary is not None:  # more tokens are cropped, and those that are missing have no chance
            logits = nn.functional.pad(logits, (0, self.vocabulary - len(logits)), value=-torch.inf)
        if self.sampling is None:
            for token in logits.topk(count).indices.tolist():
                draft.add(token, parent)
            return
        chances = self.sampling.distribution(logits)
        for _ in range(count):
            if not bool(chances.sum() > 0):  # fewer tokens have a chance than there are branches
                return
            chances = chances / chances.sum()
            token = self.sampling.draw(chances)
            draft.add(token, parent, chances)
            chances = chances.clone()
            chances[token] = 0


def _at_least_one(branches: int) -> int:
    if branches < 1:
        raise ValueError(f"branches must be at least 1, got {branches}")
    return branches


def _last(found: Tensor, fed: Sequence[Sequence[int]], before: list[Tensor]) -> list[Tensor]:
    """Logits [vocabulary] behind the last token of each row; of a row that was fed nothing, those before."""
    return [found[row, len(new) - 1] if new else before[row] for row, new in enumerate(fed)]
