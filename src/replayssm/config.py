"""The one option object of the library.

Options are frozen, checked once at construction, and every refusal says what was expected, what was
given and what to do instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from replayssm.state.formats import FORMATS

MAX_WINDOW = 64
MAX_VERIFY_LEN = 16
Rounding = Literal["nearest", "stochastic"]

STOCHASTIC = "-stochastic"
SHARED_ONLY = ("int8", "nvfp4")
"""Formats of read copies. As a checkpoint they serve to show what it costs when reads and recurrence share one copy."""


@dataclass(frozen=True)
class ReplayConfig:
    """How the recurrent state of a sequence is kept and replayed.

    Args:
        window: most committed records before a flush is due, 1..64. 1 is the ordinary per-token form. Kernels may put 1
            in force at the smallest batches, where a table of measurements says that replaying does not win there.
        verify_len: most new tokens of a row in one step (1 + drafts), 1..min(window, 16).
        checkpoint_format: storage format of the checkpoint, a name in `state.formats.FORMATS`.
        read_format: storage format of the read copy, or None when outputs read the checkpoint itself.
        rounding: how a checkpoint narrower than fp32 is rounded, once per flush: to "nearest" even, or "stochastic", up
            or down at random so that the mean is exact. Read copies are always rounded to nearest.
        carry_history: keep enough convolution inputs to reach back to any record of the ring, which
            `materialize` and `fork` to an earlier point need.
        stagger: give each acquired slot its own phase for its first flush, so that a batch that starts
            together does not flush together.

    Raises:
        ValueError: a value is out of range, or two values contradict each other.
    """

    window: int = 16
    verify_len: int = 1
    checkpoint_format: str = "fp32"
    read_format: str | None = None
    rounding: Rounding = "nearest"
    carry_history: bool = False
    stagger: bool = True

    @classmethod
    def of(cls, precision: str, **options: Any) -> ReplayConfig:
        """The configuration of a precision by name: "checkpoint" or "checkpoint+read copy", as in "fp32+nvfp4".

        A checkpoint that is rounded at random has "-stochastic" after its name, as in "fp8-stochastic+nvfp4".

        Args:
            precision: the name.
            options: the other fields.

        Raises:
            ValueError: unknown formats, or two that make no sense together.
        """
        if not isinstance(precision, str):
            raise ValueError(f'precision must be a name such as "fp32+nvfp4", got {precision!r}')
        said = sorted({"checkpoint_format", "read_format", "rounding"} & set(options))
        if said:
            raise ValueError(f"precision {precision!r} says {', '.join(said)} already: give one or the other")
        checkpoint, plus, read_copy = precision.partition("+")
        return cls(
            checkpoint_format=checkpoint.removesuffix(STOCHASTIC),
            read_format=read_copy if plus else None,
            rounding="stochastic" if checkpoint.endswith(STOCHASTIC) else "nearest",
            **options,
        )

    def __post_init__(self) -> None:
        for name in ("window", "verify_len"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an int, got {value!r}")
        if not 1 <= self.window <= MAX_WINDOW:
            raise ValueError(f"window must be in 1..{MAX_WINDOW}, got {self.window}")
        if not 1 <= self.verify_len <= MAX_VERIFY_LEN:
            raise ValueError(f"verify_len must be in 1..{MAX_VERIFY_LEN}, got {self.verify_len}")
        if self.verify_len > self.window:
            raise ValueError(
                f"verify_len {self.verify_len} is larger than window {self.window}: a step's tokens must fit in an "
                f"empty window; raise window to at least {self.verify_len} or lower verify_len"
            )
        for name in ("checkpoint_format", "read_format"):
            value = getattr(self, name)
            if value is None and name == "read_format":
                continue
            if not isinstance(value, str) or value not in FORMATS:
                raise ValueError(f"{name} must be one of {', '.join(FORMATS)}, got {value!r}")
        if self.rounding not in get_args(Rounding):
            raise ValueError(f"rounding must be one of {', '.join(get_args(Rounding))}, got {self.rounding!r}")
        if self.rounding == "stochastic" and self.checkpoint_format in ("fp64", "fp32"):
            raise ValueError(
                f"a checkpoint in {self.checkpoint_format} is not rounded to fewer bits than it is computed in: "
                'rounding "stochastic" needs a narrower checkpoint_format'
            )
        if self.read_format is not None:
            if self.checkpoint_format in SHARED_ONLY:
                raise ValueError(
                    f"checkpoint_format {self.checkpoint_format} is too coarse to drive the recurrence beside a read "
                    "copy: it is offered only as the one copy that reads and recurrence share; leave read_format out, "
                    "or use a checkpoint in fp32, fp16, bf16 or fp8"
                )
            read, checkpoint = FORMATS[self.read_format], FORMATS[self.checkpoint_format]
            if read.bits_per_element >= checkpoint.bits_per_element:
                raise ValueError(
                    f"read_format {self.read_format} is not smaller than checkpoint_format {self.checkpoint_format}: "
                    "a second copy would only add memory; leave read_format out"
                )
        for name in ("carry_history", "stagger"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
