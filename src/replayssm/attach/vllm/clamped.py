"""Clamped elements of an engine's states: said once, and no step waits to find out."""

from __future__ import annotations

import warnings

import torch

from replayssm.state.formats import FORMATS
from replayssm.state.pool import SaturationWarning, StatePool, saturation_message

EVERY = 64
"""Steps from one look to the next, which sees what had been clamped by the one before."""


class ClampWatch:
    """Looks at the counts of a pool whose slots nobody releases.

    Their sum is copied to the host while steps go on, and read when the next copy is due.

    Args:
        pool: the pool; its counts only grow.
    """

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        narrowest = FORMATS[pool.config.read_format or pool.config.checkpoint_format]
        self._watching = narrowest.bits_per_element < 32
        self._steps = 0
        on_cuda = pool.device.type == "cuda"
        self._count = torch.zeros((), dtype=torch.int64, pin_memory=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None

    def step(self) -> None:
        """Count a step; warn, once, when a look shows that elements were clamped."""
        self._steps += 1
        if not self._watching or self._steps % EVERY or not (self._copied is None or self._copied.query()):
            return
        clamped = int(self._count)
        if clamped:
            self._watching = False
            warnings.warn(saturation_message(self.pool.config, clamped), SaturationWarning, stacklevel=2)
            return
        self._count.copy_(self.pool.cursor.saturated.sum(), non_blocking=True)
        if self._copied is not None:
            self._copied.record()
