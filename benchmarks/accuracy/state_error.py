"""Relative error of a layer's state against fp64 after thousands of tokens, and of the fp32 per-token recurrence.

    python benchmarks/accuracy/state_error.py --tokens 8192 --json benchmarks/accuracy/results/state_error.json

Runs are driven through `verify` with up to 16 tokens a step, as speculation with everything accepted would.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from replayssm import ReplayConfig, __version__, flow
from replayssm.recurrences import Geometry, Recurrence, get, registry
from replayssm.state.pool import StatePool

REGIMES = ("trained-like", "slow", "very slow", "no decay", "strong", "alike keys")
"""How inputs are drawn, the first one as the recurrence draws them."""
WINDOWS = (1, 4, 16, 32, 64)


@dataclass(frozen=True)
class Row:
    """One measurement. Errors are relative Frobenius errors of the state of one layer, all heads together."""

    recurrence: str
    regime: str
    window: int
    model_dtype: str
    tokens: int
    error: float
    per_token_error: float


def regimes(recurrence: Recurrence) -> tuple[str, ...]:
    """Those that `draw` can make: it sets the decays of inputs that are called `log_decay`, or `dt`."""
    return REGIMES if {"log_decay", "dt"} & {field.name for field in recurrence.inputs} else REGIMES[:1]


def draw(recurrence: Recurrence, regime: str, geometry: Geometry, tokens: int, dtype: torch.dtype, seed: int = 0):
    """Inputs [tokens, ...] and params of one sequence in a regime of decays and keys."""
    inputs, params = recurrence.draw(geometry, (tokens,), torch.Generator().manual_seed(seed))
    constant = {"slow": -1e-3, "very slow": -1e-4, "no decay": 0.0, "strong": -3.0, "alike keys": -1e-4}.get(regime)
    if constant is not None:
        if "dt" in inputs:
            # the input keeps its size while the state does not decay: the rate vanishes, not the step
            rate = constant / float(inputs["dt"].mean())
            params = {**params, "A": torch.full_like(params["A"], rate)}
        else:
            inputs["log_decay"] = torch.full_like(inputs["log_decay"], constant)
    if regime == "alike keys":
        key = "k" if "k" in inputs else "B"
        inputs[key] = inputs[key][:1] + 0.05 * inputs[key]
        if "beta" in inputs:
            inputs["beta"] = 0.9 + 0.1 * inputs["beta"]
    model = {f.name for f in recurrence.inputs if f.dtype == "model"}
    return {n: x.to(dtype if n in model else torch.float32) for n, x in inputs.items()}, params


def replayed_state(
    recurrence: Recurrence, geometry: Geometry, inputs, params, window: int, dtype: torch.dtype
) -> Tensor:
    """State [H, N, P] after all tokens through a ring of `window`, fp32 checkpoint."""
    width = min(window, 16)
    config = ReplayConfig(window=window, verify_len=width)
    pool = StatePool.allocate(recurrence, geometry, config, slots=1, model_dtype=dtype, params=[params])
    slot = pool.acquire()
    tokens = next(iter(inputs.values())).shape[0]
    for begin in range(0, tokens, width):
        count = min(width, tokens - begin)
        with flow.step(pool, [slot], count) as step:
            flow.verify(pool, 0, step, {n: x[None, begin : begin + count] for n, x in inputs.items()})
        flow.commit(pool, [slot], count)
    return flow.materialize(pool, 0, [slot])[0]


def error(state: Tensor, exact: Tensor) -> float:
    """Relative Frobenius error."""
    return float((state.double() - exact).norm() / exact.norm())


def measure(
    name: str, regime: str, windows, dtype: torch.dtype, tokens: int, geometry: Geometry | None = None
) -> list[Row]:
    """One row per window."""
    recurrence = get(name)
    geometry = geometry or Geometry(2, 2, 64, 64)
    inputs, params = draw(recurrence, regime, geometry, tokens, dtype)
    start = torch.zeros(geometry.state_shape, dtype=torch.float64)
    exact = recurrence.recurrent(inputs, params, start, geometry)[1]
    per_token = error(recurrence.recurrent(inputs, params, start.float(), geometry)[1], exact)
    rows = []
    for window in windows:
        state = replayed_state(recurrence, geometry, inputs, params, window, dtype)
        rows.append(Row(name, regime, window, str(dtype), tokens, error(state, exact), per_token))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    conditions = {
        "replayssm": __version__,
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": "cpu",
        "backend": "torch",
        "checkpoint_format": "fp32",
        "geometry": asdict(Geometry(2, 2, 64, 64)),
        "command": " ".join(["python", "benchmarks/accuracy/state_error.py", *sys.argv[1:]]),
    }
    rows: list[Row] = []
    for name in registry():
        for regime in regimes(get(name)):
            for dtype in (torch.bfloat16, torch.float32):
                windows = WINDOWS if dtype == torch.bfloat16 else (16,)
                for row in measure(name, regime, windows, dtype, arguments.tokens):
                    rows.append(row)
                    print(
                        f"{name:8s} {regime:13s} {row.model_dtype[6:]:9s} window {row.window:2d}  "
                        f"{row.error:.1e}  (per-token fp32 {row.per_token_error:.1e})",
                        flush=True,
                    )
                if arguments.json:
                    arguments.json.parent.mkdir(parents=True, exist_ok=True)
                    made = {"conditions": conditions, "rows": [asdict(r) for r in rows]}
                    arguments.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
