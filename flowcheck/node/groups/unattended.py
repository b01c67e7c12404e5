"""A job of which no trainer attaches, followed by its manifest alone: the parameters that its AllGathers carry.

    for settings, plan in unattended_jobs(config):            the manifests of [[follow]], read and checked
        unattended(settings, plan, config, ...).start()       a group as any other, with other parts

FSDP, ZeRO and distributed optimizers put no reduced gradient on the wire, and none of their trainers is asked for
anything. What the wire brings is judged as everything is (rebuild/iteration/verdict.py). The parameters of an iteration
of which every clause holds are copied out of its arena and written where a replay writes them, as what they are:
parameters alone, in the precision of the AllGather, never a version, and nothing that is offered for recovery.

That the manifest is this job's only the traffic says. So nothing is offered before a second iteration has agreed with
it, as in a replay (offline/session.py); the first one is judged and not written. If a witness disagrees by then, it is
another job's, and following ends. Iterations are given up, and joined again, as those of other jobs. No trainer says
that an iteration is over: a job that pauses and a mirror that brings nothing look the same, and both are `silent`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from flowcheck.errors import FlowcheckError
from flowcheck.job.clock import Clock
from flowcheck.job.manifest import load_job
from flowcheck.node.config.capture import Follow
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.groups.checks import check_gathered, check_memory
from flowcheck.node.groups.group import Feed, Group, Output
from flowcheck.node.groups.session import LiveSession
from flowcheck.node.ports.counts import grown
from flowcheck.node.ports.silence import Arrivals
from flowcheck.node.status.event_fields import closed_fields, line
from flowcheck.node.versions.output import Hashes, Writer
from flowcheck.node.versions.runs import new_run_id, run_folder
from flowcheck.rebuild.iteration.evidence import edges_with
from flowcheck.rebuild.iteration.rank_confirmation import on_trust
from flowcheck.rebuild.iteration.sharded import Gathered, ShardedParameters
from flowcheck.rebuild.iteration.verdict import Clause
from flowcheck.rebuild.plan import JobPlan, plan_job
from flowcheck.rebuild.version.events import Closed, Event

__all__ = ["unattended", "unattended_jobs"]

SILENT_SECONDS = 60.0  # without a packet of the job; shorter pauses are evaluations and checkpoints of its own
LOOK_SECONDS = 1.0
UNCONFIRMED = "a second complete iteration has to agree with the manifest before parameters are offered"


def unattended_jobs(config: NodeConfig) -> list[tuple[Follow, JobPlan]]:
    """Raises UserError naming the manifest."""
    streams = sum(capture.queues for capture in config.capture)
    found = []
    for settings in config.follow:
        job = load_job(settings.manifest, named="follow.manifest")
        check_gathered(job, str(settings.manifest))
        job.run_id = job.run_id or new_run_id()
        plan = plan_job(job, streams=streams, threads=streams, arenas=config.replica.arenas,
                        patience=config.replica.patience_packets)
        check_memory(plan, config.replica)
        found.append((settings, plan))
    return found


class _Set:
    """Gathered parameters as the writer and the file of hashes take a version. Nobody changes them: a pin holds up
    nothing."""

    refused = 0
    unproven: Sequence[str] = ()
    optimizer_state: Mapping[str, Mapping[str, Any]] = {}

    def __init__(self, gathered: Gathered) -> None:
        self._gathered, self.step = gathered, gathered.step

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._gathered.parameters

    @contextmanager
    def pinned(self) -> Iterator[Self]:
        yield self

    def write(self, out: Path, unproven: Sequence[str], *_: object) -> Path:
        """They have no status but `unverified`, no optimizer, and nothing of any rank."""
        return self._gathered.write(out, unproven)


class GatheredPublisher(Output):
    """Lines, hashes and files of the parameters that a job gathers. say: events of the group. refuted: why the manifest
    is not this job's, "": nothing says so."""

    def __init__(
        self, name: str, plan: JobPlan, clock: Clock, config: NodeConfig, port: Arrivals, say: Callable[..., None],
        hashes: Hashes | None, now: Callable[[], float],
    ) -> None:
        self._name, self._plan, self._output, self._port, self._say = name, plan, config.output, port, say
        self._hashes = hashes
        self._writer = Writer(partial(_as_gathered, say), config.output.every, now)
        self._sets = ShardedParameters(plan, clock)
        self._step = -1  # of the newest parameters that were offered
        self._confirmed = False  # the traffic is what the manifest describes
        self.refuted = ""
        self._dropped: dict[str, int] = {}  # drops that lines have said

    def publish(self, session: LiveSession, event: Event) -> None:
        if isinstance(event, Closed):
            self._closed(session, event)
        elif (said := line(event, session.clock.number)) is not None:
            self._say(said[0], **said[1])

    def _closed(self, session: LiveSession, closed: Closed) -> None:
        assert closed.judged is not None
        number = session.clock.number(closed.iteration)
        self._confirm(session, closed)
        offered = closed.published and self._confirmed and not self.refuted
        why = closed.why
        if closed.published and not offered:
            why = [(Clause.SUPPORTED.value, self.refuted or UNCONFIRMED)]
        if offered:
            self._offer(session, closed, number)
        status = "parameters" if self._step >= 0 else "waiting"
        drops = self._port.drops
        dropped, self._dropped = grown(self._dropped, drops), drops
        closed = replace(closed, published=offered, why=why, status=status)
        self._say("iteration", **closed_fields(closed, number, dropped, lost=False, matches=0),
                  parameters=self._step if offered else None)

    def _confirm(self, session: LiveSession, closed: Closed) -> None:
        """Is it this job's manifest? Asked until it is known."""
        if self._confirmed or self.refuted:
            return
        first, disagreements = session.first_iteration, session.engine.disagreements()
        if any(one["iteration"] <= first + 1 for one in disagreements):
            assert closed.judged is not None
            said = [reason for _, reason in closed.judged.verdict.failing]
            self.refuted = "; ".join(["the traffic is not what the manifest describes", *said[:1]])
        else:
            self._confirmed = closed.published and closed.iteration > first

    def _offer(self, session: LiveSession, closed: Closed, number: int) -> None:
        """The parameters of this iteration, if anybody is to have them."""
        assert closed.judged is not None
        job, engine, output = self._plan.job, session.engine, self._output
        self._step = self._sets.step_of(closed.iteration)
        due = self._step % output.every == 0
        if not due and self._hashes is None:
            return
        version = _Set(self._sets.take(closed.iteration, closed.judged.groups))
        if self._hashes is not None:
            try:
                self._hashes.add(number, self._name, version)
            except FlowcheckError as error:
                self._say("problem", why=error.message())
        if due:
            trust = on_trust(self._plan, edges_with(self._plan, engine, "packets"), engine.cts_tags())
            out = output.directory / self._name / run_folder(job.run_id, job.epoch)
            self._writer.write(self._name, version, out, "unverified", None, [*trust, *job.unproven, *closed.unproven])

    def close(self) -> None:
        self._writer.close()


def _as_gathered(say: Callable[..., None], event: str, **fields: Any) -> None:
    """What the writer says, which names no checkpoint here: that is more than this."""
    if event == "written":
        say("gathered", **fields)
    else:
        say(event, **fields)


class _Pause:
    """Does anything come? say: events of the group. now: seconds of a clock that never goes back."""

    def __init__(self, port: Arrivals, say: Callable[..., None], now: Callable[[], float]) -> None:
        self._port, self._say, self._now = port, say, now
        self._packets, self._since, self._looked, self._silent = 0, now(), 0.0, False

    def look(self, session: LiveSession) -> None:
        if (now := self._now()) - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        packets = int(session.engine.flows()["packets"].sum())
        if packets != self._packets:
            self._packets, self._since = packets, now
            if self._silent:
                self._silent = False
                self._say("mirror_back", why="the mirror brings the job's packets again")
        elif not self._silent and now - self._since >= SILENT_SECONDS:
            self._silent = True
            port = self._port.name or "the port"
            self._say("silent", why=f"no packet of the job's connections has come to {port} for"
                      f" {now - self._since:.0f} s: it pauses or has ended, it has made new connections, which need a"
                      " new manifest, or the mirror brings nothing (flowcheck switch verify)")


class ManifestIntake(Feed):
    """What begins and ends the session of a job that a manifest alone describes: nobody sends anything."""

    def __init__(
        self, group: Group[ManifestIntake], settings: Follow, plan: JobPlan, clock: Clock, config: NodeConfig,
        port: Arrivals, publisher: GatheredPublisher, say: Callable[..., None], now: Callable[[], float],
    ) -> None:
        self._group, self._settings, self.plan, self._clock, self._config = group, settings, plan, clock, config
        self._port, self._publisher, self._say, self._now = port, publisher, say, now
        self._pause = _Pause(port, say, now)

    def tick(self) -> bool:
        group = self._group
        if why := self._publisher.refuted:
            if group.session is not None:
                group.drop()
                self._say("refused", why=f"{why}; nothing of it is offered, and it is not followed any more."
                          " Correct the manifest, and start the node again")
            return False
        if group.moved:
            group.join_again()
        elif group.session is None:
            self.follow()
        else:
            self._pause.look(group.session)
            return False
        return True

    def follow(self) -> None:
        """Join the job where it is now."""
        job, replica = self.plan.job, self._config.replica
        self._group.begin(LiveSession(
            self.plan, self._port.queues, self._clock, slots=replica.slots, threads=0, record_seconds=0.0,
            port=self._port, now=self._now, trainers=False,
        ))
        self._say("attached", run_id=job.run_id, epoch=job.epoch, ranks=job.communicator.ranks, flows=len(job.flows),
                  resync="none: parameters alone, by AllGather", manifest=str(self._settings.manifest))


def unattended(
    settings: Follow, plan: JobPlan, config: NodeConfig, port: Arrivals, say: Callable[..., None],
    hashes: Hashes | None, now: Callable[[], float] = time.monotonic,
) -> Group[ManifestIntake]:
    """A group of a job without trainers. say: events. now: seconds of a clock that never goes back."""
    name, clock = settings.group, Clock(settings.iteration)
    say = partial(say, name=name)
    publisher = GatheredPublisher(name, plan, clock, config, port, say, hashes, now)
    return Group(name, port.placers, say, publisher, lambda group: ManifestIntake(
        group, settings, plan, clock, config, port, publisher, say, now), now)
