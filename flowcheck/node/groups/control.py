"""The node's control port: trainers come in, prove that they know the token, and their messages go to their group.
Peers come in the same way, and are answered from its shelf (peers/shelf.py). Other nodes of a job say which versions
they have, and hear which are here (peers/common_step.py).

A connection that is not yet known has no thread of its own, and may send 4 KB within five seconds (doors/gate.py).
Known ones have a reader and a writer each, and there are at most `connections` of them, whatever strangers do: those
are counted apart. A known one may send payloads up to what its job's manifest implies, at a megabyte per second or
more, and is not read from while its group has too much (inbox.py). Whoever breaks a rule is told once and closed;
nobody waits for anybody else. What strangers do is said once a minute for each address, with how often it was.
"""

from __future__ import annotations

import math
import queue
import socket
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flowcheck.control.protocol import (
    PATCH_BYTES,
    RESYNC,
    Bye,
    Flows,
    Hello,
    Known,
    Limits,
    Link,
    Manifest,
    Members,
    Notice,
    Opening,
    Patch,
    Record,
    RecordsError,
    Refused,
    State,
    Steps,
    User,
    UserHead,
    Wanted,
)
from flowcheck.control.tensors import TensorSpec, unpack
from flowcheck.control.user_state import USER_BYTES, seal_of
from flowcheck.errors import FlowcheckError, of_the_machine
from flowcheck.node.doors.files import raise_limit, strangers_within
from flowcheck.node.doors.gate import Gate
from flowcheck.node.doors.waiting_room import WaitingRoom
from flowcheck.node.groups.group import Group
from flowcheck.node.groups.inbox import TEXT_WEIGHT
from flowcheck.node.groups.members import Inbound, RankSession
from flowcheck.node.listening import listen
from flowcheck.node.peers.shelf import Shelf, serve
from flowcheck.rebuild.plan import JobPlan

__all__ = ["TEXT", "ControlServer", "payload_specs"]

TEXT = 16 << 20  # largest message of a known trainer: the manifest of a large job
HEADERS = 1 << 20  # of a payload's tensors, plus 200 bytes for each
OUTBOX = 256
TRAINERS = 4  # one part in so many of the connections is for trainers alone
BACKLOG = 1024
STRANGERS = 256  # addresses of strangers that are remembered
SAID_SECONDS = 60.0  # until a stranger is said again, and how long there must have been room until it is said again
ON_THE_WAY_SECONDS = 0.25  # that what ranks have sent may be on the network, when the node ends
LAST_SECONDS = 5.0  # that what has come may take to be read then
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
STATES = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master")


class ControlServer:
    """group_of(name): the group of that name, or why there is none. shelf_of(name): what peers may read of it, None:
    there is no such group. token: of all roles, or a callable that has those of one. connections: that have proved it,
    at once; strangers: that have not, per_address: of those. tls: asked for each connection. resync: what trainers will
    be asked for, as far as the settings say. hear: as of shelf.serve. now: a clock that never goes back. Context
    manager; main thread opens and closes."""

    def __init__(
        self, address: tuple[str, int], token: Known, connections: int, group_of: Callable[[str], Group | str],
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
        self, token: Known, connections: int, group_of: Callable[[str], Group | str], say: Callable[..., None],
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
                _Connection(link, hello, self._group_of).run()
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


class FinalRefusal(RecordsError):
    """A run that is not taken any more."""


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


class _Connection:
    """One known rank."""

    def __init__(
        self, link: Link, hello: Hello, group_of: Callable[[str], Group | str]
    ) -> None:
        self._link, self._hello, self._group_of = link, hello, group_of
        self._outbox: queue.Queue[Any] = queue.Queue(OUTBOX)
        self._group: Group | None = None
        self._member: RankSession | None = None
        self._size = 0  # bytes of room that the message which is read now has
        self._user = b""  # the newest state of the rank
        self._deaf = False  # what is sent does not reach it

    def run(self) -> None:
        hello, link = self._hello, self._link
        group = self._group_of(hello.group)
        if isinstance(group, str):
            raise RecordsError(group, where=link.peer)
        member = RankSession(hello.rank, self._send, self._end, refuse=partial(self._end, final=True))
        run = hello.run_id, hello.epoch, hello.ranks
        if why := group.refused(run):
            raise FinalRefusal(why, where=link.peer)
        why = group.join(run, member, hello.instance)
        if why:
            raise RecordsError(why, where=link.peer)
        self._group, self._member = group, member
        link.limits, link.room = self._limits, self._room
        writer = threading.Thread(target=self._write, name=f"flowcheck to {link.peer}", daemon=True)
        broken = ""
        try:
            try:
                writer.start()
            except RuntimeError as error:
                raise RecordsError(f"cannot be served: {error}", where=link.peer) from None
            while self._take(group, member):
                pass
        except RecordsError as error:
            broken = error.what
            raise
        finally:
            group.leave(member)  # before it hears why: it may come back at once
            if broken:
                self._end(broken)  # the writer closes the link, so it has to be the one that says it
            try:
                self._outbox.put_nowait(None)
            except queue.Full:
                link.close()
            if writer.ident is not None:  # there was a thread to be had
                writer.join()
            self._member = None
            link.limits, link.room = Limits, Link.no_bound  # they would know each other, and stay for the collector

    def _room(self, length: int, size: int) -> None:
        """For a message of so many bytes, before it is read. Raises RecordsError."""
        assert self._group is not None and self._member is not None
        if size > max(self._limits().payload.values(), default=0):
            return  # it is refused for that, and not read
        needed = length * TEXT_WEIGHT + size
        try:
            self._group.inbox.enter(self._member, needed, lambda: self._link.over)
        except RecordsError as error:
            raise RecordsError(error.what, where=self._link.peer) from None
        self._size = needed

    def _take(self, group: Group, member: RankSession) -> bool:
        """One message into the inbox. False: it was the last one."""
        try:
            return self._take_one(group, member)
        finally:
            if self._size:
                group.inbox.leave(member, self._size)
                self._size = 0

    def _take_one(self, group: Group, member: RankSession) -> bool:
        try:
            message, size = self._link.receive()
        except RecordsError as error:
            if error.what == "connection closed":
                return False
            raise
        if not isinstance(message, Flows | Manifest | State | Record | Patch | User | UserHead | Notice | Members
                          | Bye):
            raise RecordsError(f"a {type(message).__name__} from a trainer", where=self._link.peer)
        tensors: Mapping[str, torch.Tensor] = {}
        data = b""
        try:
            if isinstance(message, State):
                group.announce(member, message.iteration)
            if isinstance(message, User | UserHead):
                data = bytes(self._link.payload(size))
                if isinstance(message, UserHead):
                    if message.same > len(self._user) or len(data) + message.same > USER_BYTES:
                        raise RecordsError(f"the last {message.same} bytes of a state, of {len(self._user)} before it",
                                           where=self._link.peer)
                    data += self._user[-message.same :]
                    message = User(message.iteration, message.rank)
                seal_of(data, f"{self._link.peer}: User")
                self._user = data
            elif size:
                specs = payload_specs(group.plan, message)
                where = f"{self._link.peer}: {type(message).__name__}"
                found = unpack(self._link.payload(size), specs, where)
                missing = [name for name in specs if name not in found and not name.startswith("optimizer.")]
                if missing:
                    raise RecordsError(f"tensor {missing[0]!r} is missing", where=where)
                tensors = {name.removeprefix("buffer."): tensor for name, tensor in found.items()}
            elif isinstance(message, State) or (isinstance(message, Patch) and not message.refused):
                raise RecordsError(f"a {type(message).__name__.lower()} without tensors", where=self._link.peer)
            group.put(Inbound(member, message, tensors, data, self._size))
            self._size = 0  # it is the inbox's
        except queue.Full:
            raise RecordsError("sends more than the node takes", where=self._link.peer) from None
        except RecordsError:
            raise
        except FlowcheckError as error:
            raise RecordsError(error.what, where=error.where) from None
        return not isinstance(message, Bye)

    def _limits(self) -> Limits:
        plan = self._group.plan if self._group is not None else None
        if plan is None:
            return Limits(TEXT, {}, 30.0)
        sizes = {}
        for name, message in (("state", State(0)), ("record", Record(0))):
            specs = payload_specs(plan, message)
            sizes[name] = sum(spec.nbytes for spec in specs.values()) + HEADERS + 200 * len(specs) if specs else 0
        sizes["user"] = sizes["userhead"] = USER_BYTES
        sizes["patch"] = min(sizes["state"], PATCH_BYTES + HEADERS + 200 * len(payload_specs(plan, State(0))))
        if self._hello.rank != 0:
            del sizes["state"]
        return Limits(TEXT, sizes, 30.0)

    def _send(self, message: Any) -> None:
        if self._deaf:
            return
        try:
            self._outbox.put_nowait(message)
        except queue.Full:
            self._link.close()  # it does not read: it will have to come again

    def _end(self, why: str, final: bool = False) -> None:
        text = "; ".join(line.strip() for line in why.splitlines())  # texts of messages have one line
        self._send(Refused(text, final))
        self._send(None)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._link.send(message)
            except RecordsError:  # it hears nothing more, but what it said before that may be its last records
                self._deaf = True
                self._link.no_more()
                return
        self._link.close()


def payload_specs(plan: JobPlan | None, message: Any) -> dict[str, TensorSpec]:
    """The tensors that a payload may have."""
    if plan is None:
        return {}
    model = plan.job.model
    if isinstance(message, Record):
        return {f"buffer.{e.name}": TensorSpec(e.dtype, tuple(e.shape)) for e in model if e.kind == "buffer"}
    shapes = {e.name: tuple(e.shape) for e in model}
    if isinstance(message, Patch):  # of elements, in one dimension
        sizes = Counter[str]()
        for name, _, length in message.ranges:
            sizes[name] += length
        shapes = {name: (sizes[name],) for name in shapes if name in sizes}
    specs = {f"model.{e.name}": TensorSpec(e.dtype, shapes[e.name]) for e in model if e.name in shapes}
    shapes |= {e.name: (0,) for e in model if not e.elements and isinstance(message, Patch)}  # in every patch
    alone = plan.job.optimizer is not None and plan.job.optimizer.masters == "none"  # states have the parameter's type
    for entry in model:
        if entry.kind == "optimized" and not entry.tied and entry.name in shapes:
            for key in STATES:
                dtype = entry.dtype if alone and key not in ("step", "master") else "float32"
                shape = () if key == "step" else shapes[entry.name]
                specs[f"optimizer.{entry.name}.{key}"] = TensorSpec(dtype, shape)
    return specs
