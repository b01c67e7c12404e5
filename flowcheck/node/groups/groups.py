"""All groups of a node: those of trainers, made as they come, and those of jobs without.

    groups = Groups(config, port, receive, say, writer, hashes, common)
    groups.take_up(jobs)               groups that an earlier process left, and the jobs of [[follow]]
    groups.intake_of(name)             of the group of that name, which begins now unless it has begun; or why not
    groups.shelf_of(name)              what peers may read of it
    groups.check()                     raises what ended a group's thread
    groups.stop()

Any thread, behind one lock; `take_up`, `check` and `stop` are the main thread's.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flowcheck.control.message_fields import GROUP
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.config.capture import Follow
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.groups.group import Group
from flowcheck.node.groups.intake import Intake, attended
from flowcheck.node.groups.unattended import unattended
from flowcheck.node.peers.common_step import Common
from flowcheck.node.peers.shelf import Shelf
from flowcheck.node.ports.silence import Arrivals
from flowcheck.node.status.telemetry import Telemetry
from flowcheck.node.versions.output import Hashes, Writer
from flowcheck.rebuild.plan import JobPlan

__all__ = ["Groups"]


class Groups:
    """port: what the mirror brings. receive(): packets, from the first job on. say: events. common: what groups of
    other nodes have. telemetry: takes what is measured of gradients."""

    def __init__(
        self, config: NodeConfig, port: Arrivals, receive: Callable[[], None], say: Callable[..., None],
        writer: Writer, hashes: Hashes | None, common: Common, telemetry: Telemetry | None = None,
    ) -> None:
        self._config, self._port, self._receive, self._say = config, port, receive, say
        self._writer, self._hashes, self._common = writer, hashes, common
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._groups: dict[str, Group[Intake]] = {}
        self._ended: set[str] = set()  # groups whose job has ended in order, and nobody has come back since
        self._unattended: list[Group[Any]] = []

    def take_up(self, jobs: Sequence[tuple[Follow, JobPlan]]) -> None:
        self._unattended = [unattended(*job, self._config, self._port, self._say, self._hashes) for job in jobs]
        for name in self._left_behind():
            self.intake_of(name)
        for one in self._unattended:
            self._receive()
            one.start()

    def _left_behind(self) -> list[str]:
        """Groups whose replicas an earlier process of this name left."""
        pattern = re.compile(rf"flowcheck-{re.escape(self._config.name)}-({GROUP.pattern})-[0-9]+\.replica")
        found = map(pattern.fullmatch, (path.name for path in self._config.replica.directory.glob("*.replica")))
        return sorted({match[1] for match in found if match})[: self._config.groups]

    def intake_of(self, name: str) -> Intake | str:
        """Raises EnvironmentProblem: it cannot begin."""
        if not GROUP.fullmatch(name):
            return "the name of a group has letters, digits, _ and ., 32 of them at most"
        if name in {one.group for one in self._config.follow}:
            return f"group {name!r} is of [[follow]] in this node's settings, without trainers; attach with another"
        with self._lock:
            if name in self._groups:
                self._ended.discard(name)
                return self._groups[name].intake
            if len(self._groups) == self._config.groups and not self._make_room():
                return f"{len(self._groups)} groups are attached, this node has room for no more"
            self._receive()
            self._groups[name] = self._begun(name)
            return self._groups[name].intake

    def _make_room(self) -> bool:
        """One that nobody is in, of no job or of one that has ended, goes."""
        left = {name: group.intake.plan for name, group in self._groups.items() if not group.intake.ranks.members}
        idle = [name for name, plan in left.items() if plan is None]
        idle += [name for name in left if name in self._ended]
        if not idle:
            return False
        self._groups.pop(idle[0]).stop()
        self._ended.discard(idle[0])
        return True

    def _begun(self, name: str) -> Group[Intake]:
        group = attended(name, self._config, self._port, partial(self._hear, name), self._writer, self._hashes,
                         self._common, telemetry=self._telemetry)
        try:
            group.start()
        except RuntimeError as error:  # there is no thread to be had
            group.stop()
            raise EnvironmentProblem(f"group {name!r} cannot be started: {error}", where="groups",
                                     remedy="room for more threads of this user") from None
        return group

    def _hear(self, group: str, event: str, /, **fields: object) -> None:
        """What a group says. A session outlives the end of its job, which only its events tell."""
        if event == "end":
            self._ended.add(group)
        elif event == "attached":  # it may have come back before the end of the one before was said
            self._ended.discard(group)
        self._say(event, **fields)

    def shelf_of(self, name: str) -> Shelf | None:
        with self._lock:
            group = self._groups.get(name)
        return group.intake.peering.shelf if group is not None and self._config.replica.shows else None

    @property
    def connected(self) -> dict[str, int]:
        """Ranks that are, by group."""
        return {name: len(group.intake.ranks.members) for name, group in list(self._groups.items())}

    @property
    def inboxes(self) -> dict[str, dict[str, int]]:
        """What of them is taken, by group."""
        return {name: group.intake.inbox.counts() for name, group in list(self._groups.items())}

    def _all(self) -> list[Group[Any]]:
        return [*self._groups.values(), *self._unattended]

    def check(self) -> None:
        for group in self._all():
            if group.failure is not None:
                raise group.failure

    def stop(self) -> None:
        for group in self._all():
            group.stop()
