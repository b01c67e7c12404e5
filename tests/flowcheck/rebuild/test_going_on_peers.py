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
    assert (at.engine.begun, at.next) == (7, 5)
    return at, replica


@pytest.mark.parametrize(("step", "useful"), [(-1, False), (0, True), (3, True), (4, False)])
def test_a_version_is_of_use_between_what_still_closes_and_what_has_begun(live, step: int, useful: bool) -> None:
    """By the trainer's count: 105 waits for what this version does, and iteration 107 has begun."""
    at, replica = waits(live, first=100)
    least, most = at.joining.useful
    assert (least, most) == (105, 108)
    assert not at.joining.expecting
    if not useful:
        with pytest.raises(UserError, match=f"step {105 + step} is of no use any more"):
            at.joining.expect(105 + step)
        assert at.next == 5 and replica.calls == []
        return
    assert at.joining.expect(105 + step) == "a slot"
    assert replica.calls == ["abandon", f"receive {105 + step}"] and at.joining.expecting
    assert at.next is None and at.elements == 0
    replica.calls.clear()
    at.chain.matches = 4
    assert at.joining.go_on_with(105 + step, {}, {}, "node1") == 5 + step
    mark = str(at.joining.hearsay)
    assert replica.calls == [f"received {mark}"] and "node1" in mark and not at.joining.expecting
    assert (at.next, at.chain.matches, at.chain.status) == (5 + step, 0, "unverified")


def test_nothing_is_expected_without_a_version_to_come(live) -> None:
    at = live(port())
    with pytest.raises(UserError):
        at.joining.expect(0)
    at.begin(0)  # and no record
    with pytest.raises(UserError):
        at.joining.expect(0)
    at = live(port(), patched=False)
    at.state(0)
    with pytest.raises(UserError):
        at.joining.expect(0)


def test_an_empty_replica_has_nothing_to_abandon(live) -> None:
    at, replica = waits(live)
    replica.serves = False
    at.joining.expect(6)
    assert replica.calls == ["receive 6"]


def test_what_does_not_come_is_asked_of_the_trainers(live) -> None:
    """The version before it is not taken for one of this start of the job, whatever it waits for."""
    at, replica = waits(live)
    at.joining.expect(6)
    replica.step, replica.calls[:] = 6, []
    at.record(7)
    assert at.joining.go_on_without() == [Begun(7, OPTIMIZED)] and not at.joining.expecting
    assert replica.calls == ["discard", "leap 7"] and at.next == 7 and at.ranges.emptied == 2
    assert at.joining.go_on_without() == [] and replica.calls == ["discard", "leap 7"]


def test_after_a_trainers_state_no_version_of_a_peer_is_expected_any_more(live) -> None:
    at, _ = waits(live)
    at.joining.expect(6)
    replica = at.state(7)
    with pytest.raises(UserError, match="step 6 is of no use any more"):
        at.joining.go_on_with(6, {}, {}, "node1")
    assert at.joining.go_on_without() == [] and replica.calls == [] and at.next == 7 and not at.joining.expecting


def test_what_was_discarded_already_is_not_discarded_again(live) -> None:
    at, replica = waits(live)
    at.joining.expect(6)
    replica.building = False
    replica.calls.clear()
    at.joining.go_on_without()
    assert "discard" not in replica.calls


def test_iterations_behind_an_expected_version_stay_open(live) -> None:
    at, _ = waits(live)
    at.joining.expect(6)
    at.engine.sources[0].packets += whole(4, 5, 6, 7)
    at.engine.sources[1].packets += whole(7)
    at.look()
    assert at.engine.oldest <= 6
    assert not at.joining.gives_up
    at.engine.given_up = range(6, 7)
    assert at.joining.gives_up
    at.engine.given_up = range(5, 6)
    assert not at.joining.gives_up
    at.follower.trainers.withdraw()
    at.engine.given_up = range(6, 7)
    assert not at.joining.gives_up and not at.joining.expecting
