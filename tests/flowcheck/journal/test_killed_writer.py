"""A writer that is killed at any point leaves whole entries alone, each equal to what was offered."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.flowcheck.journal.journal_room import MEMORY
from tests.flowcheck.journal.killed_writer import KILLS, LAST, NONE

ROOT = Path(__file__).resolve().parents[3]


def killed(what: str, folder: Path) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.flowcheck.journal.killed_writer", what, str(folder)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("processes may not be traced here")
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are those of x86-64")
def test_killed_between_any_two_system_calls(tmp_path: Path) -> None:
    newest = killed("calls", tmp_path)
    assert newest == sorted(newest), "an entry that was whole stays until a newer one is"
    assert [number for number, _ in itertools.groupby(newest)] == [NONE, *range(LAST + 1)]
    assert min(newest.count(number) for number in range(LAST)) >= 6, "clear, write and complete, each with its sync"


def test_killed_at_any_time_in_memory() -> None:
    with tempfile.TemporaryDirectory(prefix="flowcheck-journal-", dir=MEMORY) as folder:
        counts = killed("times", Path(folder))
    assert len(counts) == KILLS and min(counts[1:]) >= 1
    assert 2 in counts, "of three places one is being written"
