"""The background half of an attachment: one thread that sends, one per connection that listens.

    sender = Sender(address, token, identity, opening)    opening(): messages that every connection begins with
    sender.put(message, tensors)       from the training thread: never waits
    sender.wanted, sender.joined       what the node has asked for, and answered
    sender.pledged                     iteration of the state that the caller has put: records follow it

The queue is bounded. When it is full nothing is dropped silently: the whole queue is given up, the connection ends,
`lost` counts it, and the next connection starts anew (the node then misses records, and asks for a state). A node
that is gone is tried again after a second, then after longer pauses, for ever. So is one that welcomes a rank and then
refuses what it sends; what it says each time again is told once. Threads are daemons, so that nothing here keeps a
process alive.
"""

from __future__ import annotations

import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from flowcheck.control.protocol import Joined, Limits, Link, Notice, Progress, RecordsError, Refused, Wanted, greet
from flowcheck.control.tensors import header, packed_bytes, pieces
from flowcheck.errors import FlowcheckError

__all__ = ["Identity", "Sender"]

QUEUE = 1024  # messages: that many iterations the node may be behind
PAUSE = (1.0, 30.0)
CONNECT_SECONDS = 5.0
REASONS = 64  # remembered, so that a refusal that is repeated is told once


@dataclass(frozen=True)
class Identity:
    run_id: str
    epoch: int
    rank: int
    ranks: int
    group: str
    instance: str = field(default_factory=lambda: secrets.token_hex(8))


class Sender:
    """why: the last reason for not being connected, or what the node has noticed; "" while all is well. notice: what
    keeps the node from making versions although it wants nothing, "": nothing does. iteration, status: of the node's
    newest version, -1: none yet."""

    def __init__(
        self, address: tuple[str, int], token: bytes, identity: Identity, opening: Callable[[], list[Any]],
        tell: Callable[[str], None],
    ) -> None:
        self._address, self._token, self._identity, self._opening, self._tell = address, token, identity, opening, tell
        self._queue: queue.Queue[tuple[Any, Mapping[str, torch.Tensor]]] = queue.Queue(QUEUE)
        self._link: Link | None = None
        self._stop = threading.Event()
        self._again = threading.Event()  # the opening has more to say
        self.wanted: frozenset[str] = frozenset()
        self.joined: int | None = None
        self.pledged: int | None = None  # None again when the connection ends
        self.notice = ""
        self.tried = threading.Event()  # the first attempt to connect is over
        self.answered = threading.Event()  # something came, or the connection ended
        self.why = "not connected yet"
        self._refused = False  # this connection, by the node
        self._refusing = False  # the connection before this one was refused
        self._told: set[str] = set()  # reasons, since the last connection that was not refused
        self.lost = 0
        self.iteration, self.status = -1, ""
        self._thread = threading.Thread(target=self._main, name="flowcheck attachment", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._link is not None

    def put(self, message: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> bool:
        """False: it will not be sent. Without a connection there is nobody to send to; that is no loss of ours."""
        link = self._link
        if link is None:
            return False
        try:
            self._queue.put_nowait((message, tensors or {}))
        except queue.Full:
            self.lost += 1
            self._link = None
            self._say(f"the node is more than {QUEUE} iterations behind")
            link.close()
            return False
        return True

    def open_again(self) -> None:
        """What `opening` says has changed: send it on the connection that there is."""
        self._again.set()

    def close(self, last: Any, seconds: float) -> None:
        """Send what is queued and `last`, if that works within the time."""
        if self.put(last):
            deadline = time.monotonic() + seconds
            while self.connected and time.monotonic() < deadline and self._thread.is_alive():
                self.answered.wait(0.05)
                if not self._queue.unfinished_tasks:
                    break
        self._stop.set()
        link = self._link
        if link is not None:
            link.close()
        self._thread.join(max(seconds, 0.1))

    # -- the thread --

    def _main(self) -> None:
        pause = PAUSE[0]
        while not self._stop.is_set():
            try:
                link = self._connect()
            except (OSError, FlowcheckError) as error:
                self._say(getattr(error, "what", None) or f"no connection: {getattr(error, 'strerror', error)}")
                self.tried.set()
                self._stop.wait(pause)
                pause = min(2 * pause, PAUSE[1])
                continue
            began, self._refused = time.monotonic(), False
            self._link, self.why = link, ""  # before anything is heard on it
            listener = threading.Thread(target=self._listen, args=(link,), name="flowcheck listener", daemon=True)
            listener.start()
            try:
                self._send_all(link)
            except Exception as error:  # of ours, too: a thread that is gone could say nothing
                self._ended(link, error)
            finally:
                self._link = None
                link.close()
                listener.join()
                self._drain()
                self.wanted, self.joined, self.pledged, self.notice = frozenset(), None, None, ""
                self.answered.set()
            self._refusing = self._refused
            if not self._refused or time.monotonic() - began > PAUSE[1]:
                pause = PAUSE[0]
                self._told.clear()
            self._stop.wait(pause)
            if self._refused:
                pause = min(2 * pause, PAUSE[1])

    def _say(self, why: str) -> None:
        if why == self.why:
            return
        self.why = why
        if not self._refusing or why not in self._told:
            self._tell(why)
        if len(self._told) < REASONS:
            self._told.add(why)

    def _connect(self) -> Link:
        sock = socket.create_connection(self._address, timeout=CONNECT_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link = Link(sock)
        link.limits = lambda: Limits(64 << 10)
        try:
            greet(link, self._token, **asdict(self._identity))
        except BaseException:
            link.close()
            raise
        self._again.set()
        return link

    def _send_all(self, link: Link) -> None:
        self.tried.set()
        while not self._stop.is_set():
            if self._again.is_set():
                self._again.clear()
                for message in self._opening():
                    link.send(message)
            try:
                message, tensors = self._queue.get(timeout=0.05)
            except queue.Empty:
                if not self.connected:
                    return
                continue
            try:
                if tensors:
                    head, order = header(tensors)
                    parts = (piece for name in order for piece in pieces(tensors[name]))
                    link.send(message, _chain(head, parts), packed_bytes(tensors))
                else:
                    link.send(message)
            finally:
                self._queue.task_done()

    def _listen(self, link: Link) -> None:
        try:
            while True:
                message, size = link.receive()
                if size:
                    raise RecordsError("a payload from a node", where=link.peer)
                if isinstance(message, Wanted):
                    self.wanted = frozenset(message.what)
                    if message.what:
                        self._say(message.why)
                elif isinstance(message, Joined):
                    # Nothing is wanted any more, of no rank: those that have no state to send hear it only here.
                    self.wanted, self.joined = frozenset(), message.iteration
                    if self._link is link:
                        self.why = self.notice
                elif isinstance(message, Notice):
                    before, self.notice = self.notice, message.why
                    if message.why:
                        self._say(message.why)
                    elif self._link is link and self.why == before:
                        self.why = ""  # what else has been said meanwhile stays
                elif isinstance(message, Progress):
                    self.iteration, self.status = message.iteration, message.status
                elif isinstance(message, Refused):
                    self._refused = True
                    raise RecordsError(f"refused: {message.why}", where=link.peer)
                else:
                    raise RecordsError(f"a {type(message).__name__} from a node", where=link.peer)
                self.answered.set()
        except (FlowcheckError, OSError) as error:
            self._ended(link, error)
        finally:
            self._link = None
            link.close()
            self.answered.set()

    def _ended(self, link: Link, error: Exception) -> None:
        """The first reason counts: a connection that was given up fails in other ways after that."""
        if self._link is link and not self._stop.is_set():
            self._say(getattr(error, "what", f"{type(error).__name__}: {error}"))

    def _drain(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
                self._queue.task_done()
        except queue.Empty:
            pass


def _chain(head: bytes, parts: Any) -> Any:
    yield head
    yield from parts
