"""What ranks have sent to a group and it has not handled yet: so many messages, and so many bytes of them.

    inbox = Inbox(most)
    inbox.enter(member, size, over)      a connection, before it reads a message: waits until there is room
    inbox.put(inbound)                   what it has read; or inbox.leave(member, size): that came to nothing
    inbox.get(), inbox.done(inbound)     the group's thread

A connection that finds no room is not read from, so that TCP holds its rank up; after HOLD_SECONDS it is refused with
that reason. One rank has at most half of the room while others wait. A message of more than that (all of a job's state)
has a place of its own, for one: so the others' records need not wait until it is taken.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable

from flowcheck.control.protocol import RecordsError
from flowcheck.errors import size_text
from flowcheck.node.groups.members import Inbound, RankSession

__all__ = ["HOLD_SECONDS", "MESSAGES", "TEXT_WEIGHT", "Inbox"]

MESSAGES = 4096  # a connection that finds so many is too fast for anything honest
HOLD_SECONDS = 10.0
TEXT_WEIGHT = 16  # bytes of memory that a byte of JSON may become
LOOK_SECONDS = 0.2


class Inbox:
    """most: bytes. Any thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._queue: queue.Queue[Inbound] = queue.Queue(MESSAGES)
        self._changed = threading.Condition()
        self._of: Counter[int] = Counter()  # bytes, by member
        self._held, self._large, self._closed = 0, 0, False
        self.held_up = 0  # times that a connection had to wait

    @property
    def held(self) -> int:
        """Bytes."""
        return self._held + self._large

    def counts(self) -> dict[str, int]:
        return {"bytes": self.held, "most": self.most, "held_up": self.held_up}

    def enter(self, member: RankSession, size: int, over: Callable[[], bool]) -> None:
        """over: has the connection been closed? Raises RecordsError: the inbox is full."""
        with self._changed:
            if self._take(member, size):
                return
            self.held_up += 1
            end = time.monotonic() + HOLD_SECONDS
            while not (self._closed or over()) and time.monotonic() < end:
                self._changed.wait(LOOK_SECONDS)
                if self._take(member, size):
                    return
        raise RecordsError(f"{size_text(self.held, binary=True)} of what ranks have sent is not handled, and no more is"
                           f" taken than control.inbox_mb allows: {self.most >> 20}")

    def _take(self, member: RankSession, size: int) -> bool:
        half = self.most // 2
        if size > half:
            if self._large:
                return False
            self._large = size
            return True
        mine = self._of[id(member)]
        if self._held + size > self.most or (mine and mine + size > half):
            return False
        self._held += size
        self._of[id(member)] += size
        return True

    def leave(self, member: RankSession, size: int) -> None:
        with self._changed:
            if size > self.most // 2:
                self._large = 0
            else:
                self._held -= size
                self._of[id(member)] -= size
                if not self._of[id(member)]:
                    del self._of[id(member)]
            self._changed.notify_all()

    def put(self, inbound: Inbound) -> None:
        """Raises queue.Full."""
        self._queue.put_nowait(inbound)

    def get(self) -> Inbound:
        """Raises queue.Empty."""
        return self._queue.get_nowait()

    def done(self, inbound: Inbound) -> None:
        """It was handled."""
        if inbound.size:
            self.leave(inbound.member, inbound.size)

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
