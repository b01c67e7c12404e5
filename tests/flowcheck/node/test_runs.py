"""Names of runs and of their folders."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path

import pytest

from flowcheck.node.versions import runs
from flowcheck.node.versions.runs import LONGEST_NAME, new_run_id, run_folder, start_of


@pytest.mark.parametrize(("run_id", "folder"), [
    ("run-7", "run-7"), ("20261122-104700-0a1b2c", "20261122-104700-0a1b2c"), ("a/b c", "a%2Fb%20c"), ("..", "%2E."),
    (".hidden.x", "%2Ehidden.x"), ("a.b", "a.b"), ("", "%"), ("%", "%25"), ("\N{SNOWMAN}", "%E2%98%83"),
])
def test_a_run_has_a_folder_of_its_own(run_id: str, folder: str) -> None:
    assert run_folder(run_id, 3) == Path(folder) / "epoch-3"


def test_a_folder_of_any_run_can_be_made(tmp_path) -> None:
    long = [run_folder("x" * 5000 + last, 0) for last in "ab"]
    for folder in long:
        (tmp_path / folder).mkdir(parents=True)
    assert long[0] != long[1] and len({new_run_id() for _ in range(100)}) == 100


def test_the_longest_names_are_cut_and_told_apart_by_their_sums() -> None:
    whole, cut = "x" * LONGEST_NAME, "x" * (LONGEST_NAME + 1)
    assert run_folder(whole, 0).parts[0] == whole
    assert run_folder(cut, 0).parts[0] == f"{'x' * 64}-{hashlib.sha256(cut.encode()).hexdigest()[:32]}"


def test_letters_that_every_file_system_takes_stay_as_they_are() -> None:
    assert run_folder("a+b@c=d,e:f", 0).parts[0] == "a+b@c=d,e:f"
    assert run_folder("X!X", 0).parts[0] == "X%21X"


def test_a_run_without_a_name_has_the_time_of_greenwich(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
            return moment if tz is UTC else moment.astimezone(timezone(timedelta(hours=5)))

    monkeypatch.setattr(runs, "datetime", Clock)
    assert re.fullmatch(r"20260102-030405-[0-9a-f]{6}", new_run_id())


def test_a_start_of_a_job_has_a_name_of_its_own() -> None:
    given = ({"flows": [1], "model": []}, ("run", 0, 2), 5, "abc")
    found = start_of(*given)
    assert len(found) == 64 and start_of({"model": [], "flows": [1]}, *given[1:]) == found, "whatever order keys have"
    others = [({"flows": [2], "model": []}, *given[1:]), (given[0], ("run", 1, 2), 5, "abc"),
              (given[0], ("other", 0, 2), 5, "abc"), (given[0], given[1], 6, "abc"), (*given[:3], "abd")]
    assert len({found, *(start_of(*one) for one in others)}) == 6
    assert start_of(*given[:3], "") == "", "trainers that do not say who they are"
