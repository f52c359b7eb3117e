"""What a user asks for through vLLM's own configuration, and what is refused, in one sentence each."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from replayssm.config import ReplayConfig
from replayssm.recurrences.engine import engine_bindings

KEY = "replayssm"
VERSIONS_FROM, VERSIONS_BELOW = (0, 26), (0, 33)
"""Run on 0.32.0 (CPU) and on the other end, 0.26.0, the last release for torch 2.11 (H200)."""

OURS = ("verify_len", "carry_history")
"""Fields of `ReplayConfig` that follow from the engine's configuration, or that the engine has no use for."""


def asked(vllm_config: Any) -> bool:
    """Whether this engine is to replay: `additional_config` has a "replayssm" that is not false."""
    given = vllm_config.additional_config
    return isinstance(given, dict) and given.get(KEY, False) is not False


def config_of(vllm_config: Any) -> ReplayConfig | None:
    """The configuration that the engine's user asked for, or None.

    Raises:
        ValueError: an option is unknown or out of range.
    """
    if not asked(vllm_config):
        return None
    given = vllm_config.additional_config[KEY]
    options = {} if given is True else given
    if not isinstance(options, dict):
        raise ValueError(f'additional_config["{KEY}"] must be true or an object with options, got {options!r}')
    known = ["precision", *(f.name for f in fields(ReplayConfig) if f.name not in OURS)]
    for name in options:
        if name in OURS:
            raise ValueError(f'replayssm: "{name}" is not an option here: it follows from vLLM\'s own configuration')
        if name not in known:
            raise ValueError(f'replayssm: there is no option "{name}"; there are: {", ".join(known)}')
    options = options | {"verify_len": 1 + drafts(vllm_config)}
    try:
        if "precision" in options:
            return ReplayConfig.of(**options)
        return ReplayConfig(**options)
    except ValueError as error:
        raise ValueError(f"replayssm: {error}") from error


def drafts(vllm_config: Any) -> int:
    """Draft tokens that a step verifies behind the certain one."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens or 0)


def require_supported(vllm_config: Any) -> None:
    """ValueError with the reason if this engine asks for replay and cannot have it."""
    if config_of(vllm_config) is None:
        return
    reason = version_refusal() or _model_refusal(vllm_config) or _feature_refusal(vllm_config) or _device_refusal()
    if reason is not None:
        raise ValueError(f"replayssm: {reason}")


def version_refusal() -> str | None:
    """Why the installed vLLM is none that the plug-in knows, or None."""
    import vllm

    found = vllm.__version__
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    if VERSIONS_FROM <= numbers < VERSIONS_BELOW:
        return None
    low, high = (".".join(map(str, v)) for v in (VERSIONS_FROM, VERSIONS_BELOW))
    return f"this is vLLM {found}, and the plug-in was made for vllm>={low},<{high}"


def _model_refusal(vllm_config: Any) -> str | None:
    known = sorted(name for _, binding in engine_bindings() for name in binding.architectures)
    architectures = vllm_config.model_config.architectures
    if any(name in known for name in architectures):
        return None
    return f"no recurrent layer of {', '.join(architectures)} can be replayed; supported are: {', '.join(known)}"


def _feature_refusal(vllm_config: Any) -> str | None:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if getattr(cache, "use_replayssm", False):
        return "vLLM's own --use-replayssm is on as well; leave one of the two out"
    if cache.mamba_cache_mode == "all":
        return (
            "mamba cache mode 'all' wants a state at every block boundary of a prompt, and a scan leaves the last one "
            "only; use --mamba-cache-mode align"
        )
    if cache.enable_prefix_caching and drafts(vllm_config):
        return (
            "with drafts the state at a block boundary is not known until they are judged, and vLLM would publish the "
            "page behind them; leave out --speculative-config or add --no-enable-prefix-caching"
        )
    if drafts(vllm_config) and not vllm_config.model_config.is_hybrid:
        return (
            "vLLM tells its layers how many drafts were accepted in hybrid models only, and this one has no attention; "
            "leave out --speculative-config"
        )
    if vllm_config.kv_transfer_config is not None:
        return "pages that a KV connector moves have not been tried; start without --kv-transfer-config"
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "use_ubatching", False):
        return "micro-batches (--enable-dbo) split a step in two; start without them"
    if parallel.decode_context_parallel_size > 1:
        return "decode context parallelism is not supported; set --decode-context-parallel-size 1"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "prefill context parallelism is not supported; set --prefill-context-parallel-size 1"
    return None


def _device_refusal() -> str | None:
    from vllm.platforms import current_platform

    if current_platform.is_cuda() or current_platform.is_cpu():
        return None
    return f"vLLM runs on {current_platform.device_name}, and the kernels are made for CUDA devices and CPUs"
