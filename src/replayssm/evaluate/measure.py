"""Divergence, perplexity and agreement from logits, by position, and scores of multiple-choice questions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayssm.attach.transformers.find import dtype_of, find_layers
from replayssm.config import ReplayConfig
from replayssm.evaluate.forward import logits_of, replayed_forward
from replayssm.evaluate.precision import REFERENCE, Precision
from replayssm.evaluate.replay import piece_of
from replayssm.state.layout import StateLayout

BINS = 256
"""Most positions in a result: longer texts are averaged over equal stretches."""
LOGITS_AT_ONCE = 1 << 26
"""Elements of the logits that are held at a time, over all settings."""


@dataclass(frozen=True)
class Row:
    """One setting over the text, against the reference.

    Args:
        precision: its name.
        kl: mean KL divergence of its next-token distributions from the reference's, nats.
        perplexity: exp of the mean negative log-likelihood of the text.
        agreement: share of positions where both have the same likeliest token.
        state_error: relative error of the states at the end, mean over layers.
        slot_bytes: state, ring and carry of one sequence in plain decoding, all recurrent layers.
        kl_by_position, agreement_by_position: means over equal stretches of the text.
        state_error_by_position: after equal stretches of the text, mean over layers.
    """

    precision: str
    kl: float
    perplexity: float
    agreement: float
    state_error: float
    slot_bytes: int
    kl_by_position: list[float]
    agreement_by_position: list[float]
    state_error_by_position: list[float]


@dataclass(frozen=True)
class Evaluation:
    """A text in several precisions.

    Args:
        tokens, sequences: length of the text and how many of them.
        window: tokens between two flushes.
        stretch: tokens that one entry of the lists by position stands for.
        state_stretch: the same for state errors.
        half_lives: per recurrent layer and head, in tokens: of the decay alone.
        memories: the same, tokens after which 1 / e of the state is left, with what a delta rule overwrites.
        rows: one per setting; the first is the reference.
    """

    tokens: int
    sequences: int
    window: int
    stretch: int
    state_stretch: int
    half_lives: list[list[float]]
    memories: list[list[float]]
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def evaluate(
    model: Any,
    ids: Tensor,
    precisions: Sequence[str],
    *,
    window: int = 16,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Decode a given text in each precision and compare with fp32.

    Args:
        model: a causal language model of transformers, in eval mode.
        ids: int64 [sequences, tokens].
        precisions: names of settings as in `Precision`; fp32 is added in front where it is missing.
        window: tokens between two flushes.
        progress: called with a number of tokens each time that a recurrent layer has run so many.
    """
    sequences, tokens = ids.shape
    if tokens < 2:
        raise ValueError(f"a text needs at least 2 tokens, got {tokens}")
    names = [REFERENCE, *dict.fromkeys(name for name in precisions if name != REFERENCE)]
    configs = [Precision(name).config(window) for name in names]
    result = replayed_forward(model, ids, configs, progress)
    kl, agreement, loss = _by_position(model, ids, result.hidden)
    states = torch.stack(result.state_errors).mean(0)
    stretch, kl_by_position = _stretches(kl)
    _, agreement_by_position = _stretches(agreement)
    pieces, states_by_position = _stretches(states)
    rows = [
        Row(
            name,
            float(kl[i].mean()),
            math.exp(float(loss[i])),
            float(agreement[i].mean()),
            float(states[i, -1]),
            slot_bytes(model, config),
            kl_by_position[i].tolist(),
            agreement_by_position[i].tolist(),
            states_by_position[i].tolist(),
        )
        for i, (name, config) in enumerate(zip(names, configs, strict=True))
    ]
    state_stretch = piece_of(configs[0]) * pieces
    half_lives, memories = ([x.tolist() for x in each] for each in (result.half_lives, result.memories))
    return Evaluation(tokens, sequences, window, stretch, state_stretch, half_lives, memories, rows)


def slot_bytes(model: Any, config: ReplayConfig) -> int:
    """State, ring and carry of one sequence in plain decoding, a token a step, all recurrent layers.

    Raises:
        ValueError: a format that cannot hold the model's states.
    """
    plain = replace(config, verify_len=1)
    return sum(
        StateLayout(layer.recurrence, layer.geometry, plain, dtype_of(layer.mixer)).slot_bytes
        for layer in find_layers(model)
    )


def _by_position(model: Any, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL and agreement [settings, tokens - 1], loss [settings]; means over rows of `hidden` [settings, rows, T, D]."""
    settings, rows, tokens, _ = hidden.shape
    kl, agreement, loss = [], [], torch.zeros(settings, dtype=torch.float64, device=ids.device)
    vocabulary = model.config.get_text_config().vocab_size
    many = max(1, LOGITS_AT_ONCE // (settings * rows * vocabulary))
    for begin in range(0, tokens - 1, many):
        part = hidden[:, :, begin : min(begin + many, tokens - 1)]
        # in fp64: the divergence is of second order in the differences of logits, and would drown in fp32 sums
        logs = logits_of(model, part.flatten(0, 1)).double().log_softmax(-1).unflatten(0, (settings, rows))
        reference = logs[:1]
        kl.append((reference.exp() * (reference - logs)).sum(-1).mean(1))
        agreement.append((logs.argmax(-1) == reference.argmax(-1)).double().mean(1))
        target = ids[:, begin + 1 : begin + 1 + part.shape[2]]
        loss -= logs.gather(-1, target.expand(settings, -1, -1).unsqueeze(-1)).sum((1, 2, 3))
    return torch.cat(kl, 1), torch.cat(agreement, 1), loss / (rows * (tokens - 1))


def _stretches(x: Tensor) -> tuple[int, Tensor]:
    """(length of a stretch, means over equal stretches of the last dim); a shorter rest joins the last one."""
    length = -(-x.shape[-1] // BINS)
    count = max(1, x.shape[-1] // length)
    parts = x.split([length] * (count - 1) + [x.shape[-1] - length * (count - 1)], -1)
    return length, torch.stack([part.mean(-1) for part in parts], -1)


@dataclass(frozen=True)
class Question:
    """A multiple-choice question: a text, its possible continuations, and which of them is right."""

    text: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: Path) -> list[Question]:
    """Questions of a JSONL file: {"question": text, "choices": [texts], "answer": index} a line.

    Raises:
        ValueError: the file is not UTF-8 text, or a line is no such object; the message has its number.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error})") from None
    lines = text.split("\n")  # splitlines() would split at U+2028 too, which JSON has inside its strings
    found = [_question(line, f"line {number} of {path}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path} has no questions")
    return found


def _question(line: str, where: str) -> Question:
    try:
        entry = json.loads(line)
        text, choices, index = entry["question"], entry["choices"], entry["answer"]
    except (ValueError, KeyError, TypeError):
        text = choices = index = None
    of_kind = isinstance(text, str) and isinstance(choices, list) and type(index) is int  # which True is not
    if not (of_kind and all(isinstance(choice, str) for choice in choices)):
        raise ValueError(f'{where} is no {{"question": text, "choices": [texts], "answer": index}}')
    if not (text and all(choices)):
        raise ValueError(f"{where}: the question or one of its choices is empty")
    if not 0 <= index < len(choices):
        raise ValueError(f"{where}: answer {index} is no index of {len(choices)} choices")
    return Question(text, tuple(choices), index)


def encode(tokenizer: Any, question: Question) -> tuple[list[int], list[list[int]]]:
    """Tokens of the question, and of each of its choices by itself.

    Raises:
        ValueError: one of these texts has no token.
    """
    start = tokenizer(question.text)["input_ids"]
    ends = [tokenizer(choice, add_special_tokens=False)["input_ids"] for choice in question.choices]
    if not start or not all(ends):
        raise ValueError(f"a question and each of its choices need at least one token: {question.text[:60]!r}")
    return start, ends


@dataclass(frozen=True)
class Answers:
    """Share of questions answered right in one precision.

    Args:
        precision: its name.
        accuracy: the likeliest choice is the right one.
        accuracy_per_token: the same by likelihood per token, which favours short choices less.
        same_as_reference: the likeliest choice is the reference's.
    """

    precision: str
    accuracy: float
    accuracy_per_token: float
    same_as_reference: float


def answer(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    precisions: Sequence[str],
    *,
    window: int = 16,
    progress: Callable[[int], None] | None = None,
) -> list[Answers]:
    """Score every choice of every question by its log-likelihood after the question.

    Args:
        model, precisions, window: as in `evaluate`.
        tokenizer: of the model. Question and choice are encoded apart, so that a choice's tokens are its own.
        questions: what to answer.
        progress: called with 1 after each question.
    """
    names = [REFERENCE, *dict.fromkeys(name for name in precisions if name != REFERENCE)]
    configs = [Precision(name).config(window) for name in names]
    device = next(model.parameters()).device
    right, right_per_token, same = (torch.zeros(len(names), dtype=torch.int64) for _ in range(3))
    for question in questions:
        total, per_token = _scores(model, tokenizer, question, configs, device)
        best = total.argmax(1)
        right += best == question.answer
        right_per_token += per_token.argmax(1) == question.answer
        same += best == best[0]
        if progress is not None:
            progress(1)
    count = len(questions)
    return [
        Answers(name, int(right[i]) / count, int(right_per_token[i]) / count, int(same[i]) / count)
        for i, name in enumerate(names)
    ]


def _scores(
    model: Any, tokenizer: Any, question: Question, configs: Sequence[ReplayConfig], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Log-likelihood of each choice, and per token: [settings, choices] each."""
    start, ends = encode(tokenizer, question)
    longest = max(map(len, ends))
    ids = torch.tensor([start + end + [0] * (longest - len(end)) for end in ends], device=device)
    hidden = replayed_forward(model, ids, configs).hidden[:, :, len(start) - 1 : -1]
    logs = logits_of(model, hidden.flatten(0, 1)).log_softmax(-1).unflatten(0, hidden.shape[:2])
    found = logs.gather(-1, ids[:, len(start) :].expand(len(configs), -1, -1).unsqueeze(-1)).squeeze(-1)
    lengths = torch.tensor([len(end) for end in ends], device=device)
    kept = torch.arange(longest, device=device) < lengths.unsqueeze(1)
    total = torch.where(kept, found, 0).sum(-1)
    return total.cpu(), (total / lengths).cpu()
