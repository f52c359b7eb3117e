"""The handle of one attached model."""

from __future__ import annotations

import logging
import re
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from replayssm.attach.transformers.find import RecurrentLayer, device_of, dtype_of, find_layers
from replayssm.attach.transformers.fused import fused_forward, not_called, refusal, unchanged
from replayssm.attach.transformers.layers import admit, is_plain_and_empty
from replayssm.attach.transformers.rebind import argument, rebound_forward
from replayssm.attach.transformers.sequences import Holding, Sequences
from replayssm.attach.transformers.speculation import MARK, Speculation, rolling_back
from replayssm.config import ReplayConfig
from replayssm.state.formats import FORMATS
from replayssm.state.layout import StateLayout, Tally, Traffic
from replayssm.state.pool import LayerState, SaturationWarning, StatePool, saturation_message

_log = logging.getLogger("replayssm")


class Attached:
    """An attached model: what is replayed, how, and how much state it moved.

    Args:
        model: the model.
        config: how its recurrent state is kept.
        layers: its recurrent layers, in running order.
        fused: as `replayssm.attach` takes it.
    """

    def __init__(
        self, model: nn.Module, config: ReplayConfig, layers: tuple[RecurrentLayer, ...], fused: bool | None = None
    ) -> None:
        self.model = model
        self.fused = fused
        self.unfused = tuple("fused=False" if fused is False else refusal(layer) for layer in layers)
        """Of each layer why it runs its own forward in every step, None where it need not."""
        self._known = tuple(
            not_called(layer) if reason is None else () for layer, reason in zip(layers, self.unfused, strict=True)
        )
        self.config = config
        self.layers = layers
        self.active = True
        self._hooks: list[RemovableHandle] = []
        self._speculation = Speculation(self)
        self._caches: weakref.WeakSet[Sequences] = weakref.WeakSet()
        self._clamped: list[Tensor] = []
        # counts per layouts and device: caches of one model may differ in dtype, and outlive each other
        self._tallies: dict[tuple[tuple[StateLayout, ...], torch.device], Tensor] = {}

    @property
    def families(self) -> tuple[str, ...]:
        """Model families of the recurrent layers."""
        return tuple(sorted({layer.family for layer in self.layers}))

    @property
    def family(self) -> str:
        """The model family."""
        return self.families[0]

    @property
    def slots_in_use(self) -> int:
        """Slots that live caches hold."""
        return sum(cache.slots for cache in self._caches)

    def traffic(self) -> Traffic:
        """State bytes moved by all decode steps since attach, beside those of ordinary decoding of the same tokens."""
        self._warn_of_clamped()
        total = Traffic(0, 0, 0, 0, 0)
        for (layouts, _), counts in self._tallies.items():
            tally = Tally(*counts.tolist())
            part = sum((layout.traffic(tally) for layout in layouts), Traffic(0, 0, 0, 0, 0))
            total = replace(total + part, tokens=total.tokens + part.tokens)
        return total

    def describe(self) -> str:
        """A table of the recurrent layers: equal ones share a line; bytes are those of one slot and layer."""
        head = ["layers", "recurrence", "heads", "key heads", "key dim", "value dim", "conv"]
        head += ["checkpoint B", "read copy B", "ring B", "carry B"]
        layouts = self._layouts(dtype_of(self.layers[0].mixer), self.config)
        groups: dict[StateLayout, list[int]] = {}
        for layer, layout in zip(self.layers, layouts, strict=True):
            groups.setdefault(layout, []).append(layer.index)
        rows = [head]
        for layout, indices in groups.items():
            g = layout.geometry
            sizes = (g.heads, g.key_heads, g.key_dim, g.value_dim, f"{g.conv_channels} x {g.conv_width}")
            parts = tuple(layout.bytes_of(kind) for kind in ("checkpoint", "read_copy", "ring", "carry"))
            rows.append([_ranges(indices), layout.recurrence.title, *map(str, (*sizes, *parts))])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = sum(layout.slot_bytes * len(indices) for layout, indices in groups.items())
        title = f"{type(self.model).__name__} ({self.family}): {len(self.layers)} recurrent layers, {self.config}"
        return "\n".join([title, *lines, *self.explain_mixers(), f"{total} B per sequence"])

    def explain_mixers(self) -> list[str]:
        """How the layers' decode steps run, a sentence for each way that some of them take."""
        found: dict[str, list[int]] = {}
        for layer, reason in zip(self.layers, self.unfused, strict=True):
            if reason is None and self.fused is None and device_of(layer.mixer).type != "cuda":
                reason = f"the layers are on {device_of(layer.mixer).type}"
            where = "" if self.fused else " where the pool runs on the triton back end"
            way = f"fused{where}" if reason is None else f"the model's own forward ({reason})"
            found.setdefault(way, []).append(layer.index)
        return [f"decode steps of layers {_ranges(indices)}: {way}" for way, indices in found.items()]

    def detach(self) -> None:
        """Give the model back as it was."""
        if not self.active:
            raise ValueError("this model is detached already")
        self._warn_of_clamped()
        self.active = False
        for layer in self.layers:
            del layer.mixer.__dict__["forward"]
        for hook in self._hooks:
            hook.remove()
        self._speculation.remove()
        del self.model.__dict__[MARK]
        _drop_leftovers(self.model)

    # ---- for the caches

    def register(self, sequences: Sequences) -> None:
        """Note a live cache."""
        self._warn_of_clamped()
        self._caches.add(sequences)

    def retire(self, holding: Holding) -> None:
        """A cache died. This runs wherever garbage is collected, even while a graph is traced: no tensor work here."""
        narrowest = self.config.read_format or self.config.checkpoint_format
        if holding.pool is not None and FORMATS[narrowest].bits_per_element < 32:
            self._clamped.append(holding.pool.cursor.saturated)

    def _warn_of_clamped(self) -> None:
        clamped = sum(int(counts.sum()) for counts in self._clamped)
        self._clamped.clear()
        if clamped:
            warnings.warn(saturation_message(self.config, clamped), SaturationWarning, stacklevel=3)

    def allocate(self, slots: int, dtype: torch.dtype, device: torch.device, *, rollback: bool = False) -> StatePool:
        """A pool for one cache, with the weights as they are now; `rollback` as in `Sequences`."""
        layouts = self._layouts(dtype, rolling_back(self.config) if rollback else self.config)
        tally = self._tallies.get((layouts, device))
        if tally is None:
            tally = self._tallies[layouts, device] = torch.zeros(5, dtype=torch.int64, device=device)
        states = [
            LayerState.allocate(layout, slots, device, layer.binding.params(layer.mixer))
            for layer, layout in zip(self.layers, layouts, strict=True)
        ]
        return StatePool(states, tally)

    def _layouts(self, dtype: torch.dtype, config: ReplayConfig) -> tuple[StateLayout, ...]:
        return tuple(StateLayout(layer.recurrence, layer.geometry, config, dtype) for layer in self.layers)

    # ---- for the mixers

    def install(self) -> None:
        """Change the model instance. Nothing that can fail comes after the first change."""
        forwards = [self.forward_of(ordinal) for ordinal in range(len(self.layers))]
        for layer, forward in zip(self.layers, forwards, strict=True):
            layer.mixer.__dict__["forward"] = types.MethodType(forward, layer.mixer)
        first = self.layers[0]
        if first.index > 0:
            # layers before the first recurrent one would have grown their part of a cache that is then refused
            blocks, number = re.split(r"\.(\d+)\.", first.name, maxsplit=1)[:2]
            before = self.model.get_submodule(f"{blocks}.{int(number) - first.index}")
            self._hooks.append(before.register_forward_pre_hook(self._check_early, with_kwargs=True))
        self._speculation.install()
        self.model.__dict__[MARK] = self
        _drop_leftovers(self.model)

    def forward_of(self, ordinal: int) -> Callable[..., Any]:
        """The forward that a mixer instance gets: the class's own, run inside a step of the cache's sequences."""
        layer = self.layers[ordinal]
        inner = rebound_forward(layer)
        name, position = argument(inner, "cache", "cache_params")
        mask_name, mask_position = argument(inner, "attention_mask")

        def forward(mixer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            cache = kwargs[name] if name in kwargs else args[position] if len(args) > position else None
            mask = kwargs.get(mask_name, args[mask_position] if len(args) > mask_position else None)
            if cache is None:
                return inner(mixer, *args, **kwargs)
            hidden = args[0] if args else kwargs["hidden_states"]
            sequences = self._sequences_of(layer, cache, hidden)
            if sequences is None:
                return inner(mixer, *args, **kwargs)
            sequences.enter(ordinal, hidden)
            try:
                if self._fuses(ordinal, sequences, mask):
                    out = fused_forward(layer, sequences, ordinal, hidden, mask)
                else:
                    out = inner(mixer, *args, **kwargs)
                sequences.leave()
            except BaseException as error:
                sequences.fail(f"{type(error).__name__}: {error}")
                raise
            return out

        return forward

    def _fuses(self, ordinal: int, sequences: Sequences, mask: Tensor | None) -> bool:
        """Whether a layer's step runs `flow.mix`: it does on the kernels, and where it is asked to."""
        if self.unfused[ordinal] is not None or not sequences.only_ring:
            return False
        mixer = self.layers[ordinal].binding.mixer
        if mask is not None and (mixer is None or not mixer.masks_inputs):
            return False
        if not (self.fused is True or sequences.pool.backend == "triton"):
            return False
        return unchanged(self.layers[ordinal], self._known[ordinal])

    def _sequences_of(self, layer: RecurrentLayer, cache: Cache, hidden: Tensor) -> Sequences | None:
        """The sequences of a cache that a forward over `hidden` [B, T, width] brings to a layer.

        None for a first forward with gradients: it may fill a cache that nobody continues, and runs as without us.
        """
        if torch.is_grad_enabled() and (hidden.requires_grad or any(p.requires_grad for p in layer.mixer.parameters())):
            if not is_plain_and_empty(cache, layer):
                raise RuntimeError(
                    "an attached model has no gradients through its recurrent state: run forwards with a cache under "
                    "torch.no_grad(), train with use_cache=False, or detach the model"
                )
            return None
        return admit(self, cache, hidden.shape[0])

    def _check_early(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
        if cache is None:
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        sequences = self._sequences_of(self.layers[0], cache, hidden)
        if sequences is not None:
            sequences.require_ready(hidden)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        raise TypeError("an attached model cannot be copied: detach it, copy it, and attach both")


def attach(model: nn.Module, config: ReplayConfig, fused: bool | None = None) -> Attached:
    """See `replayssm.attach`."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"attach takes a transformers model, got {type(model).__name__}")
    if not isinstance(config, ReplayConfig):
        raise TypeError(f"config must be a ReplayConfig, got {type(config).__name__}")
    if fused is not None and not isinstance(fused, bool):
        raise TypeError(f"fused must be True, False or None, got {fused!r}")
    layers = find_layers(model)
    for layer in layers:
        if "forward" in layer.mixer.__dict__:
            raise ValueError(
                f"{layer.name} has a forward of its own already: the model is attached already (detach it first), or "
                "something else, such as accelerate's offloading, has replaced it"
            )
    attached = Attached(model, config, layers, fused)
    attached.describe()  # sizes every layer, so that what does not fit is refused here
    for sentence in attached.explain_mixers():
        _log.info(sentence)
    attached.install()
    return attached


def detach(model: nn.Module) -> None:
    """See `replayssm.detach`."""
    attached = getattr(model, "__dict__", {}).get(MARK)
    if attached is None:
        raise ValueError(f"this {type(model).__name__} is not attached")
    attached.detach()


def _drop_leftovers(model: nn.Module) -> None:
    """What `generate` keeps for its next call was made for the other forward."""
    for name in ("_compiled_call", "_last_compile_config", "_cache"):
        model.__dict__.pop(name, None)


def _ranges(indices: list[int]) -> str:
    """ "0-2, 4" for [0, 1, 2, 4]."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] + 1 == index:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
