"""Fit the kernel costs of `replayssm.planner.gpus` to measured rows, and print them with what is left.

    PYTHONPATH=src python benchmarks/planner/fit.py benchmarks/kernels/results/2026-11-30-h200.json

It lowers the sixth power of relative differences, which is close to lowering the worst of them, by random steps from
the costs that the table has now. The read rate stays at what the read kernel reaches. Rows of complete steps
(`benchmarks/steps`) are compared with the table as it is: nothing is fitted to them.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path

from replayssm.bench.rows import Report
from replayssm.planner.compare import differences, step_differences, summary
from replayssm.planner.gpus import H200, KernelCosts

STEPS = 3000
OUTLIER = 0.2
"""A row that is further off than that no longer counts: what no costs explain must not bend the others."""


def main() -> None:
    report = Report.load(Path(sys.argv[1]))
    whole = step_differences(H200, report)
    if whole:
        print(summary(whole, Path(sys.argv[1]).name))
        for row in whole:
            print(f"{row.relative:+.1%} {row.label}")
        return
    draw = random.Random(0)

    def loss(costs: KernelCosts) -> float:
        return sum(min(abs(row.relative), OUTLIER) ** 6 for row in differences(costs, report))

    best, size = H200.kernels, 0.1
    least = loss(best)
    for step in range(STEPS):
        chosen = draw.sample([name for name in asdict(best) if name != "read_gb_s"], draw.choice((1, 1, 2)))
        tried = replace(best, **{name: getattr(best, name) * math.exp(draw.gauss(0, size)) for name in chosen})
        found = loss(tried)
        if found < least:
            best, least = tried, found
        if step % 500 == 499:
            size /= 1.6
    for name, value in asdict(best).items():
        print(f"{name}={value:.4g},")
    print(summary(differences(best, report), Path(sys.argv[1]).name))
    for row in sorted(differences(best, report), key=lambda row: -abs(row.relative))[:10]:
        print(f"{row.relative:+.1%} {row.label}")


if __name__ == "__main__":
    main()
