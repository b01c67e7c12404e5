"""A disk that is slow, hung, full or broken costs holes, which are named, and nothing waits for it. odd_disk.py is the
process that is asked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowcheck.errors import EnvironmentProblem
from flowcheck.journal.ring import RingWriter

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def scenes(slow_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By name: what was said of each iteration ("": it is whole), and which were there then."""
    folder = tmp_path_factory.mktemp("odd")
    hold, fails = folder / "hold", folder / "fails"
    below = folder / "disk"
    done = subprocess.run(
        [sys.executable, "-m", "tests.flowcheck.journal.odd_disk", str(below), str(hold), str(fails)],
        capture_output=True, text=True, cwd=ROOT, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(slow_files), "SLOW_UNDER": str(below),
             "SLOW_MS": "5", "SLOW_HOLD": str(hold), "SLOW_FAILS": str(fails)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_a_slow_disk_has_no_time_for_is_a_hole(scenes: Any) -> None:
    said = scenes["slow"]["said"]
    assert set(said.values()) == {"", "busy"}
    assert [int(number) for number, cause in said.items() if not cause] == scenes["slow"]["there"]


@pytest.mark.parametrize("scene", ["hung", "hung again"])
def test_a_disk_that_hangs_holds_up_nothing(scenes: Any, scene: str) -> None:
    assert list(scenes[scene]["said"].values()) == ["", "", "busy", "hung", "hung", ""]


@pytest.mark.parametrize(("scene", "cause"), [("full", "ENOSPC"), ("unsynced", "EIO")])
def test_an_error_is_a_hole_and_the_next_one_is_written(scenes: Any, scene: str, cause: str) -> None:
    said, there = scenes[scene]["said"], scenes[scene]["there"]
    assert list(said.values()) == ["", cause, ""]
    first = int(min(said))
    assert there[-2:] == [first, first + 2] and len(there) == 6, "no older one was lost for it"


def test_a_disk_that_takes_half_is_given_the_rest(scenes: Any) -> None:
    assert list(scenes["halved"]["said"].values()) == ["", "", ""]


def test_a_broken_disk_costs_few_older_entries(scenes: Any) -> None:
    """Nine failed in a row, and there were six."""
    assert len(scenes["broken"]["there"]) >= 3


def test_closing_does_not_wait_for_a_disk_that_hangs(scenes: Any) -> None:
    assert set(scenes["closed"]["said"].values()) == {"hung"}


def test_without_room_there_is_no_journal(shm: Path) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        RingWriter(shm / "journal", 3 << 43, 1 << 43)
    assert "remedy" in str(caught.value)
    assert list((shm / "journal").iterdir()) == []
