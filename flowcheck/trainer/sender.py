"""The background half of an attachment to one node: one thread that sends, one per connection that listens.

    sender = Sender(address, token, identity, opening)    opening(): messages that every connection begins with
    sender.put(message, tensors)       from the training thread: never waits
    sender.asked()                     what the node has asked for that may be answered now, for the training thread too
    sender.wanted, sender.joined       what the node has asked for, and answered
    sender.pledged                     iteration of the state that the caller has put: records follow it

The queue is bounded. When it is full nothing is dropped silently: the whole queue is given up, the connection ends,
`lost` counts it, and the next connection starts anew (the node then misses records, and asks for a state). A node
that is gone is tried again after a second, then after longer pauses, for ever. So is one that welcomes a rank and then
refuses what it sends; what it says each time again is told once. Threads are daemons, so that nothing here keeps a
process alive. They end before the interpreter does, all the same: a thread that comes back from torch's C++ after that
takes the whole process with it (SIGABRT), and a trainer that had done its work would have failed.
"""

from __future__ import annotations

import atexit
import os
import queue
import secrets
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from flowcheck.control.protocol import (
    PATCH_BYTES,
    RANGES_TEXT,
    Epoch,
    Joined,
    Limits,
    Link,
    Notice,
    Progress,
    Ranges,
    RecordsError,
    Refused,
    Wanted,
    greet,
)
from flowcheck.control.tensors import packed, packed_bytes
from flowcheck.control.tls import Secure
from flowcheck.errors import FlowcheckError
from flowcheck.trainer.ranges import Copies, Wish
from flowcheck.trainer.sample import Taken

__all__ = ["Identity", "Sender"]

USER_UNSENT = 64 << 20  # bytes of user states that wait to be sent
QUEUE = 1024  # messages: that many iterations the node may be behind
PAUSE = (1.0, 30.0)
CONNECT_SECONDS = 5.0
REQUESTS = 8  # for ranges, of a node, that no boundary has answered yet
REASONS = 64  # remembered, so that a refusal that is repeated is told once


_OPENING = object()  # in the queue: say the opening here
Payload = Mapping[str, torch.Tensor] | Copies | bytes  # bytes: as they are


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
    newest version, -1: none yet. by_ranges: the node asks for elements of the state, and no boundary waits for it.
    takes_user: the node keeps what ranks give of themselves. epoch: that versions of this start have there, where it is
    another than the one said; None: it is not. final: the node does not take this run any more, and is not tried
    again."""

    def __init__(
        self, address: tuple[str, int], token: bytes | Callable[[], bytes], identity: Identity,
        opening: Callable[[], list[Any]], tell: Callable[[str], None], prepare: Callable[[Ranges, int], Wish],
        answered: threading.Event | None = None, tls: ssl.SSLContext | None = None,
    ) -> None:
        """token: a callable is asked for each connection. prepare(request, bytes that the answer may have): called by
        the listening thread. answered: one that several senders may share."""
        self._tls = tls
        self.address, self._token, self._identity, self._opening, self._tell = address, token, identity, opening, tell
        self._prepare = prepare
        self._queue: queue.Queue[tuple[Link, Any, Payload]] = queue.Queue(QUEUE)
        self._requests: deque[tuple[Link, Wish]] = deque()
        self._copied = 0  # bytes of answers that are not sent yet
        self._unsent = 0  # bytes of user states
        self._lock = threading.Lock()  # of these three
        self._link: Link | None = None
        self._stop = threading.Event()
        self._again = threading.Event()  # the opening has more to say
        self.wanted: frozenset[str] = frozenset()
        self.joined: int | None = None
        self.pledged: int | None = None  # None again when the connection ends
        self.notice = ""
        self.by_ranges = False
        self.takes_user = False
        self.epoch: int | None = None
        self.final = False
        self.tried = threading.Event()  # the first attempt to connect is over
        self.answered = answered or threading.Event()  # something came, or the connection ended
        self.why = "not connected yet"
        self._refused = False  # this connection, by the node
        self._refusing = False  # the connection before this one was refused
        self._told: set[str] = set()  # reasons, since the last connection that was not refused
        self.lost = 0
        self.iteration, self.status = -1, ""
        self._thread = threading.Thread(target=self._main, name="flowcheck attachment", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self._leave, os.getpid())

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def attached(self) -> bool:
        """Versions are made, as far as is known."""
        return self.connected and self.joined is not None and "state" not in self.wanted and not self.notice

    @property
    def follows(self) -> bool:
        """Records are of use to it. A node may take longer to take a state in than ranks wait for that: the records of
        what follows it are queued after it all the same, or it would lose its place at once and ask again, without
        end."""
        pledged = self.pledged is not None and "state" not in self.wanted
        return self.connected and (self.joined is not None or pledged)

    def put(self, message: Any, tensors: Payload | None = None, asked_on: Link | None = None) -> bool:
        """False: it will not be sent. Without a connection there is nobody to send to; that is no loss of ours. Nor is
        there with another connection than `asked_on`, if it is given. bytes: a user state, which is left out where
        USER_UNSENT of them wait already."""
        link = self._link
        if link is None or asked_on not in (None, link):
            return False
        if isinstance(tensors, bytes):
            with self._lock:
                if self._unsent + len(tensors) > USER_UNSENT:
                    return False
                self._unsent += len(tensors)
        try:
            self._queue.put_nowait((link, message, {} if tensors is None else tensors))
        except queue.Full:
            if isinstance(tensors, bytes):
                with self._lock:
                    self._unsent -= len(tensors)
            self.lost += 1
            self._link = None
            self._say(f"the node is more than {QUEUE} iterations behind")
            link.close()
            return False
        if isinstance(tensors, Copies):
            with self._lock:
                self._copied += tensors.nbytes
        return True

    def asked(self) -> list[tuple[Link, Wish]]:
        """What is to be answered at this boundary, oldest first, and on which connection. What would make more than
        PATCH_BYTES together with what is still being sent stays for a later one."""
        out: list[tuple[Link, Wish]] = []
        with self._lock:
            room = PATCH_BYTES - self._copied
            while self._requests and self._requests[0][1].nbytes <= room:
                out.append(self._requests.popleft())
                room -= out[-1][1].nbytes
        return out

    def open_again(self) -> None:
        """What `opening` says has changed: send it on the connection that there is, after what was put before. A record
        of the job before would be taken for one of the new job's."""
        if not self.put(_OPENING):
            self._again.set()

    def close(self, last: Any, seconds: float) -> None:
        """Send what is queued and `last`, if that works within the time."""
        if self.put(last):
            deadline = time.monotonic() + seconds
            while self.connected and time.monotonic() < deadline and self._thread.is_alive():
                self.answered.wait(0.05)
                if not self._queue.unfinished_tasks:
                    break
        self._end(max(seconds, 0.1))
        if not self._thread.is_alive():
            atexit.unregister(self._leave)

    def _leave(self, process: int) -> None:
        """At the end of the process, of an attachment that nobody has closed, too. A process that was forked has no
        such thread, and the connection is not its own."""
        if os.getpid() == process:
            self._end(CONNECT_SECONDS)

    def _end(self, seconds: float) -> None:
        self._stop.set()
        link = self._link
        if link is not None:
            link.close()
        if self._thread.is_alive():  # where threads run out it was never started
            self._thread.join(seconds)

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
                self.takes_user = False
                self.answered.set()
            if self.final:
                return
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
        token = self._token() if callable(self._token) else self._token
        sock = socket.create_connection(self.address, timeout=CONNECT_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link = Link(sock, Secure(sock, self._tls, self.address[0]) if self._tls is not None else None)
        link.limits = lambda: Limits(64 << 10)
        try:
            self.by_ranges = greet(link, token, **asdict(self._identity)).resync == "ranges"
        except BaseException:
            link.close()
            raise
        link.limits = lambda: Limits(RANGES_TEXT)
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
                to, message, tensors = self._queue.get(timeout=0.05)
            except queue.Empty:
                if not self.connected:
                    return
                continue
            try:
                if to is link and message is _OPENING:
                    self._again.set()
                elif to is link:
                    if isinstance(tensors, Taken):
                        message.sample = tensors.text()
                    _send(link, message, tensors.on_host() if isinstance(tensors, Copies) else tensors)
            finally:
                self._done(tensors)

    def _done(self, tensors: Payload) -> None:
        with self._lock:
            if isinstance(tensors, Copies):
                self._copied -= tensors.nbytes
            elif isinstance(tensors, bytes):
                self._unsent -= len(tensors)
        self._queue.task_done()

    def _listen(self, link: Link) -> None:
        try:
            while True:
                message, size = link.receive()
                if size:
                    raise RecordsError("a payload from a node", where=link.peer)
                if isinstance(message, Wanted) and message.what == ["user"]:
                    self.takes_user = True
                elif isinstance(message, Wanted):
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
                elif isinstance(message, Ranges):
                    self._ask(link, message)
                elif isinstance(message, Epoch):
                    if message.epoch != self.epoch:
                        self._tell(message.why)
                    self.epoch = message.epoch
                elif isinstance(message, Progress):
                    self.iteration, self.status = message.iteration, message.status
                elif isinstance(message, Refused):
                    self._refused, self.final = True, message.final
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

    def _ask(self, link: Link, message: Ranges) -> None:
        """Into the queue of the next boundary. What lies in it takes memory, and so it is bounded."""
        with self._lock:
            waiting, nbytes = len(self._requests), sum(wish.nbytes for _, wish in self._requests)
        if waiting >= REQUESTS:
            raise RecordsError(f"asks for ranges again, with {waiting} requests that no boundary has answered yet",
                               where=link.peer)
        wish = self._prepare(message, min(PATCH_BYTES, 2 * PATCH_BYTES - nbytes))
        with self._lock:
            self._requests.append((link, wish))

    def _ended(self, link: Link, error: Exception) -> None:
        """The first reason counts: a connection that was given up fails in other ways after that."""
        if self._link is link and not self._stop.is_set():
            self._say(getattr(error, "what", f"{type(error).__name__}: {error}"))

    def _drain(self) -> None:
        with self._lock:
            self._requests.clear()
        try:
            while True:
                self._done(self._queue.get_nowait()[2])
        except queue.Empty:
            pass


def _send(link: Link, message: Any, tensors: Mapping[str, torch.Tensor] | bytes) -> None:
    if isinstance(tensors, bytes):
        link.send(message, [tensors], len(tensors))
        return
    if not tensors:
        link.send(message)
        return
    link.send(message, packed(tensors), packed_bytes(tensors))
