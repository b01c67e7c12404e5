"""What the threads of a process that keeps copies do again and again, and what may take room: with clocks, threads and
sources by hand."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient
from flowcheck.errors import FlowcheckError
from flowcheck.node.protect import copier as copying
from flowcheck.node.protect import worker as module
from flowcheck.node.protect.border import Rules
from flowcheck.node.protect.copier import END_SECONDS, FIRST_PAUSE, LONGEST_PAUSE, Copier
from flowcheck.node.protect.journal import FOLDER, Journal
from flowcheck.node.protect.placement import Part
from flowcheck.node.protect.worker import ROUND_PAUSE, _go_round
from flowcheck.node.versions.journal.job_text import JobText


class Waits:
    """In place of the event that ends: after so many waits it has ended."""

    def __init__(self, turns: int) -> None:
        self.waits, self._turns = list[float](), turns

    def is_set(self) -> bool:
        return len(self.waits) >= self._turns

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)


# -- again and again -----------------------------------------------------------------------------------------------


def again(*turns: Exception | None, longest: float | None = None) -> tuple[list[float], list[str]]:
    left, said, ending = list(turns), list[str](), Waits(len(turns))

    def work() -> None:
        if (error := left.pop(0)) is not None:
            raise error

    def failed(error: Exception, why: str) -> None:
        assert error in turns
        said.append(why)

    copying.again(work, failed, 0.5, ending, longest)  # type: ignore[arg-type]
    return ending.waits, said


def test_what_fails_is_said_once_and_tried_less_and_less_often() -> None:
    one, other = FlowcheckError("gone", where="there", remedy="r"), KeyError("x")
    waits, said = again(None, one, one, one, None, one, other, other, one)
    assert waits == [0.5, 1.0, 2.0, 4.0, 0.5, 1.0, 2.0, 4.0, 8.0] and FIRST_PAUSE == 1.0
    assert said == ["gone", "gone", "KeyError: 'x'", "gone"]


@pytest.mark.parametrize(("longest", "most"), [(None, LONGEST_PAUSE), (ROUND_PAUSE, ROUND_PAUSE), (1.5, 1.5)])
def test_but_often_enough(longest: float | None, most: float) -> None:
    waits, said = again(*[FlowcheckError("gone")] * 9, longest=longest)
    assert waits == [min(2.0**number, most) for number in range(9)] and said == ["gone"]


def test_nothing_is_begun_after_the_end() -> None:
    assert again() == ([], [])


# -- room ----------------------------------------------------------------------------------------------------------


def copier(tmp_path: Path, now: Callable[[], float] = lambda: 0.0, **rules: Any) -> Copier:
    return Copier(tmp_path / "copies", Rules(**rules), lambda *_, **__: None, now)


def copy(tmp_path: Path, step: int, nbytes: int, lane: str = "h:1%2F", came: int = 0) -> Path:
    path = tmp_path / "copies" / lane / "run" / "epoch-0" / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps(
        {"schema": "flowcheck/checkpoint/3", "status": "unverified",
         "run_id": "run", "epoch": 0, "step": step, "files": {"a": {"bytes": nbytes - 1}, "b": {"bytes": 1}}}))
    return path


def test_copies_on_their_way_and_journals_take_room_too(tmp_path: Path) -> None:
    at = copier(tmp_path, most=10_000)
    at.check_room(10_000, "x")
    with pytest.raises(FlowcheckError, match=r"x has 9.8 KiB, and 0 B of 9.8 KiB are taken"):
        at.check_room(10_001, "x")
    copy(tmp_path, 1, 1000)
    copy(tmp_path, 2, 500, "h:2%2Fdp0")
    at._coming = 300
    journal = Journal(tmp_path / "copies" / "h:1%2F" / "run" / "epoch-0" / FOLDER)
    journal.begin(JobText({}, ("run", 0, 1), 0, "a" * 64))
    nbytes = journal.add(1, {}, [], {})
    at.check_room(8200 - nbytes, "x")
    with pytest.raises(FlowcheckError) as refused:
        at.check_room(8201 - nbytes, "x")
    assert refused.value.where == "protect.memory_mb" and refused.value.remedy


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_on_its_way_is_counted_until_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Several sources are copied from at once."""
    now, said_ = [100.0], list[Any]()
    at = Copier(tmp_path / "copies", Rules(most=100_000), lambda event, **fields: said_.append((event, fields)),
                lambda: now[0])
    at._coming = 300

    def take_copy(source: Any, offer: Any, out: Path) -> Path:
        assert at._coming == 1300 and out == tmp_path / "copies" / "h:1%2Fdp0" / "run" / "epoch-2"
        now[0] += 1.23456
        if fails:
            raise FlowcheckError("gone")
        return copy(tmp_path, 7, 1000, "h:1%2Fdp0")

    monkeypatch.setattr(copying, "take_copy", take_copy)
    offer: Any = SimpleNamespace(nbytes=1000, step=7, shard="dp0", run_id="run", epoch=2)
    with pytest.raises(FlowcheckError) if fails else contextlib.nullcontext():
        at._take(SimpleNamespace(name="h:1"), offer)  # type: ignore[arg-type]
    assert at._coming == 300
    path = tmp_path / "copies" / "h:1%2Fdp0" / "run" / "epoch-0" / "step-000007"
    assert said_ == ([] if fails else [("copied", {"name": "dp0", "source": "h:1", "step": 7, "bytes": 1000,
                                                   "seconds": 1.235, "path": str(path)})])


def test_how_much_is_taken_is_said(tmp_path: Path) -> None:
    copy(tmp_path, 1, 5 << 20)
    with pytest.raises(FlowcheckError, match=r"step 3 has 7.0 MiB, and 5.0 MiB of 9.0 MiB are taken"):
        copier(tmp_path, most=9 << 20).check_room(7 << 20, "step 3")


def test_what_is_held_is_said_of_each_source_and_run(tmp_path: Path) -> None:
    for number, (step, lane) in enumerate(((9, "h:2%2Fa"), (4, "h:1%2F"), (3, "h:1%2F"))):
        path = copy(tmp_path, step, 10, lane) / "manifest.json"
        os.utime(path, ns=(number, number))
    for step in range(50, 60):  # in whatever order a directory gives them
        (copy(tmp_path, step, 10, "h:1%2F") / "manifest.json").unlink()
    odd = copy(tmp_path, 99, 10, "h:3%2F") / "manifest.json"
    held = copier(tmp_path).held
    for text in ("{", "[]", "{}", '{"files": 7}', '{"files": {"a": {}}}', "[" * 100_000):
        odd.write_text(text)
        assert held() == [{"source": "h:1/", "run_id": "run", "epoch": 0, "steps": [4, 3]},
                          {"source": "h:2/a", "run_id": "run", "epoch": 0, "steps": [9]}], "as they came"


def test_the_end_waits_so_long_at_most_for_all_together(tmp_path: Path) -> None:
    now, joined, endings = [100.0], list[float](), [threading.Event() for _ in range(3)]

    def join(seconds: float) -> None:
        joined.append(seconds)
        now[0] += 2.0

    at = copier(tmp_path, lambda: now[0])
    for number, ending in enumerate(endings):
        at._sources[str(number)] = SimpleNamespace(join=join), ending  # type: ignore[assignment]
    at.close(3.0)
    assert joined == [3.0, 1.0, 0.0] and all(ending.is_set() for ending in endings)
    joined.clear()
    at.close()
    assert joined[0] == END_SECONDS


class Thread:
    """A thread that does nothing; fails: nor begins."""

    made: list[Any]
    fails = False

    def __init__(self, **given: Any) -> None:
        self.given = given

    def start(self) -> None:
        if self.fails:
            raise RuntimeError("can't start new thread")
        self.made.append(self.given)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    Thread.made, Thread.fails = [], False
    monkeypatch.setattr(copying, "threading", SimpleNamespace(
        Thread=Thread, Event=threading.Event, Lock=threading.Lock))
    return Thread.made


def nodes(*names: str, key: str = "k") -> list[NodeClient]:
    return [NodeClient((name, 1), key) for name in names]


def test_each_source_has_a_thread_as_long_as_it_is_named(tmp_path: Path, threads: list[Any]) -> None:
    at = copier(tmp_path)
    at.follow(nodes("b", "a"))
    at.follow(nodes("b", "a", key="newer"))
    assert [(one["name"], one["daemon"], one["target"]) for one in threads] == [
        (f"flowcheck copy {name}:1", True, at._follow) for name in ("a", "b")]
    assert [one["args"][0] for one in threads] == ["a:1", "b:1"] and at._nodes["a:1"].connection.key == "newer"
    at.follow(nodes("b"))
    (_, turn, ended), (_, other, goes_on) = (one["args"] for one in threads)
    assert turn is not other, "one that hangs holds up no other"
    assert ended.is_set() and not goes_on.is_set() and list(at._sources) == ["b:1"]
    assert "a:1" in at._nodes, "its thread may be at it"
    at.follow(nodes("a", "b"))
    again = threads[2]["args"]
    assert again[0] == "a:1" and again[1] is turn and not again[2].is_set(), "it waits for its thread from before"
    assert turn.acquire(blocking=False)


def test_one_for_which_there_is_no_thread_is_asked_again(tmp_path: Path, threads: list[Any]) -> None:
    at = copier(tmp_path)
    Thread.fails = True
    with pytest.raises(RuntimeError, match="new thread"):
        at.follow(nodes("a"))
    Thread.fails = False
    at.follow(nodes("a"))
    assert len(threads) == 1 and list(at._sources) == ["a:1"]


def test_a_source_is_looked_at_as_it_is_asked_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a connection of its own, in its turn; why it fails is said."""
    looked: list[Any] = []
    said_: list[Any] = []
    at = Copier(tmp_path, Rules(seconds=0.25), lambda event, **fields: said_.append((event, fields)))
    [one] = nodes("a")
    at._nodes["a:1"] = one
    turn, ending = threading.Lock(), Waits(2)

    def look(node: NodeClient, is_set: Callable[[], bool]) -> None:
        assert turn.locked() and node is not one and is_set() is False
        looked.append((node.name, node.connection.key))
        at._nodes["a:1"] = nodes("a", key="newer")[0]
        if len(looked) == 2:
            raise FlowcheckError("gone", where="there")

    monkeypatch.setattr(at, "look", look)
    at._follow("a:1", turn, ending)  # type: ignore[arg-type]
    assert looked == [("a:1", "k"), ("a:1", "newer")] and ending.waits == [0.25, FIRST_PAUSE] and not turn.locked()
    assert said_ == [("uncopied", {"name": "", "source": "a:1", "why": "gone"})]


# -- parity --------------------------------------------------------------------------------------------------------


class Round:
    """Rounds, as they are begun and turned."""

    made: list[Any]

    def __init__(self, *given: Any) -> None:
        self.made.append(given)

    def turn(self, nodes: list[str], frozen: Any) -> None:
        self.made.append((nodes, frozen))


def test_what_is_done_for_parity_is_what_the_registry_says_now(monkeypatch: pytest.MonkeyPatch) -> None:
    Round.made = []
    monkeypatch.setattr(module, "Rounds", Round)
    monkeypatch.setattr(module, "Code", lambda *given: ("code", *given))
    parts = [None, Part((2, 1), 2, ()), Part((2, 1), 2, ("a:1", "b:2")), Part((2, 1), 2, ("a:1", "c:3")),
             Part((3, 1), 2, ("a:1",)), Part((3, 1), 3, ("a:1",))]

    class Sources:
        @property
        def part(self) -> Part | None:
            return parts.pop(0)

        def nodes(self, found: Any) -> Any:
            return list(found)

    rules = Rules(every=3, keep=4, most=5, seconds=0.25)
    ending, said_ = Waits(len(parts)), list[Any]()

    def say(event: str, **fields: Any) -> None:
        said_.append((event, fields))

    _go_round(Path("/parity"), rules, SimpleNamespace(frozen={"a": 1}), Sources(), say, ending)  # type: ignore[arg-type]
    assert said_ == [] and ending.waits == [0.25] * 6
    assert Round.made == [
        (Path("/parity"), ("code", 2, 1), 2, 3, say, 4, 5), ([("a", 1), ("b", 2)], {"a": 1}),
        ([("a", 1), ("c", 3)], {"a": 1}), (Path("/parity"), ("code", 3, 1), 2, 3, say, 4, 5), ([("a", 1)], {"a": 1}),
        (Path("/parity"), ("code", 3, 1), 3, 3, say, 4, 5), ([("a", 1)], {"a": 1}),
    ]


@pytest.mark.parametrize(("error", "why"), [
    (FlowcheckError("gone", where="h:1"), "h:1: gone"), (FlowcheckError("gone"), "gone"),
    (KeyError("x"), "KeyError: 'x'"),
])
def test_a_round_that_fails_is_said_with_its_place(error: Exception, why: str) -> None:
    class Sources:
        @property
        def part(self) -> Part:
            raise error

    said_: list[Any] = []
    ending = Waits(4)
    _go_round(Path("/p"), Rules(seconds=0.25), None, Sources(),  # type: ignore[arg-type]
              lambda event, **fields: said_.append((event, fields)), ending)  # type: ignore[arg-type]
    assert said_ == [("unprotected", {"name": "", "why": why})] and ending.waits == [1.0, 2.0, 4.0, ROUND_PAUSE]
