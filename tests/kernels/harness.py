"""Two pools with the same layers, one on each back end, taken through the same steps and compared after each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from torch import Tensor

from replayssm import ReplayConfig, flow
from replayssm.config import Rounding
from replayssm.kernels.formats import PAIR_SUM_ERROR
from replayssm.kernels.launch import Choice, Tile, verify_constants
from replayssm.kernels.verify import STEP_ROWS
from replayssm.recurrences import Geometry, get
from replayssm.recurrences.base import tolerance
from replayssm.state.layout import StateLayout, numbered
from replayssm.state.pool import LayerState, StatePool
from replayssm.state.slots import PAD_SLOT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FUSED = Choice(Tile(16))
SINGLE = Choice(Tile(16), form="single")
SPLIT = Choice(Tile(16), Tile(16))
SMALL = Geometry(heads=2, key_heads=1, key_dim=24, value_dim=12)


@dataclass(frozen=True)
class Case:
    """One configuration. Channel decays need as many key heads as heads: `geometry` is adapted."""

    recurrence: str
    geometry: Geometry = SMALL
    window: int = 5
    verify_len: int = 1
    model_dtype: str = "bf16"
    checkpoint_format: str = "fp32"
    read_format: str | None = None
    rounding: Rounding = "nearest"
    choice: Choice = FUSED
    paged: bool = False
    rows: tuple[int, ...] = (PAD_SLOT, 3, 0, PAD_SLOT)
    steps: int = 4
    trees: bool = False

    @property
    def layout(self) -> StateLayout:
        recurrence, geometry = get(self.recurrence), self.geometry
        if recurrence.decay == "channel":
            geometry = replace(geometry, key_heads=geometry.heads)
        config = ReplayConfig(
            self.window, self.verify_len, self.checkpoint_format, self.read_format, rounding=self.rounding
        )
        return StateLayout(recurrence, geometry, config, DTYPES[self.model_dtype])

    @property
    def output_tolerance(self) -> float:
        """Of outputs: write vectors that only they see are kept in the model's dtype, where neighbours may differ, and
        a copy may be read with sums in fp16.
        """
        layout, found = self.layout, self.tolerance
        if self.read_format is not None and layout.recurrence.delta_rule:
            found += 0.5 * torch.finfo(DTYPES[self.model_dtype]).eps
        if verify_constants(layout, self.verify_len, self.choice.step, STEP_ROWS.value, False)["PROBE_BITS"]:
            found += PAIR_SUM_ERROR
        return found

    @property
    def tolerance(self) -> float:
        """Between back ends: orders of summation in fp32, or now and then another neighbour in 16 bits."""
        if self.checkpoint_format == "fp32":
            return tolerance(torch.float32)
        return 0.5 * torch.finfo(DTYPES.get(self.checkpoint_format, torch.float8_e4m3fn)).eps

    def __str__(self) -> str:
        shown = [self.recurrence, f"T{self.verify_len}", f"W{self.window}", self.model_dtype, self.checkpoint_format]
        shown += [self.read_format] if self.read_format else []
        shown += ["stochastic"] if self.rounding == "stochastic" else []
        how = "fused" if self.choice.form == "prepared" else self.choice.form
        how = "split" if self.choice.flush else how
        shown += [f"N{self.geometry.key_dim}", f"P{self.geometry.value_dim}", how]
        return "-".join([*shown, *(["paged"] if self.paged else []), *(["trees"] if self.trees else [])])


def poison(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else -1)


def bits(x: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals NaN."""
    return x.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[x.dtype.itemsize])


def error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref||; infinite where anything is NaN."""
    out, ref = out.double(), ref.double()
    if not len(out):
        return 0.0
    return float(torch.nan_to_num((out - ref).norm() / ref.norm().clamp(min=1e-30), nan=torch.inf))


@contextmanager
def tiles(choice: Choice) -> Iterator[None]:
    """Let every verify use `choice`, and the configured window."""
    configured = patch(
        "replayssm.kernels.ops.window_in_force", lambda layouts, rows, width: numbered(layouts[0]).config.window
    )
    with patch("replayssm.kernels.ops.choose", lambda layout, batch, tokens: choice), configured:
        yield


@dataclass
class Twins:
    """The pools, their tokens, and what was compared."""

    case: Case
    slots: int = 6
    seed: int = 0
    device: torch.device = DEVICE
    pools: dict[str, StatePool] = field(init=False)
    pages: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = self.case.layout
        self.generator = torch.Generator().manual_seed(self.seed)
        _, params = self._draw(1)
        self.pools = {}
        for backend in ("torch", "triton"):
            if self.case.paged:
                # pages longer than needed, all bits set: NaN in every format, and a canary in the gaps
                pages = torch.full((self.slots, self.layout.page_bytes + 128), 255, dtype=torch.uint8)
                self.pages[backend] = pages.to(self.device)
                state = LayerState.in_pages(self.layout, self.pages[backend], params)
            else:
                state = LayerState.allocate(self.layout, self.slots, self.device, params)
            pool = StatePool([state], backend=backend)
            for tensor in state.tensors.values():
                poison(tensor)
            for number in range(self.slots - 1):
                pool.acquire(seed=2**40 + number)
            self.pools[backend] = pool

    def _draw(self, tokens: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        layout = self.layout
        drawn, params = layout.recurrence.draw(layout.geometry, (len(self.case.rows), tokens), self.generator)
        inputs = {f.name: drawn[f.name].to(layout.dtype_of(f)).to(self.device) for f in layout.recurrence.inputs}
        return inputs, params

    def step(
        self,
        tokens: Sequence[int],
        accepted: Sequence[int],
        forced: Sequence[bool] | bool = False,
        parents: list[list[int]] | None = None,
    ) -> dict[str, Tensor]:
        """One step of both, with everything unread poisoned and everything compared. Returns both outputs.

        Of a tree, `accepted` is how far down the row's own tokens the last token of the path stands, 0 for none.
        """
        case, width = self.case, self.case.verify_len
        inputs, _ = self._draw(width)
        count = torch.tensor([0 if s == PAD_SLOT else t for s, t in zip(case.rows, tokens, strict=True)])
        unread = torch.arange(width) >= count.unsqueeze(1)
        for x in inputs.values():
            x[unread.to(self.device)] = torch.nan
        outputs, plans = {}, {}
        kept = [0 if slot == PAD_SLOT else a for slot, a in zip(case.rows, accepted, strict=True)]
        for name, pool in self.pools.items():
            out = torch.full((len(case.rows), width, *self._heads), torch.nan, device=self.device)
            with (
                tiles(case.choice),
                flow.step(pool, case.rows, tokens, width=width, forced=forced, parents=parents) as step,
            ):
                outputs[name] = flow.verify(pool, 0, step, inputs, out)
            plans[name] = step.plan
            if parents is None:
                flow.commit(pool, case.rows, kept)
            else:
                paths = [path_to(count - 1, above) for count, above in zip(kept, parents, strict=True)]
                depth = max(map(len, paths))
                columns = [[path[d] if d < len(path) else -1 for path in paths] for d in range(depth)]
                # the kernels get it as a view whose rows do not lie together
                given = torch.tensor(columns, device=self.device).t() if depth and name == "triton" else paths
                flow.commit_path(pool, case.rows, given)
        assert torch.equal(plans["triton"], plans["torch"])
        self.compare_cursors()
        found = error(outputs["triton"], outputs["torch"])
        assert found <= case.output_tolerance, f"outputs differ by {found:.1e}"
        assert not outputs["triton"][unread.to(self.device)].any(), "outputs beyond a row's tokens must be zero"
        self.align_copies()
        return outputs

    def align_copies(self) -> None:
        """Where the last bits of two checkpoints differ, so may a code at a tie: few do, and both go on with the same.

        Given the same checkpoint the codes are the same bit for bit, which test_formats.py shows. Those of an fp8
        checkpoint go on the same as well: its numbers are few, and so often at ties.
        """
        if self.case.rounding == "stochastic":  # other random numbers would be within the tolerance, too
            stored = [bits(self.pools[name].layers[0].tensors["checkpoint"]) for name in ("triton", "torch")]
            assert float((stored[0] != stored[1]).double().mean()) <= 0.01
        scaled = self.case.checkpoint_format == "fp8"
        most = 0.05 if scaled else 0.01
        ours, theirs = (self.pools[name].layers[0].tensors for name in ("triton", "torch"))
        if scaled:
            every = torch.arange(self.slots, device=self.device)
            states = [self.pools[name].layers[0].state(every, "checkpoint") for name in ("triton", "torch")]
            assert error(*(state.nan_to_num(0.0) for state in states)) <= self.case.tolerance
            for name in ("checkpoint", "checkpoint.scale"):
                ours[name].copy_(theirs[name])
        for spec in self.layout.tensors:
            if spec.name == "read_copy" or (spec.name.startswith("read_copy.") and spec.dtype == torch.uint8):
                differ = (ours[spec.name] != theirs[spec.name]).double().mean()
                assert differ <= most, f"{differ:.1%} of {spec.name} differ"
            if spec.name.startswith("read_copy."):
                scales = [x[spec.name].double().nan_to_num(1.0) for x in (ours, theirs)]
                assert spec.dtype == torch.uint8 or error(*scales) <= 4 * self.case.tolerance, spec.name
            if spec.name.startswith("read_copy"):
                ours[spec.name].copy_(theirs[spec.name])

    def compare_cursors(self) -> None:
        ours, theirs = self.pools["triton"], self.pools["torch"]
        for name, counter in theirs.cursor.items():
            assert torch.equal(getattr(ours.cursor, name), counter), name
        assert torch.equal(ours.counts, theirs.counts)

    def compare_states(self, records: Sequence[int] | None = None) -> None:
        """The states of all live rows, after all or some of their records."""
        slots = [slot for slot in self.case.rows if slot != PAD_SLOT]
        states = {name: flow.materialize(pool, 0, slots, records) for name, pool in self.pools.items()}
        found = error(states["triton"], states["torch"])
        assert found <= self.case.tolerance, f"states differ by {found:.1e}"

    def compare_records(self) -> None:
        """The live records of the rings; exact copies bit for bit."""
        for slot in (slot for slot in self.case.rows if slot != PAD_SLOT):
            cursor = self.pools["torch"].cursor.get(slot)
            rows = [(cursor["start"] + j) % self.layout.ring_rows for j in range(cursor["length"])]
            for spec in self.layout.tensors:
                if spec.name.startswith("ring."):
                    ours, theirs = (self.pools[b].layers[0].tensors[spec.name][slot][rows] for b in ("triton", "torch"))
                    assert error(ours, theirs) <= self.case.output_tolerance, spec.name

    def untouched(self) -> dict[str, Tensor]:
        """What no step may write: the slot that is in no batch, and the gaps between pages."""
        pool = self.pools["triton"]
        idle = [slot for slot in range(self.slots) if slot not in self.case.rows]
        found = {name: bits(tensor[idle].contiguous()) for name, tensor in pool.layers[0].tensors.items()}
        if self.case.paged:
            found["gap"] = self.pages["triton"][:, self.layout.page_bytes :].clone()
        return found

    @property
    def _heads(self) -> tuple[int, int]:
        geometry = self.layout.geometry
        return geometry.heads, geometry.value_dim


def path_to(place: int, parents: Sequence[int]) -> list[int]:
    """The places that lead to `place` in a tree, none for -1."""
    return [] if place < 0 else [*path_to(parents[place], parents), place]


def run(case: Case, seed: int = 0) -> None:
    """Some steps with ragged tokens, rejections, a forced flush and one between steps."""
    twins = Twins(case, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    T, rows = case.verify_len, len(case.rows)
    before = twins.untouched()
    for number in range(case.steps):
        tokens = torch.randint(0 if number % 3 == 2 else T, T + 1, (rows,), generator=generator).tolist()
        accepted = [int(torch.randint(0 if T > 1 else t, t + 1, (), generator=generator)) for t in tokens]
        accepted = [max(1, a) if t and number < 3 else a for a, t in zip(accepted, tokens, strict=True)]
        forced = [number == 2 and row == 2 for row in range(rows)]
        parents = None
        if case.trees:
            parents = [[int(torch.randint(-1, t, (), generator=generator)) for t in range(T)] for _ in range(rows)]
        twins.step(tokens, accepted, forced, parents)
    twins.compare_records()
    twins.compare_states()
    lengths = [int(twins.pools["torch"].cursor.length[slot]) for slot in case.rows if slot != PAD_SLOT]
    twins.compare_states([length // 2 for length in lengths])
    for pool in twins.pools.values():
        flow.flush(pool, [3, PAD_SLOT, 0])
    twins.compare_cursors()
    twins.compare_states()
    after = twins.untouched()
    for name, value in before.items():
        assert torch.equal(after[name], value), f"{name} was written outside the batch"
