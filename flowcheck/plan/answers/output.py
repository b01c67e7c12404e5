"""How every planning command prints its answer: tables, one JSON object, or a picture in a file.

    @plan.command()
    def loss(..., as_json: JsonOption = False, plot: PlotOption = None) -> None:
        raise typer.Exit(publish(answer, as_json, plot))
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flowcheck.plan.answers.answer import Answer, Grid, Value, shown
from flowcheck.tables import Column, print_table, screen

__all__ = ["JsonOption", "PlotOption", "document", "print_answer", "publish"]

COLUMNS = 80  # of files and pipes
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object for machines (docs/use/planning.md).")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it: FILE.png or FILE.svg (extra `plan`).")
]


def publish(answer: Answer, as_json: bool = False, plot: Path | None = None) -> int:
    """Prints, draws if asked to, and returns the exit status: 0 if what was asked for holds, else 1.

    Raises EnvironmentProblem where the picture cannot be drawn or written, UserError for a name of no picture.
    """
    if plot is not None:
        from flowcheck.plan.answers.plots import save

        save(answer.plots, plot)
    if as_json:
        json.dump(document(answer), sys.stdout, indent=1, allow_nan=False)
        sys.stdout.write("\n")
    else:
        print_answer(answer, screen(COLUMNS))
        if plot is not None:
            typer.echo(f"drawn: {plot}")
    return int(not answer.good)


def document(answer: Answer) -> dict[str, Any]:
    """The answer as JSON's types. A figure that is not finite becomes null."""
    return {
        "schema": f"flowcheck-plan-{answer.command}/1",
        "question": answer.question,
        "good": answer.good,
        "verdict": answer.verdict,
        "inputs": [asdict(row) | {"value": _finite(row.value)} for row in answer.inputs],
        "results": [asdict(row) | {"value": _finite(row.value)} for row in answer.results],
        "tables": {grid.name: _table(grid) for grid in answer.grids},
        "notes": list(answer.notes),
    }


def _table(grid: Grid) -> dict[str, Any]:
    return {
        "title": grid.title, "source": grid.source, "columns": list(grid.columns),
        "rows": [[_finite(value) for value in row] for row in grid.rows],
    }


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_answer(answer: Answer, console: Console) -> None:
    """For people; 80 columns are enough."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    say(answer.question)
    say("")
    names = [Column("result", folds=True), Column("value", number=True), Column("unit"), Column("source", folds=True)]
    rows = [(row.name, shown(row.value), row.unit, row.source) for row in answer.results]
    if rows:
        print_table(console, names, rows)
    for grid in answer.grids:
        _print_grid(console, grid)
        if grid.source:
            say(f"source: {grid.source}\n")
    names = [Column("input"), Column("value", number=True), Column("unit"), Column("where from", folds=True)]
    rows = [(row.name, shown(row.value), row.unit, row.source) for row in answer.inputs]
    if rows:
        print_table(console, names, rows)
    if answer.verdict:
        say(answer.verdict)
    for note in answer.notes:
        say(f"note: {note}")


def _print_grid(console: Console, grid: Grid) -> None:
    def numbers(at: int) -> bool:
        return all(not isinstance(row[at], str) for row in grid.rows)

    columns = [Column(name, number=numbers(at), folds=not numbers(at)) for at, name in enumerate(grid.columns)]
    print_table(console, columns, [[shown(value) for value in row] for row in grid.rows], grid.title)
