"""`replayssm generate --speculate`: the text of plain decoding, what is said about the drafts, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replayssm import models
from replayssm.cli import generate as generating
from replayssm.cli.speculate import require_same_tokens

from .attach.models import build
from .test_cli import byte_tokenizer, invoke

PROMPT = "The open function returns a file object. The open function returns a"
RUN = ("generate", PROMPT, "-n", "20", "--device", "cpu")
WAYS = {
    "ngram": ("--speculate", "ngram"),
    "ngram tree": ("--speculate", "ngram", "--tree", "--draft-len", "6"),
    "model": ("--speculate", "model"),
    "model tree": ("--speculate", "model", "--tree", "--draft-len", "6", "--draft-model", models.DRAFT),
}


@pytest.mark.parametrize("way", WAYS)
def test_drafts_leave_the_text_as_it_is(way: str) -> None:
    result = invoke(*RUN, *WAYS[way], "--compare")
    assert result.exit_code == 0
    assert "identical to ordinary decoding: all 20 tokens" in result.stderr
    accepted, drafted, steps, saved = map(
        int, re.search(r"drafts: (\d+) of (\d+) accepted .*; (\d+) steps, (\d+) saved", result.stderr).groups()
    )
    assert 0 < accepted < drafted
    assert steps + saved == 19
    assert saved == accepted
    assert "a state saved per draft would have written" in result.stderr
    assert ("the draft model moved" in result.stderr) == way.startswith("model")


def test_the_text_is_streamed_and_alone_on_standard_output() -> None:
    plain = invoke(*RUN)
    drafted = invoke(*RUN, *WAYS["model"])
    assert plain.stdout == drafted.stdout
    assert "drafts:" not in plain.stderr


def test_sampling_with_drafts_repeats_with_its_seed() -> None:
    found = [
        invoke(*RUN, *WAYS["model tree"], "--temperature", "0.8", "--seed", seed).stdout for seed in ("7", "7", "8")
    ]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--tree",), "--tree has no effect without --speculate; add it, or leave --tree out."),
        (("--draft-len", "3"), "--draft-len has no effect without --speculate"),
        (("--draft-model", models.DRAFT), "--draft-model has no effect without --speculate"),
        (("--speculate", "ngram", "--draft-model", models.DRAFT), "--draft-model has no effect with --speculate ngram"),
        (("--speculate", "ngram", "--draft-len", "16"), "--draft-len must be in 1..15 with --window 16, got 16."),
        (("--speculate", "ngram", "--window", "4", "--draft-len", "4"), "--draft-len must be in 1..3 with --window 4"),
        (("--speculate", "ngram", "--window", "1"), "--speculate needs room for a draft: raise --window to 2 or more"),
        (("--speculate", "model", "--draft-model", "nowhere"), "There is no checkpoint folder nowhere; --draft-model"),
        (
            ("--speculate", "ngram", "--compare", "--top-p", "0.9"),
            "--compare has nothing to compare: sampling with drafts",
        ),
    ],
)
def test_what_is_refused(options: tuple[str, ...], sentence: str) -> None:
    result = invoke(*RUN, *options)
    assert result.exit_code == 2
    assert sentence in result.stderr.replace("\n", " ")
    assert not result.stdout


@pytest.mark.parametrize(
    ("setting", "value", "options", "refused"),
    [
        ("repetition_penalty", 1.3, (), True),
        ("no_repeat_ngram_size", 3, (), True),
        ("min_p", 0.1, ("--temperature", "1", "--seed", "3"), True),
        ("min_p", 0.1, (), False),
        ("repetition_penalty", 1.0, (), False),
        ("top_k", 50, ("--temperature", "1"), False),  # the command turns it off either way
    ],
)
def test_what_generate_would_do_to_the_logits_is_refused(
    setting: str, value: float, options: tuple[str, ...], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_models(monkeypatch, lambda folder, model: setattr(model.generation_config, setting, value))
    result = invoke(*RUN, *WAYS["ngram"], *options)
    assert result.exit_code == (2 if refused else 0)
    sentence = f"--speculate does not apply {setting}={value} of the model's generation_config.json"
    assert (sentence in result.stderr.replace("\n", " ")) == refused


def change_models(monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, Any], Any]) -> None:
    """Let what is loaded be another model, if `change` returns one, or a changed one."""
    load = generating.load

    def changed(folder: Path, dtype: str, device: str) -> Any:
        tokenizer, model = load(folder, dtype, device)
        return tokenizer, change(folder, model) or model

    monkeypatch.setattr(generating, "load", changed)


@pytest.mark.parametrize("padding", [-8, 8])
def test_a_draft_model_with_another_padding(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def pad(folder: Path, model: Any) -> None:
        if folder.name == models.DRAFT:
            model.resize_token_embeddings(model.config.get_text_config().vocab_size + padding)

    change_models(monkeypatch, pad)
    for options in (("--compare",), ("--temperature", "2", "--seed", "1")):
        result = invoke(*RUN, *WAYS["model tree"], *options)
        assert result.exit_code == 0


def test_a_model_that_takes_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    change_models(monkeypatch, lambda folder, model: None if folder.name == models.DRAFT else build("glm5_next"))
    result = invoke("generate", "a", "-n", "8", "--device", "cpu", *WAYS["model tree"])
    assert result.exit_code == 2
    assert "glm5_next selects keys by their place in the cache" in result.stderr.replace("\n", " ")


def test_a_draft_model_with_other_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load = generating.load

    def other(folder: Any, dtype: str, device: str) -> Any:
        tokenizer, model = load(folder, dtype, device)
        return (byte_tokenizer() if folder.name == models.DRAFT else tokenizer), model

    monkeypatch.setattr(generating, "load", other)
    result = invoke(*RUN, *WAYS["model"])
    assert result.exit_code == 2
    assert "The draft model has another tokenizer than the model" in result.stderr
    require_same_tokens(byte_tokenizer(), byte_tokenizer())
