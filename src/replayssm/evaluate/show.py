"""Tables and a plot of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from replayssm.evaluate.measure import Answers, Evaluation


def text_table(evaluation: Evaluation) -> Table:
    """One line per setting."""
    what = f"{evaluation.sequences} x {evaluation.tokens} tokens, window {evaluation.window}"
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), title=what, title_justify="left")
    table.add_column("precision", min_width=max(len(row.precision) for row in evaluation.rows))
    for heading in ("KL from fp32", "perplexity", "same top token", "state error", "bytes per sequence"):
        table.add_column(heading)
    for row in evaluation.rows:
        table.add_row(
            row.precision,
            f"{row.kl:.3g}",
            f"{row.perplexity:.4f}",
            f"{row.agreement:.2%}",
            f"{row.state_error:.2g}",
            f"{row.slot_bytes:,}",
        )
    return table


def question_table(answers: Sequence[Answers], count: int) -> Table:
    """One line per setting."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), title=f"{count} questions", title_justify="left")
    table.add_column("precision", min_width=max(len(row.precision) for row in answers))
    for heading in ("right", "right by likelihood per token", "same answer as fp32"):
        table.add_column(heading)
    for row in answers:
        shares = (row.accuracy, row.accuracy_per_token, row.same_as_reference)
        table.add_row(row.precision, *(f"{share:.1%}" for share in shares))
    return table


def require_plot(path: Path) -> None:
    """Find out before an evaluation whether `plot` can draw to a file of this name.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: it has no such image format.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise RuntimeError("plots need matplotlib: install replayssm[plot]") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"the name of an image ends in one of {', '.join(f'.{each}' for each in sorted(known))}")


def plot(evaluation: Evaluation, path: Path, title: str) -> None:
    """KL and state error by position, one line per setting beside the reference; raises as `require_plot`."""
    require_plot(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (divergence, states) = pyplot.subplots(1, 2, figsize=(11, 4))
    for row in evaluation.rows[1:]:
        for axis, values, stretch in (
            (divergence, row.kl_by_position, evaluation.stretch),
            (states, row.state_error_by_position, evaluation.state_stretch),
        ):
            axis.plot([(i + 0.5) * stretch for i in range(len(values))], values, label=row.precision, linewidth=1)
    for axis, label in ((divergence, "KL from fp32 states, nats"), (states, "relative state error")):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("position, tokens")
        axis.set_ylabel(label)
    states.legend(fontsize=7)
    figure.suptitle(
        f"{title}, window {evaluation.window}, {evaluation.sequences} x {evaluation.tokens} tokens", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
