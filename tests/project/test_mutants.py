"""The list of modules in which deliberate mistakes are tried names what is there."""

from __future__ import annotations

import tomllib
from collections import Counter

import pytest

from .script import ROOT, script

ROOMS = (
    "flowcheck/rebuild", "flowcheck/node", "flowcheck/control", "flowcheck/checkpoint", "flowcheck/job",
    "flowcheck/journal", "flowcheck/trainer", "parser", "updater",
)
# Lists of names; and what is tried in fresh processes alone.
NOT_TRIED = {
    "flowcheck/node/__main__.py", "flowcheck/node/allocator.py", "flowcheck/node/groups/members.py",
    "flowcheck/rebuild/iteration/arena_source.py", "flowcheck/rebuild/version/events.py",
    "flowcheck/rebuild/version/repair.py", "parser/flow_table.py", "parser/names.py", "updater/errors.py",
}


@pytest.fixture(scope="module")
def tried() -> dict[str, list[str]]:
    """By module, the test files in which its mistakes are to be noticed."""
    found: dict[str, list[str]] = script("mutants").MODULES
    return found


def test_every_module_and_every_test_file_of_the_list_is_there(tried: dict[str, list[str]]) -> None:
    """A file that was renamed would be found out only when it has its turn, long after the run began."""
    listed = {*tried, *(test for tests in tried.values() for test in tests)}
    assert len(tried) > 40 and not [path for path in sorted(listed) if not (ROOT / path).is_file()]


def test_no_module_where_silence_is_dangerous_is_left_out(tried: dict[str, list[str]]) -> None:
    there = {path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py")
             if path.name != "__init__.py"}
    assert there >= NOT_TRIED
    assert sorted(there - set(tried)) == sorted(NOT_TRIED)


def test_no_mistake_is_listed_twice_as_one_that_cannot_be_noticed() -> None:
    """Each has one reason."""
    listed = tomllib.loads((ROOT / "tools" / "mutants_equivalent.toml").read_text())["equivalent"]
    mistakes = Counter((one["module"], one["was"], now) for one in listed
                       for now in (one["now"] if isinstance(one["now"], list) else [one["now"]]))
    assert len(mistakes) > 200 and [mistake for mistake, times in mistakes.items() if times > 1] == []
