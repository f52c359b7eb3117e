"""`replayssm generate --speculate`: what the options ask for, and the run itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replayssm import ReplayConfig
from replayssm.cli.errors import CliError, first_line
from replayssm.config import MAX_VERIFY_LEN

if TYPE_CHECKING:
    from replayssm.decode import Proposer, Sampling

TREE_BRANCHES = 2
DEFAULT_DRAFT_LEN = 4

SETTINGS: dict[str, float | None] = {
    "guidance_scale": 1,
    "sequence_bias": None,
    "encoder_repetition_penalty": 1,
    "repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "watermarking_config": None,
}
"""What of a generation config changes the logits, and the value (beside None) with which it does not."""
SAMPLING_SETTINGS: dict[str, float | None] = {
    "top_h": 1,
    "min_p": 0,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
}
"""The same for a text that is sampled."""


class Guesser(StrEnum):
    """Who drafts."""

    ngram = "ngram"
    model = "model"


@dataclass(frozen=True)
class Speculation:
    """Drafts as the options ask for them."""

    guesser: Guesser
    draft_len: int
    tree: bool
    draft_folder: Path | None

    @staticmethod
    def choose(
        guesser: Guesser | None, draft_len: int | None, tree: bool, draft_folder: Path | None, window: int
    ) -> Speculation | None:
        """The speculation that the options ask for; None is plain decoding."""
        if guesser is None:
            given = {"--draft-len": draft_len is not None, "--tree": tree, "--draft-model": draft_folder is not None}
            idle = [option for option, is_there in given.items() if is_there]
            if idle:
                raise CliError(f"{idle[0]} has no effect without --speculate; add it, or leave {idle[0]} out.")
            return None
        if draft_folder is not None and guesser is not Guesser.model:
            raise CliError("--draft-model has no effect with --speculate ngram; say --speculate model.")
        most = min(window, MAX_VERIFY_LEN) - 1
        length = min(DEFAULT_DRAFT_LEN, most) if draft_len is None else draft_len
        if most < 1:
            raise CliError(f"--speculate needs room for a draft: raise --window to 2 or more, got {window}.")
        if not 1 <= length <= most:
            raise CliError(f"--draft-len must be in 1..{most} with --window {window}, got {length}.")
        return Speculation(guesser, length, tree, draft_folder)

    @property
    def branches(self) -> int:
        return TREE_BRANCHES if self.tree else 1

    def config(self, precision: str, window: int) -> ReplayConfig:
        """How the models keep their state: with room for the certain token and a draft."""
        return ReplayConfig.of(precision, window=window, verify_len=1 + self.draft_len)


@dataclass
class Drafted:
    """What became of the drafts of a run.

    Args:
        steps: forwards of the model after the prompt's.
        drafted: guesses that they verified.
        accepted: guesses that were right.
        tokens: the new text.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: list[int] = field(default_factory=list)


def run(
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    proposer: Proposer,
    speculation: Speculation,
    sampling: Sampling | None,
    streamer: Any,
) -> Drafted:
    """Continue one prompt."""
    import torch

    from replayssm.decode import decode

    end = model.generation_config.eos_token_id
    stop = {end} if isinstance(end, int) else set(end or ())
    outcome = Drafted(steps=-1)  # the first round is the prompt's
    if streamer is not None:
        streamer.put(torch.tensor([list(prompt)]))
    rounds = decode(
        model,
        [prompt],
        max_new_tokens=max_new_tokens,
        proposer=proposer,
        draft_len=speculation.draft_len,
        sampling=sampling,
        stop=stop,
    )
    try:
        for done in rounds:
            outcome.steps += 1
            outcome.drafted += done.drafted[0]
            outcome.accepted += done.accepted[0]
            outcome.tokens += done.tokens[0]
            if streamer is not None:
                for token in done.tokens[0]:
                    streamer.put(torch.tensor([token]))
    except ValueError as error:  # a model that takes no trees
        raise CliError(f"{first_line(error)}.") from None
    if streamer is not None:
        streamer.end()
    return outcome


def require_plain_logits(generation_config: Any, sampled: bool) -> None:
    """CliError where `generate` would change the model's logits by a setting that the decode loop does not apply."""
    for setting, idle in (SETTINGS | SAMPLING_SETTINGS if sampled else SETTINGS).items():
        value = getattr(generation_config, setting, None)
        if value is not None and value != idle:
            raise CliError(
                f"--speculate does not apply {setting}={value} of the model's generation_config.json; take it out "
                "there, or leave out --speculate."
            )


def require_same_tokens(target: Any, draft: Any) -> None:
    """CliError unless both tokenizers mean the same by every token."""
    if target.get_vocab() != draft.get_vocab():
        raise CliError(
            "The draft model has another tokenizer than the model, so its guesses would mean something else; "
            "name one with the same tokenizer with --draft-model, or use --speculate ngram."
        )
