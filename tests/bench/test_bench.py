"""The harness without a GPU: cycles, bytes, rows, and above all that nothing wrong gets a number."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

if torch.cuda.is_available():
    pytest.skip("the kernels here are interpreted", allow_module_level=True)

from .. import interpreter

interpreter.switch_on()

from replayssm.bench import cli, engine, show, step_cli  # noqa: E402
from replayssm.bench.cases import Case  # noqa: E402
from replayssm.bench.floors import Floors  # noqa: E402
from replayssm.bench.geometries import MODELS  # noqa: E402
from replayssm.bench.reference import recurrent, relative_error  # noqa: E402
from replayssm.bench.replay import Replay, through_flow  # noqa: E402
from replayssm.bench.rows import Conditions, Refusal, Report, Row  # noqa: E402
from replayssm.bench.session import Session  # noqa: E402
from replayssm.bench.timing import CudaTimer, WallTimer, rotation  # noqa: E402
from replayssm.state.cursor import Phase  # noqa: E402

CPU = torch.device("cpu")
GEOMETRIES = ("tiny-mamba2", "odd-mamba2", "tiny-gdn", "tiny-kda")

MIB = {  # shared table of the project: fp32 state of one layer and sequence
    "nemotron3-nano-4b": 3.75,
    "nemotron3-super-120b": 4,
    "nemotron-h-56b": 16,
    "mamba2-2.7b": 2.5,
    "qwen3.5-4b": 2,
    "qwen3.5-27b": 3,
    "qwen3.5-122b-a10b": 4,
    "kimi-linear-48b-a3b": 2,
    "glm-5.3-flash": 4,
}


def session(path: Path | None = None) -> Session:
    conditions = Conditions("none", "none", 0, 0, "2.13", "none", "3.6", "3.11", "0.1", "abc", "test", "2026-11-30")
    return Session(CPU, Report(conditions, path), log=lambda line: None, timer=WallTimer())


def row(**changes: Any) -> Row:
    base = Row("ordinary", "peer", "p 1", "tiny-gdn", 4, "fp32", "step", 20.0, 19.0, 21.0)
    return replace(base, **changes)


# ---- cases


@pytest.mark.parametrize("name", MIB)
def test_state_sizes_are_the_published_ones(name: str) -> None:
    assert Case(name, 1).state_bytes == MIB[name] * 2**20


@pytest.mark.parametrize(
    ("case", "lengths"),
    [
        (Case("tiny-gdn", 1), list(range(1, 17))),
        (Case("tiny-gdn", 1, window=1), [1]),
        (Case("tiny-gdn", 1, window=16, verify_len=4, accepted=3), [3, 6, 9, 12, 15]),
        (Case("tiny-gdn", 1, window=8, verify_len=8, accepted=1), [1]),
    ],
)
def test_cycle_flushes_at_the_deadline_and_not_before(case: Case, lengths: list[int]) -> None:
    cycle = case.cycle()
    assert [phase.length for phase in cycle] == lengths
    assert [phase.due for phase in cycle] == [False] * (len(lengths) - 1) + [True]
    assert all(phase.length + case.verify_len <= case.window for phase in cycle[:-1])


def test_bytes_of_plain_decode_count_state_ring_and_flush() -> None:
    case = Case("nemotron3-super-120b", 3)
    prepared = Replay("torch").setup(replace(case, geometry="tiny-mamba2"), CPU)
    layout = prepared.layout
    checkpoint, record = layout.bytes_of("checkpoint"), layout.record_bytes
    step = 3 * (checkpoint + 5 * record + record) + prepared.case.io_bytes
    assert prepared._bytes([Phase(5, False)]) == step
    flush = 3 * (2 * checkpoint + 16 * record + record) + prepared.case.io_bytes
    assert prepared._bytes([Phase(16, True)]) == flush
    assert prepared._bytes([Phase(5, False), Phase(16, True)]) == (step + flush) / 2


def test_a_staggered_batch_has_every_phase_once_per_cycle_in_each_row() -> None:
    for batch in (2, 8, 16, 24):
        prepared = Replay("torch").setup(Case("tiny-gdn", batch), CPU)
        cycle = prepared.case.cycle()
        mixes = prepared._mixes(cycle)
        counts = [sum(mix.count(phase) for mix in mixes) for phase in cycle]
        assert len(set(counts)) == 1, "averages over the steps must weigh the phases alike"


# ---- what is right and what is not


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp32+bf16"])
@pytest.mark.parametrize(("window", "verify_len", "accepted"), [(16, 1, 1), (8, 4, 3), (1, 1, 1)])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_replay_passes_its_check_and_runs_every_view(
    geometry: str, window: int, verify_len: int, accepted: int, form: str
) -> None:
    prepared = Replay("torch").setup(Case(geometry, 3, form, window, verify_len, accepted), CPU)
    errors = prepared.check({})
    assert errors.state <= {"fp32": 1e-6, "bf16": 1e-2, "fp32+bf16": 1e-6}[form]
    for name, view in prepared.views({}).items():
        assert view.bytes > 0, name
        for step in view.steps:
            y = step(prepared.layers - 1)
            assert isinstance(y, torch.Tensor) and bool(y.isfinite().all())
    prepared.live({})()


Fault = Callable[..., torch.Tensor]


def scaled(pool: Any, layer: int, step: Any, inputs: Mapping[str, torch.Tensor], out: Any, config: Any) -> torch.Tensor:
    return through_flow(pool, layer, step, inputs, out, config) * 1.02


def one_row_wrong(
    pool: Any, layer: int, step: Any, inputs: Mapping[str, torch.Tensor], out: Any, config: Any
) -> torch.Tensor:
    y = through_flow(pool, layer, step, inputs, out, config)
    y[-1, 0, 0] += 0.3
    return y


def nan_output(
    pool: Any, layer: int, step: Any, inputs: Mapping[str, torch.Tensor], out: Any, config: Any
) -> torch.Tensor:
    return through_flow(pool, layer, step, inputs, out, config).index_fill(0, torch.tensor([0]), torch.nan)


def tf32_state(
    pool: Any, layer: int, step: Any, inputs: Mapping[str, torch.Tensor], out: Any, config: Any
) -> torch.Tensor:
    """Folds with operands of 10 mantissa bits: outputs look fine, the state is off by 1e-4."""
    y = through_flow(pool, layer, step, inputs, out, config)
    checkpoint = pool.layers[layer].tensors["checkpoint"]
    due = step.folded > 0
    bits = checkpoint[step.slots[due]].view(torch.int32) & ~0x1FFF
    checkpoint[step.slots[due]] = bits.view(torch.float32)
    return y


def lost_record(
    pool: Any, layer: int, step: Any, inputs: Mapping[str, torch.Tensor], out: Any, config: Any
) -> torch.Tensor:
    y = through_flow(pool, layer, step, inputs, out, config)
    for name, tensor in pool.layers[layer].tensors.items():
        if name.startswith("ring."):
            tensor[0, step.draft_rows[0, 0]] = 0
    return y


@pytest.mark.parametrize("fault", [scaled, one_row_wrong, nan_output, tf32_state, lost_record])
def test_a_wrong_kernel_gets_no_row(fault: Fault) -> None:
    run = session()
    assert run.measure(Replay("torch", launch=fault), Case("tiny-gdn", 3, window=4)) == []
    (refusal,) = run.report.refusals
    assert "error against fp64" in refusal.reason
    assert run.report.rows == []


def test_of_several_configurations_only_a_right_one_is_reported() -> None:
    def launch(pool: Any, layer: int, step: Any, inputs: Any, out: Any, config: Any) -> torch.Tensor:
        return (scaled if config["wrong"] else through_flow)(pool, layer, step, inputs, out, config)

    run = session()
    candidate = Replay("torch", launch=launch, configs=[{"wrong": True}, {"wrong": False}])
    rows = run.measure(candidate, Case("tiny-mamba2", 2, window=4))
    assert {r.view for r in rows} == {"cycle", "step", "staggered", "flush"}
    assert all(r.config == {"wrong": False} for r in rows)
    assert [refusal.config for refusal in run.report.refusals] == [{"wrong": True}]


def test_a_candidate_that_raises_is_noted_and_the_session_goes_on() -> None:
    def launch(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("boom\nat length")

    run = session()
    assert run.measure(Replay("torch", launch=launch), Case("tiny-gdn", 2)) == []
    assert run.report.refusals[0].reason == "RuntimeError: boom at length"
    assert run.measure(Replay("torch"), Case("tiny-gdn", 2, format="fp32+none")) == []
    assert "read_format must be one of" in run.report.refusals[1].reason
    assert run.measure(Replay("torch"), Case("tiny-gdn", 2, window=2))


def test_errors_count_the_worst_row_and_nan() -> None:
    ref = torch.ones(4, 8)
    out = ref.clone()
    out[2] *= 1.5
    assert relative_error(out, ref) == pytest.approx(0.5)
    out[0, 0] = torch.nan
    assert relative_error(out, ref) == float("inf")


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_batched_definition_is_the_definition(geometry: str) -> None:
    model = MODELS[geometry]
    inputs, params = model.replayed.draw(model.geometry, (3, 5), torch.Generator().manual_seed(0))
    state = torch.randn(3, *model.geometry.state_shape, dtype=torch.float64)
    y, after = recurrent(model, inputs, params, state)
    for i in range(3):
        one = {name: x[i] for name, x in inputs.items()}
        expected, expected_after = model.replayed.recurrent(one, params, state[i], model.geometry)
        torch.testing.assert_close(y[i], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(after[i], expected_after, rtol=1e-12, atol=1e-12)


# ---- timing and floors


@pytest.mark.parametrize(("steps", "layers"), [(1, 7), (16, 3), (16, 100), (5, 5)])
def test_a_rotation_runs_every_step_alike_and_every_layer(steps: int, layers: int) -> None:
    seen: list[tuple[int, int]] = []
    body, launches = rotation([lambda layer, i=i: seen.append((i, layer)) for i in range(steps)], layers)
    body()
    assert len(seen) == launches
    counts = [sum(step == i for step, _ in seen) for i in range(steps)]
    assert len(set(counts)) == 1
    last: dict[int, int] = {}
    for at, (_, layer) in enumerate(seen):
        assert at - last.get(layer, at - layers) >= layers, "a layer came again too soon: its state may be in the cache"
        last[layer] = at
    assert len(last) == layers


class FakeCuda:
    """Stands in for graphs and events: a launch takes `launch_us`, and only replays take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, launch_us: float) -> None:
        self.launch_us, self.now_us, self.capturing, self.captures = launch_us, 0.0, False, 0
        fake = self

        class Graph:
            def capture_begin(self) -> None:
                fake.capturing, fake.captures, self.launches = True, fake.captures + 1, 0
                fake.current = self

            def capture_end(self) -> None:
                fake.capturing = False

            def replay(self) -> None:
                assert not fake.capturing
                fake.now_us += self.launches * fake.launch_us

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = fake.now_us

            def elapsed_time(self, later: Any) -> float:
                return (later.at - self.at) / 1e3

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def launch(self) -> None:
        if self.capturing:
            self.current.launches += 1


@pytest.mark.parametrize("launch_us", [3.0, 70.0, 4000.0])
def test_graph_timing_divides_by_launches_and_repeats(monkeypatch: pytest.MonkeyPatch, launch_us: float) -> None:
    fake = FakeCuda(monkeypatch, launch_us)

    def body() -> None:
        for _ in range(5):
            fake.launch()

    found = CudaTimer().time(body, 5, samples=4)
    assert found.us == pytest.approx(launch_us) and found.samples == 4
    assert CudaTimer().alternate([(body, 5), (body, 5)], 3) == [[pytest.approx(launch_us)] * 3] * 2
    assert CudaTimer().series(body, 10) == [pytest.approx(5 * launch_us)] * 10


def test_a_failed_capture_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch, 1.0)

    def body() -> None:
        if fake.capturing:
            raise RuntimeError("not permitted while capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaTimer().time(body, 1)
    assert not fake.capturing


def test_the_read_kernel_reads_everything() -> None:
    floors = Floors(WallTimer(), CPU)
    source = torch.zeros(5000, dtype=torch.int32)
    floors.launch(source, 2048, 4)
    assert int(floors._sink) == 0
    for at in (0, 2047, 2048, 4999):
        marked = source.clone()
        marked[at] = 0x5EED5EED
        floors._sink.zero_()
        floors.launch(marked, 2048, 4)
        assert int(floors._sink) == 0x5EED5EED, f"word {at} was not read"


def test_a_session_knows_when_its_time_is_up() -> None:
    assert not session().expired
    run = session()
    run._seconds = -1.0
    assert run.expired


# ---- rows, ratios, reports


def test_ratios_are_against_the_best_ordinary_kernel_of_the_same_case() -> None:
    run = session()
    case = Case("tiny-gdn", 4, "fp32", 8, 4, 3)
    for other in (
        row(us=20.0),
        row(us=10.0, name="better"),
        row(us=1.0, batch=8),
        row(us=1.0, format="bf16"),
        row(us=1.0, geometry="tiny-kda"),
        row(us=40.0, what="snapshot", verify_len=4, accepted=3),
        row(us=2.0, what="snapshot", verify_len=8, accepted=3),
    ):
        run.report.add(other)
    rows = run.measure(Replay("torch"), case)
    assert rows
    for found in rows:
        assert (found.ordinary_us, found.snapshot_us) == (10.0, 40.0)
        assert found.over_ordinary == pytest.approx(10.0 / found.us)
    low_precision = run.measure(Replay("torch"), case.with_(format="fp32+bf16"))
    assert {found.ordinary_us for found in low_precision} == {10.0}


def test_alternated_ratios_use_the_best_rival() -> None:
    run = session()
    case = Case("tiny-gdn", 3, window=4)
    rival = Replay("torch", name="rival")
    rival.what = "ordinary"  # type: ignore[misc]
    assert run.alternate(Replay("torch"), [rival], case) is None, "nothing to compare with yet"
    run.measure(rival, case, views=["step"])
    assert [r.what for r in run.report.rows] == ["ordinary"]
    found = run.alternate(Replay("torch"), [rival], case)
    assert found is not None and found.view == "staggered" and found.detail["ratio"] > 0


def test_whole_steps_report_percentiles() -> None:
    found = session().measure_steps(Replay("torch"), Case("tiny-mamba2", 2, window=4))
    assert found is not None
    assert found.detail["p99_us"] >= found.detail["p50_us"] > 0


def test_a_report_survives_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    report = Report(session().report.conditions, path)
    report.add(row(config={"BV": 8}, ordinary_us=40.0, floor_us=10.0, bytes=2e6, detail={"p50_us": 1.0}))
    report.refuse(Refusal("replay", "x", "case", {}, "reason"))
    again = Report.load(path)
    assert (again.rows, again.refusals, again.conditions) == (report.rows, report.refusals, report.conditions)
    data = json.loads(path.read_text())["rows"][0]
    assert (data["over_ordinary"], data["over_floor"], data["gb_s"]) == (2.0, 2.0, 100.0)
    assert not list(tmp_path.glob("*.partial"))
    path.write_text(json.dumps({"format": "other"}))
    with pytest.raises(ValueError, match="no kernel benchmark"):
        Report.load(path)


def test_published_commands_name_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["/somewhere/run.py", "/private/out", "--baselines=/private/old.json", "--batch", "8"]
    )
    assert Conditions.collect(CPU, "abc").command == "run.py out --baselines=old.json --batch 8"


def test_tables_and_plots_come_from_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = session().report
    report.add(row())
    for batch, us in ((1, 10.0), (4, 8.0)):
        report.add(row(what="replay", name="replay", view="cycle", window=16, batch=batch, us=us, ordinary_us=20.0))
    report.refuse(Refusal("replay", "x", "case", {}, "no such format"))
    text = show.markdown(report)
    assert "| replay | cycle | 16 |  | 8.00 |" in text and "2.50" in text and "no such format" in text
    show.print_tables(report)
    assert "replay" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    show.plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize("printed", [show.print_tables, step_cli.print_table, engine.print_table])
def test_brackets_are_printed_as_they_are(
    printed: Callable[[Report], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal's tables lose nothing to markup: what a number is, or a reason with the name of a dim in it."""
    report = Report(Conditions.collect(CPU, "abc"))
    view = {show.print_tables: "live", step_cli.print_table: "model", engine.print_table: "engine"}[printed]
    detail = {"p99_over_p50": 1.004, "ratio": 0.9, "context": 64.0, "tok_s": 1.0, "allocated_bytes": 1.0}
    report.add(row(what="steps", name="replay [new]", view=view, detail=detail))
    report.refuse(Refusal("replay", "x", "case", {}, "expected [rows, heads], got [/]"))
    printed(report)
    out = capsys.readouterr().out
    assert "replay [new]" in out and "expected [rows, heads], got [/]" in out
    if printed is show.print_tables:
        assert "[median of alternated ratios 0.90]" in out and "[p99/p50 1.004]" in out


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a CUDA GPU"),
        (["--geometry", "nothing"], "no geometry is called 'nothing'"),
        (["--verify-len", "8", "--window", "4"], "verify_len 8 is larger than window 4"),
        (["--batch", "0"], "batch must be at least 1"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_sentence(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["kernels", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
