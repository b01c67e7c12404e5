"""What a node says: lines for people and for programs, the status file, and that nobody waits for either."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowcheck.node.status import event_log as saying
from flowcheck.node.status.counters import Tally
from flowcheck.node.status.event_log import MOST, Events, as_text

SECONDS = 120.0  # until a thread must have done something


STAMP = "2023-11-14T22:13:20.123Z "


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> None:
    monkeypatch.setattr(saying, "time", type("Clock", (), {"time": staticmethod(lambda: 1700000000.12345)}))


@contextmanager
def printed(capfd, as_json: bool = False, path: Path | None = None) -> Iterator[Events]:
    """All is written when it ends."""
    with Events(as_json, path) as say:
        yield say
        assert say.flush(SECONDS)


ITERATION = {
    "name": "a", "iteration": 7, "published": True, "status": "verified", "packets": 100, "placed": 60, "missing": {},
    "healed": 3, "duplicates": 5, "dropped": {}, "lag": 2, "updates": "", "rebuilt": 0,
    "patched": 0, "stale": 0, "failed": [], "why": [],
}


@pytest.mark.parametrize(("event", "fields", "line"), [
    ("stopped", {}, "stopped"),
    ("lost", {"name": "a", "why": "x y", "serves": -1}, "lost: name a, why x y, serves -1"),
    ("lost", {"name": "", "why": "x", "flows": [], "missing": {}, "ranks": 0}, "lost: why x, ranks 0"),
    ("note", {"text": "as it is", "name": "a"}, "note: as it is, name a"),
    ("note", {"name": "", "flows": []}, "note"),
    ("refused", {"rank": 1, "why": "too much\n  remedy: less"}, "refused: rank 1, why too much; remedy: less"),
    ("iteration", ITERATION, "a iteration 7: published verified, 100 packets, 60 placed, missing 0, healed 3,"
                             " duplicates 5, lag 2"),
    ("iteration", ITERATION | {"name": "", "published": False, "missing": {"lost": 4, "icrc": 2},
                               "why": [("covered", "bucket 0"), ("previous", "no")]},
     "iteration 7: NOT published verified, 100 packets, 60 placed, missing lost 4 icrc 2, healed 3, duplicates 5,"
     " lag 2, covered: bucket 0; previous: no"),
    ("iteration", ITERATION | {"updates": "early"}, "a iteration 7: published verified, 100 packets, 60 placed,"
                                                    " missing 0, healed 3, duplicates 5, lag 2, updates early"),
    ("iteration", ITERATION | {"name": "", "updates": "at_record", "rebuilt": 1},
     "iteration 7: published verified, 100 packets, 60 placed, missing 0, healed 3, duplicates 5, lag 2, updates"
     " at_record, rebuilt 1"),
    ("iteration", ITERATION | {"dropped": {"ring_full": 3, "eth1 no_mbuf": 1}},
     "a iteration 7: published verified, 100 packets, 60 placed, missing 0, healed 3, duplicates 5, the node itself"
     " dropped ring_full 3 eth1 no_mbuf 1, lag 2"),
    ("job_recovered", {"name": "a", "iteration": 6, "detected": 1e9, "restored": 1e9 + 1.5, "resumed": 1e9 + 61,
                       "seconds": 61, "repeated": 2},
     "job_recovered: name a, iteration 6, detected 2001-09-09 01:46:40 UTC, restored 2001-09-09 01:46:41 UTC,"
     " resumed 2001-09-09 01:47:41 UTC, seconds 61, repeated 2"),
    ("iteration", ITERATION | {"updates": "early", "patched": 6, "stale": 2},
     "a iteration 7: published verified, 100 packets, 60 placed, missing 0, healed 3, duplicates 5, lag 2, updates"
     " early, patched 6, stale 2"),
])
def test_lines_for_people(event: str, fields: dict[str, Any], line: str) -> None:
    assert as_text({"event": event, "time": 1.5, "job": "j", **fields}) == line


def test_a_name_of_an_earlier_release_is_found_in_the_line(capfd, tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    with printed(capfd, path=status) as say:
        say("group_behind", name="a", shard="b")
    assert capfd.readouterr().out == f"{STAMP}group_behind: was apart, name a, shard b\n"
    assert json.loads(status.read_text())["group_behind a"]["was"] == "apart"


def test_they_are_what_is_printed(capfd) -> None:
    with printed(capfd) as say:
        say("lost", name="a", why="x y")
        say("stopped")
    assert capfd.readouterr().out == f"{STAMP}lost: name a, why x y\n{STAMP}stopped\n"


@pytest.mark.parametrize(("stream", "stamp"), [("own", b""), ("1:1", STAMP.encode()), ("", STAMP.encode())])
def test_the_journal_has_the_time_itself(capfd, monkeypatch, stream: str, stamp: bytes) -> None:
    """JOURNAL_STREAM names the pipe that systemd has made: a unit's own output, and not what a shell made of it."""
    with pipe() as reading:
        at = os.fstat(saying.STDOUT)
        monkeypatch.setenv("JOURNAL_STREAM", f"{at.st_dev}:{at.st_ino}" if stream == "own" else stream)
        with Events(False, None) as say:
            say("stopped")
            assert take(reading, b"\n") == stamp + b"stopped\n"


def test_lines_for_programs(capfd) -> None:
    with printed(capfd, True) as say:
        say("iteration", **ITERATION)
        say("stopped")
    first, second = [json.loads(text) for text in capfd.readouterr().out.splitlines()]
    assert first == {"event": "iteration", "time": 1700000000.123, **ITERATION}
    assert second == {"event": "stopped", "time": 1700000000.123}


def test_a_line_is_what_held_when_it_was_said(capfd, tmp_path) -> None:
    missing = {"lost": 1}
    with printed(capfd, True, tmp_path / "status") as say:
        for _ in range(500):
            say("lost", missing=missing)
            missing["icrc"] = 2
            del missing["icrc"]
    assert set(capfd.readouterr().out.splitlines()) == {
        '{"event": "lost", "time": 1700000000.123, "missing": {"lost": 1}}'}


def test_a_name_that_is_no_text_is_printed_all_the_same(capfd) -> None:
    with printed(capfd) as say:
        say("written", path=os.fsdecode(b"/tmp/\xff"))
        say("stopped")
    assert capfd.readouterr().out == f"{STAMP}written: path /tmp/\\udcff\n{STAMP}stopped\n"


def test_lines_know_the_run_of_their_group(capfd) -> None:
    with printed(capfd, True) as say:
        say("lost", name="a")
        say("attached", name="a", run_id="r")
        say("lost", name="a")
        say("lost", name="b")
    assert [json.loads(text).get("job") for text in capfd.readouterr().out.splitlines()] == [None, None, "r", None]


def test_the_status_file_has_the_last_line_of_each_event_and_group(capfd, tmp_path) -> None:
    path = tmp_path / "status.json"
    with printed(capfd, path=path) as say:
        say("lost", name="a", why="first")
        say("lost", name="a", why="second")
        say("lost", name="b", why="of b")
        say("stopped")
    text = path.read_text()
    assert text.endswith("}\n") and text.startswith('{\n "lost a": {\n  "event"')
    found = json.loads(text)
    assert list(found) == ["lost a", "lost b", "stopped"] and found["lost b"]["why"] == "of b"
    assert found["lost a"] == {"event": "lost", "time": 1700000000.123, "name": "a", "why": "second"}
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_groups_are_bounded_and_the_one_that_spoke_longest_ago_goes(capfd, tmp_path, monkeypatch) -> None:
    """Whoever may attach can choose ever new names. What the node says of itself stays."""
    monkeypatch.setattr(saying, "MOST_GROUPS", 2)
    path = tmp_path / "status.json"
    with printed(capfd, True, path) as say:
        say("listening", api="here")
        for name in ("a", "b", "a", "c"):
            say("attached", name=name, run_id=f"run of {name}")
            say("lost", name=name)
        for name in ("c", "a", "b"):
            say("silent", name=name)
        assert set(say._jobs) == {"a"} and set(say._spoke) == {"a", "b"}
    assert set(json.loads(path.read_text())) == {"listening", "attached a", "lost a", "silent a", "silent b"}
    silent = [one for one in map(json.loads, capfd.readouterr().out.splitlines()) if one["event"] == "silent"]
    assert [one.get("job") for one in silent] == ["run of c", "run of a", None]


@pytest.mark.parametrize("early", [True, False])
def test_what_it_says_by_itself_is_counted(capfd, tmp_path, early: bool) -> None:
    """Also what it said before there was a tally: a disk may be bad from the start."""
    tally = Tally("n")
    with printed(capfd, path=tmp_path / "nowhere" / "status.json") as say:
        counted = say if early else tally.counting(say)
        counted("lost", why="one")
        assert say.flush(SECONDS)
        if early:
            tally.counting(say)
    assert tally.document()["counts"]["problem"] == {"": 1}
    (told,) = [one["text"] for one in tally.document()["events"] if one["event"] == "problem"]
    assert "cannot be written" in told and "problem: why" in capfd.readouterr().out


def test_a_status_file_that_can_no_longer_be_written_ends_nothing_and_is_said_once(capfd, tmp_path) -> None:
    folder = tmp_path / "status"
    folder.mkdir()
    with printed(capfd, path=folder / "status.json") as say:
        say("lost", why="one")
        assert say.flush(SECONDS)
        (folder / "status.json").unlink()
        folder.rmdir()
        for why in ("two", "three"):
            say("lost", why=why)
            assert say.flush(SECONDS)
        first, second, problem, third = capfd.readouterr().out.replace(STAMP, "").splitlines()
        assert (first, second, third) == ("lost: why one", "lost: why two", "lost: why three")
        assert problem.startswith("problem: why ") and "cannot be written: No such file or directory" in problem
        folder.mkdir()
        say("stopped")
        assert say.flush(SECONDS)
        assert json.loads((folder / "status.json").read_text())["lost"]["why"] == "three"
        (folder / "status.json").unlink()
        folder.rmdir()
        say("lost", why="four")
    said = capfd.readouterr().out.replace(STAMP, "").splitlines()
    assert [text.partition(":")[0] for text in said] == ["stopped", "solved", "lost", "problem"]


# -- standard output that does not take them -------------------------------------------------------------------------


@contextmanager
def pipe() -> Iterator[int]:
    """Standard output is a pipe meanwhile; its other end. (No fixture: pytest redirects once more before the test.)"""
    reading, writing = os.pipe()
    before = os.dup(saying.STDOUT)
    os.dup2(writing, saying.STDOUT)
    os.close(writing)
    try:
        yield reading
    finally:
        os.dup2(before, saying.STDOUT)
        os.close(before)
        os.close(reading)


def take(reading: int, until: bytes) -> bytes:
    taken, deadline = b"", time.monotonic() + SECONDS
    while until not in taken:
        assert time.monotonic() < deadline and select.select([reading], [], [], SECONDS)[0], taken[-500:]
        taken += os.read(reading, 1 << 16)
    return taken


def test_each_line_is_out_at_once(capfd) -> None:
    with pipe() as reading, Events(False, None) as say:
        say("stopped")
        assert take(reading, b"\n") == f"{STAMP}stopped\n".encode()


@pytest.mark.parametrize("blocks", [True, False])
def test_nobody_waits_for_who_does_not_read_and_what_found_no_room_is_counted(capfd, blocks: bool) -> None:
    said, more = 2 * MOST, "x" * 100
    with pipe() as reading, Events(False, None) as say:
        os.set_blocking(saying.STDOUT, blocks)
        for number in range(said):
            say("lost", number=number, why=more)
        assert not say.flush(0.0)
        taken = take(reading, b"events_dropped: ")
        taken += b"" if taken.endswith(b"\n") else take(reading, b"\n")
        taken = taken.replace(STAMP.encode(), b"")
        numbers = [int(text.split()[2].rstrip(b",")) for text in taken.splitlines() if text.startswith(b"lost")]
        (unsaid,) = [text for text in taken.splitlines() if text.startswith(b"events_dropped")]
        assert numbers[:MOST] == list(range(MOST)), "there is room for these, whoever runs when"
        assert numbers == sorted(set(numbers))  # the pipe takes some more, as soon as the thread that prints runs
        assert unsaid == (f"events_dropped: was unsaid, count {said - len(numbers)}, why standard output did not take"
                          " events as fast as they came").encode()
        say("stopped")
        assert take(reading, b"\n") == f"{STAMP}stopped\n".encode()


def test_a_reader_that_has_gone_ends_nothing(capfd, tmp_path) -> None:
    """The status file is still written."""
    path = tmp_path / "status.json"
    with pipe() as reading, printed(capfd, path=path) as say:
        os.dup2(gone := os.open(os.devnull, os.O_RDONLY), reading)
        os.close(gone)
        for why in ("one", "two"):
            say("lost", why=why)
            assert say.flush(SECONDS)
    assert json.loads(path.read_text())["lost"]["why"] == "two"


def test_a_disk_that_is_full_tears_no_line_that_comes_after(capfd, monkeypatch) -> None:
    """Half of the second line fits, nothing of the third; then there is room again."""
    real, told = os.write, []

    def write(descriptor: int, data: memoryview) -> int:
        told.append(bytes(data))
        if b"two" in told[-1] and len(told) == 2:
            return real(descriptor, data[:5])
        if len(told) in (3, 4):
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(saying.os, "write", write)
    with printed(capfd) as say:
        for why in ("one", "two", "three", "four"):
            say("lost", why=why)
            assert say.flush(SECONDS)
    assert capfd.readouterr().out.replace(STAMP, "").splitlines() == [
        "lost: why one", "2023-", "lost: why four",
        "events_dropped: was unsaid, count 2, why standard output did not take events as fast as they came"]


# -- a disk that does not answer -------------------------------------------------------------------------------------


def test_nobody_waits_for_the_disk_of_the_status_file(capfd, tmp_path, monkeypatch) -> None:
    began, goes_on, written = threading.Event(), threading.Event(), []

    def hangs(path: Path, data: bytes) -> None:
        written.append(json.loads(data))
        began.set()
        assert goes_on.wait(SECONDS)

    monkeypatch.setattr(saying, "write_atomic", hangs)
    with Events(False, tmp_path / "status") as say:
        say("lost", why="first")
        assert began.wait(SECONDS)
        for number in range(100):
            say("lost", why=number)
        say("stopped")
        assert not say.flush(0.0)
        goes_on.set()
        assert say.flush(SECONDS)
    assert written[-1]["lost"]["why"] == 99 and len(written) == 2, "what is written next is what holds then"
    assert len(capfd.readouterr().out.splitlines()) == 102


def test_a_process_ends_although_its_output_hangs(tmp_path) -> None:
    """Neither a pipe that nobody reads nor the lock of an object of Python's keeps it."""
    program = (
        "from flowcheck.node.status import event_log as saying\n"
        "saying.END_SECONDS = 0.2\n"
        "with saying.Events(False, None) as say:\n"
        "    for number in range(20000): say('lost', why='x' * 100)\n"
        "    assert not say.flush(0.1)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.wait(SECONDS) == 0, process.stderr.read()
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.communicate()


# -- each clause alone -----------------------------------------------------------------------------------------------


def held(say: Events, line: str) -> None:
    """Until the thread that prints has taken this line, and is held up with it."""
    deadline = time.monotonic() + SECONDS
    say("lost", why=line)
    while say._lines:
        assert time.monotonic() < deadline
        os.sched_yield()


def filled() -> None:
    """Standard output, which is a pipe, takes nothing more."""
    os.set_blocking(saying.STDOUT, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(saying.STDOUT, b"." * 4096)
    os.set_blocking(saying.STDOUT, True)


def test_what_is_being_printed_is_not_printed_yet_and_the_end_waits_for_it_only_so_long(capfd, monkeypatch) -> None:
    monkeypatch.setattr(saying, "END_SECONDS", 0.05)
    with pipe() as reading:
        filled()
        with Events(False, None) as say:
            held(say, "one")
            assert not say.flush(0.05)
        take(reading, b"lost: why one\n")
        assert say.flush(SECONDS)


def test_the_threads_have_names_by_which_a_hanging_one_is_found(capfd, tmp_path) -> None:
    before = set(threading.enumerate())
    with printed(capfd, path=tmp_path / "status.json"):
        names = {thread.name for thread in set(threading.enumerate()) - before}
        assert {"flowcheck events", "flowcheck status"} <= names


def test_an_event_that_names_its_run_is_not_of_its_groups(capfd) -> None:
    with printed(capfd, True) as say:
        say("attached", name="a", run_id="r")
        say("refused", name="a", run_id="another")
    assert "job" not in json.loads(capfd.readouterr().out.splitlines()[1])


def test_runs_are_bounded_without_a_status_file_too(capfd, monkeypatch) -> None:
    """Also of groups that were never attached."""
    monkeypatch.setattr(saying, "MOST_GROUPS", 2)
    with printed(capfd, True) as say:
        for name in ("a", "b", "c", "d"):
            say("refused", name=name)
        say("attached", name="e", run_id="r")
        for name in ("f", "g", "e"):
            say("lost", name=name)
    assert "job" not in json.loads(capfd.readouterr().out.splitlines()[-1]), "it was forgotten meanwhile"


def test_lines_that_were_not_taken_are_said_to_who_counts_with_their_number(capfd, monkeypatch) -> None:
    heard: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(saying, "MOST", 2)
    with pipe() as reading:
        filled()
        with Events(False, None) as say:
            say.also(lambda event, fields: heard.append((event, dict(fields))))
            held(say, "one")
            for why in ("two", "three", "four", "five"):
                say("lost", why=why)
            take(reading, b"events_dropped")
            assert say.flush(SECONDS)
    assert heard == [("events_dropped", {"count": 2, "why": saying.UNSAID})]


def test_of_what_it_says_by_itself_the_last_wait_for_who_counts(capfd) -> None:
    heard: list[int] = []
    with printed(capfd) as say:
        for number in range(saying.MOST_OWN + 3):
            say._tell("events_dropped", count=number)
        say.also(lambda _, fields: heard.append(fields["count"]))
        say._tell("events_dropped", count=99)
    assert heard == [*range(3, saying.MOST_OWN + 3), 99]


def test_what_it_says_by_itself_has_its_time(capfd, tmp_path) -> None:
    with printed(capfd, True, tmp_path / "nowhere" / "status.json") as say:
        say("stopped")
    lines = [json.loads(text) for text in capfd.readouterr().out.splitlines()]
    assert [line["time"] for line in lines] == [1700000000.123] * 2 and lines[1]["event"] == "problem"


def test_moments_are_in_utc_wherever_the_node_is(monkeypatch) -> None:
    monkeypatch.setenv("TZ", "XYZ-5")
    time.tzset()
    try:
        assert saying.shown("detected", 1e9) == "detected 2001-09-09 01:46:40 UTC"
    finally:
        monkeypatch.undo()
        time.tzset()
