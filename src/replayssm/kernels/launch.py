"""From a layer, a step and its inputs to one launch of a template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import triton
from torch import Tensor

from replayssm.kernels.verify import verify_kernel
from replayssm.recurrences.base import Geometry, Recurrence
from replayssm.recurrences.triton_form import TritonForm
from replayssm.state.pool import LayerState


@dataclass(frozen=True)
class Tile:
    """How a launch divides the work.

    Args:
        block_p: state columns of a program.
        heads: state heads of a program, a divisor of the heads of a key head.
        num_warps: warps of a program.
        num_stages: software pipelining depth of the loop over heads.
    """

    block_p: int
    heads: int = 1
    num_warps: int = 1
    num_stages: int = 2


def form_of(recurrence: Recurrence) -> TritonForm:
    """The recurrence's Triton form, from its own folder."""
    package = type(recurrence).__module__.rsplit(".", 1)[0]
    form: TritonForm = import_module(f"{package}.triton").TRITON
    return form


def constants(recurrence: Recurrence, geometry: Geometry, form: TritonForm, tokens: int, ring_rows: int, window: int,
              tile: Tile) -> dict[str, Any]:  # fmt: skip
    """Compile-time arguments of `verify_kernel`."""
    return {
        "H": geometry.heads,
        "G": geometry.key_heads,
        "N": geometry.key_dim,
        "P": geometry.value_dim,
        "T": tokens,
        "RING_ROWS": ring_rows,
        "NP": max(16, triton.next_power_of_2(geometry.key_dim)),
        "TP": 1 if tokens == 1 else 16,
        "WP": max(16, triton.next_power_of_2(window)),
        "BLOCK_P": tile.block_p,
        "HEADS": tile.heads,
        "DELTA": recurrence.delta_rule,
        "CHANNEL": recurrence.decay == "channel",
        "SKIP": form.skip,
        "RECORD_SCALES": form.record_scales,
        "RECORD_DECAY": form.record_decay,
        "TOKEN_DECAY": form.token_decay,
        "TOKEN_RATE": form.token_rate,
        "TOKEN_SKIP": form.token_skip,
        "KEY_SCALE": form.key_scale,
        "QUERY_SCALE": form.query_scale,
        "STORE_RECORD": form.store_record,
    }


def launch_verify(layer: LayerState, plan: Tensor, inputs: Mapping[str, Tensor], y: Tensor, tile: Tile) -> None:
    """Run `verify_kernel` on one layer.

    Args:
        layer: the layer; its tensors must be contiguous within a slot (any slot stride).
        plan: int64 [B, 6].
        inputs: [B, T, ...], contiguous within a token.
        y: [B, T, H, P], contiguous within a token; written.
        tile: division of the work.
    """
    layout = layer.layout
    geometry, form = layout.geometry, form_of(layout.recurrence)
    rows, tokens = y.shape[:2]
    tiles = triton.cdiv(geometry.value_dim, tile.block_p)
    grid = (rows * (geometry.heads // tile.heads) * tiles,)
    state = layer.tensors["checkpoint"]

    def strided(tensor: Tensor) -> tuple[Tensor, int, int]:
        return tensor, tensor.stride(0), tensor.stride(1)

    verify_kernel[grid](
        plan,
        plan.stride(0),
        state,
        state.stride(0),
        strided(layer.tensors[f"ring.{form.key_ring}"]),
        strided(layer.tensors[f"ring.{form.write_ring}"]),
        tuple(strided(layer.tensors[f"ring.{name}"]) for name in form.ring),
        strided(inputs[form.key]),
        strided(inputs[form.query]),
        strided(inputs[form.value]),
        tuple(strided(inputs[name]) for name in form.inputs),
        tuple(layer.params[name] for name in form.params),
        strided(y),
        **constants(layout.recurrence, geometry, form, tokens, layout.ring_rows, layout.config.window, tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


__all__ = ["Tile", "constants", "form_of", "launch_verify", "torch"]
