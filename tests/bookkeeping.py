"""Make Triton's interpreter quick: what it works out again at each operation is remembered. No number changes.

Most of an interpreted kernel's time goes to the types of its tensors. `switch_on` of interpreter.py calls `remember`.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_stock_block, _stock_tensor = tl.block_type.__init__, tl.tensor.__init__
_stock_same, _stock_broadcast = tl.dtype.__eq__, TritonSemantic.broadcast_impl_value
_stock_patch, _stock_numpy = interpreter._patch_lang, interpreter._get_np_dtype

_block_shapes: dict[tuple[int, ...], tuple[Any, int]] = {}
_tensor_shapes: dict[int, tuple[Any, Any, Any]] = {}
_numpy_dtypes: dict[str, np.dtype] = {}
_modules: dict[Any, set[str]] = {}
_patched: set[str] = set()


def _block(self: Any, element_ty: tl.dtype, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    if sizes not in _block_shapes:
        _stock_block(self, element_ty, shape)
        _block_shapes[sizes] = self.shape, self.numel
    self.element_ty = element_ty
    self.shape, self.numel = _block_shapes[sizes]


def _tensor(self: Any, handle: Any, type: tl.dtype) -> None:
    shape = type.shape if type.is_block() else None
    if id(shape) not in _tensor_shapes:
        _stock_tensor(self, handle, type)
        _tensor_shapes[id(shape)] = self.shape, self.numel, shape  # the last keeps its id taken
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel, _ = _tensor_shapes[id(shape)]


def _same(self: Any, other: Any) -> bool:
    if self is other:
        return True
    return self.name == other.name if type(other) is tl.dtype else _stock_same(self, other)


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
        return lhs, rhs
    return _stock_broadcast(self, lhs, rhs)


def _numpy(dtype: Any) -> np.dtype:
    name = dtype.scalar.name
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = _stock_numpy(dtype)
    return _numpy_dtypes[name]


class _Nothing:
    def restore(self) -> None:
        pass


def _patch_once(function: Any) -> Any:
    """Patch the language as a kernel starts, not again for each function that it calls."""
    if function not in _modules:
        seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        _modules[function] = {module.__name__ for module in seen if module in (tl, tl.core)}
    if _modules[function] <= _patched:
        return _Nothing()
    outermost = not _patched
    scope = _stock_patch(function)
    _patched.update(_modules[function])
    if outermost:
        restore = scope.restore
        scope.restore = lambda: (_patched.clear(), restore())
    return scope


def remember() -> None:
    """Replace the interpreter's slow parts. To be called once in a process."""
    tl.block_type.__init__, tl.tensor.__init__ = _block, _tensor
    tl.block_type.name = cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.block_type.name.__set_name__(tl.block_type, "name")
    tl.dtype.__eq__ = _same
    TritonSemantic.broadcast_impl_value = _broadcast
    interpreter._get_np_dtype = _numpy
    interpreter._patch_lang = _patch_once
    # sums of integers are computed again in 64 bits for an assertion that is made in debug mode only
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
