"""What a planning command says: inputs and where each value comes from, results and where each formula comes from.

    inputs = Inputs()
    loss = inputs.take("loss", given, default=1e-9, source="FlowCheck, section 8.3")
    Answer("loss", "How often ...?", inputs, [Result("incomplete iterations", 6e-12, "", "FlowCheck, eq. (2)")], ...)

Nothing is assumed in silence: every value that enters a formula is an Input, and is printed with the answer. Pure data;
output.py prints it, plots.py draws its plots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from flowcheck.errors import UserError

__all__ = [
    "Answer", "Grid", "Input", "Inputs", "Plot", "Result", "Series", "Value", "need", "need_at_most", "need_positive",
    "need_probability", "shown",
]

Value = float | int | str | bool | None
T = TypeVar("T", bound=Value)
MOST, LEAST = 1e18, 1e-12  # of any input, and of what is divided by: what is made of it then stays a number


@dataclass(frozen=True)
class Input:
    """One value that enters a formula. name: of its option, without dashes. source: "given", or why this default."""

    name: str
    value: Value
    unit: str = ""
    source: str = "given"


class Inputs:
    """The inputs of one answer, in the order in which they were taken. sources: by name, where values come from that
    are given, and not by the person who asks.

    Whatever is given is refused above MOST, with its option.
    """

    def __init__(self, sources: Mapping[str, str] | None = None) -> None:
        self._rows: list[Input] = []
        self._sources = dict(sources or {})

    def take(self, name: str, given: T | None, default: T, unit: str = "", source: str = "") -> T:
        """The given value, or the default; noted with its source either way."""
        if given is not None:
            return self.note(name, given, unit)
        return self.note(name, default, unit, f"default: {source}")

    def note(self, name: str, value: T, unit: str = "", source: str = "given") -> T:
        """A value that came otherwise: from a file, from a preset, or computed from other inputs."""
        if source == "given" and isinstance(value, int | float):
            need_at_most(value, MOST, f"--{name}")
        if source == "given":
            source = self._sources.get(name, source)
        self._rows.append(Input(name, value, unit, source))
        return value

    def __iter__(self) -> Iterator[Input]:
        return iter(self._rows)


@dataclass(frozen=True)
class Result:
    """One figure. source: the formula or the page that it comes from."""

    name: str
    value: Value
    unit: str = ""
    source: str = ""


@dataclass(frozen=True)
class Grid:
    """Results in rows and columns. name: its key in JSON. rows: values in the order of `columns`."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    source: str = ""


@dataclass(frozen=True)
class Series:
    """One line, or one set of bars. x: numbers, or names of categories. y: None leaves a gap. dashed: a limit."""

    label: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float | None]
    dashed: bool = False


@dataclass(frozen=True)
class Plot:
    """A picture as data. kind: "lines", "bars" (side by side) or "stacked" (on top of each other)."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: str = "lines"
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Answer:
    """All that a command says. good: what was asked for holds; the exit status follows it."""

    command: str
    question: str
    inputs: Sequence[Input] | Inputs
    results: Sequence[Result] = ()
    grids: Sequence[Grid] = ()
    verdict: str = ""
    good: bool = True
    notes: Sequence[str] = ()
    plots: Sequence[Plot] = field(default=(), repr=False)


def shown(value: Value) -> str:
    """A value for people: thousands apart, four digits, and powers of ten where digits do not tell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or (value == int(value) if abs(value) < 1e15 else False):
        return f"{int(value):,}" if abs(value) < 1e12 else f"{value:.4g}"
    if not 1e-3 <= abs(value) < 1e12:
        return f"{value:.3e}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


# -- what is refused --------------------------------------------------------------------------------------------------


def need(holds: bool, what: str, where: str, remedy: str) -> None:
    """Raises UserError unless it holds. where: the option or the field."""
    if not holds:
        raise UserError(what, where=where, remedy=remedy)


def need_probability(value: float, where: str, *, below_one: bool = False) -> None:
    good = 0 <= value < 1 if below_one else 0 <= value <= 1
    need(good, f"{_said(value)} is not a probability", where, f"a number from 0 to {'below ' if below_one else ''}1")


def need_positive(value: float, where: str, unit: str = "") -> None:
    wanted = f"a number above 0, in {unit}" if unit else "a number above 0"
    need(abs(value) < float("inf"), f"{_said(value)} is not finite", where, wanted)
    need(value > 0, f"{_said(value)} is not above 0", where, wanted)
    need(value >= LEAST, f"{_said(value)} is as good as 0", where, wanted)


def need_at_most(value: float, most: float, where: str, why: str = "") -> None:
    """why: what has no more than that."""
    need(not value > most, f"{_said(value)} is too much{f': {why}' if why else ''}", where, f"at most {shown(most)}")


def _said(value: float) -> str:
    """In a sentence: a whole number may have more digits than a float can tell."""
    return f"{value:g}" if abs(value) <= MOST or isinstance(value, float) else f"a number of {len(str(value))} digits"
