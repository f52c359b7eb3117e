"""The runner: steps that stay on the device equal plain transformers, whatever the rows do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm.decode import GROUPED, STATIC, Runner, Sampling, compile_neighbours
from replayssm.decode.attention import biased_attention, fits_static, grouped_attention

from ..attach.helpers import assert_close, attached, built, forward, generate
from ..attach.models import FAMILIES, build
from .helpers import plain_text
from .test_decode import prompts

NEW = 12
BATCHED = [family for family in FAMILIES if family != "glm5_next"]


def steps(runner: Runner, given: Sequence[Sequence[int]], new: int, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """(tokens [B, new], log-probabilities [B, new, vocabulary]) of a runner."""
    tokens, seen = [], []
    runner.start(given, chunk)
    for _ in range(new):
        tokens.append(runner.new[:, :1].clone())
        seen.append(runner.logits[:, :1].float().log_softmax(-1))
        runner.advance()
    return torch.cat(tokens, 1), torch.cat(seen, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_transformers(family: str) -> None:
    """Prompts of different lengths, in chunks; more tokens than a window."""
    model = built(family)
    given = prompts(11, 6) if family in BATCHED else prompts(11)
    expected = [generate(model, torch.tensor([ids]), NEW) for ids in given]
    with attached(model, window=4):
        tokens, found = steps(Runner(model, capacity=40), given, NEW, chunk=4)
    assert torch.equal(tokens, torch.cat([tokens for tokens, _ in expected]))
    assert_close(found, torch.cat([log_probabilities for _, log_probabilities in expected]))


def test_the_wrong_column_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = built("qwen3_5"), prompts(11, 6)
    _, expected = generate(model, torch.tensor([given[1]]), NEW)
    with attached(model):
        runner = Runner(model, capacity=40)
        put = runner.columns.place
        monkeypatch.setattr(
            runner.columns, "place", lambda at, read: put(at.max(0, keepdim=True).values + 0 * at, read)
        )
        _, found = steps(runner, given, NEW)
    assert (found[1] - expected[0]).abs().max() > 1e-2


@pytest.mark.parametrize("implementation", [GROUPED, STATIC])
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "falcon_h1"])
def test_attention_on_shared_keys(family: str, implementation: str) -> None:
    model, given = build(family), prompts(11, 6)
    expected = torch.cat([generate(model, torch.tensor([ids]), NEW)[1] for ids in given])
    model.set_attn_implementation(implementation)
    with attached(model):
        _, found = steps(Runner(model, capacity=40), given, NEW)
    assert_close(found, expected)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_on_shared_keys(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, t, 16, generator=generator) for heads, t in ((6, tokens), (2, 64), (2, 64))
    )
    sees = torch.randint(2, (2, 1, tokens, 64), generator=generator).bool()
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    expected, _ = grouped_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    out = biased_attention(query.unflatten(1, (2, 3)).flatten(2, 3), key, value, mask, 0.3)
    assert_close(out.unflatten(2, (3, tokens)).flatten(1, 2).transpose(1, 2), expected)


def test_flex_attention_takes_masks_that_are_added_row_by_row() -> None:
    queries, mask = torch.zeros(2, 2, 12, 16), torch.zeros(2, 1, 4, 64)
    assert fits_static(queries, mask)
    for other in (None, mask.bool(), mask[:1], mask.expand(2, 6, 4, 64)):
        assert not fits_static(queries, other)
    assert not fits_static(torch.zeros(2, 2, 96, 16), mask)


def test_a_copy_of_compiled_neighbours_has_weights_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_5")
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *given: function(*given))
    compile_neighbours(model)
    twin, ids = copy.deepcopy(model), prompts(5)[0]
    expected = forward(model, torch.tensor([ids]))
    with torch.no_grad():
        for weights in twin.parameters():
            weights.zero_()
    assert forward(twin, torch.tensor([ids])).abs().max() == 0
    assert torch.equal(forward(model, torch.tensor([ids])), expected)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_compiled_neighbours(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and feed-forward layers are compiled, one function for all modules of a class; nothing else changes."""
    model, given = build(family), prompts(11, 6)
    expected = torch.cat([generate(model, torch.tensor([ids]), NEW)[1] for ids in given])
    torch.compiler.reset()
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, backend="eager", **options))
    count = compile_neighbours(model)
    assert count == compile_neighbours(model) + count > 2 * model.config.num_hidden_layers
    with attached(model), torch._dynamo.config.patch(error_on_recompile=False, fail_on_recompile_limit_hit=True):
        _, found = steps(Runner(model, capacity=40), given, NEW)
    assert_close(found, expected)


@pytest.mark.parametrize("right", [0, 2, 3])
def test_drafts_are_kept_while_they_are_right(right: int) -> None:
    model, given = built("nemotron_h"), prompts(9, 5)
    texts = plain_text(model, given, 30)
    found: list[list[int]] = [[], []]
    with attached(model, window=8, verify_len=4):
        runner = Runner(model, capacity=48, width=4)
        runner.start(given)
        counts = []
        for _ in range(6):
            take(runner, found)
            for row, (ids, text) in enumerate(zip(given, texts, strict=True)):
                coming = text[len(ids) + len(found[row]) :][:3]
                drafts = [token if place < right else 3 + (token + 1) % 87 for place, token in enumerate(coming)]
                runner.tokens[row, 1:] = torch.tensor(drafts)
            runner.advance()
            counts.append((runner.new >= 0).sum(1).tolist())
        take(runner, found)
    assert counts == [[1 + right, 1 + right]] * 6
    for row, (ids, text) in enumerate(zip(given, texts, strict=True)):
        assert found[row] == text[len(ids) :][: len(found[row])]


def take(runner: Runner, found: list[list[int]]) -> None:
    for row, tokens in enumerate(runner.new.tolist()):
        found[row] += [token for token in tokens if token >= 0]


def test_rows_stop_and_rest() -> None:
    model, given = built("qwen3_5"), prompts(9, 5)
    texts = [text[len(ids) :] for text, ids in zip(plain_text(model, given, NEW), given, strict=True)]
    end = texts[0][4]
    expected = [text[: text.index(end) + 1] if end in text else text for text in texts]
    with attached(model, window=4):
        runner = Runner(model, capacity=40, stop=[end])
        found: list[list[int]] = [[], []]
        lengths = []
        for new in runner.run(given, NEW):
            found = [row + tokens for row, tokens in zip(found, new, strict=True)]
            lengths.append(runner.certain.tolist())
    assert found == expected
    # the state of a row that rests stays what it was
    assert lengths[-1][0] == len(given[0]) + len(expected[0]) - 1


def test_a_full_row_rests() -> None:
    model, (ids,) = built("qwen3_5"), prompts(60)
    (text,) = plain_text(model, [ids], 8)
    with attached(model):
        runner = Runner(model, capacity=64)
        tokens = [row for (row,) in runner.run([ids], 8)]
    assert [token for row in tokens for token in row] == text[60:65]
    assert runner.certain.tolist() == [64]


def test_sampling_draws_from_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).log_softmax(0).expand(20000, 1, 4)
    for sampling in (Sampling(0.7, seed=1), Sampling(1.0, top_p=0.8, seed=2)):
        drawn = sampling.pick(logits).flatten().bincount(minlength=4) / 20000
        assert_close(drawn.double(), sampling.distribution(logits[0, 0]), 0.02)
    assert torch.equal(Sampling(seed=3).pick(logits), Sampling(seed=3).pick(logits))


def test_what_a_runner_refuses() -> None:
    model, given = built("qwen3_5"), prompts(9)
    with attached(model, verify_len=2):
        with pytest.raises(ValueError, match=r"width must be in 1\.\.verify_len = 2, got 3"):
            Runner(model, capacity=40, width=3)
        with pytest.raises(ValueError, match="judged by the likeliest token"):
            Runner(model, capacity=40, width=2, sampling=Sampling())
        with pytest.raises(ValueError, match="do not fit in a capacity of 64"):
            Runner(model, capacity=40).start(prompts(64))
        with pytest.raises(ValueError, match="a runner with drafts is driven step by step"):
            next(Runner(model, capacity=40, width=2).run(given, 3))
        runner = Runner(model, capacity=40)
        runner.start(given)
        with pytest.raises(ValueError, match="takes its prompts once"):
            runner.start(given)
        with pytest.raises(ValueError, match="chunk must be at least 1"):
            Runner(model, capacity=40).start(given, chunk=0)


@pytest.mark.gpu
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "falcon_h1", "olmo_hybrid"])
def test_a_graph_is_the_step(family: str, sampled: bool) -> None:
    torch.backends.cudnn.allow_tf32 = False
    model: Any = build(family)
    if family == "nemotron_h":  # experts are picked on the host
        model.config.layers_block_type[-1] = "mlp"
        model = type(model)(model.config).eval()
    model, given = model.cuda(), prompts(11, 6)
    found = []
    with attached(model, window=4):
        for capture in (False, True):
            sampling = Sampling(seed=5) if sampled else None
            runner = Runner(model, capacity=40, sampling=sampling, capture=capture)
            found.append(steps(runner, given, NEW))
            assert (runner._graph is not None) == capture
    assert torch.equal(found[0][0], found[1][0])
    assert_close(found[1][1], found[0][1], 1e-6)
