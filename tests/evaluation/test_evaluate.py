"""`replayssm.evaluate`: its decoding is the decoding of an attached model, its figures are those of the logits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from replayssm import ReplayConfig, models
from replayssm.evaluate.forward import logits_of, replayed_forward
from replayssm.evaluate.measure import BINS, Question, answer, evaluate, read_questions
from replayssm.evaluate.precision import Precision

from ..attach.helpers import TOLERANCE, assert_close, attached, built, forward, new_cache, prompt
from ..attach.models import FAMILIES

ONE_EACH = ("qwen3_5", "nemotron_h", "kimi_linear")


def decoded(model: Any, ids: torch.Tensor, name: str, window: int) -> torch.Tensor:
    """Log-probabilities [rows, T - window, vocabulary] of an attached model, token by token after the first window."""
    config = Precision(name).config(window)
    options = {
        "checkpoint_format": config.checkpoint_format,
        "read_format": config.read_format,
        "rounding": config.rounding,
    }
    with attached(model, window=window, stagger=False, **options):
        held = new_cache(model)
        forward(model, ids[:, :window], held)
        logits = [forward(model, ids[:, i : i + 1], held, i) for i in range(window, ids.shape[1])]
    return torch.cat(logits, 1).log_softmax(-1)


def evaluated(model: Any, ids: torch.Tensor, names: tuple[str, ...], window: int) -> torch.Tensor:
    """Log-probabilities [settings, rows, T, vocabulary] of the forward that is tested."""
    hidden = replayed_forward(model, ids, [Precision(name).config(window) for name in names]).hidden
    return logits_of(model, hidden.flatten(0, 1)).log_softmax(-1).unflatten(0, hidden.shape[:2])


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_states_give_the_models_own_logits(family: str) -> None:
    model, ids = built(family), prompt(37, rows=2)
    (found,) = evaluated(model, ids, ("fp32",), 8)
    assert_close(found, forward(model, ids).log_softmax(-1))
    assert all("forward" not in module.__dict__ for module in model.modules()), "the model is left as it was"


@pytest.mark.parametrize("window", [8, 20])
@pytest.mark.parametrize("family", ONE_EACH)
def test_decoding_a_given_text_is_decoding(family: str, window: int) -> None:
    """The same flushes and roundings as token by token, where a prompt of one window was rounded once as well.

    Formats with few bits are left out: a number that rounding in another order puts on the other side of a midpoint
    is then far off, and the comparison says little. Their encoding is the same code.
    """
    model, ids = built(family), prompt(50, rows=2)
    names = ("fp32", "fp16", "fp32+fp16")
    found = evaluated(model, ids, names, window)[:, :, window:]
    for i, name in enumerate(names):
        assert_close(found[i], decoded(model, ids, name, window), TOLERANCE if name == "fp32" else 4e-3)


@pytest.mark.parametrize("family", ONE_EACH)
def test_figures(family: str) -> None:
    model, ids = built(family), prompt(300, rows=2)
    names = ("nvfp4", "fp32+nvfp4", "fp32+fp8", "fp8-stochastic+nvfp4")
    done = []
    found = evaluate(model, ids, names, window=16, progress=done.append)
    assert [row.precision for row in found.rows] == ["fp32", *names]
    rows = {row.precision: row for row in found.rows}
    assert (rows["fp32"].kl, rows["fp32"].agreement, rows["fp32"].state_error) == (0, 1, 0)
    logs = forward(model, ids).log_softmax(-1)[:, :-1].double()
    loss = -logs.gather(-1, ids[:, 1:, None]).mean()
    assert rows["fp32"].perplexity == pytest.approx(float(loss.exp()), rel=1e-5)
    assert all(0 < rows[name].kl < 0.1 for name in names)
    assert rows["nvfp4"].state_error > 5 * rows["fp32+nvfp4"].state_error > 0
    assert rows["fp32+nvfp4"].slot_bytes > rows["fp8-stochastic+nvfp4"].slot_bytes > rows["nvfp4"].slot_bytes
    assert len(rows["nvfp4"].kl_by_position) == 299 // found.stretch <= BINS
    assert sum(done) == 300 * len(found.half_lives)
    direct = evaluated(model, ids, ("fp32", "nvfp4"), 16)[:, :, :-1].double()
    kl = (direct[0].exp() * (direct[0] - direct[1])).sum(-1).mean()
    assert rows["nvfp4"].kl == pytest.approx(float(kl), rel=1e-4)
    assert json.loads(json.dumps(found.as_json()))["tokens"] == 300


@pytest.mark.parametrize("family", ONE_EACH)
def test_bytes_are_those_of_plain_decoding(family: str) -> None:
    """Evaluation takes many tokens in a step, for which its own rings are larger."""
    model, ids = built(family), prompt(20)
    for row in evaluate(model, ids, ("fp32+nvfp4", "fp16")).rows:
        with attached(model, **vars(ReplayConfig.of(row.precision))) as handle:
            pool = handle.allocate(1, torch.float32, ids.device)
        assert row.slot_bytes == sum(layer.layout.slot_bytes for layer in pool.layers)


@pytest.mark.parametrize("family", ONE_EACH)
def test_reads_leave_the_states_of_the_first_layer_alone(family: str) -> None:
    """Its inputs are the same in every precision; a delta rule beside a read copy solves its windows again, in fp64."""
    model, ids = built(family), prompt(130)
    names = ("fp32", "fp32+nvfp4", "fp32+int8", "nvfp4")
    result = replayed_forward(model, ids, [Precision(name).config(16) for name in names])
    first = result.state_errors[0]
    assert torch.equal(first[1], first[2])
    assert (first[1] < 1e-6).all()
    assert (first[3] > 1e-3).all()
    assert not result.state_errors[-1][0].any()


def test_half_lives_are_those_of_the_decays() -> None:
    """dt_bias gives a step that does not depend on the input, A_log the rest."""
    model = built("qwen3_5")
    mixer = next(module for module in model.modules() if hasattr(module, "A_log"))
    before = {name: value.detach().clone() for name, value in mixer.named_parameters()}
    with torch.no_grad():
        mixer.in_proj_a.weight.zero_()
        mixer.dt_bias.fill_(0)  # softplus(0) = ln 2
        mixer.A_log.copy_(torch.linspace(-3, 0, mixer.A_log.numel()))
    try:
        result = replayed_forward(model, prompt(20), [Precision("fp32").config(16)])
        assert torch.allclose(result.half_lives[0].float(), (-mixer.A_log).exp(), rtol=1e-5)
        # beta lies between 0 and 1, and so a token overwrites less than 1 / N of the state
        decay, overwritten = math.log(2) / result.half_lives[0], 1 / mixer.head_k_dim
        assert (result.memories[0] < 1 / decay).all()
        assert (result.memories[0] > 1 / (decay + overwritten)).all()
    finally:
        with torch.no_grad():
            for name, value in mixer.named_parameters():
                value.copy_(before[name])


def test_an_attached_model_and_one_in_training_are_refused() -> None:
    model, ids = built("qwen3_5"), prompt(5)
    with attached(model), pytest.raises(ValueError, match="detach the model before it is evaluated"):
        evaluate(model, ids, ("nvfp4",))
    model.train()
    try:
        with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
            evaluate(model, ids, ("nvfp4",))
    finally:
        model.eval()
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        evaluate(model, ids[:, :1], ("nvfp4",))


# ---- questions


def test_answers_are_the_likeliest_choices() -> None:
    folder = models.path("gdn-tiny")
    from transformers import AutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    questions = [
        Question("This function returns a", (" list of the names", " qq zx", " of of"), 0),
        Question("If the file does not", (" zq", " exist, an exception is raised"), 0),
    ]
    scores = []
    for question in questions:
        start = tokenizer(question.text)["input_ids"]
        each = []
        for choice in question.choices:
            end = tokenizer(choice)["input_ids"]
            logs = forward(model, torch.tensor([start + end])).log_softmax(-1)[0, len(start) - 1 : -1]
            each.append((float(logs.gather(-1, torch.tensor(end)[:, None]).sum()), len(end)))
        scores.append(each)
    total = [max(range(len(each)), key=lambda i: each[i][0]) for each in scores]
    per_token = [max(range(len(each)), key=lambda i: each[i][0] / each[i][1]) for each in scores]
    done = []
    found = answer(model, tokenizer, questions, ("fp32+fp8",), window=8, progress=done.append)
    assert [row.precision for row in found] == ["fp32", "fp32+fp8"]
    for row in found:
        assert row.accuracy == sum(t == q.answer for t, q in zip(total, questions, strict=True)) / 2
        assert row.accuracy_per_token == sum(t == q.answer for t, q in zip(per_token, questions, strict=True)) / 2
        assert row.same_as_reference == 1
    assert sum(done) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", 'line 2 of .* is no {"question"'),
        ('{"question": "a", "choices": ["b"]}', 'line 2 of .* is no {"question"'),
        ('["a", "b"]', 'line 2 of .* is no {"question"'),
        ('{"question": "a", "choices": "bc", "answer": 1}', 'line 2 of .* is no {"question"'),
        ('{"question": "a", "choices": ["b", 2], "answer": 1}', 'line 2 of .* is no {"question"'),
        ('{"question": 1, "choices": ["b", "c"], "answer": 1}', 'line 2 of .* is no {"question"'),
        ('{"question": "a", "choices": ["b", "c"], "answer": 1.7}', 'line 2 of .* is no {"question"'),
        ('{"question": "a", "choices": ["b", "c"], "answer": true}', 'line 2 of .* is no {"question"'),
        ('{"question": "a", "choices": ["b", "c"], "answer": 1e999}', 'line 2 of .* is no {"question"'),
        ('{"question": "", "choices": ["b", "c"], "answer": 1}', "line 2 of .*: .* is empty"),
        ('{"question": "a", "choices": ["", "c"], "answer": 1}', "line 2 of .*: .* is empty"),
        ('{"question": "a", "choices": ["b"], "answer": 1}', "line 2 of .*: answer 1 is no index of 1 choices"),
    ],
)
def test_a_file_that_is_no_list_of_questions_is_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    good = '{"question": "a", "choices": ["b", "c"], "answer": 1}\n'
    path.write_text(good + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_questions(path)
    path.write_text(good + "\n")
    assert read_questions(path) == [Question("a", ("b", "c"), 1)]
    path.write_text("")
    with pytest.raises(ValueError, match="has no questions"):
        read_questions(path)


def test_questions_may_hold_any_character_that_json_allows(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "a\u2028b\x85", "choices": ["c", "d"], "answer": 0}\n', encoding="utf-8")
    assert read_questions(path) == [Question("a\u2028b\x85", ("c", "d"), 0)]


def test_questions_that_are_not_utf_8_are_refused_with_their_path(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"questions\.jsonl is not UTF-8 text"):
        read_questions(path)


# ---- names


def test_names_of_precisions() -> None:
    config = Precision("fp8-stochastic+nvfp4").config(48)
    assert (config.checkpoint_format, config.read_format, config.rounding) == ("fp8", "nvfp4", "stochastic")
    assert (config.window, config.verify_len) == (48, 16)
    assert Precision("nvfp4").config(3).verify_len == 3
    for name in ("fp99", "fp32+", "nvfp4+nvfp4", "fp32-stochastic", "fp64", "fp64+nvfp4"):
        with pytest.raises(ValueError, match=r"must be one of|too coarse|not rounded|for verification"):
            Precision(name).config(16)
