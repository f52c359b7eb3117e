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
    """The same for folds outside of a step. Beside a read copy those, which are few, run on torch."""
    return kernels_of(pool) if pool.config.read_format is None else None
