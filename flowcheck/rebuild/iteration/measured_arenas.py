"""A mirror's arenas, of which what closes is measured before its arena is free again (telemetry).

    arenas = MeasuredArenas(plan, sources, names, passes=...)
    arenas.closed(versions)             the iteration that was judged last was published or not: its pass begins
    arenas.take()                       what was measured since this was asked last

A pass begins when the version is published, so that version is never later for it. Until it has ended the arena is
held, nothing closes, and no bucket counts as covered: the next version could take the slot of the version before, which
the pass reads. So it is the next iteration that waits, if it is complete before the pass has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.iteration.measuring import Measured, Measuring, Passes, Versions
from flowcheck.rebuild.iteration.scheduler import Source
from flowcheck.rebuild.iteration.wire_arenas import WireArenas
from flowcheck.rebuild.plan import JobPlan

__all__ = ["MeasuredArenas"]


class MeasuredArenas(WireArenas):
    """passes: which iterations are measured, and by how many threads. on_end(iteration): its pass has ended."""

    def __init__(
        self, plan: JobPlan, sources: Sequence[Source], names: Sequence[str], *, passes: Passes,
        sources_wait: bool = False,
    ) -> None:
        super().__init__(plan, sources, names, sources_wait=sources_wait)
        self._measuring = Measuring(plan.job, (plan.buckets_0, plan.buckets), passes)
        self._judged: Judged | None = None  # is due, and its pass has not ended
        self._held = range(0)  # is to be released when it has
        self._found: list[Measured] = []
        self.on_end: Callable[[int], None] = lambda iteration: None

    def closed(self, versions: Versions | None) -> None:
        """versions: before and after the step, if both are here. Until the next look they stay as they are."""
        if self._judged is not None:
            iteration = self._judged.verdict.iteration
            self._measuring.begin(self._judged, self.region(iteration), versions)

    def take(self) -> list[Measured]:
        found, self._found = self._found, []
        return found

    def settle(self) -> None:
        """Wait for the pass that is under way."""
        self._look(-1)

    def end(self) -> None:
        """Let go of the workers. May be called twice."""
        self._measuring.close()

    def _look(self, seconds: float = 0) -> bool:
        """Did a pass end?"""
        measured = self._measuring.ended(seconds)
        if measured is None:
            return False
        self._judged = None
        self._found.append(measured)
        held, self._held = self._held, range(0)
        if held:
            super().release(held)
        self.on_end(measured.iteration)
        return True

    # -- as an ArenaSource --

    @property
    def oldest(self) -> int:
        return super().oldest + len(self._held)

    @property
    def open(self) -> range:
        return range(self.oldest, self.begun + 1)

    def poll(self) -> bool:
        ended = self._look()
        return super().poll() or ended

    def due(self) -> range:
        self._look()
        return range(0) if self._measuring.busy else super().due()

    def close(self, due: range) -> None:
        self.settle()
        super().close(due)

    def judge(self, iteration: int, *, record: bool, follows: bool) -> Judged:
        judged = super().judge(iteration, record=record, follows=follows)
        self._judged = judged if self._measuring.wants(judged) else None
        return judged

    def covered_places(self, iteration: int) -> np.ndarray:
        found = super().covered_places(iteration)
        return np.zeros_like(found) if self._measuring.busy else found

    def release(self, due: range) -> None:
        if self._judged is not None and self._judged.verdict.iteration in due:
            self._held = due
        else:
            super().release(due)

    def finish(self) -> None:
        self.settle()
        super().finish()
