"""When a version is built with what peers have given, and what is shown to them (node/test_live_peers.py has all of
it together)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from flowcheck.rebuild.iteration.given import Answer
from flowcheck.rebuild.version.events import Closed, FromPeers, Waiting
from flowcheck.rebuild.version.follower import NO_ROOM
from flowcheck.rebuild.version.peer_repair import PeerRepair
from flowcheck.rebuild.version.policy import Policy
from flowcheck.rebuild.version.records import StepRecord
from updater.errors import NoFreeSlot

from ..fake_engine import FakeSource, Packet, whole
from .followed import FakeReplica, Followed

COME = 10  # cells of iteration 2; seven of its buckets do not


class Peers:
    """said: what they answer. shown: (iteration, cells that are there, may they be read) as it was shown."""

    failed: dict[str, str] = {}

    def __init__(self, said: list[Answer] | None) -> None:
        self.said = said
        self.shown: list[tuple[int, list[list[int]], Callable[[], bool]]] = []
        self.closed: list[Any] = []

    def ask(self, iteration: int, spans: Sequence[tuple[int, int]]) -> None: ...

    def answers(self) -> list[Answer] | None:
        return self.said

    def distrust(self, refused: Any) -> None: ...

    def show(self, iteration: int, region: np.ndarray, there: np.ndarray, alive: Any, closed: Any = None) -> None:
        self.shown.append((iteration, there.tolist(), alive))
        self.closed.append(closed)

    def hide(self, iteration: int) -> None: ...


class Full(FakeReplica):
    """Readers pin what there is, as long as it is full."""

    full = True

    def begin(self, iteration: int, values: Any) -> None:
        if self.full:
            raise NoFreeSlot("no")
        super().begin(iteration, values)


def asked(patch: pytest.MonkeyPatch, peers: Peers, *, full: bool = True, first: int = 0) -> tuple[Followed, Full]:
    """Iteration 2 has come in part, from cell `first` on, and may close: peers were asked for the rest of it."""
    at = Followed(
        patch, Policy.live(10.0), FakeSource([Packet(2, past=3, cells=(first, COME)), *whole(3, 4)], open=True))
    at.follower.repairs.append(PeerRepair(at.follower, at.arenas, peers))
    replica = Full(2)
    replica.ready, replica.full = True, full
    at.follower.start(replica, 2)  # type: ignore[arg-type]
    at.record(2, clip=0.25)
    at.look()
    return at, replica


def test_a_version_of_what_peers_have_given_waits_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    at, replica = asked(monkeypatch, Peers([Answer("b", ((0, bytes(8 * 21)),))]))
    at.now += 1e6
    at.look()
    assert [one for one in at.events if isinstance(one, Waiting)] == [Waiting(2, NO_ROOM)] and at.engine.oldest == 2
    replica.full = False
    at.take([*at.follower.poll(), *at.follower.poll()])
    [given] = [one for one in at.events if isinstance(one, FromPeers)]
    [closed] = [one for one in at.events if isinstance(one, Closed)]
    assert given.filled == {"b": 7} and closed.iteration == 2 and closed.published


def test_while_peers_are_at_it_an_iteration_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(None)
    at, _ = asked(monkeypatch, peers, full=False)
    assert at.look() == [] and at.engine.oldest == 2 and at.said == []
    peers.said = []
    assert at.look()[:2] == ["not 2", "lost"], "and it is as without peers where they have nothing"


def test_what_is_not_built_waits_for_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    at, _ = asked(monkeypatch, Peers([]))
    at.look()
    assert [one for one in at.events if isinstance(one, Waiting)] == [] and at.engine.oldest > 2


def test_peers_are_shown_what_the_streams_have_brought_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(None)
    at, _ = asked(monkeypatch, peers, full=False, first=1)
    [(iteration, there, alive)] = peers.shown
    assert (iteration, there, peers.closed) == (2, [[1, COME]], [None]), "the first time while something may still come"
    peers.said = []
    at.look()
    assert peers.shown[1][:2] == (2, [[1, COME]]) and peers.closed[1] == StepRecord(clip=0.25), "and when it has closed"
    at.engine.begun = 3
    assert alive()
    at.engine.begun = 4  # its arena is another iteration's
    assert not alive()
