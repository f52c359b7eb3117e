"""Ordinary per-token decode kernels of other packages, imported from there and launched as they are.

`all_peers` builds every adapter whose package can be imported; the others are reported with the reason.
"""

from __future__ import annotations

import importlib

from replayssm.bench.candidate import Candidate

MODULES = ("vllm_mamba2", "vllm_delta", "fla", "mamba_ssm")


def all_peers() -> tuple[list[Candidate], list[tuple[str, str]]]:
    """(adapters, [(module, why it cannot be imported)])."""
    found: list[Candidate] = []
    missing: list[tuple[str, str]] = []
    for name in MODULES:
        try:
            module = importlib.import_module(f"{__name__}.{name}_peers")
        except Exception as error:  # noqa: BLE001 - whatever a foreign package raises, the others can be measured
            missing.append((name, f"{type(error).__name__}: {error}"))
        else:
            found.extend(peer() for peer in module.PEERS)
    return found, missing
