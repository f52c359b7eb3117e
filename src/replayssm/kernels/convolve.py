"""The causal convolution of a step, and beside it the gates of its tokens: the launch in front of a `verify`.

Tokens read the carry and their step's inputs, and write their own inputs into the carry. A carry has rows for a whole
step beside what the step reads (`state/layout.py`), so no program stores where another one still loads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels.launch import form_of, overlaps, processors, run
from replayssm.kernels.plan import POSITION, SLOT, TOKENS, TREE
from replayssm.kernels.prefetch import earlier_done
from replayssm.kernels.prepare import parent_of
from replayssm.state.layout import StateLayout

BLOCK, NUM_WARPS = 512, 4
"""Channels of a program, and its warps: vectors of 8 bytes a thread where channels have 16 bits."""

MAX_TOKENS = 4
"""Tokens of a program, at most; they share the weights."""

PROGRAMS = 8
"""Programs per multiprocessor that are enough: where there are more, a program takes several tokens."""

GATE_BLOCK = 512
"""Gates of a program."""


@triton.jit
def convolve_kernel(
    plan_row, plan, items, conv_programs, carry, x, weight, bias, y, gate_inputs, gate_params, gates,
    T: tl.constexpr, CHANNELS: tl.constexpr, OFFSETS: tl.constexpr, STARTS: tl.constexpr, TOTAL: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    CARRY_ROWS: tl.constexpr, SILU: tl.constexpr, IS_TREE: tl.constexpr, OVERLAP: tl.constexpr,
    GATE: tl.constexpr, GATES: tl.constexpr, GATE_BLOCK: tl.constexpr, CONSTANTS: tl.constexpr,
    H: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A program per ITEMS tokens and BLOCK channels, and with GATES some more per token and GATE_BLOCK gates.

    | argument | shape               | in/out | meaning                                                               |
    |----------|---------------------|--------|-----------------------------------------------------------------------|
    | plan     | [B, columns] int64  | in     | `state.plan.COLUMNS`; rows lie `plan_row` apart                       |
    | items, conv_programs |         |        | B * T; how many programs convolve                                     |
    | carry    | [slots, rows, C]    | in/out | inputs before the step: (pointer, slot, row and channel stride)       |
    | x        | tuple of [B, T, *]  | in     | inputs, side by side CHANNELS: (pointer, row, token, channel stride)  |
    | weight   | [C, WIDTH]          | in     | taps, oldest first: (pointer, channel and tap stride)                 |
    | bias     | [C]                 | in     | (pointer, stride), or () for none                                     |
    | y        | [B, T, C]           | out    | contiguous; zero on padded rows and tokens                            |
    | gate_inputs | tuple of [B, T, *] | in  | what the recurrence's `gate` takes: (pointer, row and token stride)   |
    | gate_params | tuple of pointers | in   | contiguous parameters that it takes                                   |
    | gates    | tuple of [B, T, *] fp32 | out | what it makes, contiguous                                            |

    The sum is fp32, rounded to the dtype of the weights, and so is the activation after it: as torch does it.
    """
    pid = tl.program_id(0)
    if GATES > 0 and pid >= conv_programs:
        earlier_done(OVERLAP)
        gate_block(
            pid - conv_programs, gate_inputs, gate_params, gates, T, GATE, GATES, GATE_BLOCK, CONSTANTS, H, N
        )  # fmt: skip
        return
    block = pid % BLOCKS
    first = (pid // BLOCKS).to(tl.int64) * ITEMS
    for part in tl.static_range(len(CHANNELS)):
        if (block >= STARTS[part]) & (block < STARTS[part + 1]):
            c = (block - STARTS[part]) * BLOCK + tl.arange(0, BLOCK)
            convolve_block(
                plan_row, plan, items, carry, x[part], weight, bias, y, first, c, OFFSETS[part] + c,
                c < CHANNELS[part], T, TOTAL, BLOCK, ITEMS, WIDTH, TAPS, CARRY_ROWS, SILU, IS_TREE, OVERLAP,
            )  # fmt: skip


@triton.jit
def gates_kernel(
    gate_inputs, gate_params, gates,
    T: tl.constexpr, GATE: tl.constexpr, GATES: tl.constexpr, GATE_BLOCK: tl.constexpr, CONSTANTS: tl.constexpr,
    H: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gates alone, where somebody else has convolved: a program per token and GATE_BLOCK gates."""
    gate_block(tl.program_id(0), gate_inputs, gate_params, gates, T, GATE, GATES, GATE_BLOCK, CONSTANTS, H, N)


@triton.jit
def gate_block(
    program, gate_inputs, gate_params, gates,
    T: tl.constexpr, GATE: tl.constexpr, GATES: tl.constexpr, GATE_BLOCK: tl.constexpr, CONSTANTS: tl.constexpr,
    H: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (GATES + GATE_BLOCK - 1) // GATE_BLOCK
    item = (program // blocks).to(tl.int64)
    e = program % blocks * GATE_BLOCK + tl.arange(0, GATE_BLOCK)
    GATE(gate_inputs, gate_params, gates, item // T, item % T, item, e, e < GATES, CONSTANTS, H, N)


@triton.jit
def convolve_block(
    plan_row, plan, items, carry, x, weight, bias, y, first, c, all_c, mask,
    T: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr, WIDTH: tl.constexpr,
    TAPS: tl.constexpr, CARRY_ROWS: tl.constexpr, SILU: tl.constexpr, IS_TREE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Channels `c` of a part, which are `all_c` of all of them, of ITEMS tokens from the step's `first` on."""
    j = tl.arange(0, TAPS)
    taps_at = weight[0] + all_c[:, None] * weight[1] + j[None, :] * weight[2]
    taps = tl.load(taps_at, mask=mask[:, None] & (j < WIDTH)[None, :], other=0)
    before = tl.zeros([BLOCK], tl.float32)
    if len(bias) > 0:
        before += tl.load(bias[0] + all_c * bias[1], mask=mask, other=0).to(tl.float32)
    earlier_done(OVERLAP)  # no launch of a step writes weights
    for i in tl.static_range(ITEMS):
        # masks and no branches, so that the loads of all tokens are under way at once
        item = first + i
        inside = item < items
        b, t = item // T, item % T
        row = plan + b * plan_row
        slot = tl.load(row + SLOT, mask=inside, other=-1)
        live = (slot >= 0) & (t < tl.load(row + TOKENS, mask=inside, other=0))
        position = tl.load(row + POSITION, mask=live, other=0)
        x_at = x[0] + b * x[1] + c * x[3]
        carry_at = carry[0] + slot * carry[1] + all_c * carry[3]
        own = tl.load(x_at + t * x[2], mask=mask & live, other=0)
        total = before
        # where a tap's input is: a token of the step from 0 on, and one before it below
        source = t
        if IS_TREE:
            tree = tl.load(row + TREE, mask=live, other=0)
        for back in tl.static_range(1, WIDTH):
            if IS_TREE:
                source = tl.where(source < 0, source - 1, parent_of(tree, tl.maximum(source, 0)))
            else:
                source -= 1
            at = position + source
            kept = live & (source < 0) & (at >= 0)
            value = tl.load(carry_at + at % CARRY_ROWS * carry[2], mask=mask & kept, other=0).to(tl.float32)
            if T > 1:
                fresh = live & (source >= 0)
                value += tl.load(x_at + source * x[2], mask=mask & fresh, other=0).to(tl.float32)
            total += value * tap(taps, j, WIDTH - 1 - back)
        total += own.to(tl.float32) * tap(taps, j, WIDTH - 1)
        rounded = total.to(weight[0].dtype.element_ty)
        if SILU:
            wide = rounded.to(tl.float32)
            rounded = (wide / (1.0 + tl.exp(-wide))).to(weight[0].dtype.element_ty)
        out = tl.where(live, rounded.to(tl.float32), 0.0)
        tl.store(y + item * TOTAL + all_c, out.to(y.dtype.element_ty), mask=mask & inside)
        tl.store(carry_at + (position + t) % CARRY_ROWS * carry[2], own, mask=mask & live)


@triton.jit
def tap(taps, j, number: tl.constexpr):
    """The weights [BLOCK] of one tap of `taps` [BLOCK, TAPS]."""
    return tl.sum(tl.where((j == number)[None, :], taps.to(tl.float32), 0.0), 1)


@cache
def constants(
    layout: StateLayout,
    tokens: int,
    channels: tuple[int, ...],
    items_each: int,
    activation: str | None,
    overlap: bool,
    is_tree: bool,
    gates: int = 0,
    gate_constants: tuple[float, ...] = (),
) -> dict[str, Any]:
    """Compile-time arguments of `convolve_kernel`; `gates` is how many a token has, 0 without any."""
    geometry = layout.geometry
    return {
        "CHANNELS": channels,
        "OFFSETS": tuple(accumulate(channels, initial=0))[:-1],
        "TOTAL": sum(channels),
        "STARTS": tuple(accumulate((triton.cdiv(part, BLOCK) for part in channels), initial=0)),
        "BLOCKS": sum(triton.cdiv(part, BLOCK) for part in channels),
        "BLOCK": BLOCK,
        "ITEMS": items_each,
        "WIDTH": geometry.conv_width,
        "TAPS": triton.next_power_of_2(geometry.conv_width),
        "CARRY_ROWS": layout.carry_rows,
        "SILU": activation is not None,
        "IS_TREE": is_tree,
        "OVERLAP": overlap,
        **gate_constexprs(layout, tokens, gates, gate_constants),
    }


def gate_constexprs(layout: StateLayout, tokens: int, gates: int, gate_constants: tuple[float, ...]) -> dict[str, Any]:
    """Compile-time arguments of `gates_kernel`, which makes `gates` numbers a token."""
    return {
        "T": tokens,
        "GATE": form_of(layout.recurrence).gate if gates else None,
        "GATES": gates,
        "GATE_BLOCK": GATE_BLOCK,
        "CONSTANTS": gate_constants,
        "H": layout.geometry.heads,
        "N": layout.geometry.key_dim,
    }


def tokens_each(items: int, blocks: int, device: torch.device) -> int:
    """Tokens of a program: one, until there are more programs than the device runs at once."""
    spare = items * blocks // (PROGRAMS * processors(device))
    return min(MAX_TOKENS, 1 << max(1, spare).bit_length() - 1)


def launch_convolve(
    layout: StateLayout,
    carry: Tensor,
    plan: Tensor,
    x: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    y: Tensor,
    *,
    gate_inputs: Sequence[Tensor] = (),
    gate_params: Sequence[Tensor] = (),
    gate_constants: Sequence[float] = (),
    gates: Sequence[Tensor] = (),
    is_tree: bool = False,
) -> None:
    """Run the convolution of a layer's step, and its gates where there are any; see `convolve_kernel`."""
    rows, tokens, _ = y.shape
    items = rows * tokens
    if not items:
        return
    overlap = overlaps(y.device)
    channels = tuple(part.shape[2] for part in x)
    per_token = _per_token(gates)
    blocks = sum(triton.cdiv(part, BLOCK) for part in channels)
    each = tokens_each(items, blocks, y.device)
    given = {
        "plan_row": plan.stride(0),
        "plan": plan,
        "items": items,
        "conv_programs": triton.cdiv(items, each) * blocks,
        "carry": (carry, *carry.stride()),
        "x": tuple((part, *part.stride()) for part in x),
        "weight": (weight, *weight.stride()),
        "bias": () if bias is None else (bias, bias.stride(0)),
        "y": y,
        **_gate_arguments(gate_inputs, gate_params, gates),
    }
    programs = given["conv_programs"] + items * triton.cdiv(per_token, GATE_BLOCK)
    fixed = constants(layout, tokens, channels, each, activation, overlap, is_tree, per_token, tuple(gate_constants))
    early: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    run(convolve_kernel, programs, given, fixed, num_warps=NUM_WARPS, **early)


def launch_gates(
    layout: StateLayout,
    gate_inputs: Sequence[Tensor],
    gate_params: Sequence[Tensor],
    gate_constants: Sequence[float],
    gates: Sequence[Tensor],
) -> None:
    """Run the gates of a layer's step alone: `gates` [B, T, *] of `gate_inputs` [B, T, *]; see `gates_kernel`."""
    rows, tokens = gates[0].shape[:2]
    per_token = _per_token(gates)
    programs = rows * tokens * triton.cdiv(per_token, GATE_BLOCK)
    if programs:
        fixed = gate_constexprs(layout, tokens, per_token, tuple(gate_constants))
        run(gates_kernel, programs, _gate_arguments(gate_inputs, gate_params, gates), fixed, num_warps=NUM_WARPS)


def _gate_arguments(
    gate_inputs: Sequence[Tensor], gate_params: Sequence[Tensor], gates: Sequence[Tensor]
) -> dict[str, Any]:
    return {
        "gate_inputs": tuple((part, part.stride(0), part.stride(1)) for part in gate_inputs),
        "gate_params": tuple(gate_params),
        "gates": tuple(gates),
    }


def _per_token(gates: Sequence[Tensor]) -> int:
    return max((math.prod(gate.shape[2:]) for gate in gates), default=0)
