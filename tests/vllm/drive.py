"""Engines of vLLM, one after the other in a process of their own: `python drive.py SPEC.json` prints what they say.

A specification has "runs", each with

    options     arguments of vllm.LLM
    prompts     lists of tokens
    tokens      how many to generate
    logprobs    whether to return log-probabilities
    fault       something to break in the plug-in, to see that it matters
    like        a version of vLLM whose ways to take on: "0.26"
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

MARK = "RESULT "

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # vLLM takes FlashInfer for installed on every GPU

DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
}


def zero_the_ring(steps: Any) -> None:
    """Every record is lost before each step."""
    for layer in steps.pool.layers:
        for name, tensor in layer.tensors.items():
            if name.startswith("ring."):
                tensor.zero_()


def lose_a_row(steps: Any) -> None:
    """The records of one physical row are lost."""
    for layer in steps.pool.layers:
        for name, tensor in layer.tensors.items():
            if name.startswith("ring."):
                tensor[:, 3] = 0


def lag_behind(steps: Any) -> None:
    """The youngest record of every slot is forgotten."""
    steps.pool.cursor.length.sub_(1).clamp_(min=0)


def keep_old_cursors(steps: Any) -> None:
    """A slot that begins a sequence goes on with the cursor of the one before it."""
    steps.restart = lambda slots: None


FAULTS = {f.__name__: f for f in (zero_the_ring, lose_a_row, lag_behind, keep_old_cursors)}


def install(name: str | None) -> None:
    """Break the plug-in before every decode step, or mend it."""
    from replayssm.attach.vllm import steps

    whole = steps.EngineSteps.__dict__.get("whole", steps.EngineSteps.decode)
    steps.EngineSteps.whole = whole

    def decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name is not None:
            FAULTS[name](self)
        return whole(self, *args, **kwargs)

    steps.EngineSteps.decode = decode


def take_after(version: str | None) -> None:
    """Tell the plug-in what an older version tells it, or what this one does."""
    from replayssm.attach.vllm.metadata import ReplayBuilder

    whole = ReplayBuilder.__dict__.get("whole", ReplayBuilder.build)
    ReplayBuilder.whole = whole

    def build(self: Any, *args: Any, num_decode_draft_tokens_cpu: Any = None, **kwargs: Any) -> Any:
        if num_decode_draft_tokens_cpu is None or bool((num_decode_draft_tokens_cpu <= 0).all()):
            # a step without drafts, of which 0.26 does not say how many of those before it were accepted
            return whole(self, *args, **{k: v for k, v in kwargs.items() if k != "num_accepted_tokens"})
        return whole(self, *args, num_decode_draft_tokens_cpu=num_decode_draft_tokens_cpu, **kwargs)

    ReplayBuilder.build = build if version == "0.26" else whole


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Tokens, and log-probabilities where asked for, of each prompt; how many requests were preempted."""
    from vllm import LLM, SamplingParams

    install(spec.get("fault"))
    take_after(spec.get("like"))
    options = DEFAULTS | spec["options"]
    options["additional_config"] = {"gdn_prefill_backend": "triton"} | options.get("additional_config", {})
    llm = LLM(**options)
    wanted = spec["tokens"] if isinstance(spec["tokens"], list) else [spec["tokens"]] * len(spec["prompts"])
    params = [
        SamplingParams(
            temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=1 if spec.get("logprobs") else None
        )
        for n in wanted
    ]
    outputs = []
    for _ in range(spec.get("times", 1)):
        outputs = llm.generate([{"prompt_token_ids": p} for p in spec["prompts"]], params, use_tqdm=False)
    found: dict[str, Any] = {"tokens": [list(o.outputs[0].token_ids) for o in outputs]}
    if spec.get("logprobs"):
        found["logprobs"] = [[next(iter(x.values())).logprob for x in o.outputs[0].logprobs] for o in outputs]
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    found["preempted"] = metrics.get("vllm:num_preemptions", 0)
    found["cached"] = [o.num_cached_tokens for o in outputs]
    found["accepted"] = metrics.get("vllm:spec_decode_num_accepted_tokens", 0)
    return found


def register_text_models(specs: list[dict[str, Any]]) -> None:
    """For versions of vLLM that know these as parts of larger models only."""
    from replayssm.bench.engine import register_text_model

    for spec in specs:
        register_text_model(Path(spec["options"]["model"]))


if __name__ == "__main__":
    specification = json.loads(Path(sys.argv[1]).read_text())
    register_text_models(specification["runs"])
    for each in specification["runs"]:
        try:
            result = run(each)
        except Exception as error:  # noqa: BLE001 - of an engine that is to be refused, this is the answer
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        print(MARK + json.dumps(result), flush=True)
