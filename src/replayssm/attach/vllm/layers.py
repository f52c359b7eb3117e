"""vLLM's recurrent layers with their states in our pages.

A layer is a subclass of vLLM's own. Without replay in the engine's configuration it is that in every respect. With it,
tokens that go to the ring are run here: vLLM's convolution, our `verify`. Prompts are run by vLLM's own layer, on a
scratch cache that holds the states of just these rows.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context, override_forward_context

from replayssm.attach.vllm import options, pages
from replayssm.attach.vllm.conv import channels_first, convolve, history
from replayssm.attach.vllm.metadata import DecodeRows, PromptRows, ReplayMetadata, replay_backend
from replayssm.flow.mixer import gates
from replayssm.flow.prefill import load, state_before
from replayssm.flow.verify import verify
from replayssm.recurrences.base import Recurrence
from replayssm.recurrences.engine import EngineBinding, Tokens
from replayssm.state.layout import StateLayout
from replayssm.state.pool import LayerState


class ReplayLayer:
    """Mixed in front of a layer of vLLM."""

    replay_recurrence: Recurrence
    replay_binding: EngineBinding
    replay_layout: StateLayout | None = None
    _warming_up = False
    replay_number = 0
    """Which of its pool's layers this one is."""
    kv_cache: Any
    prefix: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = options.config_of(get_current_vllm_config())
        if config is None:
            return
        self._stock_shapes = tuple(super().get_state_shape())  # type: ignore[misc]
        self._stock_dtypes = tuple(super().get_state_dtype())  # type: ignore[misc]
        dtype = get_current_vllm_config().model_config.dtype
        self.replay_layout = pages.layout_of(self.replay_recurrence, config, self._stock_shapes, dtype)
        conv_bytes = prod(self._stock_shapes[0]) * self._stock_dtypes[0].itemsize
        if conv_bytes % 8:
            raise ValueError(f"replayssm: a convolution state of {conv_bytes} bytes leaves what follows it unaligned")
        self.enable_fused_gdn_spec_decode = False  # which would pass by the method that is replaced here

    # ---- what vLLM asks a layer about its state

    def get_state_shape(self) -> Any:
        if self.replay_layout is None:
            return super().get_state_shape()  # type: ignore[misc]
        return pages.shapes_of(self.replay_layout, self._stock_shapes)

    def get_state_dtype(self) -> Any:
        if self.replay_layout is None:
            return super().get_state_dtype()  # type: ignore[misc]
        if self._warming_up:
            return self._stock_dtypes[0], self.replay_layout.compute_dtype
        return pages.dtypes_of(self._stock_dtypes)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        if self.replay_layout is None:
            return spec
        unused = ("num_speculative_blocks", "num_prefill_checkpoint_blocks")
        return replace(spec, **{f.name: 0 for f in fields(spec) if f.name in unused})

    def get_attn_backend(self) -> Any:
        stock = super().get_attn_backend()  # type: ignore[misc]
        return stock if self.replay_layout is None else replay_backend(stock)

    def replay_state(self) -> LayerState:
        """Our view of the pages that vLLM has bound to this layer."""
        assert self.replay_layout is not None
        return LayerState.in_pages(self.replay_layout, self.kv_cache[1], self.replay_binding.params(self))

    # ---- a step

    def replay_forward(self, stock: Any, *args: Tensor) -> Any:
        """The layer's convolution and core; `stock` is vLLM's method for them."""
        metadata = get_forward_context().attn_metadata
        found = metadata.get(self.prefix) if isinstance(metadata, dict) else None
        if found is None:  # memory is measured, and vLLM tunes its scans: for states as prompts will have them
            self._warming_up = True
            try:
                return stock(*args)
            finally:
                self._warming_up = False
        first = 0
        if found.decode is not None:
            first = found.decode.tokens
            self._decode(found, found.decode, self.replay_binding.split(self, *(x[:first] for x in args)))
        if found.prompt is not None:
            self._prompt(found, found.prompt, stock, *(x[first:] for x in args))
        return None

    def _decode(self, found: ReplayMetadata, rows: DecodeRows, tokens: Tokens) -> None:
        layout, pool, step = self.replay_layout, found.pool, rows.step
        assert layout is not None
        convolved = convolve(
            tokens.raw, self.kv_cache[0], *self.replay_binding.conv(self), rows, layout.geometry.conv_width
        )
        binding, given = self.replay_binding, tuple(rows.spread(x) for x in tokens.gates)
        made = gates(pool, self.replay_number, binding.mixer, given, *binding.gates(self))
        inputs = {**binding.mixer.inputs(layout.geometry, rows.spread(convolved)), **made}
        if rows.gather is None:
            verify(pool, self.replay_number, step, inputs, out=tokens.out.unflatten(0, (-1, step.width)))
        else:
            rows.collect(verify(pool, self.replay_number, step, inputs), tokens.out)

    def _prompt(self, found: ReplayMetadata, rows: PromptRows, stock: Any, *args: Tensor) -> None:
        layout, pool = self.replay_layout, found.pool
        assert layout is not None
        number, (conv, _) = self.replay_number, self.kv_cache
        count, blocks = len(rows.blocks), rows.blocks
        states = conv.new_zeros(count + 1, *self._stock_shapes[1], dtype=layout.compute_dtype)
        ours = self.replay_binding.state(states)[1:]
        ours.copy_(state_before(pool, number, rows.step))
        convs = torch.cat([conv[:1], conv[blocks]])  # vLLM's block 0 stands for none
        if rows.kept is not None:  # its own code expects the window's inputs in front
            window = channels_first(convs)[1:]
            window[:, :, : layout.conv_lag] = history(window, rows.kept, layout.conv_lag)
        with self._lent(convs, states, rows.stock):
            core = self.replay_binding.core
            if core is not None and states.device.type == "cpu":
                getattr(torch.ops.vllm, core)(*args, self.prefix)
            else:
                stock(*args)
        conv[blocks] = convs[1:]
        load(pool, number, rows.step, ours)

    @contextmanager
    def _lent(self, convs: Tensor, states: Tensor, stock: Any) -> Iterator[None]:
        """Let vLLM's own code see a scratch cache [rows + 1, ...] and the metadata that fits it."""
        context, kept = get_forward_context(), self.kv_cache
        lent = replace(context, attn_metadata={**context.attn_metadata, self.prefix: stock})
        self.kv_cache = (convs, states)
        try:
            with override_forward_context(lent):
                yield
        finally:
            self.kv_cache = kept


def replayed(recurrence: Recurrence, binding: EngineBinding) -> Any:
    """The subclass of vLLM's layer that `binding` names."""
    module, name = binding.layer.split(":")
    stock = getattr(importlib.import_module(module), name)
    stock_forward = getattr(stock, binding.forward)
    order = inspect.signature(stock_forward)  # vLLM gives arguments by name

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.replay_layout is None:
            return stock_forward(self, *args, **kwargs)
        return self.replay_forward(stock_forward.__get__(self), *order.bind(self, *args, **kwargs).args[1:])

    def chosen(method: str, ours: Any) -> Any:
        theirs = getattr(stock, method)
        return lambda self, *args: (theirs if self.replay_layout is None else ours)(self, *args)

    members: dict[str, Any] = {"replay_recurrence": recurrence, "replay_binding": binding, binding.forward: forward}
    members |= {method: chosen(method, ours) for method, ours in binding.methods.items()}
    return type(f"Replay{name}", (ReplayLayer, stock), members)
