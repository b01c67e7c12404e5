"""What a person sees of a run: a table that moves on a terminal, one line per iteration anywhere else.

    with Screen(console, title) as screen:
        LabRun(..., watch=screen)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from flowcheck.job.version_status import FOLLOWS, VERIFIED, kind_of
from flowcheck.tables import Column, table, width_of
from lab.compare import Ledger, Row

__all__ = ["Screen", "columns", "healed_by"]

ROWS = 14
SECONDS = 0.3
COMPARED = (VERIFIED, FOLLOWS)
COLORS = {"equal": "green", "differs": "bold red", "not published": "yellow", "waiting": "dim", "no state yet": "dim"}
HEADS = ("step", "loss", "packets", "placed", "lost", "healed by", "dup", "behind", "replica")


class Screen:
    """Called with the ledger after every event. One thread."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._drawn = 0.0
        self._said: set[tuple[int, int]] = set()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            self._console.print(self._title)
            self._console.print(line_of(HEADS), highlight=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, ledger: Ledger, *, last: bool = False) -> None:
        """last: nothing more will be known."""
        if self._live is not None:
            # Drawing shares the node's core: a few times a second is enough for people.
            if last or time.monotonic() - self._drawn > SECONDS:
                self._live.update(self._table(ledger), refresh=True)
                self._drawn = time.monotonic()
            return
        for row in _rows(ledger):
            key = (row.stage, row.iteration)
            if row.verdict != "waiting" and (row.status or last) and key not in self._said:
                self._said.add(key)
                self._console.print(line_of(columns(row, ledger)), highlight=False, soft_wrap=True)

    def _table(self, ledger: Ledger) -> RenderableType:
        rows: list[list[str | Text]] = []
        for row in _rows(ledger)[-ROWS:]:
            *cells, last = columns(row, ledger)
            rows.append([*cells, Text(last, style=COLORS[row.verdict])])
        heads = [Column(head, number=head != "replica", folds=head == "replica") for head in HEADS]
        return table(heads, rows, width_of(self._console), self._title)


def _rows(ledger: Ledger) -> list[Row]:
    found = [ledger.row(stage, i) for stage in range(len(ledger.names)) for i in ledger.iterations(stage)]
    return sorted(found, key=lambda row: (row.iteration, row.stage))


def columns(row: Row, ledger: Ledger) -> tuple[str, ...]:
    """One iteration as text. lost: elements of gradients that nobody has; healed by: what made up for losses; dup:
    packets seen before; behind: iterations, of the newest record."""
    status: Any = row.status
    loss = row.line.get("loss")
    name = ledger.names[row.stage]
    lost = sum(status["missing"].values()) if status else None
    return (
        f"{row.iteration}" + (f" {name}" if name else ""),
        f"{loss:.3f}" if loss else "-",
        *(_number(value) for value in (status.get("packets"), status.get("placed"), lost)), healed_by(status),
        *(_number(value) for value in (status.get("duplicates"), status.get("lag"))),
        row.verdict + (f": {row.why}" if row.why and row.verdict != "waiting" else "")
        + (f", {status['status']}" if row.verdict == "equal" and kind_of(status.get("status", "")) in COMPARED else ""),
    )


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def healed_by(status: Mapping[str, Any]) -> str:
    """Where what was lost came from: cells of a peer or of the trainer, else packets that other ports' copies made up
    for; both names without their counts, where both were needed."""
    filled = status.get("filled") or {}
    by = {source: filled[source] for source in ("peer", "trainer") if filled.get(source)}
    if not by:
        copies = status.get("healed")
        return f"copies {copies:,}" if copies else _number(copies)
    return " ".join((*by, f"{sum(by.values()):,}")) if len(by) == 1 else "+".join(by)


def line_of(cells: tuple[str, ...]) -> str:
    widths = (14 if " " in cells[0] else 5, 6, 7, 7, 6, 12, 7, 6)
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells[:-1], widths, strict=True)) + f"  {cells[-1]}"
