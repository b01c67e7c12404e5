"""The end of a session: what rx threads had not taken yet when it was asked for is taken first."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from flowcheck.node.groups import session as of_live
from flowcheck.node.groups.session import wind_up

from .live_scene import Live


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Live:
    """After the state before iteration 0, and with the record of iteration 0, of which nothing has come."""
    live = Live(monkeypatch)
    live.state(0)
    assert live.record(0, checksums=live.sums(0.5)) == ""
    return live


def rx_thread(live: Live, *bursts: Callable[[], None]) -> None:
    """At each look at how often the queue was empty, one burst is taken; without any more, nothing is left."""
    left, looks = list(bursts), [0]

    def empty() -> list[int | None]:
        left.pop(0)() if left else None
        looks[0] += not left
        return [looks[0]]

    live.port.empty = empty  # type: ignore[method-assign]


def test_what_is_still_at_the_port_belongs_to_it(live: Live) -> None:
    """The trainer's last word has come before the packets of its last iteration were taken."""
    rx_thread(live, lambda: None, lambda: None, lambda: live.traffic(0))
    wind_up(live.session, live.take)
    assert live.ended == [(0, True, [])]


def test_a_look_that_had_begun_before_proves_nothing(live: Live) -> None:
    """Packets may have come after it looked: it is the one after that which counts."""
    live.port.empty = iter([[7], [8], [8], [9], [9]]).__next__  # type: ignore[method-assign]
    polls: list[int] = []
    poll = live.session.poll

    def counted():  # type: ignore[no-untyped-def]
        polls.append(1)
        if len(polls) == 2:
            live.traffic(0)
        return poll()

    live.session.poll = counted  # type: ignore[method-assign]
    wind_up(live.session, live.take)
    assert live.ended == [(0, True, [])] and len(polls) > 2


def test_a_thread_that_gets_no_time_is_waited_for_so_long(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]

    def rest(seconds: float) -> None:
        now[0] += 0.25

    monkeypatch.setattr(of_live, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=rest))
    live.port.empty = lambda: [7]  # type: ignore[method-assign]
    wind_up(live.session, live.take)
    assert 60.0 <= now[0] <= 60.5
    assert [published for _, published, _ in live.ended] == [False] * len(live.ended)


def test_without_a_port_nothing_is_waited_for(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(of_live, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=slept.append))
    wind_up(live.session, live.take)
    assert live.ended == [] and slept == []
