"""What other nodes give of an iteration: one more stream into its arena, with the same checks.

    holes = open_holes(engine, plan, iteration)         cells that nothing has come for
    spans = question(plan, iteration, holes)            the bytes to ask for, and some next to them
    given = place(engine, plan, iteration, answers)     once the iteration has closed

Contract. A node gives only what its own mirror has brought and its own engine has placed and checked. Here it is held
against what is there:

    a cell that nothing has come for     is filled by the first peer that gives it
    one that is there                    is compared. Where the copies differ it is void (decision 0014), and nothing of
                                         that peer is used: it follows another iteration, or is wrong
    one that two peers give              is compared. Where the copies differ it is void, and nothing of either is used
    one of which the streams' copies     stays a hole, whatever peers have: they are copies, too
      differed

That is why some cells next to each hole are asked for, which are there: they are witnesses. What was filled lies in the
arena. The books of the engine do not know of it, so it is never given on to a third node; evidence.py adds both.

Pure but for the bytes of the region. Only of an iteration that has closed: nobody else writes there then. Time and
memory grow with what was lost.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from parser.machine import Engine

from flowcheck.rebuild.iteration.intervals import both, intervals, total, without
from flowcheck.rebuild.plan import BucketPlace, JobPlan

__all__ = ["CELL", "NOTHING", "Answer", "Given", "Hearsay", "open_holes", "place", "question"]

CELL = 8
MARGIN = 8  # cells before and behind a hole
MOST_SPANS = 16384  # asked for at once, as many as a message may name
MOST_BYTES = 64 << 20
_NONE = np.empty((0, 2), np.int64)


@dataclass(frozen=True)
class Answer:
    """What one peer gives: (first byte in the region, bytes), in order, each from the beginning of a cell on."""

    peer: str
    pieces: tuple[tuple[int, bytes | bytearray | memoryview], ...]


@dataclass(frozen=True)
class Given:
    """filled, void: runs of cells. cells: filled, by peer. refused: why nothing of a peer's answer is used."""

    filled: np.ndarray = field(default_factory=lambda: _NONE)
    void: np.ndarray = field(default_factory=lambda: _NONE)
    cells: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def missing(self, gaps: np.ndarray, place: BucketPlace) -> np.ndarray:
        """Of a place: what its streams lack, less what was filled, and what is void now."""
        if not len(self.filled) and not len(self.void):
            return gaps
        void = both(self.void, _cells(place))
        return intervals(np.concatenate((without(gaps, self.filled), void)))


NOTHING = Given()


@dataclass(frozen=True)
class Hearsay:
    """What a version rests on that came from peers: cells, since the trainer's iteration `since`; `version`: words for
    one that it was built on. No checksum of the trainer has matched since then."""

    since: int = -1
    cells: int = 0
    peers: tuple[str, ...] = ()
    version: str = ""

    def __str__(self) -> str:
        cells = f"{self.cells} cells since iteration {self.since} came from {', '.join(self.peers)}"
        begin = " and ".join([*([self.version] if self.version else []), *([cells] if self.cells else [])])
        return f"{begin}, and no checksum of the trainer has matched since" if begin else ""

    def after(self, number: int, given: Given) -> Hearsay:
        """With what was given of an iteration, which the trainer calls `number`."""
        if not given.cells:
            return self
        peers = tuple(sorted({*self.peers, *given.cells}))
        since, cells = self.since if self.cells else number, self.cells + sum(given.cells.values())
        return replace(self, since=since, cells=cells, peers=peers)


def open_holes(engine: Engine, plan: JobPlan, iteration: int) -> np.ndarray:
    """Runs of cells that nothing has come for: not those of which two copies differ."""
    found = [_NONE]
    for one in plan.iteration_places(iteration):
        first, end = one.cells.start, one.cells.stop
        gaps = engine.missing(iteration, first, end)
        if len(gaps):
            found.append(without(intervals(gaps), intervals(engine.void_cells(iteration, first, end))))
    return intervals(np.concatenate(found))


def question(plan: JobPlan, iteration: int, holes: np.ndarray) -> list[tuple[int, int]]:
    """(first byte, bytes) of the holes and of the cells next to them, in order; what is too much for one question is
    left out from the end."""
    wide = intervals(holes + np.array([-MARGIN, MARGIN]))
    found: list[tuple[int, int]] = []
    room = MOST_BYTES
    for one in plan.iteration_places(iteration):
        for first, end in both(wide, _cells(one)).tolist():
            length = min(end * CELL, one.end) - first * CELL
            length = min(length, room // CELL * CELL) if length > room else length
            if length < 1 or len(found) == MOST_SPANS:
                return found
            found.append((first * CELL, length))
            room -= length
    return found


def place(engine: Engine, plan: JobPlan, iteration: int, answers: Sequence[Answer]) -> Given:
    """Into the region of an iteration that has closed."""
    region, holes = engine.region(iteration), open_holes(engine, plan, iteration)
    there = _there(engine, plan, iteration)
    void, refused = _NONE, dict[str, str]()
    good: list[Answer] = []
    for answer in answers:
        differ = both(_differing(_here_and(region, answer)), there)
        if len(differ):
            void = intervals(np.concatenate((void, differ)))
            refused[answer.peer] = f"{total(differ)} cells that are here as well differ"
        else:
            good.append(answer)
    for i, one in enumerate(good):
        for other in good[i + 1 :]:
            differ = both(_differing(_against(one, other)), holes)
            if len(differ):
                void = intervals(np.concatenate((void, differ)))
                refused[one.peer] = f"{total(differ)} cells differ from those of {other.peer}"
                refused[other.peer] = f"{total(differ)} cells differ from those of {one.peer}"
    filled, cells = _NONE, dict[str, int]()
    for answer in good:
        if answer.peer in refused:
            continue
        runs = intervals([(at // CELL, -(-(at + len(data)) // CELL)) for at, data in answer.pieces])
        new = both(without(holes, filled), runs)
        _write(region, answer, new)
        filled = intervals(np.concatenate((filled, new)))
        cells |= {answer.peer: total(new)} if len(new) else {}
    return Given(filled, void, cells, refused)


def _write(region: np.ndarray, answer: Answer, runs: np.ndarray) -> None:
    """Runs of cells, of which the answer has all."""
    starts = [at for at, _ in answer.pieces]
    for first, end in runs.tolist():
        piece = bisect.bisect(starts, first * CELL) - 1
        while piece < len(starts) and starts[piece] < end * CELL:
            at, data = answer.pieces[piece]
            low, high = max(first * CELL, at), min(end * CELL, at + len(data))
            region[low:high] = np.frombuffer(data, np.uint8)[low - at : high - at]
            piece += 1


def _cells(one: BucketPlace) -> np.ndarray:
    return intervals([(one.cells.start, one.cells.stop)])


def _there(engine: Engine, plan: JobPlan, iteration: int) -> np.ndarray:
    """Cells that the streams have brought."""
    found = [_NONE]
    for one in plan.iteration_places(iteration):
        gaps = engine.missing(iteration, one.cells.start, one.cells.stop)
        found.append(without(_cells(one), intervals(gaps)))
    return intervals(np.concatenate(found))


def _against(one: Answer, other: Answer) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(first byte, the bytes of both) where both answers have any. Pieces of each are in order."""
    mine, its = iter(one.pieces), iter(other.pieces)
    a, b = next(mine, None), next(its, None)
    while a is not None and b is not None:
        low, high = max(a[0], b[0]), min(a[0] + len(a[1]), b[0] + len(b[1]))
        if low < high:
            mine_too, its_too = (np.frombuffer(data, np.uint8)[low - at : high - at] for at, data in (a, b))
            yield low, mine_too, its_too
        if a[0] + len(a[1]) <= b[0] + len(b[1]):
            a = next(mine, None)
        else:
            b = next(its, None)


def _here_and(region: np.ndarray, answer: Answer) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    for at, data in answer.pieces:
        yield at, region[at : at + len(data)], np.frombuffer(data, np.uint8)


def _differing(pairs: Iterable[tuple[int, np.ndarray, np.ndarray]]) -> np.ndarray:
    """Runs of cells: pairs of bytes, and where they begin."""
    found = [_NONE]
    for at, one, other in pairs:
        cells = (np.flatnonzero(one != other) + at) // CELL
        found.append(np.stack((cells, cells + 1), axis=1))
    return intervals(np.concatenate(found))
