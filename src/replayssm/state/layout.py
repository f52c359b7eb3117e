"""The only file that sizes anything: ring rows, carry rows, every tensor of a slot, and the bytes of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from replayssm.config import ReplayConfig
from replayssm.recurrences.base import Field, Geometry, Recurrence
from replayssm.state.formats import FORMATS, Format

PAGE_ALIGNMENT_BYTES = 128  # every tensor of a page starts on a cache line, so that vector loads stay aligned


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a slot: its name in the pool, shape and dtype for one slot, and what it is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    meaning: str
    head_major: bool = False

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """[slots, *shape] of contiguous `storage` [slots, elements].

        Ring fields lie in memory as [heads, rows, ...]: what a kernel reads of one head is then one contiguous piece,
        where [rows, heads, ...] would scatter it in pieces of one row.
        """
        if not self.head_major:
            return storage.unflatten(1, self.shape)
        rows, heads, *rest = self.shape
        return storage.unflatten(1, (heads, rows, *rest)).transpose(1, 2)

    @property
    def bytes(self) -> int:
        """Bytes for one slot."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateLayout:
    """What one recurrent layer keeps per slot.

    Args:
        recurrence: what is replayed.
        geometry: the layer's sizes.
        config: how it is kept.
        model_dtype: dtype of the layer's activations, in which ring fields marked "model" and the carry are stored.
    """

    recurrence: Recurrence
    geometry: Geometry
    config: ReplayConfig
    model_dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.model_dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"model_dtype must be a floating dtype of 16, 32 or 64 bits, got {self.model_dtype}")
        if self.recurrence.decay == "channel" and self.geometry.heads != self.geometry.key_heads:
            raise ValueError(
                f"{self.recurrence.title} decays each key channel of each head: heads {self.geometry.heads} must equal "
                f"key_heads {self.geometry.key_heads}"
            )
        _ = self.tensors  # a format that cannot hold this geometry says so now

    # ---- formats and dtypes

    @property
    def checkpoint_format(self) -> Format:
        return FORMATS[self.config.checkpoint_format]

    @property
    def read_format(self) -> Format | None:
        return None if self.config.read_format is None else FORMATS[self.config.read_format]

    @property
    def compute_dtype(self) -> torch.dtype:
        """fp32; fp64 when the checkpoint is fp64 (for verification)."""
        return torch.float64 if self.config.checkpoint_format == "fp64" else torch.float32

    def dtype_of(self, field: Field) -> torch.dtype:
        """Storage dtype of a field."""
        return self.model_dtype if field.dtype == "model" else self.compute_dtype

    # ---- rows

    @property
    def ring_rows(self) -> int:
        """Physical ring rows: a full window beside the tokens of one step (one row fewer loses a record)."""
        return self.config.window + self.config.verify_len

    @property
    def conv_lag(self) -> int:
        """Earlier inputs that one output of the convolution needs."""
        return self.geometry.conv_width - 1

    @property
    def carry_rows(self) -> int:
        """Physical carry rows: the lag beside one step's tokens, or beside everything in the ring."""
        return self.conv_lag + (self.ring_rows if self.config.carry_history else self.config.verify_len)

    @property
    def carry_kept(self) -> int:
        """Committed carry rows that survive any step: those that the step's tokens do not overwrite."""
        return self.carry_rows - self.config.verify_len

    # ---- tensors

    @property
    def ring_fields(self) -> tuple[Field, ...]:
        """Fields of the ring under this configuration."""
        return self.recurrence.ring_fields(read_copy=self.config.read_format is not None)

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor of one slot, in page order: checkpoint, read copy, ring fields, carry."""
        specs = [
            TensorSpec(f"checkpoint{suffix}", shape, dtype, "state at the last flush")
            for suffix, (shape, dtype) in self.checkpoint_format.parts(self.geometry.state_shape).items()
        ]
        if self.read_format is not None:
            specs += [
                TensorSpec(f"read_copy{suffix}", shape, dtype, "copy of the checkpoint that outputs read")
                for suffix, (shape, dtype) in self.read_format.parts(self.geometry.state_shape).items()
            ]
        specs += [
            TensorSpec(
                f"ring.{field.name}",
                (self.ring_rows, *field.shape(self.geometry)),
                self.dtype_of(field),
                f"recent tokens: {field.meaning}",
                head_major=True,
            )
            for field in self.ring_fields
        ]
        if self.geometry.conv_channels:
            shape = (self.carry_rows, self.geometry.conv_channels)
            specs.append(TensorSpec("carry.conv", shape, self.model_dtype, "recent inputs of the convolution"))
        return tuple(specs)

    @cached_property
    def page_offsets(self) -> dict[str, int]:
        """Byte offset of each tensor in a slot's page."""
        offsets, at = {}, 0
        for spec in self.tensors:
            offsets[spec.name] = at
            at += -(-spec.bytes // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES
        return offsets

    @property
    def page_bytes(self) -> int:
        """Bytes of one slot of this layer when its tensors lie together in one page, alignment included."""
        last = self.tensors[-1]
        return -(-(self.page_offsets[last.name] + last.bytes) // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of this layer, without alignment."""
        return sum(spec.bytes for spec in self.tensors)

    def bytes_of(self, kind: str) -> int:
        """Bytes of one slot in the tensors of a kind: "checkpoint", "read_copy", "ring" or "carry"."""
        return sum(spec.bytes for spec in self.tensors if spec.name.split(".")[0] == kind)

    # ---- bytes moved

    @property
    def record_bytes(self) -> int:
        """Bytes of one ring row, all fields."""
        return self.bytes_of("ring") // self.ring_rows

    @property
    def io_bytes(self) -> int:
        """Bytes of the layer's inputs and outputs for one token: activations, and what must be exact."""
        inputs = (math.prod(f.shape(self.geometry)) * self.dtype_of(f).itemsize for f in self.recurrence.inputs)
        return self.geometry.heads * self.geometry.value_dim * self.model_dtype.itemsize + sum(inputs)

    @property
    def read_bytes(self) -> int:
        """State bytes that one row reads for its outputs in one step: the read copy, or else the checkpoint."""
        return self.bytes_of("read_copy") or self.bytes_of("checkpoint")

    @property
    def ordinary_bytes(self) -> int:
        """State bytes that ordinary decoding reads, and writes, per token: the state in the checkpoint's format."""
        return self.bytes_of("checkpoint")

    def traffic(self, tally: Tally) -> Traffic:
        """State and ring bytes of the steps counted in `tally`, beside those of ordinary decoding."""
        record, checkpoint = self.record_bytes, self.bytes_of("checkpoint")
        # a due row reads the checkpoint to fold it; its outputs then use what it has in hand
        read = (tally.row_steps - tally.flushes) * self.read_bytes + tally.flushes * checkpoint
        read += (tally.history_records + tally.folded_records) * record
        written = tally.flushes * (checkpoint + self.bytes_of("read_copy")) + tally.new_records * record
        ordinary = tally.new_records * self.ordinary_bytes
        return Traffic(read, written, ordinary, ordinary, tally.new_records)


_NUMBERED: list[StateLayout] = []


def number_of(layout: StateLayout) -> int:
    """A number that names this layout in this process, for operators that take only tensors and numbers."""
    if layout not in _NUMBERED:
        _NUMBERED.append(layout)
    return _NUMBERED.index(layout)


def numbered(number: int) -> StateLayout:
    """The layout that `number_of` gave this number."""
    return _NUMBERED[number]


@dataclass(frozen=True)
class Tally:
    """Counts of what a pool's steps did, the same for every layer.

    Args:
        row_steps: rows with at least one token or a flush, summed over steps.
        new_records: tokens written to the ring.
        history_records: committed records read for outputs.
        flushes: rows that folded at least one record.
        folded_records: records folded.
    """

    row_steps: int
    new_records: int
    history_records: int
    flushes: int
    folded_records: int


@dataclass(frozen=True)
class Traffic:
    """Bytes of recurrent state and ring moved, beside what ordinary decoding of the same tokens would move."""

    read_bytes: int
    written_bytes: int
    ordinary_read_bytes: int
    ordinary_written_bytes: int
    tokens: int

    def __add__(self, other: Traffic) -> Traffic:
        """Sum over layers; the tokens are those of one layer."""
        return Traffic(
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
            self.ordinary_read_bytes + other.ordinary_read_bytes,
            self.ordinary_written_bytes + other.ordinary_written_bytes,
            max(self.tokens, other.tokens),
        )
