"""What goes from a node's journals to its store: now and then a base, and between two bases the gradients.

    uploads = JournalUploads(objects, root, node, wants, say, turns)     root: of the journals
    uploads.look(), .hung(), .join(seconds)                              as of the Persister (worker.py)
    uploads.covers(offer)                                                versions like this one need no other way

It reads the files of the journals, as anybody may, so neither the journal nor a version waits for a store. A thread for
each run: it writes a base if one is due, then the entries that have come since, and again a second later. What the
journal has overwritten before it was here is a gap; no step is made across it, and the next base of the journal goes
to the store.

Where a journal has fallen behind or is closed, `covers` says so, and whole versions are written as without one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from flowcheck.ask.offer import Offer
from flowcheck.checkpoint.deltas import PART_BYTES, Chain, Deltas, reach
from flowcheck.checkpoint.directory import read_step_manifest
from flowcheck.checkpoint.objects import Objects
from flowcheck.checkpoint.store import Lane
from flowcheck.control.version import Version
from flowcheck.errors import FlowcheckError, UserError, said_of
from flowcheck.journal.entry_file import image_of
from flowcheck.journal.reader import RingReader
from flowcheck.node.store.turns import FIRST_PAUSE, LONGEST_PAUSE, Turns, Wants, lane_name
from flowcheck.node.versions.held import Gone
from flowcheck.node.versions.journal.entries import line_of
from flowcheck.node.versions.journal.folders import Folder, Place, folder_of, folders_in
from flowcheck.node.versions.journal.job_text import JobText

__all__ = ["JournalUploads"]

ROUND_SECONDS = 1.0
BEHIND = 16  # steps that a journal may be behind the newest version
Entry = tuple[int, Iterator[memoryview]]


@dataclass
class _Line:
    """Of the store. base: the newest version of it that is there, stored: when. next: the iteration that is due.
    broken: that one cannot be had any more. over: nothing more of it is to come. ended: the store says, too, that it
    has diverged."""

    chain: Chain
    base: int
    stored: float
    next: int
    broken: bool = False
    over: bool = False
    ended: bool = False


@dataclass
class _Run:
    """Of one journal. lines: None: the store was not asked yet. moved: when bytes of the store did; infinite while
    it is not the store that is waited for. newest: iteration that the journal has. seen: lines with a base in it."""

    folder: Folder
    thread: threading.Thread | None = None
    lines: dict[str, _Line] | None = None
    moved: float = 0.0
    due: float = float("-inf")
    pause: float = 0.0
    newest: int = -1
    seen: set[str] = field(default_factory=set)

    @property
    def alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


class JournalUploads:
    """say(event, **fields). now: seconds for what is due; wall: of the day. seconds: between two rounds."""

    def __init__(
        self, objects: Objects, root: Path, node: str, wants: Wants, say: Callable[..., None], turns: Turns,
        now: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time,
        seconds: float = ROUND_SECONDS,
    ) -> None:
        self._objects, self._root, self._node, self._wants = objects, root, node, wants
        self._say, self._turns, self._now, self._wall, self._seconds = say, turns, now, wall, seconds
        self._runs: dict[Path, _Run] = {}

    def look(self, at_once: bool = False) -> None:
        """Begin what is due. Never waits. at_once: whether a round was a moment ago or not."""
        there = {folder.path: folder for folder in folders_in(self._root)}
        for path, folder in there.items():
            run = self._runs.setdefault(path, _Run(folder))
            if not run.alive and (self._now() >= run.due or (at_once and not run.pause)):
                run.moved = self._now()
                run.thread = threading.Thread(target=self._work, args=(run,), daemon=True,
                                              name=f"flowcheck store {folder.group} deltas")
                run.thread.start()
        for path in [path for path, run in self._runs.items() if path not in there and not run.alive]:
            del self._runs[path]

    def covers(self, offer: Offer) -> bool:
        run = self._runs.get(folder_of(self._root, offer.shard, offer.run_id, offer.epoch).path)
        return run is not None and bool(run.seen) and (
            run.newest + 1 >= offer.step - max(self._wants.every, BEHIND))

    def hung(self) -> bool:
        late = [run for run in self._runs.values() if run.alive and self._now() - run.moved > self._wants.seconds]
        for run in late:
            self._say("unstored", name=run.folder.group, step=None, again=None,
                      why=f"{self._objects.url}: no byte has moved for {self._wants.seconds:g} s; its process is ended")
        return bool(late)

    def join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for run in self._runs.values():
            if run.thread is not None:
                run.thread.join(max(0.0, end - time.monotonic()))

    # -- a run's thread --

    def _work(self, run: _Run) -> None:
        try:
            self._round(run)
            run.pause = 0.0
        except Exception as error:  # also of a library: it must not end the thread without a word
            run.pause, run.lines = min(max(FIRST_PAUSE, 2 * run.pause), LONGEST_PAUSE), None
            self._say("unstored", name=run.folder.group, step=None, why=said_of(error), again=run.pause)
        run.due = self._now() + max(run.pause, self._seconds)

    def _round(self, run: _Run) -> None:
        run.moved = inf
        job, folder = JobText.read(run.folder.job), run.folder
        bases = [one for one in folder.bases if not _is_wrong(folder, one.line, one.step)]
        run.seen = {one.line for one in bases}
        if job is None:
            return
        try:
            ring = RingReader(folder.ring)
            run.newest = max(ring.numbers, default=-1)
        except UserError:
            return  # its files are still being made

        def moving() -> None:
            run.moved = self._now()

        moving()
        name = lane_name(self._node, folder.group, job.run[0])
        lane = Lane(self._objects, name, moving, self._wall)
        if run.lines is None:
            run.lines = _stored(lane, job)
        if bases and self._is_due(run.lines.get(bases[-1].line), bases[-1]):
            with self._turn(run, name):
                self._base(run, lane, job, bases[-1])
        for id, line in run.lines.items():
            self._send(run, job, ring, lane.deltas((line.chain.epoch, id)), line, name)

    @contextmanager
    def _turn(self, run: _Run, name: str) -> Iterator[None]:
        """One after the other in a lane: what is half of one must not be tidied away by another."""
        with self._turns.of(name, lambda: setattr(run, "moved", self._now())):
            yield

    def _is_due(self, line: _Line | None, base: Place) -> bool:
        if line is None:
            return True
        steps = base.step - line.base
        if line.broken:
            return base.step > line.next and steps >= max(1, self._wants.every // 8)
        timed = self._wants.minutes and self._wall() - line.stored >= self._wants.minutes * 60
        return steps > 0 and bool(timed or (self._wants.every and steps >= self._wants.every))

    def _base(self, run: _Run, lane: Lane, job: JobText, base: Place) -> None:
        assert run.lines is not None
        folder, began = run.folder, self._now()
        version = Version.of(read_step_manifest(base.path), str(base.path))
        chain = Chain(version.run_id, version.epoch, version.shard, version.start, base.line, job.plan)

        def moving() -> None:
            run.moved = self._now()
            if _is_wrong(folder, base.line, base.step):
                raise Gone("it may be wrong: a checksum of its trainer differs", where=f"step {base.step}")

        mine = Lane(self._objects, lane_name(self._node, folder.group, job.run[0]), moving, self._wall)
        mine.deltas((version.epoch, base.line)).say_job(job.said)
        entry = mine.copy(base.path, line=base.line, plan=job.plan)
        line = run.lines.setdefault(base.line, _Line(chain, base.step, 0.0, base.step))
        if line.broken:
            line.next, line.broken = base.step, False
        line.base, line.stored = base.step, self._wall()
        self._say("stored", name=folder.group, step=base.step, bytes=version.nbytes,
                  seconds=round(self._now() - began, 3), path=f"{self._objects.url.rstrip('/')}/{entry.folder}")
        try:
            if gone := lane.tidy(self._wants.rules):
                self._say("expired", name=folder.group, versions=len(gone), path=gone[-1])
        except Exception as error:
            self._say("problem", name=folder.group, why=f"older versions stay in the store: {said_of(error)}")

    # -- deltas --

    def _send(self, run: _Run, job: JobText, ring: RingReader, deltas: Deltas, line: _Line, name: str) -> None:
        """All that has come of a line, and what is lacking of it."""
        ends = run.folder.ends(line.chain.line)
        if ends is not None and not line.ended:
            deltas.end(ends)
            line.ended = line.over = True
        while not line.over and not line.broken:
            began, run.moved = self._now(), inf
            numbers = set(ring.numbers)
            batch, why = _batch(ring, numbers, line, job.plan)
            if not batch:
                self._lack(run, ring, numbers, line, why, job.plan)
                return
            run.moved = self._now()
            with self._turn(run, name):
                span, nbytes = deltas.write(line.chain, line.next, batch)
            line.next = span.last + 1
            self._say("delta", name=run.folder.group, first=span.first, last=span.last, bytes=nbytes,
                      seconds=round(self._now() - began, 3), path=f"{self._objects.url.rstrip('/')}/{name}")

    def _lack(self, run: _Run, ring: RingReader, numbers: set[int], line: _Line, why: str, plan: str) -> None:
        """The next entry of a line is not to be had: it is still to come, or never will."""
        id, later = line.chain.line, dict[int, str]()
        if why or any(number >= line.next for number in numbers):  # all heads are read, which takes its time
            later = {one.number: line_of(one.head, plan) for one in ring.entries if one.number >= line.next}
        if not why and later.get(line.next) == id:
            return  # it has come meanwhile
        mine = [number for number, of in later.items() if of == id and number > line.next]
        if not mine and not why:
            line.over = bool(later) or (bool(run.seen) and id not in run.seen)
            return
        self._say("delta_gap", name=run.folder.group, first=line.next, last=min(mine, default=line.next + 1) - 1,
                  why=why or "the journal has not got it, or had overwritten it before it was in the store")
        line.broken = line.base <= line.next
        line.next = max(line.next, line.base)


def _batch(ring: RingReader, numbers: set[int], line: _Line, plan: str) -> tuple[list[Entry], str]:
    """Entries of a line from the next one on, PART_BYTES or one; and why the next one cannot be read, "": it is not
    there."""
    batch, total, size = list[Entry](), 0, 0
    number = line.next
    while number in numbers and total + size <= PART_BYTES:
        try:
            head, spans = ring.read(number)
        except UserError:
            return batch, ""  # overwritten just now
        except FlowcheckError as error:
            return batch, error.what
        if line_of(head, plan) != line.chain.line:
            return batch, ""
        size, pieces = image_of(number, head, spans)
        batch.append((size, pieces))
        total, number = total + size, number + 1
    return batch, ""


def _stored(lane: Lane, job: JobText) -> dict[str, _Line]:
    """What the store has of this journal's lines."""
    found: dict[str, _Line] = {}
    for one in sorted(lane.entries()[0], key=lambda entry: entry.version.step):
        if one.line is None or one.chain.plan != job.plan or one.version.epoch != job.run[1]:
            continue
        listed, step = lane.deltas(one.line).listed(), one.version.step
        line = found.setdefault(one.chain.line, _Line(one.chain, step, one.stored, step))
        line.base, line.stored, line.next = step, one.stored, reach(step, listed.spans)
        line.ended = line.over = listed.ends is not None
    return found


def _is_wrong(folder: Folder, line: str, step: int) -> bool:
    ends = folder.ends(line)
    return ends is not None and step > ends


