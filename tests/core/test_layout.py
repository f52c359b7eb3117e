"""One object sizes everything: rows, bytes of a slot and of a step, counted here by hand."""

from __future__ import annotations

import pytest
import torch

from replayssm import ReplayConfig, flow
from replayssm.recurrences import Geometry, get
from replayssm.state.layout import StateLayout, Tally
from replayssm.state.pool import LayerState, StatePool
from replayssm.state.slots import PAD_SLOT

from .setups import Model, Setup, geometry_for
from .test_each_invariant import run

GEOMETRY = Geometry(heads=4, key_heads=2, key_dim=8, value_dim=16, conv_channels=96, conv_width=4)


def test_rows() -> None:
    for window, verify_len in ((1, 1), (7, 3), (16, 16), (64, 16)):
        config = ReplayConfig(window=window, verify_len=verify_len)
        layout = StateLayout(get("gdn"), GEOMETRY, config, torch.bfloat16)
        assert layout.ring_rows == window + verify_len
        assert layout.carry_rows == 3 + verify_len
        assert layout.carry_kept == 3
        history = StateLayout(
            get("gdn"),
            GEOMETRY,
            ReplayConfig(window=window, verify_len=verify_len, carry_history=True),
            torch.bfloat16,
        )
        assert history.carry_rows == 3 + window + verify_len
        assert history.carry_kept == 3 + window


def test_bytes_of_a_slot() -> None:
    """Key heads 2 x 8, value heads 4 x 16; a bf16 model, an fp32 checkpoint, a ring of 16 + 4 rows."""
    state, k, inverse_norm, log_decay, u, v, beta = 4 * 8 * 16, 2 * 8 * 2, 2 * 4, 4 * 4, 4 * 16 * 4, 4 * 16 * 2, 4 * 4
    layout = StateLayout(get("gdn"), GEOMETRY, ReplayConfig(verify_len=4), torch.bfloat16)
    assert layout.record_bytes == k + inverse_norm + log_decay + u
    assert layout.bytes_of("carry") == 7 * 96 * 2
    assert layout.slot_bytes == 4 * state + 20 * layout.record_bytes + layout.bytes_of("carry")
    both = StateLayout(get("gdn"), GEOMETRY, ReplayConfig(verify_len=4, read_format="fp16"), torch.bfloat16)
    assert both.record_bytes == layout.record_bytes + v + beta - u // 2, "u, which only outputs see, in bf16"
    assert (both.read_bytes, both.bytes_of("checkpoint")) == (2 * state, 4 * state)
    x, B, dt = 4 * 16 * 2, 2 * 8 * 2, 4 * 4
    mamba2 = StateLayout(get("mamba2"), GEOMETRY, ReplayConfig(read_format="fp16"), torch.bfloat16)
    assert mamba2.record_bytes == x + B + dt, "the ring is exact: a read copy adds nothing to it"


@pytest.mark.parametrize("recurrence", ["mamba2", "gdn", "kda"])
def test_pages_hold_every_tensor_once(recurrence: str) -> None:
    """Aligned, disjoint, and as large as the layout says."""
    config = ReplayConfig(window=5, verify_len=3, read_format="bf16", carry_history=True)
    layout = StateLayout(get(recurrence), geometry_for(recurrence, conv=True), config, torch.float32)
    taken = torch.zeros(layout.page_bytes, dtype=torch.int64)
    for spec in layout.tensors:
        offset = layout.page_offsets[spec.name]
        assert offset % 128 == 0
        taken[offset : offset + spec.bytes] += 1
    assert int(taken.max()) == 1
    assert int(taken.sum()) == layout.slot_bytes
    pages = torch.zeros(3, layout.page_bytes, dtype=torch.uint8)
    params = Model(Setup(recurrence, config, geometry_for(recurrence, conv=True))).params[0]
    state = LayerState.in_pages(layout, pages, params)
    for number, spec in enumerate(layout.tensors, 1):
        state.tensors[spec.name].view(torch.uint8 if spec.dtype == torch.uint8 else spec.dtype).fill_(number)
    for number, spec in enumerate(layout.tensors, 1):
        assert bool((state.tensors[spec.name] == number).all())


def test_tally_and_traffic() -> None:
    """Ten tokens at window 4: flushes before the fifth and the ninth, and the bytes that follow from it."""
    model = Model(Setup("gdn", ReplayConfig(window=4, stagger=False), geometry_for("gdn")))
    pool = model.pool()
    slot = pool.acquire()
    for number in range(10):
        run(pool, model, [slot, PAD_SLOT], [[number], []])
        flow.commit(pool, [slot], 1)
    history = 3 * (0 + 1 + 2 + 3) - 2 - 3  # the last window has two tokens
    assert pool.tally == Tally(10, 10, history, 2, 8)
    layout = model.layout
    state, record = 2 * 4 * 2 * 4, layout.record_bytes
    traffic = pool.traffic()
    layers = len(pool.layers)
    assert traffic.tokens == 10
    assert traffic.read_bytes == layers * (10 * state + (history + 8) * record)
    assert traffic.written_bytes == layers * (2 * state + 10 * record)
    assert traffic.ordinary_read_bytes == traffic.ordinary_written_bytes == layers * 10 * state
    flow.flush(pool, [slot])
    assert pool.tally == Tally(11, 10, history, 3, 10)


def test_gathered_pools_share_the_tally() -> None:
    model = Model(Setup("gdn", ReplayConfig(window=4, stagger=False), geometry_for("gdn")))
    pool = model.pool()
    slot = pool.acquire()
    run(pool, model, [slot], [[0]])
    flow.commit(pool, [slot], 1)
    other: StatePool = pool.gather(torch.tensor([slot, slot]))
    run(other, model, [0, 1], [[1], [2]])
    assert pool.tally == other.tally == Tally(3, 3, 2, 0, 0)
