"""The pool: every tensor of every slot, allocated once, and the life cycle of its slots."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from replayssm.config import ReplayConfig
from replayssm.recurrences.base import Geometry, Recurrence
from replayssm.state import backend as backends
from replayssm.state.cursor import Cursor, first_window
from replayssm.state.formats import Format, stochastic
from replayssm.state.layout import StateLayout, Tally, Traffic, number_of
from replayssm.state.rows import put_rows
from replayssm.state.slots import PAD_SLOT, SlotTable


class SaturationWarning(UserWarning):
    """Values of a checkpoint or read copy left the range of their format and were clamped."""


def saturation_message(config: ReplayConfig, clamped: int) -> str:
    """What a `SaturationWarning` says of `clamped` elements."""
    checkpoint, read_copy = config.checkpoint_format, config.read_format
    if read_copy is None:
        what, advice = f"checkpoint elements were clamped to the range of {checkpoint}", "a wider checkpoint_format"
    else:
        what = f"elements of checkpoint ({checkpoint}) and read copy ({read_copy}) were clamped to their format's range"
        advice = "a wider read_format, or none,"
    return f"{clamped} {what}; use {advice} for this model"


@dataclass(frozen=True)
class LayerState:
    """The tensors of one layer, by name, with the slot as their first dim.

    Args:
        layout: sizes and formats.
        params: per-layer constants of the recurrence, in the compute dtype.
        tensors: name -> [slots, ...] as `layout.tensors` lists them; any strides.
        pages: uint8 [slots, page bytes] when `in_pages` laid the tensors out, else None.
    """

    layout: StateLayout
    params: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    pages: Tensor | None = None

    @classmethod
    def allocate(
        cls, layout: StateLayout, slots: int, device: torch.device | str, params: Mapping[str, Tensor] | None = None
    ) -> LayerState:
        """Own storage for `slots` slots. Memory is zeroed once; nothing relies on it afterwards."""
        tensors = {
            s.name: s.view(torch.zeros(slots, math.prod(s.shape), dtype=s.dtype, device=device)) for s in layout.tensors
        }
        return cls.of(layout, tensors, params)

    @classmethod
    def of(
        cls, layout: StateLayout, tensors: Mapping[str, Tensor], params: Mapping[str, Tensor] | None = None
    ) -> LayerState:
        """Use the caller's storage, which may be strided slices of something larger.

        Raises:
            ValueError: a tensor or parameter is missing, unknown, or has the wrong shape, dtype or device.
        """
        _require_names("tensor", tensors, [s.name for s in layout.tensors])
        first = tensors[layout.tensors[0].name]
        for spec in layout.tensors:
            tensor = tensors[spec.name]
            expected = (first.shape[0], *spec.shape)
            if tuple(tensor.shape) != expected or tensor.dtype != spec.dtype or tensor.device != first.device:
                raise ValueError(
                    f"tensor {spec.name!r} must be {spec.dtype} {list(expected)} on {first.device}, "
                    f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                )
        params = {} if params is None else params
        recurrence, geometry = layout.recurrence, layout.geometry
        _require_names("parameter", params, [f.name for f in recurrence.params])
        for field in recurrence.params:
            if tuple(params[field.name].shape) != field.shape(geometry):
                raise ValueError(
                    f"parameter {field.name!r} of {recurrence.title} must have shape {list(field.shape(geometry))}, "
                    f"got {list(params[field.name].shape)}"
                )
        raised = {n: p.detach().to(device=first.device, dtype=layout.compute_dtype) for n, p in params.items()}
        return cls(layout, raised, dict(tensors))

    @classmethod
    def in_pages(cls, layout: StateLayout, pages: Tensor, params: Mapping[str, Tensor] | None = None) -> LayerState:
        """Lay each slot's tensors out inside one page of an engine's cache.

        Args:
            layout: sizes and formats.
            pages: uint8 [slots, page bytes], inner dim contiguous, page bytes >= layout.page_bytes and, like the
                outer stride, a multiple of 8 so that every tensor is aligned.
            params: per-layer constants.
        """
        if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.stride(1) != 1:
            raise ValueError(
                f"pages must be uint8 [slots, bytes] with contiguous bytes, got {pages.dtype} {pages.shape}"
            )
        if pages.shape[1] < layout.page_bytes:
            raise ValueError(f"a page must have at least {layout.page_bytes} bytes, got {pages.shape[1]}")
        if pages.stride(0) % 8 or pages.data_ptr() % 8:
            raise ValueError(
                f"pages must start at multiples of 8 bytes, got a stride of {pages.stride(0)} bytes and a first page "
                f"{pages.data_ptr() % 8} bytes behind a multiple"
            )
        return replace(cls.of(layout, cls.views(layout, pages), params), pages=pages)

    @staticmethod
    def views(layout: StateLayout, pages: Tensor) -> dict[str, Tensor]:
        """The tensors of `layout` inside `pages`, by name."""
        found = {}
        for spec in layout.tensors:
            offset = layout.page_offsets[spec.name]
            found[spec.name] = spec.view(pages[:, offset : offset + spec.bytes].view(spec.dtype))
        return found

    @property
    def device(self) -> torch.device:
        return self.tensors["carry.conv" if "carry.conv" in self.tensors else self.layout.tensors[0].name].device

    def ring(self, slots: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Ring fields at physical `rows` [B, R] of `slots` [B] (padded rows read slot 0), each [B, R, ...]."""
        at = slots.clamp(min=0).unsqueeze(1)
        return {f.name: self.tensors[f"ring.{f.name}"][at, rows] for f in self.layout.ring_fields}

    def state(self, slots: Tensor, kind: str) -> Tensor:
        """The "checkpoint" or "read_copy" of `slots` [B], [B, H, N, P], raised; padded rows read slot 0."""
        form = self._format(kind)
        at = slots.clamp(min=0)
        parts = {s: self.tensors[kind + s][at] for s in form.parts(self.layout.geometry.state_shape)}
        return form.decode(parts, self.layout.compute_dtype)

    @property
    def read_kind(self) -> str:
        """Which tensor outputs read."""
        return "checkpoint" if self.layout.read_format is None else "read_copy"

    def _format(self, kind: str) -> Format:
        form = {"checkpoint": self.layout.checkpoint_format, "read_copy": self.layout.read_format}[kind]
        assert form is not None
        return form


class StatePool:
    """Slots for sequences, over all recurrent layers of one model.

    Args:
        layers: one per recurrent layer, in the order in which a step runs them; all with the same configuration,
            number of slots and device.
        tally: int64 [5] counts that several pools of one model may share; the pool's own by default.
        backend: "torch", "triton", or "auto": triton on a CUDA device when it supports every layer, else torch. One
            that is named works or raises.
        cursor: the counters of every slot, where they live elsewhere; the pool's own by default.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        tally: Tensor | None = None,
        *,
        backend: str = "auto",
        cursor: Cursor | None = None,
    ) -> None:
        if not layers:
            raise ValueError("a pool needs at least one layer")
        for a, b in pairwise(layers):
            if a.layout.config != b.layout.config:
                raise ValueError(f"layers of one pool must share their config: {a.layout.config} and {b.layout.config}")
            if a.device != b.device or self._slots_of(a) != self._slots_of(b):
                raise ValueError("layers of one pool must have the same number of slots on the same device")
        self.layers = tuple(layers)
        self.config: ReplayConfig = layers[0].layout.config
        self.ring_rows = layers[0].layout.ring_rows
        self.device = layers[0].device
        self.backend = backends.choose(backend, layers)
        self.layout_numbers = tuple(number_of(layer.layout) for layer in layers)
        self.slots = SlotTable(self._slots_of(layers[0]))
        self.cursor = Cursor.allocate(self.slots.slots, self.device) if cursor is None else cursor
        self.counts = torch.zeros(5, dtype=torch.int64, device=self.device) if tally is None else tally

    @classmethod
    def allocate(
        cls,
        recurrence: Recurrence,
        geometry: Geometry,
        config: ReplayConfig,
        *,
        slots: int,
        model_dtype: torch.dtype,
        device: torch.device | str = "cpu",
        params: Sequence[Mapping[str, Tensor]] = ({},),
        backend: str = "auto",
    ) -> StatePool:
        """A pool of equal layers, one for each entry of `params`."""
        layout = StateLayout(recurrence, geometry, config, model_dtype)
        return cls([LayerState.allocate(layout, slots, device, p) for p in params], backend=backend)

    # ---- life cycle

    def acquire(self, slot: int | None = None, *, seed: int = 0) -> int:
        """Take a free slot (or the given one) and reset it; `seed` as in `reset`."""
        slot = self.slots.acquire(slot)
        self.reset(slot, seed=seed)
        return slot

    def reset(self, slot: int, *, seed: int = 0) -> None:
        """Forget everything the slot held. Memory is left as it is: an empty checkpoint is never read.

        Args:
            slot: a live slot.
            seed: of the request that takes it, modulo 2^64: the same seed and tokens round to the same checkpoints.
        """
        self.slots.require_live(slot, allow_broken=True)
        window = self.config.window
        if self.config.stagger:
            window = first_window(self.slots.turns - 1, window, self.config.verify_len)
        self.cursor.set(slot, start=0, length=0, position=0, pending=0, window=window, saturated=0, seed=_wrapped(seed))
        self.slots.mend(slot)

    def release(self, slot: int) -> None:
        """Give the slot back; warns when its checkpoint or read copy had to clamp values."""
        self.slots.release(slot)
        self._warn_saturated(slot)

    def fork(self, src: int, dst: int | None = None, records: int | None = None) -> int:
        """Copy a sequence into a new slot: checkpoint, read copy, ring, carry and cursor. Pending rows are dropped.

        Args:
            src: a live slot.
            dst: the free slot to take, or None for any.
            records: keep only the oldest `records` committed records of the ring, which goes back in time; needs
                carry_history when the layers have a convolution.
        """
        self.slots.require_live(src)
        counters = self.cursor.get(src)
        length = counters["length"] if records is None else records
        self.require_reach(counters["length"], length)
        dst = self.slots.acquire(dst)
        self._copy_tensors(src, dst)
        self.cursor.copy(src, dst)
        back = counters["length"] - length
        self.cursor.set(dst, length=length, position=counters["position"] - back, pending=0)
        return dst

    def move(self, src: int, dst: int | None = None) -> int:
        """Put a sequence into another slot, its pending rows included; `src` is free afterwards."""
        self.slots.require_live(src)
        dst = self.slots.acquire(dst)
        self._copy_tensors(src, dst)
        self.cursor.copy(src, dst)
        self.slots.release(src)
        return dst

    def gather(self, index: Tensor) -> StatePool:
        """A pool of its own in which slot i continues what slot index[i] holds here, pending rows included.

        For batches whose rows are reordered, repeated or dropped (beam search): one copy per tensor instead of one
        fork per slot. This pool stays as it was; both count into one tally.

        Args:
            index: int64 [B], live slots of this pool; the same one may come several times.
        """
        sources = index.tolist()
        for slot in sources:
            self.slots.require_live(slot)
        layers = [
            LayerState(x.layout, x.params, {name: t.index_select(0, index) for name, t in x.tensors.items()})
            for x in self.layers
        ]
        pool = StatePool(layers, self.counts, backend=self.backend)
        for slot in range(len(sources)):
            pool.slots.acquire(slot)
        for name, counter in self.cursor.items():
            getattr(pool.cursor, name).copy_(counter[index])
        return pool

    # ---- writing

    def store(self, layer: int, slots: Tensor, state: Tensor, active: Tensor | None, tokens: Tensor) -> None:
        """Round a layer's `state` into its checkpoint, and what the checkpoint then holds into its read copy.

        Elements clamped to the range of either format are counted per slot.

        Args:
            layer: index into `layers`.
            slots: int64 [B].
            state: [B, H, N, P].
            active: bool [B], which rows are stored; None where the host knows that all are.
            tokens: int64 [B], the tokens that the state holds; they number the draws of stochastic rounding.
        """
        target, at = self.layers[layer], slots.clamp(min=0)
        layout, noise = target.layout, None
        if self.config.rounding == "stochastic":
            noise = stochastic.noise(self.cursor.seed[at], layer, tokens, layout.geometry.state_shape)
        for kind, form, random in (
            ("checkpoint", layout.checkpoint_format, noise),
            ("read_copy", layout.read_format, None),
        ):
            if form is None:
                continue
            clamped = form.saturated(state)
            self.cursor.saturated.index_add_(0, at, clamped if active is None else torch.where(active, clamped, 0))
            parts = form.encode(state, random)
            for suffix, part in parts.items():
                put_rows(target.tensors[f"{kind}{suffix}"], (slots,), part, active)
            state = form.decode(parts, state.dtype)

    # ---- accounting

    def count(self, row_steps: Tensor, new: Tensor, history: Tensor, flushes: Tensor, folded: Tensor) -> None:
        """Add one step's counts (0-d tensors) to the tally, without waiting for the device."""
        self.counts += torch.stack([row_steps, new, history, flushes, folded])

    @property
    def tally(self) -> Tally:
        """What the steps so far did (waits for the device)."""
        return Tally(*self.counts.tolist())

    def traffic(self) -> Traffic:
        """State bytes moved so far over all layers, beside those of ordinary decoding."""
        tally = self.tally
        total = Traffic(0, 0, 0, 0, 0)
        for layer in self.layers:
            total = total + layer.layout.traffic(tally)
        return total

    # ---- helpers

    def require_reach(self, length: int, records: int) -> None:
        """ValueError unless the carry reaches back to the state after the oldest `records` of `length` records."""
        if not 0 <= records <= length:
            raise ValueError(f"records must be in 0..{length} (the committed records in the ring), got {records}")
        has_conv = any(layer.layout.geometry.conv_channels for layer in self.layers)
        if records < length and has_conv and not self.config.carry_history:
            layout = self.layers[0].layout
            raise ValueError(
                f"going back {length - records} records needs the convolution inputs before them, but the carry has "
                f"{layout.carry_rows} rows; set carry_history=True, which keeps {layout.conv_lag + layout.ring_rows}"
            )

    def _copy_tensors(self, src: int, dst: int) -> None:
        for layer in self.layers:
            for tensor in layer.tensors.values():
                tensor[dst].copy_(tensor[src])

    def _warn_saturated(self, slot: int) -> None:
        # elsewhere reading the counter waits for the device, and only fp16 has a range that models leave
        if self.device.type == "cpu" or "fp16" in (self.config.checkpoint_format, self.config.read_format):
            clamped = int(self.cursor.saturated[slot])
            if clamped:
                message = f"slot {slot}: {saturation_message(self.config, clamped)}"
                warnings.warn(message, SaturationWarning, stacklevel=3)

    @staticmethod
    def _slots_of(layer: LayerState) -> int:
        return layer.tensors[layer.layout.tensors[0].name].shape[0]


def _require_names(kind: str, given: Mapping[str, Tensor], expected: Sequence[str]) -> None:
    missing, unknown = [n for n in expected if n not in given], [n for n in given if n not in expected]
    if missing or unknown:
        raise ValueError(
            f"{kind}s must be exactly {list(expected)}"
            + (f"; missing: {missing}" if missing else "")
            + (f"; unknown: {unknown}" if unknown else "")
        )


def _wrapped(seed: int) -> int:
    """The int64 of the same bits."""
    return (seed + 2**63) % 2**64 - 2**63


__all__ = ["PAD_SLOT", "LayerState", "SaturationWarning", "StatePool"]
