"""The layers of a transformers cache that stand for slots, and their exchange against the stock ones.

A stock layer may hold a recurrent state, or that beside keys and values (FalconH1, Zamba2). Ours is of a subclass of
the stock layer's class: the keys and values stay with the stock code, the state goes to `Sequences`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from replayssm.attach.transformers.find import RecurrentLayer
from replayssm.attach.transformers.sequences import ConvInputs, Sequences, StateHandle

if TYPE_CHECKING:
    from replayssm.attach.transformers.attached import Attached


class ReplayedLayer:
    """Cache layer of one recurrent layer. The verbs of the whole cache act once, through its first recurrent layer."""

    attention: type | None
    """Class of the keys and values that the layer also holds."""
    sequences: Sequences
    ordinal: int
    clean_start: bool
    """Whether no other layer of the cache comes before this one."""

    @property
    def is_compileable(self) -> bool:
        return self.attention is None or bool(self.attention.is_compileable)  # type: ignore[attr-defined]

    @property
    def is_croppable(self) -> bool:
        """Whether there are tokens that a crop can take back."""
        return self.sequences.pending > 0 and (self.attention is None or bool(self.attention.is_croppable))  # type: ignore[attr-defined]

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor | ConvInputs:
        return self.sequences.conv_inputs(self.ordinal, conv_states)

    def update_recurrent_state(self, recurrent_states: Tensor | StateHandle, state_idx: int = 0, **_: Any) -> Any:
        if not isinstance(recurrent_states, StateHandle):
            self.sequences.load(self.ordinal, recurrent_states)
        return recurrent_states

    def activate_past_recording(self) -> None:
        """transformers will crop the cache."""
        if self.ordinal == 0:
            self.sequences.allow_rollback()

    def crop(self, tokens_to_remove: int) -> None:
        if self.ordinal == 0:
            try:
                self.sequences.crop(int(tokens_to_remove))
            except ValueError as error:
                if not self.clean_start:  # layers before this one have been cropped already
                    self.sequences.fail(f"{type(error).__name__}: {error}")
                raise
        self._attention("crop", tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.ordinal == 0:
            self.sequences.reorder(beam_idx)
        self._attention("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.ordinal == 0:
            self.sequences.repeat(repeats)
        self._attention("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.ordinal == 0:
            self.sequences.select(indices)
        self._attention("batch_select_indices", indices)

    def reset(self) -> None:
        if self.ordinal == 0:
            self.sequences.reset()
        self._attention("reset")

    def offload(self) -> None:
        self._attention("offload")

    def prefetch(self) -> None:
        self._attention("prefetch")

    def _attention(self, verb: str, *args: Any) -> None:
        if self.attention is not None:
            getattr(self.attention, verb)(self, *args)


class EmptyLayer(LinearAttentionLayer):
    """Stands for a layer without a state, where transformers before 5.23 keeps a recurrent one that never fills."""

    is_compileable = True
    is_croppable = True

    def activate_past_recording(self) -> None: ...
    def crop(self, tokens_to_remove: int) -> None: ...
    def batch_repeat_interleave(self, repeats: int) -> None: ...
    def batch_select_indices(self, indices: Tensor) -> None: ...


def admit(attached: Attached, cache: Cache, rows: int) -> Sequences:
    """The sequences of a cache for a forward over `rows` rows; a stock cache becomes ours, and continues what it holds.

    Raises:
        ValueError: the cache belongs to another model, or holds another number of rows. Nothing was changed.
    """
    first = attached.layers[0]
    ours = getattr(cache.layers[first.index], "sequences", None) if first.index < len(cache.layers) else None
    if ours is not None and ours.attached is attached:
        return ours
    held = [_layer_at(cache, layer) for layer in attached.layers]
    if any(isinstance(layer, ReplayedLayer) for layer in held):
        raise ValueError(
            "a cache of another model: it was filled by a different attached model (or by this one before it was "
            "attached again); start from a new cache"
        )
    states = [_stock_state(layer, stock) for layer, stock in zip(attached.layers, held, strict=True)]
    if any((state is None) != (states[0] is None) for state in states):
        raise ValueError("this cache is incomplete: only some of its recurrent layers have a state")
    if states[0] is not None and states[0]["conv"].shape[0] != rows:
        raise ValueError(f"this cache holds {states[0]['conv'].shape[0]} sequences, but the forward has {rows} rows")
    sequences = Sequences(attached, rollback=any(stock.record_past for stock in held))
    if states[0] is not None:
        sequences.take_over([state for state in states if state is not None])
    for ordinal, (layer, stock) in enumerate(zip(attached.layers, held, strict=True)):
        cache.layers[layer.index] = _replayed(stock, sequences, ordinal, clean_start=first.index == 0)
    for index, layer in enumerate(cache.layers):
        if type(layer) is LinearAttentionLayer and not layer.has_previous_state[0]:
            cache.layers[index] = EmptyLayer()
    return sequences


def is_plain_and_empty(cache: Cache, layer: RecurrentLayer) -> bool:
    """Whether a forward with this cache neither continues anything nor meets slots of ours at this layer."""
    held = _layer_at(cache, layer)
    return not isinstance(held, ReplayedLayer) and not held.has_previous_state[0]


def _layer_at(cache: Cache, layer: RecurrentLayer) -> Any:
    held = cache.layers[layer.index] if layer.index < len(cache.layers) else None
    if not isinstance(held, LinearAttentionCacheLayerMixin) or held.number_of_states != 1:
        raise ValueError(
            f"a cache of another model: its layer {layer.index} is {type(held).__name__}, where this model's "
            f"{layer.name} keeps a recurrent state; make one with DynamicCache(config=model.config)"
        )
    return held


def _stock_state(layer: RecurrentLayer, stock: Any) -> dict[str, Tensor] | None:
    if not stock.has_previous_state[0]:
        return None
    geometry = layer.geometry
    conv = stock.conv_states[0][..., -geometry.conv_width :]
    state = stock.recurrent_states[0]
    ours = layer.binding.from_model(state)
    if tuple(ours.shape[1:]) != geometry.state_shape or conv.shape[1] != geometry.conv_channels:
        raise ValueError(
            f"a cache of another model: the state of its layer {layer.index} is {list(state.shape[1:])} behind "
            f"{conv.shape[1]} conv channels, where this model has {list(geometry.state_shape)} (heads, key dim, value "
            f"dim) behind {geometry.conv_channels}"
        )
    return {"conv": conv, "recurrent": state}


def attention_class(layer_class: Any) -> Any:
    """The class of the keys and values that a cache layer of this class holds, None if it holds none."""
    return next(
        (
            base
            for base in layer_class.__mro__
            if issubclass(base, CacheLayerMixin) and not issubclass(base, LinearAttentionCacheLayerMixin)
        ),
        None,
    )


@functools.cache
def _replayed_class(stock: Any) -> type:
    return type(f"Replayed{stock.__name__}", (ReplayedLayer, stock), {"attention": attention_class(stock)})


def _replayed(stock: Any, sequences: Sequences, ordinal: int, clean_start: bool) -> Any:
    stock_class: Any = type(stock)
    layer: Any = object.__new__(_replayed_class(stock_class))
    layer.__dict__.update(stock.__dict__)
    handle = StateHandle(sequences, ordinal)
    layer.__dict__.update(
        sequences=sequences,
        ordinal=ordinal,
        clean_start=clean_start,
        conv_states={0: handle},
        recurrent_states={0: handle},
        has_previous_state=sequences.has_state,
        is_conv_states_initialized={0: False},
        is_recurrent_states_initialized={0: False},
        record_past=True,  # transformers then asks `update_conv_state` for the convolution's inputs at every step
    )
    return layer
