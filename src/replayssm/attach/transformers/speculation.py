"""Assisted generation (`prompt_lookup_num_tokens`, `assistant_model`) with an attached model.

transformers verifies a draft in one forward and then crops the cache, which here moves a cursor. Its loop asks for more
than a decode step does, so a cache from which tokens will be taken back keeps more records (`rolling_back`):

- The first forward brings the drafts together with the prompt: the last tokens of a prompt go to the ring.
- A draft model takes one token per forward and is cropped once per round: no record of the round may be folded.

Drafts of more than `verify_len - 1` tokens are cut: a forward then yields fewer tokens, and the text stays the same.
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from replayssm.config import MAX_VERIFY_LEN, MAX_WINDOW, ReplayConfig

if TYPE_CHECKING:
    from replayssm.attach.transformers.attached import Attached

MARK = "_replayssm_attached"
"""Attribute of an attached model that holds its `Attached`."""

ROOM = MAX_WINDOW // 2
"""Records beyond the window that a cache may hold until its next crop. transformers drafts 20 tokens by default."""


def rolling_back(config: ReplayConfig) -> ReplayConfig:
    """What a cache from which tokens will be taken back uses in place of `config`: the same formats, a longer ring."""
    return replace(
        config,
        window=certain_window(config) + ROOM,
        verify_len=verified(config),
        carry_history=True,
        stagger=False,
    )


def certain_window(config: ReplayConfig) -> int:
    """Window in force for the first forward after a crop, when every record in the ring is there to stay."""
    return min(config.window, MAX_WINDOW - ROOM)


def verified(config: ReplayConfig) -> int:
    """Tokens that one forward can verify: verify_len, or as many as the window allows when it was left at 1."""
    return config.verify_len if config.verify_len > 1 else min(config.window, MAX_VERIFY_LEN)


class Speculation:
    """The attributes of one model instance that let its `generate` be assisted.

    A model without attention keeps transformers' own refusal: nothing in its cache counts tokens, which the loop needs.

    Args:
        attached: the model's handle.
    """

    def __init__(self, attached: Attached) -> None:
        self.model = attached.model
        self.changes: dict[str, Any] = {}
        self.before: dict[str, Any] = {}
        if isinstance(self.model, GenerationMixin) and _counts_tokens(self.model):
            self.changes["_is_stateful"] = False
            self.changes["_get_candidate_generator"] = types.MethodType(_generator_of(attached.config), self.model)

    def install(self) -> None:
        attributes = self.model.__dict__
        self.before = {name: attributes[name] for name in self.changes if name in attributes}
        attributes.update(self.changes)

    def remove(self) -> None:
        for name in self.changes:
            del self.model.__dict__[name]
        self.model.__dict__.update(self.before)


def _counts_tokens(model: Any) -> bool:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    return any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def _generator_of(config: ReplayConfig) -> Callable[..., Any]:
    limit = verified(config) - 1

    def _get_candidate_generator(
        model: Any, generation_config: Any, *args: Any, assistant_model: Any = None, **kwargs: Any
    ) -> Any:
        if limit == 0:
            raise ValueError(
                "assisted generation needs room for a draft beside the token that is certain: attach with "
                f"ReplayConfig(window=2) or more, got window={config.window}"
            )
        cache = next((value for value in kwargs["model_kwargs"].values() if isinstance(value, Cache)), None)
        if cache is not None and cache.get_seq_length() > 0:
            # of any model, attached or not
            raise ValueError(
                f"assisted generation in transformers {transformers.__version__} feeds a cache the text that it holds "
                f"already ({cache.get_seq_length()} tokens): start from an empty cache, or generate without assistance"
            )
        if generation_config.assistant_early_exit is not None:
            raise ValueError(
                "assistant_early_exit runs the first layers of a model only, but an attached model's recurrent layers "
                "advance together: use prompt_lookup_num_tokens or an assistant_model"
            )
        if assistant_model is not None and assistant_model._is_stateful:
            name = type(assistant_model).__name__
            if MARK in assistant_model.__dict__:
                raise ValueError(f"{name} cannot assist: without attention, nothing in its cache counts tokens")
            raise ValueError(
                f"{name} cannot assist as it is: its recurrent state does not go back to before a rejected draft; "
                "attach it too"
            )
        make = type(model)._get_candidate_generator
        generator = make(model, generation_config, *args, assistant_model=assistant_model, **kwargs)
        wanted = max(0, *(getattr(generator, name, 0) for name in DRAFT_LENGTHS))
        if wanted > limit:
            warnings.warn(
                f"drafts of {int(wanted)} tokens are cut to {limit}: one forward verifies 1 + {limit} tokens, attached "
                f"with window={config.window} and verify_len={config.verify_len} (at most {MAX_VERIFY_LEN}, and not "
                "above window)",
                stacklevel=5,
            )
        _limit_drafts(generator, limit)
        return generator

    return _get_candidate_generator


DRAFT_LENGTHS = ("num_assistant_tokens", "num_output_tokens")
"""Attributes of the candidate generators that say how long a draft may be."""


def _limit_drafts(generator: Any, limit: int) -> None:
    """Let a candidate generator draft at most `limit` tokens."""
    # not the generator itself: a cycle would keep the draft model's cache until garbage is collected
    held = weakref.ref(generator)

    def get_candidates(input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        drafting: Any = held()
        for name in DRAFT_LENGTHS:
            if name in drafting.__dict__:  # a schedule may have raised it
                setattr(drafting, name, min(getattr(drafting, name), limit))
        ids, logits = type(drafting).get_candidates(drafting, input_ids, *args, **kwargs)
        # drafts that were translated from another tokenizer have any length
        ids = ids[:, : input_ids.shape[1] + limit]
        return ids, None if logits is None else logits[:, :limit]

    generator.get_candidates = get_candidates
