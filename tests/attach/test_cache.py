"""What can be done to an attached cache between forwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm.state.slots import SlotError

from .helpers import assert_close, attached, built, forward, generate, new_cache, prompt, sequences_of, states_of
from .models import FAMILIES, build

# one per recurrence, and one whose cache layers hold keys and values as well
SOME = ("qwen3_5", "nemotron_h", "kimi_linear", "falcon_h1")
PROMPT = 9


def filled(model: Any, rows: int = 2, decoded: int = 3) -> tuple[Any, int]:
    """A cache after a prompt and a few tokens, and how many tokens it holds."""
    held = new_cache(model)
    forward(model, prompt(PROMPT, rows), held)
    for i in range(decoded):
        forward(model, prompt(1, rows, seed=20 + i), held, PROMPT + i)
    return held, PROMPT + decoded


def one_by_one(model: Any, ids: Tensor, held: Any, start: int) -> Tensor:
    """Logits [rows, T, vocabulary] of one forward per token."""
    logits = [forward(model, ids[:, i : i + 1], held, start + i) for i in range(ids.shape[1])]
    return torch.cat(logits, 1) if logits else torch.empty(0)


# ---- crop


@pytest.mark.parametrize("rejected", [0, 1, 3, 4])
@pytest.mark.parametrize("family", SOME)
def test_crop_takes_back_tokens_of_the_last_forward(family: str, rejected: int) -> None:
    """Also in a step that flushes (window 4), and with every token rejected."""
    model = built(family)
    with attached(model, window=4, verify_len=4):
        held, length = filled(model)
        drafts, after = prompt(4, 2, seed=5), prompt(6, 2, seed=6)
        kept = 4 - rejected
        reference, _ = filled(model)
        one_by_one(model, drafts[:, :kept], reference, length)
        expected = one_by_one(model, after, reference, length + kept)
        forward(model, drafts, held, length)
        held.crop(-rejected)
        assert sequences_of(held).pending == 0
        found = one_by_one(model, after, held, length + kept)
        assert_close(found, expected)


@pytest.mark.parametrize("family", SOME)
def test_rejecting_everything_again_and_again_changes_nothing(family: str) -> None:
    model = built(family)
    with attached(model, window=4, verify_len=4):
        held, length = filled(model)
        reference, _ = filled(model)
        after = prompt(6, 2, seed=6)
        for i in range(9):
            forward(model, prompt(1 + i % 4, 2, seed=i), held, length)
            held.crop(-(1 + i % 4))
        assert_close(one_by_one(model, after, held, length), one_by_one(model, after, reference, length))


def test_a_forward_without_crop_accepts_the_one_before_it_once() -> None:
    model = built("qwen3_5")
    with attached(model, window=8, verify_len=4):
        held, length = filled(model, decoded=1)
        sequences = sequences_of(held)
        before = sequences.pool.cursor.position.clone()
        forward(model, prompt(4, 2), held, length)
        assert torch.equal(sequences.pool.cursor.position - before, torch.tensor([1, 1]))  # the token of `filled`
        forward(model, prompt(1, 2), held, length + 4)
        assert torch.equal(sequences.pool.cursor.position - before, torch.tensor([5, 5]))
        held.crop(0)
        held.crop(0)
        assert torch.equal(sequences.pool.cursor.position - before, torch.tensor([6, 6]))


@pytest.mark.parametrize("family", SOME)
def test_crop_further_back_with_carry_history(family: str) -> None:
    model, after = built(family), prompt(6, 2, seed=6)
    with attached(model, window=8, verify_len=2, carry_history=True, stagger=False):
        held, length = filled(model, decoded=6)
        held.crop(-4)
        reference, _ = filled(model, decoded=2)
        assert_close(one_by_one(model, after, held, length - 4), one_by_one(model, after, reference, length - 4))


def test_crop_that_cannot_be_done_is_refused_and_changes_nothing() -> None:
    model = built("qwen3_5")
    with attached(model, window=8, verify_len=2, stagger=False):
        held, length = filled(model)
        reference, _ = filled(model)
        with pytest.raises(ValueError, match="carry_history"):
            held.crop(-2)
        with pytest.raises(ValueError, match="reaches back"):
            held.crop(-5)
        with pytest.raises(ValueError, match="0 or less"):
            held.crop(2)
        after = prompt(3, 2, seed=6)
        assert_close(one_by_one(model, after, held, length), one_by_one(model, after, reference, length))
        prompt_only, _ = filled(model, decoded=0)
        with pytest.raises(ValueError, match="checkpoint"):
            prompt_only.crop(-1)


# ---- copies and rows


@pytest.mark.parametrize("family", FAMILIES)
def test_deep_copy_continues_by_itself(family: str) -> None:
    """The copy has the pending token, and neither cache sees what the other does."""
    model = built(family)
    with attached(model, window=4, verify_len=2) as handle:
        held, length = filled(model)
        reference, _ = filled(model)
        twin = copy.deepcopy(held)
        assert handle.slots_in_use == 6
        one, other = prompt(6, 2, seed=6), prompt(6, 2, seed=7)
        expected = one_by_one(model, one, reference, length)
        forward(model, other[:, :2], twin, length)
        assert_close(one_by_one(model, one, held, length), expected)
        twin.crop(-2)
        assert_close(one_by_one(model, one, twin, length), expected)


@pytest.mark.parametrize("verb", ["repeat", "select", "mask", "reorder"])
@pytest.mark.parametrize("family", SOME)
def test_rows_are_repeated_selected_and_reordered(family: str, verb: str) -> None:
    model = built(family)
    with attached(model, window=4):
        held, length = filled(model, rows=3)
        match verb:
            case "repeat":
                held.batch_repeat_interleave(2)
                index = torch.tensor([0, 0, 1, 1, 2, 2])
            case "select":
                index = torch.tensor([2, 0])
                held.batch_select_indices(index)
            case "mask":
                held.batch_select_indices(torch.tensor([True, False, True]))
                index = torch.tensor([0, 2])
            case "reorder":
                index = torch.tensor([2, 2, 0])
                held.reorder_cache(index)
        reference, _ = filled(model, rows=3)
        after = prompt(6, 3, seed=6)
        expected = one_by_one(model, after, reference, length)[index]
        assert_close(one_by_one(model, after[index], held, length), expected)


def test_reset_starts_over_with_any_batch() -> None:
    model = built("mamba2")  # the other families' keys and values keep their length after reset in transformers 5.17
    with attached(model, window=4) as handle:
        held, _ = filled(model, rows=2)
        expected = forward(model, prompt(5, 2, seed=3), new_cache(model))
        held.reset()
        assert handle.slots_in_use == 0
        assert_close(forward(model, prompt(5, 2, seed=3), held), expected)
        held.reset()
        # after one token the convolution still reaches back to before the start
        fresh = new_cache(model)
        for i in range(3):
            ids = prompt(1, 2, seed=i)
            assert_close(forward(model, ids, held, i), forward(model, ids, fresh, i))
        held.reset()
        del fresh
        forward(model, prompt(5, 3, seed=3), held)
        assert handle.slots_in_use == 3


# ---- caches from elsewhere


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_filled_before_attach_is_continued(family: str) -> None:
    model, after = built(family), prompt(6, 2, seed=6)
    held, length = filled(model)
    reference, _ = filled(model)
    expected = one_by_one(model, after, reference, length)
    with attached(model, window=4, verify_len=3):
        assert_close(forward(model, after[:, :3], held, length), expected[:, :3])
        assert_close(one_by_one(model, after[:, 3:], held, length + 3), expected[:, 3:])


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_a_cache_of_another_batch_is_refused_before_anything_changes(family: str) -> None:
    model = built(family)
    held, length = filled(model)
    with attached(model, window=4):
        with pytest.raises(ValueError, match="holds 2 sequences, but the forward has 3 rows"):
            forward(model, prompt(1, 3), held, length)
        mine, _ = filled(model)
        with pytest.raises(ValueError, match="holds 2 sequences, but the forward has 3 rows"):
            forward(model, prompt(1, 3), mine, length)
        after = prompt(4, 2, seed=6)
        assert_close(one_by_one(model, after, mine, length), one_by_one(model, after, held, length))


def test_a_refused_cache_is_not_touched_by_layers_before_the_recurrent_ones() -> None:
    """Attention in layer 0 would add keys and values before the first recurrent layer says no."""
    model, other = built("bamba with attention first"), build("bamba with attention first", seed=1)
    with attached(model, window=4), attached(other, window=4):
        held, length = filled(model)
        keys = held.layers[0].keys.clone()
        for refuse in (
            lambda: forward(other, prompt(1, 2), held, length),
            lambda: forward(model, prompt(1, 2)[:1], held, length),
        ):
            with pytest.raises(ValueError, match=r"cache of another model|but the forward has 1 rows"):
                refuse()
            assert torch.equal(held.layers[0].keys, keys)
        reference, _ = filled(model)
        after = prompt(4, 2, seed=6)
        assert_close(one_by_one(model, after, held, length), one_by_one(model, after, reference, length))
        with pytest.raises(ValueError, match="reaches back"):
            held.crop(-8)  # layer 0 was cropped before we could refuse
        with pytest.raises(RuntimeError, match="broken"):
            forward(model, prompt(1, 2), held, length)


@pytest.mark.parametrize("family", SOME)
def test_an_attached_cache_is_refused_by_other_models(family: str) -> None:
    model, other, plain = built(family), build(family, seed=1), build(family, seed=2)
    with attached(model, window=4), attached(other, window=4):
        held, length = filled(model)
        for tokens in (1, 3):
            with pytest.raises(ValueError, match="cache of another model"):
                forward(other, prompt(tokens, 2), held, length)
            with pytest.raises(RuntimeError, match=r"cannot be continued|can only be continued"):
                forward(plain, prompt(tokens, 2), copy.deepcopy(held), length)
    with pytest.raises(RuntimeError, match=r"cannot be continued|can only be continued"):
        forward(model, prompt(1, 2), held, length)
    with attached(model, window=4), pytest.raises(ValueError, match="before it was attached again"):
        forward(model, prompt(1, 2), held, length)


def test_a_plain_cache_of_another_model_is_refused() -> None:
    model, held = built("mamba2"), new_cache(built("qwen3_5"))  # which has attention in layer 1
    with attached(model), pytest.raises(ValueError, match="cache of another model"):
        forward(model, prompt(3), held)
    wider = built("olmo_hybrid")
    held, length = filled(built("qwen3_5"))
    with attached(wider), pytest.raises(ValueError, match="cache of another model"):
        forward(wider, prompt(1, 2), held, length)


# ---- failures in the middle of a forward


@pytest.mark.parametrize("where", ["in a recurrent layer", "between recurrent layers"])
def test_a_forward_that_fails_half_way_breaks_the_cache(where: str) -> None:
    """Some layers have moved on, others have not: the cache refuses use until it is reset."""
    model = built("qwen3_5")
    layers = model.model.layers
    with attached(model, window=2, verify_len=2) as handle:
        held, length = filled(model)
        broken = layers[2].linear_attn.out_proj if where == "in a recurrent layer" else layers[1].mlp

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        hook = broken.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            forward(model, prompt(1, 2), held, length)
        hook.remove()
        for use in (
            lambda: forward(model, prompt(1, 2), held, length),
            lambda: held.crop(0),
            lambda: held.reorder_cache(torch.tensor([1, 0])),
            lambda: copy.deepcopy(held),
        ):
            with pytest.raises(RuntimeError, match="broken: a forward failed half-way"):
                use()
        with pytest.raises(SlotError, match="broken"):
            states_of(held)
        held.reset()
        assert handle.slots_in_use == 0
        # another cache of the same model is not affected
        fresh, _ = filled(model)
        forward(model, prompt(1, 2), fresh, length)


def test_text_is_as_without_a_failure_elsewhere() -> None:
    """A failing `generate` leaves the model as it was."""
    model, ids = built("kimi_linear"), prompt(9)
    expected, _ = generate(model, ids, 8)
    with attached(model, window=4):
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(model, ids, 8)
        hook.remove()
        assert torch.equal(generate(model, ids, 8)[0], expected)
