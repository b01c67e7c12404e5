"""`flowcheck plan report`: answers as one page that needs nothing else. No script, no font, no address outside.

    write(Path("report.html"), page(title, question, [loss, capacity, goodput], change, changes))

Pictures are SVG in the page; their black is the page's ink, so that they can be read in light and in dark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowcheck import __version__
from flowcheck.durable import make_directory, reporting, write_atomic
from flowcheck.errors import EnvironmentProblem, installing
from flowcheck.plan.answers.answer import Answer, Grid, Input, Result, need, shown
from flowcheck.plan.answers.plots import svg

__all__ = ["check_name", "page", "themed", "write"]

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class _Part:
    """An Answer as the template reads it."""

    command: str
    question: str
    verdict: str
    good: bool
    results: Sequence[Result]
    grids: Sequence[Grid]
    notes: Sequence[str]
    inputs: Sequence[Input]
    pictures: Sequence[str]


def themed(drawing: str, prefix: str) -> str:
    """An <svg> element for a page with others: names of its own, the page's ink for black, no paper, no metadata."""
    text = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", text)
    text = re.sub(r"(?i)fill: ?#ffffff", "fill: none", text)
    return re.sub(r"(?i)(fill|stroke): ?#000000", r"\1: currentColor", text)


def page(
    title: str, question: str, answers: Sequence[Answer], change: Grid | None = None, changes: Sequence[str] = ()
) -> str:
    """The page as text. Raises EnvironmentProblem where matplotlib or jinja2 is not installed."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise EnvironmentProblem(
            f"{error.name} is not installed, and pages are made with it", where="flowcheck plan report",
            remedy=installing(error),
        ) from None
    parts = [
        _Part(
            answer.command, answer.question, answer.verdict, answer.good, answer.results, answer.grids, answer.notes,
            list(answer.inputs),
            [Markup(themed(svg([plot]), f"{answer.command}{number}")) for number, plot in enumerate(answer.plots)],
        )
        for answer in answers
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        title=title, question=question, parts=parts, change=change, changes=changes, shown=shown, numbers=_numbers,
        version=__version__,
    )


def _numbers(grid: Grid, column: int) -> bool:
    return all(not isinstance(row[column], str) for row in grid.rows)


def check_name(file: Path) -> None:
    """Raises UserError for a name of no page, before anything is computed for it."""
    need(file.suffix.lower() in (".html", ".htm"), "is not a name of a page", str(file), "a name that ends in .html")


def write(file: Path, text: str) -> None:
    """Aside, synced, renamed: a reader sees the old page or the whole new one. Raises UserError, EnvironmentProblem."""
    check_name(file)
    with reporting(file, "name a path in a directory that can be written"):
        make_directory(file.parent)
        write_atomic(file, text.encode(errors="backslashreplace"))  # an argument may hold bytes that are no text
