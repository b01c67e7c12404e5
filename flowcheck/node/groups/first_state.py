"""Where the first version of a session comes from: ranges of the trainers' state, or all of it from rank 0.

    first = FirstState(group, config, port, ranks, versions, publisher, ask, say)
    resync = first.resync_of(plan)                  how this job is to begin, and how what is lost is made whole
    first.begin(resync, left)                       its session is here: begin, or ask for a state
    first.tick()                                    again and again: ask for what had to wait; True: `go_on` is due
    first.go_on()                                   begin by ranges, now
    first.state(message, tensors)                   a state: announced (no tensors yet), then here
    first.lost(why), first.silent(why)              versions have ended; the mirror brings nothing
    first.base(message, data)                       of a log: a part of a base

When a trainer may be asked again, and for what: state_requests.py. The group's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from flowcheck.control.protocol import Base, Joined, State, Wanted
from flowcheck.errors import UserError
from flowcheck.node.config.replica import ReplicaSettings
from flowcheck.node.groups.checks import split
from flowcheck.node.groups.group import Group
from flowcheck.node.groups.membership import Membership
from flowcheck.node.groups.publisher import Publisher
from flowcheck.node.groups.ranges import Resync
from flowcheck.node.groups.session import LiveSession
from flowcheck.node.groups.state_requests import Asking
from flowcheck.node.ports.silence import Arrivals
from flowcheck.node.versions.group_versions import GroupVersions
from flowcheck.node.versions.journal.log_folder import About
from flowcheck.node.versions.journal.logbook import LogBook
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.follower import StateTooLate

__all__ = ["FirstState"]


class FirstState:
    """tell: gives a message to the ranks of the start that is followed. say: events of the group."""

    def __init__(
        self, group: Group[Any], settings: ReplicaSettings, port: Arrivals, ranks: Membership, versions: GroupVersions,
        publisher: Publisher, tell: Callable[[Any], None], say: Callable[..., None],
    ) -> None:
        self._group, self._settings, self._port, self._ranks = group, settings, port, ranks
        self._versions, self._publisher, self._tell, self._say = versions, publisher, tell, say
        self._resync: Resync | None = None  # of the session
        self._due = False  # the session is to begin by ranges
        self._book: LogBook | None = None  # of a session that is a log
        self._asking = self._new_asking()

    @property
    def by_ranges(self) -> bool:
        return self._resync is not None and self._resync.by_ranges

    def resync_of(self, plan: JobPlan) -> Resync:
        return Resync(self._settings, plan, lambda: self._ranks.members, self._ranks.leaving)

    def begin(self, resync: Resync, left: Path | None) -> None:
        """left: the replica that an earlier process left of this start of the job. Raises FlowcheckError."""
        self._resync = resync
        session = self._group.session
        if session is not None and session.log is not None:
            self._book = self._new_book(session)
            self._tell(Wanted([], ""))
            self._joined(session)
        elif resync.by_ranges:
            self._asking = self._new_asking(self._go_on_soon)
            self.go_on(left)
        else:
            self._tell(Wanted(["state"], "the job is known; a state to begin with is not here"))

    def go_on(self, left: Path | None = None) -> None:
        """Without a state: trainers send records, and ranges as they are asked. Raises FlowcheckError."""
        session, standing = self._group.session, self._versions.standing
        assert session is not None
        self._publisher.count_drops()
        try:
            self._group.take(session.begin(standing.new, left))
        except UserError as error:
            raise standing.no_room(error) from None
        self._asking.beginnings.begun()
        self._tell(Wanted([], ""))
        self._joined(session)

    def come_back(self, session: LiveSession) -> None:
        """A trainer said its job again, which is followed."""
        if self.by_ranges or session.log is not None:
            self._joined(session)  # its records are all that may be missing
        else:
            self._asking.ask("the trainer has come back")

    def _joined(self, session: LiveSession) -> None:
        number = session.clock.first if session.next is None else session.clock.number(session.next)
        self._tell(Joined(number))

    def base(self, message: Base, data: bytes) -> None:
        """A part of a base. Raises UserError: it is not one that was asked for."""
        if self._book is None:
            raise UserError("a base comes from rank 0, of a job of which a log is kept", where="base")
        self._book.take(message, data)

    @property
    def users(self) -> Path | None:
        """Next to which the own states of ranks are kept, of a log; None: next to a replica."""
        return self._book.users if self._book is not None else None

    def tick(self) -> bool:
        session = self._group.session
        if self._book is not None and session is not None:
            self._book.look(None if session.next is None else session.clock.number(session.next))
            return False
        self._asking.again()
        due, self._due = self._due, False
        return due

    def _go_on_soon(self) -> None:
        self._due = True

    def state(self, session: LiveSession, message: State, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises UserError: it does not fit the job."""
        number, iteration = message.iteration, session.clock.iteration(message.iteration)
        if iteration < 0:
            begins = f"the manifest begins at {session.clock.first}"
            raise UserError(f"a state before iteration {number}; {begins}", where="state")
        if not tensors:
            session.announce(iteration)
            self._asking.uploads.announced()
            self._publisher.count_drops()
            return
        self._asking.uploads.taken()
        parameters, state = split(tensors)
        files, standing = self._versions.files, self._versions.standing
        before = files.named
        try:
            self._group.take(session.state(iteration, parameters, state, message.groups, files.path()))
        except UserError as error:
            files.abandon(before)
            if not isinstance(error, StateTooLate):
                raise standing.no_room(error) from None
            self._asking.ask(error.what)
            return
        assert session.replica is not None
        standing.has(session.plan.job, session.replica.step)
        self._say("state", iteration=number, kernels=session.replica.kernels)
        self._ranks.has_state()
        self._asking.answered()
        self._tell(Joined(number))

    def lost(self, why: str, final: bool) -> None:
        """Versions have ended: a state is wanted again, when state_requests.py allows it. final: the job is not to be
        followed any more."""
        session = self._group.session
        if session is not None and session.log is not None:
            return  # the next record begins it again
        if not self.by_ranges:
            self._asking.by_state()
        if not final:
            self._asking.ask(f"checkpoint wanted: {why}")

    def silent(self, why: str) -> None:
        self._asking.silent(why)

    def dropped(self) -> None:
        """The session is gone, and nothing is wanted for it."""
        self._resync, self._due = None, False
        if self._book is not None:
            self._book.close()
        self._book = None
        self._asking = self._new_asking()
        self._ranks.forget_notice()

    def _new_book(self, session: LiveSession) -> LogBook:
        """Raises UserError."""
        job, keeper = session.plan.job, self._versions.journal.keeper
        if keeper is None:
            raise UserError("the job is to be kept as a log, and the journal has no room for it", where="journal",
                            remedy="more journal.megabytes: the node's event `problem` says how many")
        about = About(job.run_id, job.epoch, self._group.name, session.job_start, session.clock.first,
                      keeper.job.plan, keeper.job.body)
        return LogBook(keeper, about, self._tell, self._say)

    def _new_asking(self, begin: Callable[[], None] | None = None) -> Asking:
        return Asking(self._tell, self._say, self._dropped, begin, self._group.now)

    def _dropped(self) -> int:
        """Packets that the node itself has lost: in its own queues, and those of iterations that were given up."""
        session = self._group.session
        return sum(self._port.drops.values()) + (session.dropped if session is not None else 0)
