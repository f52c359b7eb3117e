"""`replayssm tune`: the command alone, so that naming it imports no Triton."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)

USAGE_STATUS = 2


@app.command()
def tune(
    geometry: Annotated[list[str], typer.Argument(help="Models whose layers to tune, as in `bench kernels`.")],
    batch: Annotated[
        list[int] | None, typer.Option("--batch", "-b", help="Rows; may be repeated.", show_default=False)
    ] = None,
    verify_len: Annotated[
        list[int] | None,
        typer.Option("--verify-len", help="Tokens per step; may be repeated.", show_default=False),
    ] = None,
    state_format: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help='"checkpoint" or "checkpoint+read copy", fp32 by default; may be repeated.',
            show_default=False,
        ),
    ] = None,
    window: Annotated[int, typer.Option(help="Window in force.")] = 16,
    jobs: Annotated[int, typer.Option(help="Processes that compile and check candidates.")] = 8,
    out: Annotated[
        Path | None, typer.Option(help="The table; that of this GPU in the package by default.", show_default=False)
    ] = None,
) -> None:
    """Find the fastest kernel launches for this machine's GPU, and write them to its table."""
    try:
        import torch
        import triton  # noqa: F401 - named here so that its absence is one sentence
    except ImportError as error:
        _fail(f"tune needs torch and triton, and {error.name} is not installed; install replayssm[gpu]")
    if not torch.cuda.is_available():
        _fail("tune needs a CUDA GPU, and torch sees none on this machine")

    from replayssm.bench.geometries import find
    from replayssm.bench.rows import Conditions
    from replayssm.bench.tune import tune as measure
    from replayssm.config import ReplayConfig
    from replayssm.kernels.tuned import path_of, save
    from replayssm.state.layout import StateLayout

    device = torch.device("cuda")
    target = path_of(torch.cuda.get_device_name(device)) if out is None else out
    conditions = vars(Conditions.collect(device))
    layouts = []
    try:
        for name, form, tokens in product(geometry, state_format or ["fp32"], verify_len or [1]):
            model, config = find(name), ReplayConfig.of(form, window=window, verify_len=tokens)
            layouts.append(StateLayout(model.replayed, model.timed, config, torch.bfloat16))
    except ValueError as error:
        _fail(str(error))
    for layout in layouts:
        tokens, formats = layout.config.verify_len, (layout.config.checkpoint_format, layout.config.read_format)
        form = "+".join(filter(None, formats))
        typer.echo(f"{layout.recurrence.title}, {layout.geometry}, {form}, {tokens} tokens a step")
        rows = measure(layout, batch or [1, 8, 64, 256], tokens, device, workers=jobs, log=typer.echo)
        save(target, tuple(rows), conditions)
    typer.echo(f"written to {target}")


def _fail(message: str) -> None:
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(USAGE_STATUS)
