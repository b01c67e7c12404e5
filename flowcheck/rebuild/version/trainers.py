"""What trainers have said of iterations, and what may still come of them.

    trainers = Trainers(plan, clock, record_seconds)
    trainers.keep(iteration, record, rank, ...)      a step record
    trainers.announce(iteration), withdraw()         a state is on its way, or will not come
    trainers.holds_up(iteration)                     does it stay open for that state?
    trainers.lack_record(iteration)                  may its record still come, and is it wanted?

One thread.
"""

from __future__ import annotations

from flowcheck.job.clock import Clock
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.events import Waiting
from flowcheck.rebuild.version.records import RanksDiffer, RecordWait, StepRecord, StepRecords

__all__ = ["Trainers"]

RECORDS_AHEAD = 256  # records kept of iterations whose traffic has not closed yet
RECORDS_BYTES = 1 << 30  # of their buffers, or as many as there are arenas


class Trainers:
    """clock: the trainers'. record_seconds: as of Policy.

    coming: a state before this iteration is on its way; None: none is.
    hurries: nothing more comes from trainers, so no iteration waits for a word of theirs.
    contradicted: why a rank's record contradicts what was built with; "": none does.
    """

    def __init__(self, plan: JobPlan, clock: Clock, record_seconds: float) -> None:
        self.records = StepRecords(plan.job, clock)
        self.coming: int | None = None
        self.hurries = False
        self.contradicted = ""
        self.wait = RecordWait(record_seconds)
        self._clock, self._arenas, self._declared = clock, plan.engine.arenas, bool(plan.job.step_values)
        self._ahead = False  # records run ahead of the traffic, and that was said

    def announce(self, iteration: int) -> None:
        """A state before `iteration` is being sent: that iteration and what follows stay open until it is here."""
        self.coming = iteration

    def withdraw(self) -> None:
        """The state that was announced will not come."""
        self.coming = None

    def hurry(self) -> None:
        """Nothing more comes from trainers."""
        self.hurries, self.coming = True, None

    def holds_up(self, iteration: int) -> bool:
        """Does an iteration stay open because a state is on its way that may come before it?"""
        return self.coming is not None and iteration >= self.coming

    def lack_record(self, iteration: int) -> bool:
        return self._declared and iteration not in self.records

    def begin(self) -> None:
        """Versions begin."""
        self._ahead = False

    def keep(
        self, iteration: int, record: StepRecord, rank: int, oldest: int, awaited: int | None
    ) -> list[Waiting]:
        """Keep a step record. oldest: iterations before it have closed. awaited: the iteration that the current version
        waits for; None: no version does. Raises UserError where the record cannot be believed."""
        nbytes = sum(tensor.nbytes for tensor in record.buffers.values())
        ahead = min(RECORDS_AHEAD, max(self._arenas, RECORDS_BYTES // max(nbytes, 1)))
        first = max(oldest, awaited or 0)  # a state may be far ahead of what still has to close
        if iteration > first + ahead:
            if self._ahead:
                return []
            self._ahead = True  # a mirror that is down; what these belong to will not be complete either
            return [Waiting(
                first, f"no packets of it, while a record says that iteration {self._clock.number(iteration)} is over;"
                f" records further than {ahead} ahead are not kept",
            )]
        self._ahead = False
        try:
            self.records.keep(iteration, record, rank, oldest)
        except RanksDiffer as error:
            if not error.closed or awaited is None:
                raise
            self.contradicted = error.what  # nobody knows whose state the versions since then are
        return []
