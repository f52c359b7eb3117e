"""Kernels are interpreted where there is no GPU, and compiled where there is one."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .. import interpreter

if not torch.cuda.is_available():
    interpreter.switch_on()
    import triton.language as tl
    from triton.runtime import interpreter as stock

    _patch, _patched = stock._patch_lang, set()

    class _Nothing:
        def restore(self) -> None:
            pass

    def _patch_once(function: Any) -> Any:
        """Patch the language as a kernel starts, not again for each function that it calls: a third of the time."""
        langs = {x.__name__ for x in function.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)}
        if langs <= _patched:
            return _Nothing()
        outermost = not _patched
        scope = _patch(function)
        _patched.update(langs)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (_patched.clear(), restore())
        return scope

    stock._patch_lang = _patch_once


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
