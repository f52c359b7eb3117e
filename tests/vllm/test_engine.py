"""The plug-in in vLLM's real engine on a CPU, with tiny random checkpoints.

fp32 models give the tokens of the same engine without the plug-in and of transformers. Its Gated DeltaNet operators
take bf16 only: there, log-probabilities are compared, as far as the tokens before them are the same.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from .harness import difference, drive, environment, prompts, spec
from .tiny import add_tokenizer, save

FAMILIES = ("nemotron_h", "mamba2", "falcon_h1", "granitemoehybrid")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SEVERAL = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

engine = pytest.mark.engine


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Family -> its checkpoint, saved once."""
    folder, found = tmp_path_factory.mktemp("models"), {}

    def model(family: str) -> Path:
        if family not in found:
            dtype = torch.bfloat16 if family.startswith("qwen") else torch.float32
            found[family] = save(family, folder, dtype)
        return found[family]

    return model


def generated_by_transformers(model: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = (whole.generate(torch.tensor([p]), max_new_tokens=40, do_sample=False)[0] for p in prompts())
    return [row[len(p) :].tolist() for row, p in zip(rows, prompts(), strict=True)]


def test_smoke(models: Any) -> None:
    """The short one: the plug-in changes nothing but where the state is kept, and it is really there."""
    model = models("nemotron_h")
    stock, ours, broken = drive(
        spec(model), spec(model, {"window": 8}), spec(model, {"window": 8}, fault="zero_the_ring")
    )
    assert ours["tokens"] == stock["tokens"]
    assert broken["tokens"] != stock["tokens"]


@engine
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens(family: str, models: Any) -> None:
    model = models(family)
    stock, ours, chunked, every, rows = drive(
        spec(model),
        spec(model, {"window": 8}),
        spec(model, {"window": 8}, max_num_batched_tokens=16),
        spec(model, {"precision": "fp32", "window": 1, "stagger": False}),
        spec(model, {"window": 8}, fault="lose_a_row"),
    )
    assert stock["tokens"] == generated_by_transformers(model)
    assert ours["tokens"] == stock["tokens"]
    assert chunked["tokens"] == stock["tokens"]
    assert every["tokens"] == stock["tokens"]
    assert rows["tokens"] != stock["tokens"]


@engine
def test_a_narrow_state_runs(models: Any) -> None:
    stock, ours = drive(spec(models("mamba2")), spec(models("mamba2"), {"precision": "fp16+fp8", "window": 16}))
    same = [
        sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(stock["tokens"], ours["tokens"], strict=True)
    ]
    assert min(same) > 0


@engine
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_log_probabilities(family: str, models: Any) -> None:
    model, options = models(family), {"dtype": "bfloat16", "logprobs": True}
    stock, ours, broken = drive(
        spec(model, **options),
        spec(model, {"window": 8}, **options),
        spec(model, {"window": 8}, fault="zero_the_ring", **options),
    )
    compared, differences = difference(stock, ours)
    assert compared > 90  # of 240
    assert differences < 0.1
    assert difference(stock, broken)[1] > 0.5 or difference(stock, broken)[0] < 60


@engine
@pytest.mark.parametrize("family", ["nemotron_h", "falcon_h1"])
def test_many_requests_with_preemption(family: str, models: Any) -> None:
    lengths = [1 + (7 * i) % 60 for i in range(32)]
    options = {
        "prompts": prompts(lengths, seed=3),
        "tokens": [120 - (11 * i) % 70 for i in range(32)],
        "max_num_seqs": 32,
        "block_size": 32,
    }
    model = models(family)
    few, fewer = {"num_gpu_blocks_override": 60, **options}, {"num_gpu_blocks_override": 40}  # fewer run side by side
    # what a preempted sequence had generated comes in chunks, of which some have as many tokens as a draft
    chunks = {"speculative_config": NGRAM, "max_num_batched_tokens": 48}
    stock, *found = drive(
        spec(model, **options),
        spec(model, {"window": 8}, **few),
        spec(model, {"window": 8}, speculative_config=NGRAM, **few),
        spec(model, {"window": 8}, **chunks, **few | fewer),
        spec(model, {"window": 8}, **chunks, like="0.26", **few | fewer),
    )
    for run in found:
        assert run["tokens"] == stock["tokens"]
        assert run["preempted"] > 0


@engine
def test_a_slot_that_is_used_again_starts_anew(models: Any) -> None:
    """Prompts of one token go straight to the ring, where only the cursor says that the slot is empty."""
    model, options = models("nemotron_h"), {"prompts": prompts([1] * 12), "max_num_seqs": 3}
    stock, ours, broken = drive(
        spec(model, **options),
        spec(model, {"window": 8}, **options),
        spec(model, {"window": 8}, fault="keep_old_cursors", **options),
    )
    assert ours["tokens"] == stock["tokens"]
    assert broken["tokens"] != stock["tokens"]


@engine
@pytest.mark.parametrize("family", ["nemotron_h", "falcon_h1", "granitemoehybrid"])
def test_drafts(family: str, models: Any) -> None:
    """vLLM 0.32.0 itself is no oracle here: on a CPU its convolution does not know of drafts."""
    model = models(family)
    stock, ours = drive(spec(model, tokens=120), spec(model, {"window": 8}, speculative_config=NGRAM, tokens=120))
    assert ours["tokens"] == stock["tokens"]
    assert ours["accepted"] > 0


@engine
def test_an_engine_that_says_nothing_before_a_step_without_drafts(models: Any) -> None:
    """As 0.26 does: what was accepted just before is told by what it has computed."""
    model, options = models("nemotron_h"), {"prompts": prompts([40], seed=3), "tokens": 120}
    stock, ours = drive(
        spec(model, **options), spec(model, {"window": 8}, speculative_config=NGRAM, like="0.26", **options)
    )
    assert ours["tokens"] == stock["tokens"]
    assert ours["accepted"] > 0


@engine
@pytest.mark.parametrize("lengths", [[4] * 8, [5] * 8, [4, 9, 4, 1, 2, 4, 3, 12]], ids=str)
def test_prompts_as_long_as_a_step_with_drafts(lengths: list[int], models: Any) -> None:
    """Their phase decides, not their shape: all of a prompt's tokens stay."""
    model, options = models("nemotron_h"), {"prompts": prompts(lengths, seed=7), "max_num_seqs": 4}
    stock, ours, chunked = drive(
        spec(model, **options),
        spec(model, {"window": 8}, speculative_config=NGRAM, **options),
        spec(model, {"window": 8}, speculative_config=NGRAM, max_num_batched_tokens=12, **options),
    )
    assert ours["tokens"] == stock["tokens"]
    assert chunked["tokens"] == stock["tokens"]


@engine
@pytest.mark.parametrize("family", ["nemotron_h", "mamba2", "falcon_h1"])
def test_prefix_hits(family: str, models: Any) -> None:
    """vLLM 0.32.0 itself fails with an IndexError here, with and without plug-ins: the oracle has no prefix cache."""
    base = prompts([700], seed=5)[0]
    shared = [base, [*base[:650], 5, 6, 7], base[:300] + [9] * 20, base]
    options = {"prompts": shared, "max_model_len": 1024, "max_num_seqs": 2}
    hits = options | {"enable_prefix_caching": True, "times": 2}
    model = models(family)
    stock, ours, broken = drive(
        spec(model, **options),
        spec(model, {"window": 8}, **hits),
        spec(model, {"window": 8}, fault="lag_behind", **hits),
    )
    assert ours["tokens"] == stock["tokens"]
    assert min(ours["cached"]) > 100
    assert broken["tokens"] != stock["tokens"]


@engine
@pytest.mark.parametrize("family", ["nemotron_h", "falcon_h1"])
def test_two_processes_share_the_heads(family: str, models: Any) -> None:
    model = models(family)
    (stock,) = drive(spec(model))
    (ours,) = drive(
        spec(model, {"window": 8}, tensor_parallel_size=2, distributed_executor_backend="mp"), variables=SEVERAL
    )
    assert ours["tokens"] == stock["tokens"]


@engine
def test_a_client_of_a_running_server(models: Any) -> None:
    from openai import OpenAI

    model = add_tokenizer(models("nemotron_h"))
    (stock,) = drive(spec(model, prompts=prompts([7]), tokens=20))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    command += ["--additional-config", json.dumps({"replayssm": {"window": 8}}), "--served-model-name", "tiny"]
    log = model / "server.log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, env=environment() | {"VLLM_CPU_KVCACHE_SPACE": "1"}, stdout=file, stderr=subprocess.STDOUT
        ) as server,
    ):
        try:
            wait_for(port, server, log)
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            answer = client.completions.create(
                model="tiny", prompt=prompts([7])[0], max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
            )
        finally:
            server.terminate()
            server.wait(60)
    assert [int(word[1:]) for word in answer.choices[0].text.split()] == stock["tokens"][0]


def wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(240):
        assert server.poll() is None, log.read_text()[-4000:]
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise AssertionError("the server did not answer: " + log.read_text()[-4000:])


@engine
def test_refusals(models: Any) -> None:
    model = models("nemotron_h")
    cases = {
        'there is no option "windows"; there are: precision, window,': spec(model, {"windows": 8}),
        'verify_len" is not an option here': spec(model, {"verify_len": 2}),
        "window must be in 1..64, got 0": spec(model, {"window": 0}),
        "verify_len 4 is larger than window 2": spec(model, {"window": 2}, speculative_config=NGRAM),
        "checkpoint_format must be one of": spec(model, {"precision": "fp7"}),
        "no recurrent layer of LlamaForCausalLM can be replayed; supported are: Falcon": spec(models("llama"), {}),
        "the state at a block boundary is not known": spec(
            model, {}, speculative_config=NGRAM, enable_prefix_caching=True
        ),
        "drafts were accepted in hybrid models only": spec(models("mamba2"), {}, speculative_config=NGRAM),
        "vLLM's own --use-replayssm is on": spec(model, {}, use_replayssm=True, mamba_backend="triton"),
    }
    for (sentence, _), found in zip(cases.items(), drive(*cases.values()), strict=True):
        assert sentence in found.get("error", ""), (sentence, found)


@engine
def test_a_version_that_was_never_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from replayssm.attach.vllm import options

    assert options.version_refusal() is None
    for version in ("0.25.1", "0.33.0", "1.0.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        reason = options.version_refusal()
        assert reason is not None and f"this is vLLM {version}" in reason and "vllm>=0.26,<0.33" in reason


def test_registering_twice_changes_nothing() -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    from replayssm.attach.vllm import register

    register()
    before = dict(op_registry_oot)
    register()
    assert op_registry_oot == before


def test_a_registration_that_fails_changes_nothing_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.custom_op import op_registry_oot

    from replayssm.attach.vllm import plugin, register

    create, before = EngineArgs.create_engine_config, dict(op_registry_oot)
    monkeypatch.setattr(EngineArgs, "create_engine_config", create)
    monkeypatch.setattr(plugin, "_done", False)
    with monkeypatch.context() as patch:
        patch.setattr(plugin, "_layers", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            register()
    assert EngineArgs.create_engine_config is create and op_registry_oot == before
    monkeypatch.setattr(plugin, "_layers", dict)
    register()
    assert EngineArgs.create_engine_config is not create


def test_without_being_asked_it_is_not_there() -> None:
    from types import SimpleNamespace

    from replayssm.attach.vllm import options

    for given in ({}, {"other": 1}, {"replayssm": False}):
        config = SimpleNamespace(additional_config=given, speculative_config=None)
        assert options.config_of(config) is None
        options.require_supported(config)
    assert os.environ.get("VLLM_PLUGINS") in (None, "replayssm")
