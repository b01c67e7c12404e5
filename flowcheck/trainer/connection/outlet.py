"""Through what a connection's bytes leave: a thread of C that never takes the GIL (include/outbox.h), or the socket.

    outlet.lock                     who has it writes to the connection, by this or by the Link itself
    outlet.open(link, its socket); outlet.close()
    outlet.take(link, pieces)       at once, and without waiting for anybody
    outlet.flush(link)              before anything is written by the Link itself
    outlet.finish(seconds)          before the connection ends

With TLS all goes through the Link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from typing import Any

from flowcheck.control.protocol import Link, RecordsError
from flowcheck.trainer.boundary import library

__all__ = ["Outlet"]

FLUSH_SECONDS = 10.0  # that a node may take to take what was put before
LAST_SECONDS = 0.1  # the same of an attachment that ends at once
SLOW = "too slow: it does not take what is sent"


class Outlet:
    """Of one connection after the other."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._library = library()
        self._box: tuple[Link, Any] | None = None

    def open(self, link: Link, sock: socket.socket) -> None:
        """sock: of the link. Where no thread can be had it is that."""
        if self._library is not None and not link.secure:
            with contextlib.suppress(OSError):
                self._box = link, self._library.open_outbox(sock.fileno())

    def close(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            self._library.close_outbox(box[1])

    def take(self, link: Link, pieces: list[bytes]) -> bytes | None:
        """What of these has to be sent after what was taken, b"": nothing; None: nothing was taken. Raises
        RecordsError."""
        box = self._box
        if box is not None and box[0] is link:
            said = self._library.outbox_put(box[1], pieces)
            if said < 0:
                raise _lost(link, said)
            return b"" if said else None
        sent = link.send_now(pieces)
        return b"" if sent == sum(map(len, pieces)) else b"".join(pieces)[sent:]

    def flush(self, link: Link) -> None:
        """Raises RecordsError."""
        box = self._box
        if box is not None and box[0] is link:
            said = self._library.outbox_flush(box[1], FLUSH_SECONDS)
            if said <= 0:
                raise _lost(link, said or -errno.ETIMEDOUT)

    def finish(self, seconds: float) -> None:
        box = self._box
        if box is not None:
            self._library.outbox_flush(box[1], min(max(seconds, LAST_SECONDS), FLUSH_SECONDS))


def _lost(link: Link, said: int) -> RecordsError:
    return RecordsError(SLOW if said == -errno.ETIMEDOUT else f"connection lost: {os.strerror(-said)}", where=link.peer)
