"""Fit the kernel costs of `replayssm.planner.gpus` to measured rows, and print them with what is left.

    PYTHONPATH=src python benchmarks/planner/fit.py

It lowers the sixth power of relative differences, which is close to lowering the worst of them, by random steps from
the costs that the table has now. The read rate stays at what the read kernel reaches. Rows of complete steps are
compared with the table as it is: of a whole step only the rate of matrix products is fitted, by hand.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, replace
from pathlib import Path

from replayssm.bench.predictions import differences, step_differences, summary
from replayssm.bench.rows import Report
from replayssm.planner.gpus import H200, KernelCosts

FOLDER = Path(__file__).resolve().parents[1]
STEPS = 5000
OUTLIER = 0.2
"""A row that is further off than that no longer counts: what no costs explain must not bend the others."""


def main() -> None:
    reports = [Report.load(FOLDER / name) for name in H200.fit.sources]
    draw = random.Random(0)

    def loss(costs: KernelCosts) -> float:
        return sum(min(abs(row.relative), OUTLIER) ** 6 for row in differences(costs, reports))

    best, size = H200.kernels, 0.1
    least = loss(best)
    for step in range(STEPS):
        chosen = draw.sample([name for name in asdict(best) if name != "read_gb_s"], draw.choice((1, 1, 2)))
        tried = replace(best, **{name: getattr(best, name) * math.exp(draw.gauss(0, size)) for name in chosen})
        found = loss(tried)
        if found < least:
            best, least = tried, found
        if step % 800 == 799:
            size /= 1.6
    for name, value in asdict(best).items():
        print(f"{name}={value:.4g},")
    kernels = differences(best, reports)
    whole = step_differences(H200, (Report.load(FOLDER / name) for name in H200.step_fit.sources))
    for found, fit in ((kernels, H200.fit), (whole, H200.step_fit)):
        print(summary(found, fit.sources))
        for row in sorted(found, key=lambda row: -abs(row.relative))[:20]:
            print(f"{row.relative:+.1%} {row.label}")


if __name__ == "__main__":
    main()
