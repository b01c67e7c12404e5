"""Tables on any screen: nothing cut, no word broken, nothing beyond the edge, and blocks where a table does not fit."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from flowcheck.tables import NO_TERMINAL, WIDEST, Column, print_table, screen

COLUMNS = [Column("flow"), Column("bad icrc", number=True), Column("because", folds=True)]
ROWS = [
    ("rank 0 > 1", "1,234,567", "flags in every line, and addresses that agree with the packet count"),
    ("rank 1 > 0", "", "nothing [red]yet[/red]"),
]


def shown(columns: list[Column], rows: list[tuple[str, ...]], width: int, title: str = "") -> list[str]:
    out = io.StringIO()
    print_table(Console(file=out, width=width, color_system=None), columns, rows, title)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_wide_screen_has_one_line_for_each_row() -> None:
    lines = shown(COLUMNS, ROWS, 120, "Flows")
    assert lines[0] == "Flows" and lines[1].split() == ["flow", "bad", "icrc", "because"]
    assert lines[3].endswith("packet count") and lines[4].split()[:4] == ["rank", "1", ">", "0"]
    assert "[red]yet[/red]" in lines[4]  # cells are no markup


def test_a_narrower_screen_folds_between_words() -> None:
    lines = shown(COLUMNS, ROWS, 50)
    assert max(map(len, lines)) <= 50 and lines[2].startswith("rank 0 > 1  1,234,567  flags in")


def test_a_screen_that_is_too_narrow_has_blocks() -> None:
    assert shown(COLUMNS, ROWS, 25)[:4] == [
        "flow      rank 0 > 1", "bad icrc  1,234,567", "because   flags in every", "          line, and",
    ]
    assert "bad icrc" not in " ".join(shown(COLUMNS, ROWS[1:], 25))  # what is empty is left out


WORDS = st.text(st.sampled_from("abcxyz019,:>/[]"), min_size=1, max_size=12)
CELLS = st.lists(WORDS, max_size=8).map(" ".join)


@given(data=st.data(), width=st.integers(30, 200))
def test_every_word_is_whole_and_nothing_is_beyond_the_edge(data: st.DataObject, width: int) -> None:
    kinds = data.draw(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=9))
    columns = [Column(f"head {at}", number, folds) for at, (number, folds) in enumerate(kinds)]
    rows = data.draw(st.lists(st.tuples(*(CELLS for _ in columns)), min_size=1, max_size=5))
    lines = shown(columns, rows, width)
    assert max(map(len, lines)) <= min(width, WIDEST)
    words = sorted(word for row in rows for cell in row for word in cell.split())
    text = [word for line in lines for word in line.split()]
    assert not [word for word in words if text.count(word) < words.count(word)]


def test_text_keeps_its_style() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system="standard", _environ={})
    print_table(console, [Column("a")], [(Text("loud", style="red"),)])
    assert "\x1b[31m" in out.getvalue()


def test_the_width_of_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert screen().width == NO_TERMINAL
    monkeypatch.setenv("COLUMNS", "72")
    assert screen().width == 72
