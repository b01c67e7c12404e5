"""One replay from start to end: a follower's events become a report, and checkpoints of what stands.

    session = ReplaySession(plan, replica, options, infos); session.drive(console); report, failure = session.finish()

Checkpoints wait aside until one steady iteration has gone through (offer.py). Main thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dataplane.capture import PcapSource, memory_needed
from dataplane.pcapfile import PcapInfo
from dataplane.pydpdk.eal import Eal
from flowcheck.durable import make_directory, reporting
from flowcheck.job.model import Job
from flowcheck.learning.hints import Hints
from flowcheck.offline.gradients import GradientFiles
from flowcheck.offline.late import with_late
from flowcheck.offline.offer import Offer
from flowcheck.offline.report import CheckpointReport, Report, write_report
from flowcheck.offline.summary import failure, nothing_seen
from flowcheck.rebuild.calibration import settle, settle_updates
from flowcheck.rebuild.iteration.evidence import edges_with
from flowcheck.rebuild.iteration.rank_confirmation import on_trust
from flowcheck.rebuild.iteration.scheduler import Source
from flowcheck.rebuild.iteration.sharded import ShardedParameters
from flowcheck.rebuild.iteration.wire_arenas import WireArenas
from flowcheck.rebuild.iteration.wording import describe_disagreement
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.events import Closed, Event, Lost, Read, Skipped
from flowcheck.rebuild.version.follower import Follower
from flowcheck.rebuild.version.policy import Policy
from flowcheck.rebuild.version.replica import JobReplica

__all__ = ["ReplayOptions", "ReplaySession"]


@dataclass(frozen=True)
class ReplayOptions:
    """What was asked for; see `flowcheck replay --help`.

    job: a manifest, its file, or None: learn it from the captures, with `hints` and `logs`.
    """

    captures: list[Path]
    job: Path | Job | None
    out: Path
    init: Path | None = None
    every: int = 0
    iterations: int | None = None
    arenas: int = 4
    icrc: bool = True
    hints: Hints = field(default_factory=Hints)
    logs: Sequence[Path] = ()
    gradients: bool = False  # keep those of each iteration

    @property
    def job_name(self) -> str:
        """Of the manifest, for a person."""
        return "the learnt job" if self.job is None else "the job given" if isinstance(self.job, Job) else str(self.job)


@dataclass
class ReplaySession:
    """State of one replay."""

    plan: JobPlan
    replica: JobReplica
    options: ReplayOptions
    infos: list[PcapInfo]
    report: Report = field(default_factory=Report)
    written: int = -1  # step of the newest checkpoint on disk
    learnt_labels: bool = False  # ranks and channels come from the captures themselves
    marks: list[str] = field(default_factory=list)  # what else rests on trust
    ended: str = ""  # why no version was built any more

    def __post_init__(self) -> None:
        if self.plan.job.optimizer is not None:
            settle_updates()
        self.offer = Offer(self.options.out)
        self.sharded = ShardedParameters(self.plan)
        self.gradients = GradientFiles(self.plan.job, self.options.out) if self.options.gradients else None
        self.report.run_id = self.plan.job.run_id
        self.report.iterations_asked = self.options.iterations

    # -- driving --

    def drive(self, console: Console) -> None:
        begin = time.monotonic()
        need = memory_needed(self.infos)
        total = sum(info.packet_count for info in self.infos)
        with ExitStack() as stack:
            eal = stack.enter_context(Eal.start(memory_mb=need.total_mb))
            if not eal.huge:
                self.report.notes.append(eal.describe())
            # what is known of the pages that packets lie in: a replay does not pay for a measurement
            settle(self.plan.engine.mtu, eal.huge, measure=False)
            sources = [
                stack.enter_context(PcapSource(eal, info.path, stream=i, info=info))
                for i, info in enumerate(self.infos)
            ]
            self.begin(sources)
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            bar = stack.enter_context(
                Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
            )
            task = bar.add_task("packets", total=total)
            started = time.monotonic()
            for source in sources:
                source.start()
            for event in self.follower.run():
                if isinstance(event, Read):
                    bar.update(task, completed=event.packets)
                elif not self.take(event):
                    break
            self.report.seconds = time.monotonic() - started
            for source in sources:
                source.stop()
            self.report.notes += [source.summary() for source in sources if source.counters()["oversize"]]
        self.report.stages = {
            "start": started - begin,
            "receive and place": self.report.seconds - self.follower.closing_seconds,
            "verdict, update, write": self.follower.closing_seconds,
        }

    def begin(self, sources: Sequence[Source]) -> None:
        """Follow what these bring, one for each capture."""
        names = [info.path for info in self.infos]
        policy = Policy.offline()
        self.arenas = WireArenas(self.plan, sources, names, sources_wait=policy.sources_wait)
        self.engine = self.arenas.engine
        self.follower = Follower(self.plan, self.arenas, policy, self.replica)

    # -- what the follower says --

    def take(self, event: Event) -> bool:
        """Report what happened, and write the version that is due. False: enough was asked for."""
        if isinstance(event, Skipped):
            self.report.notes.append(
                f"iterations {event.first} to {event.last} passed while the mirror was down: no packet of them is in"
                " the captures"
            )
        if isinstance(event, Lost):
            self.ended = event.why
        if not isinstance(event, Closed):
            return True
        self._closed(event)
        return self.options.iterations is None or len(self.report.iterations) < self.options.iterations

    def _closed(self, event: Closed) -> None:
        judged = event.judged
        assert judged is not None
        verdict = judged.verdict
        self.report.add_iteration(judged.buckets, verdict, judged.groups)
        if self.gradients is not None:
            self.gradients.take(event.iteration, judged.buckets)
        if not self.offer.confirmed and verdict.complete and event.iteration > self.follower.first_iteration:
            self._confirm()
        every = self.options.every
        if verdict.complete and judged.groups:
            self.sharded.take(event.iteration, judged.groups)
            if every and self.sharded.step % every == 0:
                self._write_sharded()
        if event.published and self.replica.ready and every and self.replica.step % every == 0:
            self._write()

    def _confirm(self) -> None:
        """Offer what was written aside if the traffic agrees with the manifest so far, else take all of it back."""
        disagreements = self.engine.disagreements()
        # A witness that disagrees before one steady iteration is over says that it is the manifest that is wrong, and
        # what agreed before may have agreed by chance.
        early = any(d["iteration"] <= self.follower.first_iteration + 1 for d in disagreements)
        sound = not early and not self.arenas.collector.refused(disagreements)
        if not sound:
            if self.gradients is not None:
                self.gradients.withdraw()
            self.report.checkpoint = self.report.parameter_checkpoint = None
        self.offer.confirm(sound)

    def _note_trust(self) -> None:
        """Put into the report what rests on the manifest's word alone."""
        edges = edges_with(self.plan, self.engine, "packets")
        labels = [] if self.learnt_labels else on_trust(self.plan, edges, self.engine.cts_tags())
        self.report.trust = [*self.marks, *labels, *self.replica.unproven]

    def _write(self) -> None:
        self._note_trust()
        with self.replica.pinned() as version:
            path = self.replica.write(self.offer.aside, self.report.unproven, version)
        self.written = self.replica.step
        self.report.checkpoint = CheckpointReport(self.written, str(self.offer.take(path)), "unverified")

    def _write_sharded(self) -> None:
        path = self.offer.take(self.sharded.write(self.offer.aside, self.report.unproven))
        self.report.parameter_checkpoint = CheckpointReport(
            self.sharded.step, str(path), "unverified", self.sharded.dtype
        )

    # -- the end --

    def finish(self) -> tuple[Report, str]:
        """Write the report, and the last version if none of it was. Returns (report, why not all that was asked is
        done, or ""). Raises UserError if the captures bring nothing of the job."""
        report, options = self.report, self.options
        report.add_traffic(self.plan, self.engine, self.infos)
        report.iterations = with_late(self.plan, self.engine, report.iterations)
        if not report.iterations:
            paths, notes = [info.path for info in self.infos], [note for info in self.infos for note in info.notes]
            raise nothing_seen(self.plan, self.engine, ", ".join(paths), options.job_name, notes)
        disagreements = self.engine.disagreements()
        report.notes += [describe_disagreement(self.plan, entry) for entry in disagreements[:8]]
        refused = self.arenas.collector.refused(disagreements)
        if refused:
            report.notes.append(f"refused: {refused}; nothing is offered as a checkpoint")
        if self.plan.job.optimizer is None and self.plan.job.gradient_calls(0):
            report.notes.append(f"no checkpoint: {self.replica.absent}")
        self._note_trust()
        report.failure = failure(report, self.follower, self.engine, refused, self.ended)
        with reporting(options.out):
            make_directory(options.out)
        self._confirm()
        if self.offer.confirmed:
            if self.replica.ready and self.replica.step not in (self.replica.first_step, self.written):
                self._write()
            if self.sharded.due:
                self._write_sharded()
        write_report(report, options.out / "report.json")
        self.offer.clear()
        return report, report.failure
