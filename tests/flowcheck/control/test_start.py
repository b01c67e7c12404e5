"""Starts of a job's trainers: which is the later one, and which version is taken where steps of several are there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.ask.sources import choose
from flowcheck.control.start import Key, Start, line_of, ranks, start_text

V, U = "verified", "unverified"


def line(began: int, token: int = 7, number: int = 0) -> str:
    return Start(began, f"{token:016x}", number, 0).line


A, B, C = line(1), line(2), line(2, number=1)


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 0xffff), st.integers(0, 1 << 40))
def test_a_start_is_a_text_and_back(began: int, number: int, first: int) -> None:
    start = Start(began, "0123456789abcdef", number, first)
    assert Start.of(str(start)) == start and line_of(start_text("f" * 64, str(start))) == start.line


@pytest.mark.parametrize("text", ["", "abc", "0" * 16, f"{A}", f"{A}-", f"{A}-x", f" {A}-0", f"{A}-0\n", "f" * 64])
def test_what_is_not_a_start(text: str) -> None:
    assert Start.of(text) is None
    assert line_of(start_text("f" * 64, text)) == "" and start_text("f" * 64, text) == "f" * 64


@given(st.lists(st.tuples(st.integers(0, 1 << 62), st.integers(0, 0xffff)), min_size=2, max_size=2, unique=True))
def test_lines_sort_as_starts_began(two: list[tuple[int, int]]) -> None:
    (began, number), (later, other) = sorted(two)
    assert line(began, 9, number) < line(later, 1, other) or (began == later and number < other)


CHOICES: dict[str, tuple[list[dict[Key, str]], dict[str, Any], Key | None]] = {
    "an abandoned line is further": ([{(0, 7, A): V, (0, 4, B): U}], {}, (0, 4, B)),
    "and verified, and near": ([{(0, 3, A): V, (0, 4, B): U}], {"prefer_verified": 9}, (0, 4, B)),
    "and has states of ranks": ([{(0, 3, A): V, (0, 4, B): U}],
                                {"users": [{(0, 3, A)}], "prefer_user": 9}, (0, 4, B)),
    "verified within the line that lives": ([{(0, 7, A): V, (0, 4, B): U, (0, 3, B): V}], {"prefer_verified": 1},
                                            (0, 3, B)),
    "two attachments of one process": ([{(0, 9, B): V, (0, 5, C): U}], {}, (0, 5, C)),
    "a node that has not seen the starts before": ([{(1, 7, A): V, (0, 4, B): V}], {}, (1, 4, B)),
    "three starts at two nodes": ([{(0, 9, A): V, (1, 7, B): V, (0, 3, C): V}], {}, (1, 3, C)),
    "no line, and a newer epoch": ([{(1, 7): V, (0, 9, B): V}], {}, (1, 7)),
    "nodes number one start differently": ([{(1, 5, B): V, (1, 4, B): V}, {(0, 4, B): V}], {}, (1, 4, B)),
    "and one of them has the line before it": ([{(1, 4, B): V}, {(0, 7, A): V, (0, 4, B): V}], {}, (1, 4, B)),
    "one node has both numbers": ([{(0, 4, B): V, (1, 4, B): U}], {}, (1, 4, B)),
    "one shard has nothing of the line that lives": ([{(0, 7, A): V, (0, 4, B): V}, {(0, 7, A): V}], {}, (0, 7, A)),
    "steps of two lines make no version": ([{(0, 7, A): V}, {(0, 7, B): V}], {}, None),
    "what lives is bad": ([{(0, 7, A): V, (0, 4, B): V}], {"bad": [(0, 4, B)]}, (0, 7, A)),
    "bad, as it was numbered before": ([{(1, 4, B): V, (1, 3, B): V}], {"bad": [(0, 4, B)]}, (1, 3, B)),
    "a step that the abandoned line alone has": ([{(0, 7, A): V, (0, 4, B): V}], {"step": 7}, (0, 7, A)),
    "older files say no line": ([{(0, 7): V, (0, 4, B): V}], {}, (0, 4, B)),
    "an older node beside newer ones": ([{(0, 7, B): V}, {(0, 7): V, (0, 6): V}], {}, (0, 7, B)),
    "but not where two lines are seen": ([{(0, 7, A): V, (0, 4, B): V}, {(0, 7): V, (0, 4): V}], {}, None),
    "older nodes alone": ([{(0, 7): V}, {(0, 7): V}], {}, (0, 7)),
}


@pytest.mark.parametrize("case", CHOICES)
def test_steps_are_compared_within_a_line(case: str) -> None:
    held, options, chosen = CHOICES[case]
    assert choose(held, **options) == chosen


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=12), min_size=1, max_size=3),
       st.lists(st.integers(0, 2), min_size=3, max_size=3), st.integers(0, 9), st.booleans())
def test_never_a_line_that_was_left(
    held: list[set[tuple[int, int]]], epochs: list[int], near: int, known: bool
) -> None:
    """held: of each rank (start, step). epochs: of the starts, rising; each rank's nodes may say a lower one."""
    epochs = sorted(epochs)
    status = {(start, step): V if (start + step) % 2 else U for start in range(3) for step in range(10)}
    said = [{(epochs[start] if known or not rank else min(epochs[start], 1), step, line(start)): status[start, step]
             for start, step in one} for rank, one in enumerate(held)]
    chosen, common = choose(said, prefer_verified=near), set.intersection(*held)
    if not common:
        assert chosen is None
        return
    lives = max(start for start, _ in common)
    assert chosen is not None and chosen[2:] == (line(lives),) and (lives, chosen[1]) in common


def test_the_run_and_the_line_that_live_come_last() -> None:
    """Of an old run epoch 5 is there; the one that lives has been started again, and is at a lower step."""
    old: list[tuple[str, Key]] = [("old", (5, 900, A)), ("older", (7, 3)), ("older", (6, 8))]
    lives: list[tuple[str, Key]] = [("lives", (0, 7, B)), ("lives", (0, 4, C)), ("lives", (1, 3, C))]
    rank = ranks([*lives, *old])
    assert sorted([*lives, *old], key=lambda one: rank(*one)) == [
        ("older", (6, 8)), ("older", (7, 3)), ("old", (5, 900, A)),
        ("lives", (0, 7, B)), ("lives", (1, 3, C)), ("lives", (0, 4, C))]
