"""Elements of the state that a node has asked for, and that no boundary has answered yet.

    requests.add(link, message)     the listening thread: looked up at once
    requests.asked()                the training thread, at a boundary: what may be answered now
    requests.clear()                the connection is over
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from flowcheck.control.protocol import PATCH_BYTES, Link, Ranges, RecordsError
from flowcheck.trainer.connection.backlog import Backlog
from flowcheck.trainer.ranges import Wish

__all__ = ["RangeRequests"]

REQUESTS = 8  # of a node, that wait


class RangeRequests:
    """prepare(request, bytes that the answer may have): called by the listening thread."""

    def __init__(self, prepare: Callable[[Ranges, int], Wish], backlog: Backlog) -> None:
        self._prepare, self._backlog = prepare, backlog
        self._waiting: deque[tuple[Link, Wish]] = deque()
        self._lock = threading.Lock()

    def add(self, link: Link, message: Ranges) -> None:
        """What waits takes memory, and so it is bounded. Raises RecordsError: too many wait."""
        with self._lock:
            waiting, nbytes = len(self._waiting), sum(wish.nbytes for _, wish in self._waiting)
        if waiting >= REQUESTS:
            raise RecordsError(f"asks for ranges again, with {waiting} requests that no boundary has answered yet",
                               where=link.peer)
        wish = self._prepare(message, min(PATCH_BYTES, 2 * PATCH_BYTES - nbytes))
        with self._lock:
            self._waiting.append((link, wish))

    def asked(self) -> list[tuple[Link, Wish]]:
        """What is to be answered at this boundary, oldest first, and on which connection. What would make more than
        PATCH_BYTES together with what is still being sent stays for a later one."""
        out: list[tuple[Link, Wish]] = []
        with self._lock:
            room = PATCH_BYTES - self._backlog.copied
            while self._waiting and self._waiting[0][1].nbytes <= room:
                out.append(self._waiting.popleft())
                room -= out[-1][1].nbytes
        return out

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()
