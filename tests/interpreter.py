"""Make Triton's CPU interpreter right in bf16 and fp8. `switch_on` repairs and enables it, in this process, for good.

The stock interpreter (3.6 to 3.9) keeps bf16 and fp8 values as integers and forgets so: `tl.dot` and elementwise
arithmetic work on the bit patterns, fp32 -> bf16 truncates, fp32 -> fp8 loses the carry of a rounding, and casts
between bf16 and integers reinterpret. Nothing fails, results are just wrong. Here every such value is widened to fp32
(exactly), computed there, and rounded once to nearest even, as the hardware does; fp8 saturates, as `cvt.satfinite`.

    from .. import interpreter   # from a test module
    interpreter.switch_on()      # before the modules with the kernels are imported

What still differs from a GPU: fp32 dots are exact fp32 (a GPU's default is tf32), and the order of sums is numpy's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from . import bookkeeping

FLOATS = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
NARROW = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
"""Formats that numpy lacks: the interpreter holds their bits in unsigned integers."""

_NARROW_NAMES = frozenset(dtype.name for dtype in NARROW)

BITS = {
    1: (np.uint8, torch.uint8),
    2: (np.uint16, torch.uint16),
    4: (np.uint32, torch.uint32),
    8: (np.uint64, torch.uint64),
}
"""Unsigned integers by bytes."""

_Builder: Any = interpreter.InterpreterBuilder
_Handle: Any = interpreter.TensorHandle
_stock_convert = interpreter._convert_float
_round_to_zero = interpreter._ir.ROUNDING_MODE.RTZ


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest even; 8-bit formats saturate."""
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        values = torch.where(values.isnan(), values, values.clamp(-limit, limit))
    return values.to(dtype)


def convert_float(data: np.ndarray, src: Any, dst: Any, rounding_mode: Any) -> np.ndarray:
    """The bits of `data` (in format `src`) in format `dst`, as unsigned integers."""
    if src not in FLOATS or dst not in FLOATS or rounding_mode == _round_to_zero:
        return _stock_convert(data, src, dst, rounding_mode)
    source, target = FLOATS[src], FLOATS[dst]
    bits, _ = BITS[source.itemsize]
    copied = np.array(data, order="C", copy=True, ndmin=1)
    values = torch.from_numpy(copied.view(bits)).view(source)
    if source.itemsize == 1:
        values = values.float()
    return round_to(values, target).view(BITS[target.itemsize][1]).numpy().reshape(np.shape(data))


def widen(handle: Any) -> np.ndarray:
    """Values of a handle in a dtype that numpy can compute with."""
    if handle.dtype.scalar in NARROW:
        return convert_float(handle.data, handle.dtype.scalar, tl.float32, None).view(np.float32)
    return handle.data


def narrow(values: np.ndarray, dtype: Any) -> Any:
    """A handle of format `dtype` from values computed in fp32; truth values stay as they are."""
    if dtype in NARROW and values.dtype != np.bool_:
        values = convert_float(values.astype(np.float32), tl.float32, dtype, None)
    return _Handle(values, dtype)


def _is_narrow(*handles: Any) -> bool:
    return not _NARROW_NAMES.isdisjoint([handle.dtype.scalar.name for handle in handles])


def _repair_elementwise(name: str, result: int) -> None:
    """Let the builder's `name`(handle ..., op) compute widened; the result has the format of operand `result`."""
    stock = getattr(_Builder, name)

    def repaired(self: Any, *args: Any) -> Any:
        *handles, op = args
        if not _is_narrow(*handles) or op is np.where:  # a selection moves bits and needs no values
            return stock(self, *args)
        return narrow(op(*map(widen, handles)), handles[result].dtype.scalar)

    setattr(_Builder, name, repaired)


def _cast(self: Any, src: Any, dst_type: Any) -> Any:
    dst = dst_type.scalar
    if src.dtype.scalar not in NARROW and dst not in NARROW:
        return _stock_cast(self, src, dst_type)
    values = widen(src)
    if dst in NARROW:
        # an integer of more than 24 bits would be rounded twice on the way through fp32
        wide = values.astype(np.float64)
        return _Handle(convert_float(wide, tl.float64, dst, None), dst)
    return _Handle(values.astype(interpreter._get_np_dtype(dst_type)), dst)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    if _is_narrow(d):
        raise NotImplementedError(f"a dot that accumulates in {d.dtype.scalar} has no exact counterpart here")
    return _Handle(np.matmul(widen(a), widen(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    return narrow(widen(x) * widen(y) + widen(z), z.dtype.scalar)


def _rsqrt(self: Any, arg: Any) -> Any:
    return narrow(1 / np.sqrt(widen(arg)), arg.dtype.scalar)


def _refuse_narrow_atomics(stock: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: Any, op: Any, ptr: Any, val: Any, *rest: Any) -> Any:
        if _is_narrow(val):
            raise NotImplementedError(f"atomics on {val.dtype.scalar} work on bit patterns in the interpreter")
        return stock(self, op, ptr, val, *rest)

    return guarded


def _constant(self: Any, value: float) -> Any:
    return narrow(np.array([value], dtype=np.float32), tl.bfloat16)


_stock_cast = _Builder.cast_impl


def repair() -> None:
    """Replace the interpreter's faulty operations, once."""
    if getattr(_Builder, "repaired_by_replayssm", False):
        return
    _Builder.repaired_by_replayssm = True
    interpreter._convert_float = convert_float
    _Builder.cast_impl = _cast
    for name, result in (("unary_op", 0), ("binary_op", 0), ("ternary_op", 2)):
        _repair_elementwise(name, result)
    _Builder.create_dot = _dot
    _Builder.create_fma = _fma
    _Builder.create_rsqrt = _rsqrt
    _Builder.create_atomic_rmw = _refuse_narrow_atomics(_Builder.create_atomic_rmw)
    _Builder.get_bf16 = _constant
    bookkeeping.remember()


def _interpret_language() -> None:
    """Interpret Triton's own jitted functions (tl.sum, tl.cumsum, ...), whatever was imported before the variable."""
    replaced: dict[int, Any] = {}

    def interpreted(function: JITFunction) -> Any:
        return replaced.setdefault(id(function), interpreter.InterpretedFunction(function.fn))

    homes = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
    for home in [*homes, tl.tensor]:
        for name, value in list(vars(home).items()):
            if isinstance(value, JITFunction):
                setattr(home, name, interpreted(value))


def switch_on() -> None:
    """Interpret every kernel that is defined from here on. Child processes inherit it unless they drop the variable.

    Raises:
        RuntimeError: kernels of this library are defined already, and would be compiled.
    """
    early = [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("replayssm") and any(isinstance(x, JITFunction) for x in vars(module).values())
    ]
    if early:
        raise RuntimeError(f"switch_on must come before these are imported: {', '.join(early)}")
    os.environ["TRITON_INTERPRET"] = "1"
    repair()
    _interpret_language()
