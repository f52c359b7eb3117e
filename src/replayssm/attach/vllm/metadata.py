"""From vLLM's batch to steps of ours: once per model step and cache group, before the forward and outside its graphs.

A cache group is the layers that share a block table; its block numbers are our slots. vLLM builds a group's metadata
with a builder, so that is where the cursor's arithmetic is done. What a captured graph reads (the plan, slots, numbers
of accepted tokens) lies in memory that stays, which every build fills anew.

A batch has two parts. Rows past their prompt, and rows with a single token, go to the ring; a prompt's rows go to the
checkpoint, run by vLLM's own layer on a scratch cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID, mamba_get_block_table_tensor

from replayssm.attach.vllm.pages import cursor_in
from replayssm.attach.vllm.steps import EngineSteps, StepMemory
from replayssm.flow.step import Step
from replayssm.state.pool import StatePool


@dataclass(frozen=True)
class DecodeRows:
    """The rows of a batch whose tokens go to the ring, in front of all others. B rows, n tokens.

    Args:
        step: the opened step.
        blocks: int32 [B], their blocks as vLLM numbers them, NULL_BLOCK_ID on padded rows.
        tokens: n, how many tokens they have together.
        starts: int32 [B + 1], where each row's tokens begin; None where every row has one.
        accepted: int32 [B], how many tokens of its last step each row kept, at least 1; None without drafts.
        gather: int64 [B, T], which token is the t-th of each row, where rows have different numbers of them.
        places: int64 [n], where then each token is in [B * T].
    """

    step: Step
    blocks: Tensor
    tokens: int
    starts: Tensor | None = None
    accepted: Tensor | None = None
    gather: Tensor | None = None
    places: Tensor | None = None

    def spread(self, x: Tensor) -> Tensor:
        """[n, ...] as [B, T, ...]; what lies beyond a row's tokens is any token."""
        return x.unflatten(0, (-1, self.step.width)) if self.gather is None else x[self.gather]

    def collect(self, y: Tensor, out: Tensor) -> None:
        """Write what `verify` did not write in place: [B, T, ...] into `out` [n, ...]."""
        out.copy_(y.flatten(0, 1)[self.places])


@dataclass(frozen=True)
class PromptRows:
    """The rows of a batch whose tokens go to the checkpoint. R rows.

    Args:
        step: the opened step.
        blocks: int64 [R], their blocks.
        kept: [R], how many tokens of its last step each row kept; None without drafts.
        stock: vLLM's own metadata for these rows, as if they were in the blocks 1..R.
    """

    step: Step
    blocks: Tensor
    kept: Tensor | None
    stock: Any


@dataclass(frozen=True)
class ReplayMetadata:
    """What the layers of a group work from in one model step."""

    pool: StatePool
    decode: DecodeRows | None
    prompt: PromptRows | None


class ReplayBuilder:
    """A metadata builder, in front of vLLM's own for the same layers."""

    supports_update_block_table = False
    layer_names: list[str]
    kv_cache_spec: Any
    vllm_config: Any
    device: torch.device

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.supports_update_block_table = False
        self._layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        self._steps: EngineSteps | None = None
        capture = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        rows = max(vllm_config.scheduler_config.max_num_seqs, capture)
        self._memory = StepMemory.allocate(rows, device)
        self._starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._width = self._layers[0].replay_layout.config.verify_len

    # ---- called by vLLM

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
        *,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        **_: Any,
    ) -> ReplayMetadata:
        m, steps = common_attn_metadata, self._opened()
        blocks = self._blocks(m)
        if self._width == 1 and m.max_query_len <= 1 and not self._prefilling(m):
            # nothing but decoding: a padded row has no token, but a place in the graph's batch
            return ReplayMetadata(steps.pool, self._single(steps, blocks), None)
        if self._width > 1:
            computed = m.seq_lens - m.query_start_loc.diff()
            num_accepted_tokens = steps.accepted(blocks, num_accepted_tokens, computed)
        lengths = m.query_start_loc_cpu.diff()
        prefilling = m.is_prefilling if m.is_prefilling is not None else torch.zeros(m.num_reqs, dtype=torch.bool)
        first = prefilling & (m.seq_lens_cpu_upper_bound == lengths) & (lengths > 0)
        if bool(first.any()):
            fresh = blocks[first.nonzero().squeeze(1).to(blocks.device)]
            steps.restart(fresh)
            for layer in self._layers:  # a prompt's scan begins with nothing by itself, the ring's convolution does not
                layer.kv_cache[0][fresh] = 0
        ring = self._ring_rows(lengths, prefilling)
        decode = None
        if ring and self._width == 1:
            decode = self._single(steps, blocks[:ring])
        elif ring:
            certain = torch.ones_like(prefilling)  # vLLM 0.26 says nothing of drafts where no row has any
            if num_decode_draft_tokens_cpu is not None:
                # what a preempted sequence had generated is computed again: no prompt by vLLM's count, and no drafts
                certain = prefilling | (num_decode_draft_tokens_cpu < 0)
            decode = self._several(m, steps, blocks[:ring], lengths[:ring], certain[:ring], num_accepted_tokens)
        return ReplayMetadata(steps.pool, decode, self._prompt(m, steps, blocks, ring, num_accepted_tokens))

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> ReplayMetadata:
        """Graphs are captured with padding only: their blocks are all NULL_BLOCK_ID."""
        m = common_attn_metadata
        accepted = torch.ones_like(m.query_start_loc[1:]) if self._width > 1 else None
        return self.build(
            0, m.replace(is_prefilling=torch.zeros(m.num_reqs, dtype=torch.bool)), num_accepted_tokens=accepted
        )

    # ---- parts

    def _opened(self) -> EngineSteps:
        """The group's steps. Its cache is bound to the layers after the builder was made."""
        pages = self._layers[0].kv_cache[1]
        if self._steps is None or self._steps.pool.layers[0].pages.data_ptr() != pages.data_ptr():  # type: ignore[union-attr]
            states = [layer.replay_state() for layer in self._layers]
            for number, layer in enumerate(self._layers):
                layer.replay_number = number
            cursor, certain = cursor_in(states[0])
            self._steps = EngineSteps(StatePool(states, cursor=cursor), NULL_BLOCK_ID, certain)
            self._steps.warm_up()
        return self._steps

    def _blocks(self, m: Any) -> Tensor:
        """The block [B] that holds each row's state."""
        mode = self.vllm_config.cache_config.mamba_cache_mode
        return mamba_get_block_table_tensor(m.block_table_tensor, m.seq_lens, self.kv_cache_spec, mode)[:, 0]

    def _ring_rows(self, lengths: Tensor, prefilling: Tensor) -> int:
        """How many leading rows go to the ring.

        A single token goes there in any phase, and so does all of a batch whose rows have as many tokens as a step
        verifies: for such batches vLLM replays a captured decode graph, whatever the rows are.
        """
        width = self._width
        if bool(((lengths == width) | (lengths == 0)).all()):
            return len(lengths)
        here = (lengths <= 1) | (~prefilling & (lengths <= width))
        return len(lengths) if bool(here.all()) else int((~here).int().argmax())

    def _single(self, steps: EngineSteps, blocks: Tensor) -> DecodeRows:
        """Rows of one token each."""
        memory = self._memory.rows(len(blocks))
        return DecodeRows(steps.decode(memory, blocks), memory.blocks, len(blocks))

    def _several(
        self,
        m: Any,
        steps: EngineSteps,
        blocks: Tensor,
        lengths: Tensor,
        certain: Tensor,
        accepted: Tensor | None,
    ) -> DecodeRows:
        """Rows that may have drafts."""
        rows = len(blocks)
        memory, starts = self._memory.rows(rows), self._starts[: rows + 1]
        starts.copy_(m.query_start_loc[: rows + 1])
        width = self._width if int(lengths.max()) > 1 else 1
        step = steps.decode(
            memory,
            blocks,
            width,
            starts=starts,
            accepted=None if accepted is None else accepted[:rows],
            certain=certain.to(blocks.device),
        )
        if bool(((lengths == width) | (lengths == 0)).all()):
            return DecodeRows(step, memory.blocks, rows * width, starts, memory.kept)
        # from what the host knows: indices by a mask would wait for the device, in every layer
        tokens, place = int(lengths.sum()), torch.arange(width)
        gather = ((lengths.cumsum(0) - lengths).unsqueeze(1) + place).clamp(max=tokens - 1)
        places = (place < lengths.unsqueeze(1)).flatten().nonzero().squeeze(1)
        gather, places = (index.to(blocks.device, non_blocking=True) for index in (gather, places))
        return DecodeRows(step, memory.blocks, tokens, starts, memory.kept, gather, places)

    def _prompt(
        self, m: Any, steps: EngineSteps, blocks: Tensor, ring: int, accepted: Tensor | None
    ) -> PromptRows | None:
        rows = m.num_reqs - ring
        if rows == 0:
            return None
        part, blocks = _rows_from(m, ring), blocks[ring:].long()
        accepted = None if accepted is None else accepted[ring:]
        width = int(part.query_start_loc_cpu.diff().max())
        step, kept = steps.prompt(blocks, part.query_start_loc.diff(), width, accepted)
        scratch = torch.arange(1, rows + 1, dtype=torch.int32, device=blocks.device).unsqueeze(1)
        part = part.replace(block_table_tensor=scratch.expand(-1, m.block_table_tensor.shape[1]))
        return PromptRows(step, blocks, kept if self._width > 1 else None, super().build(0, part))  # type: ignore[misc]

    @staticmethod
    def _prefilling(m: Any) -> bool:
        return m.is_prefilling is not None and bool(m.is_prefilling.any())


def _rows_from(m: Any, first: int) -> Any:
    """vLLM's batch without its first rows."""
    token = int(m.query_start_loc_cpu[first])
    changed: dict[str, Any] = {
        "query_start_loc": m.query_start_loc[first:] - token,
        "query_start_loc_cpu": m.query_start_loc_cpu[first:] - token,
        "num_reqs": m.num_reqs - first,
        "num_actual_tokens": int(m.query_start_loc_cpu[-1]) - token,
        "max_query_len": int(m.query_start_loc_cpu[first:].diff().max()),
        "slot_mapping": m.slot_mapping[token:],
    }
    by_row = ("seq_lens", "is_prefilling", "seq_lens_cpu_upper_bound", "_seq_lens_cpu", "_num_computed_tokens_cpu")
    for field in fields(m):
        value = getattr(m, field.name)
        if field.name in by_row and value is not None:
            changed[field.name] = value[first:]
        elif field.name.endswith("_cache"):  # computed from the whole batch
            changed[field.name] = None
    return replace(m, **changed)


@functools.cache
def replay_backend(stock: Any) -> Any:
    """vLLM's attention back end for these layers, with our builder in front of its own."""
    builder = type("Replay" + stock.get_builder_cls().__name__, (ReplayBuilder, stock.get_builder_cls()), {})
    return type("Replay" + stock.__name__, (stock,), {"get_builder_cls": staticmethod(lambda: builder)})
