"""One known rank at the control port: its messages go to its group, and what it is to hear goes out.

    Connection(link, hello, group_of).run()       on a thread of its own; another one writes
    payload_specs(plan, message)                  the tensors that a payload may have

It may send payloads up to what its job's manifest implies, at a megabyte per second or more, and is not read from while
its group has too much (inbox.py). Whoever breaks a rule hears it once and is closed; nobody waits for anybody else.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from flowcheck.control.protocol import (
    PATCH_BYTES,
    Base,
    Bye,
    Fed,
    Flows,
    Hello,
    Limits,
    Link,
    Manifest,
    Members,
    Notice,
    Patch,
    Record,
    RecordsError,
    Refused,
    State,
    Unfed,
    User,
    UserHead,
)
from flowcheck.control.tensors import TensorSpec, unpack
from flowcheck.control.user_state import USER_BYTES, seal_of
from flowcheck.errors import FlowcheckError
from flowcheck.job.model import FEED, LOG
from flowcheck.node.groups.inbox import TEXT_WEIGHT
from flowcheck.node.groups.intake import Intake
from flowcheck.node.groups.members import Inbound, RankSession
from flowcheck.rebuild.plan import JobPlan

__all__ = ["TEXT", "Connection", "FinalRefusal", "payload_specs"]

TEXT = 16 << 20  # largest message of a known trainer: the manifest of a large job
HEADERS = 1 << 20  # of a payload's tensors, plus 200 bytes for each
OUTBOX = 256
BASE_PART = 8 << 20  # bytes of a part of a base
STATES = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master")


class FinalRefusal(RecordsError):
    """A run that is not taken any more."""


class Connection:
    """group_of(name): the intake of the group of that name, or why it cannot be had."""

    def __init__(
        self, link: Link, hello: Hello, group_of: Callable[[str], Intake | str]
    ) -> None:
        self._link, self._hello, self._group_of = link, hello, group_of
        self._outbox: queue.Queue[Any] = queue.Queue(OUTBOX)
        self._group: Intake | None = None
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
        why = group.ranks.join(run, member, hello.instance)
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
            group.ranks.leave(member)  # before it hears why: it may come back at once
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

    def _take(self, group: Intake, member: RankSession) -> bool:
        """One message into the inbox. False: it was the last one."""
        try:
            return self._take_one(group, member)
        finally:
            if self._size:
                group.inbox.leave(member, self._size)
                self._size = 0

    def _take_one(self, group: Intake, member: RankSession) -> bool:
        try:
            message, size = self._link.receive()
        except RecordsError as error:
            if error.what == "connection closed":
                return False
            raise
        if not isinstance(message, Flows | Manifest | State | Record | Patch | User | UserHead | Base | Fed | Unfed
                          | Notice | Members | Bye):
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
            elif isinstance(message, Fed | Unfed):
                return self._feed(group, message, size)
            elif isinstance(message, Base):
                data = bytes(self._link.payload(size))
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

    def _feed(self, group: Intake, message: Fed | Unfed, size: int) -> bool:
        """Gradients go where they belong, and not through the inbox: who sends them waits for an arena, and nobody
        else. True: the next message may come."""
        feeding, rank = group.feeding, self._hello.rank
        if not size and isinstance(message, Fed):
            raise RecordsError("gradients without a payload", where=self._link.peer)
        wanted = feeding is not None and feeding.wait(rank, message, lambda: self._link.over)
        data = self._link.payload(size) if size else b""
        if wanted and feeding is not None:
            if isinstance(message, Fed):
                feeding.give(rank, message, data)
            else:
                feeding.withhold(rank, message)
        return True

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
        sizes["base"] = BASE_PART if plan.job.kind == LOG else 0
        sizes["fed"] = BASE_PART if plan.job.source == FEED else 0
        if self._hello.rank != 0:
            del sizes["state"], sizes["base"]
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
