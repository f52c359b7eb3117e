"""Ahead-of-time compilation of the templates, which needs no GPU: does it compile everywhere, and does it spill?"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from replayssm.kernels import compact, convolve, engine, gated_norm, materialize, plan
from replayssm.kernels.formats import format_constants
from replayssm.kernels.launch import (
    WORK,
    Choice,
    Tile,
    code_parts,
    form_of,
    is_random,
    packed_probe_bits,
    prepare_constants,
    prepared_warps,
    read_codes,
    read_part,
    solve_constants,
    solve_warps,
    solves_again,
    state_scales,
    verify_constants,
)
from replayssm.kernels.prepare import prepare_kernel
from replayssm.kernels.recurrent import recurrent_kernel
from replayssm.kernels.single import single_kernel
from replayssm.kernels.solve import solve_kernel
from replayssm.kernels.verify import ALL_ROWS, FLUSH_ROWS, STEP_ROWS, verify_kernel
from replayssm.state.layout import StateLayout

TENSOR_MEMORY = 512
"""Columns that a multiprocessor has, from compute capability 10.0 on."""

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers per thread, shared memory and local memory (spills) in bytes.

    `hints` says whether it asks memory into the L2 ahead of its reads.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int
    tensor_core: bool
    hints: bool


def compile_choice(layout: StateLayout, tokens: int, choice: Choice, capability: int = 90) -> dict[str, Resources]:
    """Compile every launch of a `verify`, by name: "recurrent", "single", or "prepare", "step" and maybe "flush"."""
    if choice.form == "recurrent":
        return {"recurrent": compile_recurrent(layout, tokens, choice.step, capability)}
    if choice.form == "single":
        return {"single": compile_single(layout, choice.step, capability)}
    found = {"prepare": compile_prepare(layout, tokens, capability)}
    if choice.flush is None:
        return found | {"step": compile_verify(layout, tokens, choice.step, ALL_ROWS.value, capability)}
    if solves_again(layout):
        found["solve"] = compile_solve(layout, capability)
    return found | {
        "step": compile_verify(layout, tokens, choice.step, STEP_ROWS.value, capability),
        "flush": compile_verify(layout, tokens, choice.flush, FLUSH_ROWS.value, capability),
    }


def compile_prepare(layout: StateLayout, tokens: int, capability: int = 90, *, is_tree: bool = False) -> Resources:
    """Compile `prepare_kernel` for a layer, as the launcher would call it."""
    signature = _layer_signature(layout) | _token_signature(layout) | dict.fromkeys(WORK, "*fp32")
    given = prepare_constants(layout, 256, tokens, capability >= 90, is_tree) | _formats(layout, tokens, capability)
    warps = prepared_warps(layout, tokens, is_tree)
    return _compile(prepare_kernel, signature, given, warps, capability, ones=_unit_strides(layout))


def compile_recurrent(layout: StateLayout, tokens: int, tile: Tile, capability: int = 90) -> Resources:
    """Compile `recurrent_kernel` for a layer, as the launcher would call it."""
    signature = _layer_signature(layout) | _token_signature(layout) | _rounding_signature(layout)
    given = verify_constants(layout, tokens, tile, ALL_ROWS.value, capability >= 90) | {"NATIVE": capability >= 89}
    return _compile(recurrent_kernel, signature, given, tile.num_warps, capability, ones=_unit_strides(layout))


def compile_single(layout: StateLayout, tile: Tile, capability: int = 90) -> Resources:
    """Compile `single_kernel` for a layer, as the launcher would call it."""
    signature = _layer_signature(layout) | _token_signature(layout) | _rounding_signature(layout)
    given = verify_constants(layout, 1, tile, ALL_ROWS.value, capability >= 90)
    return _compile(single_kernel, signature, given, tile.num_warps, capability, ones=_unit_strides(layout))


def compile_verify(layout: StateLayout, tokens: int, tile: Tile, mode: int = 0, capability: int = 90) -> Resources:
    """Compile `verify_kernel` for a layer, as the launcher would call it.

    `mode` is which rows the launch takes (`kernels.verify`), `capability` the compute capability, such as 90.
    """
    signature = _layer_signature(layout) | _token_signature(layout)
    signature |= dict.fromkeys(WORK, "*fp32") | _rounding_signature(layout)
    given = verify_constants(layout, tokens, tile, mode, capability >= 90) | _formats(layout, tokens, capability)
    return _compile(verify_kernel, signature, given, tile.num_warps, capability, ones=_unit_strides(layout))


def compile_solve(layout: StateLayout, capability: int = 90) -> Resources:
    """Compile `solve_kernel` for a delta rule with a read copy, as the launcher would call it."""
    signature = _layer_signature(layout) | dict.fromkeys(WORK, "*fp32")
    given = solve_constants(layout, capability >= 90)
    return _compile(solve_kernel, signature, given, solve_warps(layout), capability, ones=_unit_strides(layout))


def _formats(layout: StateLayout, tokens: int, capability: int) -> dict[str, Any]:
    """Constants of the codes that steps read on such a GPU, whatever the present one is."""
    native = capability >= 89
    found = format_constants(read_codes(layout), layout.geometry.key_dim, native)
    return found | {"PROBE_BITS": packed_probe_bits(layout, tokens, native)}


def compile_materialize(layout: StateLayout, *, in_place: bool, capability: int = 90) -> Resources:
    """Compile `materialize_kernel`: the flush between steps, or the one that fills a caller's fp32 tensor."""
    checkpoint = layout.checkpoint_format.dtype
    dtype = checkpoint if in_place else layout.compute_dtype
    signature = _layer_signature(layout) | {
        "out": _TYPES[dtype],
        "out_row": "i64",
        "targets": ("*i64", "i32"),
        "saturated": "*i64",
    }
    given = materialize.constants(layout, dtype, into_slots=in_place, only_due=in_place)
    kernel, ones = materialize.materialize_kernel, _unit_strides(layout)
    return _compile(kernel, signature, given, materialize.NUM_WARPS, capability, ones=ones)


def compile_compact(layout: StateLayout, depth: int, capability: int = 90) -> Resources:
    """Compile `compact_kernel` for a layer and paths of at most `depth` tokens."""
    specs = {spec.name: _TYPES[spec.dtype] for spec in layout.tensors}
    fields = tuple((specs[f"ring.{field.name}"], "i64", "i32", "i32") for field in layout.ring_fields)
    signature: dict[str, Any] = {"slots": ("*i64", "i32"), "path": "*i64", "path_row": "i32", "fields": fields}
    signature |= {"start": "*i64", "length": "*i64", "each": "i32"}
    given = compact.constants(layout, depth)
    return _compile(compact.compact_kernel, signature, given, compact.NUM_WARPS, capability, aligned=False)


def compile_convolve(
    layout: StateLayout,
    tokens: int,
    parts: tuple[int, ...],
    capability: int = 90,
    *,
    items: int = 1,
    gate_inputs: int = 0,
    gate_params: int = 0,
    gates: tuple[int, ...] = (),
    gate_constants: tuple[float, ...] = (),
    is_tree: bool = False,
) -> Resources:
    """Compile `convolve_kernel` for a layer whose inputs come in `parts` channels.

    The gates are those of its recurrence: so many inputs and fp32 parameters, and the size of each output per token.
    """
    model = _TYPES[layout.model_dtype]
    signature: dict[str, Any] = {"plan_row": "i32", "plan": "*i64", "items": "i32", "conv_programs": "i32", "y": model}
    signature |= {"carry": (model, "i64", "i32", "i32"), "weight": (model, "i32", "i32"), "bias": (model, "i32")}
    signature |= {"x": tuple((model, "i64", "i32", "i32") for _ in parts)}
    signature |= {"gate_inputs": tuple((model, "i64", "i32") for _ in range(gate_inputs))}
    signature |= {"gate_params": ("*fp32",) * gate_params, "gates": ("*fp32",) * len(gates)}
    given = convolve.constants(
        layout, tokens, parts, items, "silu", capability >= 90, is_tree, max(gates, default=0), gate_constants
    )
    # channels lie together, and the taps of one
    ones = {("carry", 3): 1, ("weight", 2): 1, ("bias", 1): 1} | {("x", part, 3): 1 for part in range(len(parts))}
    return _compile(convolve.convolve_kernel, signature, given, convolve.NUM_WARPS, capability, ones=ones)


def compile_gated_norm(
    layout: StateLayout,
    tokens: int,
    size: int,
    capability: int = 90,
    *,
    shared: bool,
    gate_first: bool,
    is_sigmoid: bool = False,
) -> Resources:
    """Compile `gated_norm_kernel` for a layer whose groups have `size` elements."""
    width, model = layout.geometry.heads * layout.geometry.value_dim, _TYPES[layout.model_dtype]
    signature = {"y": "*fp32", "z": (model, "i64", "i32"), "weight": model, "out": model}
    given = gated_norm.constants(
        tokens, width, size, size if shared else width, 1e-5, gate_first, is_sigmoid, capability >= 90
    )
    return _compile(gated_norm.gated_norm_kernel, signature, given, gated_norm.warps_of(given), capability)


def compile_cursor_kernels(capability: int = 90) -> dict[str, Resources]:
    """Compile the plan, settle and commit kernels and the one of an engine's step, by name."""
    counter, each, value = "*i64", ("*i64", "i32"), ("i32", "i32")
    planned: dict[str, Any] = {"plan": "*i64", "plan_row": "i32", "slots": each, "tokens": each, "windows": value}
    planned |= {"forced": ("*i1", "i32"), "trees": each}
    planned |= dict.fromkeys(("start", "length", "position", "window"), counter)
    planned |= dict.fromkeys(("each", "batch", "width", "ring_rows"), "i32")
    settled: dict[str, Any] = {"plan": "*i64", "plan_row": "i32"}
    settled |= dict.fromkeys(("start", "length", "position", "pending", "tree", "window", "tally"), counter)
    settled |= dict.fromkeys(("each", "batch", "full_window"), "i32")
    committed: dict[str, Any] = {"slots": each, "accepted": each}
    committed |= dict.fromkeys(("length", "position", "pending"), counter) | dict.fromkeys(("each", "batch"), "i32")
    # an engine's cursor lies in its pages, and its table of blocks is a column of something larger
    opened: dict[str, Any] = {"plan": "*i64", "plan_row": "i32", "table": ("*i32", "i32"), "certain": "*i1"}
    opened |= dict.fromkeys(("blocks", "kept_out", "starts", "accepted"), "*i32")
    opened |= dict.fromkeys(("noted", "start", "length", "position", "pending", "tree", "window"), counter)
    numbers = ("each", "batch", "width", "in_force", "full_window", "ring_rows", "null")
    opened |= dict.fromkeys(numbers, "i32")
    flags = {"TOKENS_EACH": True, "WINDOWS_EACH": False, "FORCED_EACH": True, "TREES_EACH": True}
    kernels = {
        "plan": (plan.plan_kernel, planned, flags),
        "settle": (plan.settle_kernel, settled, {"KIND": plan.DECODE.value}),
        "commit": (plan.commit_kernel, committed, {"ACCEPTED_EACH": True}),
        "engine": (engine.engine_kernel, opened, dict.fromkeys(("RAGGED", "DRAFTS", "CERTAIN_EACH"), True)),
        "engine of single tokens": (
            engine.engine_kernel,
            opened,
            dict.fromkeys(("RAGGED", "DRAFTS", "CERTAIN_EACH"), False),
        ),
    }
    return {
        name: _compile(kernel, signature, {**given, "BLOCK": 256}, 4, capability, aligned=False)
        for name, (kernel, signature, given) in kernels.items()
    }


def _rounding_signature(layout: StateLayout) -> dict[str, Any]:
    """Types of what counts clamped elements and draws random numbers."""
    return {"saturated": "*i64", "seeds": ("*i64", "i32") if is_random(layout) else (), "layer": "i32"}


def _token_signature(layout: StateLayout) -> dict[str, Any]:
    """Types of a step's tokens and outputs."""
    form = form_of(layout.recurrence)
    inputs = {f.name: _TYPES[layout.dtype_of(f)] for f in layout.recurrence.inputs}

    def strided(pointer: str) -> tuple[str, str, str]:
        return pointer, "i64", "i32"

    return {
        "key": strided(inputs[form.key]),
        "query": strided(inputs[form.query]),
        "value": strided(inputs[form.value]),
        "inputs": tuple(strided(inputs[name]) for name in form.inputs),
        "y": strided(_TYPES[layout.model_dtype]),
    }


def _layer_signature(layout: StateLayout) -> dict[str, Any]:
    """Types of the arguments that a layer brings to every template."""
    form = form_of(layout.recurrence)
    specs = {spec.name: _TYPES[spec.dtype] for spec in layout.tensors}

    def ring(name: str) -> tuple[str, str, str, str]:
        return specs[f"ring.{name}"], "i64", "i32", "i32"

    return {
        "plan_row": "i32",
        "plan": "*i64",
        "state": specs["checkpoint"],
        "state_slot": "i64",
        "slots": "i32",
        "state_scale": (specs["checkpoint.scale"], "i64") if state_scales(layout) else (),
        "reads": (specs[read_part(layout)], "i64"),
        "copy": tuple((specs[name], "i64") for name in code_parts(layout)),
        "keys": ring(form.key_ring),
        "writes": ring(form.write_ring),
        "values": ring(form.value if solves_again(layout) else form.write_ring),
        "rates": ring(form.rate) if solves_again(layout) else (),
        "ring": tuple(ring(name) for name in form.ring),
        "layer_params": tuple(_TYPES[layout.compute_dtype] for _ in form.params),
    }


def _unit_strides(layout: StateLayout) -> dict[tuple[Any, ...], int]:
    """Strides of rings that are 1, which a launcher makes compile-time arguments: of rows with one number a head."""
    form, fields = (
        form_of(layout.recurrence),
        {field.name: field.shape(layout.geometry) for field in layout.ring_fields},
    )
    rows: dict[tuple[Any, ...], str] = {("ring", index, 2): name for index, name in enumerate(form.ring)}
    if solves_again(layout):
        rows["rates", 2] = form.rate
    return {member: 1 for member, name in rows.items() if math.prod(fields[name][1:]) == 1}


def _compile(
    kernel: Any,
    types: dict[str, Any],
    given: dict[str, Any],
    num_warps: int,
    capability: int,
    *,
    aligned: bool = True,
    ones: Mapping[tuple[Any, ...], int] = MappingProxyType({}),
) -> Resources:
    """Compile a kernel for argument `types` by name, and compile-time arguments `given`.

    `ones` are members of tuple arguments that a launcher would specialise on: (name, index, ...) -> value. The kernel
    may have fewer.

    Raises:
        RuntimeError: it compiles and could not be launched.
    """
    names = kernel.arg_names
    given = {name: value for name, value in given.items() if name in names}
    signature: dict[str, Any] = {name: "constexpr" if name in given else types[name] for name in names}
    values: dict[tuple[int, ...], Any] = {(names.index(n),): value for n, value in given.items()}
    for (name, *path), value in ones.items():
        if name not in names:
            continue
        signature[name] = _with_constexpr(signature[name], path)
        values[names.index(name), *path] = value
    attributes = {path: [["tt.divisibility", 16]] for path in _aligned_paths(signature)} if aligned else {}
    source = ASTSource(kernel, signature, values, attributes)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
    columns = getattr(compiled.metadata, "tmem_size", None) or 0
    if columns > TENSOR_MEMORY:  # Triton then leaves the kernel empty, and says so at its launch
        raise RuntimeError(f"{kernel.__name__} takes {columns} columns of tensor memory, of {TENSOR_MEMORY}")
    return _resources(compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata.shared)


def _with_constexpr(types: tuple[Any, ...], path: list[int]) -> tuple[Any, ...]:
    """`types` with the member at `path` made a compile-time argument."""
    first, *rest = path
    changed = _with_constexpr(types[first], rest) if rest else "constexpr"
    return types[:first] + (changed,) + types[first + 1 :]


def _aligned_paths(signature: dict[str, Any]) -> list[tuple[int, ...]]:
    """Every pointer and stride: pools and activations start on 16 bytes, and their strides are multiples of 16."""
    paths: list[tuple[int, ...]] = []

    def visit(value: Any, path: tuple[int, ...]) -> None:
        if isinstance(value, tuple):
            for index, item in enumerate(value):
                visit(item, (*path, index))
        elif value != "constexpr":
            paths.append(path)

    for index, (name, value) in enumerate(signature.items()):
        if name != "plan_row":
            visit(value, (index,))
    return paths


def _resources(cubin: bytes, ptx: str, shared_bytes: int) -> Resources:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    assert found is not None
    products = re.search(r"^\s*(@\S+ )?(mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx, re.MULTILINE)
    hints = "cp.async.bulk.prefetch.L2" in ptx
    return Resources(int(found[1]), shared_bytes, int(found[2]), products is not None, hints)
