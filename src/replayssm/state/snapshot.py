"""A slot as bytes, and back: preemption to another machine, off-load, transfer.

The payload is a safetensors file (named tensors and a text header), so that it can be read without this library. Rows
are stored in logical order, oldest first, and only those that mean something; a snapshot does not depend on the slot,
the ring's origin or the window of the pool that made it. Pending rows are dropped.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from replayssm.state.cursor import carry_row, ring_row
from replayssm.state.layout import StateLayout
from replayssm.state.pool import StatePool

FORMAT_VERSION = 3


class SnapshotError(ValueError):
    """The bytes are no snapshot that this pool can take; the pool is unchanged."""


def snapshot(pool: StatePool, slot: int) -> bytes:
    """Everything committed to `slot`, as bytes (waits for the device)."""
    pool.slots.require_live(slot)
    counters = pool.cursor.get(slot)
    length, position = counters["length"], counters["position"]
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(pool.layers):
        start = torch.tensor(counters["start"])
        ring_rows = ring_row(start, torch.arange(length), pool.ring_rows)
        carry_rows = _carry_rows(layer.layout, position, min(position, layer.layout.carry_kept))
        for name, tensor in layer.tensors.items():
            if name.startswith("ring."):
                value = tensor[slot][ring_rows.to(tensor.device)]
            elif name.startswith("carry."):
                value = tensor[slot][carry_rows.to(tensor.device)]
            elif position == length:
                continue  # the checkpoint is empty and its memory undefined
            else:
                value = tensor[slot]
            tensors[f"layers.{index}.{name}"] = value.contiguous().cpu().clone()
    payload = save_safetensors(tensors)
    header: dict[str, Any] = {
        "format": "replayssm-snapshot",
        "version": FORMAT_VERSION,
        "length": length,
        "position": position,
        "saturated": counters["saturated"],
        "seed": counters["seed"],
        "layers": [_identity(layer.layout) for layer in pool.layers],
    }
    header["sha256"] = hashlib.sha256(payload + _canonical(header)).hexdigest()
    text = json.dumps(header, sort_keys=True).encode()
    return len(text).to_bytes(8, "little") + text + payload


def restore(pool: StatePool, data: bytes, slot: int | None = None) -> int:
    """Put a snapshot into a free slot (or the given one) and return it.

    Raises:
        SnapshotError: damaged bytes, a newer format, another model or geometry, or more records than the window
            holds. Nothing is acquired or written then.
        SlotError: no free slot, or `slot` is taken.
    """
    header, tensors = _parse(data)
    length, position = header["length"], header["position"]
    expected = [_identity(layer.layout) for layer in pool.layers]
    if header["layers"] != expected:
        raise SnapshotError(
            f"the snapshot is of another model or configuration: {_difference(header['layers'], expected)}"
        )
    if length > pool.config.window:
        raise SnapshotError(
            f"the snapshot has {length} records in its ring and this pool's window is {pool.config.window}; flush "
            "before taking the snapshot, or use a larger window"
        )
    writes: list[tuple[Tensor, Tensor | slice, Tensor]] = []
    for index, layer in enumerate(pool.layers):
        for name, tensor in layer.tensors.items():
            kind = name.split(".")[0]
            value = tensors.get(f"layers.{index}.{name}")
            if value is None:
                if kind in ("ring", "carry") or position > length:
                    raise SnapshotError(f"the snapshot lacks tensor {name!r} of layer {index}")
                continue
            rows: Tensor | slice = slice(None)
            whole, given = tuple(tensor.shape[1:]), tuple(value.shape)
            if kind == "ring":
                rows, whole = torch.arange(length), (length, *whole[1:])
            elif kind == "carry":
                kept = min(len(value), layer.layout.carry_kept)
                rows, whole = _carry_rows(layer.layout, position, kept), (len(value), *whole[1:])
                value = value[len(value) - kept :]
            if given != whole or value.dtype != tensor.dtype:
                raise SnapshotError(
                    f"tensor {name!r} of layer {index} is {value.dtype} {list(given)}, the pool needs "
                    f"{tensor.dtype} {list(whole)}"
                )
            writes.append((tensor, rows if isinstance(rows, slice) else rows.to(tensor.device), value))
    slot = pool.acquire(slot, seed=header["seed"])
    for tensor, rows, value in writes:
        tensor[slot][rows] = value.to(tensor.device)
    pool.cursor.set(slot, length=length, position=position, saturated=header["saturated"])
    return slot


def _identity(layout: StateLayout) -> dict[str, Any]:
    """What must agree for a snapshot to mean the same in another pool."""
    return {
        "recurrence": layout.recurrence.name,
        "geometry": asdict(layout.geometry),
        "model_dtype": str(layout.model_dtype),
        "checkpoint_format": layout.config.checkpoint_format,
        "read_format": layout.config.read_format,
        "rounding": layout.config.rounding,
        "carry_history": layout.config.carry_history,
    }


def _carry_rows(layout: StateLayout, position: int, kept: int) -> Tensor:
    """Physical rows of the newest `kept` committed carry rows, oldest first."""
    return carry_row(torch.arange(position - kept, position), layout.carry_rows)


def _parse(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
        if header["format"] != "replayssm-snapshot":
            raise ValueError
        version, checksum = header["version"], header["sha256"]
    except (ValueError, KeyError, TypeError):
        raise SnapshotError("these bytes are no ReplaySSM snapshot, or their header is damaged") from None
    if version != FORMAT_VERSION:
        raise SnapshotError(
            f"the snapshot has format version {version}, this library reads version {FORMAT_VERSION}; "
            "use the library that wrote it"
        )
    payload = data[8 + size :]
    if hashlib.sha256(payload + _canonical(header)).hexdigest() != checksum:
        raise SnapshotError("the snapshot is damaged: its checksum does not match")
    try:
        return header, load_safetensors(payload)
    except SafetensorError as error:
        raise SnapshotError(f"the snapshot's tensors cannot be read: {error}") from None


def _canonical(header: dict[str, Any]) -> bytes:
    """The header without its checksum, as the checksum covers it."""
    return json.dumps({k: v for k, v in header.items() if k != "sha256"}, sort_keys=True).encode()


def _difference(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> str:
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} layers, the pool {len(ours)}"
    for index, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        for key in b:
            if a.get(key) != b[key]:
                return f"layer {index} has {key} {a.get(key)}, the pool {b[key]}"
    return "the headers differ"
