"""Connections without channels at a node: a second look at the rings, a process that decides, and a job followed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from parser.observer import Observer
from parser.placers import Placers

from flowcheck.control.protocol import Flows, Manifest, Wanted
from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.node.groups import assigning as module
from flowcheck.node.groups.assigning import Assigning, withheld
from flowcheck.node.groups.checks import union
from lab.synth import example_job, generate

from ..memory_ring import MemoryRing
from .conftest import LONGEST
from .group_scene import FakeSession, Peer, Scene, fake_sessions


def job_of(**options: Any) -> Job:
    """Two ranks whose two channels send messages of different sizes."""
    return example_job(**{"ranks": 2, "channels": 2, "protocol": "ll", "count": [700, 20_000], "version": "2.19.4",
                          **options})


def without_channels(job: Job, rank: int) -> list[dict[str, Any]]:
    return [{key: value for key, value in asdict(flow).items() if key != "channel"}
            for flow in reversed(job.flows) if rank in (flow.src, flow.dst)]


def traffic(job: Job, first: int, iterations: int = 1) -> list[tuple[int, bytes]]:
    return list(generate(job, iterations=iterations, first_iteration=first, ports=[0]).packets)


@pytest.fixture
def sessions() -> Iterator[list[FakeSession]]:
    with fake_sessions() as begun:
        yield begun


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.0)
    monkeypatch.setattr(module, "LEAST", 250)  # more than two iterations of the jobs here


class Node:
    """A group whose ring is emptied by its placing threads, and two ranks that tell it a job without channels."""

    def __init__(self, folder: Path, sessions: list[FakeSession], job: Job) -> None:
        self.scene, self.job = Scene(folder), job
        self.scene.sessions = sessions
        self.ranks: list[Peer] = [self.scene.join(rank) for rank in (0, 1)]

    def tell(self, job: Job | None = None) -> None:
        body = {**(job or self.job).to_dict(), "flows": []}
        self.scene.give(self.ranks[0], Manifest(body, 4))
        for rank, peer in enumerate(self.ranks):
            self.scene.give(peer, Flows(without_channels(self.job, rank)))

    def until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + LONGEST
        while not done():
            self.scene.turn()
            assert time.monotonic() < end, self.scene.said
            time.sleep(0.002)

    def close(self) -> None:
        self.scene.assigning.rest()


@pytest.fixture
def node(tmp_path: Path, sessions: list[FakeSession]) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(job: Job) -> Node:
        made.append(Node(tmp_path, sessions, job))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_job_without_channels_is_followed(node: Callable[..., Node], sessions: list[FakeSession]) -> None:
    """While the job runs, and other threads empty the ring; a rank that comes back needs no second look."""
    job = job_of()
    at = node(job)
    at.tell()
    assert not sessions and at.scene.events("assigning") == [{"name": "", "connections": 4, "why": module.WHY}]
    assert at.ranks[1].told[-1] == Wanted(["flows"], module.WHY)
    with at.scene.placers:
        for iteration in range(4, 8):
            at.scene.rings[0].put(traffic(job, iteration))
            at.scene.turn()
            at.until(lambda: at.scene.rings[0].waiting == 0)
        at.until(lambda: bool(sessions))
    flows = sessions[0].plan.job.flows
    assert sorted(map(repr, flows)) == sorted(map(repr, job.flows))
    assert any("found on the wire" in mark for mark in sessions[0].plan.job.unproven)
    (assigned,) = at.scene.events("assigned")
    assert (assigned["connections"], assigned["spare"], assigned["unseen"], assigned["missed"]) == (4, 0, 0, 0)
    at.scene.intake.ranks.leave(at.ranks[1].member)
    back = at.scene.join(1)
    at.scene.give(back, Flows(without_channels(job, 1)))
    assert len(sessions) == 1 and len(at.scene.events("assigning")) == 1 and not back.ended


def test_it_is_refused_by_name(node: Callable[..., Node], sessions: list[FakeSession]) -> None:
    """Channels that send alike; the refusal is for all ranks, and stands for as long as the job is the same."""
    job = job_of(count=[12_288], startup=False, rebuild=False)
    at = node(job)
    at.tell()
    for first in (4, 8):
        at.scene.rings[0].put(traffic(job, first, 4))
        at.until(lambda: at.scene.assigning._process is not None)  # it is asked twice
        at.until(lambda: at.scene.assigning._process is None)
    assert "more than one assignment fits every message" in at.ranks[0].ended[0] == at.ranks[1].ended[0]
    assert "NCCL_MAX_NCHANNELS=1" in at.scene.events("problem")[0]["why"] and not sessions
    at.scene.give(at.ranks[0], Flows([]))
    at.scene.give(at.ranks[0], Flows(without_channels(job, 0)))
    assert "more than one assignment" in at.ranks[0].ended[-1], "asked again it says so at once"
    assert len(at.scene.events("assigning")) == 1


class Asked:
    """Assigning whose process is a word of the test: `says` is what it answers next. given: what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.script, self.given = folder / "answers.py", folder / "given"
        self.said: list[str] = []
        self.events: list[dict[str, Any]] = []
        monkeypatch.setattr(module, "MODULE", "answers")
        monkeypatch.setenv("PYTHONPATH", str(folder))
        self.ring = MemoryRing()
        self.placers = Placers([self.ring.ring_address])
        self.now = 0.0
        self.at = Assigning([self.ring.ring_address], {5, 3}, self._say, lambda: self.now)

    def _say(self, event: str, **fields: Any) -> None:
        self.said.append(event)
        self.events.append(fields)

    def says(self, text: str, status: int = 0) -> None:
        self.script.write_text(f"import sys\nopen({str(self.given)!r}, 'wb').write(sys.stdin.buffer.read())\n"
                               f"print({text!r})\nsys.exit({status})\n")

    def question(self) -> tuple[dict[str, Any], bytes]:
        """The last one: what it was told, and what comes after that line."""
        line, _, rest = self.given.read_bytes().partition(b"\n")
        return json.loads(line), rest

    def turn(self) -> bool:
        """One question, and its answer."""
        self.ring.put([(1, bytes(64))] * 2 * max(module.LEAST, self.at._due))
        end = time.monotonic() + LONGEST
        asked = False
        while time.monotonic() < end:
            if self.at.look():
                return True
            if asked and self.at._process is None:
                return False
            asked |= self.at._process is not None
            time.sleep(0.002)
        raise AssertionError("no answer")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Asked]:
    made = Asked(monkeypatch, tmp_path)
    yield made
    made.at.rest()


FLOWS = [{"src": 0, "dst": 1, "dst_addr": "10.0.0.2", "qpns": [7]}]
REFUSED = '{"refused": {"what": "fits nothing", "where": "connections", "remedy": "another"}}'


def test_what_fits_nothing_is_asked_twice(asked: Asked) -> None:
    """Once it may be a call that the job's description does not have yet, and another description begins anew."""
    asked.says(REFUSED)
    assert asked.at.of({"run_id": "a"}, FLOWS) is None
    assert asked.turn() is False
    assert asked.at.of({"run_id": "b"}, FLOWS) is None and asked.said == ["assigning"], "what was seen is kept"
    assert asked.turn() is False and asked.turn() is True
    with pytest.raises(UserError, match="fits nothing"):
        asked.at.of({"run_id": "b"}, FLOWS)
    assert asked.at.of({"run_id": "c"}, FLOWS) is None, "another description is another question"


def test_what_the_process_is_told(asked: Asked) -> None:
    """The job without its connections, those that have no channel, the node's free cores, and what was on the wire."""
    asked.says('{"early": "1.0 of 3"}')
    assert asked.at.look() is False, "nobody wants to know"
    asked.at.of({"run_id": "a", "flows": [{"channel": 0}]}, FLOWS)
    packets = traffic(job_of(), 4)
    asked.ring.put(packets)
    assert asked.turn() is False
    told, starts = asked.question()
    assert told.keys() == {"job", "flows", "observed", "cores"}
    assert (told["job"], told["flows"], told["cores"]) == ({"run_id": "a", "flows": []}, FLOWS, [3, 5])
    seen = Observer(messages=True)
    ring = MemoryRing()
    ring.put(packets)
    seen.drain(ring.ring_address)
    assert [(bytes.fromhex(one["src"]), bytes.fromhex(one["dst"]), one["id"]) for one in told["observed"]] == [
        (one["src"], one["dst"], one["id"]) for one in seen.flow_list()]
    assert starts == seen.start_records().tobytes() and len(starts) > 0


def test_enough_is_enough(asked: Asked) -> None:
    """Neither a packet more than LEAST, nor than twice as many, nor a moment longer than the pause."""
    asked.says('{"early": "1.0 of 3"}')
    asked.at.of({}, FLOWS)
    for packets in (module.LEAST, module.LEAST):
        asked.ring.put([(1, bytes(64))] * (packets - 1))
        assert asked.at.look() is False and asked.at._process is None
        asked.ring.put([(1, bytes(64))])
        assert asked.at.look() is False and asked.at._process is not None
        asked.at._process.wait(LONGEST)
        assert asked.at.look() is False and asked.at._process is None


def test_a_process_is_looked_for_in_a_session_of_its_own_and_leaves_nothing(asked: Asked) -> None:
    asked.script.write_text("import time\ntime.sleep(600)\n")
    before = len(os.listdir("/proc/self/fd"))
    asked.at.of({}, FLOWS)
    asked.ring.put([(1, bytes(64))] * module.LEAST)
    asked.at.look()
    process = asked.at._process
    assert process is not None and os.getsid(process.pid) == process.pid
    assert len(os.listdir("/proc/self/fd")) == before + 1, "its answer"
    asked.at.rest()
    assert len(os.listdir("/proc/self/fd")) == before and not Path(f"/proc/{process.pid}").exists()
    asked.at.rest()


def test_what_is_said_of_an_answer(asked: Asked) -> None:
    """How long it took since it was begun, and what the look came too late for."""
    asked.says('{"early": "1.0 of 3"}')
    asked.now = 100.0
    asked.at.of({}, FLOWS)
    assert asked.turn() is False
    asked.now = 200.0
    assert asked.at.of({"run_id": "told again"}, FLOWS) is None and asked.said == ["assigning"]
    asked.says('{"flows": [{}, {}, {}], "spare": 1, "unseen": 2, "unproven": "found"}')
    asked.now = 207.00149
    asked.at._taps[0].missed = 5
    assert asked.turn() is True
    assert asked.events[-1] == {"connections": 3, "spare": 1, "unseen": 2, "seconds": 107.001, "missed": 5}
    assert asked.said == ["assigning", "assigned"] and asked.at.look() is False
    assert asked.at.of({"run_id": "again"}, [dict(reversed(FLOWS[0].items()))]) == {
        "flows": [{}, {}, {}], "unproven": "found"}, "in whatever order they are described"
    assert asked.at.of({}, [{**FLOWS[0], "qpns": [8]}]) is None and asked.said[-1] == "assigning", "others are unknown"


def test_other_connections_are_looked_for_anew(asked: Asked) -> None:
    """What was seen, what was refused and what was waited for was of those before."""
    asked.says(REFUSED)
    asked.at.of({}, FLOWS)
    assert asked.turn() is False
    other = [{**FLOWS[0], "qpns": [8]}]
    asked.now = 50.0
    assert asked.at.of({}, other) is None and asked.said == ["assigning"] * 2 and asked.at._due == module.LEAST
    assert asked.events[-1] == {"connections": 1, "why": module.WHY}
    assert asked.turn() is False, "it is doubted anew"
    assert asked.question()[0]["flows"] == other
    assert asked.turn() is True
    with pytest.raises(UserError, match="fits nothing") as refused:
        asked.at.of({}, other)
    assert (refused.value.where, refused.value.remedy) == ("connections", "another")
    assert asked.at.of({"run_id": "b"}, other) is None and asked.said == ["assigning"] * 3, "nothing was kept"
    assert asked.turn() is False


def test_an_answer_that_is_under_way_is_of_the_question_before(asked: Asked) -> None:
    asked.script.write_text("import time\ntime.sleep(600)\n")
    asked.at.of({"run_id": "a"}, FLOWS)
    asked.ring.put([(1, bytes(64))] * module.LEAST)
    asked.at.look()
    process = asked.at._process
    assert process is not None and asked.at.of({"run_id": "a"}, FLOWS) is None
    assert asked.at._process is process, "asked again it goes on"
    assert asked.at.of({"run_id": "b"}, FLOWS) is None
    assert asked.at._process is None and process.returncode is not None
    asked.says('{"early": "1.0 of 3"}')
    assert asked.at.look() is False and asked.at._process is not None, "what was seen is enough at once"
    asked.at._process.wait(LONGEST)
    assert asked.question()[0]["job"]["run_id"] == "b"


def test_it_is_asked_anew_with_twice_as_much_and_not_at_once(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either alone would ask the process as fast as it answers."""
    monkeypatch.setattr(module, "PAUSE", 1.0)
    asked.says('{"early": "1.0 of 3"}')
    asked.at.of({}, FLOWS)
    asked.ring.put([(1, bytes(64))] * (module.LEAST - 1))
    assert asked.at.look() is False and asked.at._process is None
    assert asked.turn() is False
    seen = asked.at._due // 2
    asked.now += 5
    asked.ring.put([(1, bytes(64))] * (seen - 1))
    assert asked.at.look() is False and asked.at._process is None, "the pause is over, and less than twice as much came"
    asked.now -= 4.5
    asked.ring.put([(1, bytes(64))] * 2)
    assert asked.at.look() is False and asked.at._process is None, "twice as much came, and the pause is not over"
    asked.now += 0.6
    assert asked.at.look() is False and asked.at._process is not None


def test_a_process_that_fails_is_named(asked: Asked) -> None:
    asked.says("", 3)
    assert asked.at.of({}, FLOWS) is None
    with pytest.raises(Exception, match="ended with status 3"):
        asked.turn()
    asked.says('{"early": "1.0 of 3"}')
    assert asked.at.of({}, FLOWS) is None and asked.turn() is False, "and asked anew when somebody comes back"


def test_what_is_known_is_forgotten_with_the_start(asked: Asked) -> None:
    asked.says('{"flows": [], "spare": 1, "unseen": 0, "unproven": "found"}')
    assert asked.at.of({}, FLOWS) is None and asked.turn() is True
    assert asked.at.of({"run_id": "other"}, FLOWS) == {"flows": [], "unproven": "found"}
    asked.at.forget()
    assert asked.at.of({}, FLOWS) is None


def test_nothing_is_left_of_a_look_that_ends(asked: Asked) -> None:
    asked.script.write_text("import time\ntime.sleep(600)\n")
    asked.at.of({}, FLOWS)
    asked.ring.put([(1, bytes(64))] * module.LEAST)
    asked.at.look()
    process = asked.at._process
    assert process is not None and process.poll() is None
    asked.at.rest()
    assert process.returncode is not None and asked.at.look() is False


def test_all_or_none() -> None:
    assert withheld(FLOWS) and not withheld([{**FLOWS[0], "channel": 0}]) and not withheld([])
    with pytest.raises(UserError, match="1 connections have a channel, and 1 have none"):
        withheld([*FLOWS, {**FLOWS[0], "channel": 0}])


def test_both_ends_name_a_connection_once() -> None:
    job = job_of()
    every = union([without_channels(job, 0), without_channels(job, 1)])
    assert len(every) == len(job.flows) and all("channel" not in flow for flow in every)
