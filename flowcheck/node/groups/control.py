"""The node's control port: trainers come in, prove that they know the token, and are given to their group
(connection.py). Peers come in the same way, and are answered from its shelf (peers/shelf.py). Other nodes of a job say
which versions they have, and hear which are here (peers/common_step.py).

A connection that is not yet known has no thread of its own, and may send 4 KB within five seconds (doors/gate.py).
Known ones have a reader and a writer each, and there are at most `connections` of them, whatever strangers do: those
are counted apart. Whoever breaks a rule hears it once and is closed; nobody waits for anybody. What strangers do is
said once a minute for each address, with how often it was.
"""

from __future__ import annotations

import math
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from flowcheck.control.protocol import RESYNC, Hello, Known, Link, Opening, RecordsError, Refused, Steps, Wanted
from flowcheck.errors import FlowcheckError, of_the_machine
from flowcheck.node.doors.files import raise_limit, strangers_within
from flowcheck.node.doors.gate import Gate
from flowcheck.node.doors.waiting_room import WaitingRoom
from flowcheck.node.groups.connection import Connection, FinalRefusal
from flowcheck.node.groups.intake import Intake
from flowcheck.node.listening import listen
from flowcheck.node.peers.shelf import Shelf, serve

__all__ = ["ControlServer"]

TRAINERS = 4  # one part in so many of the connections is for trainers alone
BACKLOG = 1024
STRANGERS = 256  # addresses of strangers that are remembered
SAID_SECONDS = 60.0  # until a stranger is said again, and how long there must have been room until it is said again
ON_THE_WAY_SECONDS = 0.25  # that what ranks have sent may be on the network, when the node ends
LAST_SECONDS = 5.0  # that what has come may take to be read then
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class ControlServer:
    """group_of(name): the intake of the group of that name, or why not. shelf_of(name): what peers may read
    of it, None: the group is not here. token: of all roles, or a callable that has those of one. connections: that
    have proved it, at once; strangers: that have not, per_address: of those. tls: asked for each connection. resync:
    what trainers will be asked for, as far as the settings say. hear: as of shelf.serve. now: a clock that never goes
    back. Context manager; main thread opens and closes."""

    def __init__(
        self, address: tuple[str, int], token: Known, connections: int, group_of: Callable[[str], Intake | str],
        say: Callable[..., None], shelf_of: Callable[[str], Shelf | None] = lambda name: None, resync: str = RESYNC[0],
        tls: Callable[[], ssl.SSLContext | None] = lambda: None, hear: Callable[[Steps, str], Steps] | None = None,
        now: Callable[[], float] = time.monotonic, strangers: int = 1024, per_address: int = 256,
    ) -> None:
        self._office = office = _Office(token, connections, group_of, say, shelf_of, resync, tls, hear, now)
        self._listener, self.address = listen(address, "control.listen", BACKLOG)
        room = strangers_within(raise_limit(), strangers, connections)
        self._gate = Gate(self._listener, office, WaitingRoom(room, per_address))
        self._thread = threading.Thread(target=self._gate.run, name="flowcheck control")

    @property
    def connected(self) -> dict[str, int]:
        """Connections: those that are known, and those that are not; and strangers that were ended so far."""
        return {"known": len(self._office.open), "strangers": self._gate.strangers, "ended": self._office.ended}

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End all connections and their threads, once what has come on them is read. Idempotent."""
        self._office.ending.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()  # not before: its number could be another file's while the thread still asks for it
        self._office.close()


class _Office:
    """Those that are known: as of doors.gate.Office."""

    def __init__(
        self, token: Known, connections: int, group_of: Callable[[str], Intake | str], say: Callable[..., None],
        shelf_of: Callable[[str], Shelf | None], resync: str, tls: Callable[[], ssl.SSLContext | None],
        hear: Callable[[Steps, str], Steps] | None, now: Callable[[], float],
    ) -> None:
        self.tls, self._most, self._say, self._now = tls, connections, say, now
        self._opening = partial(Opening, token, resync)
        self._group_of, self._shelf_of, self._hear = group_of, shelf_of, hear
        self._strangers = _Strangers(say, now)
        self._said, self._said_full, self._room_since = -math.inf, False, now()
        self._lock = threading.Lock()
        self.open: dict[Link, threading.Thread] = {}
        self._peers: set[Link] = set()  # of those
        self.ending = threading.Event()
        self.ended = 0

    def closed(self) -> bool:
        return self.ending.is_set()

    def close(self) -> None:
        """What was sent before is read first, and reaches its group."""
        with self._lock:
            still = list(self.open.items())
        _join([thread for _, thread in still], ON_THE_WAY_SECONDS)
        for link, _ in still:
            link.no_more()
        _join([thread for _, thread in still], LAST_SECONDS)
        for link, _ in still:
            link.close()
        for _, thread in still:
            thread.join()

    def opening(self, peer: str) -> Opening:
        return self._opening(peer)

    def stranger(self, peer: str, why: str) -> None:
        self.ended += 1
        self._strangers.say(peer, why)

    def misfit(self, peer: str, why: str) -> None:
        self._say("connection", peer=peer, why=why)

    def trouble(self, why: str) -> None:
        if self._now() - self._said >= SAID_SECONDS:  # anybody can come as often as he likes
            self._said = self._now()
            self._say("problem", why=why)

    def full(self, hello: Hello, peer: str) -> str:
        with self._lock:
            others = hello.role == "peer" and len(self._peers) >= self._most - self._most // TRAINERS
            full, says = len(self.open) >= self._most or others, not self._said_full
            self._said_full |= full
        if not full:
            return ""
        why = f"{self._most} connections to the control port are open, and it takes no more"
        if others:
            why = f"{len(self._peers)} nodes are connected to the control port, and the rest is kept for trainers"
        if says:
            self._say("problem", why=f"{why}: {peer} was sent away. Raise control.connections, or end those that are no"
                                     " trainer's or node's any more")
        return why

    def serve(self, link: Link, hello: Hello) -> None:
        """On a thread of its own. Raises OSError, RuntimeError."""
        keep_alive(link)
        thread = threading.Thread(target=self._serve, args=(link, hello), name=f"flowcheck {link.peer}", daemon=True)
        with self._lock:
            thread.start()
            self.open[link] = thread
            if hello.role == "peer":
                self._peers.add(link)
            if len(self.open) >= self._most and self._now() - self._room_since >= SAID_SECONDS:
                self._said_full = False  # it is full anew, and not one of many times within a minute

    def _serve(self, link: Link, hello: Hello) -> None:
        try:
            if hello.role == "peer":
                serve(link, partial(self._shelf_of, hello.group), self._hear)
            else:
                link.send(Wanted(["user", "userhead", "notice"], ""), seconds=link.limits().seconds)
                Connection(link, hello, self._group_of).run()
        except RecordsError as error:
            self._say("connection", peer=link.peer, why=error.what)
            _part(link, error.what, isinstance(error, FinalRefusal))
        except FlowcheckError as error:  # its group cannot be started: placing threads, a port
            self._cannot(link, error)
        except (MemoryError, OSError, RuntimeError) as error:
            if (machine := of_the_machine(error)) is None:
                raise
            self._cannot(link, machine)
        finally:
            link.close()
            with self._lock:
                if len(self.open) >= self._most:
                    self._room_since = self._now()
                self.open.pop(link, None)
                self._peers.discard(link)

    def _cannot(self, link: Link, error: FlowcheckError) -> None:
        self._say("problem", why=f"{link.peer} cannot be served: {error.message()}")
        _part(link, "; ".join(line.strip() for line in error.message().splitlines()))


class _Strangers:
    """Says `connection` of who is not known, at most once in SAID_SECONDS for each address. Any thread."""

    def __init__(self, say: Callable[..., None], now: Callable[[], float]) -> None:
        self._say, self._now = say, now
        self._lock = threading.Lock()
        self._of: OrderedDict[str, _Stranger] = OrderedDict()  # by address; the one that was said last comes last

    def say(self, peer: str, why: str) -> None:
        address, now = peer.rpartition(":")[0], self._now()
        with self._lock:
            one = self._of.setdefault(address, _Stranger())
            one.peer, one.why, one.count = peer, why, one.count + 1
            due = [(key, other) for key, other in self._of.items() if now - other.said >= SAID_SECONDS]
            for key, other in due:
                if key != address and not other.count:
                    del self._of[key]  # it has not come again
            due = [(key, other) for key, other in due if other.count]
            told = [(other.peer, other.why, other.count) for _, other in due]
            for key, other in due:
                other.said, other.count = now, 0
                self._of.move_to_end(key)
            while len(self._of) > STRANGERS:
                self._of.popitem(last=False)
        for peer, why, count in told:
            self._say("connection", peer=peer, why=why, count=count)


@dataclass
class _Stranger:
    """peer, why: of the newest. count: since it was said."""

    peer: str = ""
    why: str = ""
    count: int = 0
    said: float = -math.inf


def _join(threads: Sequence[threading.Thread], seconds: float) -> None:
    """All of them, within that time."""
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def keep_alive(link: Link) -> None:
    """Raises OSError: the other side is gone."""
    options = {(socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1, (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1}
    for (level, option), value in (options | {(socket.IPPROTO_TCP, key): n for key, n in KEEPALIVE.items()}).items():
        link.set_option(level, option, value)


def _part(link: Link, why: str, final: bool = False) -> None:
    try:
        link.send(Refused(why, final), seconds=1.0)
    except RecordsError:
        pass
