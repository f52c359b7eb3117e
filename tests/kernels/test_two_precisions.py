"""Read copies in the kernels: nothing that outlives a flush comes from them, and windows are solved whatever decays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from replayssm import flow
from replayssm.recurrences import Geometry

from .harness import SPLIT, Case, Twins, bits, tiles
from .test_conformance import RECURRENCES

SMALL = Geometry(2, 1, 64, 16)
ROWS = (3, -1, 0)


def checkpoints(case: Case, *, garbage: bool) -> list[Tensor]:
    """Bits of the checkpoints after each of some steps on the kernels, with drafts that are rejected."""
    twins, noise = Twins(case), torch.Generator().manual_seed(1)
    pool, found = twins.pools["triton"], []
    for number in range(5):
        inputs, _ = twins._draw(case.verify_len)
        with tiles(case.choice), flow.step(pool, ROWS, case.verify_len) as step:
            flow.verify(pool, 0, step, inputs)
        kept = 1 + number % case.verify_len
        flow.commit(pool, ROWS, [kept, 0, case.verify_len + 1 - kept])
        for name, tensor in pool.layers[0].tensors.items():
            if garbage and name.startswith("read_copy"):
                tensor.copy_((torch.randn(tensor.shape, generator=noise) * 50).to(tensor.dtype))
            if name.split(".")[0] == "checkpoint":
                found.append(bits(tensor[[3, 0]]).clone())
    assert pool.tally.flushes > 2
    return found


@pytest.mark.parametrize("checkpoint", ["fp32", "fp8"])
@pytest.mark.parametrize("name", RECURRENCES)
def test_garbage_in_the_read_copy_never_reaches_a_checkpoint(name: str, checkpoint: str) -> None:
    case = Case(name, SMALL, 3, 2, checkpoint_format=checkpoint, read_format="nvfp4", choice=SPLIT, rows=ROWS)
    clean, dirty = (checkpoints(case, garbage=garbage) for garbage in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


class AnyDecay(Twins):
    """Tokens that forget nothing, a little, much or all, channel by channel where a rule has such decays."""

    def _draw(self, tokens: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        inputs, params = super()._draw(tokens)
        drawn = inputs["log_decay"]
        scale = torch.tensor([1e-4] * 8 + [0.1] * 3 + [1.0, 50.0, torch.inf], device=drawn.device)
        inputs["log_decay"] = drawn * scale[torch.randint(len(scale), drawn.shape, generator=self.generator)]
        return inputs, params


@pytest.mark.parametrize("read_format", [None, "nvfp4"])
@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_windows_are_solved_whatever_decays(name: str, read_format: str | None) -> None:
    twins = AnyDecay(Case(name, SMALL, window=20, read_format=read_format, choice=SPLIT, rows=ROWS))
    for number in range(14):
        twins.step([1] * 3, [1] * 3, forced=number in (5, 13))
    twins.compare_states()
    assert int(twins.pools["triton"].tally.flushes) == 4


def test_a_step_without_tokens_folds_as_any_other() -> None:
    twins = Twins(Case("gdn", SMALL, read_format="nvfp4", choice=SPLIT, rows=ROWS))
    for _ in range(3):
        twins.step([1] * 3, [1] * 3)
    inputs, _ = twins._draw(0)
    for pool in twins.pools.values():
        with flow.step(pool, ROWS, 0, forced=True) as step:
            assert flow.verify(pool, 0, step, inputs).shape[1] == 0
    twins.compare_cursors()
    twins.align_copies()
    twins.compare_states()
