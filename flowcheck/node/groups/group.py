"""One group of a node: the job that it follows at the moment, and what it still needs for that.

    nothing -> manifest and flows -> engine (joins the wire) -> ranges of the state, or all of it -> versions
                                                             ^---------- lost: the last good version stays

One thread per group drives its session and handles its inbox; connections (control.py) only put into the inbox, and
never wait for the group. The node's threads place, one for each queue, for all groups (parser/placers.pyx): a job has
what comes from its manifest on. A group that has no arena for what comes leaves it in the ring, and if that fills,
packets are dropped for all of them, and counted.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parser.placers import Placers

from flowcheck.control.protocol import (
    Bye,
    Epoch,
    Flows,
    Joined,
    Manifest,
    Members,
    Notice,
    Patch,
    Progress,
    Record,
    State,
    User,
    Wanted,
)
from flowcheck.control.start import Start
from flowcheck.errors import FlowcheckError, UserError
from flowcheck.job.clock import Clock
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Job
from flowcheck.job.version_status import DIVERGED, FOLLOWS, VERIFIED, VersionStatus
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.groups.assigning import WHY, Assigning, withheld
from flowcheck.node.groups.checks import check_job, check_memory, split, union
from flowcheck.node.groups.inbox import Inbox
from flowcheck.node.groups.members import Inbound, RankSession
from flowcheck.node.groups.membership import Membership
from flowcheck.node.groups.move_detector import Moved
from flowcheck.node.groups.ranges import Resync
from flowcheck.node.groups.session import LiveSession, wind_up
from flowcheck.node.groups.state_requests import Asking, Beginnings
from flowcheck.node.groups.unfollowed import Unfollowed
from flowcheck.node.peers.common_step import Common
from flowcheck.node.peers.peer_set import Peering
from flowcheck.node.ports.counts import grown
from flowcheck.node.ports.silence import Arrivals, Silent
from flowcheck.node.status.event_fields import closed_fields, line
from flowcheck.node.status.failures import Ledger
from flowcheck.node.versions.divergences import Divergences
from flowcheck.node.versions.output import Hashes, Writer
from flowcheck.node.versions.replica_files import ReplicaFiles
from flowcheck.node.versions.runs import run_folder, start_of
from flowcheck.node.versions.shadow import Shadow
from flowcheck.node.versions.standing import Standing
from flowcheck.node.versions.starts import Coming, versions_here
from flowcheck.node.versions.user_states import UserStates
from flowcheck.rebuild.iteration.scheduler import IDLE_SECONDS, Source
from flowcheck.rebuild.plan import JobPlan, plan_job
from flowcheck.rebuild.version.events import Begun, CaughtUp, Closed, Event, Lost, Resumed
from flowcheck.rebuild.version.follower import StateTooLate
from flowcheck.rebuild.version.records import RanksDiffer
from flowcheck.rebuild.version.replica import JobReplica

__all__ = ["Group"]

LAST_SECONDS = 5.0  # that ranks may need for their last word after rank 0's


class Group(Membership):
    """name: what trainers call it. sources: rings of the captures, which placers read; port: where they come from.
    say: events. common: what other groups have. See the module for threads."""

    def __init__(
        self, name: str, config: NodeConfig, sources: Sequence[Source], placers: Placers, port: Arrivals,
        say: Callable[..., None], writer: Writer, hashes: Hashes | None, common: Common,
    ) -> None:
        super().__init__()
        self._common = common
        self.name, self._config, self._sources, self._placers, self._port = name, config, sources, placers, port
        self._say_all, self._writer, self._hashes = say, writer, hashes
        self.inbox = Inbox(config.control.inbox_mb << 20)
        self._followed = 0  # the start that the session belongs to
        self._resync: Resync | None = None  # of the session
        self._due = False  # the session is to begin by ranges
        self._moved = ""  # why the job is to be joined anew
        self._ends: float | None = None  # rank 0 has said goodbye: when what has come is judged, at the latest
        self._moves = Beginnings()  # how often, at most
        self._settled = False  # this run has a version that may be relied on: those of others are gone
        self._persisted = threading.Event()  # a verified version of this run is on disk
        self._session: LiveSession | None = None
        self.plan: JobPlan | None = None  # what payloads are checked against
        self._job: dict[str, Any] | None = None  # what the session was planned from
        self._coming: Coming | None = None  # the start that the session follows
        self._clock = Clock()  # the trainers'
        self._asking = Asking(self._tell, self._say, self._dropped)
        rings, spare = [source.ring_address for source in sources], os.sched_getaffinity(0) - config.pinned
        self._assigning = Assigning(rings, spare, self._say)
        self._base: dict[str, int] = {}  # drops of the node when the state came
        self._told: dict[str, int] = {}  # of those, what lines about iterations have said
        self.peering = Peering(config, name)
        self.files = ReplicaFiles(config.replica.directory, config.name, name, config.shadow)
        for path, why in sorted(self.files.foreign.items()):
            self._say("problem", why=f"{path}: {why}; it is left alone. Remove it, or run the node as that user")
        self._shadow = Shadow(config.shadow, self._say)
        self._divergences = Divergences(config.replica.directory, config.name, name, self._say)
        self._standing = Standing(self.files, self._say)
        self._users = UserStates(self._say)
        self._ledger = Ledger(self._say)
        self._unfollowed = Unfollowed(name, self._say)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"flowcheck group {name}")
        self.failure: BaseException | None = None

    # -- for connections: any thread --

    def put(self, inbound: Inbound) -> None:
        """Raises queue.Full."""
        self.inbox.put(inbound)

    def announce(self, member: RankSession, iteration: int) -> None:
        """A state's header has come; its payload follows."""
        self.put(Inbound(member, State(iteration)))

    def refused(self, run: tuple[str, int, int]) -> str:
        """Why a run is not taken any more, "": it is."""
        return self._divergences.refused(run)

    # -- the thread --

    def start(self) -> None:
        for kept in self.files.found():
            self._say("kept", run_id=kept.run_id, step=kept.step, path=str(kept.path),
                      needs="manifest, flows and state of a run")
        self._thread.start()

    def stop(self) -> None:
        """Judge what is there, let go of everything. Idempotent."""
        self._stop.set()
        self.inbox.close()
        if self._thread.is_alive():
            self._thread.join()
        self._users.close()

    def _tell(self, message: Any, start: int | None = None) -> None:
        """What is wanted is wanted of the start that the session follows: one that has come meanwhile has heard what
        it is asked for, and no answer of its would be of use here."""
        super()._tell(message, self._followed if isinstance(message, Wanted) else None)

    def _say(self, event: str, **fields: Any) -> None:
        self._say_all(event, name=self.name, **fields)

    def _main(self) -> None:
        try:
            while not self._stop.is_set():
                self._follow(self._start)
                moved = self._handle_one()
                self._ask_again()
                self._assign()
                if self._session is None:
                    self._look_for_ranks()
                else:
                    self._take(self._session.poll())
                    moved |= self._session.moved
                    self._keep_common(self._session)
                if not moved:
                    time.sleep(IDLE_SECONDS)
            while self._handle_one():
                pass
            self._end(math.inf)
            if self._session is not None:
                self._finish(self._session)
        except BaseException as error:  # the node has to end, not to go on without this thread
            self.failure = error
        finally:
            self._drop_session(why="the thread that follows the group has failed")
            self._assigning.rest()
            self._users.close()
            self.files.end(self._config.replica.keep)

    def _follow(self, start: int) -> None:
        """A newer start of a job: what the session holds, packets and records, is of the one before."""
        if start > self._followed:
            self._end(math.inf)
            self._drop_session(why="the job was started again")
            self._assigning.forget()
            self.files.restarted()  # what ranks give from now on belongs to no version of the start before
            self._followed = start
            self._unfollowed.restarted()
            self._ledger.restarted(self.run[0] if self.run is not None else "")

    def _ask_again(self) -> None:
        """What had to wait: for its time, or for the session to be through with what ended its versions."""
        self._end(time.monotonic())
        if self._divergences.refusing:
            self._refuse(self._divergences.refusing)
        self._asking.again()
        outnumbered = self._is_outnumbered()
        if not self._due and not self._moved and not outnumbered:
            return
        begin = self._join_anew if self._moved else self._number_anew if outnumbered else self._begin
        self._due = False
        try:
            begin()
        except FlowcheckError as error:  # no room for another replica: trainers come again, and so does the job
            self._drop_session(why=error.what)
            self._abandon()
            self._send_away(error)

    def _abandon(self) -> None:
        """A job that is not followed: what has no version is of no use, nor what ranks gave for it."""
        self._users.close()  # what it has not written yet would be there again
        self.files.abandon()

    def _send_away(self, error: FlowcheckError) -> None:
        self._say("problem", why=error.message())
        for member in list(self.members.values()):
            member.end(error.message())

    def _refuse(self, why: str) -> None:
        """The run is not followed any more; what of it was verified stays."""
        self._divergences.refusing = ""
        if self._session is not None:
            job = self._session.plan.job
            self._say("job_refused", run_id=job.run_id, epoch=job.epoch, serves=self._session.serves, why=why)
        self._drop_session(why=why)
        self._abandon()
        for member in list(self.members.values()):
            (member.refuse or member.end)(why)

    def _look_for_ranks(self) -> None:
        if self._unfollowed.why:
            return  # they were sent away
        if (found := self.absent()) and self.run is not None:
            self._say("incomplete", run_id=self.run[0], ranks=self.run[2], absent=found[:8],
                      why=f"{len(found)} of {self.run[2]} ranks have not come, and the job cannot be followed without"
                          f" them ({self._unfollowed.ranks(found)}): a firewall, another address of the node there, or"
                          " they do not call attach")

    def _assign(self) -> None:
        """Is it known by now which connection is which channel?"""
        try:
            if not self.members:
                self._assigning.rest()
            elif self._assigning.look():
                self._plan()
        except FlowcheckError as error:
            self._send_away(error)

    def _join_anew(self) -> None:
        """What the session waits for is nowhere any more. Raises FlowcheckError."""
        self._moves.lost()
        self._moves.begun()
        self._say("moved", why=f"{self._moved}: was the mirror configured anew? The job is joined anew where it is now")
        self._drop_session(self.plan, "the job is joined anew")  # answers to what was asked are on their way
        self._plan()

    def _is_outnumbered(self) -> bool:
        """Does another node have this start under a newer epoch, while there is no version of it here?"""
        session, coming = self._session, self._coming
        if session is None or coming is None or (session.replica is not None and session.replica.steps):
            return False
        return self._common.starts.epoch(coming.run_id, coming.line) > session.plan.job.epoch

    def _number_anew(self) -> None:
        """Raises FlowcheckError."""
        self._drop_session(self.plan, "the job is followed under another epoch")
        self.files.abandon()
        self._plan()

    def _handle_one(self) -> bool:
        try:
            inbound = self.inbox.get()
        except queue.Empty:
            while self._gone:
                member = self._gone.pop()
                if member.start == self._followed and member.rank not in self.members:
                    self._ledger.left(member.rank)
                if member.rank == 0 and self._session is not None:
                    self._session.withdraw()
            return False
        try:
            self._handle_this(inbound)
        finally:
            self.inbox.done(inbound)
        return True

    def _handle_this(self, inbound: Inbound) -> None:
        self._follow(inbound.member.start)
        gone = self.members.get(inbound.member.rank) is not inbound.member
        if gone and isinstance(inbound.message, Patch):
            gone = not any(one is inbound.member for one in self._gone)  # it had sent that before it left
        if inbound.member.start != self._followed or (gone and not isinstance(inbound.message, Record | User | Bye)):
            return  # of somebody who has left; records of a run stay good until it is started again
        if not gone:
            self._ledger.back(inbound.member.rank)
        try:
            self._handle(inbound)
        except FlowcheckError as error:
            self._say("refused", rank=inbound.member.rank, why=error.message())
            if self._session is None and isinstance(inbound.message, Flows | Manifest):
                self._unfollowed.refused(error.message())  # whoever's message was the last that it took: all hear why
                self._tell(Wanted(["manifest", "flows"], f"the job was refused: {self._unfollowed.why}"))
            inbound.member.end(error.message())
            if isinstance(error, RanksDiffer):
                self._divergences.refuse(error.what)

    def _handle(self, inbound: Inbound) -> None:
        message, member = inbound.message, inbound.member
        if isinstance(message, Bye):
            self._ledger.bye(member.rank)
        if isinstance(message, Members):
            self._unfollowed.placed(message.places)
        elif isinstance(message, Notice):
            self._unfollowed.watches(member.rank, message.why)
        elif isinstance(message, Flows):
            if member.flows != message.flows:  # else it only says so again
                member.flows = message.flows
                self._plan()
        elif isinstance(message, Manifest):
            if member.rank != 0:
                raise UserError("a manifest comes from rank 0", where=f"rank {member.rank}")
            if member.manifest != message:
                before, member.manifest, self._manifest = self._manifest, message, message
                try:
                    self._plan()
                except FlowcheckError:
                    with self._lock:
                        if self._manifest is message:  # no new start of the job has forgotten it
                            self._manifest = before  # other ranks must not be refused for what rank 0 has sent
                    raise
        elif isinstance(message, State):
            self._state(member, message, inbound.tensors)
        elif isinstance(message, Record) and self._session is not None and self._manifest is not None:
            message = replace(message, iteration=self._clock.iteration(message.iteration))
            self._take(self._session.record(message, inbound.tensors, member.rank))
            self._ledger.over(self._clock.number(message.iteration))
        elif isinstance(message, User) and self._session is not None and self.files.named is not None:
            self._users.put(self.files.named, Clock().after(message.iteration), message.rank, inbound.data)
        elif isinstance(message, Patch) and self._session is not None:
            self._session.patch(member.rank, message, inbound.tensors)
        elif isinstance(message, Bye) and self._session is not None and member.rank == 0:
            self._ends = time.monotonic() + LAST_SECONDS

    def _end(self, now: float) -> None:
        """Rank 0 has said goodbye: judge what is there, once the others have answered what they were asked for."""
        session = self._session
        if session is None or self._ends is None or (now < self._ends and session.owed & self.members.keys()):
            return
        self._ends = None
        self._finish(session)
        session.place_in_threads(self._placers)  # somebody may come back
        self._say("end", run_id=session.plan.job.run_id, serves=session.serves)

    def _finish(self, session: LiveSession) -> None:
        """Judge what is there."""
        wind_up(session, self._take)

    def _plan(self) -> None:
        """Begin to follow the job, as soon as manifest and flows are here."""
        with self._lock:
            run, manifest, own_id, instance = self.run, self._manifest, self._own_id, self._instances.get(0, "")
        if run is None or manifest is None:
            return
        if why := self._divergences.refused(run, own_id):
            self._refuse(why)
            return
        body = dict(manifest.job)
        if not body.get("flows"):
            with self._lock:
                sent = [member.flows for member in self.members.values()]
                known = {rank for rank, member in self.members.items() if member.flows is not None}
            missing = [rank for rank in range(run[2]) if rank not in known]
            if missing:
                self._tell(Wanted(["flows"], self._unfollowed.missing(missing)))
                return
            body["flows"] = union([flows for flows in sent if flows is not None])
        if withheld(body["flows"]):
            found = self._assigning.of(body, body["flows"])
            if found is None:
                self._tell(Wanted(["flows"], WHY))
                return
            body |= {"flows": found["flows"], "unproven": [*body.get("unproven", ()), found["unproven"]]}
        if self._session is not None and self._job == body and self._clock.first == manifest.first:
            if self._by_ranges:
                self._joined(self._session)  # its records are all that may be missing
            else:
                self._asking.ask("the trainer has come back")
            return
        job = job_from_dict(body, where="manifest")
        check_job(job, run)
        start = start_of(body, run, manifest.first, instance)
        left = self._standing.left(start)
        job.run_id = job.run_id or (left.run_id if left is not None else own_id)
        job.epoch = self._numbered(job, start, instance, manifest.first)
        queues = len(self._sources)
        plan = plan_job(
            job, streams=queues, threads=queues, arenas=self._config.replica.regions,
            patience=self._config.replica.patience_packets,
        )
        check_memory(plan, self._config.replica)
        self._drop_session(plan, "the job has another manifest or other connections")
        settings = self._config.replica
        self._job, self._clock = body, Clock(manifest.first)
        self._settled, self._persisted = False, threading.Event()
        self._divergences.begins(run, job, self._clock.before(0), start or f"/{self._followed}", own_id)
        if left is not None and left.verified is not None:
            self._divergences.verified(left.verified)
        resync = self._resync = Resync(settings, plan, lambda: self.members, self.leaving)
        self._session = LiveSession(
            plan, self._sources, self._clock, slots=settings.slots, threads=settings.threads, resync=resync,
            record_seconds=self._config.record_seconds, port=self._port, patched=resync.by_ranges,
            peers=self.peering.of(body, plan, run, self._clock, job.epoch), job_start=start,
            matches=self._shadow.begins(job.run_id), catching=self.peering.versions(start),
        )
        self._session.place_in_threads(self._placers)
        self._say("attached", run_id=job.run_id, epoch=job.epoch, ranks=job.communicator.ranks, flows=len(job.flows),
                  resync=resync.how)
        self._ledger.attached(manifest.first)
        self._unfollowed.followed()
        if not resync.by_ranges:
            self._tell(Wanted(["state"], "the job is known; a state to begin with is not here"))
            return
        self._asking = Asking(self._tell, self._say, self._dropped, self._begin_soon)
        try:
            self._begin(left.path if left is not None else None)
        except FlowcheckError as error:
            self._drop_session(why=error.what)
            self._abandon()
            raise

    def _numbered(self, job: Job, start: str, instance: str, first: int) -> int:
        """The epoch of this start here; trainers hear it, where it is another than they say."""
        said = Start.of(instance)
        line = said.line if said is not None else instance or f"{self.name} {self._start}"
        begins = said.first if said is not None else first
        coming = self._coming = Coming(job.run_id, job.epoch, begins, line, start)
        epoch = self._common.number(coming, versions_here(self._config, job.run_id))
        before = self._epoch.epoch if self._epoch is not None else job.epoch
        if epoch != before:
            why = (f"another start of run {job.run_id!r} has made versions, of step {begins} or later of"
                   f" epoch {job.epoch}, or of a newer one: this start is epoch {epoch} here")
            self._say("numbered", run_id=job.run_id, epoch=epoch, said=job.epoch, first=begins, why=why)
            self._tell(Epoch(epoch, why))
        return epoch

    @property
    def _by_ranges(self) -> bool:
        return self._resync is not None and self._resync.by_ranges

    def _begin_soon(self) -> None:
        self._due = True

    def _begin(self, left: Path | None = None) -> None:
        """Go on without a state: trainers send records, and ranges as they are asked. left: the replica that an earlier
        process left of this start of the job. Raises FlowcheckError."""
        session = self._session
        assert session is not None
        self._base = self._port.drops
        try:
            self._take(session.begin(self._standing.new, left))
        except UserError as error:
            raise self._standing.no_room(error) from None
        self._asking.beginnings.begun()
        self._tell(Wanted([], ""))
        self._joined(session)

    def _joined(self, session: LiveSession) -> None:
        self._tell(Joined(self._clock.first if session.next is None else self._clock.number(session.next)))

    def _state(self, member: RankSession, message: State, tensors: Mapping[str, torch.Tensor]) -> None:
        """A state: announced (no tensors yet), then here."""
        number = message.iteration
        iteration, session = self._clock.iteration(number), self._session
        if session is None or self._manifest is None or member.rank != 0:
            raise UserError("a state comes from rank 0, and after its manifest", where=f"rank {member.rank}")
        if iteration < 0:
            begins = f"the manifest begins at {self._clock.first}"
            raise UserError(f"a state before iteration {number}; {begins}", where="state")
        if not tensors:
            session.announce(iteration)
            self._asking.uploads.announced()
            self._base = self._port.drops
            return
        self._asking.uploads.taken()
        parameters, state = split(tensors)
        before = self.files.named
        try:
            self._take(session.state(iteration, parameters, state, message.groups, self.files.path()))
        except UserError as error:
            self.files.abandon(before)
            if not isinstance(error, StateTooLate):
                raise self._standing.no_room(error) from None
            self._asking.ask(error.what)
            return
        assert session.replica is not None
        self._standing.has(session.plan.job, session.replica.step)
        self._say("state", iteration=number, kernels=session.replica.kernels)
        with self._lock:
            self._wanted = Wanted([], "")
        self._asking.answered()
        self._tell(Joined(number))

    # -- what the session says --

    def _take(self, events: Iterable[Event]) -> None:
        """What has happened becomes messages to trainers and lines of the log, one by one."""
        for event in events:
            match event:
                case Closed():
                    self._closed(event)
                case Lost():
                    self._lost(event)
                case Resumed(path, steps):
                    assert self._session is not None
                    self._standing.resumed(path, self._session.plan.job, steps[-1])
                    self._users.resume(path, steps)
                case Begun():
                    self._begun(event)
                case CaughtUp():
                    self._caught_up(event)
                case Silent():
                    self._silent(event.why)
                case Moved(why):
                    self._moved = why if self._moves.due() else ""
                case _:
                    self._say_line(event)

    def _say_line(self, event: Event) -> None:
        said = line(event, self._clock.number)
        if said is not None:
            self._say(said[0], **said[1])

    def _closed(self, closed: Closed) -> None:
        session = self._session
        assert session is not None
        number = self._clock.number(closed.iteration)
        if closed.published and session.replica is not None:
            verified = VersionStatus.of(closed.status).verified
            if verified:
                self._divergences.verified(session.replica.step)
            self._standing.first(session.plan.job, session.replica.step)
            self._shadow.published(session.replica.step, session.matches)
            self._users.published(session.replica.steps)
            self._hash(number, session.replica)
            output = self._config.output
            if output.every and session.replica.step % output.every == 0:
                out = self._folder(session.plan.job)
                done = self._persisted.set if verified else None
                named = self.files.named
                users = partial(self._users.gathered, named, session.replica.step) if named is not None else None
                self._writer.write(self.name, session.replica, out, closed.status, done, closed.unproven, users,
                                   session.matches)
            persisted = not output.every or self._persisted.is_set()
            sound = VersionStatus.of(closed.status).kind in (VERIFIED, FOLLOWS)
            if sound and self._shadow.trusts and not self._settled and persisted:
                self._settled = True
                self._standing.settle(session.plan.job)
            self._tell(Progress(number, closed.status))
        drops = self._port.drops
        dropped, self._told = grown(self._told, drops), drops
        self._say("iteration", **closed_fields(closed, number, dropped, lost=session.next is None,
                                         matches=session.matches))

    def _caught_up(self, event: CaughtUp) -> None:
        session = self._session
        assert session is not None and session.replica is not None
        self._standing.first(session.plan.job, event.step)
        self._shadow.published(event.step, session.matches)
        self._users.published(session.replica.steps)
        self._hash(self._clock.number(event.iteration) - 1, session.replica)
        self._say_line(event)

    def _hash(self, number: int, replica: JobReplica) -> None:
        if self._hashes is None:
            return
        try:
            self._hashes.add(number, self.name, replica)
        except FlowcheckError as error:
            self._say("problem", why=error.message())

    def _begun(self, begun: Begun) -> None:
        said = line(begun, self._clock.number)
        assert said is not None and self._session is not None and self._session.replica is not None
        self._say(said[0], **said[1], kernels=self._session.replica.kernels)

    def _lost(self, lost: Lost) -> None:
        session, why = self._session, lost.why
        assert session is not None
        self._shadow.has(session.matches)
        if lost.diverged is not None:
            self._diverged(session, lost.diverged, why, lost.apart)
        if lost.withdrawn:
            self.files.discard()
        if not self._by_ranges:
            self._asking.by_state()
        drops = grown(self._base, self._port.drops)
        if drops:
            why += f"; since its state the node itself has dropped {self._port.explain(drops)}"
        self._say("lost", why=why, serves=session.serves, dropped=drops)
        if not self._divergences.refusing:
            self._asking.ask(f"checkpoint wanted: {why}")

    def _diverged(self, session: LiveSession, step: int, why: str, apart: bool) -> None:
        """Versions after the last verified one may be wrong: nobody gets them any more. apart: as of Lost."""
        job, found = session.plan.job, self._divergences.diverged(step, why)
        if apart:
            self._divergences.refuse(why)
        self._writer.withdraw(self.name, self._folder(job), found)
        self._tell(Progress(Clock().made(step), DIVERGED))

    def _folder(self, job: Job) -> Path:
        """Of its checkpoints on disk."""
        return self._config.output.directory / self.name / run_folder(job.run_id, job.epoch)

    def _keep_common(self, session: LiveSession) -> None:
        """Other groups of the job hear what this one has, and what they have decides which slots are reused last."""
        replica, job = session.replica, session.plan.job
        steps = tuple(replica.steps) if replica is not None else ()
        order = self._common.order(self.name, (job.run_id, job.epoch), steps)
        if order is not None and replica is not None:
            replica.keep(order)

    def _dropped(self) -> int:
        """Packets that the node itself has lost: in its own queues, and those of iterations that were given up."""
        given_up = self._session.overload.packets if self._session is not None else 0
        return sum(self._port.drops.values()) + given_up

    def _silent(self, why: str) -> None:
        if why:
            self._say("silent", why=why)
        else:
            self._say("mirror_back", why="the mirror brings the job's packets again")
        self._asking.silent(why)

    def _drop_session(self, plan: JobPlan | None = None, why: str = "") -> None:
        """plan: what payloads are checked against from now on. why: what has begun is not judged."""
        self.plan = plan
        if self._session is not None:
            if open_ := self._session.begun:
                self._say("unjudged", first=self._clock.number(open_[0]), last=self._clock.number(open_[-1]), why=why)
            self._session.close()
            self._common.gone(self.name)
        self._session = self._resync = None
        self._due, self._moved, self._ends = False, "", None
        self._asking = Asking(self._tell, self._say, self._dropped)
        with self._lock:
            self._notice = Notice("")
