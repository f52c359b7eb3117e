"""Speculative text is plain text, for every family, in chains and trees: what is rejected leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm import flow
from replayssm.decode import Draft, DraftModel, PromptLookup, Session, decode
from replayssm.state.pool import StatePool

from ..attach.helpers import assert_close, built, generate, prompt
from ..attach.models import FAMILIES, build
from .helpers import Dictated, attached, plain_text, room, run

TREES = tuple(family for family in FAMILIES if family != "glm5_next")  # whose attention takes none: see the refusals
SOME = ("qwen3_5", "nemotron_h", "kimi_linear", "falcon_h1")
NEW = 64
DRAFTS = (1, 3, 8)
RIGHT = {"none": lambda n: 0, "some": lambda n: n * 7 % 5, "all": lambda n: 99}


def prompts(*lengths: int) -> list[list[int]]:
    return [prompt(length, seed=length)[0].tolist() for length in lengths]


# ---- the same text


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_plain_text(family: str, shape: str) -> None:
    """A third of benchmarks/speculation/equality.py, which goes on for 256 tokens."""
    if shape == "tree" and family not in TREES:
        pytest.skip("this family's attention takes no tree")
    model, (ids,) = built(family), prompts(18)
    # beyond 64 tokens this family's indexer chooses among equals, and otherwise for several tokens than for one
    new = 40 if family == "glm5_next" else NEW
    (text,) = plain_text(model, [ids], new)
    for drafts in DRAFTS:
        with attached(model, **room(drafts)) as handle:
            proposer = Dictated([text], RIGHT["some"], branches=1 if shape == "chain" else 3)
            found = run(model, [ids], new, proposer, draft_len=drafts)
            assert found.tokens == [text[len(ids) :]]
            assert 0 < found.accepted < found.drafted
            assert handle.slots_in_use == 0


@pytest.mark.parametrize("family", TREES)
def test_a_ragged_batch(family: str) -> None:
    """Prompts of different lengths; one row is always right, one never, one sometimes, and one has no draft."""
    model, given = built(family), prompts(18, 5, 11, 1)
    texts = plain_text(model, given, 24)
    for branches in (1, 3):
        with attached(model, **room(6, window=8)):
            found = run(model, given, 24, Mixed(texts, branches), draft_len=6)
            assert found.tokens == [text[len(ids) :] for text, ids in zip(texts, given, strict=True)]
        accepted = [sum(r.accepted[row] for r in found.rounds) for row in range(4)]
        assert accepted[0] > accepted[2] > accepted[1] == accepted[3] == 0
        assert sum(r.drafted[1] for r in found.rounds) > 0 == sum(r.drafted[3] for r in found.rounds)


class Mixed(Dictated):
    """The rows of a batch are right to different degrees."""

    def __init__(self, texts: Sequence[Sequence[int]], branches: int) -> None:
        super().__init__(texts, RIGHT["all"], branches)

    def propose(self, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Draft]:
        drafts = []
        for row, kind in enumerate(("all", "none", "some")):
            own = Dictated([self.texts[row]], RIGHT[kind], self.branches)
            drafts += own.propose([texts[row]], [lengths[row]])
        return [*drafts, Draft()]


@pytest.mark.parametrize(("family", "shape"), [("qwen3_5", "tree"), ("falcon_h1", "chain")])
def test_rejecting_everything_for_200_steps_is_plain_decoding(
    family: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp64, so that nothing hides behind rounding (transformers' own norms stay in fp32)."""
    model, (ids,) = build(family, dtype=torch.float64), prompts(18)
    tokens, expected = generate(model, torch.tensor([ids]), 201)
    text = ids + tokens[0].tolist()
    seen: list[Tensor] = []
    record(monkeypatch, seen)
    with attached(model, **room(5, window=8), checkpoint_format="fp64"):
        proposer = Dictated([text], RIGHT["none"], branches=1 if shape == "chain" else 2)
        found = run(model, [ids], 201, proposer, draft_len=5)
    assert found.tokens == [text[len(ids) :]]
    assert found.accepted == 0
    assert len(seen) == 200
    assert_close(torch.stack([logits[0, 0].float().log_softmax(-1) for logits in seen]), expected[0, 1:], 1e-5)


def record(monkeypatch: pytest.MonkeyPatch, seen: list[Tensor]) -> None:
    """Keep the logits of every step."""
    step = Session.step

    def recording(self: Session, *args: Any) -> Tensor:
        seen.append(step(self, *args))
        return seen[-1]

    monkeypatch.setattr(Session, "step", recording)


# ---- proposers


@pytest.mark.parametrize("family", SOME)
def test_a_model_drafts_for_itself(family: str) -> None:
    """Every guess is right, so the draft model is always in the right state; in trees, the first of each place."""
    model, given = built(family), prompts(18, 7)
    texts = plain_text(model, given, 30)
    for branches in (1, 2):
        with attached(model, **room(6)) as handle:
            proposer = DraftModel(model, branches=branches)
            found = run(model, given, 30, proposer, draft_len=6)
            assert found.tokens == [text[len(ids) :] for text, ids in zip(texts, given, strict=True)]
            for r in found.rounds:
                for drafted, accepted in zip(r.drafted, r.accepted, strict=True):
                    assert accepted == -(-drafted // branches)
            del proposer
            assert handle.slots_in_use == 0


@pytest.mark.parametrize("family", SOME)
def test_another_draft_model(family: str) -> None:
    """Nearly every guess is wrong; the draft model's ring is shorter than what a round may make certain."""
    model, draft, given = built(family), build("qwen3_5", seed=5), prompts(18, 7)
    texts = plain_text(model, given, 30)
    for branches in (1, 2):
        with attached(model, **room(4)), attached(draft, **room(2, window=4)):
            found = run(model, given, 30, DraftModel(draft, branches=branches), draft_len=4)
            assert found.tokens == [text[len(ids) :] for text, ids in zip(texts, given, strict=True)]


def test_rows_rest_in_the_draft_model() -> None:
    """A row that wants no guess is not run, and takes in all that it missed when it wants one again."""
    model, given = built("qwen3_5"), prompts(9, 4)
    texts = plain_text(model, given, 12)
    with attached(model, **room(2, window=4)):
        proposer = DraftModel(model)
        grown = [text[:-12] for text in texts]
        for wanted, growth in (([2, 0], [1, 4]), ([0, 2], [4, 1]), ([2, 2], [0, 0])):
            drafts = proposer.propose(grown, wanted)
            for draft, text, known, count in zip(drafts, texts, grown, wanted, strict=True):
                assert draft.tokens == text[len(known) : len(known) + count]
            grown = [text[: len(known) + n] for text, known, n in zip(texts, grown, growth, strict=True)]


def test_a_draft_model_starts_anew_with_other_texts() -> None:
    model, given = built("qwen3_5"), prompts(18, 7)
    with attached(model, **room(4)):
        proposer = DraftModel(model)
        for batch in (given, given, given[1:], given[::-1]):
            found = run(model, batch, 12, proposer, draft_len=4)
            assert found.tokens == run(model, batch, 12).tokens
            assert found.accepted == found.drafted
        assert proposer.propose(given, [3, 3]) == proposer.propose(given, [3, 3])


@pytest.mark.parametrize("branches", [1, 2])
def test_a_draft_is_as_deep_as_the_draft_model_verifies(branches: int) -> None:
    model, (ids,) = built("qwen3_5"), prompts(9)
    with attached(model, **room(1)):
        (draft,) = DraftModel(model, branches).propose([ids], [8])
    assert len(draft) == 3 * branches
    assert max(draft.depth(number) for number in range(len(draft))) == 3


def test_prompt_lookup_finds_what_came_before() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3]
    (draft,) = PromptLookup(longest=2).propose([text], [4])
    assert (draft.tokens, draft.parents) == ([5, 8, 2, 3], [-1, 0, 1, 2])
    (draft,) = PromptLookup(longest=2, branches=2).propose([text], [5])
    assert (draft.tokens, draft.parents) == ([5, 8, 2, 4, 9], [-1, 0, 1, -1, 3])
    (draft,) = PromptLookup(longest=2, branches=3).propose([text], [5])  # there are two
    assert draft.tokens == [5, 8, 2, 4, 9]
    nothing, resting, short = PromptLookup().propose([[1, 2, 3], text, [7]], [4, 0, 4])
    assert len(nothing) == len(resting) == len(short) == 0


@pytest.mark.parametrize("branches", [1, 3])
def test_prompt_lookup_writes_plain_text(branches: int) -> None:
    model = built("falcon_h1")
    ids = [*prompts(7)[0], *prompts(7)[0], *prompts(4)[0]]
    (text,) = plain_text(model, [ids], NEW)
    with attached(model, **room(5)):
        found = run(model, [ids], NEW, PromptLookup(2, branches), draft_len=5)
    assert found.tokens == [text[len(ids) :]]
    assert found.accepted > 0


# ---- the loop


def test_draft_lengths_follow_acceptance() -> None:
    model, (ids,) = built("qwen3_5"), prompts(18)
    (text,) = plain_text(model, [ids], 40)
    with attached(model, **room(8)):
        for kind in ("none", "all"):
            found = run(model, [ids], 40, Dictated([text], RIGHT[kind]), draft_len=8)
            lengths = [r.drafted[0] for r in found.rounds[1:]]
            assert lengths[:9] == [8, 7, 6, 5, 4, 3, 2, 1, 1] if kind == "none" else lengths == [8, 8, 8, 8, 2]
        assert len(found.rounds) == 1 + math.ceil(39 / 9)


def test_a_stop_token_ends_its_row() -> None:
    """Also in the middle of an accepted draft; the other rows go on."""
    model, given = built("qwen3_5"), prompts(18, 6)
    texts = plain_text(model, given, 20)
    stop = texts[0][18 + 4]
    ends = [text[len(ids) :] for text, ids in zip(texts, given, strict=True)]
    ends = [new[: new.index(stop) + 1] if stop in new else new for new in ends]
    with attached(model, **room(8)):
        for proposer in (None, Dictated(texts, RIGHT["all"])):
            found = run(model, given, 20, proposer, draft_len=8 if proposer else 0, stop={stop})
            assert found.tokens == ends
    assert len(ends[0]) <= 5 < len(ends[1])
    # guesses behind the stop token did not stay
    assert found.rounds[1].accepted[0] == len(ends[0]) - 1 < found.rounds[1].drafted[0] == 8


def test_without_a_proposer_it_decodes_plainly() -> None:
    model, given = built("kimi_linear"), prompts(9, 4)
    texts = plain_text(model, given, 12)
    with attached(model):
        found = run(model, given, 12)
    assert found.tokens == [text[len(ids) :] for text, ids in zip(texts, given, strict=True)]
    assert [r.drafted for r in found.rounds] == [[0, 0]] * 12


@pytest.mark.parametrize("family", SOME)
def test_nothing_is_copied(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No snapshot of a state, no second pool."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("copied")

    model, (ids,) = built(family), prompts(18)
    (text,) = plain_text(model, [ids], 20)
    for verb in ("fork", "move", "gather", "_copy_tensors"):
        monkeypatch.setattr(StatePool, verb, refuse)
    monkeypatch.setattr(flow, "materialize", refuse)
    with attached(model, **room(5, window=6)):
        assert run(model, [ids], 20, Dictated([text], RIGHT["some"], 2), draft_len=5).tokens == [text[18:]]


# ---- a session by hand


@pytest.mark.parametrize("family", [*SOME, "glm5_next"])
def test_a_step_that_is_not_accepted_is_dropped(family: str) -> None:
    model, (ids,) = built(family), prompts(18)
    with attached(model, verify_len=4):
        forgetful, session = after(model, ids), after(model, ids)
        forgetful.step([[5, 9, 7]])
        for _ in range(2):
            assert_close(forgetful.step([[8, 4]]), session.step([[8, 4]]))
            for each in (forgetful, session):
                each.accept([[0, 1]])
        assert forgetful.lengths == session.lengths == [22]


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "glm5_next"])
def test_a_refused_step_changes_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at once, or while the forward runs: here when it is over."""
    model, (ids,) = built(family), prompts(18)
    with attached(model, verify_len=4):
        refused, session = after(model, ids), after(model, ids)
        for tokens, parents, sentence in (
            ([[5] * 5], None, "1 to verify_len = 4 tokens per row, got 5"),
            ([[]], None, "got 0"),
            ([[5], [6]], None, "for each of 1 rows, got 2 and 2"),
            ([[5, 6]], [[-1, 1]], r"row 0 has 2 tokens: each has a parent before it, .* got \[-1, 1\]"),
            ([[5, 6]], [[-1]], "row 0 has 2 tokens"),
        ):
            with pytest.raises(ValueError, match=sentence):
                refused.step(tokens, parents)
        with monkeypatch.context() as patch:
            patch.setattr(flow, "open_step", interrupt)
            with pytest.raises(KeyboardInterrupt):
                refused.step([[5, 9, 7]])
        for _ in range(2):
            assert_close(refused.step([[8, 4]]), session.step([[8, 4]]))
            for each in (refused, session):
                each.accept([[0, 1]])
        with pytest.raises(ValueError, match="a session takes its prompts once"):
            refused.prefill([ids])


def after(model: Any, ids: list[int]) -> Session:
    session = Session(model)
    session.prefill([ids])
    return session


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_last_chunk_as_short_as_a_draft() -> None:
    model, (ids,) = built("qwen3_5"), prompts(7)
    with attached(model, verify_len=4):
        session, chunked = after(model, ids), Session(model)
        chunked.prefill([ids], chunk=4)
        assert_close(chunked.step([[8, 4]]), session.step([[8, 4]]))


# ---- teeth


@pytest.mark.parametrize("fault", ["keys stay where they were", "positions count rows", "siblings see each other"])
def test_a_fault_in_attention_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids,) = built("qwen3_5"), prompts(18)
    (text,) = plain_text(model, [ids], NEW)
    if fault.startswith("keys"):
        keep = Session._keep
        monkeypatch.setattr(Session, "_keep", lambda self, columns: keep(self, where_they_are(self.lengths, columns)))
    elif fault.startswith("positions"):
        forward = Session._forward
        monkeypatch.setattr(
            Session,
            "_forward",
            lambda self, ids, mask, at, **options: forward(
                self, ids, mask, at[:, :1] + torch.arange(at.shape[1]), **options
            ),
        )
    else:
        mask = Session._mask
        monkeypatch.setattr(
            Session, "_mask", lambda self, descends, lengths: mask(self, torch.ones_like(descends).tril(), lengths)
        )
    with attached(model, **room(8)):
        assert run(model, [ids], NEW, Dictated([text], RIGHT["some"], 3), draft_len=8).tokens != [text[18:]]


def where_they_are(lengths: list[int], columns: Sequence[Sequence[int]]) -> list[range]:
    return [range(length, length + len(chosen)) for length, chosen in zip(lengths, columns, strict=True)]


# ---- refusals


def test_what_cannot_be_decoded() -> None:
    model, (ids,) = built("qwen3_5"), prompts(9)
    with pytest.raises(ValueError, match=r"is not attached: call replayssm\.attach"):
        next(decode(model, [ids], max_new_tokens=3))
    with attached(model):
        with pytest.raises(ValueError, match=r"draft_len 3 needs forwards of 4 tokens.*ReplayConfig\(verify_len=4\)"):
            next(decode(model, [ids], max_new_tokens=3, proposer=PromptLookup(), draft_len=3))
        for options in ({"draft_len": 3}, {"proposer": PromptLookup()}):
            with pytest.raises(ValueError, match="belong together"):
                next(decode(model, [ids], max_new_tokens=3, **options))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a prompt needs at least one token"):
            next(decode(model, [ids, []], max_new_tokens=3))
        with pytest.raises(ValueError, match="call prefill first"):
            Session(model).step([[3]])
        for make in (PromptLookup, lambda branches: DraftModel(model, branches)):
            with pytest.raises(ValueError, match="branches must be at least 1, got 0"):
                make(branches=0)


@pytest.mark.parametrize("options", [{}, {"proposer": PromptLookup(), "draft_len": 1}], ids=["plain", "drafts"])
def test_a_wrong_call_is_refused_before_the_first_round(options: dict[str, Any]) -> None:
    model, given = built("qwen3_5"), prompts(9)
    with attached(model, verify_len=2):
        for wrong, sentence in (
            ({"prompts": []}, "there is no prompt"),
            ({"prompts": [[]]}, "a prompt needs at least one token"),
            ({"max_new_tokens": -1}, "max_new_tokens must be 0 or more, got -1"),
            ({"stop": 5}, r"stop is a collection of tokens, as in \{2\}, got 5"),
            ({"proposer": PromptLookup(), "draft_len": 2}, "draft_len 2 needs forwards of 3 tokens"),
        ):
            with pytest.raises(ValueError, match=sentence):
                decode(**{"model": model, "prompts": given, "max_new_tokens": 3, **options, **wrong})
    with pytest.raises(ValueError, match="is not attached"):
        decode(model, given, max_new_tokens=3, **options)


def test_attention_that_takes_no_tree() -> None:
    model, given = built("glm5_next"), prompts(9, 4)
    with attached(model, verify_len=4):
        with pytest.raises(ValueError, match=r"glm5_next selects keys by their place .*one sequence at a time"):
            next(decode(model, given, max_new_tokens=3))
        tree = Dictated([given[0] + given[1]], RIGHT["none"], branches=2)
        with pytest.raises(ValueError, match="glm5_next selects keys by their place"):
            list(decode(model, given[:1], max_new_tokens=5, proposer=tree, draft_len=2))


def test_an_attention_implementation_without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = built("qwen3_5"), prompts(9, 4)
    with attached(model, verify_len=4):
        monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
        with pytest.raises(ValueError, match="which flash_attention_2 does not take: load the model with attn_impl"):
            next(decode(model, given, max_new_tokens=3))
