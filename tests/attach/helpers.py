"""Calls that the attach tests share, and what differs between versions of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicCache

from replayssm import ReplayConfig, attach, detach
from replayssm.attach.transformers.sequences import Sequences

from .models import VOCABULARY, build

transformers.logging.set_verbosity_error()

TOLERANCE = 1e-4
"""On log-probabilities of fp32 models: two orders of summation through a few layers give about 1e-5."""


@cache
def built(family: str) -> Any:
    """One model per family and process. Tests leave it detached."""
    return build(family)


@contextmanager
def attached(model: Any, fused: bool | None = None, **options: Any) -> Iterator[Any]:
    """`attach` for the length of a block."""
    handle = attach(model, ReplayConfig(**options), fused=fused)
    try:
        yield handle
    finally:
        if handle.active:
            detach(model)


def prompt(length: int, rows: int = 1, seed: int = 1) -> Tensor:
    """Random token ids [rows, length] without special tokens (and without glm5_next's image tokens)."""
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, ids: Tensor, new: int, **options: Any) -> tuple[Tensor, Tensor]:
    """(new tokens [rows, new], log-probabilities [rows, new, vocabulary]) of a greedy or other `generate`."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids)} | options
    out = model.generate(ids, max_new_tokens=new, return_dict_in_generate=True, output_logits=True, **options)
    logits = torch.stack(out.logits, 1)
    return out.sequences[:, ids.shape[1] :], logits.float().log_softmax(-1)


def new_cache(model: Any) -> DynamicCache:
    """An empty cache."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def cache_name(model: Any) -> str:
    """What this version of transformers and this model call their cache."""
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in parameters)


def forward(model: Any, ids: Tensor, held: Any = None, start: int = 0, **options: Any) -> Tensor:
    """Logits [rows, T, vocabulary] of one call; `start` tokens are in the cache already."""
    if held is not None:
        options |= {cache_name(model): held, "use_cache": True}
        if model.config.model_type == "bamba":  # it does not derive them from the cache
            options["position_ids"] = torch.arange(start, start + ids.shape[1]).expand(len(ids), -1)
    with torch.no_grad():
        return model(ids, **options).logits


def sequences_of(held: Any) -> Sequences:
    """The sequences of an attached cache."""
    return next(layer.sequences for layer in held.layers if hasattr(layer, "sequences"))


def states_of(held: Any) -> list[Tensor]:
    """The logical state of every recurrent layer after the committed tokens, [B, H, N, P] each."""
    from replayssm import flow

    sequences = sequences_of(held)
    return [flow.materialize(sequences.pool, i, sequences.rows.tolist()) for i in range(len(sequences.pool.layers))]


def assert_close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Largest absolute difference at most `tolerance`, and nothing NaN."""
    worst = (found - expected).abs().max().item()
    assert worst <= tolerance, f"differs by {worst:.2e}, allowed {tolerance:.2e}"


__all__ = ["VOCABULARY", "assert_close", "attached", "built", "cache_name", "forward", "generate", "new_cache"]
__all__ += ["prompt", "sequences_of", "states_of"]
