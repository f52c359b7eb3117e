"""From a layer, a step and its inputs to one launch of a template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import triton
from torch import Tensor

from replayssm.kernels.verify import ALL_ROWS, FLUSH_ROWS, STEP_ROWS, verify_kernel
from replayssm.recurrences.base import Geometry, Recurrence
from replayssm.recurrences.triton_form import TritonForm
from replayssm.state.pool import LayerState

FLUSH_PROGRAMS = 132 * 8  # programs of a flush launch: what an H200 holds at once; a second wave would only wait


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
    tiles: int = 1
    num_stages: int = 1


@dataclass(frozen=True)
class Choice:
    """The launches of one verify.

    Args:
        step: tile of the only launch, or of the one for rows that are not due when `flush` is set.
        flush: tile of a second launch for the rows that are due. Two launches keep the registers that a fold needs
            out of the common path, which pays at large batches.
    """

    step: Tile
    flush: Tile | None = None


def form_of(recurrence: Recurrence) -> TritonForm:
    """The recurrence's Triton form, from its own folder."""
    package = type(recurrence).__module__.rsplit(".", 1)[0]
    form: TritonForm = import_module(f"{package}.triton").TRITON
    return form


def constants(recurrence: Recurrence, geometry: Geometry, form: TritonForm, tokens: int, ring_rows: int, window: int,
              tile: Tile, mode: int) -> dict[str, Any]:  # fmt: skip
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
        "TILES": tile.tiles,
        "STAGES": tile.num_stages,
        "MODE": mode,
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


def launch_verify(layer: LayerState, plan: Tensor, inputs: Mapping[str, Tensor], y: Tensor, choice: Choice) -> None:
    """Run `verify_kernel` on one layer.

    Args:
        layer: the layer; its state and the innermost dim of its ring fields must be contiguous.
        plan: int64 [B, 8], see `kernels.verify`.
        inputs: [B, T, ...], contiguous within a token.
        y: [B, T, H, P], contiguous within a token; written.
        choice: tiles of the launches.
    """
    if choice.flush is None:
        _launch(layer, plan, inputs, y, choice.step, ALL_ROWS.value)
    else:
        _launch(layer, plan, inputs, y, choice.step, STEP_ROWS.value)
        _launch(layer, plan, inputs, y, choice.flush, FLUSH_ROWS.value)


def _launch(layer: LayerState, plan: Tensor, inputs: Mapping[str, Tensor], y: Tensor, tile: Tile, mode: int) -> None:
    layout = layer.layout
    geometry, form = layout.geometry, form_of(layout.recurrence)
    rows, tokens = y.shape[:2]
    parts = triton.cdiv(geometry.value_dim, tile.block_p) // tile.tiles * (geometry.heads // tile.heads)
    programs = rows * parts
    if mode == FLUSH_ROWS.value:
        programs = min(programs, FLUSH_PROGRAMS)
    state = layer.tensors["checkpoint"]

    def strided(tensor: Tensor) -> tuple[Tensor, int, int]:
        return tensor, tensor.stride(0), tensor.stride(1)

    def ring(name: str) -> tuple[Tensor, int, int, int]:
        tensor = layer.tensors[f"ring.{name}"]
        return tensor, tensor.stride(0), tensor.stride(1), tensor.stride(2)

    verify_kernel[(programs,)](
        plan.stride(0),
        plan,
        state,
        state.stride(0),
        ring(form.key_ring),
        ring(form.write_ring),
        tuple(ring(name) for name in form.ring),
        strided(inputs[form.key]),
        strided(inputs[form.query]),
        strided(inputs[form.value]),
        tuple(strided(inputs[name]) for name in form.inputs),
        tuple(layer.params[name] for name in form.params),
        strided(y),
        **constants(layout.recurrence, geometry, form, tokens, layout.ring_rows, layout.config.window, tile, mode),
        num_warps=tile.num_warps,
    )
