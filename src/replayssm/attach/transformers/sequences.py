"""The sequences of one cache: their slots, and the step that a forward runs over the recurrent layers.

Row i of the cache's batch is slot i of a pool that only this cache uses. The pool lives as long as the cache, which is
as long as the `generate` call that made it unless somebody keeps the cache.

A forward opens a step at the first recurrent layer and closes it after the last. Its tokens stay pending until the
next forward, so that `crop` can still take some back. A cache that transformers will crop more than that (assisted
generation) keeps the last tokens of a prompt in the ring as well, and folds nothing between two crops. A loop that
knows more than a forward shows, as `replayssm.decode` does, says what comes (`expect`) and what stays (`accept_paths`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from replayssm import flow
from replayssm.attach.transformers.speculation import certain_window
from replayssm.flow.prefill import state_before
from replayssm.recurrences.base import Tensors
from replayssm.recurrences.mixer import Mixer, Projected, Weights
from replayssm.state.pool import StatePool

if TYPE_CHECKING:
    from replayssm.attach.transformers.attached import Attached


def activation_dtype(hidden: Tensor) -> torch.dtype:
    """Dtype of what a layer's projections make of `hidden`."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def exactly(device: torch.device) -> torch.autocast:
    """Autocast would run the recurrence itself in 16 bit."""
    return torch.autocast(device.type, enabled=False)


class ConvInputs:
    """What a convolution gets in place of its inputs in a step to the ring: it then runs over the slots' carry.

    Args:
        sequences, ordinal: of the cache, and which recurrent layer.
        x: [B, channels, T], the raw inputs of the step.
    """

    def __init__(self, sequences: Sequences, ordinal: int, x: Tensor) -> None:
        self.sequences = sequences
        self.ordinal = ordinal
        self.x = x


class Holding:
    """What a cache holds. It outlives the cache by a moment, so that somebody can look at it then."""

    def __init__(self) -> None:
        self.pool: StatePool | None = None


class Sequences:
    """Slots and step of one cache.

    Args:
        attached: the model that the cache belongs to.
        rollback: whether tokens will be taken back again and again, as `speculation` describes.
    """

    def __init__(self, attached: Attached, rollback: bool = False) -> None:
        self.attached = attached
        self.rollback = rollback
        self.layers = attached.layers
        self.holding = Holding()
        self.rows: Tensor | None = None
        """int64 [B], the slot of each row."""
        # transformers reads has_previous_state[0] of a cache layer; all layers share this one object, so that no
        # layer seems to be a step ahead of the others while a forward runs
        self.has_state = {0: False}
        self.pending = 0
        """Tokens of the last step that a crop can still take back."""
        self.expected: tuple[Sequence[int] | Tensor, Sequence[Sequence[int]] | None] | None = None
        """Tokens and parents of the next forward, where somebody has said so."""
        self.step: flow.Step | None = None
        self.prompt: flow.Step | None = None
        """Where `step` goes to the ring: the part of the forward before it, which goes to the checkpoint."""
        self.certain = True
        """Whether every committed record is there to stay: after a crop, until the next forward."""
        self.done = 0
        """Recurrent layers that the open step has run."""
        self.advanced = False
        """Whether the layer that runs now has used its state."""
        self.failure: str | None = None
        attached.register(self)
        weakref.finalize(self, attached.retire, self.holding).atexit = False

    @property
    def pool(self) -> StatePool:
        assert self.holding.pool is not None
        return self.holding.pool

    @property
    def slots(self) -> int:
        """Slots in use."""
        return 0 if self.holding.pool is None else len(self.pool.slots.live)

    # ---- one forward

    def enter(self, ordinal: int, hidden: Tensor) -> None:
        """Before a layer runs; the first one opens the step."""
        if ordinal == 0:
            self._open(hidden)
        elif self.step is None or self.done != ordinal:
            self.fail("the recurrent layers ran out of order")
            raise RuntimeError(
                f"recurrent layer {ordinal} ran after {self.done} of them: a forward must run each of the "
                f"{len(self.layers)} recurrent layers once, in order"
            )
        self.advanced = False

    def leave(self) -> None:
        """After a layer ran; the last one closes the step."""
        if not self.advanced:
            raise RuntimeError(
                "the layer finished without its state: this version of transformers runs it in a way that replayssm "
                "does not know"
            )
        self.done += 1
        if self.done == len(self.layers):
            assert self.step is not None
            flow.close_step(self.pool, self.step)
            self.pending = 0 if self.step.is_prompt else self.step.width
            self.step = self.prompt = None
            self.has_state[0] = True

    def fail(self, reason: str) -> None:
        """A forward stopped half-way: some layers have advanced and others not."""
        self.failure, self.step, self.prompt = reason, None, None
        if self.holding.pool is not None:
            self.pool.slots.mark_broken(self.pool.slots.live, reason)

    def _open(self, hidden: Tensor) -> None:
        batch, tokens = hidden.shape[0], hidden.shape[1]
        self.require_ready(hidden)
        if self.has_state[0]:
            self.accept(self.pending)
        else:
            self.take_slots(batch, activation_dtype(hidden), hidden.device)
        assert self.rows is not None
        self.done = 0
        if self.expected is not None:
            (counts, parents), self.expected = self.expected, None
            self.has_state[0] = True  # as below
            self.step = flow.open_step(self.pool, self.rows, counts, width=tokens, parents=parents)
            return
        if not self.rollback:
            is_prompt = not self.has_state[0] or tokens > self.pool.config.verify_len
            self.step = flow.open_step(self.pool, self.rows, tokens, is_prompt=is_prompt)
            return
        self.has_state[0] = True  # the mixers then hand over the state, though it is empty, and we split the forward
        kept = min(tokens, self.pool.config.verify_len)
        if tokens > kept:
            self.prompt = flow.open_step(self.pool, self.rows, tokens - kept, is_prompt=True)
            # the layers read the plan only; settled here, the cursor is what the second step starts from
            flow.close_step(self.pool, self.prompt)
            self.certain = True
        config = self.attached.config
        window = certain_window(config) if self.certain else self.pool.config.window
        self.step = flow.open_step(self.pool, self.rows, kept, window=window)
        self.certain = False

    def require_usable(self) -> None:
        """RuntimeError unless every layer is at the same token and the model is attached."""
        if not self.attached.active:
            raise RuntimeError("this cache was filled by a model that is detached now: start from a new cache")
        if self.step is not None:
            # nothing told us that a layer between the recurrent ones failed
            self.fail("the forward stopped between two recurrent layers")
        if self.failure is not None:
            raise RuntimeError(
                f"this cache is broken: a forward failed half-way ({self.failure}); reset it or start from a new one"
            )

    def require_ready(self, hidden: Tensor) -> None:
        """Refuse a forward over `hidden` [B, T, width] that cannot run, before anything has changed."""
        self.require_usable()
        if hidden.shape[1] == 0:
            raise ValueError("a forward needs at least one token")
        if self.has_state[0]:
            assert self.rows is not None
            if hidden.shape[0] != len(self.rows):
                raise ValueError(
                    f"this cache holds {len(self.rows)} sequences, but the forward has {hidden.shape[0]} rows"
                )

    @torch.compiler.disable  # the first forward of a cache may be compiled; what it allocates must outlive the graph
    def take_slots(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        """A fresh slot for each of `batch` rows; memory of an earlier use is kept where it fits.

        A cache says nothing of the request that a row belongs to, so the row's number is its seed: equal prompts of a
        batch are rounded differently, and each alike in every run.
        """
        pool = self.holding.pool
        fits = pool is not None and pool.slots.slots == batch and pool.device == device
        if not fits or self.pool.layers[0].layout.model_dtype != dtype:
            # tensors born in inference mode could not be written to outside of it, where the cache may be continued
            with torch.inference_mode(False):
                self.holding.pool = self.attached.allocate(batch, dtype, device, rollback=self.rollback)
                self.rows = torch.arange(batch, device=device)
        for slot in range(batch):
            if slot in self.pool.slots.live:
                self.pool.reset(slot, seed=slot)
            else:
                self.pool.acquire(slot, seed=slot)
        self.failure, self.pending, self.certain = None, 0, True

    # ---- one layer of the open step

    def conv_inputs(self, ordinal: int, x: Tensor) -> Tensor | ConvInputs:
        """Raw conv inputs [B, channels, T] of the open forward, which its convolution turns to next.

        A prompt's come behind those before them, for the model's own convolution, and are kept as the slots' carry.
        """
        step, raw = self._running(), x.transpose(1, 2)
        if self.only_ring:
            return ConvInputs(self, ordinal, x)
        first = self.prompt or step
        window = flow.conv_window(self.pool, ordinal, first) if self.has_state[0] else raw[:, :0]
        flow.conv_append(self.pool, ordinal, first, raw[:, : first.width])
        if first is not step:
            flow.conv_append(self.pool, ordinal, step, raw[:, first.width :])
        return torch.cat([window, raw], 1).transpose(1, 2)

    def convolve(self, ordinal: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """The convolution of a step to the ring: [B, channels, T] of raw inputs, which become the slots' carry."""
        with exactly(self.pool.device):
            y = flow.causal_conv(self.pool, ordinal, self._running(), x.transpose(1, 2), weight, bias, activation)
        return y.transpose(1, 2)

    def verify(self, ordinal: int, inputs: Tensors) -> Tensor:
        """y [B, T, H, P] of the step's tokens, which go to the ring."""
        layout = self.pool.layers[ordinal].layout
        self.advanced = True
        raised = {
            f.name: inputs[f.name].to(layout.compute_dtype) for f in layout.recurrence.inputs if f.dtype == "exact"
        }
        with exactly(self.pool.device):
            return flow.verify(self.pool, ordinal, self._running(), {**inputs, **raised})

    @property
    def only_ring(self) -> bool:
        """Whether all tokens of the open forward go to the ring."""
        return self.prompt is None and not self._running().is_prompt

    def mix(self, ordinal: int, mixer: Mixer, weights: Weights, projected: Projected) -> Tensor:
        """What the layer's output projection gets, [B, T, H * P], of the step's tokens, which go to the ring."""
        with exactly(self.pool.device):
            step, advance = self._running(), partial(self.verify, ordinal)
            return flow.mix(self.pool, ordinal, step, mixer, weights, projected, advance)

    def state_before(self, ordinal: int) -> Tensor:
        """The state before a prompt's next chunk, in the model's own layout."""
        with exactly(self.pool.device):
            return self.layers[ordinal].binding.to_model(state_before(self.pool, ordinal, self._prompt()))

    def load(self, ordinal: int, state: Tensor) -> None:
        """Take the state that the model's own scan computed over a prompt or its next chunk."""
        self.advanced = True
        flow.load(self.pool, ordinal, self._prompt(), self.layers[ordinal].binding.from_model(state))

    @property
    def split(self) -> tuple[int, int]:
        """Tokens of the open forward that go into the checkpoint, and those after them that go to the ring."""
        step = self._running()
        if step.is_prompt:
            return step.width, 0
        return 0 if self.prompt is None else self.prompt.width, step.width

    def _prompt(self) -> flow.Step:
        step = self._running()
        return step if self.prompt is None else self.prompt

    def _running(self) -> flow.Step:
        if self.step is None:
            raise RuntimeError(
                "this cache was filled by a model with replayssm attached and cannot be continued by another model "
                "or after detach: start from a new cache"
            )
        return self.step

    # ---- between forwards

    def expect(self, tokens: Sequence[int] | Tensor, parents: Sequence[Sequence[int]] | None) -> None:
        """Say that the next forward goes to the ring, with so many tokens in each row.

        Args:
            tokens: new tokens of each row [B], 0..verify_len; what the forward brings beyond them is padding.
            parents: of each row's tokens, as `open_step` takes them; None for chains.
        """
        self.expected = (tokens, parents)

    def accept_paths(self, paths: Sequence[Sequence[int]]) -> None:
        """Make a path of each row's pending tokens real, as `commit_path` does; none of a row without any."""
        self.require_usable()
        assert self.rows is not None
        flow.commit_path(self.pool, self.rows, paths)
        self.pending = 0

    def accept(self, tokens: int | Tensor) -> None:
        """Make the first `tokens` of the pending ones real, the same number in every row or [B]."""
        if self.pending:
            assert self.rows is not None
            flow.commit(self.pool, self.rows, tokens)
            self.pending = 0

    def crop(self, tokens: int) -> None:
        """Take back the last tokens; `tokens` is 0 or negative, as transformers counts.

        The last step's tokens cost nothing to take back. Further back lie the records in the ring, which need
        `carry_history`. What is in the checkpoint cannot be taken back.
        """
        if tokens > 0:
            raise ValueError(f"crop takes the number of tokens to remove as 0 or less, got {tokens}")
        self.require_usable()
        if not self.has_state[0]:
            if tokens:
                raise ValueError(f"crop({tokens}) of an empty cache")
            return
        behind = max(0, -tokens - self.pending)
        if behind:
            length = int(self.pool.cursor.length.min())
            if behind > length:
                raise ValueError(
                    f"crop({tokens}) reaches back further than the {self.pending} tokens of the last step and the "
                    f"{length} records in the ring: the tokens before them are in the checkpoint"
                )
            self.pool.require_reach(length, length - behind)
        self.accept(max(0, self.pending + tokens))
        if behind:
            self.pool.cursor.length -= behind
            self.pool.cursor.position -= behind
        self.certain = True

    def reorder(self, index: Tensor) -> None:
        """Row i continues what row index[i] holds, pending tokens included; rows may be repeated or dropped."""
        self.require_usable()
        if self.has_state[0]:
            with torch.inference_mode(False):
                self.holding.pool = self.pool.gather(index.to(self.pool.device))
                self.rows = torch.arange(len(index), device=self.pool.device)

    def select(self, index: Tensor) -> None:
        """Keep the rows that `index` (integers or a mask) selects."""
        if self.rows is not None:
            self.reorder(self.rows[index.to(self.rows.device)])

    def repeat(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        if self.rows is not None:
            self.reorder(self.rows.repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything and release the slots. The memory stays with the cache for its next use."""
        self.has_state[0] = False
        self.pending, self.expected, self.step, self.prompt, self.failure = 0, None, None, None, None
        if self.holding.pool is not None:
            for slot in sorted(self.pool.slots.live):
                self.pool.release(slot)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sequences:
        self.require_usable()
        twin = Sequences(self.attached, self.rollback)
        memo[id(self)] = twin
        twin.has_state = copy.deepcopy(self.has_state, memo)
        twin.pending, twin.certain = self.pending, self.certain
        if self.has_state[0]:
            assert self.rows is not None
            twin.holding.pool = self.pool
            twin.reorder(self.rows)
        return twin

    # ---- a state from elsewhere

    def take_over(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue a cache that the plain model filled.

        Args:
            states: per recurrent layer, "conv" [B, channels, conv_width] (raw inputs, newest last, in the model's
                dtype) and "recurrent" in the model's layout.
        """
        conv = [state["conv"].detach().transpose(1, 2) for state in states]
        both = zip(self.layers, states, strict=True)
        self._fill(conv, [layer.binding.from_model(state["recurrent"].detach()) for layer, state in both])

    def allow_rollback(self) -> None:
        """Tokens will be taken back from now on: what the sequences hold moves into slots with a longer ring."""
        if self.rollback:
            return
        self.require_usable()
        self.rollback = True
        pool, rows = self.holding.pool, self.rows
        self.holding.pool = None
        if pool is None or rows is None or not self.has_state[0]:
            return
        flow.commit(pool, rows, self.pending)
        # opening a step changes nothing, and says where the convolution's inputs lie
        step, layers = flow.open_step(pool, rows), range(len(self.layers))
        conv = [flow.conv_window(pool, ordinal, step) for ordinal in layers]
        self._fill(conv, [flow.materialize(pool, ordinal, rows.tolist()) for ordinal in layers])
        self.pool.cursor.saturated += pool.cursor.saturated
        self.pool.cursor.seed.copy_(pool.cursor.seed)

    def _fill(self, conv: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Start with what came before: per recurrent layer, conv inputs [B, T, channels] and a state [B, H, N, P]."""
        self.take_slots(conv[0].shape[0], conv[0].dtype, conv[0].device)
        assert self.rows is not None
        # the slot's position then counts from the oldest conv input on; nothing needs the true one
        with flow.prompt(self.pool, self.rows, conv[0].shape[1]) as step:
            for ordinal, (inputs, state) in enumerate(zip(conv, states, strict=True)):
                flow.conv_append(self.pool, ordinal, step, inputs)
                flow.load(self.pool, ordinal, step, state)
        self.has_state[0] = True


class StateHandle:
    """What a mixer's forward gets in place of a state tensor, and passes on to the functions that we replaced.

    Args:
        sequences: of the cache.
        ordinal: which recurrent layer.
    """

    def __init__(self, sequences: Sequences, ordinal: int) -> None:
        self.sequences = sequences
        self.ordinal = ordinal

    def to(self, *_: Any, **__: Any) -> StateHandle:
        """A forward may cast the state that it got back; there is nothing to cast."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"the recurrent state of an attached model was used as a tensor (.{name}): a cache that it filled can only "
            "be continued by that model, while it is attached"
        )
