"""A decay of exactly zero forgets everything before it, and is no reason for NaN."""

from __future__ import annotations

import pytest
import torch

from replayssm import ReplayConfig, flow
from replayssm.recurrences import Geometry, get
from replayssm.state.pool import StatePool


@pytest.mark.parametrize("name", ["gdn", "kda"])
@pytest.mark.parametrize("log_decay", [-torch.inf, -1e30, -800.0])
def test_a_token_may_forget_everything(name: str, log_decay: float) -> None:
    recurrence = get(name)
    geometry = Geometry(heads=2, key_heads=2, key_dim=8, value_dim=4)
    generator = torch.Generator().manual_seed(0)
    inputs, params = recurrence.draw(geometry, (1, 9), generator)
    inputs = {field: x.double() for field, x in inputs.items()}
    inputs["log_decay"][:, 3] = log_decay
    pool = StatePool.allocate(
        recurrence,
        geometry,
        ReplayConfig(window=4, checkpoint_format="fp64"),
        slots=1,
        model_dtype=torch.float64,
        params=[params],
    )
    slot = pool.acquire()
    found = []
    for t in range(9):
        with flow.step(pool, [slot]) as step:
            found.append(flow.verify(pool, 0, step, {field: x[:, t : t + 1] for field, x in inputs.items()}))
        flow.commit(pool, [slot], 1)
    # what came before the zero must not matter: start there with an empty state
    zero = torch.zeros(geometry.state_shape, dtype=torch.float64)
    expected, _ = recurrence.recurrent({field: x[0, 3:] for field, x in inputs.items()}, params, zero, geometry)
    assert torch.allclose(torch.cat(found, 1)[0, 3:], expected, rtol=0, atol=1e-12)
