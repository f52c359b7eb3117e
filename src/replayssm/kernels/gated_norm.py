"""The norm and the gate behind a `verify`: the last launch of a mixer's step, in front of the output projection."""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from replayssm.kernels.launch import overlaps, run

ELEMENTS = 1024
"""Elements of a program that has several groups."""


@triton.jit
def gated_norm_kernel(
    y, z, weight, out,
    T: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, SP: tl.constexpr, GP: tl.constexpr,
    NORM: tl.constexpr, SHARED: tl.constexpr, EPS: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program per token and GP of its groups. `recurrences.mixer.Norm` says what is computed; fp32, rounded once.

    | argument | shape                  | in/out | meaning                                              |
    |----------|------------------------|--------|------------------------------------------------------|
    | y        | [B, T, GROUPS * SIZE]  | in     | outputs of the recurrence, contiguous                |
    | z        | [B, T, GROUPS * SIZE]  | in     | (pointer, row and token stride)                      |
    | weight   | [GROUPS * SIZE]        | in     | contiguous; [SIZE] when SHARED; with NORM            |
    | out      | [B, T, GROUPS * SIZE]  | out    | contiguous                                           |
    """
    blocks: tl.constexpr = (GROUPS + GP - 1) // GP
    item = (tl.program_id(0) // blocks).to(tl.int64)
    g = tl.program_id(0) % blocks * GP + tl.arange(0, GP)[:, None]
    s = tl.arange(0, SP)[None, :]
    mask = (g < GROUPS) & (s < SIZE)
    e = g * SIZE + s
    # z and the weights were there before the launch in front of this one began, y is what it computes
    raw = tl.load(z[0] + item // T * z[1] + item % T * z[2] + e, mask=mask, other=0).to(tl.float32)
    scale = raw
    if NORM:
        scale = tl.load(weight + (s if SHARED else e), mask=mask, other=0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    value = tl.load(y + item * (GROUPS * SIZE) + e, mask=mask, other=0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-raw))
    if not SIGMOID:
        gate = raw * gate
    if GATE_FIRST:
        value *= gate
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value, 1) / SIZE + EPS)[:, None]
        value *= scale
    if not GATE_FIRST:
        value *= gate
    tl.store(out + item * (GROUPS * SIZE) + e, value.to(out.dtype.element_ty), mask=mask)


@cache
def constants(
    tokens: int,
    width: int,
    size: int,
    weight_size: int,
    eps: float,
    gate_first: bool,
    sigmoid: bool,
    overlap: bool,
) -> dict[str, Any]:
    """Compile-time arguments of `gated_norm_kernel` for `width` = H * P; a `weight_size` of 0 is no norm."""
    groups, padded = width // size, triton.next_power_of_2(size)
    return {
        "T": tokens,
        "GROUPS": groups,
        "SIZE": size,
        "SP": padded,
        "GP": min(triton.next_power_of_2(groups), max(1, ELEMENTS // padded)),
        "NORM": weight_size > 0,
        "SHARED": weight_size < width,
        "EPS": eps,
        "GATE_FIRST": gate_first,
        "SIGMOID": sigmoid,
        "OVERLAP": overlap,
    }


def warps_of(given: dict[str, Any]) -> int:
    """Warps of a program: 8 elements a thread, until there are 16 of them."""
    return min(16, max(1, given["SP"] * given["GP"] // 256))


def launch_gated_norm(
    y: Tensor, z: Tensor, weight: Tensor | None, out: Tensor, size: int, eps: float, gate_first: bool, sigmoid: bool
) -> None:
    """Run the kernel; see there. Groups of a gate alone have any size."""
    rows, tokens, width = out.shape
    if not rows * tokens:
        return
    overlap = overlaps(out.device)
    if weight is None:
        size = min(size, ELEMENTS) if width % min(size, ELEMENTS) == 0 else size
    weights = 0 if weight is None else weight.numel()
    fixed = constants(tokens, width, size, weights, eps, gate_first, sigmoid, overlap)
    given = {
        "y": y,
        "z": (z, z.stride(0), z.stride(1)),
        "weight": y if weight is None else weight,
        "out": out,
    }
    programs = rows * tokens * triton.cdiv(fixed["GROUPS"], fixed["GP"])
    early: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    run(gated_norm_kernel, programs, given, fixed, num_warps=warps_of(fixed), **early)
