"""From a layer, a step and its inputs to the launches of the templates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, get_args

import torch
import triton
from torch import Tensor

from replayssm.kernels.formats import TRITON_FORMATS, format_constants, probe_bits
from replayssm.kernels.prepare import block_size, prepare_kernel
from replayssm.kernels.recurrent import recurrent_kernel
from replayssm.kernels.single import single_kernel
from replayssm.kernels.solve import solve_kernel
from replayssm.kernels.verify import ALL_ROWS, FLUSH_ROWS, STEP_ROWS, verify_kernel
from replayssm.recurrences.base import Recurrence
from replayssm.recurrences.triton_form import TritonForm
from replayssm.state.layout import StateLayout
from replayssm.state.pool import LayerState

MAX_PREPARED_HEADS = 16
"""Heads of a program of the first launch, at most."""

MAX_PREPARED_WEIGHTS = 512
"""Weights of ring rows that such a program, of one warp, has room for."""

FEWEST_PREPARING = 1024
"""Programs of the first launch that an H200 runs as fast as fewer."""

PREFETCHED_BYTES = 16 << 20
"""Of a step's states, what the first launch asks into the L2 before it may start, and of its own records as much.

A part of what the L2 holds.
"""

SOLVING_PROGRAMS = 16
"""Programs per multiprocessor that solve windows again."""

FLUSH_WARPS = 16
"""Warps of a flush launch per multiprocessor: enough that some programs are always waiting for a free one."""


@dataclass(frozen=True)
class Tile:
    """How a launch over states divides the work.

    Args:
        block_p: state columns of a unit.
        units: units of a program, a divisor of a row's.
        num_warps: warps of a program.
        num_stages: units whose memory is under way at once.
    """

    block_p: int
    units: int = 1
    num_warps: int = 1
    num_stages: int = 1


Form = Literal["prepared", "single", "recurrent"]


@dataclass(frozen=True)
class Choice:
    """The launches of one verify.

    Args:
        step: tile of the only launch over the states, or of the one for rows that are not due when `flush` is set.
        flush: tile of a further launch for the rows that are due, with "prepared" weights. It keeps what a fold needs
            (registers, shared memory) out of steps.
        form: "prepared": a launch before those over the states prepares weights (kernels/prepare.py). "single": one
            launch does everything (kernels/single.py), where there is such a form (`has_single`). "recurrent": one
            launch runs record by record (kernels/recurrent.py), which suits a window in force of 1.

    Raises:
        ValueError: there is no such form, or a launch that does everything has a flush, or units, besides.
    """

    step: Tile
    flush: Tile | None = None
    form: Form = "prepared"

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ValueError(f"no launches have the form {self.form!r}; there are {', '.join(get_args(Form))}")
        if self.form != "prepared" and (self.flush, self.step.units, self.step.num_stages) != (None, 1, 1):
            raise ValueError(
                f"the launch of a {self.form} step does all of it, one unit a program, other than in {self}"
            )


@cache
def form_of(recurrence: Recurrence) -> TritonForm:
    """The recurrence's Triton form, from its own folder."""
    package = type(recurrence).__module__.rsplit(".", 1)[0]
    form: TritonForm = import_module(f"{package}.triton").TRITON
    return form


def padded_window(layout: StateLayout) -> int:
    """Ring rows of a tile: the configured window, padded to what tensor cores and `tl.arange` take."""
    return max(16, triton.next_power_of_2(layout.config.window))


def weights_block(layout: StateLayout, tokens: int) -> int:
    """Floats of a token's weights, with T tokens a row."""
    return block_size(tokens, padded_window(layout), layout.recurrence.delta_rule)


def workspace(layout: StateLayout, rows: int, tokens: int, device: torch.device) -> Tensor:
    """Memory between the launches of one verify, fp32: WORK, in this order."""
    return torch.empty(sum(_work_sizes(layout, rows, tokens)), dtype=torch.float32, device=device)


# arguments of kernels/prepare.py and kernels/solve.py
WORK = ("weights", "probes", "solves")


def _work_sizes(layout: StateLayout, rows: int, tokens: int) -> tuple[int, int, int]:
    """Floats of weights [B, H, T, block], of any probes and any solves [B, H, WP + 1, WP]."""
    heads, window, key_dim = rows * layout.geometry.heads, padded_window(layout), layout.geometry.key_dim
    if layout.recurrence.decay == "channel":
        probes = heads * tokens * 2 * key_dim
    else:  # 2 N of 16 bits per key head
        probes = rows * layout.geometry.key_heads * key_dim if layout.read_format is not None and tokens == 1 else 0
    solves = (window + 1) * window if solves_again(layout) else 0
    return heads * tokens * weights_block(layout, tokens), probes, heads * solves


def has_single(layout: StateLayout, tokens: int) -> bool:
    """Whether there is a "single" form of a step (kernels/single.py)."""
    return tokens == 1 and can_fold_in_columns(layout) and read_codes(layout) is None


def packed_probe_bits(layout: StateLayout, tokens: int, native: bool) -> int:
    """PROBE_BITS of the templates where a step of T tokens reads pairs of codes with 16-bit probes, else 0."""
    name, recurrence = layout.config.read_format, layout.recurrence  # an fp8 checkpoint is read in fp32
    packed = native and name is not None and tokens == 1 and recurrence.decay != "channel"
    return probe_bits(name) if packed and layout.model_dtype.itemsize == 2 else 0  # type: ignore[arg-type]


def solves_again(layout: StateLayout) -> bool:
    """Whether a fold must correct its write vectors anew: the ring's saw the read copy, the checkpoint must not."""
    return layout.recurrence.delta_rule and layout.read_format is not None


def is_random(layout: StateLayout) -> bool:
    """Whether checkpoints are rounded at random."""
    return layout.config.rounding == "stochastic"


def prepared_heads(layout: StateLayout, rows: int, tokens: int) -> int:
    """Heads of a program of the first launch: many share products of keys, unless the GPU would stay half empty."""
    group = layout.geometry.heads // layout.geometry.key_heads
    most = min(MAX_PREPARED_HEADS, max(1, MAX_PREPARED_WEIGHTS // (padded_window(layout) * tokens)))
    heads = 1 if layout.recurrence.decay == "channel" else min(1 << most.bit_length() - 1, group & -group)
    while heads > 2 and rows * layout.geometry.heads // heads < FEWEST_PREPARING:
        heads //= 2
    return heads


def prepared_warps(layout: StateLayout, tokens: int, is_tree: bool = False) -> int:
    """Warps of a program of the first launch: one, until records or drafts of all channels outgrow its registers.

    A tree holds its paths besides, and what its branches begin with.
    """
    if layout.recurrence.decay == "channel":
        most = max(-(-tokens // 4), padded_window(layout) // 16)
        chains = min(4, triton.next_power_of_2(most))
    else:
        chains = 1
    return 2 * chains if is_tree else chains


@cache
def layer_constants(layout: StateLayout) -> dict[str, Any]:
    """Compile-time arguments that a layer brings to every template."""
    recurrence, geometry, form = layout.recurrence, layout.geometry, form_of(layout.recurrence)
    return {
        "H": geometry.heads,
        "G": geometry.key_heads,
        "N": geometry.key_dim,
        "P": geometry.value_dim,
        "NP": max(16, triton.next_power_of_2(geometry.key_dim)),
        "WP": padded_window(layout),
        "RING_ROWS": layout.ring_rows,
        "RECORD_SIZES": record_sizes(layout),
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
        "SOLVES": solves_again(layout),
        "SCALED": layout.config.checkpoint_format in TRITON_FORMATS,
        "HAS_COPY": layout.read_format is not None,
        "RANDOM": is_random(layout),
        "MANTISSA": layout.checkpoint_format.grid.mantissa if is_random(layout) else 0,
        "LEAST": layout.checkpoint_format.grid.least_exponent if is_random(layout) else 0,
        **format_constants(read_codes(layout), geometry.key_dim, _has_e4m3()),
    }


def record_sizes(layout: StateLayout) -> tuple[tuple[int, int], ...]:
    """(heads, elements of a row and head) of the ring of keys, and of the others but write vectors."""
    form, fields = form_of(layout.recurrence), {field.name: field for field in layout.ring_fields}
    shapes = (fields[name].shape(layout.geometry) for name in (form.key_ring, *form.ring))
    return tuple((heads, math.prod(rest)) for heads, *rest in shapes)


def solve_warps(layout: StateLayout) -> int:
    """Warps of a program that solves windows again: a thread holds a column; decays of channels need more.

    Not four: products are in tensor memory then (compute capability 10.0), which those of 64 records outgrow.
    """
    return min(2, max(1, padded_window(layout) // (16 if layout.recurrence.decay == "channel" else 32)))


@cache
def solve_constants(layout: StateLayout, overlap: bool) -> dict[str, Any]:
    """Compile-time arguments of `solve_kernel`, among others."""
    return layer_constants(layout) | {"OVERLAP": overlap}


def clamp_limit(limit: float) -> float:
    """The largest number of a format, which states are clamped to; 0 where they fit in."""
    return limit if limit < torch.finfo(torch.float32).max else 0.0


@cache
def prepare_constants(
    layout: StateLayout, rows: int, tokens: int, overlap: bool, is_tree: bool = False
) -> dict[str, Any]:
    """Compile-time arguments of `prepare_kernel`, among others."""
    form, specs = form_of(layout.recurrence), {spec.name: spec for spec in layout.tensors}
    read, own = specs[read_part(layout)], (specs[f"ring.{name}"].bytes for name in (form.key_ring, *form.ring))
    return layer_constants(layout) | {
        "T": tokens,
        "TP": triton.next_power_of_2(tokens),
        "BLOCK": weights_block(layout, tokens),
        "HEADS": prepared_heads(layout, rows, tokens),
        "OVERLAP": overlap,
        "IS_TREE": is_tree,
        "PROBE_BITS": packed_probe_bits(layout, tokens, _has_e4m3()),
        "AHEAD": (PREFETCHED_BYTES // sum(own), PREFETCHED_BYTES // read.bytes),
        "READ_SIZE": math.prod(read.shape) // layout.geometry.heads,
    }


def copy_rows(layout: StateLayout, tile: Tile) -> int:
    """Word rows of a tile of a read copy, of which one token takes as many as its warps load at once, four a thread.

    Sums then need few registers, and ring rows of 16 bits lie with the same threads.
    """
    constants = layer_constants(layout)
    words = layout.geometry.key_dim // max(1, constants["CODES"])
    shared = constants["BLOCKS"] if constants["BLOCKS"] > 1 else words
    return max(1, min(128 * tile.num_warps // tile.block_p, shared, constants["WP"]))


@cache
def in_columns(layout: StateLayout, tokens: int, mode: int) -> bool:
    """Whether tokens are columns of products (kernels/drafts.py) and not rows, or sums of their own where there is one.

    Measured (docs/experiments.md). Columns win where steps of several tokens read codes, where a state's columns do not
    fill wider tiles, and where a single token reads a 16-bit state; fp32 states are best loaded ahead, several units by
    several warps. A launch of flushes has columns beside copies, of 16-bit states, and of many tokens, which in rows
    would spill; a launch of all rows folds in columns wherever it can. With decays of channels, and of checkpoints of
    codes, folds are in rows only.
    """
    channel, value_dim = layout.recurrence.decay == "channel", layout.geometry.value_dim
    codes, narrow = read_codes(layout) is not None, layout.checkpoint_format.dtype.itemsize == 2
    several = tokens > 1 and (codes or value_dim & (value_dim - 1) != 0)
    if mode == FLUSH_ROWS.value:
        return can_fold_in_columns(layout) and (codes or narrow or several or tokens > 8)
    alone = mode != ALL_ROWS.value or can_fold_in_columns(layout)
    return alone and (several or (tokens == 1 and narrow and not codes and not channel))


def can_fold_in_columns(layout: StateLayout) -> bool:
    """Whether folds may be in columns: of states that are numbers, with one decay per head."""
    return layout.recurrence.decay == "head" and not state_scales(layout)


@cache
def folds_first(layout: StateLayout, tokens: int) -> bool:
    """Whether the launch of flushes comes before that of steps, which fill the GPU as folds end (docs/experiments.md).

    Folds in columns do. Those in rows slow down what runs behind them (they hold shared memory, of which the L1 is the
    rest), and come last; of single tokens with decays of channels they take so long that even so they are better begun
    early, by few programs.
    """
    long = tokens == 1 and layout.recurrence.decay == "channel" and read_codes(layout) is None
    return long or in_columns(layout, tokens, FLUSH_ROWS.value)


@cache
def flush_warps(layout: StateLayout, tokens: int) -> int:
    """Warps of a flush launch per multiprocessor: fewer where steps start behind it, after all of its programs."""
    if not folds_first(layout, tokens):
        return FLUSH_WARPS
    # as many as have room with all registers, and in rows so few that steps have room beside them
    return FLUSH_WARPS // (2 if in_columns(layout, tokens, FLUSH_ROWS.value) else 4)


@cache
def verify_constants(layout: StateLayout, tokens: int, tile: Tile, mode: int, overlap: bool) -> dict[str, Any]:
    """Compile-time arguments of `verify_kernel` and of `recurrent_kernel`, among others."""
    # delta rules have a correction for each output; products have tokens in columns (kernels/drafts.py) or in rows
    outputs = triton.next_power_of_2(tokens) * (2 if layout.recurrence.delta_rule else 1)
    columns = in_columns(layout, tokens, mode)
    return layer_constants(layout) | {
        "T": tokens,
        "TP": max(8 if columns else 16, outputs),
        "IN_COLUMNS": columns,
        "FOLD_TP": max(8, outputs) if mode == ALL_ROWS.value and can_fold_in_columns(layout) else 0,
        "BLOCK": weights_block(layout, tokens),
        "BLOCK_P": tile.block_p,
        "UNITS": tile.units,
        "STAGES": tile.num_stages,
        "MODE": mode,
        "LIMIT": clamp_limit(layout.checkpoint_format.limit),
        "OVERLAP": overlap,
        "FOLDS_FIRST": folds_first(layout, tokens),
        "ROWS": copy_rows(layout, tile),
        "PROBE_BITS": packed_probe_bits(layout, tokens, _has_e4m3()),
    }


def launch_verify(
    layer: LayerState,
    plan: Tensor,
    inputs: Mapping[str, Tensor],
    y: Tensor,
    choice: Choice,
    work: Tensor,
    saturated: Tensor,
    seeds: Tensor,
    number: int,
    *,
    is_tree: bool = False,
) -> None:
    """Run one layer of a step: a launch that prepares weights and one or two over the states, or one for everything.

    Args:
        layer: the layer; its state and the innermost dim of its ring fields must be contiguous.
        plan: int64 [B, columns].
        inputs: [B, T, ...], contiguous within a token.
        y: [B, T, H, P], contiguous within a token; written.
        choice: tiles of the launches.
        work: from `workspace`.
        saturated: int64 [slots], counts clamped elements of checkpoints and read copies.
        seeds: int64 [slots], of stochastic rounding.
        number: of the layer in its pool, for the same.
        is_tree: whether the plan's `tree` says more than that tokens follow each other. No such step is "recurrent".

    Raises:
        ValueError: a tile does not divide the layer, steps read codes and flushes have no launch of their own, or the
            layer's steps have no such form.
    """
    layout = layer.layout
    form, (rows, tokens) = form_of(layout.recurrence), y.shape[:2]
    if not rows:
        return
    overlap = overlaps(y.device)
    early: dict[str, Any] = {"launch_pdl": True} if overlap else {}

    def strided(tensor: Tensor) -> tuple[Tensor, int, int]:
        return tensor, tensor.stride(0), tensor.stride(1)

    given = layer_arguments(layer, plan) | {
        "key": strided(inputs[form.key]),
        "query": strided(inputs[form.query]),
        "value": strided(inputs[form.value]),
        "inputs": tuple(strided(inputs[name]) for name in form.inputs),
        **dict(zip(WORK, work.split(_work_sizes(layout, rows, tokens)), strict=True)),
        "y": strided(y),
        "saturated": saturated,
        "seeds": (seeds, seeds.stride(0)) if is_random(layout) else (),
        "layer": number,
    }

    def units_of(tile: Tile) -> int:
        units: int = layout.geometry.heads * triton.cdiv(layout.geometry.value_dim, tile.block_p)
        if units % tile.units:
            raise ValueError(f"{tile} does not divide the {units} units of a row; tune again, or mend the table")
        return rows * units

    if read_codes(layout) is not None and choice.flush is None:
        raise ValueError(f"where steps read codes, rows that flush need a launch of their own, and {choice} has none")
    if choice.form == "single" and not has_single(layout, tokens):
        raise ValueError(f"no single launch does a step of {tokens} tokens of this layer, as {choice} says")
    if choice.form != "prepared":
        kernel = single_kernel if choice.form == "single" else recurrent_kernel
        tile, constants = choice.step, verify_constants(layout, tokens, choice.step, ALL_ROWS.value, overlap)
        run(kernel, units_of(tile), given, constants, num_warps=tile.num_warps, **early)
        return
    constants = prepare_constants(layout, rows, tokens, overlap, is_tree)
    programs = rows * layout.geometry.heads // prepared_heads(layout, rows, tokens)
    run(prepare_kernel, programs, given, constants, num_warps=prepared_warps(layout, tokens, is_tree), **early)
    if solves_again(layout):
        programs = min(rows * layout.geometry.heads, SOLVING_PROGRAMS * processors(y.device))
        run(solve_kernel, programs, given, solve_constants(layout, overlap), num_warps=solve_warps(layout), **early)
    mode = ALL_ROWS if choice.flush is None else STEP_ROWS
    launches = [(choice.step, mode, units_of(choice.step) // choice.step.units)]
    if choice.flush is not None:
        # however few rows are due, their units are spread over the whole GPU
        most = max(1, flush_warps(layout, tokens) // choice.flush.num_warps)
        programs = min(units_of(choice.flush), processors(y.device) * most)
        launches.insert(0 if folds_first(layout, tokens) else 1, (choice.flush, FLUSH_ROWS, programs))
    for tile, mode, programs in launches:
        constants = verify_constants(layout, tokens, tile, mode.value, overlap)
        run(verify_kernel, programs, given, constants, num_warps=tile.num_warps, **early)


def layer_arguments(layer: LayerState, plan: Tensor) -> dict[str, Any]:
    """What every template takes of a plan and a layer, by argument."""
    form, state = form_of(layer.layout.recurrence), layer.tensors["checkpoint"]
    again = solves_again(layer.layout)

    def ring(name: str) -> tuple[Tensor, int, int, int]:
        tensor = layer.tensors[f"ring.{name}"]
        return tensor, tensor.stride(0), tensor.stride(1), tensor.stride(2)

    return {
        "plan_row": plan.stride(0),
        "plan": plan,
        "state": state,
        "state_slot": state.stride(0),
        "slots": len(state),
        "state_scale": _strided_parts(layer, state_scales(layer.layout))[0] if state_scales(layer.layout) else (),
        "reads": _strided_parts(layer, (read_part(layer.layout),))[0],
        "copy": _strided_parts(layer, code_parts(layer.layout)),
        "keys": ring(form.key_ring),
        "writes": ring(form.write_ring),
        "values": ring(form.value if again else form.write_ring),
        "rates": ring(form.rate) if again else (),
        "ring": tuple(ring(name) for name in form.ring),
        "layer_params": tuple(layer.params[name] for name in form.params),
    }


def _strided_parts(layer: LayerState, names: Sequence[str]) -> tuple[tuple[Tensor, int], ...]:
    """(tensor, slot stride) of each of these tensors."""
    return tuple((layer.tensors[name], layer.tensors[name].stride(0)) for name in names)


def read_codes(layout: StateLayout) -> str | None:
    """Format of the codes that steps read, of a read copy or of the checkpoint; None where they read numbers."""
    read, checkpoint = layout.config.read_format, layout.config.checkpoint_format
    return checkpoint if read is None and checkpoint in TRITON_FORMATS else read


def code_parts(layout: StateLayout) -> tuple[str, ...]:
    """Names of the tensors that hold those codes and their scales, as the kernels take them."""
    name, kind = read_codes(layout), "checkpoint" if layout.read_format is None else "read_copy"
    return () if name is None else tuple(f"{kind}{suffix}" for suffix in TRITON_FORMATS[name].parts)


def read_part(layout: StateLayout) -> str:
    """Name of the tensor that a step reads most of: words of codes, or the checkpoint."""
    return next(iter(code_parts(layout)), "checkpoint")


def state_scales(layout: StateLayout) -> tuple[str, ...]:
    """Names of the tensors that hold scales of a checkpoint."""
    return ("checkpoint.scale",) if layout.config.checkpoint_format in TRITON_FORMATS else ()


def run(kernel: Any, programs: int, given: Mapping[str, Any], constants: Mapping[str, Any], **options: Any) -> None:
    """Launch a kernel with those of the `given` arguments and of the compile-time `constants` that it has."""
    arguments = {name: constants[name] if name in constants else given[name] for name in kernel.arg_names}
    with _unobserved():
        kernel[(programs,)](**arguments, **options)


@contextmanager
def _unobserved() -> Iterator[None]:
    """Without others' hooks for compilations, vLLM's for one: Triton writes a kernel's constants for them as JSON, in
    which the templates' functions have no place.
    """
    runtime = triton.knobs.runtime
    kept = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    runtime.jit_cache_hook = runtime.jit_post_compile_hook = None
    try:
        yield
    finally:
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = kept


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a launch may start before the one it depends on has ended (compute capability 9.0 and later)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _has_e4m3() -> bool:
    """Whether the GPU converts from E4M3 by itself (compute capability 8.9 and later)."""
    return torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
