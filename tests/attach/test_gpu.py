"""On a CUDA device, where the host never waits for the cursor and the pool may choose compiled kernels."""

from __future__ import annotations

import pytest
import torch

from replayssm import models

from .helpers import assert_close, attached, forward, generate, new_cache, prompt
from .models import FAMILIES, build

pytestmark = pytest.mark.gpu

MAIN = ("qwen3_5", "nemotron_h", "kimi_linear", "falcon_h1")


@pytest.mark.parametrize(
    ("family", "window", "fused"),
    [(family, window, None) for family in MAIN for window in (4, 16)]
    + [(family, 4, False) for family in MAIN]
    + [(family, 4, None) for family in FAMILIES if family not in MAIN],
)
def test_decodes_as_without_replay(family: str, window: int, fused: bool | None) -> None:
    torch.backends.cudnn.allow_tf32 = False  # else the convolution alone differs by 1e-3
    model, ids = build(family).cuda(), prompt(13, rows=2).cuda()
    for options in ({}, {"num_beams": 3}):
        tokens, log_probabilities = generate(model, ids, 40, **options)
        with attached(model, fused=fused, window=window) as handle:
            assert fused is False or handle.unfused == (None,) * len(handle.layers)
            found_tokens, found = generate(model, ids, 40, **options)
            assert handle.slots_in_use == 0
            assert handle.traffic().tokens > 0
        assert torch.equal(found_tokens, tokens)
        assert_close(found, log_probabilities)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "kimi_linear"])
def test_several_tokens_and_crop(family: str) -> None:
    torch.backends.cudnn.allow_tf32 = False
    model, ids = build(family).cuda(), prompt(9, rows=2, seed=3).cuda()
    with attached(model, window=4, verify_len=4):
        one_by_one, together = new_cache(model), new_cache(model)
        for held in (one_by_one, together):
            forward(model, prompt(6, rows=2).cuda(), held)
        expected = torch.cat([forward(model, ids[:, i : i + 1], one_by_one, 6 + i) for i in range(9)], 1)
        found = [forward(model, ids[:, :4], together, 6)[:, :1]]
        together.crop(-3)
        found += [forward(model, ids[:, 1:5], together, 7), forward(model, ids[:, 5:], together, 11)]
    assert_close(torch.cat(found, 1), expected)


@pytest.mark.parametrize("window", [4, 16])
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "kimi_linear"])
@pytest.mark.filterwarnings("ignore:drafts of")
def test_assisted_generation(family: str, window: int) -> None:
    """The model as its own assistant, and prompt look-up: at batch 1 the kernels would choose a window of 1."""
    torch.backends.cudnn.allow_tf32 = False
    model, ids = build(family).cuda(), prompt(18).cuda()
    model.generation_config.update(num_assistant_tokens=8, assistant_confidence_threshold=0.0)
    tokens, log_probabilities = generate(model, ids, 24)
    with attached(model, window=window) as handle:
        for options in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 8}):
            found_tokens, found = generate(model, ids, 24, **options)
            assert torch.equal(found_tokens, tokens)
            assert_close(found, log_probabilities)
            assert handle.slots_in_use == 0


@pytest.mark.parametrize("name", ["gdn-tiny", "kda-tiny", "mamba2-tiny"])
def test_bundled_models_in_bf16_read_text_alike(name: str) -> None:
    """Token by token through text: fused, in the model's own layers, and without replay at all.

    The mean differences of log-probabilities were 0.04 in bf16, and 0.003 in fp32 where the model's own scan clamps dt.
    """
    import transformers

    text = torch.randint(3, 200, (2, 48), generator=torch.Generator().manual_seed(0)).cuda()
    worst = {}
    for dtype, limit in ((torch.float32, 5e-3), (torch.bfloat16, 0.1)):
        torch.backends.cudnn.allow_tf32 = False
        model = transformers.AutoModelForCausalLM.from_pretrained(models.path(name), dtype=dtype).cuda().eval()
        expected = forward(model, text).float().log_softmax(-1)[:, 8:]
        for fused in (None, False):
            with attached(model, fused=fused, window=16):
                held = new_cache(model)
                forward(model, text[:, :8], held)
                found = torch.cat([forward(model, text[:, i : i + 1], held, i) for i in range(8, 48)], 1)
            difference = (found.float().log_softmax(-1) - expected).abs()
            worst[dtype, fused] = difference.mean().item()
            assert worst[dtype, fused] <= limit, worst
