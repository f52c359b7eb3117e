"""A batch of sequences in an attached model: its cache, and what of it is certain.

Recurrent states and attention take drafts and rejection alike: a step writes behind what is certain, and `accept` keeps
a path of it. The records of a path move together in the ring (`commit_path`), and its keys and values in the cache.

Row i of the batch has its keys and values in the first `lengths[i]` columns of the cache, whatever the others have, and
its new tokens go behind them (`columns`): a mask of four dimensions says which columns a token sees. A single chain
needs none and gets none.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from replayssm.attach.transformers.attached import Attached
from replayssm.attach.transformers.layers import attention_class
from replayssm.attach.transformers.sequences import Sequences
from replayssm.attach.transformers.speculation import MARK
from replayssm.decode.attention import GROUPED, STATIC
from replayssm.decode.columns import Columns, Ragged, ragged_cache
from replayssm.flow.algebra import lineage

MASKED_BY = ("eager", "sdpa", GROUPED, STATIC)
"""Attention implementations that take a mask of four dimensions."""
CACHED = (("keys", 2), ("values", 2), ("indexer_keys", 1))
"""Tensors of a layer of the cache with one column per token, and the dim of the columns."""


class Session:
    """Sequences of one model, from their prompts on.

    Args:
        model: a model with `replayssm.attach`.
        capacity: tokens that the cache has room for at once; it grows when a row has more.
    """

    def __init__(self, model: Any, capacity: int = 0) -> None:
        handle = vars(model).get(MARK)
        if not isinstance(handle, Attached):
            raise ValueError(f"this {type(model).__name__} is not attached: call replayssm.attach(model) first")
        self.model = model
        self.config = handle.config
        self.columns = Columns(capacity)
        self.cache = ragged_cache(model.config.get_text_config(decoder=True), self.columns)
        self.lengths: list[int] = []
        """Certain tokens of each row."""
        self._recurrent = handle.layers[0].index
        self._parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
        # 5.24 has renamed the cache, and a model without attention has a name of its own
        names = ("cache", "past_key_values", "cache_params")
        self._cache_name = next(name for name in names if name in self._parameters)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int | None = None) -> Tensor:
        """Start with these prompts, which may differ in length; logits [B, vocabulary] behind each.

        Args:
            prompts: token ids.
            chunk: most tokens of a row in one forward, which bounds the memory of activations; None for all of them.
        """
        if self.lengths:
            raise ValueError("a session takes its prompts once: make a new one")
        require_prompts(prompts)
        longest = max(map(len, prompts))
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}")
        self._refuse_unless_alike(len(prompts) > 1)
        padding = [longest - len(prompt) for prompt in prompts]
        ids = self._ids([[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
        mask = torch.arange(longest, device=ids.device) >= torch.tensor(padding, device=ids.device).unsqueeze(1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        forwards = 1 if chunk is None else -(-longest // chunk)
        # of equal size, so that none is as short as a draft
        ends = [longest * (number + 1) // forwards for number in range(forwards)]
        logits = ids.new_empty(0)
        for begin, end in pairwise([0, *ends]):
            part = slice(begin, end)
            self.columns.place(torch.arange(begin, end, device=ids.device).expand(len(ids), -1), end)
            seen = mask[:, :end].long() if any(padding) else None
            logits = self._forward(ids[:, part], seen, positions[:, part], last_only=True)[:, -1]
        self._sequences.accept(self._sequences.pending)  # of a last chunk as short as a draft
        self.lengths = [0] * len(prompts)
        self._keep([range(pad, longest) for pad in padding])
        return logits

    @torch.no_grad()
    def step(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Logits [B, T, vocabulary] behind each of the rows' new tokens. Nothing of it is certain before `accept`.

        A step that was not accepted is dropped by the next one.

        Args:
            tokens: new tokens of each row, at most verify_len; none of a row that rests.
            parents: for trees, the token of its row that each one follows, -1 for what is certain; by default they
                follow each other.

        Raises:
            ValueError: tokens or parents do not fit the session, which is then as it was.
        """
        sequences = self._sequences
        counts = [len(row) for row in tokens]
        chains = [list(range(-1, count - 1)) for count in counts]
        above = chains if parents is None else [list(row) for row in parents]
        self._check(counts, above)
        width, is_tree = max(counts), above != chains
        self._refuse_unless_alike(len(counts) > 1 or is_tree)
        # behind a row's own tokens a chain of padding, so that nothing is without an ancestor
        padded = [row + list(range(len(row) - 1, width - 1)) for row in above]
        ids = self._ids([[*row, *[0] * (width - len(row))] for row in tokens])
        descends = lineage(torch.tensor(padded, device=ids.device))
        lengths = torch.tensor(self.lengths, device=ids.device).unsqueeze(1)
        self.columns.place(lengths + torch.arange(width, device=ids.device), max(self.lengths) + width)
        positions = lengths + descends.sum(2) - 1
        mask = self._mask(descends, lengths) if self._attends and (len(counts) > 1 or is_tree) else None
        if sequences.pending:
            self.accept([[]] * len(counts))
        sequences.expect(counts, padded if is_tree else None)
        try:
            return self._forward(ids, mask, positions)
        except BaseException:
            sequences.expected = None
            self._trim()  # layers of attention may have written already
            raise

    def _check(self, counts: Sequence[int], parents: Sequence[Sequence[int]]) -> None:
        """ValueError unless a step can have so many tokens, which follow these."""
        rows, most = len(self.lengths), self.config.verify_len
        if len(counts) != rows or len(parents) != rows:
            raise ValueError(
                f"a step has tokens, and parents if any, for each of {rows} rows, got {len(counts)} and {len(parents)}"
            )
        if not 1 <= max(counts) <= most:
            raise ValueError(f"a step has 1 to verify_len = {most} tokens per row, got {max(counts)}")
        for row, (count, above) in enumerate(zip(counts, parents, strict=True)):
            if len(above) != count or not all(-1 <= parent < place for place, parent in enumerate(above)):
                raise ValueError(
                    f"row {row} has {count} tokens: each has a parent before it, or -1 for what is certain, got {above}"
                )

    def accept(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep a path of each row's last tokens, each the parent of the next; the others never were."""
        self._sequences.accept_paths(paths)
        self._keep([[length + place for place in path] for length, path in zip(self.lengths, paths, strict=True)])

    def _keep(self, columns: Sequence[Sequence[int]]) -> None:
        """Move some columns of each row behind its certain ones."""
        moves = [
            (row, column, length + place)
            for row, (length, chosen) in enumerate(zip(self.lengths, columns, strict=True))
            for place, column in enumerate(chosen)
            if column != length + place
        ]
        self.lengths = [length + len(chosen) for length, chosen in zip(self.lengths, columns, strict=True)]
        for layer in self.cache.layers:
            for name, dim in CACHED:
                held = getattr(layer, name, None)
                if moves and isinstance(held, Tensor):
                    by_column = held.movedim(dim, 1)
                    rows, sources, targets = torch.tensor(moves, device=held.device).unbind(1)
                    # all are read before one is written: one may move to where another came from
                    by_column[rows, targets] = by_column[rows, sources]
        self._trim()

    def _trim(self) -> None:
        """Drop the columns behind the certain ones where the next forward would append behind them."""
        for layer in self.cache.layers:
            for name, dim in CACHED:
                held = getattr(layer, name, None)
                if isinstance(held, Tensor) and not isinstance(layer, Ragged):
                    setattr(layer, name, held.narrow(dim, 0, max(self.lengths)))

    @property
    def _attends(self) -> bool:
        return any(isinstance(getattr(layer, "keys", None), Tensor) for layer in self.cache.layers)

    @property
    def _sequences(self) -> Sequences:
        held: Any = self.cache.layers[self._recurrent]
        if not hasattr(held, "sequences"):
            raise ValueError("a session starts with its prompts: call prefill first")
        return held.sequences

    def _mask(self, descends: Tensor, lengths: Tensor) -> Tensor:
        """What is added to attention scores [B, 1, T, columns]: 0 where a token sees a column, else the least.

        Args:
            descends: bool [B, T, T], which new tokens a new token comes after.
            lengths: int64 [B, 1], certain tokens of each row; the new ones are behind them.
        """
        tokens = descends.shape[1]
        behind = torch.arange(self.columns.read, device=lengths.device) - lengths
        new = descends.gather(2, behind.clamp(0, tokens - 1).unsqueeze(1).expand(-1, tokens, -1))
        sees = (behind < 0).unsqueeze(1) | (new & (behind < tokens).unsqueeze(1))
        dtype = self.model.dtype
        hidden = torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, torch.finfo(dtype).min)
        return hidden.unsqueeze(1)

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, last_only: bool = False) -> Tensor:
        options: dict[str, Any] = {self._cache_name: self.cache, "use_cache": True, "attention_mask": mask}
        if "position_ids" in self._parameters:
            options["position_ids"] = positions
        if last_only and "logits_to_keep" in self._parameters:
            options["logits_to_keep"] = 1
        return self.model(ids, **options).logits

    def _ids(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self.model.device)

    def _refuse_unless_alike(self, needs_mask: bool) -> None:
        """ValueError where rows of different lengths, or branches, cannot share this model's attention."""
        if not needs_mask:
            return
        family = self.model.config.model_type
        for layer in self.cache.layers:
            attention = attention_class(type(layer))
            if attention is not None and not isinstance(layer, Ragged):
                raise ValueError(
                    f"{family} selects keys by their place in the cache ({attention.__name__}), which branches and "
                    "rows of different lengths do not share: decode one sequence at a time, with chains of drafts"
                )
        implementation = self.model.config.get_text_config(decoder=True)._attn_implementation
        if implementation not in MASKED_BY:
            raise ValueError(
                "branches and rows of different lengths need an attention mask of four dimensions, which "
                f"{implementation} does not take: load the model with attn_implementation={MASKED_BY[1]!r}"
            )


def require_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """ValueError unless there are prompts, none of them empty."""
    if not len(prompts):
        raise ValueError("there is no prompt: a batch needs at least one")
    if not min(map(len, prompts)):
        raise ValueError("a prompt needs at least one token")
