"""Messages that wait to be sent, oldest first: bounded in number, and user states in bytes, too.

    backlog.put(link, message, tensors, fill)       the training thread
    backlog.wake()                                  any thread: whoever waits in `get` looks again
    link, message, tensors, fill = backlog.get(); ...; backlog.done(tensors)        the thread that sends
    send(link, message, tensors)                    the same thread: it goes out
    backlog.drain()                                 the same thread: nothing of it is sent any more
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flowcheck.control.protocol import Link
from flowcheck.control.tensors import packed, packed_bytes
from flowcheck.trainer.connection.framed import Payload
from flowcheck.trainer.copies import Copies

__all__ = ["OPENING", "QUEUE", "REST", "Backlog", "Fill", "Waiting", "send"]

USER_UNSENT = 64 << 20  # bytes of user states that wait to be sent
QUEUE = 1024  # messages: that many iterations the node may be behind

OPENING = object()  # in place of a message: say the opening here
REST = object()  # bytes of messages that were begun
_WAKE = object()  # look whether the connection is still there
Fill = Callable[[Any], None]  # what is still missing in a message
Waiting = tuple[Link | None, Any, Payload, Fill | None]


class Backlog:
    """queue: what waits; `unfinished_tasks` of it is read at each boundary, and so without a call. copied: bytes of
    elements (Copies) that are not sent yet."""

    def __init__(self) -> None:
        self.queue: queue.Queue[Waiting] = queue.Queue(QUEUE)
        self.copied = 0
        self._unsent = 0  # bytes of user states
        self._lock = threading.Lock()  # of these two

    def put(self, link: Link, message: Any, tensors: Payload, fill: Fill | None) -> bool:
        """False: it is a user state (bytes), and USER_UNSENT bytes of them wait already. Raises queue.Full."""
        nbytes = len(tensors) if isinstance(tensors, bytes) else 0
        with self._lock:
            if nbytes and message is not REST and self._unsent + nbytes > USER_UNSENT:
                return False
            self._unsent += nbytes
        try:
            self.queue.put_nowait((link, message, tensors, fill))
        except queue.Full:
            with self._lock:
                self._unsent -= nbytes
            raise
        if isinstance(tensors, Copies):
            with self._lock:
                self.copied += tensors.nbytes
        return True

    @property
    def idle(self) -> bool:
        return not self.queue.unfinished_tasks

    def wake(self) -> None:
        with contextlib.suppress(queue.Full):  # then nobody waits
            self.queue.put_nowait((None, _WAKE, {}, None))

    def get(self) -> Waiting:
        return self.queue.get()

    def done(self, tensors: Payload) -> None:
        with self._lock:
            if isinstance(tensors, Copies):
                self.copied -= tensors.nbytes
            elif isinstance(tensors, bytes):
                self._unsent -= len(tensors)
        self.queue.task_done()

    def drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.done(self.queue.get_nowait()[2])


def send(link: Link, message: Any, tensors: Mapping[str, torch.Tensor] | bytes) -> None:
    if isinstance(tensors, bytes) and message is REST:
        link.send_rest(tensors)
    elif isinstance(tensors, bytes):
        link.send(message, [tensors], len(tensors))
    elif tensors:
        link.send(message, packed(tensors), packed_bytes(tensors))
    else:
        link.send(message)
