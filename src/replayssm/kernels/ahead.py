"""Ahead-of-time compilation of the templates, which needs no GPU: does it compile everywhere, and does it spill?"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from replayssm.kernels.launch import Tile, constants, form_of
from replayssm.kernels.verify import verify_kernel
from replayssm.state.layout import StateLayout

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers per thread, shared memory and local memory (spills) in bytes."""

    registers: int
    shared_bytes: int
    spill_bytes: int
    tensor_core: bool


def compile_verify(layout: StateLayout, tokens: int, tile: Tile, mode: int = 0, capability: int = 90) -> Resources:
    """Compile `verify_kernel` for a layer, as the launcher would call it.

    `mode` is which rows the launch takes (`kernels.verify`), `capability` the compute capability, such as 90.
    """
    form, recurrence = form_of(layout.recurrence), layout.recurrence
    specs = {spec.name: _TYPES[spec.dtype] for spec in layout.tensors}
    inputs = {f.name: _TYPES[layout.dtype_of(f)] for f in recurrence.inputs}
    compute = _TYPES[layout.compute_dtype]

    def strided(pointer: str) -> tuple[str, str, str]:
        return pointer, "i64", "i32"

    def ring(name: str) -> tuple[str, str, str, str]:
        return specs[f"ring.{name}"], "i64", "i32", "i32"

    signature: dict[str, Any] = {
        "plan_row": "i32",
        "plan": "*i64",
        "state": specs["checkpoint"],
        "state_slot": "i64",
        "keys": ring(form.key_ring),
        "writes": ring(form.write_ring),
        "ring": tuple(ring(name) for name in form.ring),
        "key": strided(inputs[form.key]),
        "query": strided(inputs[form.query]),
        "value": strided(inputs[form.value]),
        "inputs": tuple(strided(inputs[name]) for name in form.inputs),
        "layer_params": tuple(compute for _ in form.params),
        "y": strided(compute),
    }
    constexprs = constants(
        recurrence, layout.geometry, form, tokens, layout.ring_rows, layout.config.window, tile, mode
    )
    signature |= dict.fromkeys(constexprs, "constexpr")
    names = list(signature)
    aligned = {path: [["tt.divisibility", 16]] for path in _aligned_paths(signature)}
    source = ASTSource(verify_kernel, signature, {(names.index(n),): v for n, v in constexprs.items()}, aligned)
    options = {"num_warps": tile.num_warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _resources(compiled.asm["cubin"], compiled.metadata.shared)


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


def _resources(cubin: bytes, shared_bytes: int) -> Resources:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        code = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    assert found is not None
    return Resources(int(found[1]), shared_bytes, int(found[2]), re.search(r"\b(HMMA|HGMMA|QGMMA)", code) is not None)
