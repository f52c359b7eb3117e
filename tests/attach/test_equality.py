"""Every family decodes as without replay, and would not if its state were wrong."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from .helpers import assert_close, attached, built, forward, generate, new_cache, prompt, sequences_of
from .models import FAMILIES, VARIANTS, build

NEW = 64
PROMPT = prompt(13)


@cache
def plain(family: str) -> tuple[Tensor, Tensor]:
    return generate(built(family), PROMPT, NEW)


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_same_text_and_log_probabilities(family: str, window: int) -> None:
    tokens, log_probabilities = plain(family)
    with attached(built(family), window=window) as handle:
        found_tokens, found = generate(built(family), PROMPT, NEW)
        assert handle.family == family.split()[0]
        assert handle.traffic().tokens == NEW - 1  # the first token comes from the prompt
    assert_close(found, log_probabilities)
    assert torch.equal(found_tokens, tokens)
    assert len(set(tokens[0].tolist())) >= 8, "a loop of few tokens would hide a wrong state"


@pytest.mark.parametrize("family", FAMILIES)
def test_control_a_lost_state_shows(family: str) -> None:
    """Zeroing the checkpoint, or a field of the ring, must change the next logits: else equality proves nothing."""
    model = built(family)
    with attached(model, window=16, stagger=False):

        def next_logits(damage: str | None) -> Tensor:
            held = new_cache(model)
            forward(model, PROMPT, held)
            for i in range(5):
                forward(model, prompt(1, seed=i), held, 13 + i)
            for layer in sequences_of(held).pool.layers:
                if damage is not None:
                    layer.tensors[damage].zero_()
            return forward(model, prompt(1, seed=9), held, 18)

        expected = next_logits(None)
        lost = (next_logits("checkpoint") - expected).abs().max()
        assert lost > 1e-2, f"a lost checkpoint changes logits by {lost:.1e} only"
        recent = next(f"ring.{name}" for name in ("u", "x") if f"ring.{name}" in _tensors(model))
        lost = (next_logits(recent) - expected).abs().max()
        assert lost > 1e-3, f"a lost ring changes logits by {lost:.1e} only"


def _tensors(model: Any) -> Any:
    held = new_cache(model)
    forward(model, PROMPT, held)
    return sequences_of(held).pool.layers[0].tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_batch_equals_single_rows(family: str) -> None:
    lengths, model = (13, 9, 4), built(family)
    rows = [prompt(length, seed=length) for length in lengths]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, -row.shape[1] :] = row
        mask[i, -row.shape[1] :] = 1
    with attached(model, window=4):
        tokens, found = generate(model, ids, 12, attention_mask=mask)
        for i, row in enumerate(rows):
            single_tokens, single = generate(model, row, 12)
            assert_close(found[i : i + 1], single)
            assert torch.equal(tokens[i : i + 1], single_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_tokens_in_one_forward_equal_one_by_one(family: str) -> None:
    """With and without a flush inside, and with the decode rule for each token (no clamp of dt)."""
    model, ids = build(family), prompt(14, rows=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter -= 6  # tiny steps, which the prompt rule of some families would clamp
    with attached(model, window=8, verify_len=5):
        one_by_one, together = new_cache(model), new_cache(model)
        for held in (one_by_one, together):
            forward(model, prompt(6, rows=2), held)
        expected = torch.cat([forward(model, ids[:, i : i + 1], one_by_one, 6 + i) for i in range(14)], 1)
        found, at = [], 0
        for tokens in (3, 5, 1, 5):
            found.append(forward(model, ids[:, at : at + tokens], together, 6 + at))
            at += tokens
    assert_close(torch.cat(found, 1), expected)
