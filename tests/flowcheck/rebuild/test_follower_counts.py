"""What a follower knows of its own course: how long closing takes, when what came, and which replicas it lets go of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowcheck.rebuild.iteration.deadline import Times
from flowcheck.rebuild.version.events import Closed, Event, Lost, Timed
from flowcheck.rebuild.version.follower import LOOK_SECONDS
from lab.synth import example_job

from ..fake_engine import FakeSource, Packet, whole
from .followed import PARTLY, port

FIRST = (0, 12)  # cells of the first of two buckets
SUMS = {"layer0.weight": "0" * 16}


def without_values() -> Any:
    """A job whose steps need no record: its buckets are applied as they become complete."""
    return example_job(count=[24, 9], startup=False)


# -- time ------------------------------------------------------------------------------------------------------


def test_before_anything_has_come_nothing_was_done(live) -> None:
    at = live(port())
    one = at.follower
    assert (at.chain.next, at.chain.status, at.chain.verified, at.chain.matches) == (None, "waiting", None, 0)
    assert (one.first_iteration, one.moved, one.closing_seconds, one.published) == (-1, False, 0.0, -1)
    assert at.look() == [] and not one.moved and one.closing_seconds == 0


def test_what_closing_takes_is_counted_with_whoever_listens_to_it(live) -> None:
    at = live(port(2, 3), arenas=4)
    at.start(2)
    at.record(2, 3)

    def listens(event: Event) -> None:
        at.now += 3

    at.when = listens
    assert at.look() == ["closed 2", "closed 3"]
    assert at.follower.closing_seconds == 6 and at.follower.moved
    at.now += 100
    at.look()
    assert at.follower.closing_seconds == 6, "of looking nothing"


def test_who_closes_an_iteration_waits_for_no_worker(live) -> None:
    """The rings are looked at meanwhile."""
    at = live(port(2))
    replica, waits, done = at.start(2), list[float](), [False]
    at.record(2)

    def written(seconds: float) -> bool:
        waits.append(seconds)
        return done[0]

    replica.written = written  # type: ignore[method-assign]
    assert at.look() == [] and waits == [0] and at.follower.moved
    at.look()
    assert waits[1:] == [LOOK_SECONDS], "nothing was in the rings"
    done[0] = True
    assert at.look() == ["closed 2"] and at.follower.moved


def test_updates_before_the_end_of_an_iteration_are_counted_too(live) -> None:
    at = live(FakeSource([Packet(2, cells=FIRST)], open=True), job=without_values())
    replica = at.start(2)
    begin = replica.begin

    def slow(iteration: int, values: Any) -> None:
        at.now += 5
        begin(iteration, values)

    replica.begin = slow  # type: ignore[method-assign]
    assert at.look() == [] and replica.calls == ["begin 2", "bucket 0"]
    assert at.follower.closing_seconds == 5 and at.follower.moved
    at.look()
    assert at.follower.closing_seconds == 5 and not at.follower.moved


def test_what_came_when_is_kept_with_each_iteration(live) -> None:
    at = live(port())
    replica = at.start(2)

    def at_time(ns: int, answer: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            at.ns = ns
            return answer

        return call

    at.ns = 10
    at.record(2, checksums=SUMS)
    at.ns = 20
    at.engine.sources[0].packets += [Packet(2, past=3, ns=5)]
    replica.compare = at_time(30, replica)  # type: ignore[method-assign]
    replica.differing = at_time(40, "")  # type: ignore[method-assign]
    assert at.look() + at.look() == ["closed 2"]
    at.ns = 50
    at.engine.sources[0].packets += [Packet(3, past=4, cells=PARTLY, ns=45), *whole(4, 5)]
    at.record(3)
    assert at.look()[:2] == ["not 3", "lost"]
    times = [event.times for event in at.follower.keeper.rest() if isinstance(event, Timed)]
    assert times[:2] == [
        Times(2, 5, 5, covered=20, record=10, applied=30, published=40, next=None), Times(3, 45, 45, record=50),
    ]


# -- replicas ----------------------------------------------------------------------------------------------------


def test_a_replica_hears_how_far_training_is(live) -> None:
    at = live(port(), first=7)
    at.record(2)  # before there is one
    replica = at.start(2)
    at.record(3)
    assert replica.heard_of == 11, "updates, as the trainer counts"


def test_a_state_takes_the_place_of_what_was_there(live) -> None:
    """What was being built is dropped, and a replica that is gone on with is not closed."""
    at = live(FakeSource([Packet(2, cells=FIRST)], open=True), job=without_values())
    one = at.start(2)
    at.look()
    other = at.start(5)
    assert one.calls == ["begin 2", "bucket 0", "discard", "close"] and other.calls == []
    assert (at.chain.next, at.chain.replica, at.chain.status) == (5, other, "unverified")
    at.follower.start(other, 6)  # type: ignore[arg-type]
    assert other.calls == [] and at.chain.next == 6


@pytest.mark.parametrize("begun", [False, True])
def test_the_end_lets_go_of_the_replica(live, begun: bool) -> None:
    at = live(FakeSource([Packet(2, cells=FIRST)] if begun else [], open=True), job=without_values())
    replica = at.start(2)
    at.look()
    at.follower.close()
    assert replica.calls == [*(["begin 2", "bucket 0", "discard"] if begun else []), "close"]


@pytest.mark.parametrize("serves", [False, True])
def test_what_was_served_and_is_wrong_is_withdrawn(live, serves: bool) -> None:
    at = live(port(2))
    replica = at.start(2)
    replica.differs, replica.serves = "layer0.weight", serves
    at.record(2, checksums=SUMS)
    assert at.look() + at.look() == ["lost", "not 2"]
    (lost,) = (event for event in at.events if isinstance(event, Lost))
    assert (lost.withdrawn, lost.diverged) == (serves, 3) and at.chain.matches == 0


def test_what_was_verified_is_served_on(live) -> None:
    at = live(port(2, 3), arenas=4)
    replica = at.start(2)
    at.record(2, 3, checksums=SUMS)
    replica.sound, at.when = True, lambda event: setattr(replica, "differs", "layer0.weight")
    assert at.look() + at.look() + at.look() == ["closed 2", "lost", "not 3"]
    (lost,) = (event for event in at.events if isinstance(event, Lost))
    assert (lost.withdrawn, lost.diverged) == (False, 4) and replica.calls[-2:] == ["discard", "withdraw"]
    assert at.chain.replica is replica and (at.chain.next, at.chain.verified) == (None, None)


def test_what_is_lost_withdraws_nothing(live) -> None:
    at = live(FakeSource([Packet(2, past=3, cells=PARTLY), *whole(3, 4)], open=True))
    replica = at.start(2)
    at.record(2)
    assert at.look()[:2] == ["not 2", "lost"]
    (lost,) = (event for event in at.events if isinstance(event, Lost))
    assert not lost.withdrawn and at.chain.replica is replica and "close" not in replica.calls
    assert (at.chain.status, at.chain.next) == ("lost", None)


def test_what_had_matched_counts_no_more_once_something_differs(live) -> None:
    at = live(port(2, 3), arenas=4)
    replica = at.start(2)
    at.record(2, 3, checksums=SUMS)
    at.when = lambda event: setattr(replica, "differs", "layer0.weight")
    assert at.look() + at.look() + at.look() == ["closed 2", "lost", "not 3"]
    assert replica.matches == [1] and (at.chain.matches, at.chain.status) == (0, "diverged")


@pytest.mark.parametrize(("serves", "published"), [(True, 2), (False, -1)])
def test_the_iteration_of_the_current_version(live, serves: bool, published: int) -> None:
    at = live(port(2), first=7)
    replica = at.start(2)
    at.record(2)
    at.look()
    replica.serves = serves
    assert (at.follower.published, replica.step) == (published, 10)


# -- what is missing ---------------------------------------------------------------------------------------------


def test_what_is_lost_for_good_closes_at_once_and_by_which_sign_is_said(live) -> None:
    """Else it stays open until its arena is needed."""
    at = live(FakeSource([*whole(2), Packet(3, past=4, cells=PARTLY)], open=True), arenas=4)
    at.start(2)
    at.record(2, 3)
    at.engine.hopes[0, 3] = "passed"
    assert at.look() + at.look() == ["closed 2", "not 3", "lost"]
    assert [event.final for event in at.events if isinstance(event, Closed)] == ["", "passed"]


# -- memory ------------------------------------------------------------------------------------------------------


def test_captures_keep_what_may_refute_a_manifest_as_a_whole(offline) -> None:
    at = offline(FakeSource(whole(0, 1, 2, 3, 4)))
    at.take(at.follower.run())
    assert at.said == [f"closed {t}" for t in range(5)] and at.engine.forgotten == 0
    assert at.follower.first_iteration == 0


def test_a_port_forgets_all_but_the_first_two(live) -> None:
    at = live(port(3, 4, 5, 6), arenas=4)
    at.look()
    assert at.follower.first_iteration == 3 and at.engine.forgotten == 2


def test_each_closed_iteration_says_how_far_records_are_ahead(live) -> None:
    at = live(port(2, 3), arenas=4)
    at.start(2)
    at.record(2, 3, 6)
    at.look()
    assert [event.lag for event in at.events if isinstance(event, Closed)] == [4, 3]
