"""Tables for people, on screens of any width.

    print_table(console, [Column("flow"), Column("packets", number=True), Column("because", folds=True)], rows)

A table takes what its cells need, at most 160 columns. Where the screen has less, heads take two lines, then gaps are
narrower, then columns that fold take several lines, broken between words and never inside one. Where even that does
not fit, every row is printed as a block of its own, one field per line. Nothing is cut. Cells are printed as they are:
rich markup in them means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["NO_TERMINAL", "WIDEST", "Column", "print_table", "screen", "table", "width_of"]

WIDEST = 160  # a line that is longer is not read
NO_TERMINAL = 100  # files and pipes, unless COLUMNS says otherwise


@dataclass(frozen=True)
class Column:
    """number: to the right. folds: may take several lines."""

    name: str
    number: bool = False
    folds: bool = False


def screen(no_terminal: int = NO_TERMINAL) -> Console:
    """Standard output, as wide as the terminal; elsewhere COLUMNS, or as wide as reads well."""
    console = Console(highlight=False)
    if console.is_terminal or console._environ.get("COLUMNS", "").isdecimal():
        return console
    return Console(width=no_terminal, highlight=False)


def width_of(console: Console) -> int:
    return min(console.width, WIDEST)


def print_table(
    console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], title: str = ""
) -> None:
    console.print(table(columns, rows, width_of(console), title), width=width_of(console), highlight=False)


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], width: int, title: str = ""
) -> RenderableType:
    """The rows as a table, or as blocks if no table of them fits into `width` columns."""
    texts = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    heading = [Text(title, style="bold")] if title else []
    for folding, gap in ((False, 2), (False, 1), (True, 2), (True, 1)):
        widths = _widths(columns, texts, width - gap * (len(columns) - 1), folding)
        if widths is not None:
            break
    else:
        return Group(*heading, *_blocks(columns, texts))
    # The rule under the heads divides columns by one blank more than the padding.
    made = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
    for column, size in zip(columns, widths, strict=True):
        made.add_column(Text(column.name), justify="right" if column.number else "left", width=size, overflow="fold")
    for row in texts:
        made.add_row(*row)
    return Group(*heading, made, Text(""))


def _widths(
    columns: Sequence[Column], rows: Sequence[Sequence[Text]], room: int, folding: bool
) -> list[int] | None:
    """How wide each column is, None if there is not room for all. Heads, and if folding the cells of columns that fold,
    may break between words; what is too much comes off the widest of them."""
    widths, least = [], []
    for at, column in enumerate(columns):
        cells = [row[at].plain for row in rows]
        folds = folding and column.folds
        unbroken = [*column.name.split(), *((word for cell in cells for word in cell.split()) if folds else cells)]
        widths.append(max(map(cell_len, (column.name, *cells))))
        least.append(max(map(cell_len, unbroken), default=0))
    if sum(least) > room:
        return None
    while sum(widths) > room:
        spare = [width if width > low else 0 for width, low in zip(widths, least, strict=True)]
        widths[spare.index(max(spare))] -= 1
    return widths


def _blocks(columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> Iterator[RenderableType]:
    """Every row under its first cell; what is empty is left out."""
    label = max(cell_len(column.name) for column in columns)
    for row in rows:
        block = Table.grid(padding=(0, 2, 0, 0))
        block.add_column(width=label, no_wrap=True, style="bold")
        block.add_column(overflow="fold")
        for column, cell in zip(columns, row, strict=True):
            if cell.plain:
                block.add_row(Text(column.name), cell)
        yield Group(block, Text(""))
