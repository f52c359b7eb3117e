"""`replayssm bench kernels`: measure this library's layer kernels on the CUDA device of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="bench", help="Measure kernels and decode steps on this machine's GPU.", no_args_is_help=True)

USAGE_STATUS = 2
DEFAULT_GEOMETRIES = ("nemotron3-super-120b", "qwen3.5-122b-a10b")
DEFAULT_BATCHES = (1, 8, 64, 256)


@app.command()
def kernels(
    geometry: Annotated[
        list[str] | None,
        typer.Option("--geometry", "-g", help="Model whose layers to time; may be repeated.", show_default=False),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", "-b", help="Rows; may be repeated.", show_default=False)
    ] = None,
    state_format: Annotated[
        str, typer.Option("--format", help='Checkpoint format, or "checkpoint+read copy", as in fp32+bf16.')
    ] = "fp32",
    window: Annotated[int, typer.Option(help="Window in force.")] = 16,
    verify_len: Annotated[int, typer.Option("--verify-len", help="Tokens per step: 1 + drafts.")] = 1,
    accepted: Annotated[
        int | None, typer.Option(help="Tokens of each step that stay; all but one by default.", show_default=False)
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.", show_default=False)
    ] = None,
    plot_out: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw the speed-up over ordinary kernels to this file.", show_default=False),
    ] = None,
) -> None:
    """Time one layer's step, averaged over the flush cycle, with a cold L2, against the time to read its bytes.

    A row appears only if outputs and state agree with an fp64 reference. Ordinary kernels of other packages take part
    when `benchmarks/kernels/run.py` of the source tree is used instead.
    """
    from replayssm.bench.cases import Case

    keep = accepted if accepted is not None else max(1, verify_len - 1)
    try:
        cases = [
            Case(name, rows, state_format, window, verify_len, keep)
            for name in geometry or DEFAULT_GEOMETRIES
            for rows in batch or DEFAULT_BATCHES
        ]
    except ValueError as error:
        _fail(str(error))
    try:
        import torch
        import triton  # noqa: F401 - named here so that its absence is one sentence
    except ImportError as error:
        _fail(f"bench kernels needs torch and triton, and {error.name} is not installed; install replayssm[gpu]")
    if not torch.cuda.is_available():
        _fail("bench kernels needs a CUDA GPU, and torch sees none on this machine")

    from replayssm.bench.replay import Replay
    from replayssm.bench.session import open_session
    from replayssm.bench.show import plot, print_tables

    candidate = Replay()
    reason = next((r for r in map(candidate.refuses, cases) if r is not None), None)
    if reason is not None:
        _fail(reason)
    session = open_session(torch.device("cuda"), json_out)
    session.measure_copy()
    for case in cases:
        session.measure_floor(case)
        session.measure(candidate, case)
    print_tables(session.report)
    if plot_out is not None:
        try:
            plot(session.report, plot_out)
        except RuntimeError as error:
            _fail(str(error))
    raise typer.Exit(1 if session.report.refusals else 0)


@app.command()
def step(
    model: Annotated[str, typer.Argument(help="A known model, a config.json of transformers, or a folder with one.")],
    layers: Annotated[
        int | None, typer.Option(help="Its first layers only, where all do not fit.", show_default="all")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", "-b", help="Rows; may be repeated.", show_default="1, 8, 64, 256")
    ] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens of a row; repeatable.", show_default="1024")] = None,
    state_format: Annotated[
        list[str] | None,
        typer.Option("--format", help='"checkpoint" or "checkpoint+read copy"; repeatable.', show_default="fp32"),
    ] = None,
    window: Annotated[int, typer.Option(help="Window in force.")] = 16,
    read_window: Annotated[
        int | None, typer.Option(help="The same of precisions with a read copy.", show_default="as --window")
    ] = None,
    verify_len: Annotated[int, typer.Option("--verify-len", help="Tokens per step: 1 + drafts.")] = 1,
    accepted: Annotated[
        int | None, typer.Option(help="Tokens of each step that stay.", show_default="all but one")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to time.")] = 1000,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run whose times mean nothing.")] = "cuda",
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.", show_default=False)
    ] = None,
    report_out: Annotated[
        Path | None, typer.Option("--report", help="Write charts and tables to this HTML file.", show_default=False)
    ] = None,
) -> None:
    """Time the complete decode step of a model with random bf16 weights, with and without replay.

    The same runner decodes with a window of 1, which reads and writes the state at every token, and without any state
    part. Ordinary kernels of other packages take part when `benchmarks/steps/run.py` of the source tree is used.
    """
    from replayssm.bench.step_cli import Request, run

    try:
        report = run(
            Request(
                model=model,
                layers=layers,
                batches=tuple(batch or DEFAULT_BATCHES),
                contexts=tuple(context or (1024,)),
                formats=tuple(state_format or ("fp32",)),
                window=window,
                verify_len=verify_len,
                accepted=max(1, verify_len - 1) if accepted is None else accepted,
                steps=steps,
                device=device,
                json_out=json_out,
                read_window=read_window,
                report_out=report_out,
            )
        )
    except (OSError, ValueError) as error:
        _fail(_reason(error))
    raise typer.Exit(1 if report.refusals else 0)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="JSON files of `bench step` or `benchmarks/steps`.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("steps.html"),
) -> None:
    """Draw measured decode steps: one HTML file with charts, tables and conditions, which needs no other file."""
    from replayssm.bench.html import write
    from replayssm.bench.rows import Report

    try:
        write([Report.load(path) for path in results], out)
    except (OSError, ValueError) as error:
        _fail(_reason(error))
    typer.echo(f"{out} has the report.", err=True)


@app.command()
def vllm(
    model: Annotated[str, typer.Argument(help="A known model, a config.json of transformers, or a folder with one.")],
    layers: Annotated[
        int | None, typer.Option(help="Its first layers only, where all do not fit.", show_default="all")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", "-b", help="Rows; may be repeated.", show_default="1, 32, 128, 256")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 1024,
    precision: Annotated[str, typer.Option(help='"checkpoint" or "checkpoint+read copy".')] = "fp32",
    window: Annotated[int, typer.Option(help="Window in force.")] = 16,
    draft_len: Annotated[int, typer.Option("--draft-len", help="Tokens that n-gram speculation guesses.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps to time.")] = 96,
    options: Annotated[str, typer.Option(help="Further arguments of vllm.LLM, for both sides, as JSON.")] = "{}",
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.", show_default=False)
    ] = None,
) -> None:
    """Time decode steps of vLLM with and without the plug-in: the same settings, random bf16 weights, offline."""
    import json
    from importlib.util import find_spec

    from replayssm.bench.engine import EngineRequest, print_table, run

    if find_spec("vllm") is None:
        _fail("bench vllm needs vLLM, which is not installed; install replayssm[vllm]")
    try:
        further = json.loads(options)
    except ValueError as error:
        _fail(f"--options is no JSON: {error}")
    try:
        request = EngineRequest(
            model, layers, tuple(batch or (1, 32, 128, 256)), context, precision, window, draft_len, steps, further
        )
        report = run(request, json_out)
    except ValueError as error:
        _fail(str(error))
    print_table(report)
    raise typer.Exit(1 if report.refusals else 0)


def _reason(error: OSError | ValueError) -> str:
    """What went wrong; of a file, its name and why."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _fail(message: str) -> None:
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(USAGE_STATUS)
