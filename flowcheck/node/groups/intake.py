"""What ranks send to a group: the inbox between their connections and its thread, and what becomes of each message.

    intake.ranks, .inbox                     who is connected, and what of theirs is not handled yet
    intake.put(inbound), .announce(...)      a connection has read something
    intake.refused(run)                      why a run is not taken any more, "": it is
    intake.plan                              what payloads are checked against
    intake.feeding                           where gradients go that ranks send; None: nowhere
    intake.tick()                            one message, and what had to wait

    manifest and flows -> a plan (planning.py) -> session -> its first state (first_state.py) -> records, ranges

Connections (connection.py) only put into the inbox, and never wait for the group. The group's thread has the rest.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from flowcheck.control.protocol import Base, Bye, Flows, Manifest, Members, Notice, Patch, Record, State, User, Wanted
from flowcheck.errors import FlowcheckError, UserError
from flowcheck.job.clock import Clock
from flowcheck.job.model import FEED
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.groups.feeding import Feeding
from flowcheck.node.groups.first_state import FirstState
from flowcheck.node.groups.group import Feed, Group
from flowcheck.node.groups.inbox import Inbox
from flowcheck.node.groups.members import Inbound, RankSession
from flowcheck.node.groups.membership import Membership
from flowcheck.node.groups.planning import Planned, Planning
from flowcheck.node.groups.publisher import Publisher
from flowcheck.node.groups.session import LiveSession
from flowcheck.node.groups.unfollowed import Unfollowed
from flowcheck.node.peers.common_step import Common
from flowcheck.node.peers.peer_set import Peering
from flowcheck.node.ports.silence import Arrivals, Silent
from flowcheck.node.status.failures import Ledger
from flowcheck.node.status.telemetry import Telemetry
from flowcheck.node.versions.group_versions import GroupVersions
from flowcheck.node.versions.output import Hashes, Writer
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.events import Event, Lost
from flowcheck.rebuild.version.records import RanksDiffer

__all__ = ["Intake", "attended"]

LAST_SECONDS = 5.0  # that ranks may need for their last word after rank 0's


def attended(
    name: str, config: NodeConfig, port: Arrivals, say: Callable[..., None], writer: Writer, hashes: Hashes | None,
    common: Common, now: Callable[[], float] = time.monotonic, telemetry: Telemetry | None = None,
) -> Group[Intake]:
    """A group of a job with trainers. name: what they call it. say: events. common: what other groups have.
    telemetry: takes what is measured of gradients."""
    say = partial(say, name=name)
    ranks, versions = Membership(), GroupVersions(config, name, say)
    publisher = Publisher(name, config.output, port, say, ranks.tell, versions, writer, hashes, common, telemetry)
    return Group(name, port.placers, say, publisher,
                 lambda group: Intake(group, config, port, ranks, versions, publisher, common, say), now)


class Intake(Feed):
    """group: whose it is. port: what the mirror brings. ranks: who is connected. say: events of the group."""

    def __init__(
        self, group: Group[Intake], config: NodeConfig, port: Arrivals, ranks: Membership, versions: GroupVersions,
        publisher: Publisher, common: Common, say: Callable[..., None],
    ) -> None:
        self._group, self._config, self._port, self._say = group, config, port, say
        self.ranks, self.versions, self._publisher = ranks, versions, publisher
        self.inbox = Inbox(config.control.inbox_mb << 20)
        self.plan: JobPlan | None = None
        self.feeding: Feeding | None = None
        self.peering = Peering(config, group.name)
        self._job: dict[str, Any] | None = None  # what the session was planned from
        self._followed = 0  # the start that the session belongs to
        self._ends: float | None = None  # rank 0 has said goodbye: when what has come is judged, at the latest
        self._ledger, self._unfollowed = Ledger(say), Unfollowed(group.name, say)
        self._planning = Planning(group.name, config, port, ranks, versions, common, self._unfollowed, say)
        self._first = FirstState(group, config.replica, port, ranks, versions, publisher, self._tell, say)

    # -- for connections: any thread --

    def put(self, inbound: Inbound) -> None:
        """Raises queue.Full."""
        self.inbox.put(inbound)

    def announce(self, member: RankSession, iteration: int) -> None:
        """A state's header has come; its payload follows."""
        self.put(Inbound(member, State(iteration)))

    def refused(self, run: tuple[str, int, int]) -> str:
        return self.versions.divergences.refused(run)

    def stop(self) -> None:
        self.inbox.close()

    # -- for the group's thread --

    def start(self) -> None:
        for kept in self.versions.files.found():
            self._say("kept", run_id=kept.run_id, step=kept.step, path=str(kept.path),
                      needs="manifest, flows and state of a run")

    def tick(self) -> bool:
        self._restart(self.ranks.start)
        found = self._handle_one()
        self._do_what_waits()
        self._seek()
        if self._group.session is None:
            self._look_for_ranks()
        return found

    def last(self) -> None:
        while self._handle_one():
            pass
        self._end(math.inf)

    def hear(self, event: Event) -> None:
        if isinstance(event, Lost):
            self._first.lost(self._publisher.why, final=bool(self.versions.divergences.refusing))
        elif isinstance(event, Silent):
            self._first.silent(event.why)

    def dropped(self) -> None:
        self._ends, self.feeding = None, None
        self._first.dropped()

    def close(self) -> None:
        self.plan = None
        self._planning.close()
        self.versions.close(self._config.replica.keep)

    def _tell(self, message: Any) -> None:
        """What is wanted is wanted of the start that the session follows: one that has come meanwhile has heard what
        it is asked for, and no answer of its would be of use here."""
        self.ranks.tell(message, self._followed if isinstance(message, Wanted) else None)

    def _restart(self, start: int) -> None:
        """A newer start of a job: what the session holds, packets and records, is of the one before."""
        if start > self._followed:
            self._end(math.inf)
            self._drop(None, "the job was started again")
            self._planning.forget()
            self.versions.files.restarted()  # what ranks give from now on belongs to no version of the start before
            self._followed = start
            self._unfollowed.restarted()
            self._ledger.restarted(self.ranks.run[0] if self.ranks.run is not None else "")

    def _drop(self, plan: JobPlan | None, why: str) -> None:
        """plan: what payloads are checked against from now on. why: what has begun is not judged."""
        self.plan = plan
        self._group.drop(why)

    def _do_what_waits(self) -> None:
        """For its time, or for the session to be through with what ended its versions."""
        self._end(time.monotonic())
        if why := self.versions.divergences.refusing:
            self._refuse(why)
        due, outnumbered = self._first.tick(), self._is_outnumbered()
        if not due and not self._group.moved and not outnumbered:
            return
        begin = self._group.join_again if self._group.moved else self._number_again if outnumbered else (
            self._first.go_on)
        try:
            begin()
        except FlowcheckError as error:  # no room for another replica: trainers come again, and so does the job
            self._drop(None, error.what)
            self.versions.abandon()
            self._send_away(error)

    def _is_outnumbered(self) -> bool:
        """Does another node have this start under a newer epoch, and this one no version of it?"""
        session = self._group.session
        if session is None or (session.replica is not None and session.replica.steps):
            return False
        return self._planning.is_outnumbered(session.plan.job.epoch)

    def _number_again(self) -> None:
        """Raises FlowcheckError."""
        self._drop(self.plan, "the job is followed under another epoch")
        self.versions.files.abandon()
        self.follow()

    def _seek(self) -> None:
        try:
            if self._planning.seek():
                self.follow()
        except FlowcheckError as error:
            self._send_away(error)

    def _look_for_ranks(self) -> None:
        ranks = self.ranks
        if self._unfollowed.why:
            return  # they were sent away
        if (found := ranks.absent()) and ranks.run is not None:
            self._say("incomplete", run_id=ranks.run[0], ranks=ranks.run[2], absent=found[:8],
                      why=f"{len(found)} of {ranks.run[2]} ranks have not come, and the job cannot be followed without"
                          f" them ({self._unfollowed.ranks(found)}): a firewall, another address of the node there, or"
                          " they do not call attach")

    def _send_away(self, error: FlowcheckError) -> None:
        self._say("problem", why=error.message())
        for member in list(self.ranks.members.values()):
            member.end(error.message())

    def _refuse(self, why: str) -> None:
        """The run is not followed any more; what of it was verified stays."""
        self.versions.divergences.refusing = ""
        if (session := self._group.session) is not None:
            job = session.plan.job
            self._say("job_refused", run_id=job.run_id, epoch=job.epoch, serves=session.serves, why=why)
        self._drop(None, why)
        self.versions.abandon()
        for member in list(self.ranks.members.values()):
            (member.refuse or member.end)(why)

    def _end(self, now: float) -> None:
        """Rank 0 has said goodbye: judge what is there, once the others have answered what they were asked for."""
        session = self._group.session
        if session is None or self._ends is None or (now < self._ends and session.owed & self.ranks.members.keys()):
            return
        self._ends = None
        self._group.finish()
        self._group.place()  # somebody may come back
        self._say("end", run_id=session.plan.job.run_id, serves=session.serves)

    # -- messages --

    def _handle_one(self) -> bool:
        try:
            inbound = self.inbox.get()
        except queue.Empty:
            self._see_off()
            return False
        try:
            self._handle_this(inbound)
        finally:
            self.inbox.done(inbound)
        return True

    def _see_off(self) -> None:
        """Ranks that have left, and all that they had sent is handled."""
        while self.ranks.gone:
            member = self.ranks.gone.pop()
            if member.start == self._followed and member.rank not in self.ranks.members:
                self._ledger.left(member.rank)
            if member.rank == 0 and self._group.session is not None:
                self._group.session.withdraw()
            if self.feeding is not None and member.rank not in self.ranks.members:
                self.feeding.left(member.rank)

    def _handle_this(self, inbound: Inbound) -> None:
        member, message = inbound.member, inbound.message
        self._restart(member.start)
        gone = self.ranks.members.get(member.rank) is not member
        if gone and isinstance(message, Patch):
            gone = not any(one is member for one in self.ranks.gone)  # it had sent that before it left
        if member.start != self._followed or (gone and not isinstance(message, Record | User | Bye)):
            return  # of somebody who has left; records of a run stay good until it is started again
        if not gone:
            self._ledger.back(member.rank)
        try:
            self._handle(inbound)
        except FlowcheckError as error:
            self._say("refused", rank=member.rank, why=error.message())
            if self._group.session is None and isinstance(message, Flows | Manifest):
                self._unfollowed.refused(error.message())  # whoever's message was the last that it took: all hear why
                self._tell(Wanted(["manifest", "flows"], f"the job was refused: {self._unfollowed.why}"))
            member.end(error.message())
            if isinstance(error, RanksDiffer):
                self.versions.divergences.refuse(error.what)

    def _handle(self, inbound: Inbound) -> None:
        message, member, session = inbound.message, inbound.member, self._group.session
        match message:
            case Bye():
                self._ledger.bye(member.rank)
                if session is not None and member.rank == 0:
                    self._ends = time.monotonic() + LAST_SECONDS
            case Members():
                self._unfollowed.placed(message.places)
            case Notice():
                self._unfollowed.watches(member.rank, message.why)
            case Flows():
                if member.flows != message.flows:  # else it only says so again
                    member.flows = message.flows
                    self.follow()
            case Manifest():
                self._manifest(member, message)
            case State():
                if session is None or self.ranks.manifest is None or member.rank != 0:
                    raise UserError("a state comes from rank 0, and after its manifest", where=f"rank {member.rank}")
                self._first.state(session, message, inbound.tensors)
            case _ if session is not None:
                self._give(session, inbound)

    def _manifest(self, member: RankSession, message: Manifest) -> None:
        if member.rank != 0:
            raise UserError("a manifest comes from rank 0", where=f"rank {member.rank}")
        if member.manifest == message:
            return
        before, member.manifest, self.ranks.manifest = self.ranks.manifest, message, message
        try:
            self.follow()
        except FlowcheckError:
            self.ranks.take_back(message, before)
            raise

    def _give(self, session: LiveSession, inbound: Inbound) -> None:
        """What a session that follows has of its ranks."""
        message, rank, named = inbound.message, inbound.member.rank, self._first.users or self.versions.files.named
        if isinstance(message, Record) and self.ranks.manifest is not None:
            counted = replace(message, iteration=session.clock.iteration(message.iteration))
            self._group.take(session.record(counted, inbound.tensors, rank))
            self._ledger.over(message.iteration)
        elif isinstance(message, User) and named is not None:
            self.versions.users.put(named, Clock().after(message.iteration), message.rank, inbound.data)
        elif isinstance(message, Base):
            self._first.base(message, inbound.data)
        elif isinstance(message, Patch):
            session.patch(rank, message, inbound.tensors)

    # -- a session --

    def follow(self) -> None:
        said, session = self.ranks.said(), self._group.session
        if said is None:
            return
        if why := self.versions.divergences.refused(said.run, said.own_id):
            self._refuse(why)
            return
        body = self._planning.body(said, self._tell)
        if body is None:
            return
        if session is not None and self._job == body and session.clock.first == said.manifest.first:
            self._first.come_back(session)
            return
        planned = self._planning.plan(said, body)
        self._drop(planned.plan, "the job has another manifest or other connections")
        self._job = body
        self._begin(planned, body, said.run, Clock(said.manifest.first), said.own_id)

    def _begin(self, planned: Planned, body: dict[str, Any], run: tuple[str, int, int], clock: Clock, own_id: str
               ) -> None:
        """Raises FlowcheckError."""
        plan, job, settings, versions = planned.plan, planned.plan.job, self._config.replica, self.versions
        self._publisher.begin()
        versions.divergences.begins(run, job, clock.before(0), planned.start or f"/{self._followed}", own_id)
        if planned.verified is not None:
            versions.divergences.verified(planned.verified)
        resync = self._first.resync_of(plan)
        session = LiveSession(
            plan, self._port.queues, clock, slots=settings.slots, threads=settings.threads, resync=resync,
            record_seconds=self._config.record_seconds, port=self._port, patched=resync.by_ranges,
            peers=None if job.source == FEED else self.peering.of(body, plan, run, clock, job.epoch),
            job_start=planned.start,
            matches=versions.shadow.begins(job.run_id), catching=self.peering.versions(planned.start),
            telemetry=self._config.telemetry,
        )
        if (keeping := versions.journal.begin(body, plan, run, clock, planned.start)) is not None:
            session.follower.keeping = keeping
        self._group.begin(session)
        self.feeding = Feeding(session.fed, session.clock) if session.fed is not None else None
        self._say("attached", run_id=job.run_id, epoch=job.epoch, ranks=job.communicator.ranks, flows=len(job.flows),
                  resync=resync.how)
        self._ledger.attached(clock.first)
        self._unfollowed.followed()
        try:
            self._first.begin(resync, planned.left)
        except FlowcheckError as error:
            self._drop(None, error.what)
            versions.abandon()
            raise
