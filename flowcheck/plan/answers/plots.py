"""Pictures of an answer. The only module that imports matplotlib, and only when a picture is asked for.

    save(plots, Path("loss.svg"))     a file, one panel below the other
    svg(plots)                        the same as text, to put into a page

The same plots give the same bytes: no date, no random identifiers. No window is ever opened.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowcheck.durable import make_directory, write_atomic
from flowcheck.errors import EnvironmentProblem, UserError, installing
from flowcheck.plan.answers.answer import Plot

__all__ = ["KINDS", "save", "svg"]

KINDS = ("png", "svg")
SIZE = (8.0, 4.5)  # inches of one panel
DPI = 120
MANY = 6  # categories; more are written at a slant
BAR = 0.8  # share of a category's width that its bars take


def save(plots: Sequence[Plot], file: Path) -> None:
    """Raises UserError for another suffix or nothing to draw, EnvironmentProblem without matplotlib or room."""
    kind = file.suffix.lower().lstrip(".")
    if kind not in KINDS:
        raise UserError("is not a name of a picture", where=str(file), remedy="a name that ends in .png or .svg")
    if not plots:
        raise UserError("there is nothing to draw for this question", where="--plot", remedy="leave it out")
    drawn = _render(plots, kind)
    try:
        make_directory(file.parent)
        write_atomic(file, drawn)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot be written: {error.strerror or error}", where=str(file), remedy="name a path in another directory"
        ) from None


def svg(plots: Sequence[Plot]) -> str:
    """The panels as one <svg> element, without the lines before it."""
    text = _render(plots, "svg").decode()
    return text[text.index("<svg") :]


def _render(plots: Sequence[Plot], kind: str) -> bytes:
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentProblem(
            f"{error.name} is not installed, and pictures are drawn with it", where="pictures",
            remedy=f"{installing(error)}; without pictures, `flowcheck plan` prints the same figures",
        ) from None
    with matplotlib.rc_context({"svg.hashsalt": "flowcheck", "svg.fonttype": "none"}):
        figure = Figure(figsize=(SIZE[0], SIZE[1] * len(plots)), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        for number, plot in enumerate(plots):
            _panel(figure.add_subplot(len(plots), 1, number + 1), plot)
        out = io.BytesIO()
        figure.savefig(out, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return out.getvalue()


def _panel(axes: Any, plot: Plot) -> None:
    if plot.kind == "lines":
        for series in plot.series:
            y = [float("nan") if value is None else value for value in series.y]
            axes.plot(series.x, y, "--" if series.dashed else "-", label=series.label)
    else:
        _bars(axes, plot)
    axes.set_title(plot.title)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    if plot.log_x:
        axes.set_xscale("log")
    if plot.log_y:
        axes.set_yscale("log")
    numbers = [x for series in plot.series for x in series.x]
    if plot.kind == "lines" and not plot.log_x and all(x == int(x) for x in numbers):
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_axisbelow(True)
    axes.grid(True, alpha=0.3)
    if any(series.label for series in plot.series):
        axes.legend(fontsize="small")


def _bars(axes: Any, plot: Plot) -> None:
    """Categories along x, in the order in which series name them."""
    names = list(dict.fromkeys(str(x) for series in plot.series for x in series.x))
    beside = plot.kind == "bars"
    width = BAR / len(plot.series) if beside else BAR
    below = dict.fromkeys(names, 0.0)
    for number, series in enumerate(plot.series):
        heights = {str(x): y or 0.0 for x, y in zip(series.x, series.y, strict=True)}
        shift = (number - (len(plot.series) - 1) / 2) * width if beside else 0.0
        axes.bar(
            [names.index(name) + shift for name in heights], list(heights.values()), width, label=series.label,
            bottom=None if beside else [below[name] for name in heights],
        )
        for name, height in heights.items():
            below[name] += height
    turned = {"rotation": 30, "ha": "right"} if len(names) > MANY else {}
    axes.set_xticks(range(len(names)), names, **turned)
