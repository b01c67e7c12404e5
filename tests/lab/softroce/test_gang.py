"""The tests' own gang of ranks: answers belong to their requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gang import Gang

ANSWERS_LATE = """
import json, sys
first, second, third = (json.loads(sys.stdin.readline())["number"] for _ in range(3))
sys.stdout.write(f"{first} failed: late\\n{second} failed: later\\n{third} done\\n")
"""


class Ranks:
    """A fabric without a network: its ranks run a program that a test gives."""

    def __init__(self, program: str) -> None:
        self.program = program

    def spawn(self, role: str, command: list[str], env: dict[str, str], **pipes: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", self.program], text=True, **pipes)


@pytest.fixture
def gang_of(tmp_path: Path) -> Any:
    made: list[Gang] = []

    def make(program: str) -> Gang:
        made.append(Gang(Ranks(program), 1, tmp_path))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for process in made[0].processes:
        process.kill()
        process.communicate()


def test_late_answers_of_earlier_trainings_are_dropped(gang_of: Any, tmp_path: Path) -> None:
    gang = gang_of(ANSWERS_LATE)
    for _ in range(3):
        gang.begin(1, {}, {}, tmp_path)
    assert gang.said(0) == "done"


def test_a_rank_that_is_silent_or_has_ended(gang_of: Any, tmp_path: Path) -> None:
    gang = gang_of("import sys; sys.stdin.readline(); sys.stdin.readline(); sys.exit('no more')")
    gang.begin(1, {}, {}, tmp_path)
    assert gang.said(0, 0.1) == "nothing for 0.1 s"
    gang.begin(1, {}, {}, tmp_path)
    assert gang.said(0) == "ended: no more\n"
