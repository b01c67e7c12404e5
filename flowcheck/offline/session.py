"""One replay from start to end: a follower's events become a report, and checkpoints of what stands.

    session = ReplaySession(plan, replica, options, infos); session.drive(console); report, failure = session.finish()

Checkpoints wait aside in DIR/.unconfirmed until one steady iteration has gone through: before that, a
manifest that is wrong may still have agreed by chance. What they replace waits in DIR/.replaced until the end: traffic
that refutes the manifest later takes them back. Main thread only.
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
from flowcheck.checkpoint.directory import check_replaceable
from flowcheck.diagnose.remedies import remedy_of
from flowcheck.durable import adopt, make_directory, remove_tree, reporting
from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.learning.hints import Hints
from flowcheck.offline.gradients import GradientFiles
from flowcheck.offline.report import (
    BucketData,
    CaptureReport,
    CheckpointReport,
    FlowReport,
    Report,
    broadcast_report,
    write_report,
)
from flowcheck.rebuild.calibration import settle, settle_updates
from flowcheck.rebuild.events import Closed, Event, Lost, Read, Skipped
from flowcheck.rebuild.evidence import data_flows, describe_disagreement, flow_name, parameter_bytes
from flowcheck.rebuild.follower import Follower
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.policy import Offline
from flowcheck.rebuild.rank_confirmation import on_trust
from flowcheck.rebuild.replica import JobReplica
from flowcheck.rebuild.scheduler import Source
from flowcheck.rebuild.sharded import GatheredParameters

__all__ = ["REPLACED", "UNCONFIRMED", "ReplayOptions", "ReplaySession"]

UNCONFIRMED = ".unconfirmed"  # checkpoints wait here until the manifest is confirmed by the traffic
REPLACED = ".replaced"  # and those of an earlier replay of the run that have given way to them, until the end


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
    confirmed: bool = False  # one steady iteration went through: the manifest describes this traffic
    offered: set[Path] = field(default_factory=set)  # checkpoints of this replay that lie where people look for them
    learnt_labels: bool = False  # ranks and channels come from the captures themselves
    marks: list[str] = field(default_factory=list)  # what else rests on trust
    ended: str = ""  # why no version was built any more

    def __post_init__(self) -> None:
        settle(self.plan.engine.mtu, measure=False)  # what is known: a replay does not pay for a measurement
        if self.plan.job.optimizer is not None:
            settle_updates()
        self.gathered = GatheredParameters(self.plan)
        self.gradients = GradientFiles(self.plan.job, self.options.out) if self.options.gradients else None
        self.reduces = bool(self.plan.job.gradient_calls(0))  # else all that iterations bring are parameters
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
        self.follower = Follower(self.plan, sources, names, Offline(), self.replica)
        self.engine = self.follower.engine

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
        data, gathered = (
            [BucketData(b.place.index, b.place.dtype, b.data, b.placed, b.missing) for b in part]
            for part in (judged.buckets, judged.groups)
        )
        self.report.add_iteration(data, verdict, gathered)
        if self.gradients is not None:
            self.gradients.take(event.iteration, judged.buckets)
        if not self.confirmed and verdict.complete and event.iteration > self.follower.begins:
            disagreements = self.engine.disagreements()
            self._confirm(not self.follower.collector.refused(disagreements) and not self._refuted(disagreements))
        if verdict.complete and judged.groups:
            self.gathered.take(event.iteration, judged.groups)
            if self.options.every and self.gathered.step % self.options.every == 0:
                self._write_gathered()
        every = self.options.every
        if event.published and self.replica.ready and every and self.replica.step % every == 0:
            self._write()

    def _refuted(self, disagreements: list[dict]) -> bool:
        """Did a witness disagree before one steady iteration was over? Then it is the manifest that
        is wrong, and what agreed before may have agreed by chance."""
        return any(d["iteration"] <= self.follower.begins + 1 for d in disagreements)

    def _note_trust(self) -> None:
        """Put into the report what rests on the manifest's word alone."""
        labels = [] if self.learnt_labels else on_trust(self.plan, self._seen_edges(), self.engine.cts_tags())
        self.report.trust = [*self.marks, *labels, *self.replica.unproven]

    def _seen_edges(self) -> list[int]:
        return sorted({spec.edge for spec, counters in data_flows(self.plan, self.engine) if counters["packets"]})

    @property
    def _aside(self) -> Path:
        """Where checkpoints are written."""
        return self.options.out / UNCONFIRMED

    def _confirm(self, sound: bool) -> None:
        """Move what was written aside into place; or throw it away, and what is in place already as well."""
        self.confirmed = sound
        if sound:
            for path in sorted(self._aside.glob("*-*")) if self._aside.is_dir() else ():
                self._offer(path)
        else:
            if self.gradients is not None:
                self.gradients.withdraw()
            self.report.checkpoint = self.report.parameter_checkpoint = None
            for path in self.offered:
                held = self.options.out / REPLACED / path.name
                if held.is_dir():
                    adopt(held, path)
                else:
                    remove_tree(path)
        remove_tree(self._aside)

    def _offer(self, path: Path) -> None:
        """Give a checkpoint that was written aside its place; what an earlier replay has put there is kept for now."""
        final = self.options.out / path.name
        check_replaceable(final)
        adopt(path, final)
        if path.exists() and final not in self.offered:
            with reporting(path):
                make_directory(self.options.out / REPLACED)
            adopt(path, self.options.out / REPLACED / path.name)
        self.offered.add(final)

    def _adrift(self) -> str:
        """Connections whose packets came after an outage and could not be placed any more."""
        names = [
            flow_name(self.plan.job, spec.edge)
            for spec, counters in data_flows(self.plan, self.engine)
            if counters["adrift"]
        ]
        return "; ".join(names[:4])

    def _write(self) -> None:
        self._note_trust()
        with self.replica.pinned() as version:
            path = self.replica.write(self._aside, self.report.unproven, version)
        self.written = self.replica.step
        path = self._final(path)
        self.report.checkpoint = CheckpointReport(self.written, str(path), "unverified")

    def _write_gathered(self) -> None:
        path = self._final(self.gathered.write(self._aside, self.report.unproven))
        self.report.parameter_checkpoint = CheckpointReport(
            self.gathered.step, str(path), "unverified", self.gathered.dtype
        )

    def _final(self, path: Path) -> Path:
        """Where a checkpoint that was written aside is found in the end."""
        if self.confirmed:
            self._offer(path)
            remove_tree(self._aside)
        return self.options.out / path.name

    # -- the end --

    def finish(self) -> tuple[Report, str]:
        self._fill()
        disagreements = self.engine.disagreements()
        for entry in disagreements[:8]:
            self.report.notes.append(describe_disagreement(self.plan, entry))
        refused = self.follower.collector.refused(disagreements)
        if refused:
            self.report.notes.append(f"refused: {refused}; nothing is offered as a checkpoint")
        if self.plan.job.optimizer is None and self.reduces:
            self.report.notes.append(f"no checkpoint: {self.replica.absent}")
        self._note_trust()
        failure = self.report.failure = self._failure(refused)
        with reporting(self.options.out):
            make_directory(self.options.out)
        self._confirm(not refused and not self._refuted(disagreements))
        updated = self.replica.ready and self.replica.step > self.replica.first_step
        if updated and self.confirmed and self.written != self.replica.step:
            self._write()
        if self.gathered.due and self.confirmed:
            self._write_gathered()
        write_report(self.report, self.options.out / "report.json")
        for aside in (UNCONFIRMED, REPLACED):
            remove_tree(self.options.out / aside)
        return self.report, failure

    def _failure(self, refused: str) -> str:
        seen = self.report.iterations
        if not seen:
            raise self._nothing_seen()
        if refused:
            return refused
        asked = self.options.iterations
        if asked is not None and len(seen) < asked:
            return f"{asked} iterations were asked for and {len(seen)} are in the captures"
        if self.engine.unopened >= 0:
            return (
                f"iterations from {self.engine.unopened} on are in the captures and were read too late: a capture that"
                f" begins with iteration {self.follower.begins} has earlier times. The clocks of the captures differ:"
                " editcap -t"
            )
        incomplete = [i.iteration for i in seen if not i.verdict.complete]
        if incomplete:
            return f"{len(incomplete)} of {len(seen)} iterations are incomplete, the first is {incomplete[0]}"
        entries = self.engine.disagreements()
        if entries:
            return f"the traffic is not what the manifest says: {describe_disagreement(self.plan, entries[0])}"
        adrift = self._adrift()
        if adrift:
            return f"the place in the schedule was lost in an outage and nothing on the wire says it again: {adrift}"
        if self.plan.job.optimizer is not None and not self.replica.ready:
            return f"no checkpoint: {self.replica.absent}"
        unpublished = [i for i in seen if not i.verdict.publishable]
        if unpublished:
            clause, reason = unpublished[0].verdict.failing[0]
            return f"iteration {unpublished[0].iteration} could not be published: {clause.value}: {reason}"
        return self.ended

    def _nothing_seen(self) -> UserError:
        """No packet of the job's iterations in the captures: say what was there instead."""
        entries = self.engine.disagreements()
        packets = dict.fromkeys(range(len(self.plan.job.flows)), 0)
        for spec, counters in data_flows(self.plan, self.engine):
            packets[spec.edge] += counters["seen"]  # also those that found no place in the traffic
        captures = ", ".join(info.path for info in self.infos)
        if entries:
            return UserError(
                "the traffic is not what the manifest describes: " + describe_disagreement(self.plan, entries[0]),
                where=self.options.job_name,
                remedy="compare ranks, channels, protocol, mtu and collectives with `flowcheck inspect`",
            )
        silent = [flow_name(self.plan.job, edge) for edge, count in packets.items() if not count]
        drops = self._drops()
        return UserError(
            f"no {'gradient' if self.reduces else 'parameter'} packet of this job is in the captures"
            + (f"; never seen: {'; '.join(silent[:4])}" if silent else "")
            + f"; by what became of the packets: {', '.join(f'{name} {count}' for name, count in drops.items())}",
            where=captures,
            remedy=self._remedy(drops),
        )

    def _remedy(self, drops: dict[str, int]) -> str:
        """What to do when nothing was placed, by what most of the packets suffered from."""
        ours = {name: count for name, count in drops.items() if name not in ("not_roce", "control", "other_roce")}
        found = remedy_of(ours)
        if "icrc" in ours and ours["icrc"] == max(ours.values()):
            return f"{found}; --no-icrc places them all the same and marks the result unproven"
        return found or "`flowcheck inspect` lists the connections; put their addresses and QP numbers in flows"

    def _drops(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for stream in range(self.plan.engine.streams):
            for name, (packets, _) in self.engine.outcomes(stream).items():
                if name not in ("placed", "compared", "encapsulated") and packets:
                    total[name] = total.get(name, 0) + packets
        named = {f"encapsulated: {what}": packets for what, packets in self.engine.encapsulated().items()}
        return total | named

    def _fill(self) -> None:
        report, job = self.report, self.plan.job
        report.drops = self._drops()
        report.captures = [CaptureReport(i.path, i.packet_count, i.size, i.format) for i in self.infos]
        streams = [self.engine.flow_counters(stream) for stream in range(self.plan.engine.streams)]
        for i, spec in enumerate(self.plan.engine.flows):
            seen = [counters[i] for counters in streams if counters[i]["seen"]]
            flow = job.flows[spec.edge]
            ends = (flow.src, flow.dst) if spec.data else (flow.dst, flow.src)
            addresses = flow.addresses(spec.qp) if spec.data else flow.addresses(spec.qp)[::-1]
            for c in seen or [streams[0][i]]:  # one line per capture that carries it
                report.flows.append(
                    FlowReport(
                        ("gradients" if self.reduces else "parameters") if spec.data else "control",
                        *ends,
                        flow.channel,
                        *addresses,
                        [spec.qpn],
                        c["packets"],
                        c["missing"],
                        c["duplicates"],
                        c["retransmissions"],
                        c["icrc_wrong"],
                        c["state"] if spec.data else "",
                        "" if c["seen"] else "no packet of it is in the captures",
                    )
                )
        report.broadcasts = self._broadcasts()

    def _broadcasts(self) -> list:
        found = parameter_bytes(self.plan, self.engine)
        if not found:
            return []
        first, last = self.plan.parameters[0].offset, self.plan.parameters[-1]
        names, end = [place.name for place in self.plan.parameters], last.offset + last.nbytes
        gaps = self.engine.missing(None, first // 8, -(-end // 8))
        placed = end - first - sum(min(8 * int(stop), end) - 8 * int(start) for start, stop in gaps)
        return [broadcast_report(names, self.engine.region(None)[first:end], placed)]
