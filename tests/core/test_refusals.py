"""Bad input gets one clear sentence, and nothing is lost or half-written."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replayssm import ReplayConfig, flow
from replayssm.recurrences import Geometry, get, registry
from replayssm.state.layout import StateLayout
from replayssm.state.pool import LayerState, StatePool
from replayssm.state.slots import SlotError
from replayssm.state.snapshot import SnapshotError, restore, snapshot

GEOMETRY = Geometry(2, 2, 4, 3, conv_channels=5)


class Small:
    """A pool of one delta-rule layer with one sequence in mid-window, and one step's inputs."""

    def __init__(self, **options: object) -> None:
        config = ReplayConfig(**{"window": 4, "verify_len": 2, "stagger": False, **options})  # type: ignore[arg-type]
        self.recurrence = next(r for r in registry().values() if r.delta_rule)
        self.pool = StatePool.allocate(
            self.recurrence, GEOMETRY, config, slots=3, model_dtype=torch.float32, params=[{}]
        )
        self.slot = self.pool.acquire()
        for _ in range(3):
            self.step()

    def inputs(self, width: int = 1, rows: int = 1) -> dict[str, torch.Tensor]:
        return self.recurrence.draw(GEOMETRY, (rows, width), torch.Generator().manual_seed(0))[0]

    def step(self) -> None:
        with flow.step(self.pool, [self.slot], 1) as step:
            flow.conv_append(self.pool, 0, step, torch.ones(1, 1, 5))
            flow.verify(self.pool, 0, step, self.inputs())
        flow.commit(self.pool, [self.slot], 1)

    def everything(self) -> dict[str, torch.Tensor]:
        """Every tensor and counter, copied."""
        held = {name: t.clone() for name, t in self.pool.layers[0].tensors.items()}
        return held | {name: t.clone() for name, t in self.pool.cursor.items()}

    def refuses(self, action: Callable[[], object], message: str, kind: type[Exception] = ValueError) -> None:
        """`action` raises `kind` with `message`, and neither memory, cursors nor slots have changed."""
        before, live, free = self.everything(), self.pool.slots.live, self.pool.slots.free
        with pytest.raises(kind, match=message):
            action()
        after = self.everything()
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), f"{name} changed"
        assert (self.pool.slots.live, self.pool.slots.free) == (live, free)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"window must be in 1\.\.64, got 0"),
        ({"window": 65}, r"window must be in 1\.\.64, got 65"),
        ({"window": 8.0}, r"window must be an int, got 8\.0"),
        ({"window": True}, "window must be an int, got True"),
        ({"verify_len": 0}, r"verify_len must be in 1\.\.16, got 0"),
        ({"window": 32, "verify_len": 17}, r"verify_len must be in 1\.\.16, got 17"),
        ({"window": 3, "verify_len": 4}, "verify_len 4 is larger than window 3.*raise window to at least 4"),
        ({"checkpoint_format": "fp4"}, "checkpoint_format must be one of fp64, fp32, .*, nvfp4, got 'fp4'"),
        ({"rounding": "up"}, "rounding must be one of nearest, stochastic, got 'up'"),
        ({"rounding": "stochastic"}, 'checkpoint in fp32 is not rounded .* rounding "stochastic" needs a narrower'),
        ({"checkpoint_format": "nvfp4", "read_format": "nvfp4"}, "nvfp4 is too coarse to drive the recurrence"),
        ({"checkpoint_format": "int8", "read_format": "nvfp4"}, "the one copy that reads and recurrence share"),
        ({"checkpoint_format": "fp16", "read_format": "bf16"}, "read_format bf16 is not smaller than"),
        ({"checkpoint_format": "fp8", "read_format": "int8"}, "read_format int8 is not smaller than"),
        ({"checkpoint_format": ["fp32"]}, "checkpoint_format must be one of .*, got ..fp32.."),
        ({"read_format": {}}, "read_format must be one of .*, got {}"),
        ({"read_format": "int4"}, "read_format must be one of .*, got 'int4'"),
        ({"read_format": "fp32"}, "read_format fp32 is not smaller than checkpoint_format fp32"),
        ({"stagger": 1}, "stagger must be True or False, got 1"),
    ],
)
def test_configuration(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "options", "message"),
    [
        (5, {}, "precision must be a name such as .*, got 5"),
        (None, {}, "precision must be a name such as .*, got None"),
        ("fp32+", {}, "read_format must be one of .*, got ''"),
        ("fp32+nvfp4", {"read_format": "fp8"}, "precision 'fp32.nvfp4' says read_format already"),
        ("fp8", {"rounding": "stochastic", "checkpoint_format": "fp8"}, "says checkpoint_format, rounding already"),
    ],
)
def test_precision_by_name(precision: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayConfig.of(precision, **options)


def test_unknown_option_is_no_option() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'windw'"):
        ReplayConfig(windw=4)  # type: ignore[call-arg]


def test_geometry() -> None:
    with pytest.raises(ValueError, match="heads 3 is not a multiple of key_heads 2"):
        Geometry(3, 2, 4, 4)
    with pytest.raises(ValueError, match="key_dim must be at least 1, got 0"):
        Geometry(2, 2, 0, 4)
    channel = next(r for r in registry().values() if r.decay == "channel")
    with pytest.raises(ValueError, match="heads 4 must equal key_heads 2"):
        StateLayout(channel, Geometry(4, 2, 4, 4), ReplayConfig(), torch.float32)
    with pytest.raises(ValueError, match="model_dtype must be a floating dtype"):
        StateLayout(channel, Geometry(2, 2, 4, 4), ReplayConfig(), torch.int8)


def test_slots() -> None:
    small = Small()
    small.refuses(lambda: small.pool.release(2), "slot 2 is not in use", SlotError)
    small.refuses(lambda: small.pool.release(3), r"slot 3 does not exist: the pool has slots 0\.\.2", SlotError)
    small.refuses(lambda: small.pool.acquire(small.slot), "already in use", SlotError)
    small.refuses(lambda: small.pool.acquire(7), "slot 7 does not exist", SlotError)
    small.refuses(lambda: small.pool.fork(2), "slot 2 is not in use", SlotError)
    small.refuses(lambda: small.pool.fork(small.slot, records=9), r"records must be in 0\.\.3")
    small.refuses(lambda: small.pool.fork(small.slot, records=1), "set carry_history=True, which keeps")
    small.refuses(lambda: small.pool.move(1), "slot 1 is not in use", SlotError)
    small.refuses(lambda: flow.materialize(small.pool, 0, [1]), "slot 1 is not in use", SlotError)
    small.refuses(lambda: flow.flush(small.pool, [2]), "slot 2 is not in use", SlotError)
    small.pool.acquire()
    small.pool.acquire()
    small.refuses(small.pool.acquire, "all 3 slots are in use", SlotError)
    small.pool.release(1)
    small.refuses(lambda: small.pool.release(1), "released already", SlotError)


def test_steps() -> None:
    small = Small()
    pool, slot = small.pool, small.slot
    small.refuses(lambda: flow.open_step(pool, [slot, slot]), f"slot {slot} comes twice", SlotError)
    small.refuses(lambda: flow.open_step(pool, [2]), "slot 2 is not in use", SlotError)
    small.refuses(lambda: flow.open_step(pool, [-2]), "slot -2 does not exist", SlotError)
    small.refuses(lambda: flow.open_step(pool, [slot], 3), "at most verify_len = 2 tokens per row, got 3")
    small.refuses(lambda: flow.open_step(pool, [slot], [-1]), r"tokens must be in 0\.\.")
    small.refuses(lambda: flow.open_step(pool, [slot], [1, 1]), "tokens must be an integer or 1 integers")
    small.refuses(lambda: flow.open_step(pool, [slot], window=0), r"window in force must be in 1\.\.4")
    small.refuses(lambda: flow.open_step(pool, [slot], window=5), r"window in force must be in 1\.\.4")
    small.refuses(lambda: flow.open_step(pool, [slot], forced=[True, False]), "forced must be a bool or 1 bools")
    small.refuses(lambda: flow.open_step(pool, torch.tensor([0.0])), "slots must be an integer tensor")
    small.refuses(lambda: flow.commit(pool, [slot], 1), f"accepted 1 for slot {slot}, which has 0 pending rows")
    small.refuses(lambda: flow.commit(pool, [slot], -1), "accepted -1")


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype"])
def test_inputs(fault: str) -> None:
    """A refused layer also leaves the slot whole: its step changed nothing, and the next one is right."""
    small = Small()
    inputs = small.inputs()
    if fault == "missing":
        del inputs["k"]
    elif fault == "unknown":
        inputs["keys"] = inputs["k"]
    elif fault == "shape":
        inputs["k"] = inputs["k"][..., :-1]
    else:
        inputs["k"] = inputs["k"].half()
    message = {
        "missing": "must be exactly",
        "unknown": "must be exactly",
        "shape": "must have shape",
        "dtype": "must be",
    }
    step = flow.open_step(small.pool, [small.slot])
    small.refuses(lambda: flow.verify(small.pool, 0, step, inputs), message[fault])
    small.step()


def test_prompt_verbs_need_a_prompt_step() -> None:
    small = Small()
    step = flow.open_step(small.pool, [small.slot])
    state = torch.zeros(1, *GEOMETRY.state_shape)
    small.refuses(lambda: flow.load(small.pool, 0, step, state), "need a step opened with `prompt`")
    small.refuses(lambda: flow.prefill(small.pool, 0, step, small.inputs()), "need a step opened with `prompt`")
    prompt = flow.open_step(small.pool, [small.pool.acquire()], 2, is_prompt=True)
    small.refuses(lambda: flow.load(small.pool, 0, prompt, state[..., :1]), "state must be floating")


def test_storage_of_a_caller() -> None:
    layout = StateLayout(Small().recurrence, GEOMETRY, ReplayConfig(window=4), torch.float32)
    good = dict(LayerState.allocate(layout, 2, "cpu").tensors)
    with pytest.raises(ValueError, match=r"missing: \['checkpoint'\]"):
        LayerState.of(layout, {n: t for n, t in good.items() if n != "checkpoint"})
    with pytest.raises(ValueError, match=r"unknown: \['extra'\]"):
        LayerState.of(layout, good | {"extra": good["checkpoint"]})
    with pytest.raises(ValueError, match=r"tensor 'ring\.u' must be torch\.float32"):
        LayerState.of(layout, good | {"ring.u": good["ring.u"].half()})
    with pytest.raises(ValueError, match="a page must have at least"):
        LayerState.in_pages(layout, torch.zeros(2, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="pages must be uint8"):
        LayerState.in_pages(layout, torch.zeros(2, layout.page_bytes))
    storage = torch.zeros(2 * layout.page_bytes + 8, dtype=torch.uint8)
    shape = (2, layout.page_bytes)
    with pytest.raises(ValueError, match="a first page 3 bytes behind a multiple"):
        LayerState.in_pages(layout, storage.as_strided(shape, (shape[1], 1), 3))
    with pytest.raises(ValueError, match=f"a stride of {shape[1] + 4} bytes and a first page 0 bytes behind"):
        LayerState.in_pages(layout, storage.as_strided(shape, (shape[1] + 4, 1), 0))
    with pytest.raises(ValueError, match="a pool needs at least one layer"):
        StatePool([])
    other = StateLayout(layout.recurrence, GEOMETRY, ReplayConfig(window=5), torch.float32)
    with pytest.raises(ValueError, match="must share their config"):
        StatePool([LayerState.allocate(layout, 2, "cpu"), LayerState.allocate(other, 2, "cpu")])


def rewritten(data: bytes, **changes: object) -> bytes:
    """The snapshot with changed header fields (and so a wrong checksum)."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size]) | changes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def test_snapshots() -> None:
    small = Small()
    pool = small.pool
    data = snapshot(pool, small.slot)
    small.refuses(lambda: snapshot(pool, 2), "slot 2 is not in use", SlotError)
    for cut in (0, 5, 40, len(data) // 2, len(data) - 1):
        small.refuses(lambda cut=cut: restore(pool, data[:cut]), "no ReplaySSM snapshot|damaged", SnapshotError)
    for at in (20, len(data) // 2, len(data) - 3):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        small.refuses(lambda b=bytes(flipped): restore(pool, b), "no ReplaySSM snapshot|damaged|version", SnapshotError)
    small.refuses(lambda: restore(pool, b"hello"), "no ReplaySSM snapshot", SnapshotError)
    small.refuses(
        lambda: restore(pool, rewritten(data, version=2)), "format version 2, this library reads", SnapshotError
    )
    small.refuses(lambda: restore(pool, rewritten(data, length=1)), "checksum does not match", SnapshotError)
    small.refuses(lambda: restore(pool, data, small.slot), "already in use", SlotError)
    other = Small(checkpoint_format="fp16")
    other.refuses(lambda: restore(other.pool, data), "layer 0 has checkpoint_format fp32, the pool fp16", SnapshotError)
    narrow = Small(window=2, verify_len=2)
    narrow.refuses(
        lambda: restore(narrow.pool, data), "3 records in its ring and this pool's window is 2", SnapshotError
    )
    assert restore(pool, data) != small.slot


def test_any_damage_to_a_snapshot_is_refused() -> None:
    """Every header byte and a sample of the rest, one bit at a time; every key renamed; other JSON; random bytes."""
    small = Small()
    data = snapshot(small.pool, small.slot)
    size = int.from_bytes(data[:8], "little")
    chooser = random.Random(0)

    def refused(damaged: bytes) -> None:
        small.refuses(lambda: restore(small.pool, damaged), "snapshot", SnapshotError)

    for at in (*range(8 + size), *range(8 + size, len(data), 41)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << chooser.randrange(8)
        refused(bytes(flipped))
    header = json.loads(data[8 : 8 + size])
    for key in header:
        renamed = json.dumps({key.upper() if k == key else k: v for k, v in header.items()}).encode()
        refused(len(renamed).to_bytes(8, "little") + renamed + data[8 + size :])
    for text in (b"[]", b"null", b"3", b'"replayssm-snapshot"', b'{"format": "replayssm-snapshot"}'):
        refused(len(text).to_bytes(8, "little") + text + data[8 + size :])
    for length in range(0, 400, 7):
        refused(chooser.randbytes(length))
    assert restore(small.pool, data) != small.slot


def test_a_failed_step_breaks_its_slots_until_reset() -> None:
    """Between the first and the last layer some layers have folded and others not."""
    small = Small()

    def fail() -> None:
        with flow.step(small.pool, [small.slot]):
            raise RuntimeError("the model failed")

    with pytest.raises(RuntimeError, match="the model failed"):
        fail()
    small.refuses(lambda: flow.open_step(small.pool, [small.slot]), "is broken: a step failed", SlotError)
    small.refuses(lambda: snapshot(small.pool, small.slot), "is broken", SlotError)
    small.refuses(lambda: small.pool.fork(small.slot), "is broken", SlotError)
    small.pool.reset(small.slot)
    small.step()


def test_mamba1_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"cannot be replayed: .*full .key dim, value dim. matrix per token"):
        get("mamba1")
