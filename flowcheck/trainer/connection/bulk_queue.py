"""What is large and may be late, of the base of a log or of gradients: a part at a time, when no message waits.

    queue.put(link, pieces, nbytes)         the training thread: what one boundary took of it
    queue.clear()                           any thread: nothing of it is sent any more
    queue.unsent                            bytes that are held for it
    part = queue.part(link); ...; queue.went(part, seconds)        the thread that sends

Pieces are encoded by the thread that sends, one after the other, when they are due; so no more than one of them takes
memory twice. Parts are small until the link has shown that it is quick: whatever else a rank says waits for one part at
most, and a node waits for a whole message only so long.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowcheck.control.protocol import Base, Fed, Link, Unfed

__all__ = ["UNSENT", "BulkQueue", "Part", "Pieces"]

UNSENT = 256 << 20  # bytes of a base that are held for a node, or one parameter with its state where that is more
SMALL, LARGE = 64 << 10, 1 << 20  # bytes of a part
QUICK = 10e6  # bytes a second, from which on parts are large
Given = Base | Fed | Unfed  # what is said of a piece, in the message of its first part; of Unfed nothing comes
Pieces = Iterator[tuple[Base, bytearray]] | Iterator[tuple[Fed | Unfed, memoryview]]
SHOWN = 1 << 20  # bytes by which a link shows how quick it is; of older ones each time half as much counts


@dataclass(frozen=True)
class Part:
    message: Given
    data: memoryview


@dataclass(frozen=True)
class _Given:
    link: Link
    pieces: Pieces
    nbytes: int


class BulkQueue:
    """failure: what encoding has raised; None: nothing. Of one connection after the other."""

    def __init__(self) -> None:
        self._given: deque[_Given] = deque()
        self._piece: Part | None = None  # of the first of these, from the byte on that is due
        self._lock = threading.Lock()
        self._went, self._seconds = 0.0, 0.0
        self.unsent = 0
        self.failure: Exception | None = None

    def put(self, link: Link, pieces: Pieces, nbytes: int) -> None:
        with self._lock:
            self._given.append(_Given(link, pieces, nbytes))
            self.unsent += nbytes

    @property
    def idle(self) -> bool:
        return not self._given

    def clear(self) -> None:
        with self._lock:
            self._given.clear()
            self._piece, self.failure, self.unsent = None, None, 0

    def part(self, link: Link) -> Part | None:
        """That is due; None: nothing is. It may wait for a device."""
        while True:
            with self._lock:
                if self._piece is not None:
                    return replace(self._piece, data=self._piece.data[: self._size])
                if not self._given or self._given[0].link is not link:
                    return None
                given = self._given[0]
            try:
                piece, failure = next(given.pieces, None), None
            except Exception as error:  # the training thread raises it
                piece, failure = None, error
            with self._lock:
                if not self._given or self._given[0] is not given:
                    continue  # it was cleared meanwhile
                if piece is not None:
                    self._piece = Part(piece[0], memoryview(piece[1]))
                    continue
                self._given.popleft()
                self.unsent -= given.nbytes
                if failure is not None:
                    self._given.clear()
                    self.unsent, self.failure = 0, failure

    @property
    def _size(self) -> int:
        return LARGE if self._went >= max(SHOWN, QUICK * self._seconds) else SMALL

    def went(self, part: Part, seconds: float) -> None:
        """seconds: that sending it took."""
        with self._lock:
            self._went, self._seconds = self._went + len(part.data), self._seconds + seconds
            if self._went > 2 * SHOWN:
                self._went, self._seconds = self._went / 2, self._seconds / 2
            piece = self._piece
            if piece is not None and piece.message is part.message:
                self._piece = _rest(piece.message, part, piece.data[len(part.data) :])

    def opened(self) -> None:
        """Another connection: nothing is known of its link."""
        self.clear()
        self._went, self._seconds = 0.0, 0.0


def _rest(message: Given, went: Part, left: memoryview) -> Part | None:
    """What is left of a piece; None: nothing is."""
    if isinstance(message, Unfed) or not left:
        return None
    return Part(replace(message, first=message.first + len(went.data)), left)
