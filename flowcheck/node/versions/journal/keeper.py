"""The journal of one job, as its follower sees it: each iteration whose verdict stands goes into a ring of files.

    keeper = Keeper(folder, room, job, plan, clock, say)     opened on a thread: making files takes long
    follower.keeping = keeper
    keeper.missed(first, last, why)                          iterations that it was never given
    keeper.look()                                            again and again: what became of those it was given
    keeper.close()                                           nothing more; a disk that hangs is left behind

What is not in it is a hole, and an event says why. Nobody waits for the disk: an arena waits while its bytes are copied
in memory. The group's thread.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable

import numpy as np

from flowcheck.durable import make_directory, remove_tree, write_atomic
from flowcheck.errors import FlowcheckError, of_the_machine
from flowcheck.job.clock import Clock
from flowcheck.journal.ring import Hole, RingWriter, Written
from flowcheck.node.versions.journal.entries import Heads
from flowcheck.node.versions.journal.folders import Folder, new_line
from flowcheck.node.versions.journal.job_text import JobText
from flowcheck.node.versions.journal.log_folder import line_in
from flowcheck.node.versions.journal.log_shelf import makes_steps
from flowcheck.node.versions.journal.room import Room
from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.records import StepRecord

__all__ = ["Keeper"]

READS_SECONDS = 0.0005  # between two looks whether a copy in memory has ended
END_SECONDS = 5.0  # that the disk has for what was offered
OPENING = "the journal's files are still being made"


class Keeper:
    """A Keeping (rebuild/version/keeping.py). job: of which the entries are, as it is read again. say: events of the
    group. after: what has to have ended before the files are opened. line_of_start: of a log, "": it is not known.

    line: of the versions now. matches: checksums of the trainer that have matched. hole: the newest iteration that is
    not in it, -1: none. written: the newest that came into it. room: as it is, once `opened`.
    """

    def __init__(
        self, folder: Folder, room: Room, job: JobText, plan: JobPlan, clock: Clock, say: Callable[..., None],
        after: threading.Thread | None = None, line_of_start: str = "",
    ) -> None:
        self.folder, self.room, self._clock, self._say = folder, room, clock, say
        self._line_of_start = line_of_start
        self.job = JobText.of(job.text())
        self._heads = Heads(plan, job.plan)
        self.line, self.matches, self.hole, self.written = new_line(), 0, -1, -1
        self._given = -1  # the newest iteration that was offered, or is a hole
        self._writer: RingWriter | None = None
        self._came: RingWriter | Exception | None = None  # of the thread that opens it
        self._why = OPENING
        self._closed = False
        self._thread = threading.Thread(target=self._open, args=(after,), daemon=True, name="flowcheck journal")
        try:
            self._thread.start()
        except RuntimeError as error:  # there is no thread to be had
            self._came = error

    # -- a Keeping --

    def begin(self) -> None:
        self.line = new_line()

    @property
    def reads(self) -> bool:
        return self._writer is not None and not self._closed and self._writer.reads(self._given)

    def offer(self, judged: Judged, record: StepRecord | None, region: np.ndarray) -> None:
        iteration = judged.verdict.iteration
        number, self._given = self._clock.number(iteration), self._clock.number(iteration)
        if self._writer is None:
            self._lack(number, number, "closed" if self._why != OPENING else "opening", self._why)
            return
        head = self._heads.head(number, iteration, self.line, record, judged.verdict.unproven, self.matches)
        self._writer.offer(number, head, region, self._heads.spans(iteration))

    # -- the group's thread --

    def missed(self, first: int, last: int, why: str) -> None:
        """Iterations, by the trainer's numbers, that were not offered."""
        first = max(first, self._given + 1)
        if first <= last:
            self._given = last
            self._lack(first, last, "not_proven", why)

    def look(self) -> None:
        came, self._came = self._came, None
        if isinstance(came, RingWriter):
            self._opened(came)
        elif came is not None:
            self._why = came.what if isinstance(came, FlowcheckError) else str(came)
            where = f"{came.where}: " if isinstance(came, FlowcheckError) and came.where else ""
            self._say("problem", why=f"no journal is kept: {where}{self._why}", about="journal")
        self._hear(self._writer.taken() if self._writer is not None else ())

    @property
    def opened(self) -> bool:
        """Are its files there?"""
        return self._writer is not None

    def keep(self, oldest: int) -> None:
        """Entries before this iteration are of no use any more."""
        if self._writer is not None:
            self._writer.keep(oldest)

    def close(self) -> threading.Thread:
        """Returns what ends it, which nobody has to wait for."""
        while self.reads:
            time.sleep(READS_SECONDS)
        self._closed = True
        thread = threading.Thread(target=self._end, args=(self._writer,), daemon=True, name="flowcheck journal's end")
        self._writer, self._why = None, "the journal is closed"
        thread.start()
        return thread

    # -- inside --

    def _opened(self, writer: RingWriter) -> None:
        self._writer = writer
        cut = writer.geometry
        self.room = Room(cut.places * cut.files * cut.place_bytes, cut.places * cut.files)
        self._say("journal", path=str(self.folder.path), entries=self.room.entries, bytes=self.room.ring,
                  entry=cut.place_bytes, back=self.room.back, how=writer.how, found=len(writer.found),
                  why="; ".join(writer.replaced))

    def _hear(self, said: Iterable[Written | Hole]) -> None:
        for one in said:
            if isinstance(one, Written):
                self.written = one.number
                self._say("journaled", iteration=one.number, bytes=one.nbytes, seconds=round(one.seconds, 6))
            else:
                self._lack(one.number, one.number, one.cause, one.why)

    def _lack(self, first: int, last: int, cause: str, why: str) -> None:
        self.hole = max(self.hole, last)
        self._say("hole", iteration=first, last=last, cause=cause, why=why)

    def _open(self, after: threading.Thread | None) -> None:
        """On a thread of its own: a disk may hang, and files of many GB are made whole before one is written to."""
        if after is not None:
            after.join()
        try:
            folder = self.folder
            make_private(folder)
            if JobText.read(folder.job) != self.job:
                self._clear()
                make_private(folder)
                write_atomic(folder.job, self.job.text().encode())
                if shutil.disk_usage(folder.path).free < self.room.ring:
                    remove_tree(folder.before.path)  # there is no room for both
            make_directory(folder.ring)
            writer = RingWriter(folder.ring, self.room.ring, self._heads.most)
        except Exception as error:  # also of a library: it must be said
            self._came = of_the_machine(error) or error
            return
        self._came = writer

    def _clear(self) -> None:
        """What is in the folder is of another joining. A log of the same start makes steps that are exact, and stays
        until this one makes some. One of another start has other iterations of the same numbers, maybe. Raises
        OSError."""
        folder, line = self.folder, self._line_of_start
        if not line or line_in(folder.before.path) != line:
            remove_tree(folder.before.path)
        if line and line_in(folder.path) == line and makes_steps(folder.path):
            folder.set_aside()
        else:
            remove_tree(folder.path)

    def _end(self, writer: RingWriter | None) -> None:
        self._thread.join()
        came = writer if writer is not None else self._came
        if isinstance(came, RingWriter):
            self._hear(came.close(END_SECONDS))


def make_private(folder: Folder) -> None:
    """Nobody else gets into it, whatever may be read of what the node writes elsewhere. Raises OSError."""
    for path in (folder.path.parents[2], folder.path.parents[1], folder.path.parent, folder.path):
        path.mkdir(0o700, parents=True, exist_ok=True)
