"""A follower that asks other nodes for what an iteration lacks, before it is judged.

    follower = HealedFollower(plan, sources, names, policy, ..., peers=peers)

Once an iteration may close although something is missing, nothing more comes over the streams (iteration/holes.py).
Then it stays open until every peer has answered, or their time is over: polled, and never waited for. Streams may still
place into it meanwhile. What was given is placed when it has closed (iteration/given.py), and what nobody has goes on
to the trainers (going_on.py). Peers are asked only for the iteration that the version waits for, and not for one that
was given up.

A version that holds what peers gave is `unverified` and marked, and so are those after it until a checksum of the
trainer has matched: an engine has checked these bytes, but not this one.

Every iteration that closes is shown to the peers: what its own streams have brought.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.iteration.given import NOTHING, Answer, Hearsay, open_holes, place, question
from flowcheck.rebuild.iteration.intervals import intervals, without
from flowcheck.rebuild.iteration.scheduler import IDLE_SECONDS
from flowcheck.rebuild.version.building import Built
from flowcheck.rebuild.version.events import Event, FromPeers
from flowcheck.rebuild.version.going_on import PartialFollower
from flowcheck.rebuild.version.records import StepRecord
from flowcheck.rebuild.version.replica import JobReplica

__all__ = ["HealedFollower", "Peers"]


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


class HealedFollower(PartialFollower):
    """peers: None: there are none. hearsay: of the version that is current, or held."""

    def __init__(self, *given: Any, peers: Peers | None = None, **named: Any) -> None:
        super().__init__(*given, **named)
        self.peers = peers
        self._asked = -1  # the iteration that peers were asked for last
        self._spans: list[tuple[int, int]] = []
        self._answers: list[Answer] | None = None  # of that, once their time is over
        self.hearsay = Hearsay()

    def start(self, replica: JobReplica, iteration: int) -> None:
        self.hearsay = Hearsay()
        super().start(replica, iteration)

    def go_on_with(
        self, step: int, optimizer: Mapping[str, Any], apart: Mapping[str, torch.Tensor], source: str
    ) -> int:
        hearsay = Hearsay(version=f"the version of step {step} came from {source}")
        iteration = super().go_on_with(step, optimizer, apart, str(hearsay))
        self.hearsay = hearsay
        return iteration

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()
        super().close()

    # -- asking --

    def _must_wait(self, iteration: int) -> tuple[bool, list[Event]]:
        if self.peers is not None and self._waits_for(self.peers, iteration):
            return True, []
        return super()._must_wait(iteration)

    def _waits_for(self, peers: Peers, iteration: int) -> bool:
        """Are peers at what this iteration lacks? It may close."""
        if iteration != self.next or not self._ready or iteration in self.engine.given_up:
            return False
        if self.scheduler.is_whole(iteration):
            return False
        if self._asked != iteration:
            self._asked, self._answers = iteration, []
            self._spans = question(self.plan, iteration, open_holes(self.engine, self.plan, iteration))
            self._show(peers, iteration)  # they may lack something of it themselves, and wait for this node
            if self._spans:
                self._answers = None
                peers.ask(iteration, self._spans)
        if self._answers is None:
            self._answers = peers.answers()
        return self._answers is None

    def _has_room(self, iteration: int) -> bool:
        """With what peers have given its version may be built."""
        given = self._asked == iteration and self._answers
        if not given or self.replica is None or not self.replica.ready:
            return super()._has_room(iteration)
        return self._builder.reserve(self.replica, iteration)

    def _show(
        self, peers: Peers, iteration: int, void: np.ndarray = NOTHING.void, closed: StepRecord | None = None
    ) -> None:
        engine, cells = self.engine, -(-self.plan.engine.gradient_bytes // 8)
        lacking = np.concatenate((engine.missing(iteration, 0, cells), void))
        there = without(intervals([(0, cells)]), intervals(lacking))
        end = iteration + engine.config.arenas
        peers.show(iteration, engine.region(iteration), there, lambda: bool(engine.begun < end), closed)

    # -- one iteration --

    def _close(self, due: range) -> Iterator[Event]:
        """At the end of the traffic nobody polls any more, and there is nothing else to do."""
        while self._over and self.peers is not None and self._waits_for(self.peers, due[0]):
            time.sleep(IDLE_SECONDS)
        yield from super()._close(due)

    def judge(self, iteration: int) -> Iterator[Event]:
        given = NOTHING
        if self.peers is not None and iteration not in self.engine.given_up:
            self.peers.hide(iteration - self.engine.config.arenas)  # its arena is this one's
            if self._asked == iteration and self._spans and self._answers is not None:
                given = place(self.engine, self.plan, iteration, self._answers)
                failed = {**self.peers.failed, **given.refused}
                self.peers.distrust(given.refused)
                yield FromPeers(iteration, sum(length for _, length in self._spans), given.cells, failed)
            self._show(self.peers, iteration, given.void, self.records.of(iteration) or StepRecord())
        self.collector.given = given
        self.collector.hearsay = self.hearsay.after(self.clock.number(iteration), given)
        yield from super().judge(iteration)

    def _end(
        self, judged: Judged, counts: dict[str, int], stands: bool, built: Built | None = None
    ) -> Iterator[Event]:
        if stands:
            stale = self.partial is not None and bool(self.partial.stale)
            matched = built is not None and built.differs == "" and not stale
            self.hearsay = Hearsay() if matched else self.collector.hearsay
        yield from super()._end(judged, counts, stands, built)

    def _publish(self, judged: Judged, built: Built) -> bool:
        if judged.evidence.from_peers:  # nor does what peers gave
            self.verified = None
        return super()._publish(judged, built)
