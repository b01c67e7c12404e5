"""How soon after its last packet a version is there, and what it costs to have assumed wrongly: decision 0013.

    .venv/bin/python -P benchmarks/early_updates.py [LAPS]

A live session of Adam takes iterations of LAPS times 64 MB of gradients (default 8) from a ring, as fast as it can. The
step record comes with the last packet. Milliseconds from the last packet that was taken to the published version, per
GB of gradients, 10th percentile, median and 90th of some 20 iterations, of 5 that were built again:

    early        the record says what the one before said: only the last buckets are left
    at_record    each record clips otherwise: all buckets are applied now, by workers
    rebuilt      records agree, and the one that is measured does not: the slot is dropped and built again
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch

from flowcheck.control.protocol import Record
from flowcheck.node.groups.session import LiveSession
from flowcheck.rebuild.version.events import Closed
from lab.bench.feed import Feed, Window, drain

BETWEEN = 10  # records that agree again before the next one that does not
KINDS = {"early": 21, "at_record": 21, "rebuilt": 5}


class Contender:
    """A session of its own, with one worker beside the thread that places."""

    def __init__(self, window: Window, laps: int, threads: int) -> None:
        plan = window.plan(laps, arenas=3)
        plan.job.step_values = ["lr"]
        assert plan.job.optimizer is not None
        plan.job.optimizer.name, plan.job.optimizer.rounding = "adam", "torch-cuda-foreach"
        self._laps, self._gb = laps, plan.engine.gradient_bytes / 1e9
        self._feed = Feed(window)
        self._session = LiveSession(plan, [self._feed], slots=2, threads=threads, record_seconds=60.0)
        self._iteration = 0
        list(self._session.state(0, {entry.name: torch.zeros(entry.shape) for entry in plan.job.model}, {}))

    def step(self, clip: float) -> tuple[float, Closed]:
        """Milliseconds per GB from the last packet of the next iteration to its version."""
        closed: list[Closed] = []

        def poll() -> bool:
            closed.extend(event for event in self._session.poll() if isinstance(event, Closed))
            return self._session.moved

        for _ in range(self._laps):
            self._feed.fill()
            drain(self._feed, poll)
        begin = time.perf_counter()
        list(self._session.record(Record(self._iteration, clip=clip), {}, 0))
        while not closed:
            poll()
        taken = time.perf_counter() - begin
        assert closed[0].published and closed[0].iteration == self._iteration, closed
        self._iteration += 1
        return 1e3 * taken / self._gb, closed[0]

    def close(self) -> None:
        self._session.close()


def taken(session: Contender, kind: str) -> Iterator[float]:
    for t in range(KINDS[kind]):
        clips = {"early": [1.0], "at_record": [1 - 1e-3 * t], "rebuilt": [*[1 - 1e-3 * t] * BETWEEN, 0.5]}[kind]
        for clip in clips:
            found, closed = session.step(clip)
        if t > 2 or kind == "rebuilt":
            wanted = ("early", 0) if kind == "early" else ("at_record", int(kind == "rebuilt"))
            if (closed.updates, closed.rebuilt) == wanted:
                yield found


def main() -> None:
    laps, window = int(sys.argv[1]) if len(sys.argv) > 1 else 8, Window(16)
    for threads in (1, 0):
        for kind in KINDS:
            session = Contender(window, laps, threads)
            try:
                found = sorted(taken(session, kind))
            finally:
                session.close()
            low, middle, high = (found[int(part * (len(found) - 1))] for part in (0.1, 0.5, 0.9))
            print(f"{threads} workers {kind:10} {low:7.1f} {middle:7.1f} {high:7.1f} ms per GB, {len(found)} of them")


if __name__ == "__main__":
    main()
