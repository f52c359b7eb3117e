"""Compile kernels for one compute capability and print what they take, as JSON. Run without TRITON_INTERPRET.

python tests/kernels/ahead_of_time.py 90
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice

import torch

from replayssm import ReplayConfig
from replayssm.kernels import ahead
from replayssm.kernels.ahead import Resources
from replayssm.kernels.convolve import MAX_TOKENS
from replayssm.kernels.launch import Choice
from replayssm.kernels.tuned import FOLDER, Shape, heuristic, load
from replayssm.recurrences import Geometry, get, registry
from replayssm.state.layout import StateLayout

GEOMETRIES = {
    "mamba2": Geometry(128, 8, 128, 64),
    "gdn": Geometry(64, 16, 128, 128),
    "kda": Geometry(32, 32, 128, 128),
}
"""Nemotron-3-Super, Qwen3.5-122B and Kimi-Linear."""

MIXERS = {
    "mamba2": ((10240,), 1, 1, (128,), (), 1024, False, True, False),
    "gdn": ((12288,), 2, 2, (64, 64), (1.0,), 128, True, False, False),
    "kda": ((4096, 4096, 4096), 2, 2, (4096, 32), (0.0,), 128, True, False, True),
}
"""Channels of the convolution in parts; inputs and parameters of the gates, their sizes and constants; of the norm the
size of its groups, whether they share weights, whether z comes first, and as a sigmoid."""

MORE = {
    "mamba2 head dim 80": ("mamba2", Geometry(96, 8, 128, 80)),
    "mamba2 key dim 256": ("mamba2", Geometry(32, 2, 256, 128)),
}


def layout_of(name: str, geometry: Geometry, tokens: int, checkpoint_format: str = "fp32") -> StateLayout:
    return StateLayout(get(name), geometry, ReplayConfig(16, tokens, checkpoint_format), torch.bfloat16)


def heuristics(capability: int) -> Iterator[tuple[str, StateLayout, int, Choice]]:
    """(title, layout, tokens, choice) of what is compiled besides the tables: all of it for sm_90 only."""
    for name, geometry in GEOMETRIES.items():
        for tokens, batch in [(1, 1), (1, 256), (4, 256)] if capability == 90 else [(1, 1), (1, 256)]:
            layout = layout_of(name, geometry, tokens)
            yield f"{name} T={tokens} batch {batch}", layout, tokens, heuristic(layout, batch, tokens)[0]
    if capability == 100:  # where products behind 4 warps are in tensor memory
        for form in ("fp16", "fp8"):
            layout = layout_of("kda", GEOMETRIES["kda"], 1, form)
            yield f"kda {form} batch 256", layout, 1, heuristic(layout, 256, 1)[0]
    if capability == 90:
        for name, geometry in GEOMETRIES.items():
            layout = layout_of(name, geometry, 1, "bf16")
            yield f"{name} bf16 batch 256", layout, 1, heuristic(layout, 256, 1)[0]
        for name, window, tokens, precision in [
            ("mamba2", 16, 1, "fp32+fp8"),
            ("mamba2", 32, 1, "fp32+nvfp4"),
            ("mamba2", 16, 1, "fp8"),
            ("gdn", 32, 1, "fp32+nvfp4"),
            ("mamba2", 32, 4, "fp32+nvfp4"),
            ("gdn", 32, 4, "fp32+fp8"),
            ("gdn", 16, 8, "fp32"),
            ("mamba2", 16, 4, "fp16-stochastic"),
            ("gdn", 16, 1, "fp8+nvfp4"),
            ("gdn", 16, 4, "fp8"),
            ("kda", 32, 1, "fp32+nvfp4"),
            ("kda", 16, 4, "fp32+fp8"),
            ("kda", 32, 1, "fp8+nvfp4"),
            ("kda", 16, 1, "fp8"),
            ("mamba2", 16, 1, "fp16-stochastic"),
            ("gdn", 16, 1, "fp8-stochastic+nvfp4"),
        ]:
            config = ReplayConfig.of(precision, window=window, verify_len=tokens)
            layout = StateLayout(get(name), GEOMETRIES[name], config, torch.bfloat16)
            yield f"{name} {precision} T={tokens} W={window}", layout, tokens, heuristic(layout, 256, tokens)[0]
        for name, window in (("gdn", 32), ("mamba2", 64)):  # few rows, and longer rings
            layout = StateLayout(get(name), GEOMETRIES[name], ReplayConfig(window), torch.bfloat16)
            yield f"{name} W={window} batch 1", layout, 1, heuristic(layout, 1, 1)[0]
        for title, (name, geometry) in MORE.items():
            for tokens in (1, 4) if geometry.value_dim == 80 else (1,):
                layout = layout_of(name, geometry, tokens)
                yield f"{title} T={tokens}", layout, tokens, heuristic(layout, 256, tokens)[0]


def tuned(most: int) -> Iterator[tuple[str, StateLayout, int, Choice]]:
    """The different choices of every table, the first `most` of each."""
    for path in sorted(FOLDER.glob("*.json")):
        rows = {(row.shape, row.tokens > 1, row.choice): row for row in load(path)}
        for row in islice(rows.values(), most):
            shape = row.shape
            fitting = [r for r in registry().values() if (r.decay, r.delta_rule) == (shape.decay, shape.delta_rule)]
            geometry = Geometry(shape.heads, shape.key_heads, shape.key_dim, shape.value_dim)
            config = ReplayConfig(row.window, row.tokens, shape.checkpoint_format, shape.read_format)
            layout = StateLayout(fitting[0], geometry, config, getattr(torch, shape.model_dtype))
            assert Shape.of(layout) == shape
            yield f"{path.stem} {fitting[0].name} T={row.tokens} batch {row.batch}", layout, row.tokens, row.choice


Job = Callable[[], dict[str, Resources]]
"""Compiles something and says what each kernel takes, by title."""


def choice_job(title: str, layout: StateLayout, tokens: int, choice: Choice, capability: int) -> Job:
    return lambda: {
        f"{title} {launch}": resources
        for launch, resources in ahead.compile_choice(layout, tokens, choice, capability).items()
    }


def mixers(name: str, capability: int) -> Iterator[Job]:
    """Convolution with gates and gated norm around a recurrence."""
    parts, inputs, params, gates, constants, size, shared, gate_first, is_sigmoid = MIXERS[name]

    def convolve(tokens: int, items: int, is_tree: bool) -> dict[str, Resources]:
        geometry = replace(GEOMETRIES[name], conv_channels=sum(parts))
        resources = ahead.compile_convolve(
            layout_of(name, geometry, tokens),
            tokens,
            parts,
            capability,
            items=items,
            gate_inputs=inputs,
            gate_params=params,
            gates=gates,
            gate_constants=constants,
            is_tree=is_tree,
        )
        return {f"{name} convolve T={tokens} items {items}": resources}

    def gated_norm() -> dict[str, Resources]:
        resources = ahead.compile_gated_norm(
            layout_of(name, GEOMETRIES[name], 1),
            1,
            size,
            capability,
            shared=shared,
            gate_first=gate_first,
            is_sigmoid=is_sigmoid,
        )
        return {f"{name} gated norm": resources}

    for tokens, items, is_tree in [(1, 1, False), (1, MAX_TOKENS, False), (4, MAX_TOKENS, True)]:
        yield partial(convolve, tokens, items, is_tree)
    yield gated_norm


def around(name: str, capability: int) -> dict[str, Resources]:
    """What folds between steps and, for sm_90, what trees need."""
    layout = layout_of(name, GEOMETRIES[name], 1)
    found = {f"{name} fold": ahead.compile_materialize(layout, in_place=True, capability=capability)}
    if capability == 90:
        trees = layout_of(name, GEOMETRIES[name], 8)
        found[f"{name} tree"] = ahead.compile_prepare(trees, 8, is_tree=True)
        found[f"{name} compact"] = ahead.compile_compact(trees, 8)
    return found


def long_solve(capability: int) -> dict[str, Resources]:
    config = ReplayConfig(64, read_format="nvfp4")
    layout = StateLayout(get("kda"), GEOMETRIES["kda"], config, torch.bfloat16)
    return {"kda long solve": ahead.compile_solve(layout, capability)}


def jobs(capability: int, most: int) -> Iterator[Job]:
    for row in [*heuristics(capability), *(tuned(most) if capability == 90 else ())]:
        yield choice_job(*row, capability)
    for name in GEOMETRIES:
        yield partial(around, name, capability)
        yield from mixers(name, capability)
    if capability == 100:
        yield partial(long_solve, capability)
    yield partial(ahead.compile_cursor_kernels, capability)


def main(capability: int, most: int = sys.maxsize, part: int = 0, parts: int = 1) -> None:
    """Compile every `parts`-th of the jobs, from number `part` on."""
    found: dict[str, Resources] = {}
    for job in islice(jobs(capability, most), part, None, parts):
        found |= job()
    print(json.dumps({title: asdict(resources) for title, resources in found.items()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
