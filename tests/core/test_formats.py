"""Storage formats at their edges: zero, -0, subnormals, ties, values out of range, NaN (fault 27)."""

from __future__ import annotations

import pytest
import torch

from replayssm.state.formats import FORMATS, CastFormat

STATE = (1, 2, 3, 4)


@pytest.fixture(params=list(FORMATS))
def form(request: pytest.FixtureRequest) -> CastFormat:
    return FORMATS[request.param]


def stored(form: CastFormat, values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What `form` makes of a state that starts with `values`."""
    state = torch.zeros(STATE, dtype=dtype)
    state.view(-1)[: len(values)] = torch.tensor(values, dtype=dtype)
    return form.decode(form.encode(state), dtype).reshape(-1)[: len(values)]


def test_parts_are_what_encode_makes(form: CastFormat) -> None:
    parts = form.encode(torch.zeros(STATE))
    assert {suffix: (tuple(x.shape[1:]), x.dtype) for suffix, x in parts.items()} == form.parts(STATE[1:])
    assert form.bits_per_element == form.dtype.itemsize * 8


def test_zero_is_exact_and_keeps_its_sign(form: CastFormat) -> None:
    assert stored(form, [0.0, -0.0]).signbit().tolist() == [False, True]
    assert not stored(form, [0.0, -0.0]).any()


def test_rounds_to_nearest_even(form: CastFormat) -> None:
    eps = torch.finfo(form.dtype).eps
    ties = [1 + eps / 2, 1 + 3 * eps / 2, -1 - eps / 2]
    if form.name != "fp64":
        assert stored(form, ties).tolist() == [1.0, 1 + 2 * eps, -1.0]
    assert stored(form, [1 + eps]).item() == 1 + eps


def test_subnormals_survive(form: CastFormat) -> None:
    smallest = torch.finfo(form.dtype).smallest_normal * torch.finfo(form.dtype).eps
    assert stored(form, [smallest, smallest / 4]).tolist() == [smallest, 0.0 if form.name != "fp64" else smallest / 4]


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_one_huge_value_saturates_alone_and_is_counted(name: str) -> None:
    form = FORMATS[name]
    limit = torch.finfo(form.dtype).max
    state = torch.full(STATE, 0.5, dtype=torch.float64)
    state[0, 0, 0, 0], state[0, 1, 2, 3] = 2 * limit, -3 * limit
    back = form.decode(form.encode(state), torch.float64)
    assert (float(back[0, 0, 0, 0]), float(back[0, 1, 2, 3])) == (limit, -limit)
    assert form.saturated(state).tolist() == [2]
    back[0, 0, 0, 0] = back[0, 1, 2, 3] = 0.5
    assert torch.equal(back, torch.full(STATE, 0.5, dtype=torch.float64))
    assert form.saturated(back).tolist() == [0]


def test_nan_is_not_hidden(form: CastFormat) -> None:
    assert stored(form, [float("nan"), 1.0]).isnan().tolist() == [True, False]
