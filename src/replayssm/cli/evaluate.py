"""`replayssm eval`: what a precision of the recurrent state costs, on a given text and on questions."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from replayssm import __version__
from replayssm.cli.errors import CliError, first_line, reading
from replayssm.cli.generate import check_tokens, load, out_of_memory_is_an_error
from replayssm.config import MAX_WINDOW
from replayssm.evaluate.precision import REFERENCE, Precision

USUAL = ("nvfp4", "fp32+nvfp4", "fp16+nvfp4", "fp8+nvfp4", "fp32+fp8")
"""One shared copy, to show what it costs, and the pairs that are meant to be used."""


@dataclass(frozen=True)
class Request:
    """One call of the command, checked as far as is possible without loading the model."""

    text: Path | None
    questions: Path | None
    folder: Path
    precisions: tuple[str, ...]
    tokens: int
    sequences: int
    window: int
    json_out: Path | None
    plot_out: Path | None
    device: str
    dtype: str

    def __post_init__(self) -> None:
        if self.text is None and self.questions is None:
            raise CliError("There is nothing to evaluate; name a text file, or --questions.")
        if self.plot_out is not None and self.text is None:
            raise CliError("--plot draws what a text gives; name a text file, or leave --plot out.")
        if self.tokens < 2 or self.sequences < 1:
            raise CliError(
                f"--tokens must be at least 2 and --sequences at least 1, got {self.tokens} and {self.sequences}."
            )
        if not 1 <= self.window <= MAX_WINDOW:
            raise CliError(f"--window must be in 1..{MAX_WINDOW}, got {self.window}.")
        for name in self.precisions:
            try:
                Precision(name).config(self.window)
            except ValueError as error:
                raise CliError(f"--precision {name}: {first_line(error)}.") from None
        if self.json_out is not None:
            _require_writable("--json", self.json_out)
        if self.plot_out is not None:
            _require_writable("--plot", self.plot_out)
            _require_plot(self.plot_out)


def run(request: Request) -> None:
    """Load, evaluate, print tables, write files."""
    from replayssm.evaluate import measure, show

    questions = _read_questions(request.questions)
    text = None if request.text is None else _read_text(request.text)
    notes = Console(stderr=True, highlight=False)
    with notes.status(f"Loading {escape(request.folder.name)}"):
        tokenizer, model = load(request.folder, request.dtype, request.device)
    layers = _recurrent(model)
    _require_fit(model, request)
    _check_questions(questions, tokenizer, model, request)
    results: dict[str, Any] = {"conditions": _conditions(request)}
    tables = Console(highlight=False, markup=False, soft_wrap=True)
    if text is not None:
        ids = _cut(tokenizer(text)["input_ids"], request).to(request.device)
        check_tokens(ids, model)
        with _progress(notes, "decoding", len(layers) * request.tokens) as advance:
            evaluation = measure.evaluate(model, ids, request.precisions, window=request.window, progress=advance)
        results["text"] = evaluation.as_json()
        tables.print(show.text_table(evaluation))
        if request.plot_out is not None:
            show.plot(evaluation, request.plot_out, request.folder.name)
    if questions:
        with _progress(notes, "answering", len(questions)) as advance:
            answers = measure.answer(
                model, tokenizer, questions, request.precisions, window=request.window, progress=advance
            )
        results["questions"] = {"count": len(questions), "rows": [asdict(row) for row in answers]}
        tables.print(show.question_table(answers, len(questions)))
    if request.json_out is not None:
        request.json_out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _recurrent(model: Any) -> tuple[Any, ...]:
    from replayssm.attach.transformers.find import find_layers

    try:
        return find_layers(model)
    except ValueError as error:
        raise CliError(f"{first_line(error)}.") from None


def _require_fit(model: Any, request: Request) -> None:
    """Every precision can hold the states of this model."""
    from replayssm.evaluate.measure import slot_bytes

    for name in (REFERENCE, *request.precisions):
        try:
            slot_bytes(model, Precision(name).config(request.window))
        except ValueError as error:
            raise CliError(f"--precision {name} does not fit this model: {first_line(error)}; name others.") from None


def _check_questions(questions: list[Any], tokenizer: Any, model: Any, request: Request) -> None:
    from replayssm.evaluate.measure import encode

    for question in questions:
        try:
            start, ends = encode(tokenizer, question)
        except ValueError as error:
            raise CliError(f"{request.questions}: {first_line(error)}.") from None
        check_tokens(torch.tensor([*start, *chain.from_iterable(ends)]), model)


@contextmanager
def _progress(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    with Progress(console=console, transient=True) as progress, out_of_memory_is_an_error():
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _cut(ids: list[int], request: Request) -> torch.Tensor:
    """int64 [sequences, tokens] from the beginning of the text."""
    wanted = request.tokens * request.sequences
    if len(ids) < wanted:
        raise CliError(
            f"{request.text} has {len(ids)} tokens, and {request.sequences} x {request.tokens} are asked for; lower "
            "--tokens or --sequences, or take a longer text."
        )
    return torch.tensor(ids[:wanted]).reshape(request.sequences, request.tokens)


def _require_writable(option: str, path: Path) -> None:
    if path.is_dir():
        raise CliError(f"{option} {path}: this is a folder; name a file.")
    if not path.parent.is_dir():
        raise CliError(f"{option} {path}: there is no folder {path.parent}; make it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CliError(f"{option} {path}: it may not be written; name another file.")


def _require_plot(path: Path) -> None:
    from replayssm.evaluate.show import require_plot

    try:
        require_plot(path)
    except (RuntimeError, ValueError) as error:
        raise CliError(f"--plot {path}: {first_line(error)}.") from None


def _read_text(path: Path) -> str:
    with reading(path):
        return path.read_text(encoding="utf-8")


def _read_questions(path: Path | None) -> list[Any]:
    from replayssm.evaluate.measure import read_questions

    if path is None:
        return []
    try:
        with reading(path):
            return read_questions(path)
    except ValueError as error:
        raise CliError(f"{first_line(error)}.") from None


def _conditions(request: Request) -> dict[str, Any]:
    import transformers

    cuda = request.device == "cuda"
    return {
        "model": request.folder.name,
        "text": None if request.text is None else request.text.name,
        "questions": None if request.questions is None else request.questions.name,
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        "dtype": request.dtype,
        "replayssm": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": " ".join(["replayssm", *sys.argv[1:]]),
    }
