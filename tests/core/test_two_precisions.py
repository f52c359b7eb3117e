"""A checkpoint that drives the recurrence beside a read copy that serves the reads: what may not depend on what."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from replayssm import ReplayConfig, flow
from replayssm.recurrences import Geometry, get
from replayssm.state.layout import StateLayout
from replayssm.state.pool import StatePool
from replayssm.state.snapshot import restore, snapshot

from .machine import EVERY_PAIR, MODES
from .setups import RECURRENCES, Model, Setup, bits, geometry_for
from .test_each_invariant import run

PAIRS = (("fp64", "nvfp4"), ("fp16", "fp8"), ("bf16", "int8"), *MODES["two precisions"])


def pool_of(recurrence: str, checkpoint: str, read_copy: str | None, **options: object) -> tuple[StatePool, Model]:
    config = ReplayConfig(
        window=6, verify_len=3, checkpoint_format=checkpoint, read_format=read_copy, stagger=False, **options
    )  # type: ignore[arg-type]
    model = Model(Setup(recurrence, config, geometry_for(recurrence, key_dim=16), seed=3))
    return model.pool(), model


def stored(pool: StatePool, slot: int) -> list[Tensor]:
    """Bits of every checkpoint tensor of a slot."""
    return [
        bits(tensor)[slot].clone()
        for layer in pool.layers
        for name, tensor in layer.tensors.items()
        if name.split(".")[0] == "checkpoint"
    ]


def decoded(pool: StatePool, model: Model, slots: list[int], *, garbage: bool) -> list[list[Tensor]]:
    """The checkpoints of slots after each of 14 steps, some of them with drafts that are rejected."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(14):
        first = 3 * step
        run(pool, model, slots, [[first + slot, first + slot + 1, first + slot + 2][: 1 + step % 3] for slot in slots])
        flow.commit(pool, slots, [(step + slot) % (2 + step % 3) for slot in slots])
        if garbage:
            for layer in pool.layers:
                for name, tensor in layer.tensors.items():
                    if name.startswith("read_copy"):
                        noise = torch.randn(tensor.shape, generator=generator) * 50
                        tensor.copy_(noise if tensor.is_floating_point() else noise.byte())
        found += [stored(pool, slot) for slot in slots]
    return found


@pytest.mark.parametrize(("checkpoint", "read_copy"), PAIRS)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_garbage_in_the_read_copy_never_reaches_a_checkpoint(recurrence: str, checkpoint: str, read_copy: str) -> None:
    """Bit for bit, over several flushes: whatever the outputs saw, the recurrence did not."""
    sequences = []
    for garbage in (False, True):
        pool, model = pool_of(recurrence, checkpoint, read_copy)
        slots = [pool.acquire() for _ in range(2)]
        sequences.append(decoded(pool, model, slots, garbage=garbage))
        assert pool.tally.flushes > 4
    for clean, dirty in zip(*sequences, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_with_one_shared_copy_it_does(recurrence: str) -> None:
    """The same check can fail: a shared copy is the checkpoint."""
    sequences = []
    for change in (False, True):
        pool, model = pool_of(recurrence, "nvfp4", None)
        slot = pool.acquire()
        for step in range(9):
            run(pool, model, [slot], [[step]])
            flow.commit(pool, [slot], 1)
            if change and step == 6:
                pool.layers[0].tensors["checkpoint"][slot] ^= 8
        flow.flush(pool, [slot])
        sequences.append(stored(pool, slot))
    assert not all(torch.equal(a, b) for a, b in zip(*sequences, strict=True))


@pytest.mark.parametrize("checkpoint", ["fp16", "bf16", "fp8", "int8", "nvfp4"])
def test_stochastic_rounding_follows_the_request(checkpoint: str) -> None:
    """Same seed and tokens, same checkpoints: in another slot, batch order, after a fork, a move, a snapshot."""
    pool, model = pool_of("gdn", checkpoint, None, rounding="stochastic")
    a, b = pool.acquire(seed=5), pool.acquire(seed=6)
    c = pool.acquire(4, seed=5)

    def decode(slots: list[int], tokens: range) -> None:
        for token in tokens:
            run(pool, model, slots, [[token]] * len(slots))
            flow.commit(pool, slots, 1)

    decode([a, b, c], range(15))
    assert all(torch.equal(x, y) for x, y in zip(stored(pool, a), stored(pool, c), strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(stored(pool, a), stored(pool, b), strict=True))
    twin, data = pool.fork(a), snapshot(pool, a)
    pool.release(b)
    back = restore(pool, data)
    decode([twin, c, back, a], range(15, 40))
    for other in (twin, c, back):
        assert all(torch.equal(x, y) for x, y in zip(stored(pool, a), stored(pool, other), strict=True))
    pool.release(twin)
    moved = pool.move(c)
    assert int(pool.cursor.seed[moved]) == 5
    (folded,) = flow.materialize_into(pool, [moved])
    assert int(pool.cursor.seed[folded]) == 5
    flow.flush(pool, [a])
    assert all(torch.equal(x, y) for x, y in zip(stored(pool, a), stored(pool, folded), strict=True))
    assert int(pool.gather(torch.tensor([a])).cursor.seed[0]) == 5


def test_any_integer_is_a_seed() -> None:
    pool, _ = pool_of("mamba2", "fp16", None, rounding="stochastic")
    slots = [pool.acquire(seed=seed) for seed in (2**64 - 1, -1, 2**63)]
    assert pool.cursor.seed[slots].tolist() == [-1, -1, -(2**63)]


def test_each_layer_and_flush_draws_anew() -> None:
    """Without decay or input a state would otherwise be rounded the same way again and again."""
    pool, _ = pool_of("mamba2", "fp16", None, rounding="stochastic")
    slot = pool.acquire()
    state = torch.rand(1, *pool.layers[0].layout.geometry.state_shape)
    seen = []
    for layer, tokens in ((0, 6), (1, 6), (0, 12)):
        pool.store(layer, torch.tensor([slot]), state, torch.tensor([True]), torch.tensor([tokens]))
        seen.append(pool.layers[layer].tensors["checkpoint"][slot].clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


BYTES = {  # of H 64, N 128, P 128, from the formats' tables by hand: codes, scales of blocks and columns
    "fp32": 64 * 128 * 128 * 4,
    "fp16": 64 * 128 * 128 * 2,
    "bf16": 64 * 128 * 128 * 2,
    "fp8": 64 * 128 * 128 + 64 * 128 * 4,
    "int8": 64 * 128 * 128 + 64 * 128 * 4,
    "nvfp4": 64 * 64 * 128 + 64 * 8 * 128 + 64 * 128 * 4,
}


@pytest.mark.parametrize(("checkpoint", "read_copy"), [*PAIRS[1:], ("fp32", None), ("nvfp4", None)])
def test_bytes_of_each_combination(checkpoint: str, read_copy: str | None) -> None:
    config = ReplayConfig(checkpoint_format=checkpoint, read_format=read_copy)
    layout = StateLayout(get("gdn"), Geometry(64, 16, 128, 128), config, torch.bfloat16)
    copy = 0 if read_copy is None else BYTES[read_copy]
    assert (layout.bytes_of("checkpoint"), layout.bytes_of("read_copy")) == (BYTES[checkpoint], copy)
    assert layout.read_bytes == (copy or BYTES[checkpoint])


def test_a_geometry_that_a_format_cannot_hold_is_refused_with_the_layout() -> None:
    with pytest.raises(ValueError, match="nvfp4 keeps key rows in blocks of 16, and key_dim 4 is not a multiple"):
        StateLayout(get("gdn"), geometry_for("gdn"), ReplayConfig(read_format="nvfp4"), torch.float32)


@pytest.mark.parametrize("pair", EVERY_PAIR)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_no_format_looks_at_values(recurrence: str, pair: str) -> None:
    """On a device a step must not wait for it: here there are no values at all, only shapes."""
    ((checkpoint, read_copy),) = EVERY_PAIR[pair]
    rounding = "nearest" if checkpoint == "fp32" else "stochastic"
    config = ReplayConfig(4, 2, checkpoint, read_copy, rounding)
    rule, geometry, device = get(recurrence), geometry_for(recurrence, key_dim=16), torch.device("meta")
    inputs, params = rule.draw(geometry, (2, 2), torch.Generator().manual_seed(0))
    pool = StatePool.allocate(
        rule, geometry, config, slots=2, model_dtype=torch.float32, device=device, params=[params], backend="torch"
    )
    slots = torch.arange(2, device=device)
    step = flow.open_step(pool, slots, 2)
    y = flow.verify(pool, 0, step, {name: x.to(device) for name, x in inputs.items()})
    flow.close_step(pool, step)
    flow.commit(pool, slots, 1)
    assert y.shape == (2, 2, geometry.heads, geometry.value_dim)
