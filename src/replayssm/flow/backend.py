"""Where the verbs turn to compiled kernels. Every verb asks here, once, and runs its own torch code when told None."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.state.pool import StatePool

if TYPE_CHECKING:
    from replayssm.kernels.ops import Kernels


def kernels_of(pool: StatePool) -> Kernels | None:
    """The kernels that this pool's steps run on, None for the torch back end. Triton is imported only here."""
    if pool.backend == "torch":
        return None
    from replayssm.kernels.ops import Kernels

    return Kernels(pool)


def fold_kernels_of(pool: StatePool) -> Kernels | None:
    """The same for folds outside of a step. Those, which are few, run on torch where they do more than cast a state."""
    config = pool.config
    casts = config.read_format is None and config.checkpoint_format != "fp8" and config.rounding == "nearest"
    return kernels_of(pool) if casts else None
