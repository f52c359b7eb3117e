"""What cannot be attached or run is refused with a sentence that says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

import replayssm
from replayssm import ReplayConfig, attach, supported_families

from .helpers import attached, built, cache_name, forward, generate, new_cache, prompt
from .models import FAMILIES, TOK, build


def test_supported_families_are_those_tested() -> None:
    assert set(supported_families()) == set(FAMILIES)


def test_import_is_light() -> None:
    """`import replayssm` and the list of families do not import transformers."""
    code = "import sys, replayssm; replayssm.supported_families(); sys.exit('transformers' in sys.modules)"
    source = str(Path(replayssm.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": source}).returncode == 0


def _mamba() -> Any:
    return T.MambaForCausalLM(T.MambaConfig(hidden_size=32, num_hidden_layers=1, state_size=4, **TOK))


def _falcon_mamba() -> Any:
    return T.FalconMambaForCausalLM(T.FalconMambaConfig(hidden_size=32, num_hidden_layers=1, state_size=4, **TOK))


def _jamba() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 1}
    sizes |= {"num_experts_per_tok": 1, "mamba_d_state": 4, "use_mamba_kernels": False}
    return T.JambaForCausalLM(T.JambaConfig(**sizes, **TOK))


@pytest.mark.parametrize("make", [_mamba, _falcon_mamba, _jamba])
def test_out_of_form_models_get_the_reason(make: Any) -> None:
    with pytest.raises(ValueError, match=r"Mamba-1 decays every state element.*Supported model families: bamba"):
        attach(make())


def test_models_without_recurrent_layers() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = T.LlamaForCausalLM(T.LlamaConfig(**sizes, **TOK))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no recurrent layer.*qwen3_5"):
        attach(model)


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="transformers model, got Linear"):
        attach(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="transformers model, got str"):
        attach("qwen3_5")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ReplayConfig, got dict"):
        attach(built("qwen3_5"), {"window": 4})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="verify_len 4 is larger than window 2"):
        attach(built("qwen3_5"), ReplayConfig(window=2, verify_len=4))


def test_weights_that_are_nowhere_or_in_two_places() -> None:
    with torch.device("meta"):
        model = FAMILIES["qwen3_5"]()
    with pytest.raises(ValueError, match="one device that holds weights"):
        attach(model)
    half = FAMILIES["qwen3_5"]()
    half.model.layers[2].to("meta")
    with pytest.raises(ValueError, match="lie on cpu, meta"):
        attach(half)


def test_a_mixer_with_a_forward_of_its_own() -> None:
    model = build("qwen3_5")
    mixer = model.model.layers[2].linear_attn
    mixer.forward = mixer.forward
    with pytest.raises(ValueError, match=r"layers.2.linear_attn has a forward of its own"):
        attach(model)
    assert "forward" not in vars(model.model.layers[0].linear_attn)


def test_a_mixer_class_that_runs_its_state_elsewhere() -> None:
    model = build("qwen3_5")
    mixer = model.model.layers[2].linear_attn
    mixer.__class__ = type("Mine", (type(mixer),), {"forward": lambda self, hidden_states, cache=None: hidden_states})
    with pytest.raises(ValueError, match=r"Mine.forward of transformers .* does not call causal_conv1d_fn"):
        attach(model)
    assert "forward" not in vars(model.model.layers[0].linear_attn)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "kimi_linear"])
def test_gradients(family: str) -> None:
    """Training as before; no gradient is lost silently in a forward that continues a cache."""
    model, ids = build(family).train(), prompt(9, rows=2)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return next(p.grad for name, p in model.named_parameters() if name.endswith("A_log"))

    expected = gradient()
    with attached(model, window=4):
        assert torch.equal(gradient(), expected)
        held = new_cache(model)
        name = cache_name(model)
        with torch.enable_grad():
            model(ids, **{name: held}, use_cache=True)
            with pytest.raises(RuntimeError, match=r"no gradients through its recurrent state.*torch.no_grad"):
                model(ids[:, :1], **{name: held}, use_cache=True)
            with torch.no_grad():
                model(ids[:, :1], **{name: held}, use_cache=True)
            with pytest.raises(RuntimeError, match="no gradients through its recurrent state"):
                model(ids[:, :1], **{name: held}, use_cache=True)
            with torch.no_grad():
                model(ids[:, :1], **{name: held}, use_cache=True)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "kimi_linear"])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_the_last_recurrent_layer_alone(family: str, fused: bool) -> None:
    """Nothing after it would notice that they are gone."""
    model, ids = build(family).requires_grad_(False), prompt(9, rows=2)
    [*_, last] = (p for name, p in model.named_parameters() if name.endswith("A_log"))
    name, reason = cache_name(model), "no gradients through its recurrent state"
    with attached(model, window=4, fused=fused), torch.enable_grad():
        held = new_cache(model)
        model(ids, **{name: held}, use_cache=True)
        model(ids[:, :1], **{name: held}, use_cache=True)  # nothing here has gradients
        last.requires_grad_()
        for cache in (held, new_cache(model)):
            with pytest.raises(RuntimeError, match=reason):
                model(ids[:, :1], **{name: cache}, use_cache=True)
        model(ids, labels=ids, use_cache=False).loss.backward()
        assert last.grad is not None and bool(last.grad.any())


def test_a_cache_made_without_the_models_config() -> None:
    model = built("qwen3_5")
    with attached(model), pytest.raises(ValueError, match=r"DynamicCache\(config=model.config\)"):
        forward(model, prompt(3), T.DynamicCache())


def test_an_empty_forward() -> None:
    model = built("mamba2")
    with attached(model), pytest.raises(ValueError, match="at least one token"):
        forward(model, torch.empty(1, 0, dtype=torch.int64), new_cache(model))


def test_activations_of_another_dtype_than_the_slots() -> None:
    """Continuing a 32-bit cache with a model cast to 16 bit would mix precisions."""
    model = build("qwen3_5")
    with attached(model):
        held = new_cache(model)
        forward(model, prompt(5), held)
        model.to(torch.bfloat16)
        with pytest.raises(ValueError, match=r"conv inputs must be torch.float32"):
            forward(model, prompt(1), held, 5)
        with pytest.raises(RuntimeError, match="broken"):
            forward(model, prompt(1), held, 5)


def test_generate_still_checks_its_own_arguments() -> None:
    model = built("qwen3_5")
    with attached(model), pytest.raises(ValueError, match="nonsense"):
        generate(model, prompt(3), 2, nonsense=True)
