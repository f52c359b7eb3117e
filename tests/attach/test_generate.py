"""`generate` in all its ways gives what it gives without replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .helpers import assert_close, attached, built, cache_name, generate, new_cache, prompt
from .models import FAMILIES

# one per recurrence, one whose cache layers hold keys and values as well, one with attention first in the cache
SOME = ("qwen3_5", "nemotron_h", "kimi_linear", "falcon_h1", "zamba2")


def both_ways(family: str, ids: Tensor, new: int, config: dict[str, Any] | None = None, **options: Any) -> None:
    """The same tokens and log-probabilities with and without replay."""
    model = built(family)
    torch.manual_seed(3)
    tokens, log_probabilities = generate(model, ids, new, **options)
    with attached(model, **({"window": 4} if config is None else config)) as handle:
        torch.manual_seed(3)
        found_tokens, found = generate(model, ids, new, **options)
        assert handle.traffic().tokens > 0
        assert handle.slots_in_use == 0
    assert torch.equal(found_tokens, tokens)
    assert_close(found, log_probabilities)


@pytest.mark.parametrize("family", FAMILIES)
def test_beam_search(family: str) -> None:
    both_ways(family, prompt(9, rows=2), 10, num_beams=3)


@pytest.mark.parametrize("family", SOME)
def test_beam_search_with_sampling_and_several_results(family: str) -> None:
    both_ways(family, prompt(9, rows=2), 10, num_beams=4, num_return_sequences=2, do_sample=True)


@pytest.mark.parametrize("family", SOME)
def test_sampling_with_a_seed(family: str) -> None:
    both_ways(family, prompt(9, rows=2), 24, do_sample=True, temperature=0.8, top_p=0.9, top_k=0)


@pytest.mark.parametrize("family", SOME)
def test_several_results_per_prompt(family: str) -> None:
    both_ways(family, prompt(9), 12, do_sample=True, num_return_sequences=3)


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("chunk", [3, 12])
def test_chunked_prompt(family: str, chunk: int) -> None:
    """13 tokens in chunks of 3 and of 12: both end with a chunk of one token."""
    both_ways(family, prompt(13), 10, prefill_chunk_size=chunk)


@pytest.mark.parametrize("family", SOME)
def test_chunked_prompt_with_chunks_as_short_as_a_verify_step(family: str) -> None:
    both_ways(family, prompt(13), 10, {"window": 8, "verify_len": 3}, prefill_chunk_size=3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_prompt_shorter_than_the_convolution(family: str, length: int) -> None:
    """A prompt of one token, or of as many as a verify step may have, is a prompt."""
    both_ways(family, prompt(length), 8, {"window": 4, "verify_len": 4})


@pytest.mark.parametrize("family", FAMILIES)
def test_static_cache(family: str) -> None:
    both_ways(family, prompt(9, rows=2), 12, cache_implementation="static", disable_compile=True)
    both_ways(family, prompt(7, rows=3), 12, cache_implementation="static", disable_compile=True)


@pytest.mark.parametrize("family", SOME)
def test_without_a_cache_nothing_changes(family: str) -> None:
    model, ids = built(family), prompt(9)
    expected = generate(model, ids, 6, use_cache=False)
    with attached(model) as handle:
        found = generate(model, ids, 6, use_cache=False)
        assert handle.traffic().tokens == 0
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("family", SOME)
def test_continuation_from_a_cache(family: str) -> None:
    """The cache that `generate` returns, or that the caller brought, continues with more text."""
    model, ids, more = built(family), prompt(9), prompt(5, seed=8)
    with attached(model, window=4, verify_len=2) as handle:
        held = new_cache(model)
        first = model.generate(ids, max_new_tokens=7, do_sample=False, **{cache_name(model): held})
        assert handle.slots_in_use == 1
        longer = torch.cat([first, more], 1)
        found = model.generate(longer, max_new_tokens=9, do_sample=False, **{cache_name(model): held})
        expected = model.generate(longer, max_new_tokens=9, do_sample=False)
        assert torch.equal(found, expected)
        del held
        assert handle.slots_in_use == 0


@pytest.mark.parametrize("family", SOME)
def test_the_returned_cache_keeps_its_slots(family: str) -> None:
    model, ids = built(family), prompt(9)
    with attached(model, window=4) as handle:
        out = model.generate(ids, max_new_tokens=7, do_sample=False, return_dict_in_generate=True)
        held = getattr(out, cache_name(model))
        assert handle.slots_in_use == 1
        found = model.generate(out.sequences, max_new_tokens=9, do_sample=False, **{cache_name(model): held})
        assert torch.equal(found, model.generate(out.sequences, max_new_tokens=9, do_sample=False))


@pytest.mark.parametrize("between", ["nothing", "a reordering"])
def test_generate_in_inference_mode_and_out_of_it(between: str) -> None:
    """Tensors made in inference mode could not be written outside of it; a user-held cache crosses the border."""
    model, ids = built("qwen3_5"), prompt(9)
    name = cache_name(model)
    with attached(model, window=4):
        expected = model.generate(ids, max_new_tokens=12, do_sample=False)
        held = new_cache(model)
        with torch.inference_mode():
            first = model.generate(ids, max_new_tokens=5, do_sample=False, **{name: held})
            if between == "a reordering":
                held.reorder_cache(torch.tensor([0]))
        found = model.generate(first.clone(), max_new_tokens=7, do_sample=False, **{name: held})
    assert torch.equal(found, expected)
