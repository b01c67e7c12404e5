"""Silence alone: records say what is over, counters what has come, and a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest

from flowcheck.job.clock import Clock
from flowcheck.node.ports.silence import LOOK_SECONDS, SECONDS, Arrivals, Silence, Silent
from flowcheck.rebuild.plan import plan_job
from lab.synth import example_job

from ..fake_engine import FakeEngine


class Port(Arrivals):
    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.others: dict[str, int] = {}

    @property
    def arrived(self) -> int:
        return self.count

    @property
    def unclaimed(self) -> dict[str, int]:
        return self.others


@pytest.mark.parametrize(("before", "now", "emptied"), [
    ([], [], True), ([5], [5], False), ([5], [6], False), ([5], [7], True), ([0], [2], True), ([5, 5], [7, 6], False),
    ([5, 5], [6, 7], False), ([5, 5], [9, 7], True), ([None], [None], True), ([5], [None], True), ([None], [0], True),
    ([None, 5], [None, 6], False),
])
def test_a_queue_is_emptied_when_nothing_was_left_twice(
    before: list[int | None], now: list[int | None], emptied: bool
) -> None:
    """Or when nobody takes anything from it."""
    port = Arrivals()
    port.empty = lambda: now  # type: ignore[method-assign]
    assert port.emptied(before) is emptied


class Scene:
    """first: the trainer's number of the first iteration. begun: newest iteration of which a packet had come."""

    def __init__(self, *, name: str = "af_packet:eth1", first: int = 0, begun: int = -1, **job: Any) -> None:
        plan = plan_job(example_job(**{"count": 40, "startup": False, "protocol": "ll", **job}), streams=2)
        self.engine, self.port, self.now = FakeEngine(plan.engine), Port(name), 1000.0
        self.engine.begun = begun
        self.silence = Silence(plan, self.engine, self.port, Clock(first), lambda: self.now)  # type: ignore[arg-type]

    def after(self, seconds: float, busy: bool = False) -> list[str]:
        self.now += seconds
        return [event.why for event in self.silence.look(busy) if isinstance(event, Silent)]

    def count(self, outcome: str, packets: int, stream: int = 0) -> None:
        self.engine.counts[stream][outcome] = (packets, 0)


def test_a_record_that_no_packet_precedes_is_said_once_after_so_many_seconds() -> None:
    at = Scene(first=100)
    at.silence.over(0)
    assert at.after(SECONDS - 0.2) == []
    [why] = at.after(0.2)
    assert why == (
        "no packet has come to af_packet:eth1 for 3 s, and iteration 100 is over: is the mirror session on, and does it"
        " end at this port? (flowcheck switch verify)"
    )
    assert at.after(SECONDS) == at.after(60) == []


@pytest.mark.parametrize("begun", [-1, 0, 7])
def test_what_a_record_says_is_over_and_has_come_is_not_suspected(begun: int) -> None:
    """Neither the iteration that has come last, nor an earlier one."""
    at = Scene(begun=begun)
    at.silence.over(begun)
    assert at.after(60) == at.after(60) == []


def test_it_is_suspected_from_the_first_record_on_that_is_ahead() -> None:
    at = Scene(begun=3)
    at.silence.over(3)
    assert at.after(10) == []
    at.silence.over(4)
    at.now += 2
    at.silence.over(5)  # does not begin anew
    assert at.after(0.5) == [] and len(at.after(0.5)) == 1


def test_counters_are_looked_at_ten_times_a_second() -> None:
    at = Scene()
    at.silence.over(0)
    looked, outcomes = [], at.engine.outcomes
    at.engine.outcomes = lambda stream: looked.append(stream) or outcomes(stream)  # type: ignore[method-assign]
    for seconds, looks in ((1.0, 1), (0.6 * LOOK_SECONDS, 1), (0.6 * LOOK_SECONDS, 2), (0.6 * LOOK_SECONDS, 2)):
        at.after(seconds)
        assert looked == [0, 1] * looks


def test_the_iteration_that_is_over_has_come_and_that_is_all_it_takes() -> None:
    """Not one packet more."""
    at = Scene()
    at.silence.over(2)
    assert len(at.after(SECONDS)) == 1
    at.engine.begun = 2
    assert at.after(1) == [""] and at.after(60) == []


def test_what_has_come_begins_the_wait_anew() -> None:
    at = Scene()
    at.silence.over(2)
    at.engine.begun = 1
    assert at.after(SECONDS - 1) == [], "a later one than had come before, though not the one that is over"
    assert at.after(SECONDS - 0.5) == [] and len(at.after(0.5)) == 1


def test_packets_that_were_placed_are_no_silence() -> None:
    """They may be of iterations before."""
    at = Scene()
    at.silence.over(2)
    at.count("placed", 1, stream=1)
    assert at.after(SECONDS) == []
    assert len(at.after(SECONDS)) == 1, "since then there was none"


def test_what_came_before_the_record_does_not_count() -> None:
    at = Scene()
    at.port.count = 500
    at.count("late", 70)
    at.port.others = {"late": 5}
    at.silence.over(0)
    [why] = at.after(SECONDS)
    assert why.startswith("no packet has come to af_packet:eth1 for 3 s")


def test_what_comes_and_is_not_of_the_job_is_counted_by_what_became_of_it() -> None:
    """Packets of both streams and of no job, each by its outcome."""
    at = Scene(name="", ranks=2)
    at.count("other_packet", 10)
    at.silence.over(0)
    at.count("other_packet", 13)
    at.count("late", 2, stream=1)
    at.port.others = {"other_packet": 4, "no_roce": 1}
    for stream in at.engine.counters:
        for flow in stream:
            flow["seen"] = False
    [why] = at.after(SECONDS)
    assert why.startswith(
        "nothing that the port brings is of iterations that are over, and iteration 0 is over; 10 packets in 3 s:"
        " late 2, no_roce 1, other_packet 7; no packet ever of channel 0, rank "
    )


def test_packets_that_nobody_has_looked_at_are_counted_as_well() -> None:
    at = Scene()
    at.silence.over(0)
    at.port.count = 12
    [why] = at.after(SECONDS)
    assert why.endswith("iteration 0 is over; 12 packets in 3 s")


def test_a_packet_of_the_job_although_the_port_counts_none() -> None:
    """A port that does not count by itself."""
    at = Scene()
    at.silence.over(0)
    at.count("late", 1)
    [why] = at.after(SECONDS)
    assert "1 packets in 3 s: late 1" in why


@pytest.mark.parametrize(("unheard", "names"), [(0, 0), (1, 1), (4, 4), (5, 4), (8, 4)])
def test_connections_of_which_nothing_ever_came_are_named_four_of_them(unheard: int, names: int) -> None:
    at = Scene(ranks=4, channels=2)
    data = [spec for spec in at.engine.config.flows if spec.data]
    quiet = sorted({spec.edge for spec in data})[:unheard]
    for stream in at.engine.counters:
        for spec, flow in zip(at.engine.config.flows, stream, strict=True):
            flow["seen"] = spec.edge not in quiet
    at.silence.over(0)
    at.port.count = 1
    [why] = at.after(SECONDS)
    assert why.count("channel ") == names and why.count(": channel") + why.count("of channel") == (names > 0)
    assert why.count("; channel ") == max(names - 1, 0)
    assert (f" and {unheard - names} more" in why) == (unheard > names) and why.endswith("more") == (unheard > names)


@pytest.mark.parametrize(("protocol", "outcome", "said"), [
    ("simple", "unanchored", True), ("simple", "late", False), ("ll", "unanchored", False), ("ll", "late", False),
])
def test_simple_without_an_anchor_wants_both_directions(protocol: str, outcome: str, said: bool) -> None:
    at = Scene(protocol=protocol)
    at.silence.over(0)
    at.count(outcome, 3)
    [why] = at.after(SECONDS)
    assert ("mirror both directions of each port" in why) == said
    assert said or why.endswith(f"{outcome} 3")


def test_a_node_that_is_busy_is_not_told_of_silence() -> None:
    at = Scene()
    at.silence.over(0)
    assert at.after(SECONDS, busy=True) == []
    assert at.after(SECONDS - 0.5) == [], "from now on"
    assert len(at.after(0.5)) == 1
