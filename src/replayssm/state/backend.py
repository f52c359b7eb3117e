"""Which back end a pool runs on: chosen once, when the pool is made, and said once."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from replayssm.state.layout import StateLayout
    from replayssm.state.pool import LayerState

Backend = Literal["torch", "triton"]

MAX_KEY_DIM = 256
"""A kernel's program keeps whole state columns in registers; longer ones would spill."""

TRITON_FROM, TRITON_BELOW = (3, 6), (3, 10)
KERNEL_FORMATS = ("fp32", "fp16", "bf16", "fp8")
KERNEL_COPIES = ("fp8", "int8", "nvfp4")

_log = logging.getLogger("replayssm")


def choose(asked: str, layers: Sequence[LayerState]) -> Backend:
    """The back end for these layers.

    Args:
        asked: "torch", "triton", or "auto": triton on a CUDA device when it supports every layer, else torch.
        layers: the pool's layers.

    Raises:
        ValueError: `asked` is unknown, or names a back end that cannot run these layers.
    """
    if asked not in ("auto", "torch", "triton"):
        raise ValueError(f'backend must be "auto", "torch" or "triton", got {asked!r}')
    if asked == "torch":
        return "torch"
    reason = triton_refusal(layers)
    if asked == "triton":
        if reason is not None:
            raise ValueError(f'backend "triton" cannot run this pool: {reason}')
        return "triton"
    on_cuda = layers[0].device.type == "cuda"
    chosen: Backend = "triton" if on_cuda and reason is None else "torch"
    if reason is None:
        reason = "it supports every layer" if on_cuda else f"the pool is on {layers[0].device.type}"
    # a GPU without the kernels is slower than its owner expects, and must not stay quiet about it
    _say(f"back end {chosen}: {reason}", logging.WARNING if on_cuda and chosen == "torch" else logging.INFO)
    return chosen


def triton_refusal(layers: Sequence[LayerState]) -> str | None:
    """Why the Triton kernels cannot run these layers, or None."""
    reason = _triton_missing()
    if reason is None and layers[0].device.type != "cuda" and not interpreting():
        reason = (
            f"the pool is on {layers[0].device.type} and Triton compiles for CUDA devices; to interpret the kernels "
            "for tests, set TRITON_INTERPRET=1 before triton is imported"
        )
    return reason or next((r for r in map(layer_refusal, layers) if r is not None), None)


def layer_refusal(layer: LayerState) -> str | None:
    """Why the kernels cannot run one layer, whatever the device."""
    layout = layer.layout
    config, recurrence = layout.config, layout.recurrence
    if config.checkpoint_format not in KERNEL_FORMATS:
        known = ", ".join(KERNEL_FORMATS)
        return f"the kernels keep checkpoints in {known}, not in {config.checkpoint_format}"
    if layout.model_dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernels take fp32, fp16 and bf16 activations, not {layout.model_dtype}"
    reason = _code_refusal(layout)
    if reason is not None:
        return reason
    if layout.geometry.key_dim > MAX_KEY_DIM:
        return f"the kernels hold at most {MAX_KEY_DIM} rows of a state, and key_dim is {layout.geometry.key_dim}"
    if not has_triton_form(type(recurrence).__module__):
        return f"{recurrence.title} has no triton.py in its folder"
    for spec in layout.tensors:
        if spec.name.startswith("carry."):
            continue
        tensor = layer.tensors[spec.name]
        is_ring = spec.name.startswith("ring.")
        if not (tensor[0, 0, 0] if is_ring else tensor[0]).is_contiguous():
            what = "one head of a record" if is_ring else "a slot"
            return (
                f"tensor {spec.name!r} must be contiguous within {what}, got strides {list(tensor.stride())} for shape "
                f"{list(tensor.shape)}"
            )
    return None


def _code_refusal(layout: StateLayout) -> str | None:
    """Why the kernels cannot keep this layer's codes, of a read copy or of an fp8 checkpoint."""
    config, key_dim = layout.config, layout.geometry.key_dim
    if config.read_format not in (None, *KERNEL_COPIES):
        return f"the kernels read copies in {', '.join(KERNEL_COPIES)}, and read_format is {config.read_format}"
    if (config.read_format or config.checkpoint_format == "fp8") and key_dim not in (64, 128, 256):
        return f"the kernels read codes of states whose key_dim is 64, 128 or 256, and it is {key_dim}"
    return None


def interpreting() -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1, so that kernels run on CPU tensors."""
    import triton
    import triton.language as tl

    return not isinstance(tl.sum, triton.JITFunction)


@cache
def has_triton_form(module: str) -> bool:
    """Whether the recurrence defined in `module` has a `triton.py` beside it."""
    return find_spec(f"{module.rpartition('.')[0] or module}.triton") is not None


@cache
def _triton_missing() -> str | None:
    wanted = f"install triton>={_dotted(TRITON_FROM)},<{_dotted(TRITON_BELOW)} (replayssm[gpu])"
    if find_spec("triton") is None:
        return f"Triton is not installed; {wanted}"
    try:
        found = metadata.version("triton")
    except metadata.PackageNotFoundError:  # built from source
        import triton

        found = triton.__version__
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    if not TRITON_FROM <= numbers < TRITON_BELOW:
        return f"Triton {found} is installed, whose kernels were never checked; {wanted}"
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@cache  # once per sentence
def _say(sentence: str, level: int) -> None:
    _log.log(level, sentence)
