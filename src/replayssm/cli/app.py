"""The commands and their options. What they do is in files of their names."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from replayssm import __version__
from replayssm.bench.cli import app as bench
from replayssm.bench.tune_cli import tune
from replayssm.cli.errors import clear_errors
from replayssm.cli.speculate import DEFAULT_DRAFT_LEN, Guesser, Speculation
from replayssm.models import DEFAULT, DRAFT

app = typer.Typer(
    name="replayssm",
    help="Exact decoding for state-space and linear-attention models that does not write the state at every token.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(bench, name="bench")
app.command()(tune)


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"replayssm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.", show_default=False)] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="Read the text from a file, less its last line break; - is standard input.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A checkpoint folder, or the name of a bundled model.")
    ] = DEFAULT,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="How many tokens to write.")] = 128,
    window: Annotated[int, typer.Option(help="Most tokens in the ring before it is folded into the checkpoint.")] = 16,
    precision: Annotated[
        str, typer.Option("--precision", "-p", help='How the state is kept: "checkpoint" or "checkpoint+read copy".')
    ] = "fp32",
    temperature: Annotated[
        float | None, typer.Option(help="Sample at this temperature instead of taking the likeliest token.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Sample among the likeliest tokens that make up this probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    speculate: Annotated[
        Guesser | None,
        typer.Option(
            help="Draft tokens and verify several in one step: from the text so far, or with a draft model.",
            show_default=False,
        ),
    ] = None,
    draft_len: Annotated[
        int | None,
        typer.Option(help=f"Most tokens of a draft; {DEFAULT_DRAFT_LEN} by default.", show_default=False),
    ] = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="Draft a tree with several branches instead of a chain.")
    ] = False,
    draft_model: Annotated[
        str | None,
        typer.Option(help=f"Checkpoint folder or bundled model that drafts; {DRAFT} by default.", show_default=False),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode ordinarily as well, and say whether the tokens are the same.")
    ] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Write the prompt before the text.")] = False,
    device: Annotated[
        Device | None, typer.Option(help="Where to run; cuda if there is one, else cpu.", show_default=False)
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights and activations.")] = Dtype.fp32,
) -> None:
    """Continue a text with a replayed model.

    The text goes to standard output as it is produced, and a summary of the state traffic to standard error.
    The likeliest token is taken each time, unless --temperature or --top-p asks for sampling.
    """
    from replayssm.cli import generate as command

    with clear_errors():
        request = command.Request(
            prompt=command.read_prompt(prompt, file),
            folder=command.find_folder(model),
            max_new_tokens=max_new_tokens,
            window=window,
            precision=precision,
            sampling=command.Sampling.choose(temperature, top_p, seed),
            speculation=Speculation.choose(
                speculate,
                draft_len,
                tree,
                None if draft_model is None else command.find_folder(draft_model, "--draft-model"),
                window,
            ),
            compare=compare,
            echo=echo,
            device=command.choose_device(device and device.value),
            dtype=dtype.value,
        )
        status = command.run(request)
    raise typer.Exit(status)


@app.command("eval")
def evaluate(
    text: Annotated[
        Path | None,
        typer.Argument(help="The text to decode, a UTF-8 file; it is given, not written.", show_default=False),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A checkpoint folder, or the name of a bundled model.")
    ] = DEFAULT,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            "--precision",
            "-p",
            help='How the state is kept, "checkpoint" or "checkpoint+read copy", as in fp16+nvfp4; '
            "fp8-stochastic+nvfp4 rounds the checkpoint at random. May be repeated; by default a usual choice.",
            show_default=False,
        ),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            help='Multiple-choice questions to score as well: {"question": text, "choices": list of texts, '
            '"answer": index} a line.',
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each sequence that is cut from the text.")] = 1024,
    sequences: Annotated[int, typer.Option(help="Sequences, one behind the other in the text.")] = 1,
    window: Annotated[int, typer.Option(help="Tokens in the ring before it is folded into the checkpoint.")] = 16,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file.", show_default=False)
    ] = None,
    plot_out: Annotated[
        Path | None, typer.Option("--plot", help="Draw divergence by position to this file.", show_default=False)
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="Where to run; cuda if there is one, else cpu.", show_default=False)
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights and activations.")] = Dtype.fp32,
) -> None:
    """Measure what a precision of the state costs: divergence from decoding with fp32 states, and accuracy.

    The text is decoded token window by token window in every precision, and each is compared with fp32 states.
    """
    from replayssm.cli import evaluate as command
    from replayssm.cli.generate import choose_device, find_folder

    with clear_errors():
        command.run(
            command.Request(
                text=text,
                questions=questions,
                folder=find_folder(model),
                precisions=tuple(precision or command.USUAL),
                tokens=tokens,
                sequences=sequences,
                window=window,
                json_out=json_out,
                plot_out=plot_out,
                device=choose_device(device and device.value),
                dtype=dtype.value,
            )
        )


@app.command("plan")
def plan(
    model: Annotated[str, typer.Argument(help="A known model, a config.json of transformers, or a folder with one.")],
    gpu: Annotated[str, typer.Option(help="The GPU to predict for: h200 or h100.")] = "h200",
    batch: Annotated[
        list[int] | None, typer.Option("--batch", "-b", help="Sequences; may be repeated.", show_default="1, 64, 256")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of each sequence.")] = 1024,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            "--precision",
            "-p",
            help='How the state is kept, "checkpoint" or "checkpoint+read copy"; may be repeated.',
            show_default="fp32, bf16, fp32+fp8, fp32+nvfp4",
        ),
    ] = None,
    verify_len: Annotated[
        int, typer.Option("--verify-len", help="Tokens of a speculative step: 1 + drafts; 1 leaves it out.")
    ] = 4,
    accepted: Annotated[int | None, typer.Option(help="Tokens of it that stay.", show_default="all but one")] = None,
    window: Annotated[
        int | None, typer.Option(help="Window to predict for.", show_default="the fastest, of those measured")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Its first layers only, where all do not fit.", show_default="all", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")] = False,
) -> None:
    """Predict memory, sequences that fit, and the decode step of a model on a GPU, without having one."""
    from replayssm.cli import plan as command

    with clear_errors():
        command.run(
            command.Request(
                model=model,
                gpu=gpu,
                batches=tuple(batch or (1, 64, 256)),
                context=context,
                precisions=tuple(precision or command.USUAL),
                verify_len=verify_len,
                accepted=max(1, verify_len - 1) if accepted is None else accepted,
                window=window,
                layers=layers,
                as_json=as_json,
            )
        )


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")] = False,
) -> None:
    """Show versions, back ends, supported model families and bundled models."""
    from replayssm.cli import info as command

    with clear_errors():
        command.show(command.collect(), as_json=as_json)
