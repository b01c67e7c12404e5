"""How a follower waits for a peer's version, goes on with it, or without it (going.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowcheck.errors import UserError
from flowcheck.rebuild.version.events import Begun

from ..fake_engine import FakeSource, Packet, whole
from .followed import PARTLY, port
from .going import OPTIMIZED, Going, LeapingReplica


@pytest.fixture
def live(monkeypatch) -> Callable[..., Going]:
    return lambda *sources, **options: Going(monkeypatch, *sources, **options)


def waits(live, **options: Any) -> tuple[Going, LeapingReplica]:
    """Iterations 0 to 3 have gone by, something of 7 has come; everything of the next version is stale."""
    at = live(port(0, 1, 2, 3), FakeSource([Packet(7, cells=PARTLY)], open=True), arenas=8, **options)
    at.look()
    replica, _ = at.begin(2)
    at.record(5)
    replica.calls.clear()
    assert (at.engine.begun, at.going.next) == (7, 5)
    return at, replica


@pytest.mark.parametrize(("step", "useful"), [(-1, False), (0, True), (3, True), (4, False)])
def test_a_version_is_of_use_between_what_still_closes_and_what_has_begun(live, step: int, useful: bool) -> None:
    """By the trainer's count: 105 waits for what this version does, and iteration 107 has begun."""
    at, replica = waits(live, first=100)
    least, most = at.going.useful
    assert (least, most) == (105, 108)
    assert not at.going.expecting
    if not useful:
        with pytest.raises(UserError, match=f"step {105 + step} is of no use any more"):
            at.going.expect(105 + step)
        assert at.going.next == 5 and replica.calls == []
        return
    assert at.going.expect(105 + step) == "a slot"
    assert replica.calls == ["abandon", f"receive {105 + step}"] and at.going.expecting
    assert at.going.next is None and at.going.partial.elements == 0
    replica.calls.clear()
    at.going.matches = 4
    assert at.going.go_on_with(105 + step, {}, {}, "node1") == 5 + step
    assert replica.calls == ["received of node1"] and not at.going.expecting
    assert (at.going.next, at.going.matches, at.going.status) == (5 + step, 0, "unverified")


def test_nothing_is_expected_without_a_version_to_come(live) -> None:
    at = live(port())
    with pytest.raises(UserError):
        at.going.expect(0)
    at.begin(0)  # and no record
    with pytest.raises(UserError):
        at.going.expect(0)
    at = live(port(), patched=False)
    at.state(0)
    with pytest.raises(UserError):
        at.going.expect(0)


def test_an_empty_replica_has_nothing_to_abandon(live) -> None:
    at, replica = waits(live)
    replica.serves = False
    at.going.expect(6)
    assert replica.calls == ["receive 6"]


def test_what_does_not_come_is_asked_of_the_trainers(live) -> None:
    """The version before it is not taken for one of this start of the job, whatever it waits for."""
    at, replica = waits(live)
    at.going.expect(6)
    replica.step, replica.calls[:] = 6, []
    at.record(7)
    assert at.going.go_on_without() == [Begun(7, OPTIMIZED)] and not at.going.expecting
    assert replica.calls == ["discard", "leap 7"] and at.going.next == 7 and at.going.emptied == 2
    assert at.going.go_on_without() == [] and replica.calls == ["discard", "leap 7"]


def test_what_was_discarded_already_is_not_discarded_again(live) -> None:
    at, replica = waits(live)
    at.going.expect(6)
    replica.building = False
    replica.calls.clear()
    at.going.go_on_without()
    assert "discard" not in replica.calls


def test_iterations_behind_an_expected_version_stay_open(live) -> None:
    at, _ = waits(live)
    at.going.expect(6)
    at.engine.sources[0].packets += whole(4, 5, 6, 7)
    at.engine.sources[1].packets += whole(7)
    at.look()
    assert at.engine.oldest <= 6
    assert not at.going.gives_up
    at.engine.given_up = range(6, 7)
    assert at.going.gives_up
    at.engine.given_up = range(5, 6)
    assert not at.going.gives_up
    at.going.withdraw()
    at.engine.given_up = range(6, 7)
    assert not at.going.gives_up and not at.going.expecting
