"""How the command line says what went wrong: one sentence on standard error and exit status 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

USAGE_STATUS = 2
DIFFERS_STATUS = 1


class CliError(Exception):
    """Something the user can put right. The message is one sentence that says what to do."""


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn a `CliError` into its message and exit status 2; any other error is a fault of ours and keeps its trace."""
    try:
        yield
    except CliError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(USAGE_STATUS) from None


@contextmanager
def reading(path: Path, what: str = "the path") -> Iterator[None]:
    """Turn what goes wrong with a file of text into a `CliError`; `what` is to be checked when there is none."""
    try:
        yield
    except FileNotFoundError:
        raise CliError(f"There is no file {path}; check {what}.") from None
    except UnicodeDecodeError:
        raise CliError(f"The file {path} is not UTF-8 text; convert it first.") from None
    except OSError as error:
        raise CliError(f"The file {path} cannot be read: {error.strerror}.") from None


def first_line(error: BaseException) -> str:
    """The first line of another library's message, which may run over pages, less its full stop."""
    text = str(error).strip()
    return text.splitlines()[0].strip().removesuffix(".") if text else type(error).__name__
