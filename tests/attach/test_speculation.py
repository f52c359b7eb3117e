"""Assisted `generate` gives the text of plain `generate`: what is rejected leaves no trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as T
from torch import Tensor
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

from replayssm import attach
from replayssm.attach.transformers.sequences import Sequences
from replayssm.state.pool import StatePool

from .helpers import assert_close, attached, built, cache_name, forward, generate, new_cache, prompt
from .models import FAMILIES, HEADS, TOK, build

ASSISTED = tuple(family for family in FAMILIES if family != "mamba2")  # which has no attention: see the refusals
# one per recurrence, one whose cache layers hold keys and values as well, one with layers that hold nothing
SOME = ("qwen3_5", "nemotron_h", "kimi_linear", "falcon_h1")
WINDOWS = (4, 16)
DRAFTS = {4: (1, 3, 20), 16: (1, 3, 8, 20)}
"""Drafts at a time, by window: what it has no room for is cut, so that 8 and 20 are one with a window of 4."""
FEW = {4: (20,), 16: (3, 20)}
"""The same for families beside `SOME`."""
NEW = 14
LIMIT = {4: 3, 16: 15}
"""Drafts per forward that a window has room for."""

# MoE layers and sums in another order; one order against the other gives up to 2.4e-5 on log-probabilities to -30
TOLERANCE = 1e-4
pytestmark = pytest.mark.filterwarnings("ignore:drafts of")


def repetitive() -> Tensor:
    """A prompt in which a look-up finds something at once."""
    return torch.cat([prompt(7), prompt(7), prompt(4)], 1)


def assert_as_plain(model: Any, ids: Tensor, handle: Any, *, tolerance: float = TOLERANCE, **options: Any) -> None:
    """Assisted text and log-probabilities are those that `model` had before it was attached."""
    tokens, log_probabilities = model.plain[tuple(ids[0].tolist())]
    found_tokens, found = generate(model, ids, NEW, **options)
    assert torch.equal(found_tokens, tokens)
    assert_close(found, log_probabilities, tolerance)
    assert handle.slots_in_use == 0


@contextmanager
def known(model: Any, *prompts: Tensor) -> Iterator[None]:
    """Remember the plain text of a detached model after some prompts."""
    model.__dict__["plain"] = {tuple(ids[0].tolist()): generate(model, ids, NEW) for ids in prompts}
    try:
        yield
    finally:
        del model.__dict__["plain"]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(drafts, accepted ones) of each verified draft of an assistant or of `dictated`."""
    seen: list[tuple[int, int]] = []
    for cls in (AssistedCandidateGenerator, PromptLookupCandidateGenerator):
        original = cls.update_candidate_strategy

        def update(self: Any, ids: Tensor, scores: Tensor, matches: int, original: Any = original) -> None:
            seen.append((scores.shape[1] - 1, int(matches)))
            original(self, ids, scores, matches)

        monkeypatch.setattr(cls, "update_candidate_strategy", update)
    return seen


def dictate(monkeypatch: pytest.MonkeyPatch, text: Tensor, right: Callable[[int], int]) -> None:
    """Prompt look-up drafts `text` [1, T], but the draft at length n goes wrong after `right(n)` tokens."""

    def get_candidates(self: Any, ids: Tensor, **_: Any) -> tuple[Tensor, None]:
        length = ids.shape[1]
        draft = text[:, length : min(length + self.num_output_tokens, text.shape[1] - 1)].clone()
        draft[:, right(length) :] = 3 + (draft[:, right(length) :] - 2) % 90  # another token
        return torch.cat([ids, draft], 1), None

    monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", get_candidates)


def assistant(model: Any, drafts: int) -> dict[str, Any]:
    """Options of a `generate` that `model` assists with `drafts` tokens at a time."""
    model.generation_config.update(num_assistant_tokens=drafts, assistant_confidence_threshold=0.0)
    return {"assistant_model": model}


def llama() -> Any:
    """A plain attention model."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(0)
    return T.LlamaForCausalLM(T.LlamaConfig(**sizes, **HEADS, **TOK)).eval()


# ---- the same text


@pytest.mark.parametrize("family", ASSISTED)
def test_prompt_lookup(family: str) -> None:
    model, ids = built(family), repetitive()
    with known(model, ids):
        for window in WINDOWS:
            with attached(model, window=window) as handle:
                for drafts in (DRAFTS if family in SOME else FEW)[window]:
                    assert_as_plain(model, ids, handle, prompt_lookup_num_tokens=drafts)


@pytest.mark.parametrize("family", ASSISTED)
def test_a_model_as_its_own_assistant(family: str, rounds: list[tuple[int, int]]) -> None:
    """Every draft is right: the draft model, cropped once per round, is always in the right state."""
    model, ids = built(family), prompt(18)
    with known(model, ids):
        for window in WINDOWS:
            with attached(model, window=window) as handle:
                for drafts in (DRAFTS if family in SOME else FEW)[window]:
                    rounds.clear()
                    assert_as_plain(model, ids, handle, **assistant(model, drafts))
                    assert all(accepted == drafted for drafted, accepted in rounds)
                    assert rounds[0][0] == min(drafts, LIMIT[window], NEW - 1)


@pytest.mark.parametrize("family", ASSISTED)
def test_another_assistant(family: str, rounds: list[tuple[int, int]]) -> None:
    """Nearly every draft is wrong, of a recurrent draft model (attached) and of one with attention only."""
    model, ids, draft = built(family), prompt(18), build("qwen3_5", seed=5)
    with known(model, ids):
        for window, drafts in ((4, 3), (16, 20)):
            with attached(model, window=window) as handle, attached(draft, window=window) as drafting:
                assert_as_plain(model, ids, handle, **assistant(draft, drafts))
                assert drafting.slots_in_use == 0
        with attached(model, window=16) as handle:
            assert_as_plain(model, ids, handle, **assistant(llama(), 8))
    assert sum(accepted for _, accepted in rounds) < len(rounds)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("family", ASSISTED)
def test_drafts_that_go_wrong_anywhere(
    family: str, window: int, monkeypatch: pytest.MonkeyPatch, rounds: list[tuple[int, int]]
) -> None:
    """None right, all right, and every number between, on steps that flush and on others."""
    model, ids = built(family), prompt(18)
    with known(model, ids), attached(model, window=window) as handle:
        text = torch.cat([ids, next(iter(model.plain.values()))[0]], 1)
        for right in (lambda n: 0, lambda n: n % 3, lambda n: n * 7 % 5, lambda n: 20):
            dictate(monkeypatch, text, right)
            assert_as_plain(model, ids, handle, prompt_lookup_num_tokens=8)
    assert {accepted for _, accepted in rounds} >= {0, 1, 2, 3}


# without experts, which have no fp64
@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid", "falcon_h1", "bamba"])
def test_rejecting_everything_is_plain_decoding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, so that nothing hides behind rounding (transformers' own norms and scans stay in fp32)."""
    model, ids = build(family, dtype=torch.float64), prompt(18)
    with known(model, ids):
        text = torch.cat([ids, next(iter(model.plain.values()))[0]], 1)
        dictate(monkeypatch, text, lambda n: 0)
        for window in WINDOWS:
            with attached(model, window=window, checkpoint_format="fp64") as handle:
                assert_as_plain(model, ids, handle, tolerance=1e-5, prompt_lookup_num_tokens=8)


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("fault", ["one row too many", "one row too few", "the draft model folds its round"])
def test_a_broken_crop_is_seen(family: str, fault: str, monkeypatch: pytest.MonkeyPatch, rounds: list[Any]) -> None:
    """The control: each of these changes the text, or what the draft model says."""
    model, ids = built(family), prompt(18)
    with known(model, ids), attached(model, window=4) as handle:
        text = torch.cat([ids, next(iter(model.plain.values()))[0]], 1)
        if fault.startswith("one"):
            crop = Sequences.crop
            shift = 1 if fault.endswith("many") else -1
            monkeypatch.setattr(Sequences, "crop", lambda self, n: crop(self, min(0, int(n) + shift)))
            dictate(monkeypatch, text, lambda n: n % 3)
            with pytest.raises(AssertionError, match=r"differs|torch.equal"):
                assert_as_plain(model, ids, handle, prompt_lookup_num_tokens=3)
        else:
            open_ = Sequences._open

            def forgetful(self: Sequences, hidden: Tensor) -> None:
                self.certain = True
                open_(self, hidden)

            monkeypatch.setattr(Sequences, "_open", forgetful)
            draft = build(family, seed=5)
            with attached(draft, window=4), pytest.raises(ValueError, match="reaches back"):
                assert_as_plain(model, ids, handle, **assistant(draft, 3))


# ---- caches


@pytest.mark.parametrize("family", SOME)
def test_nothing_is_copied(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crop moves the cursor: no snapshot, copy or second pool."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("copied")

    model, ids = built(family), prompt(18)
    for verb in ("fork", "move", "gather", "_copy_tensors"):
        monkeypatch.setattr(StatePool, verb, refuse)
    allocated = []
    with known(model, ids), attached(model, window=4) as handle:
        allocate = handle.allocate
        monkeypatch.setattr(handle, "allocate", lambda *a, **k: allocated.append(1) or allocate(*a, **k))
        assert_as_plain(model, ids, handle, **assistant(model, 3))
    assert len(allocated) == 2  # the model's cache and the assistant's


@pytest.mark.parametrize("family", SOME)
def test_a_cache_that_is_told_late(family: str) -> None:
    """Its sequences move to a longer ring once, pending token included, and go on as before."""
    model, after = built(family), prompt(12, seed=6)
    with attached(model, window=4, verify_len=3) as handle:
        held, reference = new_cache(model), new_cache(model)
        for cache in (held, reference):
            forward(model, prompt(9), cache)
            for i in range(3):
                forward(model, prompt(1, seed=20 + i), cache, 9 + i)
        held.activate_past_recording()
        held.activate_past_recording()
        expected = torch.cat([forward(model, after[:, i : i + 1], reference, 12 + i) for i in range(12)], 1)
        for _ in range(2):  # six tokens in three forwards, and back
            found = [forward(model, after[:, i : i + 2], held, 12 + i) for i in (0, 2, 4)]
            held.crop(-6)
        found += [forward(model, after[:, :5], held, 12), forward(model, after[:, 5:], held, 17)]
        assert_close(torch.cat(found, 1), torch.cat([expected[:, :6], expected], 1))
        assert handle.slots_in_use == 2


def test_an_attached_assistant_of_an_attention_model(rounds: list[tuple[int, int]]) -> None:
    """Drafts of 20 tokens, the default of transformers, whatever the draft model's window."""
    model, draft, ids = llama(), build("qwen3_5", seed=5), prompt(18)
    expected = model.generate(ids, max_new_tokens=22, do_sample=False)
    for window in (1, 64):
        with attached(draft, window=window) as handle:
            found = model.generate(ids, max_new_tokens=22, do_sample=False, **assistant(draft, 20))
            assert torch.equal(found, expected)
            assert handle.slots_in_use == 0
    assert rounds[0][0] == 20


def test_sampling_and_a_short_prompt() -> None:
    """A prompt of one token, and of fewer than the ring takes, with a draft behind it."""
    model = built("kimi_linear")
    for length in (1, 2, 5):
        ids = prompt(length)
        expected, _ = generate(model, ids, NEW)
        with attached(model, window=8):
            assert torch.equal(generate(model, ids, NEW, **assistant(model, 4))[0], expected)
            generate(model, ids, NEW, do_sample=True, **assistant(model, 4))


# ---- limits and refusals


@pytest.mark.parametrize(("config", "limit"), [({"window": 4}, 3), ({}, 15), ({"verify_len": 3}, 2)])
def test_longer_drafts_are_cut_and_said_so(config: Any, limit: int, rounds: list[tuple[int, int]]) -> None:
    model, ids = built("qwen3_5"), prompt(18)
    with attached(model, **config):
        with pytest.warns(
            UserWarning, match=f"drafts of 20 tokens are cut to {limit}: one forward verifies 1 \\+ {limit}"
        ):
            generate(model, ids, 30, **assistant(model, 20))
        assert rounds[0] == (limit, limit)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            generate(model, ids, 6, **assistant(model, limit))


def test_what_cannot_be_assisted() -> None:
    model, ids, other, pure = built("qwen3_5"), repetitive(), build("qwen3_5", seed=5), built("mamba2")
    with attached(pure):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            generate(pure, ids, 4, prompt_lookup_num_tokens=3)
        with attached(model), pytest.raises(ValueError, match="Mamba2ForCausalLM cannot assist: without attention"):
            generate(model, ids, 4, assistant_model=pure)
    with attached(model):
        with pytest.raises(ValueError, match=r"cannot assist as it is: its recurrent state .* attach it too"):
            generate(model, ids, 4, assistant_model=other)
        with pytest.raises(ValueError, match="assistant_early_exit runs the first layers of a model only"):
            generate(model, ids, 4, assistant_early_exit=1)
        options = {cache_name(model): new_cache(model)}
        generate(model, ids, 4, **options)
        with pytest.raises(ValueError, match=r"feeds a cache the text that it holds already \(21 tokens\)"):
            generate(model, ids, 4, prompt_lookup_num_tokens=3, **options)
        with pytest.raises(ValueError, match="batch_size = 1"):
            generate(model, prompt(9, rows=2), 4, prompt_lookup_num_tokens=3)
    with attached(model, window=1), pytest.raises(ValueError, match=r"needs room for a draft .*got window=1"):
        generate(model, ids, 4, prompt_lookup_num_tokens=3)


def test_detach_brings_the_refusal_back() -> None:
    model = build("qwen3_5")
    model._is_stateful = True  # an attribute of the instance is put back, too
    before = set(vars(model))
    handle = attach(model)
    assert not model._is_stateful
    handle.detach()
    assert set(vars(model)) == before
    assert type(model)._is_stateful
    with pytest.raises(ValueError, match="stateful"):
        generate(model, repetitive(), 4, prompt_lookup_num_tokens=3)
