"""What a run shows: on 80 columns every row is one line, on a terminal and in a file."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from lab.compare import Ledger
from lab.view import Screen, healed_by


def ledger(filled: dict[str, int] | None = None) -> Ledger:
    made = Ledger(1, [""])
    hashes = {"tensors": {"w": "x"}, "optimizer": {}, "buffers": []}
    counts = {"packets": 13_312, "placed": 1_388, "missing": {}, "healed": 153, "duplicates": 4_152, "lag": 0,
              "filled": filled or {}}
    for iteration in (24, 25):
        made.trainer({"iteration": iteration, "rank": 0, "stage": 0, "loss": 3.532, **hashes})
        made.node({"iteration": iteration, "name": "", **hashes})
        made.status({"iteration": iteration, "name": "", "published": True, "status": "verified", **counts})
    return made


@pytest.mark.parametrize(("said", "text"), [
    ({}, "-"), ({"healed": 0, "filled": {"stream": 9}}, "0"), ({"healed": 1530}, "copies 1,530"),
    ({"healed": 2, "filled": {"stream": 9, "peer": 1200}}, "peer 1,200"),
    ({"healed": 0, "filled": {"stream": 9, "trainer": 7}}, "trainer 7"),
    ({"healed": 0, "filled": {"peer": 3, "trainer": 7}}, "peer+trainer"),
])
def test_where_what_was_lost_came_from(said: dict[str, Any], text: str) -> None:
    assert healed_by(said) == text


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("filled", [{"peer": 123_456}, {"peer": 1, "trainer": 1}])
def test_a_row_of_what_was_healed_is_one_line_of_80_columns(terminal: bool, filled: dict[str, int]) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=terminal, color_system=None, _environ={})
    with Screen(console, "a lab") as screen:
        screen(ledger(filled), last=True)
    rows = [line.rstrip() for line in out.getvalue().splitlines() if line.rstrip().endswith("equal, verified")]
    assert len(rows) >= 2 and all(len(row) <= 80 for row in rows)
    assert "peer 123,456" in rows[0] or "peer+trainer" in rows[0]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_row_is_one_line_of_80_columns(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=terminal, color_system=None, _environ={})
    with Screen(console, "a lab") as screen:
        screen(ledger(), last=True)
    rows = [line.rstrip() for line in out.getvalue().splitlines() if line.rstrip().endswith("equal, verified")]
    assert len(rows) >= 2 and all(len(row) <= 80 for row in rows)
    assert {"13,312", "1,388", "153", "4,152"} <= set(rows[0].split())
