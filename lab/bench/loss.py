"""bench loss: how fast the live node drains its ring when one packet in 10^5 is lost, against a wire without loss.

Both contenders are the poll of a node's follower, called again and again: rings, engine, what may close, evidence and
verdict, on one thread. They have no replica: what is measured ends where the update begins. A session lives as
long as the bench, so that a round finds it in its steady state: with losses an iteration stays open until its
arena is needed, and so does the question whether it is complete.

    loss.MODEL        Mpkt/s of the session with losses, against the one without; MODEL: bytes of gradients

Every closed iteration's missing elements are compared with what was lost.
"""

from __future__ import annotations

import time
from collections import Counter

from flowcheck.rebuild.iteration.wire_arenas import WireArenas
from flowcheck.rebuild.version.events import Closed
from flowcheck.rebuild.version.follower import Follower
from flowcheck.rebuild.version.policy import Policy
from lab.bench.feed import MTU, Feed, Window, drain, flows_for
from lab.bench.rows import Row, alternate

__all__ = ["run"]

#: Laps of the window in an iteration (64 MB of gradients each), and iterations in a round.
MODELS = {"128MB": (2, 8), "1GB": (16, 2)}
EVERY = 100_000
TARGET = 0.95


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """One row per model. Less than 256 MB of `ring_bytes` makes the models smaller."""
    window = Window(flows_for(ring_bytes))
    return [_row(window, model, *size, rounds) for model, size in MODELS.items()]


def _row(window: Window, model: str, laps: int, iterations: int, rounds: int) -> Row:
    sessions = {"all": Contender(window, laps, None), "lossy": Contender(window, laps, EVERY)}
    names = {name: (lambda session=session: session.measure(iterations)) for name, session in sessions.items()}
    seconds = alternate(names, rounds)
    assert all(session.next for session in sessions.values()), "no iteration has closed"
    rate = {name: [1e-6 / s for s in taken] for name, taken in seconds.items()}
    return Row.of(f"loss.{model}", "Mpkt/s", rate["lossy"], rate["all"], TARGET)


class Contender:
    """A follower on a wire that loses every `every`-th packet, None: none."""

    def __init__(self, window: Window, laps: int, every: int | None) -> None:
        self._laps, self._every, self._packets = laps, every, window.packets
        self.feed = Feed(window)
        self.lost: Counter[int] = Counter()  # packets by iteration
        self.closed: list[Closed] = []
        self.next = 0  # the iteration that closes next
        plan = window.plan(laps)
        arenas = WireArenas(plan, [self.feed], ["ring"])
        self.session = Follower(plan, arenas, Policy.live(0.0))
        for arena in range(plan.engine.arenas):  # the first touch takes long
            arenas.region(arena)[:] = 0

    def poll(self) -> bool:
        self.closed += [event for event in self.session.poll() if isinstance(event, Closed)]
        return self.session.moved

    def measure(self, iterations: int) -> float:
        """Seconds per packet over so many iterations."""
        seconds, packets = 0.0, 0
        for _ in range(iterations * self._laps):
            packets += self.feed.fill(self.next_lost())
            begin = time.perf_counter()
            drain(self.feed, self.poll)
            seconds += time.perf_counter() - begin
        self.check()
        return seconds / packets

    def next_lost(self) -> range:
        """Which packets of the lap to come are lost: those in the middle of so many, counted from the beginning."""
        if self._every is None:
            return range(0)
        first = self.feed.laps * self._packets
        lost = range((self._every // 2 - first) % self._every, self._packets, self._every)
        self.lost[self.feed.laps // self._laps] += len(lost)
        return lost

    def check(self) -> None:
        """What is missing is what was lost."""
        for closed in self.closed:
            lost = self.lost[closed.iteration] * MTU // 4
            assert closed.iteration == self.next and closed.missing == ({"lost": lost} if lost else {}), closed
            self.next += 1
        self.closed.clear()
