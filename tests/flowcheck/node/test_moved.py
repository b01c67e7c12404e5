"""When a mirror is taken to have moved, and when iterations are only late. A real node: test_mirror_moved.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowcheck.node.groups.move_detector import LATE, SECONDS, Moved, Movement
from flowcheck.rebuild.version.events import Closed, GivenUp
from parser.engine_config import FlowSpec
from parser.flow_table import FLOW

from ..fake_engine import Packet
from .live_scene import Live, small_job

ENDS = [(1, 2), (2, 1), (2, 3), (3, 2), (3, 0), (0, 3)]  # of a ring of four: by 10.0.0.2's port and by 10.0.0.0's
FLOWS = [FlowSpec(bytes((10, 0, 0, src)), bytes((10, 0, 0, dst)), 9, i // 2, 0, not i % 2)
         for i, (src, dst) in enumerate(ENDS)]


class Scene:
    """Two streams, of which the second waits for an arena and the first is behind. waiting: packets in its ring."""

    def __init__(self) -> None:
        self.at, self.oldest, self.blocked, self.waiting, self.can_close = 100.0, 7, True, 0, False
        self.packets = [[0] * len(FLOWS), [9] * len(FLOWS)]  # of each stream, by flow
        engine: Any = SimpleNamespace(waiting=lambda address: (self.waiting if address == 1 else 50, 64),
                                      flows=self._table)
        scheduler: Any = SimpleNamespace(due=lambda: range(7, 8) if self.can_close else range(0),
                                         state=lambda stream, iteration: "lost" if stream else "behind")
        sources: Any = [SimpleNamespace(ring_address=1), SimpleNamespace(ring_address=2)]
        self._engine, self._scheduler = engine, scheduler
        self.movement = Movement(FLOWS, engine, scheduler, sources, ["eth1", "eth2"], lambda: self.at)

    def _table(self) -> np.ndarray:
        table = np.zeros((2, len(FLOWS)), FLOW)
        table["packets"] = self.packets
        return table

    def look(self, seconds: float) -> list[str]:
        """For so long, ten times a second."""
        said: list[str] = []
        for _ in range(int(seconds / 0.11)):
            self.at += 0.11
            self._engine.oldest, self._scheduler.waits = self.oldest, self.blocked
            said += [event.why for event in self.movement.look() if isinstance(event, Moved)]
        return said


def closed(*states: str, **missing: int) -> Closed:
    judged: Any = SimpleNamespace(evidence=SimpleNamespace(streams=[SimpleNamespace(state=one) for one in states]))
    return Closed(7, not missing, "unverified", 10, 10, missing, 0, 0, 0, judged=judged)


def test_a_stream_that_brings_nothing_while_another_waits_is_named() -> None:
    scene = Scene()
    assert scene.look(0.8 * SECONDS) == []
    [why] = scene.look(SECONDS)
    assert "from eth1 for" in why and "eth2" not in why
    assert len(scene.look(2.2 * SECONDS)) == 2, "whoever did not act is told again"


@pytest.mark.parametrize("room", [32, 1 << 14])
def test_a_port_that_dies_is_named_whether_or_not_iterations_are_given_up(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Rings fill while the others wait for it. What is given up then is counted, and no stream is blocked any more."""
    at = Live(monkeypatch, small_job(records=False), streams=2)
    at.state(2)
    for source in at.sources:
        source.room = room
    events: list[Any] = []
    for iteration in range(2, 400):
        at.sources[0].packets += [Packet(iteration, cells=(4 * i, 4 * i + 4)) for i in range(8)]
        at.sources[0].packets.append(Packet(iteration, past=iteration + 1))
        if iteration < 20:
            at.sources[1].packets.append(Packet(iteration, past=iteration + 1))
        del at.sources[0].packets[room:]  # the rest is dropped at the port
        at.now += 0.05
        events += at.session.poll()
        if any(isinstance(event, Moved) for event in events):
            break
    [why] = [event.why for event in events if isinstance(event, Moved)]
    assert why.startswith("nothing has come from queue 1 for 5 s") and at.now < 1000.0 + 18 * 0.05 + 1.3 * SECONDS
    assert any(isinstance(event, GivenUp) for event in events) is (room == 32)


@pytest.mark.parametrize("change", [
    {"blocked": False}, {"can_close": True}, {"waiting": 1}, {"oldest": 8},
])
def test_what_goes_on_for_a_moment_is_only_late(change: dict[str, Any]) -> None:
    """No stream waits; something can close; its packets are here; an iteration has closed."""
    scene = Scene()
    for _ in range(3):
        assert scene.look(0.8 * SECONDS) == []
        before = {name: getattr(scene, name) for name in change}
        vars(scene).update(change)
        assert scene.look(0.3) == []
        if "oldest" not in change:
            vars(scene).update(before)
        change = {name: value + 1 if name == "oldest" else value for name, value in change.items()}
    assert len(scene.look(1.2 * SECONDS)) == 1


def test_iterations_that_are_whole_and_late_again_and_again() -> None:
    scene = Scene()
    scene.blocked = False
    for other in (closed("past", "past"), closed("past", "lost", lost=3)):
        for _ in range(LATE - 1):
            scene.movement.closed(closed("past", "lost"))
        assert scene.look(0.2) == []
        scene.movement.closed(other)
    for _ in range(LATE):
        scene.movement.closed(closed("lost"))
    [why] = scene.look(0.3)
    assert f"{LATE} iterations in a row lacked nothing" in why and scene.look(1.0) == []


@pytest.mark.parametrize(("go_on", "said"), [
    ((4, 5), "any more (10.0.0.1 to 10.0.0.2, 10.0.0.2 to 10.0.0.1, 10.0.0.2 to 10.0.0.3, 10.0.0.3 to 10.0.0.2;"
             " 10.0.0.2 is an end of each: its port?)"),
    ((1, 3, 4, 5), "any more (10.0.0.1 to 10.0.0.2, 10.0.0.2 to 10.0.0.3; 10.0.0.2 is an end of each: its port?)"),
    ((0, 1), "any more (10.0.0.2 to 10.0.0.3, 10.0.0.3 to 10.0.0.2, 10.0.0.3 to 10.0.0.0, 10.0.0.0 to 10.0.0.3;"
             " 10.0.0.3 is an end of each: its port?)"),
    ((), "10.0.0.3 to 10.0.0.2 and 2 more)"),
    ((0, 1, 2, 3, 4), "any more (10.0.0.0 to 10.0.0.3)"),
    (range(6), "any more"),
])
def test_who_stopped_is_named_and_the_host_at_an_end_of_each(go_on: Any, said: str) -> None:
    """As an operator asks: which cable?"""
    scene = Scene()
    scene.blocked = False
    for number in range(LATE):
        for flow in go_on:
            scene.packets[1][flow] += 3
        if number == 0:
            scene.packets = [[one + 5 for one in stream] for stream in scene.packets]  # what is left in the rings
        scene.movement.closed(closed("lost"))
    [why] = scene.look(0.3)
    assert why.endswith(said), why


def test_a_connection_that_never_brought_anything_has_not_stopped() -> None:
    scene = Scene()
    scene.blocked, scene.packets = False, [[0] * 6, [0, 0, 7, 7, 0, 0]]
    for _ in range(LATE):
        scene.movement.closed(closed("lost"))
    [why] = scene.look(0.3)
    assert "10.0.0.2 to 10.0.0.3, 10.0.0.3 to 10.0.0.2)" in why


def test_what_brought_packets_after_the_first_late_iteration_has_not_stopped() -> None:
    """Nor has what brought the first one ever; one packet is enough to be missed."""
    scene = Scene()
    scene.blocked, scene.packets = False, [[0] * 6, [1, 1, 1, 0, 0, 0]]
    for number in range(LATE):
        scene.movement.closed(closed("lost"))
        if number == 0:
            scene.packets[1][2:4] = 4, 4
    [why] = scene.look(0.3)
    assert why.endswith("any more (10.0.0.1 to 10.0.0.2, 10.0.0.2 to 10.0.0.1)")


def test_it_is_said_again_after_as_many_iterations_and_not_before() -> None:
    scene = Scene()
    scene.blocked, said = False, 0
    for number in range(1, 3 * LATE):
        scene.movement.closed(closed("lost"))
        said += len(scene.look(0.2))
        assert said == number // LATE


def test_an_iteration_that_nobody_judged_is_not_late() -> None:
    scene = Scene()
    scene.blocked = False
    for number in range(2 * LATE):
        scene.movement.closed(Closed(7, True, "", 0, 0, {}, 0, 0, 0) if number == LATE - 1 else closed("lost"))
    assert len(scene.look(0.2)) == 1 and scene.movement._late == 0


def test_all_that_bring_nothing_are_named() -> None:
    scene = Scene()
    scene._scheduler.state = lambda stream, iteration: "behind"
    scene._engine.waiting = lambda address: (0, 64)
    assert scene.look(1.2 * SECONDS) == [
        f"nothing has come from eth1 and eth2 for {SECONDS:g} s, and all else waits for it"]


def test_where_streams_stand_is_looked_at_ten_times_a_second() -> None:
    """From the machine's start on. A turn of the group's thread is far shorter."""
    scene = Scene()
    looks: list[float] = []

    def state(stream: int, iteration: int) -> str:
        if stream == 0:
            looks.append(scene.at)
        return "lost" if stream else "behind"

    scene._scheduler.state, scene._scheduler.waits = state, True
    told = []
    for now in (0.0625, 0.1, 0.1875, 0.25, 0.3125, 0.125 + SECONDS, 0.25 + SECONDS):
        scene.at, scene._engine.oldest = now, 7 + (now >= 0.25)  # an iteration has closed
        told += [now for event in scene.movement.look() if isinstance(event, Moved)]
    assert looks == [0.1, 0.25, 0.125 + SECONDS, 0.25 + SECONDS] and told == [0.25 + SECONDS]
