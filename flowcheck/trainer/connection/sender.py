"""The background half of an attachment to one node: one thread that sends, one per connection that listens.

    sender = Sender(address, token, identity, opening)    opening(): messages that every connection begins with
    sender.put(message, tensors)       from the training thread: never waits
    sender.put_all([(message, tensors), ...])       the same of several that belong together
    sender.put_bulk(bulk, pieces, n)   gradients, or the base of a log: go out when nothing else does (bulk_queue.py)
    sender.requests.asked()            elements that the node has asked for and that may be answered now

What is small, and of this machine's memory, goes out at once and in one piece: through a thread of C that takes no GIL
(outlet.py), or where that cannot be had from the training thread, as far as the socket takes it. All else is queued.

The queue is bounded. When it is full nothing is dropped silently: the whole queue is given up, the connection ends,
`lost` counts it, and the next connection starts from nothing (the node then misses records, and asks for a state). A
node that is gone is tried again after a second, then after longer pauses, for ever. So is one that welcomes a rank and
then refuses what it sends; what it says each time again is said once (reasons.py). Threads are daemons, so that nothing
here keeps a process alive. They end before the interpreter does: one that comes back from torch's C++ after that takes
the process with it (SIGABRT), and a trainer that had done its work would have failed.
"""

from __future__ import annotations

import atexit
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from flowcheck.control.protocol import Link, Members, Progress, Ranges, RecordsError, Refused, User, Wanted
from flowcheck.errors import FlowcheckError
from flowcheck.trainer.connection.backlog import OPENING, QUEUE, REST, Backlog, Fill, send
from flowcheck.trainer.connection.bulk_queue import BulkQueue, Pieces
from flowcheck.trainer.connection.dialer import Dialer
from flowcheck.trainer.connection.framed import Payload, pieces, user, user_head
from flowcheck.trainer.connection.node_state import Heard, NodeState
from flowcheck.trainer.connection.outlet import Outlet
from flowcheck.trainer.connection.range_requests import RangeRequests
from flowcheck.trainer.connection.reasons import Reasons
from flowcheck.trainer.connection.user_tail import UserTail
from flowcheck.trainer.copies import Copies
from flowcheck.trainer.ranges import Wish
from flowcheck.trainer.starts import Identity

__all__ = ["Sender"]

PAUSE = (1.0, 30.0)
READ_SECONDS = 5.0  # that a node may take to read what was sent last
LEAVE_SECONDS = 5.0  # that a process which ends may take to send what it has queued
NOT_SENT = 128 << 10  # bytes of a base that the kernel may hold: all that is put after them waits for them
HEARD_SECONDS = 0.02  # after a message that nobody waits for: those that come meanwhile are heard together

_leaving: list[float] = []  # when that is over, once it has begun


class Sender:
    """node: what it has said. feed, base: gradients, and of a log its base, that are to go out. tried: the first
    attempt to connect is over. answered: something came, or the connection ended. lost: how often the whole queue was
    given up."""

    def __init__(
        self, address: tuple[str, int], token: bytes | Callable[[], bytes], identity: Identity,
        opening: Callable[[], list[Any]], log: Callable[[str], None], prepare: Callable[[Ranges, int], Wish],
        answered: threading.Event | None = None, tls: ssl.SSLContext | None = None,
    ) -> None:
        """token: a callable is asked for each connection. log: a line for the user. prepare(request, bytes that the
        answer may have): called by the listening thread. answered: one that several senders may share."""
        self._dialer, self._opening = Dialer(address, token, identity, tls), opening
        self.node, self._reasons = NodeState(), Reasons(log)
        self._backlog, self._outlet = Backlog(), Outlet()
        self.feed, self.base = BulkQueue(), BulkQueue()
        self.requests = RangeRequests(prepare, self._backlog)
        self._tail = UserTail()
        self._link: Link | None = None
        self._stop = threading.Event()
        self._last: Any = None  # the last word, which waits for gradients
        self._parting = False  # the last word is said: the node ends the connection, and that is no loss
        self._again = threading.Event()  # the opening has more to say
        self.tried = threading.Event()
        self.answered = answered or threading.Event()
        self.lost = 0
        self._thread = threading.Thread(target=self._main, name="flowcheck attachment", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self._leave, os.getpid())

    @property
    def address(self) -> tuple[str, int]:
        return self._dialer.address

    @property
    def why(self) -> str:
        """The last reason for not being connected, or what the node has noticed; "" while all is well."""
        return self._reasons.why

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def attached(self) -> bool:
        """Versions are made, as far as is known."""
        node = self.node
        return self.connected and node.joined is not None and "state" not in node.wanted and not node.notice

    @property
    def follows(self) -> bool:
        """Records are of use to it. A node may take longer to take a state in than ranks wait for that: the records of
        what follows it are queued after it all the same, or it would lose its place at once and ask again, without
        end."""
        node = self.node
        pledged = node.pledged is not None and "state" not in node.wanted
        return self.connected and (node.joined is not None or pledged)

    def put(
        self, message: Any, tensors: Payload | None = None, asked_on: Link | None = None, fill: Fill | None = None
    ) -> bool:
        """False: it will not be sent. Without a connection nobody can be sent to; that is not our loss. Nor is
        there with another connection than `asked_on`, if it is given. bytes: a user state, which is left out where
        USER_UNSENT of them wait already. fill: called with the message by the thread that sends it, before it does; it
        may wait for a device."""
        link = self._link
        if link is None or asked_on not in (None, link):
            return False
        if fill is None and message is not OPENING:
            done = self._at_once(link, pieces([(message, tensors)]))
            if done is not None:
                return done
        return self._enqueue(link, message, tensors or {}, fill)

    def put_all(self, messages: Sequence[tuple[Any, Payload | None]], fill: Fill | None = None) -> bool:
        """One after the other, in one piece if they can be sent at once. fill: of the last one."""
        link = self._link
        if link is None:
            return False
        head = self.node.takes_head
        messages = [self._tail.shortened(link, *one) if head and isinstance(one[0], User) else one for one in messages]
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
        before, out = self._tail.now, [record]
        if own is not None:
            same = self._tail.same(link, own) if self.node.takes_head else 0
            left = len(own) - same
            head = user_head(number, rank, same, left) if same else user(number, rank, left)
            out = [head, own[:left] if same else own, record]
        done = self._at_once(link, out)
        if done is None:
            self._tail.put_back(before)
        return done

    def _at_once(self, link: Link, out: list[bytes] | None) -> bool | None:
        """None: they have to be queued."""
        if out is None or link.secure or not self._outlet.lock.acquire(blocking=False):
            return None
        try:
            if self._link is not link or self._again.is_set() or self._backlog.queue.unfinished_tasks:
                return None
            rest = self._outlet.take(link, out)
            return None if rest is None else not rest or self._enqueue(link, REST, rest, None)
        except RecordsError as error:
            self._ended(link, error)
            self._link = None
            link.close()
            self._backlog.wake()
            return False
        finally:
            self._outlet.lock.release()

    def _enqueue(self, link: Link, message: Any, tensors: Payload, fill: Fill | None) -> bool:
        try:
            put = self._backlog.put(link, message, tensors, fill)
        except queue.Full:
            self.lost += 1
            self._link = None
            self._reasons.say(f"the node is more than {QUEUE} iterations behind")
            link.close()
            return False
        if not put:
            self._tail.forget()
        return put

    def begin_base(self) -> Link | None:
        """Another base: of the one before nothing more is sent. Returns on which connection; None: it has ended."""
        self.base.clear()
        link = self._link
        if link is not None:
            with suppress(OSError, AttributeError):  # else records wait for more of a base on a slow link
                link.set_option(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT)
        return link

    def put_bulk(self, bulk: BulkQueue, pieces: Pieces, nbytes: int, on: Link | None = None) -> bool:
        """pieces: made by the thread that sends. on: the connection that a base was begun on. False: it has ended."""
        link = self._link
        if link is None or on not in (None, link):
            return False
        bulk.put(link, pieces, nbytes)
        self._backlog.wake()
        return True

    def open_again(self) -> None:
        """What `opening` says has changed: send it on the connection that there is, after what was put before. A record
        of the job before would be taken for one of the new job's."""
        if not self.put(OPENING):
            self._again.set()

    def close(self, last: Any, seconds: float) -> None:
        """Send what is queued and `last`, if that works within the time."""
        self.part(last)
        self.finish(seconds)

    def part(self, last: Any) -> None:
        """The last word, after which the node may end the connection."""
        self._parting = True
        self.base.clear()
        if self.feed.idle:
            self.put(last)
        else:
            self._last = last

    def finish(self, seconds: float) -> None:
        """End the connection when the node has read all that was put, which it says by ending it, or after that time.
        Where this side closed it before, what the node has not read could be thrown away."""
        self._parting = True
        deadline = time.monotonic() + seconds
        while not (self.feed.idle and self.base.idle and self._backlog.idle) and self._waits(deadline):
            time.sleep(0.005)
        if (last := self._last) is not None:
            self._last = None
            self.put(last)
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
        self._backlog.wake()
        if self._thread.is_alive():  # where threads run out it was never started
            self._thread.join(seconds)

    # -- the thread --

    def _main(self) -> None:
        pause = PAUSE[0]
        while not self._stop.is_set():
            try:
                link, sock = self._dialer.connect(self.node)
            except (OSError, FlowcheckError) as error:
                self._reasons.say(getattr(error, "what", None) or f"no connection: {getattr(error, 'strerror', error)}")
                self.tried.set()
                self._stop.wait(pause)
                pause = min(2 * pause, PAUSE[1])
                continue
            self._outlet.open(link, sock)
            self.feed.opened()
            self.base.opened()
            self._again.set()
            began, self._link = time.monotonic(), link
            self._reasons.begin()  # before anything is heard on it
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
                self._backlog.drain()
                for waiting in (self.requests, self.feed, self.base):
                    waiting.clear()
                self.node.disconnected()
                self.answered.set()
            if self.node.final or self._parting:
                return
            refused = self._reasons.refused
            anew = not refused or time.monotonic() - began > PAUSE[1]
            self._reasons.end(forget=anew)
            if anew:
                pause = PAUSE[0]
            self._stop.wait(pause)
            if refused:
                pause = min(2 * pause, PAUSE[1])

    def _send_all(self, link: Link) -> None:
        self.tried.set()
        while not self._stop.is_set():
            while self._again.is_set():
                with self._outlet.lock:
                    self._outlet.flush(link)
                    self._again.clear()
                    for message in self._opening():
                        link.send(message)
            if self._sends_bulk(link, self.feed) or self._sends_bulk(link, self.base):
                continue
            to, message, tensors, fill = self._backlog.get()
            try:
                if not self.connected:
                    return
                if to is link and message is OPENING:
                    self._again.set()
                elif to is link:
                    if fill is not None:
                        fill(message)
                    held = tensors.on_host() if isinstance(tensors, Copies) else tensors
                    with self._outlet.lock:
                        self._outlet.flush(link)
                        send(link, message, held)
            finally:
                self._backlog.done(tensors)

    def _sends_bulk(self, link: Link, bulk: BulkQueue) -> bool:
        """A part of it, if nothing else waits."""
        waiting = self._backlog.queue
        part = bulk.part(link) if self._link is link and not waiting.unfinished_tasks else None
        if part is None:
            return False
        with self._outlet.lock:
            if waiting.unfinished_tasks:
                return False  # the rest of a message, it may be
            self._outlet.flush(link)
            began = time.monotonic()
            link.send(part.message, [part.data], len(part.data))
        bulk.went(part, time.monotonic() - began)
        return True

    def _listen(self, link: Link) -> None:
        try:
            while True:
                message, size = link.receive()
                if size:
                    raise RecordsError("a payload from a node", where=link.peer)
                self._hear(link, message)
                self.answered.set()
                if isinstance(message, Progress):
                    time.sleep(HEARD_SECONDS)
        except (FlowcheckError, OSError) as error:
            self._ended(link, error)
        finally:
            self._link = None
            link.close()
            self.answered.set()
            self._backlog.wake()

    def _hear(self, link: Link, message: Any) -> None:
        """Raises RecordsError: the connection is of no use any more."""
        if isinstance(message, Heard):
            self.node.hear(message, self._reasons, lambda: self._link is link)
            places = self._dialer.identity.places
            if isinstance(message, Wanted) and "user" in message.what and self.node.takes_notice and places:
                self.put(Members(list(places)))
        elif isinstance(message, Ranges):
            self.requests.add(link, message)
        elif isinstance(message, Refused):
            self._reasons.refused, self.node.final = True, message.final
            raise RecordsError(f"refused: {message.why}", where=link.peer)
        else:
            raise RecordsError(f"a {type(message).__name__} from a node", where=link.peer)

    def _ended(self, link: Link, error: Exception) -> None:
        """The first reason counts: a connection that was given up fails in other ways after that."""
        if self._link is link and not self._stop.is_set() and not self._parting:
            self._reasons.say(getattr(error, "what", f"{type(error).__name__}: {error}"))
