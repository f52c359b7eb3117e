"""Writing some rows of a batch and leaving the others alone, without asking the device which.

A padded or inactive row must touch no memory, yet index_put has no mask, and picking rows on the host would wait for
the device and break CUDA graphs. `put_rows` therefore repeats an active row's write in place of each inactive one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def host_visible(x: Tensor) -> bool:
    """Whether values of `x` may decide what the host does next: on the CPU, and not while a graph is traced."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def put_rows(target: Tensor, index: tuple[Tensor, ...], values: Tensor, active: Tensor | None) -> None:
    """target[index] = values where `active`, and nothing elsewhere.

    Args:
        target: any strides; its leading dims are addressed by `index`.
        index: int64 tensors [M], one per leading dim; may hold anything where inactive. Active entries differ.
        values: [M, ...], cast to the dtype of `target`.
        active: bool [M], None where the host knows that all are.
    """
    values = values.to(target.dtype)
    if active is None:
        target.index_put_(index, values)
        return
    if host_visible(active):
        chosen = active.nonzero().squeeze(1)
        if len(chosen):
            target[tuple(i[chosen] for i in index)] = values[chosen]
        return
    if not len(active):
        return
    some = active.any()
    first = active.to(torch.int8).argmax()
    source = torch.where(active, torch.arange(len(active), device=active.device), first)
    index = tuple(torch.where(some, i[source], 0) for i in index)
    values = torch.where(some, values[source], target[index])
    target.index_put_(index, values)
