"""Set-up shared by all tests."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# `make test` gives each worker one thread; a worker started by hand should not take every core either.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# "ci" is the default and repeats the same examples; `--hypothesis-profile long` searches on.
_COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=300, derandomize=True, **_COMMON)
settings.register_profile("long", max_examples=7_600, **_COMMON)  # 10,032 over all recurrences and modes
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
