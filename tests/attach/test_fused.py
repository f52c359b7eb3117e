"""Steps that run everything between the projections themselves decode as the model's own forward does."""

from __future__ import annotations

import logging
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from replayssm import ReplayConfig, attach, detach, flow
from replayssm.attach.transformers import fused
from replayssm.attach.transformers.find import find_layers

from .helpers import assert_close, built, forward, generate, new_cache, prompt
from .models import FAMILIES, build

CLOSE = 1e-5
PROMPT = prompt(13, rows=2)


@cache
def plain(family: str) -> tuple[Tensor, Tensor]:
    return generate(built(family), PROMPT, 24)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_known_and_decodes_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = built(family), []
    mix = flow.mix
    monkeypatch.setattr(flow, "mix", lambda *given: calls.append(given[1]) or mix(*given))
    tokens, log_probabilities = plain(family)
    handle = attach(model, ReplayConfig(window=4), fused=True)
    try:
        assert handle.unfused == (None,) * len(handle.layers)
        found_tokens, found = generate(model, PROMPT, 24)
    finally:
        detach(model)
    assert calls == 23 * list(range(len(handle.layers))), "every layer of every decode step"
    assert torch.equal(found_tokens, tokens)
    assert_close(found, log_probabilities, 10 * CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_tokens_and_one_equal_the_models_own_forward(family: str) -> None:
    """The same tokens through both, at a tolerance that only orders of summation need."""
    model, ids = build(family), prompt(8, rows=2)
    found = {}
    for fuse in (True, False):
        attach(model, ReplayConfig(window=8, verify_len=5), fused=fuse)
        held = new_cache(model)
        forward(model, prompt(6, rows=2), held)
        parts, at = [], 0
        for tokens in (3, 1, 4):
            parts.append(forward(model, ids[:, at : at + tokens], held, 6 + at))
            at += tokens
        found[fuse] = torch.cat(parts, 1).log_softmax(-1)
        detach(model)
    assert_close(found[True], found[False], CLOSE)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "kimi_linear"])
def test_autocast_reaches_the_projections_only(family: str) -> None:
    model, found = build(family), {}
    for fuse in (True, False):
        attach(model, ReplayConfig(window=4), fused=fuse)
        held = new_cache(model)
        with torch.autocast("cpu", torch.bfloat16):
            forward(model, prompt(6), held)
            parts = [forward(model, prompt(1, seed=i), held, 6 + i) for i in range(6)]
        found[fuse] = torch.cat(parts, 1).float().log_softmax(-1)
        detach(model)
    difference = (found[True] - found[False]).abs()
    assert difference.mean() <= 2e-2 and not difference.isnan().any()


def test_what_the_mixer_does_not_describe_runs_the_models_own_forward(caplog: pytest.LogCaptureFixture) -> None:
    model = build("qwen3_5")
    find_layers(model)[1].mixer.norm.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.INFO, "replayssm"):
        handle = attach(model, fused=True)
    said = handle.describe()
    assert "decode steps of layers 0: fused\n" in said
    assert "decode steps of layers 2: the model's own forward (its Qwen3_5RMSNormGated has hooks" in said
    assert "decode steps of layers 0: fused" in caplog.text
    detach(model)
    handle = attach(model)
    assert "decode steps of layers 0: the model's own forward (the layers are on cpu)" in handle.describe()
    detach(model)
    handle = attach(model, fused=False)
    assert "decode steps of layers 0, 2: the model's own forward (fused=False)" in handle.describe()
    detach(model)


def test_layers_that_differ_are_told_apart() -> None:
    def reason(change: object, family: str = "qwen3_5") -> str | None:
        model = build(family)
        layer = find_layers(model)[0]
        change(layer.mixer)  # type: ignore[operator]
        return fused.refusal(layer)

    class Later(nn.Module):
        """A norm that gates before it normalises."""

        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = other.weight, other.variance_epsilon

        def forward(self, y: Tensor, z: Tensor) -> Tensor:
            return torch.nn.functional.rms_norm(y * torch.nn.functional.silu(z), y.shape[-1:], self.weight)

    assert reason(lambda mixer: None) is None
    assert "not the norm that is known" in str(reason(lambda mixer: setattr(mixer, "norm", Later(mixer.norm))))
    assert "followed by gelu" in str(reason(lambda mixer: setattr(mixer, "activation", "gelu")))
    assert "built differently" in str(reason(lambda mixer: delattr(mixer, "A_log")))
    assert "forward of its own" in str(
        reason(lambda mixer: setattr(mixer, "__class__", type("Mine", (type(mixer),), {"forward": lambda *_: None})))
    )
    assert "not the decay gate" in str(
        reason(lambda mixer: setattr(mixer.forget_gate, "forward", lambda hidden: torch.ones(1)), "kimi_linear")
    )
    for name in ("forget_gate", "o_norm"):
        for other in (lambda *given: torch.ones(7, 5), lambda: None):
            said = reason(lambda mixer, n=name, f=other: setattr(getattr(mixer, n), "forward", f), "kimi_linear")
            assert "takes or returns other tensors" in str(said)


@pytest.mark.parametrize("name", ["forget_gate", "o_norm"])
def test_hooks_on_modules_that_are_not_called_run(name: str) -> None:
    """Whether they were there before `attach` or come after it."""
    model, calls = build("kimi_linear"), []
    modules = [getattr(layer.mixer, name) for layer in find_layers(model)]
    modules[0].register_forward_hook(lambda *_: calls.append(0))
    handle = attach(model, ReplayConfig(window=4), fused=True)
    assert "has hooks, which would not run" in str(handle.unfused[0]) and handle.unfused[1] is None
    modules[1].register_forward_pre_hook(lambda *_: calls.append(1))
    calls.clear()
    held = new_cache(model)
    forward(model, prompt(5), held)
    forward(model, prompt(1), held, 5)
    detach(model)
    assert calls == [0, 1, 0, 1]


def test_a_module_that_was_replaced_after_attach_is_called() -> None:
    class Doubled(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = other.weight, other.variance_epsilon

        def forward(self, y: Tensor, z: Tensor) -> Tensor:
            return 2 * y

    found = {}
    for fuse in (True, False):
        model = build("qwen3_5")
        attach(model, ReplayConfig(window=4), fused=fuse)
        mixer = find_layers(model)[0].mixer
        mixer.norm = Doubled(mixer.norm)
        held = new_cache(model)
        forward(model, prompt(5), held)
        found[fuse] = forward(model, prompt(1), held, 5).log_softmax(-1)
        detach(model)
    assert_close(found[True], found[False], CLOSE)


class Adapted(nn.Module):
    """A projection with a low rank beside it, as adapters wrap them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("family", FAMILIES)
def test_wrapped_projections_are_called_as_modules(family: str) -> None:
    model = build(family)
    for layer in find_layers(model):
        for parent in list(layer.mixer.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Adapted(child))
    found = {}
    for fuse in (True, False):
        handle = attach(model, ReplayConfig(window=4), fused=fuse)
        assert not fuse or handle.unfused == (None,) * len(handle.layers)
        held = new_cache(model)
        forward(model, prompt(5), held)
        parts = [forward(model, prompt(1, seed=i), held, 5 + i) for i in range(3)]
        found[fuse] = torch.cat(parts, 1).log_softmax(-1)
        detach(model)
    assert_close(found[True], found[False], CLOSE)


@pytest.mark.parametrize("fused", [1, 0, "false", "yes"])
def test_fused_is_a_bool_or_none(fused: object) -> None:
    with pytest.raises(TypeError, match="fused must be True, False or None, got"):
        attach(built("qwen3_5"), fused=fused)  # type: ignore[arg-type]
