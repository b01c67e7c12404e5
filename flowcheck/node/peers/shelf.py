"""What a group's node lets its peers read: the arenas of the last iterations that have closed.

    shelf = Shelf(most)
    shelf.follow(plan, followed)                             the job that it is of, from now on
    shelf.show(iteration, region, there, alive, closed)      the group's thread: what its streams have brought
    answer, pieces = shelf.read(holes)                       a peer's connection
    answer, buffers = shelf.entry(journal)                   a holder's: what else a step was made with

Nothing but runs of cells that were shown is ever given: placed and checked, with copies that agree. A reader copies
from the arena itself, and holds no lock while it does. The shelf's own lock it takes for a moment, to find the
iteration; placing threads take none of these. An arena may become a later iteration's meanwhile: `alive` and the shelf
are asked again when all was copied, and if it has, the answer is that it is gone. An iteration that has not closed here
is waited for, on the reader's thread, as long as the peer says that an answer is of use.
"""

from __future__ import annotations

import hashlib
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flowcheck.control.protocol import (
    RANGES_TEXT,
    Bytes,
    Entry,
    Holes,
    Journal,
    Limits,
    Link,
    RecordsError,
    Span,
    Steps,
)
from flowcheck.control.tensors import packed, packed_bytes
from flowcheck.rebuild.iteration.intervals import both
from flowcheck.rebuild.version.records import StepRecord

__all__ = ["Followed", "Shelf", "serve"]

CELL = 8
AT_ONCE = 1 << 20  # bytes copied before other threads of Python may go on
IDLE_SECONDS = 3600.0  # a peer that has not asked for so long comes again


@dataclass(frozen=True)
class Followed:
    """A job. body: its manifest, with all connections. run: id, epoch and ranks, as trainers say hello. first: the
    trainer's number of the manifest's iteration 0."""

    body: Mapping[str, Any]
    run: tuple[str, int, int]
    first: int


@dataclass(frozen=True)
class _Shown:
    region: np.ndarray
    there: np.ndarray
    alive: Callable[[], bool]
    closed: StepRecord | None


class Shelf:
    """most: iterations. Iterations are the trainer's numbers."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._plan = ""
        self._followed: Followed | None = None
        self._shown: dict[int, _Shown] = {}
        self._newest = self._closed = -1

    # -- the group's thread --

    def follow(self, plan: str, followed: Followed | None = None) -> None:
        """From now on of this job, "": of none. What was shown before is of another one, or of another start of it."""
        with self._changed:
            self._plan, self._followed, self._shown, self._newest, self._closed = plan, followed, {}, -1, -1
            self._changed.notify_all()

    def show(
        self, iteration: int, region: np.ndarray, there: np.ndarray, alive: Callable[[], bool],
        closed: StepRecord | None = None,
    ) -> None:
        """there: runs of cells of 8 bytes of the region. alive: are they still this iteration's? Any thread asks.
        closed: what its step was made with; None: it has not closed."""
        with self._changed:
            self._shown[iteration] = _Shown(region, there, alive, closed)
            self._newest = max(self._newest, iteration)
            if closed is not None:
                self._closed = max(self._closed, iteration)
            for old in sorted(self._shown)[: -self._most]:
                del self._shown[old]
            self._changed.notify_all()

    def hide(self, iteration: int) -> None:
        """This one and those before it can be read no more."""
        with self._changed:
            self._shown = {number: shown for number, shown in self._shown.items() if number > iteration}

    # -- peers --

    def read(self, holes: Holes) -> tuple[Bytes, list[bytes]]:
        """The answer, and its payload. Waits for the iteration at most as long as an answer is of use."""
        shown, why = self._find(holes)
        if shown is None:
            return Bytes(holes.request, holes.iteration, why=why), []
        ranges = _inside(holes.ranges, shown)
        pieces: list[bytes] = []
        digest = hashlib.sha256()
        for start, length in ranges:
            for at in range(start, start + length, AT_ONCE):
                pieces.append(shown.region[at : min(at + AT_ONCE, start + length)].tobytes())
                digest.update(pieces[-1])
        with self._changed:
            still = self._shown.get(holes.iteration) is not None and self._plan == holes.plan
        if not still or not shown.alive():
            return Bytes(holes.request, holes.iteration, why="its arena has been given to a later iteration"), []
        if not ranges:
            return Bytes(holes.request, holes.iteration, why="nothing of it is here either"), []
        return Bytes(holes.request, holes.iteration, list(ranges), digest.hexdigest()), pieces

    def entry(self, journal: Journal) -> tuple[Entry, Mapping[str, torch.Tensor]]:
        """The answer, and the buffers of its payload. Waits for the end of the iteration as `read` does."""
        end = time.monotonic() + journal.seconds
        with self._changed:
            while self._plan == journal.plan and self._plan and self._closed < journal.iteration:
                left = end - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            plan, followed, newest = self._plan, self._followed, self._closed
            shown = self._shown.get(journal.iteration)
        answer = Entry(journal.request, journal.iteration, plan, newest)
        if plan != journal.plan or followed is None:
            answer.why = "another job is followed here, or none"
            if followed is not None:
                answer.job, answer.first, answer.run = dict(followed.body), followed.first, list(followed.run)
        elif newest < journal.iteration:
            answer.why = "it has not closed here"
        elif shown is None or shown.closed is None:
            answer.why = "its arena has been given to a later iteration"
        else:
            record = shown.closed
            answer.groups, answer.clip = [dict(group) for group in record.groups], record.clip
            answer.scale, answer.skipped = record.scale, record.skipped
            return answer, {f"buffer.{name}": tensor for name, tensor in record.buffers.items()}
        return answer, {}

    def _find(self, holes: Holes) -> tuple[_Shown | None, str]:
        end = time.monotonic() + holes.seconds
        with self._changed:
            while self._plan == holes.plan and self._newest < holes.iteration:
                left = end - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None, "it has not closed here"
            if self._plan != holes.plan:
                return None, "another job is followed here, or none"
            shown = self._shown.get(holes.iteration)
        return shown, "" if shown is not None else "its arena has been given to a later iteration"


def _inside(ranges: list[Span], shown: _Shown) -> list[Span]:
    """Those parts of byte ranges that were shown, each inside one of them: some may begin where another one ends."""
    size = len(shown.region)
    asked = np.array([(start, min(start + length, size)) for start, length in ranges], np.int64)
    starts, found = [start for start, _ in ranges], list[Span]()
    for first, end in both(asked[asked[:, 0] < asked[:, 1]], shown.there * CELL).tolist():
        for begin in starts[bisect_right(starts, first) : bisect_left(starts, end)]:
            found.append((first, begin - first))
            first = begin
        found.append((first, end - first))
    return found


def serve(
    link: Link, find: Callable[[], Shelf | None], hear: Callable[[Steps, str], Steps] | None = None
) -> None:
    """Answer a peer until it goes. find(): its group's, as of now. hear: takes what another node's groups have and from
    where; says what those here have. Raises RecordsError."""
    link.limits = lambda: Limits(RANGES_TEXT)
    while True:
        try:
            message, _ = link.receive(wait=IDLE_SECONDS)
        except TimeoutError:
            return
        except RecordsError as error:
            if error.what == "connection closed":
                return
            raise
        if isinstance(message, Steps) and hear is not None:
            link.send(hear(message, link.peer))
            continue
        if not isinstance(message, Holes | Journal):
            raise RecordsError(f"a {type(message).__name__} from a peer", where=link.peer)
        shelf = find()
        if shelf is None:
            raise RecordsError("no such group is followed here", where=link.peer)
        if isinstance(message, Journal):
            entry, buffers = shelf.entry(message)
            payload = (packed(buffers), packed_bytes(buffers)) if buffers else ()
            link.send(entry, *payload, seconds=message.seconds)
            continue
        answer, pieces = shelf.read(message)
        link.send(answer, pieces, sum(map(len, pieces)), seconds=message.seconds)
