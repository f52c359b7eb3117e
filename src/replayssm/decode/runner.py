"""Decoding for throughput: steps that never wait for the host, each one a single CUDA graph.

A `Session` takes what the host knows: how many tokens a row has, which of them stay. A `Runner` keeps all of it on the
device, in tensors that stay where they are, so that a step is the same work at the same addresses every time. On a GPU
the first steps run as they are, then one is captured and replayed from there on; on a CPU every step runs as it is.

    start      prompts, in chunks; the first token of each row
    advance    tokens of every row -> forward -> next tokens, lengths, who rests: nothing comes back
    run        the loop: reads the tokens of a step while the next one runs

Rows stop for themselves: at a stop token, or when they are full. A row that rests brings no token and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from replayssm.decode.acceptance import Sampling
from replayssm.decode.columns import Ragged
from replayssm.decode.session import Session, require_prompts
from replayssm.flow import algebra

WARM_UP = 3
"""Steps that run before one is captured: they compile kernels and allocate what stays."""

NONE = -1
"""In place of a token that a row did not get."""


class Runner(Session):
    """A batch of sequences on the device.

    Args:
        model: a model with `replayssm.attach`.
        capacity: tokens that each row has room for, its prompt included.
        sampling: how tokens are drawn; by default the likeliest is taken.
        stop: tokens that end a row, which keeps them.
        width: tokens of each row in a step: a certain one, and drafts behind it that are kept while they are right.
            Whoever has drafts puts them into `tokens[:, 1:]` before a step.
        capture: whether steps become CUDA graphs where they can: on a GPU, and unless the model selects keys by their
            place in a cache that grows.

    Raises:
        ValueError: width does not fit the attached verify_len, or drafts are to be sampled.
    """

    def __init__(
        self,
        model: Any,
        *,
        capacity: int,
        sampling: Sampling | None = None,
        stop: Collection[int] = (),
        width: int = 1,
        capture: bool = True,
    ) -> None:
        super().__init__(model, capacity)
        if not 1 <= width <= self.config.verify_len:
            raise ValueError(f"width must be in 1..verify_len = {self.config.verify_len}, got {width}")
        if sampling is not None and width > 1:
            raise ValueError("drafts of a runner are judged by the likeliest token: use decode() to sample with drafts")
        self.sampling, self.width = sampling, width
        self._masks = any(isinstance(layer, Ragged) for layer in self.cache.layers)
        grows = any(not isinstance(layer, Ragged) and hasattr(layer, "keys") for layer in self.cache.layers)
        self._captures = capture and model.device.type == "cuda" and not grows
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0
        self._stop = torch.tensor(sorted(stop), dtype=torch.int64, device=model.device)
        self.certain = self._empty(0)
        """int64 [B], tokens of each row whose state and keys are kept."""
        self.resting = self._empty(0).bool()
        """bool [B], rows that are done."""
        self.tokens = self._empty(0, width)
        """int64 [B, width], what the next step takes: the certain token, then drafts."""
        self.new = self._empty(0, width)
        """int64 [B, width], the tokens that the last step gave each row, NONE behind them."""
        self.logits = torch.empty(0)
        """[B, width, vocabulary] of the last step; after `start`, [B, 1, vocabulary] behind the prompts."""

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=self.model.device)

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[int]], chunk: int | None = None) -> None:
        """Take the prompts in, and give each row its first token."""
        if self.lengths:
            raise ValueError("a runner takes its prompts once: make a new one")
        require_prompts(prompts)
        longest, rows = max(map(len, prompts)), len(prompts)
        if longest + self.width > self.columns.capacity:
            raise ValueError(
                f"a prompt of {longest} tokens and a step of {self.width} do not fit in a capacity of "
                f"{self.columns.capacity}"
            )
        self.logits = self.prefill(prompts, chunk).unsqueeze(1)
        self.certain = torch.tensor(self.lengths, device=self.model.device)
        self.resting = torch.zeros(rows, dtype=torch.bool, device=self.model.device)
        self.tokens = self._empty(rows, self.width).zero_()
        self.new = self._empty(rows, self.width).fill_(NONE)
        first = self._pick(self.logits)
        self._give(first, torch.ones_like(self.certain))

    @torch.no_grad()
    def advance(self) -> None:
        """One step of every row. Nothing of it is waited for."""
        if self._graph is None and self._captures and self._steps == WARM_UP:
            self._capture()
        self._steps += 1
        if self._graph is None:
            self._body()
        else:
            self._graph.replay()

    def run(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, chunk: int | None = None
    ) -> Iterator[list[list[int]]]:
        """Continue prompts token by token: the new tokens of each row, step by step.

        Args:
            prompts: token ids, which may differ in length.
            max_new_tokens: how many tokens each row gets at most.
            chunk: as in `prefill`.
        """
        if self.width > 1:
            raise ValueError("run decodes plainly: a runner with drafts is driven step by step")
        self.start(prompts, chunk)
        going = [True] * len(prompts)
        stop = set(self._stop.tolist())
        sent = _Sent(self.new)
        for left in range(max_new_tokens - 1, -1, -1):
            before = sent
            if left:
                self.advance()
                sent = _Sent(self.new)
            tokens = before.read()
            yield tokens
            going = [goes and not stop.intersection(row) for goes, row in zip(going, tokens, strict=True)]
            if not any(going):
                return

    # ---- a step, on the device

    def _body(self) -> None:
        columns, width = self.columns, self.width
        offsets = torch.arange(width, device=self.certain.device)
        positions = self.certain.unsqueeze(1) + offsets
        # a row that rests may be full: what it writes there is read by nobody
        columns.place(positions.clamp(max=columns.capacity - 1), columns.capacity)
        mask = None
        if self._masks:
            descends = algebra.chain(width, self.certain.device).expand(len(self.certain), -1, -1)
            mask = self._mask(descends, self.certain.unsqueeze(1))
        self._sequences.expect(torch.where(self.resting, 0, width), None)
        self.logits = self._forward(self.tokens, mask, positions)
        chosen = self._pick(self.logits)
        accepted = torch.where(self.resting, 0, self._accepted(chosen))
        self._sequences.accept(accepted)
        self._lengthen(accepted)
        self._give(chosen, accepted)

    def _pick(self, logits: Tensor) -> Tensor:
        """int64 [B, T]: the token behind each of the step's."""
        return logits.argmax(-1) if self.sampling is None else self.sampling.pick(logits)

    def _accepted(self, chosen: Tensor) -> Tensor:
        """int64 [B]: the certain token, and the drafts that are what was chosen behind their parents."""
        right = (chosen[:, :-1] == self.tokens[:, 1:]).long()
        return 1 + right.cumprod(1).sum(1)

    def _lengthen(self, accepted: Tensor) -> None:
        """Keep so many of the step's tokens."""
        self.certain.add_(accepted)

    def _give(self, chosen: Tensor, accepted: Tensor) -> None:
        """Hand out the first `accepted` of the chosen tokens, up to a stop token; the last is what is fed next."""
        width = chosen.shape[1]
        ends = (chosen.unsqueeze(-1) == self._stop).any(-1)
        before = ends.cumsum(1) - ends.long()
        given = (torch.arange(width, device=chosen.device) < accepted.unsqueeze(1)) & (before == 0)
        self.new[:, :width] = torch.where(given, chosen, NONE)
        last = chosen.gather(1, (accepted - 1).clamp(min=0).unsqueeze(1))
        self.tokens[:, :1] = torch.where(self.resting.unsqueeze(1), self.tokens[:, :1], last)
        full = self.certain + self.width > self.columns.capacity
        self.resting.logical_or_((ends & given).any(1) | full)

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        if self.sampling is not None:
            graph.register_generator_state(self.sampling.random_on(self.model.device))
        with torch.cuda.graph(graph):
            self._body()
        self._graph = graph


class _Sent:
    """Tokens on their way to the host."""

    def __init__(self, tokens: Tensor) -> None:
        on_gpu = tokens.device.type == "cuda"
        self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=on_gpu)
        self._tokens.copy_(tokens, non_blocking=on_gpu)
        self._event = torch.cuda.Event() if on_gpu else None
        if self._event is not None:
            self._event.record()

    def read(self) -> list[list[int]]:
        """The tokens of each row, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return [[token for token in row if token != NONE] for row in self._tokens.tolist()]
