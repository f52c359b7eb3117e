"""What a shared low-precision copy costs against reads alone, by how long a head remembers.

    python benchmarks/accuracy/memory.py --json benchmarks/accuracy/results/memory.json

One layer of each recurrence on random inputs, a head for each half-life, window 16. The figure is the squared error of
the outputs against fp32 states, relative, over the second half of the text; KL divergence is proportional to it where
errors are small. A rounding of relative variance e is gone at the next flush in a read copy, and W - 1 of W tokens see
it. In a shared copy it stays until the state has forgotten it: e tau / (2 W) of it has gathered besides the newest one,
so that the ratio of both is

    (1 + tau / (2 W)) W / (W - 1),    1 / tau = ln 2 / half-life + beta / N    (a delta rule also overwrites)

while rounding to nearest is as good as random; with a very long memory additions smaller than half a step are lost, and
the ratio is larger.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from replayssm.evaluate.precision import Precision  # noqa: E402
from replayssm.evaluate.replay import LayerReplay  # noqa: E402
from replayssm.recurrences import Geometry, registry  # noqa: E402

SHARED = "nvfp4"
PRECISIONS = (SHARED, "nvfp4-stochastic", "fp32+nvfp4", "fp16+nvfp4", "fp8+nvfp4", "fp8-stochastic+nvfp4")
HALF_LIVES = (50.0, 200.0, 700.0)
WINDOW, DIM, BETA = 16, 64, 0.5


def measure(name: str, tokens: int) -> dict[str, Any]:
    """Errors of one recurrence, and their ratios, by half-life."""
    recurrence, heads = registry()[name], len(HALF_LIVES)
    inputs, params = recurrence.draw(Geometry(heads, heads, DIM, DIM), (1, tokens), torch.Generator().manual_seed(0))
    rate = math.log(2) / torch.tensor(HALF_LIVES)
    if recurrence.delta_rule:
        log_decay = inputs["log_decay"]
        inputs["log_decay"] = -rate.reshape(heads, *[1] * (log_decay.dim() - 3)).expand_as(log_decay).contiguous()
        inputs["beta"] = torch.full_like(inputs["beta"], BETA)
        overwritten = BETA / DIM
    else:
        step = 0.1
        inputs["dt"] = torch.full_like(inputs["dt"], step)
        params = {"A": -rate / step, "D": torch.zeros(heads)}
        overwritten = 0.0
    names = ("fp32", *PRECISIONS)
    configs = [Precision(each).config(WINDOW) for each in names]
    repeated = {key: x.repeat(len(names), *[1] * (x.dim() - 1)) for key, x in inputs.items()}
    geometry = Geometry(heads, heads, DIM, DIM)
    layer = LayerReplay(recurrence, geometry, params, configs, 1, torch.float32, torch.device("cpu"), 0)
    y = layer.run(repeated).outputs[:, tokens // 2 :].double()
    error = (y[1:] - y[:1]).square().sum((1, 3)) / y[:1].square().sum((1, 3))
    tau = 1 / (rate + overwritten)
    return {
        "recurrence": name,
        "half_lives": list(HALF_LIVES),
        "predicted_ratio": [round(x, 1) for x in ((1 + tau / (2 * WINDOW)) * WINDOW / (WINDOW - 1)).tolist()],
        "squared_error": {
            each: [float(f"{x:.3g}") for x in row] for each, row in zip(PRECISIONS, error.tolist(), strict=True)
        },
        "ratio_of_shared_copy": {
            each: [round(x, 1) for x in (error[0] / row).tolist()]
            for each, row in zip(PRECISIONS[1:], error[1:], strict=True)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in registry():
        rows.append(measure(name, arguments.tokens))
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "conditions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": "cpu",
            "window": WINDOW,
            "state": f"{DIM} x {DIM}",
            "tokens": arguments.tokens,
            "command": " ".join(["python", "benchmarks/accuracy/memory.py", *sys.argv[1:]]),
        },
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
