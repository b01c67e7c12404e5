"""Which ranks a group has, of which run, and what they hear from it: what connections call, and what planning reads.

    membership.join(run, member, instance)      a rank has said hello: why it may not stay, or ""
    membership.leave(member)                    its connection has ended
    membership.absent()                         ranks without which the job cannot be followed, said once a start
    membership.tell(message)                    to all that are there; those that come later hear what is wanted then
    membership.said()                           of which run and start they are, and its manifest

Any thread, behind one lock. Connections never wait for the group.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from flowcheck.control.protocol import Epoch, Manifest, Notice, Wanted
from flowcheck.control.start import Start
from flowcheck.node.groups.members import RankSession
from flowcheck.node.versions.runs import new_run_id

__all__ = ["Membership", "Said"]

ABSENT_SECONDS = 10.0  # that a rank may come later than the first one
LOOK_SECONDS = 1.0
NOTHING = Wanted(["manifest", "flows"], "")  # as every start begins: there is no reason that a rank should log


@dataclass(frozen=True)
class Said:
    """What ranks have said of one start. run: id, epoch, ranks. own_id: for a job without one. instance: rank 0's."""

    run: tuple[str, int, int]
    manifest: Manifest
    own_id: str
    instance: str


class Membership:
    """members: by rank. run: id, epoch, ranks; None: nobody has come yet. start: counts runs, and starts of one run.
    epoch: that this start has here, where it is another than it says. gone: connections that ended, and what they had
    sent may not be handled yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.members: dict[int, RankSession] = {}
        self.run: tuple[str, int, int] | None = None
        self.start = 0
        self._instances: dict[int, str] = {}  # of this start, by rank
        self.own_id = ""  # of this start, for a job that says none
        self.manifest: Manifest | None = None  # of this start
        self._wanted = NOTHING
        self._notice = Notice("")
        self.epoch: Epoch | None = None
        self._looked, self._first = 0.0, 0.0  # when; and when the first of those that are here had come
        self._named = 0  # the start whose absent ranks were said
        self.gone: list[RankSession] = []  # not in an inbox, which may be full

    def join(self, run: tuple[str, int, int], member: RankSession, instance: str = "") -> str:
        """A rank has said hello. Returns why it may not stay, or "". Says what is wanted, if it may.

        A rank that comes back as another instance is a job that was started again: nothing that the one before has
        sent, or has on the wire, belongs to it.
        """
        with self._lock:
            if self.run is not None and self.run != run and self.members:
                name, epoch, ranks = self.run
                return (f"run {name!r}, epoch {epoch}, {ranks} ranks, is attached here, and this is {run[0]!r},"
                        f" {run[1]}, {run[2]}; remedy: the same on all ranks; for another job attach(group=...)")
            if member.rank in self.members:
                return f"rank {member.rank} is attached already"
            before: list[RankSession] = []
            if self.run != run or self._instances.get(member.rank, instance) != instance:
                before = list(self.members.values())
                self.run, self.manifest, self._instances = run, None, {}
                self.start += 1
                self.own_id = new_run_id()
                self.members.clear()
                self._wanted, self.epoch = NOTHING, None
            if not self.members:
                self._first = time.monotonic()
            self._instances[member.rank] = instance
            member.start, member.numbered = self.start, Start.of(instance) is not None
            self.members[member.rank] = member
            member.send(self._wanted)
            if self._notice.why:
                member.send(self._notice)
            if self.epoch is not None and member.numbered:
                member.send(self.epoch)
        for one in before:
            one.end("the job was started again")
        return ""

    def leave(self, member: RankSession) -> None:
        with self._lock:
            if self.members.get(member.rank) is member:
                del self.members[member.rank]
            self.gone.append(member)

    def leaving(self) -> set[int]:
        """Ranks that have left, and some of what they had sent is not handled yet."""
        return {one.rank for one in list(self.gone) if one.start == self.start}

    def absent(self) -> list[int]:
        """Ranks that have not come ABSENT_SECONDS after the first one, if any; of each start of a job once."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return []
        self._looked = now
        with self._lock:
            if self.run is None or not self.members or self._named == self.start or (
                    now - self._first < ABSENT_SECONDS):
                return []
            found = [rank for rank in range(self.run[2]) if rank not in self.members]
            if found:
                self._named = self.start
            return found

    def said(self) -> Said | None:
        """None: it has not come yet."""
        with self._lock:
            if self.run is None or self.manifest is None:
                return None
            return Said(self.run, self.manifest, self.own_id, self._instances.get(0, ""))

    def flows(self) -> dict[int, list[dict[str, Any]]]:
        """Connections of each rank that has said its own."""
        with self._lock:
            return {rank: one.flows for rank, one in self.members.items() if one.flows is not None}

    def take_back(self, manifest: Manifest, before: Manifest | None) -> None:
        """It was refused: other ranks must not be refused for what rank 0 has sent."""
        with self._lock:
            if self.manifest is manifest:  # no new start of the job has forgotten it
                self.manifest = before

    def has_state(self) -> None:
        """Who comes later is asked for nothing."""
        with self._lock:
            self._wanted = Wanted([], "")

    def forget_notice(self) -> None:
        """Who comes later does not hear it."""
        with self._lock:
            self._notice = Notice("")

    def tell(self, message: Any, start: int | None = None) -> None:
        """start: of which it is; it is not for the members of a later one."""
        with self._lock:
            if start not in (None, self.start):
                return
            if isinstance(message, Wanted):
                self._wanted = message
            elif isinstance(message, Notice):
                self._notice = message
            elif isinstance(message, Epoch):
                self.epoch = message
            members = [one for one in self.members.values() if one.numbered or not isinstance(message, Epoch)]
        for member in members:
            member.send(message)
