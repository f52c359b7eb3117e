"""What an engine's step launches beside the layers' kernels: the numbers of the flow and of the recurrences."""

from __future__ import annotations

import pytest
import torch

from replayssm import ReplayConfig
from replayssm.attach.vllm.steps import EngineSteps, StepMemory
from replayssm.recurrences import Recurrence, get
from replayssm.recurrences.gdn import gates_triton as delta
from replayssm.recurrences.mamba2 import gates_triton as ssm

from ..engine.test_steps import play
from .harness import DEVICE
from .test_plan import VERIFY_LEN, pools

SPREAD = torch.tensor([-90.0, -20, -12, -5, -1, -1e-3, 0, 1e-3, 1, 5, 19, 20, 20.1, 80])


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


def own(name: str) -> Recurrence:
    return get(name)


def test_step_size() -> None:
    wide = torch.zeros(2, 3, 17, device=DEVICE)  # rows of something larger
    raw = wide[..., 2:16]
    raw.copy_(SPREAD)
    bias = torch.linspace(-0.5, 0.5, 14, device=DEVICE)
    torch.testing.assert_close(ssm.step_size(raw, bias), own("mamba2").step_size(raw, bias), rtol=2e-6, atol=0)


def test_gates() -> None:
    a, b = SPREAD.expand(3, 1, -1).to(DEVICE).contiguous(), torch.randn(3, 1, 14, device=DEVICE)
    A_log, bias = torch.linspace(-1, 3, 14, device=DEVICE), torch.linspace(-0.5, 0.5, 14, device=DEVICE)
    for one, other in zip(delta.gates(a, b, A_log, bias), own("gdn").gates(a, b, A_log, bias), strict=True):
        torch.testing.assert_close(one, other, rtol=3e-6, atol=0)
