"""What can be measured: something that prepares a case, says whether it is right, and launches one layer's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from replayssm.bench.cases import Case
from replayssm.bench.reference import Errors
from replayssm.bench.timing import Step

What = Literal["ordinary", "snapshot", "replay"]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class View:
    """One way to look at a prepared case.

    Args:
        steps: launched in turn, each on the next layer of the rotation; their mean is reported.
        bytes: what one launch must move, on average over the steps.
        window: window in force, where the candidate chose another than the case's.
    """

    steps: Sequence[Step]
    bytes: float
    window: int | None = None


class Prepared(Protocol):
    """A case with all its memory, ready to launch."""

    layers: int
    configs: Sequence[Config]

    def check(self, config: Config) -> Errors:
        """Errors against fp64 with this configuration; CheckFailed where they are too large."""

    def views(self, config: Config) -> Mapping[str, View]:
        """What to time, by name: "step" for ordinary kernels; "cycle", "staggered", "step" and "flush" for replay."""


class Candidate(Protocol):
    """Something that is measured."""

    name: str
    version: str
    what: What

    def refuses(self, case: Case) -> str | None:
        """Why this candidate cannot run the case, or None."""

    def setup(self, case: Case, device: torch.device) -> Prepared:
        """Allocate and fill everything."""
