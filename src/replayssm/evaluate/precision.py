"""Precision settings by name, as the command line and result files write them."""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.config import MAX_VERIFY_LEN, ReplayConfig

STOCHASTIC = "-stochastic"
REFERENCE = "fp32"


@dataclass(frozen=True)
class Precision:
    """How a state is kept: "checkpoint" or "checkpoint+read copy".

    fp32+nvfp4 reads four bits beside an fp32 recurrence; nvfp4 alone is one copy that both share. A checkpoint that is
    rounded at random has "-stochastic" after its name, as in fp8-stochastic+nvfp4.
    """

    name: str

    def config(self, window: int) -> ReplayConfig:
        """The configuration for windows of `window` tokens, each of which ends in a flush.

        Raises:
            ValueError: unknown formats, or two that make no sense together.
        """
        checkpoint, plus, read_copy = self.name.partition("+")
        stochastic = checkpoint.endswith(STOCHASTIC)
        return ReplayConfig(
            window=window,
            verify_len=min(window, MAX_VERIFY_LEN),
            checkpoint_format=checkpoint.removesuffix(STOCHASTIC),
            read_format=read_copy if plus else None,
            rounding="stochastic" if stochastic else "nearest",
            stagger=False,
        )
