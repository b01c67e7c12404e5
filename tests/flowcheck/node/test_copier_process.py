"""The process that keeps copies, without a process: what it begins by its settings, what it is told, how it ends; and
what its threads do again and again, with a clock by hand."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.control.ask import Node
from flowcheck.errors import FlowcheckError
from flowcheck.node import copier as module
from flowcheck.node.copier import (
    END_SECONDS,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    ROUND_PAUSE,
    Copier,
    Rules,
    _again,
    _go_round,
    _Sources,
)
from flowcheck.node.decided import Part
from flowcheck.node.journal import FOLDER, JobText, Journal


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

    _again(work, failed, 0.5, ending, longest)  # type: ignore[arg-type]
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
        {"run_id": "run", "epoch": 0, "step": step, "files": {"a": {"bytes": nbytes - 1}, "b": {"bytes": 1}}}))
    return path


def test_copies_on_their_way_and_journals_take_room_too(tmp_path: Path) -> None:
    at = copier(tmp_path, most=10_000)
    at.check_room(10_000, "x")
    with pytest.raises(FlowcheckError, match="x has 0 MiB, and 0 of 0 MiB are taken"):
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


def test_how_much_is_taken_is_said_in_mib(tmp_path: Path) -> None:
    copy(tmp_path, 1, 5 << 20)
    with pytest.raises(FlowcheckError, match=r"step 3 has 7 MiB, and 5 of 9 MiB are taken"):
        copier(tmp_path, most=9 << 20).check_room(7 << 20, "step 3")


def test_what_is_held_is_said_of_each_source_and_run(tmp_path: Path) -> None:
    for number, (step, lane) in enumerate(((9, "h:2%2Fa"), (4, "h:1%2F"), (3, "h:1%2F"))):
        path = copy(tmp_path, step, 10, lane) / "manifest.json"
        module.os.utime(path, ns=(number, number))
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


# -- whom to copy from ---------------------------------------------------------------------------------------------


class Followed:
    """A copier that notes whom it is to follow."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []
        self.froze: list[Any] = []
        self.rooms: list[Any] = []
        self.nodes: list[Node] = []

    def follow(self, nodes: list[Node]) -> None:
        self.names.append([node.name for node in nodes])
        self.nodes = nodes

    def freeze(self, steps: Any) -> None:
        self.froze.append(steps)

    def check_room(self, nbytes: int, what: str) -> None:
        self.rooms.append((nbytes, what))


def said(**more: Any) -> dict[str, Any]:
    return {"sources": [["h", 1]], "key": "k", "ca": "", "own": "", "rate": 0, "parity": None, "directory": "/copies",
            "token": "a token", "rules": {"seconds": 0.25}, **more}


def test_settings_come_first_and_then_what_the_registry_says_each_once() -> None:
    copier = Followed()
    sources = _Sources(copier, said())  # type: ignore[arg-type]
    part = Part((2, 1), 2, ("a:1", "b:2"))
    sources.placed([("i", 2), ("h", 1)], {("run", 0): 4}, part)
    sources.placed([("i", 2), ("h", 1)], {}, None)
    sources.placed([], {}, None)
    assert copier.names == [["h:1"], ["h:1", "i:2"], ["h:1"]], "and not again where nothing has changed"
    assert copier.froze == [{("run", 0): 4}, {}, {}] and sources.part is None


def test_what_is_told_is_shown_from_now_on() -> None:
    copier = Followed()
    sources = _Sources(copier, said())  # type: ignore[arg-type]
    assert copier.nodes[0]._key == "k"
    sources.told({"key": "other", "token": "another token"})
    assert copier.nodes[0]._key == "other" and copier.names == [["h:1"]] * 2
    assert sources.node(("i", 9))._key == "other" and sources.node(("i", 9))._tls is None


def test_nodes_are_asked_with_tls_where_there_is_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "client_context", lambda ca: f"context of {ca}")
    sources = _Sources(Followed(), said(ca="our.pem"))  # type: ignore[arg-type]
    assert sources.node(("i", 9))._tls == "context of our.pem"


def journaling(monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[Any, Any, Followed, _Sources]:
    given: list[Any] = []
    monkeypatch.setattr(module, "Journaling", lambda *some: given.append(some) or "journaling")
    monkeypatch.setattr(module, "ParityBase", lambda *some: ("parity", *some))
    copier = Followed()
    sources = _Sources(copier, said(**more))  # type: ignore[arg-type]
    assert sources.journal(("h", 1), ("h", 9), "say") == "journaling"  # type: ignore[arg-type,comparison-overlap]
    return given[0], given[0][-1], copier, sources


def test_a_journal_of_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    given, parity, copier, sources = journaling(monkeypatch)
    directory, name, node, control, token, tls, room, say, seconds, _ = given
    assert (directory, name, control) == (Path("/copies"), "h:1", ("h", 9))
    assert (tls, say, seconds, parity) == (None, "say", 0.25, None)
    assert node().name == "h:1" and token() == b"a token"
    sources.told({"token": "another", "key": "newer"})
    assert token() == b"another" and node()._key == "newer"
    room(7)
    assert copier.rooms == [(7, "an iteration")]


MEMBER = {"code": [2, 1], "number": 2, "members": [["h", 1], ["i", 2], ["me", 3]], "data": ["h:1", "i:2"],
          "directory": "/parity"}


def test_a_journal_of_a_member_whose_copy_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (name, directory, node, room), copier, _ = journaling(monkeypatch, sources=[["x", 1]], parity=MEMBER)
    assert (name, directory, node().name) == ("parity", Path("/parity"), "me:3")
    room(8)
    assert copier.rooms == [(8, "what parity gives")]


@pytest.mark.parametrize("more", [
    {"parity": MEMBER}, {"sources": [["x", 1]], "parity": {**MEMBER, "members": []}}, {"sources": [["x", 1]]},
])
def test_where_a_copy_is_kept_it_begins_with_that(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    assert journaling(monkeypatch, **more)[1] is None


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


# -- all of it -----------------------------------------------------------------------------------------------------


class Exit(BaseException):
    pass


class Process:
    """main(), of which every part is noted."""

    def __init__(self, patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.did: list[Any] = []
        self.threads: list[Any] = []
        self.settings: dict[str, Any] = said(directory=str(tmp_path / "copies"), registry=None, journal=[], rules={
            "every": 3, "keep": 4, "most": 5, "seconds": 0.25})
        self.lines: list[Any] = []
        process = self

        class Mine(_Sources):
            def __init__(self, copier: Any, given: Any) -> None:
                process.copier, process.given = copier, json.loads(json.dumps(given))
                process.sources = self
                self._copier, self._said, self.part = copier, dict(given), None

            def told(self, told: Any) -> None:
                process.did.append(("told", told))

            def journal(self, *given: Any) -> Any:
                process.did.append(("journal", *given[:2]))
                return SimpleNamespace(start=lambda: process.did.append("starts"),
                                       close=lambda seconds: process.did.append(("journal ends", seconds)))

        patch.setattr(module, "_Sources", Mine)
        patch.setattr(module, "begun", lambda: self.settings)
        patch.setattr(module, "Lines", lambda: "say")
        patch.setattr(module, "Streams", lambda directory: SimpleNamespace(held=("streams", directory)))
        patch.setattr(module.threading, "Thread", self._thread)
        patch.setattr(module.os, "_exit", self._exit)
        patch.setattr(Copier, "close", lambda copier: self.did.append("copier ends"))

    def _thread(self, target: Any, args: Any, daemon: bool, name: str) -> Any:
        assert daemon is True
        self.threads.append((target, args, name))
        return SimpleNamespace(start=lambda: self.did.append(name), join=lambda seconds: self.did.append(
            (f"{name} ends", seconds, args[-1].is_set())))

    @staticmethod
    def _exit(status: int) -> None:
        raise Exit(status)

    def run(self, patch: pytest.MonkeyPatch, *lines: Any, **settings: Any) -> list[Any]:
        self.settings |= settings
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        patch.setattr(module.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        with pytest.raises(Exit) as ended:
            module.main()
        assert ended.value.args == (0,)
        return self.did


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Process:
    return Process(monkeypatch, tmp_path)


def test_a_node_that_ended_at_once_needs_nothing(process: Process) -> None:
    process.settings = {}
    assert module.main() == 0 and process.did == []


def test_copies_alone(process: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    did = process.run(monkeypatch, {"key": "a"}, {"key": "b"})
    assert did == [("told", {"key": "a"}), ("told", {"key": "b"}), "copier ends"] and process.sources.part is None
    assert process.copier._rules == Rules(3, 4, 5, 0.25) and process.copier._directory == tmp_path / "copies"
    assert process.copier._say == "say" and process.given["sources"] == [["h", 1]]


def test_journals_begin_and_end_with_it(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    did = process.run(monkeypatch, journal=[[["h", 1], ["h", 9]], [["i", 2], ["i", 8]]])
    assert did == [("journal", ("h", 1), ("h", 9)), ("journal", ("i", 2), ("i", 8)), "starts", "starts", "copier ends",
                   ("journal ends", END_SECONDS), ("journal ends", END_SECONDS)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_member_with_data_keeps_copies_of_its_own(
    process: Process, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Which the holders of parity encode."""
    did = process.run(monkeypatch, parity={**MEMBER, "number": number})
    assert did == ["copier ends"] and process.given["sources"] == [["h", 1], MEMBER["members"][number]]
    assert process.sources.part is None


def test_a_holder_of_parity_goes_round(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    did = process.run(monkeypatch, parity=MEMBER)
    assert did == ["flowcheck rounds", "copier ends"] and process.given["sources"] == [["h", 1]]
    assert process.sources.part == Part((2, 1), 2, ("h:1", "i:2"))
    [(target, (directory, rules, copier, sources, say, ending), _)] = process.threads
    assert (target, directory, rules, copier, sources, say) == (
        module._go_round, Path("/parity"), Rules(3, 4, 5, 0.25), process.copier, process.sources, "say")
    assert ending.is_set()


REGISTRY = {"kept": "/copies/placement.json", "endpoints": ["http://e:1"]}


def test_whom_the_registry_tells(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    did = process.run(monkeypatch, registry=REGISTRY)
    assert did == ["flowcheck registry", "copier ends", ("flowcheck registry ends", END_SECONDS, True)]
    [(target, given, _)] = process.threads
    assert target is module.sit
    registry, kept, held, streams, placed, node, say, _ = given
    assert (registry, kept, streams, say) == (REGISTRY, Path("/copies/placement.json"), list, "say")
    assert (held, placed, node) == (process.copier.held, process.sources.placed, process.sources.node)


def test_parity_that_the_registry_places(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may have to keep a stream goes round, and does nothing until it is said what."""
    did = process.run(monkeypatch, registry=REGISTRY, parity={**MEMBER, "members": [], "number": None, "data": []})
    assert did[:2] == ["flowcheck rounds", "flowcheck registry"] and process.sources.part is None
    assert process.threads[1][1][3] == ("streams", Path("/parity"))
