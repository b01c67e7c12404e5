"""The background half of an attachment to one node: one thread that sends, one per connection that listens.

    sender = Sender(address, token, identity, opening)    opening(): messages that every connection begins with
    sender.put(message, tensors)       from the training thread: never waits
    sender.put_all([(message, tensors), ...])       the same of several that belong together
    sender.asked()                     what the node has asked for that may be answered now, for the training thread too
    sender.wanted, sender.joined       what the node has asked for, and answered
    sender.pledged                     iteration of the state that the caller has put: records follow it

What is small, and of this machine's memory, goes out at once and in one piece: through a thread of C that never takes
the GIL from the one that launches kernels (outlet.py), or where that cannot be had from the training thread itself, as
far as the socket takes it. All else is queued.

The queue is bounded. When it is full nothing is dropped silently: the whole queue is given up, the connection ends,
`lost` counts it, and the next connection starts anew (the node then misses records, and asks for a state). A node
that is gone is tried again after a second, then after longer pauses, for ever. So is one that welcomes a rank and then
refuses what it sends; what it says each time again is told once. Threads are daemons, so that nothing here keeps a
process alive. They end before the interpreter does, all the same: a thread that comes back from torch's C++ after that
takes the whole process with it (SIGABRT), and a trainer that had done its work would have failed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flowcheck.control.protocol import (
    PATCH_BYTES,
    RANGES_TEXT,
    Epoch,
    Joined,
    Limits,
    Link,
    Members,
    Notice,
    Progress,
    Ranges,
    RecordsError,
    Refused,
    User,
    UserHead,
    Wanted,
    greet,
)
from flowcheck.control.tensors import packed, packed_bytes
from flowcheck.control.tls import Secure
from flowcheck.control.user_state import tail_bytes, tail_of
from flowcheck.errors import FlowcheckError
from flowcheck.trainer.framed import Payload, pieces, user, user_head
from flowcheck.trainer.outlet import Outlet
from flowcheck.trainer.ranges import Copies, Wish
from flowcheck.trainer.starts import Identity

__all__ = ["Sender"]

USER_UNSENT = 64 << 20  # bytes of user states that wait to be sent
QUEUE = 1024  # messages: that many iterations the node may be behind
PAUSE = (1.0, 30.0)
CONNECT_SECONDS = 5.0
READ_SECONDS = 5.0  # that a node may take to read what was sent last
LEAVE_SECONDS = 5.0  # that a process which ends may take to send what it has queued
READ = 4096  # bytes that are read at a time
HEARD_SECONDS = 0.02  # after a message that nobody waits for: those that come meanwhile are heard together
REQUESTS = 8  # for ranges, of a node, that no boundary has answered yet
REASONS = 64  # remembered, so that a refusal that is repeated is told once


_leaving: list[float] = []  # when that is over, once it has begun
_OPENING = object()  # in the queue: say the opening here
_REST = object()  # bytes of messages that were begun
_WAKE = object()  # look whether the connection is still there
Fill = Callable[[Any], None]  # what is still missing in a message


class Sender:
    """why: the last reason for not being connected, or what the node has noticed; "" while all is well. notice: what
    keeps the node from making versions although it wants nothing, "": nothing does. iteration, status: of the node's
    newest version, -1: none yet. by_ranges: the node asks for elements of the state, and no boundary waits for it.
    takes_user: the node keeps what ranks give of themselves; takes_head: as UserHead, too; takes_notice: it hears why a
    job is not known. epoch: that versions of this
    start have there, where it is another than the one said; None: it is not. final: the node does not take this run any
    more, and is not tried again."""

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
        self._queue: queue.Queue[tuple[Link | None, Any, Payload, Fill | None]] = queue.Queue(QUEUE)
        self._outlet = Outlet()
        self._tail: tuple[Link, bytes] | None = None  # of the newest user state, and where it went
        self._requests: deque[tuple[Link, Wish]] = deque()
        self._copied = 0  # bytes of answers that are not sent yet
        self._unsent = 0  # bytes of user states
        self._lock = threading.Lock()  # of these three
        self._link: Link | None = None
        self._stop = threading.Event()
        self._parting = False  # the last word is said: the node ends the connection, and that is no loss
        self._again = threading.Event()  # the opening has more to say
        self.wanted: frozenset[str] = frozenset()
        self.joined: int | None = None
        self.pledged: int | None = None  # None again when the connection ends
        self.notice = ""
        self.by_ranges = False
        self.takes_user = self.takes_head = self.takes_notice = False
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

    def put(
        self, message: Any, tensors: Payload | None = None, asked_on: Link | None = None, fill: Fill | None = None
    ) -> bool:
        """False: it will not be sent. Without a connection there is nobody to send to; that is no loss of ours. Nor is
        there with another connection than `asked_on`, if it is given. bytes: a user state, which is left out where
        USER_UNSENT of them wait already. fill: called with the message by the thread that sends it, before it does; it
        may wait for a device."""
        link = self._link
        if link is None or asked_on not in (None, link):
            return False
        if fill is None and message is not _OPENING:
            done = self._at_once(link, pieces([(message, tensors)]))
            if done is not None:
                return done
        return self._enqueue(link, message, tensors or {}, fill)

    def put_all(self, messages: Sequence[tuple[Any, Payload | None]], fill: Fill | None = None) -> bool:
        """One after the other, in one piece if they can be sent at once. fill: of the last one."""
        link = self._link
        if link is None:
            return False
        messages = [self._shortened(link, *one) if isinstance(one[0], User) else one for one in messages]
        done = None if fill is not None else self._at_once(link, pieces(messages))
        if done is not None:
            return done
        last = len(messages) - 1
        put = [self._enqueue(link, message, tensors or {}, fill if number == last else None)
               for number, (message, tensors) in enumerate(messages)]
        return all(put)

    def put_now(self, number: int, rank: int, own: bytes | None, record: bytes) -> bool | None:
        """As `put_all`, of a user state after iteration `number`, if there is one, and of a frame. None: they have to
        be queued, and neither was."""
        link = self._link
        if link is None:
            return False
        before, out = self._tail, [record]
        if own is not None:
            same = self._same(link, own)
            left = len(own) - same
            head = user_head(number, rank, same, left) if same else user(number, rank, left)
            out = [head, own[:left] if same else own, record]
        done = self._at_once(link, out)
        if done is None:
            self._tail = before
        return done

    def _shortened(self, link: Link, message: User, data: Payload | None) -> tuple[Any, Payload | None]:
        """Without what the node has already: the tensors of the state before this one on this connection."""
        if isinstance(data, bytes) and (same := self._same(link, data)):
            return UserHead(message.iteration, message.rank, same), data[:-same]
        return message, data

    def _same(self, link: Link, data: bytes) -> int:
        """How many of the last bytes of this user state the node has already, once it has this one."""
        if not self.takes_head:
            return 0
        before = self._tail
        if before is not None and before[0] is link and data.endswith(before[1]) and tail_bytes(data) == len(before[1]):
            return len(before[1])
        self._tail = link, tail_of(data)
        return 0

    def _at_once(self, link: Link, out: list[bytes] | None) -> bool | None:
        """None: they have to be queued."""
        if out is None or link.secure or not self._outlet.lock.acquire(blocking=False):
            return None
        try:
            if self._link is not link or self._again.is_set() or self._queue.unfinished_tasks:
                return None
            rest = self._outlet.take(link, out)
        except RecordsError as error:
            self._ended(link, error)
            self._link = None
            link.close()
            self._wake()
            return False
        finally:
            self._outlet.lock.release()
        return None if rest is None else not rest or self._enqueue(link, _REST, rest, None)

    def _enqueue(self, link: Link, message: Any, tensors: Payload, fill: Fill | None) -> bool:
        if isinstance(tensors, bytes):
            with self._lock:
                if message is not _REST and self._unsent + len(tensors) > USER_UNSENT:
                    self._tail = None
                    return False
                self._unsent += len(tensors)
        try:
            self._queue.put_nowait((link, message, tensors, fill))
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

    def _wake(self) -> None:
        """The thread may wait for the queue, and what it would wait for is over."""
        with contextlib.suppress(queue.Full):  # then it does not wait
            self._queue.put_nowait((None, _WAKE, {}, None))

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
        self.part(last)
        self.finish(seconds)

    def part(self, last: Any) -> None:
        """The last word, after which the node may end the connection."""
        self._parting = True
        self.put(last)

    def finish(self, seconds: float) -> None:
        """End the connection when the node has read all that was put, which it says by ending it, or after that time.
        Where this side closed it before, what the node has not read could be thrown away."""
        self._parting = True
        deadline = time.monotonic() + seconds
        while self._queue.unfinished_tasks and self._waits(deadline):
            time.sleep(0.005)
        self._outlet.finish(deadline - time.monotonic())
        if (link := self._link) is not None:
            link.finish()
        deadline = min(deadline, time.monotonic() + READ_SECONDS)
        while self._waits(deadline):
            time.sleep(0.005)
        self._end(max(seconds, 0.1))
        if not self._thread.is_alive():
            atexit.unregister(self._leave)

    def _waits(self, deadline: float) -> bool:
        return self.connected and self._thread.is_alive() and time.monotonic() < deadline

    def _leave(self, process: int) -> None:
        """At the end of the process, of an attachment that nobody has closed, too: what its iterations have put is
        sent, within LEAVE_SECONDS for all of them. A process that was forked has no such thread, and the connection is
        not its own."""
        if os.getpid() == process:
            _leaving[:] = _leaving or [time.monotonic() + LEAVE_SECONDS]
            self.finish(max(0.0, _leaving[0] - time.monotonic()))

    def _end(self, seconds: float) -> None:
        self._stop.set()
        link = self._link
        if link is not None:
            link.close()
        self._wake()
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
                self._outlet.close()
                listener.join()
                self._drain()
                self.wanted, self.joined, self.pledged, self.notice = frozenset(), None, None, ""
                self.takes_user = self.takes_head = self.takes_notice = False
                self.answered.set()
            if self.final or self._parting:
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
            self.by_ranges = greet(link, token, **self._identity.hello).resync == "ranges"
        except BaseException:
            link.close()
            raise
        link.limits = lambda: Limits(RANGES_TEXT)
        link.ahead = READ
        self._outlet.open(link, sock)
        self._again.set()
        return link

    def _send_all(self, link: Link) -> None:
        self.tried.set()
        while not self._stop.is_set():
            while self._again.is_set():
                with self._outlet.lock:
                    self._outlet.flush(link)
                    self._again.clear()
                    for message in self._opening():
                        link.send(message)
            to, message, tensors, fill = self._queue.get()
            try:
                if not self.connected:
                    return
                if to is link and message is _OPENING:
                    self._again.set()
                elif to is link:
                    if fill is not None:
                        fill(message)
                    held = tensors.on_host() if isinstance(tensors, Copies) else tensors
                    with self._outlet.lock:
                        self._outlet.flush(link)
                        _send(link, message, held)
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
                if isinstance(message, Wanted) and "user" in message.what:
                    self.takes_user, self.takes_head = True, "userhead" in message.what
                    self.takes_notice = "notice" in message.what
                    if self.takes_notice and self._identity.places:
                        self.put(Members(list(self._identity.places)))
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
                    self.answered.set()
                    time.sleep(HEARD_SECONDS)
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
            self._wake()

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
        if self._link is link and not self._stop.is_set() and not self._parting:
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
    if isinstance(tensors, bytes) and message is _REST:
        link.send_rest(tensors)
    elif isinstance(tensors, bytes):
        link.send(message, [tensors], len(tensors))
    elif tensors:
        link.send(message, packed(tensors), packed_bytes(tensors))
    else:
        link.send(message)
