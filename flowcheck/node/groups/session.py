"""One job of a node: a follower that trainers feed, whether it keeps up, and whether its mirror is silent.

    session = LiveSession(plan, sources, clock, ...)
    for event in session.poll(): ...                           again and again
    session.record(...), announce(iteration), state(...)       what trainers send, on the same thread
    session.begin(path, left)                                  they are not asked for a state, but for ranges of it

It has a follower (rebuild/version/follower.py), whose arenas are a mirror's, or what ranks send (`fed`), and adds
what only a node has.

Whatever it is given or asked returns events; they are to be handled one by one, because versions and arenas are
as an event says only until the next one is asked for. Iterations are counted as the manifest does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from parser.machine import Engine
from parser.placers import Placers

from flowcheck.control.checksum import sum_text
from flowcheck.control.protocol import Patch, Record
from flowcheck.job.clock import Clock
from flowcheck.job.model import FEED, LOG
from flowcheck.node.config.telemetry import Telemetry
from flowcheck.node.groups.mirror import Mirror
from flowcheck.node.groups.ranges import Resync
from flowcheck.node.peers.catch_up import CatchUp
from flowcheck.node.ports.silence import Arrivals
from flowcheck.rebuild.iteration.arena_source import ArenaSource
from flowcheck.rebuild.iteration.fed_arenas import FedArenas
from flowcheck.rebuild.iteration.measured_arenas import MeasuredArenas
from flowcheck.rebuild.iteration.measuring import Passes
from flowcheck.rebuild.iteration.scheduler import IDLE_SECONDS, Source
from flowcheck.rebuild.iteration.wire_arenas import WireArenas
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.events import Closed, Event, GradientsMeasured, Resumed
from flowcheck.rebuild.version.follower import Follower
from flowcheck.rebuild.version.joining import Joining
from flowcheck.rebuild.version.log_repair import LogRepair
from flowcheck.rebuild.version.overload import Overload
from flowcheck.rebuild.version.peer_repair import PeerRepair, Peers
from flowcheck.rebuild.version.policy import Policy
from flowcheck.rebuild.version.range_repair import RangeRepair
from flowcheck.rebuild.version.records import StepRecord
from flowcheck.rebuild.version.replica import JobReplica, ReplicaOptions
from updater.errors import UpdaterError

__all__ = ["LiveSession", "wind_up"]

LAST_SECONDS = 10.0  # for a thread that is late, on a core that others use: nobody waits for what follows


class LiveSession:
    """sources[i]: ring of stream i. clock: the trainer's. slots, threads: of replicas. record_seconds: as of Policy.
    port: what the sources belong to. now, stamp: clocks, as of Follower. patched: may versions be built with holes, and
    trainers be asked for what is stale in them (range_repair.py)? resync: asks them. peers: as of PeerRepair.
    job_start: ReplicaOptions.start. matches: checksums that have matched in this run before. catching: asks peers
    before, where that is everything. trainers: False: none attaches, and nothing but parameters that are gathered can
    be followed (unattended.py). telemetry: of which iterations gradients are measured; None: of none."""

    def __init__(
        self, plan: JobPlan, sources: Sequence[Source], clock: Clock | None = None, *, slots: int, threads: int,
        record_seconds: float, port: Arrivals | None = None, now: Callable[[], float] = time.monotonic,
        stamp: Callable[[], int] = time.time_ns, patched: bool = False, resync: Resync | None = None,
        peers: Peers | None = None, job_start: str = "", matches: int = 0, catching: CatchUp | None = None,
        trainers: bool = True, telemetry: Telemetry | None = None,
    ) -> None:
        self.port = port = port or Arrivals()
        names = port.stream_names(plan.engine.streams)
        policy = Policy.live(record_seconds) if trainers else Policy.unattended()
        self.fed = FedArenas(plan, sum_text) if plan.job.source == FEED else None
        wire: WireArenas | None = None
        if self.fed is not None:
            self.arenas: ArenaSource = self.fed
        else:
            self.arenas = wire = self._wire(plan, sources, names, policy, telemetry)
        self._measured = wire if isinstance(wire, MeasuredArenas) else None
        replica = None if trainers else JobReplica(plan, None)  # which says that there is none
        self.follower = Follower(plan, self.arenas, policy, replica, clock=clock, now=now, stamp=stamp)
        self.follower.chain.matches = matches
        if self._measured is not None:
            self._measured.on_end = lambda iteration: self.follower.keeper.note("measured", iteration + 1)
        self.joining: Joining | None = None
        self.log = LogRepair(self.follower) if plan.job.kind == LOG else None
        if self.log is not None:
            self.follower.repairs.append(self.log)
        self._peers: PeerRepair | None = None
        self._mirror: Mirror | None = None
        if wire is not None:
            self._peers = PeerRepair(self.follower, wire, peers)
        if self.log is None and patched:
            ranges = RangeRepair(self.follower)
            self.follower.repairs.append(ranges)
            self.joining = Joining(self.follower, ranges, self._peers)
        if wire is not None and self._peers is not None:
            self.follower.repairs.append(self._peers)
            self._mirror = Mirror(wire, sources, port, self.clock, names, now)
        self._slots, self._threads, self.job_start = slots, threads, job_start
        self._resync, self._catching = resync, catching

    def _wire(
        self, plan: JobPlan, sources: Sequence[Source], names: Sequence[str], policy: Policy,
        telemetry: Telemetry | None,
    ) -> WireArenas:
        if telemetry is None:
            return WireArenas(plan, sources, names, sources_wait=policy.sources_wait)
        every = telemetry.every
        passes = Passes(lambda iteration: not self.clock.number(iteration) % every, telemetry.threads)
        return MeasuredArenas(plan, sources, names, passes=passes, sources_wait=policy.sources_wait)

    # -- from trainers --

    def record(self, record: Record, buffers: Mapping[str, torch.Tensor], rank: int) -> list[Event]:
        """Keep a step record. Raises UserError where it cannot be believed."""
        if self._mirror is not None:
            self._mirror.over(record.iteration)
        said = StepRecord(record.groups, record.clip, record.scale, record.skipped, record.checksums, buffers,
                          record.sample)
        begun = self.joining.record(record.iteration, rank) if self.joining is not None else []
        if self.log is not None:
            begun = self.log.record(record.iteration)
        return begun + self.follower.keep_record(record.iteration, said, rank)

    def patch(self, rank: int, message: Patch, tensors: Mapping[str, torch.Tensor]) -> None:
        """A rank's state of elements that it was asked for. Raises UserError if it is not that."""
        if self._resync is not None and self.joining is not None:
            self._resync.take(self.joining.ranges, rank, message, tensors)

    def announce(self, iteration: int) -> None:
        """A state before `iteration` is being sent: keep that iteration and what follows until it is here."""
        self.follower.trainers.announce(iteration)

    def withdraw(self) -> None:
        """The state that was announced will not come."""
        self.follower.trainers.withdraw()

    def hurry(self) -> None:
        """Nothing more comes from trainers: until `finish` no iteration waits for a word of theirs."""
        self.follower.trainers.hurry()

    def state(
        self, iteration: int, parameters: Mapping[str, torch.Tensor], state: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]] = (), path: Path | None = None,
    ) -> Iterator[Event]:
        """Go on from a trainer's state, after what is still under way. groups: hyper-parameters of the step before it.
        path: a file for the replica. Raises UserError if the state does not fit the job, or is too late."""
        self.withdraw()
        yield from self._heard(self.follower.settle())
        self.follower.check(iteration)
        fresh = self._new_replica(path)
        fresh.start(parameters, state, self.clock.before(iteration), groups)
        if self._catching is not None:
            self._catching.close()  # a peer's version would go into the replica that ends here
        self.follower.start(fresh, iteration)

    def begin(self, path: Callable[[], Path], left: Path | None = None) -> Iterator[Event]:
        """Go on without a state, by ranges, after what is still under way. path(): a file for a replica, where there is
        none to go on with. left: that of an earlier process, of this start of the job. Raises UserError: there cannot
        be a replica."""
        yield from self._heard(self.follower.settle())
        assert self.joining is not None
        chain = self.follower.chain
        replica, taken_up = chain.replica, False
        if replica is None and left is not None:
            replica, taken_up = self._taken_up(left), True
        if replica is None:
            replica, taken_up = self._new_replica(path()), False
            replica.start_empty(self.clock.before(0))
        if taken_up:
            assert left is not None
            chain.matches = max(chain.matches, replica.matches)
            yield Resumed(left, tuple(replica.steps))
        # What a peer gave of it and no checksum has confirmed would be forgotten here: then all of it is asked for.
        yield from self.joining.begin_from(replica, whole=taken_up and not replica.said)

    def _new_replica(self, path: Path | None) -> JobReplica:
        return JobReplica(self.plan, None, ReplicaOptions(self._slots, path, self._threads, True, self.job_start))

    def _taken_up(self, left: Path) -> JobReplica | None:
        """None: it is not what this session would have made."""
        replica = self._new_replica(None)
        try:
            replica.take_up(left)
        except UpdaterError:
            return None
        return replica

    # -- driving --

    def place_in_threads(self, placers: Placers | None) -> None:
        """From now on these threads take packets, at all times, until `finish` or `close`; else `poll` does."""
        if self._mirror is not None and placers is not None:
            self._mirror.arenas.place_in_threads(placers)

    def leave_threads(self) -> None:
        """The threads take nothing more for this job."""
        self.arenas.stop()

    def poll(self) -> Iterator[Event]:
        """One look at the rings, and what may close."""
        chain = self.follower.chain
        for event in self._heard(self.follower.poll()):
            if self._mirror is not None and isinstance(event, Closed):
                self._mirror.closed(event)
            yield event
        yield from self.follower.keeper.look(chain.next)
        if self._mirror is not None:
            yield from self._mirror.look(busy=chain.builds)
        if self.joining is None:
            return
        catching = self._catching if self._peers is not None else None  # of gradients that are sent none does
        if catching is not None:
            yield from catching.look(self.joining)
        if self._resync is not None and (catching is None or not catching.busy):
            yield from self._resync.look(self.joining.ranges)

    def _heard(self, events: Iterable[Event]) -> Iterator[Event]:
        """Begin a pass over what an iteration brought as soon as it is known what became of it."""
        for event in events:
            if self._measured is not None and isinstance(event, Closed):
                self._measured.closed(self.replica.last_step() if event.published and self.replica else None)
            yield event
        if self._measured is not None:
            yield from map(GradientsMeasured, self._measured.take())

    def finish(self) -> Iterator[Event]:
        """No more traffic: judge what is still open."""
        yield from self._heard(self.follower.finish())
        if self._measured is not None:
            self._measured.settle()
            yield from map(GradientsMeasured, self._measured.take())
        yield from self.follower.keeper.look(self.next)
        yield from self.follower.keeper.rest()

    def close(self) -> None:
        """Let go of peers, of the threads and of the replica."""
        if self._catching is not None:
            self._catching.close()
        if self._peers is not None:
            self._peers.close()
        self.follower.close()
        if self._measured is not None:
            self._measured.end()

    def mark(self) -> list[int]:
        """Where the rings end now: for `passed`."""
        return self._mirror.arenas.scheduler.mark() if self._mirror is not None else []

    def passed(self, mark: Sequence[int]) -> bool:
        """Was all that was in the rings then taken, as far as there are arenas for it?"""
        return self._mirror is None or self._mirror.arenas.scheduler.passed(mark)

    # -- how it stands --

    @property
    def plan(self) -> JobPlan:
        return self.follower.plan

    @property
    def engine(self) -> Engine:
        """Of a mirror's packets."""
        assert self._mirror is not None
        return self._mirror.arenas.engine

    @property
    def overload(self) -> Overload:
        """Of a mirror."""
        assert self._mirror is not None
        return self._mirror.overload

    @property
    def dropped(self) -> int:
        """Packets that were counted and not placed, so far."""
        return self._mirror.overload.packets if self._mirror is not None else 0

    @property
    def clock(self) -> Clock:
        """The trainer's."""
        return self.follower.clock

    @property
    def replica(self) -> JobReplica | None:
        """None: nothing can be read, and nothing built on."""
        return self.follower.chain.replica

    @property
    def next(self) -> int | None:
        """The iteration that the current version waits for; None: it has ended, or none has begun."""
        return self.follower.chain.next

    @property
    def matches(self) -> int:
        """Checksums of the trainer that have matched in this run."""
        return self.follower.chain.matches

    @property
    def first_iteration(self) -> int:
        """The first that closed, -1: none has."""
        return self.follower.first_iteration

    @property
    def moved(self) -> bool:
        """Did the last poll find anything to do?"""
        return self.follower.moved

    @property
    def owed(self) -> set[int]:
        """Ranks that were asked for ranges and have not answered."""
        return self.joining.ranges.partial.owing if self.joining is not None else set()

    @property
    def begun(self) -> range:
        """Iterations of which packets or records have come, and nothing was said yet."""
        chain, records = self.follower.chain, self.follower.records.after(self.arenas.begun)
        parts = [part for part in (self.arenas.open, records) if part]
        if chain.builds and chain.next is not None:
            parts.append(range(chain.next, chain.next + 1))
        return range(min(part.start for part in parts), max(part.stop for part in parts)) if parts else range(0)

    @property
    def serves(self) -> int:
        """The trainer's number of the iteration that made the version which can be read, -1: none can."""
        readable = self.replica is not None and self.replica.serves
        return self.clock.number(self.follower.published) if readable else -1


def wind_up(session: LiveSession, take: Callable[[Iterable[Event]], None]) -> None:
    """Judge what is there: first what is still at the ports, then what is in the rings, then what is open. take: is
    given the events. A thread that got no time for LAST_SECONDS is not waited for any longer: what it has not taken
    counts as lost."""
    empty, end = session.port.empty(), time.monotonic() + LAST_SECONDS
    while not session.port.emptied(empty) and time.monotonic() < end:
        take(session.poll())
        if not session.moved:
            time.sleep(IDLE_SECONDS)
    session.hurry()  # arenas that wait for somebody would keep what is in the rings from being taken
    last, end = session.mark(), time.monotonic() + LAST_SECONDS
    while time.monotonic() < end:
        take(session.poll())
        if not session.moved:
            if session.passed(last):
                break
            time.sleep(IDLE_SECONDS)
    take(session.finish())
