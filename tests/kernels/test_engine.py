"""What an engine's step launches beside the layers' kernels: the numbers of the flow and of the recurrences."""

from __future__ import annotations

import pytest
import torch

from replayssm import ReplayConfig
from replayssm.attach.vllm.steps import EngineSteps, StepMemory

from ..engine.test_steps import play, warm_up_leaves_everything_as_it_is
from .harness import DEVICE
from .test_plan import VERIFY_LEN, pools


@pytest.mark.parametrize("rows", [1, 5, 40, 1100])
@pytest.mark.parametrize("kind", ["tokens", "drafts", "prompts among drafts"])
def test_whole_steps(rows: int, kind: str) -> None:
    theirs, ours = (EngineSteps(pool) for pool in pools(rows + 4, rows))
    generator = torch.Generator().manual_seed(rows)
    noted = torch.randint(0, 3, (rows + 4,), generator=generator).to(DEVICE)
    for _ in range(3):
        blocks = 1 + torch.randperm(rows + 3, generator=generator)[:rows].int()
        blocks[torch.rand(rows, generator=generator) < 0.2] = 0  # vLLM's number of no block
        table = torch.stack([blocks, blocks - 1], 1).to(DEVICE)[:, 0]
        lengths = torch.randint(0, VERIFY_LEN + 1, (rows,), generator=generator).int()
        starts = torch.cat([torch.zeros(1).int(), lengths.cumsum(0).int()]).to(DEVICE)
        accepted = torch.randint(-1, VERIFY_LEN + 1, (rows,), generator=generator).int().to(DEVICE)
        certain = (torch.rand(rows, generator=generator) < 0.5).to(DEVICE)
        given = (
            {}
            if kind == "tokens"
            else {"starts": starts, "accepted": accepted, "certain": certain & (kind != "drafts")}
        )
        memories = []
        for steps in (theirs, ours):
            steps.certain.copy_(noted)
            memory = StepMemory.allocate(rows + 2, DEVICE)
            step = steps.decode(memory.rows(rows), table, VERIFY_LEN if given else 1, **given)
            assert step.plan.data_ptr() == memory.plan.data_ptr()
            memories.append(memory)
        one, other = memories
        assert torch.equal(one.plan, other.plan)
        assert torch.equal(one.blocks, other.blocks)
        assert torch.equal(one.kept, other.kept)
        assert torch.equal(theirs.certain, ours.certain)
        for name, counter in theirs.pool.cursor.items():
            assert torch.equal(getattr(ours.pool.cursor, name), counter), name
        noted = theirs.certain.clone()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the scheduler keeps its pages on the CPU")
@pytest.mark.parametrize("name", ["mamba2", "gdn"])
def test_a_scripted_scheduler(name: str) -> None:
    """Pages, cursors in them, drafts, prompts and preemption, with kernels in place of the torch back end."""
    assert play(name, ReplayConfig(window=6, verify_len=4), 0, steps=14, backend="triton").worst < 5e-5


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the scheduler keeps its pages on the CPU")
def test_warming_up_leaves_everything_as_it_is() -> None:
    warm_up_leaves_everything_as_it_is("triton")
