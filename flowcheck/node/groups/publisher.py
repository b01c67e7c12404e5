"""What a session with trainers says becomes lines of the log, hashes, checkpoints, and answers to them.

    publisher = Publisher(name, config.output, port, say, answer, versions, writer, hashes, common, telemetry)
    publisher.begin()                           another job, or another start of it
    publisher.publish(session, event)           each event, one by one
    publisher.count_drops()                     a state comes now: what the node drops from here on
    publisher.why                               why versions ended last, with what the node dropped since

Other groups of the job hear which versions this one has (peers/common_step.py). The group's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flowcheck.control.protocol import Progress
from flowcheck.errors import FlowcheckError
from flowcheck.job.clock import Clock
from flowcheck.job.model import Job
from flowcheck.job.version_status import DIVERGED, FOLLOWS, VERIFIED, VersionStatus
from flowcheck.node.config.store import Output as Settings
from flowcheck.node.groups.group import Output
from flowcheck.node.groups.session import LiveSession
from flowcheck.node.peers.common_step import Common
from flowcheck.node.ports.counts import grown
from flowcheck.node.ports.silence import Arrivals, Silent
from flowcheck.node.status.event_fields import closed_fields, line
from flowcheck.node.status.telemetry import Telemetry
from flowcheck.node.versions.group_versions import GroupVersions
from flowcheck.node.versions.output import Hashes, Writer
from flowcheck.node.versions.runs import run_folder
from flowcheck.rebuild.version.events import (
    Begun,
    Broken,
    CaughtUp,
    Closed,
    Event,
    GradientsMeasured,
    Lost,
    Resumed,
    Skipped,
)
from flowcheck.rebuild.version.replica import JobReplica

__all__ = ["Publisher"]


class Publisher(Output):
    """name: of the group. say: its events. answer: gives a message to all of its ranks. common: what other groups have.
    telemetry: takes what was measured. why: versions have ended."""

    def __init__(
        self, name: str, output: Settings, port: Arrivals, say: Callable[..., None], answer: Callable[[Any], None],
        versions: GroupVersions, writer: Writer, hashes: Hashes | None, common: Common,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._name, self._output, self._port, self._say, self._answer = name, output, port, say, answer
        self._versions, self._writer, self._hashes, self._common = versions, writer, hashes, common
        self._telemetry = telemetry
        self._settled = False  # this run has a version that may be relied on: those of others are gone
        self._persisted = threading.Event()  # a verified version of this run is on disk
        self.why = ""
        self._base: dict[str, int] = {}  # drops of the node when the state came
        self._dropped: dict[str, int] = {}  # of those, what lines about iterations have said

    def begin(self) -> None:
        """Another job, or another start of it, is followed from now on."""
        self._settled, self._persisted = False, threading.Event()

    def count_drops(self) -> None:
        self._base = self._port.drops

    def publish(self, session: LiveSession, event: Event) -> None:
        match event:
            case Closed():
                self._closed(session, event)
            case Lost():
                self._lost(session, event)
            case Resumed(path, steps):
                self._versions.standing.resumed(path, session.plan.job, steps[-1])
                self._versions.users.resume(path, steps)
            case Begun():
                assert session.replica is not None
                self._say_line(session, event, kernels=session.replica.kernels)
            case CaughtUp():
                self._caught_up(session, event)
            case Broken(first, last, why):
                number = session.clock.number
                self._versions.journal.missed(number(first), number(last), why)
            case Skipped(first, last, why):
                number = session.clock.number
                self._versions.journal.missed(number(first), number(last), f"it passed {why}")
                self._say_line(session, event)
            case GradientsMeasured(measured) if self._telemetry is not None:
                job, here = session.plan.job, session.clock.number(measured.iteration)
                self._telemetry.take(self._name, run_folder(job.run_id, job.epoch), here, measured, self._say)
            case Silent(why):
                said = "silent" if why else "mirror_back"
                self._say(said, why=why or "the mirror brings the job's packets again")
            case _:
                self._say_line(session, event)

    def _say_line(self, session: LiveSession, event: Event, **more: Any) -> None:
        said = line(event, session.clock.number)
        if said is not None:
            self._say(said[0], **said[1], **more)

    def _closed(self, session: LiveSession, closed: Closed) -> None:
        number = session.clock.number(closed.iteration)
        if closed.published and session.replica is not None:
            self._published(session, session.replica, closed, number)
            self._answer(Progress(number, closed.status))
        elif closed.published and session.log is not None:
            self._logged(number)
            self._answer(Progress(number, closed.status))
        else:
            self._versions.journal.missed(number, number, closed.why[0][1] if closed.why else closed.status)
        drops = self._port.drops
        dropped, self._dropped = grown(self._dropped, drops), drops
        self._say("iteration", **closed_fields(closed, number, dropped, lost=session.next is None,
                                               matches=session.matches))

    def _published(self, session: LiveSession, replica: JobReplica, closed: Closed, number: int) -> None:
        job, status, versions = session.plan.job, VersionStatus.of(closed.status), self._versions
        if status.verified:
            versions.divergences.verified(replica.step)
        versions.published(job, replica, replica.step, session.matches)
        self._hash(number, replica)
        every, named = self._output.every, versions.files.named
        users = partial(versions.users.gathered, named, replica.step) if named is not None else None

        def write(out: Path, done: Callable[[], None] | None, base: bool = False) -> bool:
            return self._writer.write(self._name, replica, out, closed.status, done, closed.unproven, users,
                                      session.matches, *([base] if base else []))

        if every and replica.step % every == 0:
            write(self._folder(job), self._persisted.set if status.verified else None)
        versions.journal.published(replica.step, session.matches, write)
        persisted = not every or self._persisted.is_set()
        sound = status.kind in (VERIFIED, FOLLOWS)
        if sound and versions.shadow.trusts and not self._settled and persisted:
            self._settled = True
            versions.standing.settle(job)

    def _logged(self, number: int) -> None:
        """An iteration is in the log, as far as the journal has taken it."""
        keeper = self._versions.journal.keeper
        if keeper is not None:
            step = Clock().after(number)
            self._versions.users.published(range(max(0, step - keeper.room.entries), step + 1))

    def _caught_up(self, session: LiveSession, event: CaughtUp) -> None:
        assert session.replica is not None
        self._versions.published(session.plan.job, session.replica, event.step, session.matches)
        self._hash(session.clock.number(event.iteration) - 1, session.replica)
        self._say_line(session, event)

    def _hash(self, number: int, replica: JobReplica) -> None:
        if self._hashes is None:
            return
        try:
            self._hashes.add(number, self._name, replica)
        except FlowcheckError as error:
            self._say("problem", why=error.message())

    def _lost(self, session: LiveSession, lost: Lost) -> None:
        self._versions.shadow.has(session.matches)
        if lost.diverged is not None:
            self._diverged(session, lost.diverged, lost.why, lost.apart)
        if lost.withdrawn:
            self._versions.files.discard()
        drops, self.why = grown(self._base, self._port.drops), lost.why
        if drops:
            self.why += f"; since its state the node itself has dropped {self._port.explain(drops)}"
        self._say("lost", why=self.why, serves=session.serves, dropped=drops)

    def _diverged(self, session: LiveSession, step: int, why: str, apart: bool) -> None:
        """Versions after the last verified one may be wrong: nobody gets them any more. apart: as of Lost."""
        found = self._versions.divergences.diverged(step, why)
        self._versions.journal.diverged(found.after)
        if apart:
            self._versions.divergences.refuse(why)
        self._writer.withdraw(self._name, self._folder(session.plan.job), found)
        self._answer(Progress(Clock().made(step), DIVERGED))

    def _folder(self, job: Job) -> Path:
        """Of its checkpoints on disk."""
        return self._output.directory / self._name / run_folder(job.run_id, job.epoch)

    def look(self, session: LiveSession) -> None:
        """Other groups of the job hear what this one has, and what they have decides which slots are reused last."""
        self._versions.journal.look()
        replica, job = session.replica, session.plan.job
        steps = tuple(replica.steps) if replica is not None else ()
        order = self._common.order(self._name, (job.run_id, job.epoch), steps)
        if order is not None and replica is not None:
            replica.keep(order)

    def drop(self, session: LiveSession, why: str) -> None:
        if begun := session.begun:
            number = session.clock.number
            self._say("unjudged", first=number(begun[0]), last=number(begun[-1]), why=why)
        self._common.gone(self._name)
        self._versions.journal.end()

    def close(self) -> None:
        self._versions.users.close()
