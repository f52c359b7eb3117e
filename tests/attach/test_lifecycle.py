"""Attach and detach change one instance and nothing else; slots and memory come back."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from replayssm import ReplayConfig, attach, detach

from .helpers import assert_close, attached, built, cache_name, forward, generate, new_cache, prompt, sequences_of
from .models import FAMILIES, VARIANTS, build


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_detach_restores_the_model(family: str) -> None:
    """No attribute, hook or class differs, and outputs have the same bits."""
    model, ids = build(family), prompt(9)
    before = {name: (set(vars(m)), type(m), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    forwards = {type(m): type(m).forward for m in model.modules()}
    modules = {type(m).__module__ for m in model.modules()}
    expected = generate(model, ids, 6)
    with attached(model, window=4):
        generate(model, ids, 6)
        assert all(cls.forward is forwards[cls] for cls in forwards)
    found = generate(model, ids, 6)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    after = {name: (set(vars(m)), type(m), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    assert after == before
    assert {type(m).__module__ for m in model.modules()} == modules


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "kimi_linear"])
def test_another_instance_of_the_class_is_not_touched(family: str) -> None:
    model, other, ids = build(family), build(family, seed=1), prompt(9)
    expected = generate(other, ids, 6)
    with attached(model, window=4):
        held = new_cache(other)
        found = generate(other, ids, 6, **{cache_name(other): held})
        assert not any(hasattr(layer, "sequences") for layer in held.layers)
    assert torch.equal(found[1], expected[1])


def test_two_attached_models_at_once() -> None:
    """With different configurations, interleaved, each with its own accounts."""
    one, two = build("qwen3_5"), build("qwen3_5", seed=1)
    expected = [generate(model, prompt(9), 20) for model in (one, two)]
    with attached(one, window=2) as first, attached(two, window=16, verify_len=2) as second:
        caches = [new_cache(one), new_cache(two)]
        for held, model in zip(caches, (one, two), strict=True):
            forward(model, prompt(9), held)
        for i in range(20):
            for (tokens, log_probabilities), held, model in zip(expected, caches, (one, two), strict=True):
                if i < 19:
                    logits = forward(model, tokens[:, i : i + 1], held, 9 + i)
                    assert_close(logits[:, -1].log_softmax(-1), log_probabilities[:, i + 1])
        assert first.traffic().tokens == second.traffic().tokens == 19
        assert first.traffic().written_bytes > second.traffic().written_bytes


def test_fifty_generate_calls_leave_nothing_behind() -> None:
    """Without the help of the garbage collector: nothing that a call allocates is part of a cycle."""
    model, ids = built("qwen3_5"), prompt(5, rows=2)

    def tensors() -> int:
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    with attached(model, window=4) as handle:
        generate(model, ids, 3)
        gc.collect()
        before = tensors()
        gc.disable()
        try:
            for _ in range(50):
                generate(model, ids, 3)
                assert handle.slots_in_use == 0
            assert tensors() == before
        finally:
            gc.enable()
        assert handle.traffic().tokens == 51 * 2 * 2


class _Raises(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        if input_ids.shape[1] >= 8:
            raise RuntimeError("stop here")
        return False


def test_slots_come_back_when_generate_raises() -> None:
    model, ids = built("kimi_linear"), prompt(5, rows=2)
    expected, _ = generate(model, ids, 6)
    with attached(model, window=4) as handle:
        gc.disable()
        try:
            for _ in range(3):
                try:
                    generate(model, ids, 6, stopping_criteria=StoppingCriteriaList([_Raises()]))
                except RuntimeError as error:
                    assert "stop here" in str(error)  # noqa: PT017  (pytest.raises would keep the frames alive)
                else:
                    pytest.fail("did not raise")
                assert handle.slots_in_use == 0
        finally:
            gc.enable()
        assert torch.equal(generate(model, ids, 6)[0], expected)


def test_slots_come_back_when_a_kept_cache_goes() -> None:
    model = built("qwen3_5")
    with attached(model) as handle:
        held, other = new_cache(model), new_cache(model)
        forward(model, prompt(5, rows=3), held)
        forward(model, prompt(5, rows=2), other)
        assert handle.slots_in_use == 5
        held.reset()
        assert handle.slots_in_use == 2
        del other
        assert handle.slots_in_use == 0


def test_weights_changed_after_attach_are_used() -> None:
    """The constants of a layer are read when a cache starts, not when the model is attached."""
    model = build("nemotron_h")
    with attached(model, window=4):
        generate(model, prompt(9), 4)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith((".A_log", ".D")):
                    parameter += 0.5
        found = generate(model, prompt(9), 8)
    assert_close(found[1], generate(model, prompt(9), 8)[1])


def test_traffic_counts_what_the_steps_moved() -> None:
    """Window 1 writes the state at each token, like ordinary decoding; a large window hardly ever."""
    model, ids = built("qwen3_5"), prompt(9)
    moved = {}
    for window in (1, 16):
        with attached(model, window=window) as handle:
            generate(model, ids, 33)
            moved[window] = handle.traffic()
            sequences = new_cache(model)
            forward(model, ids, sequences)
            layouts = [layer.layout for layer in sequences_of(sequences).pool.layers]
    state = sum(layout.bytes_of("checkpoint") for layout in layouts)
    for traffic in moved.values():
        assert traffic.tokens == 32
        assert traffic.ordinary_written_bytes == 32 * state
    records = 32 * sum(layout.record_bytes for layout in layouts)
    assert moved[16].written_bytes == pytest.approx(2 * state + records, rel=0.5)
    assert moved[1].written_bytes > 31 * state


def test_describe_lists_layers_and_bytes() -> None:
    model = built("nemotron_h")
    with attached(model, window=4) as handle:
        text = handle.describe()
        assert handle.families == ("nemotron_h",)
        assert handle.config == ReplayConfig(window=4)
        held = new_cache(model)
        forward(model, prompt(4), held)
        layout = sequences_of(held).pool.layers[0].layout
    assert "NemotronHForCausalLM (nemotron_h): 3 recurrent layers" in text
    assert "0, 2, 4" in text
    for number in (layout.bytes_of("checkpoint"), layout.bytes_of("ring"), layout.bytes_of("carry")):
        assert str(number) in text
    assert f"{3 * layout.slot_bytes} B per sequence" in text


def test_attach_and_detach_out_of_turn() -> None:
    model = built("qwen3_5")
    with pytest.raises(ValueError, match="not attached"):
        detach(model)
    handle = attach(model)
    with pytest.raises(ValueError, match="attached already"):
        attach(model)
    with pytest.raises(ValueError, match="attached already"):
        attach(model.model)  # the same mixers through another module
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(model)
    handle.detach()
    with pytest.raises(ValueError, match="detached already"):
        handle.detach()
    with pytest.raises(ValueError, match="not attached"):
        detach(model)


def test_a_base_model_can_be_attached() -> None:
    model = build("qwen3_5")
    expected = forward(model, prompt(9))
    with attached(model.model, window=4):
        held = new_cache(model)
        forward(model, prompt(9)[:, :8], held)
        assert_close(forward(model, prompt(9)[:, 8:], held, 8), expected[:, -1:])


def test_a_subclass_of_a_supported_mixer_is_attached() -> None:
    model = build("qwen3_5")
    mixer = model.model.layers[0].linear_attn
    mixer.__class__ = type("Mine", (type(mixer),), {})
    expected = generate(model, prompt(9), 6)
    with attached(model, window=4):
        assert_close(generate(model, prompt(9), 6)[1], expected[1])


def test_compiled_decoding() -> None:
    """One graph per number of pending tokens, no breaks; nothing is compiled again for a second call."""
    import transformers
    from torch._dynamo.utils import counters

    model, ids = built("mamba2"), prompt(9, rows=2)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    compile_config = transformers.CompileConfig(backend="aot_eager", fullgraph=True)
    compile_config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": compile_config}
    torch._dynamo.reset()
    counters.clear()
    with attached(model, window=4):
        for _ in range(2):
            assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False, **options), expected)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    torch._dynamo.reset()


def test_the_first_forward_of_a_cache_may_be_compiled() -> None:
    model = build("falcon_h1")
    with attached(model, window=4):
        held = new_cache(model)
        expected = [forward(model, ids, held) for ids in (prompt(5), prompt(1))]
        torch._dynamo.reset()
        compiled, held = torch.compile(model.forward, backend="eager"), new_cache(model)
        with torch.no_grad():
            for ids, logits in zip((prompt(5), prompt(1)), expected, strict=True):
                assert_close(compiled(ids, past_key_values=held, use_cache=True).logits, logits)
    torch._dynamo.reset()
