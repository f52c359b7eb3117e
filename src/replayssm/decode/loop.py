"""The decode loop: propose, verify in one forward, keep what is right."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from replayssm.decode.acceptance import Sampling, Verdict, follow, reject
from replayssm.decode.drafts import Draft
from replayssm.decode.proposers import Proposer
from replayssm.decode.runner import Runner
from replayssm.decode.session import Session, require_prompts


@dataclass(frozen=True)
class Round:
    """What one forward of the model has made certain.

    Args:
        tokens: the new tokens of each row; none of a row that is done.
        drafted: how many guesses of each row the forward verified.
        accepted: how many of them stayed: those that were right, up to a stop token.
    """

    tokens: list[list[int]]
    drafted: list[int]
    accepted: list[int]


def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    proposer: Proposer | None = None,
    draft_len: int = 0,
    sampling: Sampling | None = None,
    stop: Collection[int] = (),
) -> Iterator[Round]:
    """Continue prompts, round by round: the first is the prompts' forward, each of the others verifies drafts.

    Without a proposer this is what a `Runner` does, a token in each round.

    The text is that of plain decoding, up to rounding; when sampling, it has the same distribution. Of the model's
    generation_config nothing is applied: no stop token, and nothing that changes logits (repetition_penalty, min_p).

    Args:
        model: a model with `replayssm.attach`, whose verify_len has room for 1 + draft_len tokens.
        prompts: token ids; the rows of the batch may differ in length, and go on by what is right in each.
        max_new_tokens: how many tokens each row gets at most, 0 or more.
        proposer: who guesses; None decodes plainly.
        draft_len: the most guesses per row and forward. A row whose guesses are wrong gets fewer of them for a while.
        sampling: how tokens are drawn; by default the likeliest is taken.
        stop: tokens that end a row, which keeps them.

    Raises:
        ValueError: the model is not attached, draft_len does not fit, or the model cannot do what was asked of it.
            What can be known without a forward is said at the call, not in the first round.
    """
    require_prompts(prompts)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    if not isinstance(stop, Collection):
        raise ValueError(f"stop is a collection of tokens, as in {{2}}, got {stop!r}")
    if (proposer is None) != (draft_len == 0) or draft_len < 0:
        raise ValueError(f"a proposer and a draft_len of 1 or more belong together, got draft_len={draft_len}")
    if proposer is None:
        runner = Runner(model, capacity=max(map(len, prompts)) + max_new_tokens, sampling=sampling, stop=stop)
        nothing = [0] * len(prompts)
        return (Round(new, nothing, nothing) for new in runner.run(prompts, max_new_tokens))
    session = Session(model)
    if draft_len >= session.config.verify_len:
        raise ValueError(
            f"draft_len {draft_len} needs forwards of {draft_len + 1} tokens, and the model was attached with "
            f"verify_len={session.config.verify_len}: attach it with ReplayConfig(verify_len={draft_len + 1}) or more"
        )
    rows = [_Row(list(prompt), max_new_tokens, draft_len) for prompt in prompts]
    return _rounds(session, rows, proposer, sampling, stop)


def _rounds(
    session: Session, rows: Sequence[_Row], proposer: Proposer, sampling: Sampling | None, stop: Collection[int]
) -> Iterator[Round]:
    drafts = [Draft() for _ in rows]
    logits = session.prefill([row.text for row in rows]).unsqueeze(1)
    vocabulary = logits.shape[-1]
    verdicts = _judge(logits, drafts, sampling)
    while True:
        tokens = [row.take(draft, verdict, stop) for row, draft, verdict in zip(rows, drafts, verdicts, strict=True)]
        accepted = [min(len(verdict.path), len(new)) for verdict, new in zip(verdicts, tokens, strict=True)]
        yield Round(tokens, [len(draft) for draft in drafts], accepted)
        if not any(row.left for row in rows):
            return
        drafts = [Draft() for _ in rows]
        wanted = [min(row.draft_len, row.left - 1) if row.left else 0 for row in rows]
        if any(wanted):
            drafts = proposer.propose([row.text for row in rows], wanted)
            _require_vocabulary(drafts, vocabulary)
        # a row that is done rests: it brings no token
        fed = [[row.text[-1], *draft.tokens] if row.left else [] for row, draft in zip(rows, drafts, strict=True)]
        above = [
            [-1, *(parent + 1 for parent in draft.parents)][: len(new)] for draft, new in zip(drafts, fed, strict=True)
        ]
        verdicts = _judge(session.step(fed, above), drafts, sampling)
        paths = [[0, *(number + 1 for number in verdict.path)] for verdict in verdicts]
        session.accept([path if row.left else [] for row, path in zip(rows, paths, strict=True)])


@dataclass
class _Row:
    """One sequence of the batch."""

    text: list[int]
    left: int  # tokens that it may still get; 0 when it is done
    longest: int
    draft_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.draft_len = self.longest

    def take(self, draft: Draft, verdict: Verdict, stop: Collection[int]) -> list[int]:
        """The new tokens, which are part of the text now."""
        new = [*(draft.tokens[number] for number in verdict.path), verdict.token][: self.left]
        ended = next((place for place, token in enumerate(new) if token in stop), None)
        if ended is not None:
            new = new[: ended + 1]
        self.text += new
        self.left = 0 if ended is not None else self.left - len(new)
        if len(draft):
            # cheap to be wrong by one, and a whole draft of right guesses says that there are more
            whole = len(verdict.path) == max(draft.depth(number) for number in range(len(draft)))
            self.draft_len = min(self.longest, self.draft_len + 2) if whole else max(1, self.draft_len - 1)
        return new


def _require_vocabulary(drafts: Sequence[Draft], vocabulary: int) -> None:
    """ValueError where guesses are no tokens of a model with so many, or their chances are not for each of them."""
    for draft in drafts:
        sizes = [len(chances) for chances in draft.chances if chances is not None and len(chances) != vocabulary]
        outside = [token for token in draft.tokens if token >= vocabulary]
        if sizes or outside:
            found = f"drawn from {sizes[0]}" if sizes else f"token {outside[0]}"
            raise ValueError(
                f"the model has {vocabulary} tokens, and a guess was {found}: use DraftModel(vocabulary={vocabulary})"
            )


def _judge(logits: Tensor, drafts: Sequence[Draft], sampling: Sampling | None) -> list[Verdict]:
    """What stays of each row's draft, by the logits [B, T, vocabulary] behind its tokens."""
    if sampling is None:
        return [follow(choices, draft) for choices, draft in zip(logits.argmax(-1).tolist(), drafts, strict=True)]
    chances = sampling.distribution(logits)
    return [reject(row, draft, sampling) for row, draft in zip(chances, drafts, strict=True)]
