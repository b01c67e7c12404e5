"""Other nodes are asked for what an iteration lacks, before it is judged.

    repair = PeerRepair(follower, arenas, peers);  follower.repairs.append(repair)

Once an iteration may close although something is missing, nothing more comes over the streams (iteration/holes.py).
Then it stays open until every peer has answered, or their time is over: polled, and never waited for. Streams may still
place into it meanwhile. What was given is placed when it has closed (iteration/given.py), and what nobody has goes on
to the trainers (range_repair.py). Peers are asked only for the iteration that the version waits for, and not for one
that was given up.

A version that holds what peers gave is `unverified` and marked, and so are those after it until a checksum of the
trainer has matched: an engine has checked these bytes, but not this one.

Every iteration that closes is shown to the peers: what its own streams have brought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.iteration.given import NOTHING, Answer, Hearsay, open_holes, place, question
from flowcheck.rebuild.iteration.intervals import intervals, without
from flowcheck.rebuild.iteration.wire_arenas import WireArenas
from flowcheck.rebuild.version.building import Built
from flowcheck.rebuild.version.events import Event, FromPeers
from flowcheck.rebuild.version.follower import Follower
from flowcheck.rebuild.version.records import StepRecord

__all__ = ["PeerRepair", "Peers"]


class Peers(Protocol):
    """Other nodes that mirror the same group. None of these waits for any of them."""

    def ask(self, iteration: int, spans: Sequence[tuple[int, int]]) -> None:
        """All of them at once, for (first byte, bytes) of an iteration's region."""

    def answers(self) -> list[Answer] | None:
        """What has come. None: somebody has not answered, and there is time left."""

    @property
    def failed(self) -> Mapping[str, str]:
        """Who has given nothing when `answers` said what has come, and why."""

    def distrust(self, refused: Mapping[str, str]) -> None:
        """What these gave is not used, and why: they are not asked for a while."""

    def show(
        self, iteration: int, region: np.ndarray, there: np.ndarray, alive: Callable[[], bool],
        closed: StepRecord | None = None,
    ) -> None:
        """They may read these runs of cells as long as `alive` says so, from any thread. closed: the iteration has, and
        this is what its step was made with; None: something of it may still come."""

    def hide(self, iteration: int) -> None:
        """They may read nothing of this iteration, nor of those before it, any more."""

    def close(self) -> None:
        """Let go of them."""


class PeerRepair:
    """A Repair (repair.py has what the methods mean). arenas: the follower's. peers: None: there are none, but a
    version may have come from one. hearsay: of the version that is current, or held."""

    def __init__(self, follower: Follower, arenas: WireArenas, peers: Peers | None) -> None:
        self._follower, self._arenas, self._peers = follower, arenas, peers
        self.hearsay = Hearsay()
        self._asked = -1  # the iteration that peers were asked for last
        self._spans: list[tuple[int, int]] = []
        self._answers: list[Answer] | None = None  # of that, once their time is over

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()

    # -- before it closes --

    def wants(self, iteration: int) -> bool:
        peers, chain, arenas = self._peers, self._follower.chain, self._arenas
        if peers is None or iteration != chain.next or not chain.ready or iteration in arenas.given_up:
            return False
        if arenas.is_whole(iteration):
            return False
        if self._asked != iteration:
            self._asked, self._answers = iteration, []
            self._spans = question(arenas.plan, iteration, open_holes(arenas.engine, arenas.plan, iteration))
            self._show(peers, iteration)  # they may lack something of it themselves, and wait for this node
            if self._spans:
                self._answers = None
                peers.ask(iteration, self._spans)
        if self._answers is None:
            self._answers = peers.answers()
        return self._answers is None

    def passed(self, iteration: int) -> bool:
        return False

    def builds(self, iteration: int) -> bool:
        """With what peers have given, it may be."""
        return self._asked == iteration and bool(self._answers)

    def awaits(self, iteration: int) -> tuple[bool, list[Event]]:
        return False, []

    # -- when it has closed --

    def fill(self, iteration: int) -> Iterator[Event]:
        given, peers, arenas = NOTHING, self._peers, self._arenas
        if peers is not None and iteration not in arenas.given_up:
            peers.hide(iteration - arenas.capacity)  # its arena is this one's
            if self._asked == iteration and self._spans and self._answers is not None:
                given = place(arenas.engine, arenas.plan, iteration, self._answers)
                failed = {**peers.failed, **given.refused}
                peers.distrust(given.refused)
                yield FromPeers(iteration, sum(length for _, length in self._spans), given.cells, failed)
            record = self._follower.records.of(iteration)
            self._show(peers, iteration, given.void, record or StepRecord())
        arenas.collector.given = given
        arenas.collector.hearsay = self.hearsay.after(self._follower.clock.number(iteration), given)

    def _show(
        self, peers: Peers, iteration: int, void: np.ndarray = NOTHING.void, closed: StepRecord | None = None
    ) -> None:
        engine, cells = self._arenas.engine, -(-self._arenas.plan.engine.gradient_bytes // 8)
        lacking = np.concatenate((engine.missing(iteration, 0, cells), void))
        there = without(intervals([(0, cells)]), intervals(lacking))
        end = iteration + engine.config.arenas
        peers.show(iteration, engine.region(iteration), there, lambda: bool(engine.begun < end), closed)

    def may_build(self, judged: Judged) -> bool:
        return False

    def after(self, judged: Judged, built: Built) -> tuple[Judged, list[Event]]:
        matched = built.differs == "" and not judged.evidence.stale
        self.hearsay = Hearsay() if matched else self._arenas.collector.hearsay
        return judged, []

    def lost(self, last: int, why: str) -> Event | None:
        return None

    def started(self) -> None:
        self.hearsay = Hearsay()

    def ended(self) -> None:
        """What the version held stays known: it may be why it has diverged."""
