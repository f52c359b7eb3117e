"""What stays of a draft, once the model has said what follows each of its tokens.

Both rules walk down the tree from the certain token. They end with one token more than they accept: what the model
itself puts behind the last accepted guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.decode.drafts import Draft


class Sampling:
    """How the next token is drawn.

    Args:
        temperature: divides the logits.
        top_p: draw among the likeliest tokens that make up this probability.
        seed: makes the draws repeatable.
    """

    def __init__(self, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}; decode without Sampling to be greedy")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
        self.temperature = temperature
        self.top_p = top_p
        self.seed = seed
        self.random = torch.Generator().manual_seed(seed)
        self._on: dict[torch.device, torch.Generator] = {}

    def distribution(self, logits: Tensor) -> Tensor:
        """What the next token is drawn from: [..., vocabulary], in fp64."""
        chances = (logits.double() / self.temperature).softmax(-1)
        if self.top_p == 1:
            return chances
        ordered, order = chances.sort(-1, descending=True)
        # the token that crosses the border is still in
        ordered = torch.where(ordered.cumsum(-1) - ordered < self.top_p, ordered, 0)
        kept = torch.zeros_like(chances).scatter(-1, order, ordered)
        return kept / kept.sum(-1, keepdim=True)

    def draw(self, chances: Tensor) -> int:
        """One token of a distribution [vocabulary]."""
        return int(torch.multinomial(chances.cpu(), 1, generator=self.random))

    def fork(self) -> Sampling:
        """The same with a stream of its own, which is independent of this one whatever seed other streams have."""
        seed = int(torch.randint(2**32, (), generator=self.random))
        return Sampling(self.temperature, self.top_p, seed)

    def random_on(self, device: torch.device) -> torch.Generator:
        """Where chance comes from on a device: a stream of its own there."""
        if device not in self._on:
            self._on[device] = torch.Generator(device).manual_seed(self.seed)
        return self._on[device]

    def pick(self, logits: Tensor) -> Tensor:
        """One token for each distribution of `logits` [..., vocabulary], drawn without waiting for the device.

        Of independent waiting times with the rates p, the shortest is that of token i with probability p_i.
        """
        chances = self.distribution(logits)
        waiting = torch.empty_like(chances).exponential_(generator=self.random_on(logits.device))
        return (chances / waiting).argmax(-1)

    def happens(self, chance: float) -> bool:
        """True with this probability."""
        return float(torch.rand((), generator=self.random, dtype=torch.float64)) < chance


@dataclass(frozen=True)
class Verdict:
    """What stays of a draft.

    Args:
        path: the accepted guesses, from the certain token downwards.
        token: what follows the last of them.
    """

    path: list[int]
    token: int


def follow(choices: Sequence[int], draft: Draft) -> Verdict:
    """Greedy: a guess stays if it is what the model would have chosen.

    Args:
        choices: the model's choice behind the certain token, then behind each guess.
        draft: the guesses.
    """
    path: list[int] = []
    at = -1
    while True:
        right = [child for child in draft.children(at) if draft.tokens[child] == choices[at + 1]]
        if not right:
            return Verdict(path, choices[at + 1])
        at = right[0]
        path.append(at)


def reject(chances: Tensor, draft: Draft, sampling: Sampling) -> Verdict:
    """Sampling: guesses are kept or refused so that the text is distributed as if there had been no draft.

    Guesses must be independent of what `sampling` draws.

    Behind an accepted token the model's distribution is p. The first guess x there, drawn from q, stays with
    probability min(1, p(x) / q(x)). If it is refused, max(p - q, 0), made to sum to 1, takes the place of p, and the
    next sibling, drawn from a q of its own, is asked in the same way. When all are refused the token is drawn from what
    is left. Each question keeps the distribution, whatever q is; q of a chosen guess is 1 on it and 0 elsewhere.

    Args:
        chances: [1 + guesses, vocabulary], what the model draws from behind the certain token and each guess.
        draft: the guesses.
        sampling: where chance comes from.
    """
    path: list[int] = []
    at = -1
    while True:
        left = chances[at + 1]
        for child in draft.children(at):
            token, drawn_from = draft.tokens[child], draft.chances[child]
            if drawn_from is None:
                drawn_from = torch.zeros_like(left)
                drawn_from[token] = 1
            if sampling.happens(float(left[token] / drawn_from[token])):
                at = child
                path.append(child)
                break
            left = (left - drawn_from.to(left)).clamp(min=0)
            left = left / left.sum()
        else:
            return Verdict(path, sampling.draw(left))
