"""Kernels are interpreted where there is no GPU, and compiled where there is one."""

from collections.abc import Iterator

import pytest
import torch

from .. import interpreter

if not torch.cuda.is_available():
    interpreter.switch_on()


@pytest.fixture
def interpreted_pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies are read as pairs (kernels/formats.py), also where kernels are interpreted."""
    from replayssm.kernels import launch

    from .pairs import CACHED, use_pairs

    if torch.cuda.is_available():
        if not launch._has_e4m3():
            pytest.skip("this GPU does not read pairs")
        yield
        return
    with monkeypatch.context() as patch:
        use_pairs(patch)
        for function in CACHED:
            function.cache_clear()
        yield
    for function in CACHED:
        function.cache_clear()
