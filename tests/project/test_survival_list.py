"""docs/use/operating.md names a test for everything that a node survives: each of them is there, and what it is said to
be."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/use/operating.md").read_text()
BEGINS = "## What a node survives\n"
NAMED = re.compile(r"(\*slow\* )?`(tests/[\w/]+\.py)::(\w+)`")
#: What a node has to survive, by words of the first column.
ASKED = ("killed, at any instant", "trainer dies", "link goes down", "mirror is reconfigured", "disk is full",
         "storage hangs", "clock jumps", "peer dies", "holds a port", "huge pages are gone",
         "lost with its machine", "leaf is lost", "registry is gone", "peer has a newer version",
         "standard output hangs", "disk of `output.directory` hangs", "process that answers the API",
         "thousand connections", "memory runs out")


def rows() -> dict[str, list[tuple[bool, str, str]]]:
    """By the first column: (said to be slow, file, function) of each test."""
    section = PAGE[PAGE.index(BEGINS) + len(BEGINS) :]
    section = section[: section.index("\n## ")]
    found = {}
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith("| what happens"):
            first, _, shown = (cell.strip() for cell in line.strip("|").split("|"))
            found[first] = [
                (bool(slow), file, name) for slow, file, name in NAMED.findall(shown)
            ]
            assert len(found[first]) == shown.count("`") // 2, f"{first}: not a test"
    return found


@cache
def marked(file: str) -> dict[str, bool]:
    """The tests of a file, and whether each is slow."""
    tree = ast.parse((ROOT / file).read_text())
    marks = [ast.unparse(one.value) for one in tree.body if isinstance(one, ast.Assign)
             and any(getattr(target, "id", "") == "pytestmark" for target in one.targets)]
    whole = any("mark.slow" in mark for mark in marks)
    return {
        one.name: whole or any("mark.slow" in ast.unparse(mark) for mark in one.decorator_list)
        for one in tree.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")
    }


def test_everything_that_was_asked_for_is_there() -> None:
    named = list(rows())
    assert len(named) == len(ASKED)
    for asked in ASKED:
        assert sum(asked in one for one in named) == 1, asked


@pytest.mark.parametrize("what", rows())
def test_each_is_shown_by_tests_that_exist(what: str) -> None:
    assert rows()[what]
    for slow, file, name in rows()[what]:
        assert (ROOT / file).exists(), file
        assert name in marked(file), f"{file} has no {name}"
        assert marked(file)[name] == slow, f"{file}::{name}: slow or not"
