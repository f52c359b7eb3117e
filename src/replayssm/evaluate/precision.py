"""Precision settings by name, as the command line and result files write them."""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.config import MAX_VERIFY_LEN, ReplayConfig

REFERENCE = "fp32"


@dataclass(frozen=True)
class Precision:
    """How a state is kept, named as for `ReplayConfig.of`.

    fp32+nvfp4 reads four bits beside an fp32 recurrence; nvfp4 alone is one copy that both share.
    """

    name: str

    def config(self, window: int) -> ReplayConfig:
        """The configuration for windows of `window` tokens, each of which ends in a flush.

        Raises:
            ValueError: unknown formats, two that make no sense together, or fp64, which is computed in another way.
        """
        config = ReplayConfig.of(self.name, window=window, verify_len=min(window, MAX_VERIFY_LEN), stagger=False)
        if config.checkpoint_format == "fp64":
            raise ValueError(f"a checkpoint in fp64 is for verification, and precisions are measured by {REFERENCE}")
        return config
