"""`replayssm info`: what is installed, what can run here, which models are supported and bundled."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from replayssm import ReplayConfig, __version__, models, supported_families
from replayssm.bench.geometries import find
from replayssm.state.formats import FORMATS
from replayssm.state.layout import StateLayout

GEOMETRIES = ("nemotron3-super-120b", "qwen3.5-122b-a10b", "kimi-linear-48b-a3b")
"""Models whose layers the memory of each precision is shown for, one of each recurrence."""
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")


def collect() -> dict[str, Any]:
    """Everything the command shows, as plain data."""
    return {
        "versions": {"replayssm": __version__, "python": platform.python_version()}
        | {package: _version(package) for package in PACKAGES},
        "back_ends": _back_ends(),
        "families": list(supported_families()),
        "models": [_bundled(name) for name in models.names()],
        "precisions": _precisions(),
    }


def show(facts: dict[str, Any], *, as_json: bool) -> None:
    """Print the facts on standard output."""
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    versions = _table("package", "version")
    for package, version in facts["versions"].items():
        versions.add_row(package, version or "not installed")
    back_ends = _table("back end", "available", "")
    for back_end in facts["back_ends"]:
        back_ends.add_row(back_end["name"], "yes" if back_end["available"] else "no", back_end["detail"])
    bundled = _table("bundled model", "size", "parameters", "bits per byte")
    for model in facts["models"]:
        bits = model["bits_per_byte"]
        bundled.add_row(
            model["name"] + (" (default)" if model["name"] == models.DEFAULT else ""),
            f"{model['bytes'] / 1e6:.1f} MB",
            "unknown" if model["parameters"] is None else f"{model['parameters'] / 1e6:.2f} M",
            "unknown" if bits is None else f"{bits:.3f}",
        )
    memory = _table("precision", *GEOMETRIES)
    memory.title, memory.title_justify = "MiB of one layer and sequence: kept / state read per step", "left"
    for row in facts["precisions"]:
        sizes = (row["bytes"][name] for name in GEOMETRIES)
        memory.add_row(row["name"], *(f"{s['slot'] / 2**20:.2f} / {s['read'] / 2**20:.2f}" for s in sizes))
    for table in (versions, back_ends, bundled, memory):
        console.print(table)
        console.print()
    console.print("supported model families: " + ", ".join(facts["families"]))


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in headings:
        table.add_column(heading)
    return table


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _back_ends() -> list[dict[str, Any]]:
    cuda = torch.cuda.is_available()
    if cuda:
        cuda_detail = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    elif torch.version.cuda is None:
        cuda_detail = "this torch was built without CUDA"
    else:
        cuda_detail = "torch sees no CUDA device"
    triton = _version("triton") is not None
    if not triton:
        triton_detail = "not installed"
    else:
        triton_detail = "compiled" if cuda else "interpreted only, for tests: there is no GPU"
    return [
        {"name": "cpu", "available": True, "detail": f"torch threads: {torch.get_num_threads()}"},
        {"name": "cuda", "available": cuda, "detail": cuda_detail},
        {"name": "triton", "available": triton and cuda, "detail": triton_detail},
    ]


def _precisions() -> list[dict[str, Any]]:
    """Every combination of formats, as `replayssm eval` names it, with the bytes of one layer and sequence."""
    found = []
    for checkpoint in FORMATS:
        for read_copy in (None, *FORMATS):
            try:
                config = ReplayConfig(checkpoint_format=checkpoint, read_format=read_copy)
            except ValueError:
                continue  # makes no sense together
            if "fp64" in (checkpoint, read_copy):
                continue  # for verification
            sizes = {}
            for name in GEOMETRIES:
                model = find(name)
                layout = StateLayout(model.replayed, model.geometry, config, torch.bfloat16)
                sizes[name] = {"slot": layout.slot_bytes, "read": layout.read_bytes}
            found.append({"name": f"{checkpoint}+{read_copy}" if read_copy else checkpoint, "bytes": sizes})
    return found


def _bundled(name: str) -> dict[str, Any]:
    folder = models.path(name)
    training = _training(folder)
    return {
        "name": name,
        "bytes": sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        "parameters": training.get("parameters"),
        "bits_per_byte": training.get("evaluation", {}).get("bits_per_byte"),
    }


def _training(folder: Path) -> dict[str, Any]:
    file = folder / "training.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
