"""A node's telemetry file as a part of a page: norms and update ratios by iteration, and what was no number.

    telemetry_answer(Path("gradients.csv"))     raises UserError for any other file

Of a file with many tensors those with the largest norms are drawn, and the model as a whole. Rows are read one by one;
memory grows with the figures that are drawn: iterations times tensors.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.plan.answers.answer import Answer, Grid, Input, Plot, Result, Series, Value

__all__ = ["telemetry_answer"]

DRAWN = 6  # tensors
LISTED = 20  # of those that are not finite
WANTED = ("iteration", "tensor", "elements", "norm", "nan", "infinity", "first_nan", "first_infinity", "update_ratio")
PAGE = "docs/use/operating.md"


@dataclass
class _Found:
    """norms, ratios: by tensor and iteration. odd: (iteration, tensor, NaN, infinite, first of each)."""

    norms: dict[str, dict[int, float]] = field(default_factory=dict)
    ratios: dict[str, dict[int, float]] = field(default_factory=dict)
    squares: dict[int, float] = field(default_factory=dict)
    odd: list[tuple[Value, ...]] = field(default_factory=list)
    odd_rows: int = 0


def telemetry_answer(path: Path) -> Answer:
    """Raises UserError: another file; EnvironmentProblem: it cannot be read."""
    found = _Found()
    for row in _rows(path):
        _take(found, row)
    if not found.squares:
        raise UserError("has no row of a tensor that was measured", where=str(path), remedy=f"a file as {PAGE} has it")
    largest = sorted(found.norms, key=lambda name: -max(found.norms[name].values()))[:DRAWN]
    whole = {iteration: math.sqrt(squares) for iteration, squares in found.squares.items()}
    plots = [_plot("Norms of gradients", "L2 norm", {"the model": whole} | {one: found.norms[one] for one in largest})]
    moved = {name: found.ratios[name] for name in largest if name in found.ratios}
    if moved:
        plots.append(_plot("Change of weights", "norm of the change / norm before", moved))
    columns = ("iteration", "tensor", "NaN", "infinite", "first NaN", "first infinite")
    grids = [Grid("not_finite", "Gradients that are no numbers", columns, found.odd, PAGE)] if found.odd else []
    return Answer(
        "telemetry", "What were the gradients?", [Input("telemetry", str(path))],
        [Result("iterations measured", len(whole), "", PAGE), Result("tensors", len(found.norms), "", PAGE),
         Result("rows with NaN or infinity", found.odd_rows, "", PAGE)],
        grids, _verdict(found), not found.odd,
        [f"Drawn are the {len(largest)} tensors with the largest norms, and the model as one vector."], plots,
    )


def _verdict(found: _Found) -> str:
    if not found.odd:
        return f"All gradients of {len(found.squares):,} iterations were numbers."
    iteration, tensor, nans, _, *firsts = found.odd[0]
    kind, element = ("NaN", firsts[0]) if nans else ("infinite", firsts[1])
    return f"In iteration {iteration}, element {element} of the gradient of {tensor} is {kind}."


def _rows(path: Path) -> Iterator[Mapping[str, str]]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            absent = [name for name in WANTED if name not in (reader.fieldnames or ())]
            if absent:
                raise UserError(f"has no column {absent[0]}", where=str(path), remedy=f"a file as {PAGE} has it")
            yield from reader
    except OSError as error:
        kind = UserError if isinstance(error, FileNotFoundError) else EnvironmentProblem
        raise kind(f"cannot be read: {error.strerror}", where=str(path), remedy=f"a file as {PAGE} has it") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"is not CSV: {error}", where=str(path), remedy=f"a file as {PAGE} has it") from None


def _take(found: _Found, row: Mapping[str, str]) -> None:
    """A row that is cut off, or has something else in it than a node writes, is left out."""
    try:
        iteration, name, elements = int(row["iteration"]), row["tensor"], int(row["elements"])
        if row["update_ratio"]:
            found.ratios.setdefault(name, {})[iteration] = float(row["update_ratio"])
        if not elements:
            return
        norm, nans, infs = float(row["norm"]), int(row["nan"]), int(row["infinity"])
    except (TypeError, ValueError):
        return
    found.norms.setdefault(name, {})[iteration] = norm
    found.squares[iteration] = found.squares.get(iteration, 0.0) + norm * norm
    if nans or infs:
        found.odd_rows += 1
        if len(found.odd) < LISTED:
            found.odd.append((iteration, name, nans, infs, row["first_nan"], row["first_infinity"]))


def _plot(title: str, y: str, lines: Mapping[str, Mapping[int, float]]) -> Plot:
    """0 has no place on a logarithmic axis: a gap."""
    series = [Series(name, sorted(of), [of[i] or None for i in sorted(of)]) for name, of in lines.items()]
    return Plot(title, "iteration", y, series, log_y=True)
