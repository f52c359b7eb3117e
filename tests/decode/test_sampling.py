"""Sampling with drafts draws from the distribution of sampling without: chi-square tests, and rules that must fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from replayssm.decode import Draft, DraftModel, Round, Sampling, acceptance, decode, loop
from replayssm.decode.acceptance import Verdict, reject

from ..attach.models import DELTA
from .helpers import attached, room, text_of

WORDS = 5
NEW = 3
LEAST_CHANCE = 1e-4
"""Of a chi-square that a right rule would exceed by chance; the seeds are fixed, so that it does so always or never."""


def chi_square(counts: np.ndarray, chances: np.ndarray) -> float:
    """Chance that counts of draws from `chances` differ from what is expected by as much as these."""
    expected = chances * counts.sum()
    rare = expected < 5  # together one cell: the statistic is no chi-square for cells with few draws
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        if expected[-1] == 0:
            assert counts[-1] == 0, "something impossible was drawn"
            counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2)))


# ---- the rule by itself


def guesses(tables: Tensor, sampling: Sampling, drawn: bool) -> Draft:
    """Three guesses behind the certain token, two behind the first and one behind the second of them.

    Args:
        tables: [4, WORDS], what the draft model draws from at those three places.
        drawn: by chance and without putting back, or the likeliest of them.
    """
    draft = Draft()
    for place, (parent, count) in enumerate(((-1, 3), (0, 2), (1, 1))):
        chances = tables[place].clone()
        for _ in range(count):
            chances = chances / chances.sum()
            token = sampling.draw(chances) if drawn else int(chances.argmax())
            draft.add(token, parent, chances.clone() if drawn else None)
            chances[token] = 0
    return draft


def pairs(rule: Callable[..., Verdict], drawn: bool, draws: int = 8_000) -> float:
    """Chi-square of the first two tokens that a rule writes, against the model's own distribution."""
    torch.manual_seed(4)
    first = (torch.randn(WORDS, dtype=torch.float64) * 1.2).softmax(0)
    second = (torch.randn(WORDS, WORDS, dtype=torch.float64) * 1.2).softmax(1)  # given the first
    tables = (torch.randn(3, WORDS, dtype=torch.float64) * 1.2).softmax(1)
    sampling, counts = Sampling(seed=1), np.zeros((WORDS, WORDS))
    for _ in range(draws):
        draft = guesses(tables, sampling, drawn)
        behind = [first, *(second[token] for token in draft.tokens)]  # those of deeper guesses do not matter here
        verdict = rule(torch.stack(behind), draft, sampling)
        text = [*(draft.tokens[number] for number in verdict.path), verdict.token]
        if len(text) < 2:
            text.append(sampling.draw(second[text[0]]))
        counts[text[0], text[1]] += 1
    return chi_square(counts.flatten(), (first.unsqueeze(1) * second).flatten().numpy())


@pytest.mark.parametrize("drawn", [True, False])
def test_the_rule_keeps_the_distribution(drawn: bool) -> None:
    assert pairs(reject, drawn) > LEAST_CHANCE


def refuse_the_token_alone(chances: Tensor, draft: Draft, sampling: Sampling) -> Verdict:
    """Wrong: a refused guess is taken out of p, where max(p - q, 0) should take p's place."""
    path, at = [], -1
    while True:
        left = chances[at + 1].clone()
        for child in draft.children(at):
            token, drawn_from = draft.tokens[child], draft.chances[child]
            assert drawn_from is not None
            if sampling.happens(float(left[token] / drawn_from[token])):
                path.append(child)
                break
            left[token] = 0
            left /= left.sum()
        else:
            return Verdict(path, sampling.draw(left))
        at = path[-1]


def forget_what_was_refused(chances: Tensor, draft: Draft, sampling: Sampling) -> Verdict:
    """Wrong: after a refusal the next sibling is asked, and the token drawn, as if nothing had been refused."""
    path, at = [], -1
    while True:
        for child in draft.children(at):
            token, drawn_from = draft.tokens[child], draft.chances[child]
            q = 1.0 if drawn_from is None else float(drawn_from[token])
            if sampling.happens(float(chances[at + 1][token]) / q):
                path.append(child)
                break
        else:
            return Verdict(path, sampling.draw(chances[at + 1]))
        at = path[-1]


def siblings_share_a_distribution(chances: Tensor, draft: Draft, sampling: Sampling) -> Verdict:
    """Wrong: what a sibling was drawn from is taken for what the first one was drawn from."""
    same = [draft.chances[draft.children(parent)[0]] for parent in draft.parents]
    return reject(chances, Draft(draft.tokens, draft.parents, same), sampling)


@pytest.mark.parametrize(
    ("rule", "drawn"),
    [
        (refuse_the_token_alone, True),
        (forget_what_was_refused, True),
        (forget_what_was_refused, False),
        (siblings_share_a_distribution, True),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_wrong_rule_is_seen(rule: Callable[..., Verdict], drawn: bool) -> None:
    assert pairs(rule, drawn) < LEAST_CHANCE


def test_greedy_is_the_limit() -> None:
    """With all chance on one token, the rule of sampling is the greedy one."""
    draft = Draft([3, 1, 2, 4], [-1, -1, 1, 2], [None] * 4)
    choices = [1, 0, 2, 0, 4]
    chances = torch.nn.functional.one_hot(torch.tensor(choices), WORDS).double()
    assert reject(chances, draft, Sampling()) == acceptance.follow(choices, draft) == Verdict([1, 2], 0)


# ---- the whole loop


def tiny(seed: int, words: int = WORDS) -> Any:
    """A model of a few words that has an opinion."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        **{**DELTA, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        intermediate_size=32,
        vocab_size=words,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape) * 0.12)
    return model


def exact_chances(model: Any, prompt: Sequence[int], sampling: Sampling) -> np.ndarray:
    """The probability of every text of NEW words."""
    texts = list(product(range(WORDS), repeat=NEW))
    ids = torch.tensor([[*prompt, *text] for text in texts])
    with torch.no_grad():
        chances = sampling.distribution(model(ids).logits)
    total = np.ones(len(texts))
    for place in range(NEW):
        at = len(prompt) + place
        total *= chances[torch.arange(len(texts)), at - 1, ids[:, at]].numpy()
    assert math.isclose(total.sum(), 1, abs_tol=1e-9)
    return total


def drawn_texts(model: Any, draft: Any, prompt: Sequence[int], how: dict[str, Any], rows: int) -> np.ndarray:
    """How often each text was written."""
    sampling = Sampling(seed=7, **how)
    counts = np.zeros(WORDS**NEW)
    for branches, draft_len, drawn in ((1, 2, True), (2, 4, True), (3, 5, False)):
        proposer = DraftModel(draft, branches, sampling if drawn else None)
        options = {"proposer": proposer, "draft_len": draft_len, "sampling": sampling}
        rounds = list(decode(model, [prompt] * rows, max_new_tokens=NEW, **options))
        counts += counted(rounds, rows)
    return counts


def counted(rounds: Sequence[Round], rows: int) -> np.ndarray:
    """How often each text of NEW words was written."""
    words = [text_of(rounds, row) for row in range(rows)]
    return np.bincount([a * WORDS**2 + b * WORDS + c for a, b, c in words], minlength=WORDS**NEW)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.8}], ids=["plain", "top_p"])
def test_speculative_text_has_the_distribution_of_plain_text(options: dict[str, Any]) -> None:
    """Drafts that are drawn, in chains and trees, and chosen ones: together 2,400 texts."""
    model, draft, prompt = tiny(0), tiny(1), [1, 4, 2, 0]
    chances = exact_chances(model, prompt, Sampling(**options))
    with attached(model, **room(5)), attached(draft, **room(5)):
        counts = drawn_texts(model, draft, prompt, options, rows=800)
    assert chi_square(counts, chances) > LEAST_CHANCE


def test_guesses_do_not_depend_on_what_judges_them() -> None:
    """The proposer and the loop sample by default, which is with the same seed."""
    model, draft, prompt = tiny(0), tiny(1), [1, 4, 2, 0]
    with attached(model, **room(2)), attached(draft, **room(2)):
        proposer = DraftModel(draft, sampling=Sampling())
        options = {"proposer": proposer, "draft_len": 2, "sampling": Sampling()}
        rounds = list(decode(model, [prompt] * 2_000, max_new_tokens=NEW, **options))
    assert chi_square(counted(rounds, 2_000), exact_chances(model, prompt, Sampling())) > LEAST_CHANCE


@pytest.mark.parametrize("words", [WORDS - 1, WORDS + 3])
@pytest.mark.parametrize("branches", [1, 2])
def test_a_draft_model_with_another_padding(words: int, branches: int) -> None:
    model, draft, prompt, rows = tiny(0), tiny(1, words), [1, 3, 2, 0], 800
    with attached(model, **room(4)), attached(draft, **room(4)):
        for sampling in (None, Sampling()):
            options = {"draft_len": 4, "sampling": sampling, "max_new_tokens": NEW}
            proposer = DraftModel(draft, branches, sampling, vocabulary=WORDS)
            rounds = list(decode(model, [prompt] * rows, proposer=proposer, **options))
        if words > WORDS:
            (guesses,) = DraftModel(draft, words, vocabulary=WORDS).propose([prompt], [WORDS])
            assert sorted(guesses.tokens) == list(range(WORDS))
        with pytest.raises(ValueError, match=rf"{words}.*: use DraftModel\(vocabulary="):
            list(decode(model, [prompt], proposer=DraftModel(draft, sampling=Sampling()), **options))
    assert chi_square(counted(rounds, rows), exact_chances(model, prompt, Sampling())) > LEAST_CHANCE


def test_a_wrong_rule_is_seen_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "reject", forget_what_was_refused)
    model, draft, prompt = tiny(0), tiny(1), [1, 4, 2, 0]
    chances = exact_chances(model, prompt, Sampling())
    with attached(model, **room(5)), attached(draft, **room(5)):
        counts = drawn_texts(model, draft, prompt, {}, rows=400)
    assert chi_square(counts, chances) < LEAST_CHANCE


def test_plain_sampling_has_it_too() -> None:
    """The control: the loop without drafts."""
    model, prompt = tiny(0), [1, 4, 2, 0]
    with attached(model):
        rounds = list(decode(model, [prompt] * 2_000, max_new_tokens=NEW, sampling=Sampling(seed=3)))
    assert chi_square(counted(rounds, 2_000), exact_chances(model, prompt, Sampling())) > LEAST_CHANCE


def test_options_of_sampling() -> None:
    with pytest.raises(ValueError, match=r"temperature must be above 0, got 0"):
        Sampling(temperature=0)
    with pytest.raises(ValueError, match=r"top_p must be above 0 and at most 1, got 1\.5"):
        Sampling(top_p=1.5)
    kept = Sampling(top_p=0.7).distribution(torch.tensor([0.5, 0.3, 0.2]).log())
    assert torch.allclose(kept, torch.tensor([0.625, 0.375, 0.0], dtype=torch.float64))
