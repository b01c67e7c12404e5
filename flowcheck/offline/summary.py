"""A replay in words: why it did not do all that was asked, and its report as a person reads it on a terminal.

    failure(report, follower, engine, ...)     the first reason, which goes into the report
    nothing_seen(plan, engine, captures, job)  the error of captures that bring nothing of the job
    print_summary(report, console)             one verdict first, then only what needs attention

Nothing here is computed or decided; report.json has it all. Long lists are cut with a count of what was left out, and
file names are printed as they are (rich markup switched off).
"""

from __future__ import annotations

from collections.abc import Sequence

from parser.machine import Engine
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowcheck.diagnose.remedies import remedy_of, worst
from flowcheck.errors import UserError, size_text
from flowcheck.offline.report import FlowReport, IterationReport, Report, drops_of
from flowcheck.rebuild.iteration.evidence import edges_with
from flowcheck.rebuild.iteration.wording import describe_disagreement, flow_name
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.follower import Follower
from flowcheck.tables import Column, print_table, width_of

__all__ = ["failure", "nothing_seen", "print_summary"]

FLOWS, ITERATIONS, REASON, NAMED = 12, 6, 300, 4


def failure(report: Report, follower: Follower, engine: Engine, refused: str, ended: str) -> str:
    """Why a replay did not do all that was asked: the first reason that applies, or "". Some iteration has closed.

    refused: why the traffic is not the job's, or "". ended: why no version was built any more, or ""."""
    if refused:
        return refused
    plan, replica = follower.plan, follower.chain.replica
    asked, found = report.iterations_asked, report.iterations
    if asked is not None and len(found) < asked:
        return f"{asked} iterations were asked for and {len(found)} are in the captures"
    if engine.missed_iteration >= 0:
        return (
            f"iterations from {engine.missed_iteration} on are in the captures and were read too late: a capture that"
            f" begins with iteration {follower.first_iteration} has earlier times. The clocks of the captures differ:"
            " editcap -t"
        )
    incomplete = [each.iteration for each in found if not each.verdict.complete]
    if incomplete:
        return f"{len(incomplete)} of {len(found)} iterations are incomplete, the first is {incomplete[0]}"
    if entries := engine.disagreements():
        return f"the traffic is not what the manifest says: {describe_disagreement(plan, entries[0])}"
    if adrift := edges_with(plan, engine, "adrift"):
        names = "; ".join(flow_name(plan.job, edge) for edge in adrift[:NAMED])
        return f"the place in the schedule was lost in an outage and nothing on the wire says it again: {names}"
    if plan.job.optimizer is not None and replica is not None and not replica.ready:
        return f"no checkpoint: {replica.absent}"
    if unpublished := [each for each in found if not each.verdict.publishable]:
        clause, reason = unpublished[0].verdict.failing[0]
        return f"iteration {unpublished[0].iteration} could not be published: {clause.value}: {reason}"
    return ended


def nothing_seen(plan: JobPlan, engine: Engine, captures: str, job: str, notes: Sequence[str] = ()) -> UserError:
    """The error of captures that bring no packet of the job's iterations: what was there instead, and what to do.
    captures, job: what people call them. notes: what of the captures could not be read."""
    if entries := engine.disagreements():
        return UserError(
            f"the traffic is not what the manifest describes: {describe_disagreement(plan, entries[0])}", where=job,
            remedy="compare ranks, channels, protocol, mtu and collectives with `flowcheck inspect`",
        )
    there, drops = edges_with(plan, engine, "seen"), drops_of(plan, engine)
    silent = [flow_name(plan.job, edge) for edge in range(len(plan.job.flows)) if edge not in there]
    remedy = remedy_of(drops)
    if not remedy and not silent and drops and "other_roce" not in drops:
        remedy = "all connections of the job are there: capture longer, with whole iterations"
    if worst(drops) == "icrc":
        remedy += "; --no-icrc places them all the same and marks the result unproven"
    return UserError(
        f"no {'gradient' if plan.job.gradient_calls(0) else 'parameter'} packet of this job is in the captures"
        + (f"; never seen: {'; '.join(silent[:NAMED])}" if silent else "")
        + f"; by what became of the packets: {', '.join(f'{name} {count}' for name, count in drops.items())}"
        + "".join(f"; {note}" for note in notes),
        where=captures,
        remedy=remedy or "`flowcheck inspect` lists the connections; put their addresses and QP numbers in flows",
    )


# -- on a terminal -----------------------------------------------------------------------------------------


def print_summary(report: Report, console: Console) -> None:
    """Print the summary of a run; colours only where the console has them."""
    _headline(report, console)
    for capture in report.captures:
        form = f"{capture.format}, " if capture.format else ""
        count = f"{capture.packets:,} packets, {size_text(capture.bytes)}"
        _line(console, "capture", f"{capture.path}: {form}{count}")
    if report.flows:
        _flows(report.flows, console)
    for broadcast in report.broadcasts:
        digest = f"sha256 {broadcast.sha256[:16]}…" if broadcast.sha256 else "INCOMPLETE"
        placed = f"{broadcast.placed_bytes:,} of {broadcast.bytes:,} bytes"
        _line(console, "parameters", f"{len(broadcast.names)} tensors from a broadcast, {placed}, {digest}")
    _incomplete(report, console)
    drops = {cause: count for cause, count in report.drops.items() if count}
    if drops:
        _line(console, "not placed", _counts(drops))
    _time(report, console)
    for note in report.notes:
        _line(console, "note", note)
    _checkpoint(report, console)


def _headline(report: Report, console: Console) -> None:
    complete, expected = len(report.complete), report.expected
    text = Text("COMPLETE" if report.ok else "INCOMPLETE", style="bold green" if report.ok else "bold red")
    text.append(f"  {complete} of {expected} iterations complete", style="not bold default")
    unseen = expected - len(report.iterations)
    if unseen > 0:
        text.append(f", {unseen} never seen", style="not bold default")
    if report.unproven:
        text.append(f"  UNPROVEN ({', '.join(report.unproven)})", style="bold yellow")
    console.print(text, width=width_of(console))


def _flows(flows: list[FlowReport], console: Console) -> None:
    columns = [Column(name, folds=True) for name in ("flow", "channel", "QP", "role", "state")]
    columns += [Column(name, number=True) for name in ("packets", "missing", "dup", "retrans", "bad icrc")]
    rows = []
    seen = [flow for flow in flows if flow.packets]
    for flow in seen[:FLOWS]:
        ranks = f"rank {flow.src} > {flow.dst}"
        if flow.src is None or flow.dst is None:
            ranks = f"{flow.src_addr} > {flow.dst_addr}"
        qpns = f"{flow.qpns[0]:#x}" if flow.qpns else ""
        if len(flow.qpns) > 1:
            qpns += f"+{len(flow.qpns) - 1}"
        counts = (flow.packets, flow.missing, flow.duplicates, flow.retransmissions, flow.icrc_wrong)
        channel = "" if flow.channel is None else str(flow.channel)
        cells = (ranks, channel, qpns, flow.role, flow.state, *(f"{count:,}" for count in counts))
        rows.append(cells)
    print_table(console, columns, rows)
    for flow in [flow for flow in seen if flow.detail][:FLOWS]:
        _line(console, "flow", f"{flow.src_addr} > {flow.dst_addr}: {flow.detail}")
    if len(seen) > FLOWS:
        _line(console, "", f"and {len(seen) - FLOWS} more flows in the report")
    absent = sum(not flow.packets and bool(flow.detail) for flow in flows)  # of others only acknowledgements were seen
    if absent:
        count = len({(flow.dst_addr, *flow.qpns) for flow in flows})  # one that two captures carry stands here twice
        _line(console, "", f"{absent} of {count} flows of the manifest are not in the captures")


def _incomplete(report: Report, console: Console) -> None:
    """Iterations whose verdict does not stand, with the first reasons."""
    failed = [iteration for iteration in report.iterations if not iteration.verdict.publishable]
    for iteration in failed[:ITERATIONS]:
        _line(console, f"iteration {iteration.iteration}", _why(iteration))
    if len(failed) > ITERATIONS:
        _line(console, "", f"and {len(failed) - ITERATIONS} more iterations in the report")


def _why(iteration: IterationReport) -> str:
    text = "; ".join(f"{clause.value}: {reason}" for clause, reason in iteration.verdict.failing)
    return text if len(text) <= REASON else text[:REASON] + "… (all of it in the report)"


def _time(report: Report, console: Console) -> None:
    if report.stages:
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in report.stages.items())
        _line(console, "time", stages)
    if report.seconds:
        packets = sum(capture.packets for capture in report.captures)
        bits = 8 * sum(capture.bytes for capture in report.captures)
        rate = f"{packets / report.seconds:,.0f} packets/s, {bits / report.seconds / 1e9:.3f} Gbit/s"
        _line(console, "throughput", f"{rate} over {report.seconds:.2f} s")


def _checkpoint(report: Report, console: Console) -> None:
    gathered = report.parameter_checkpoint
    if gathered is not None:
        what = f"parameters only, {gathered.dtype}, no optimizer state"
        _line(console, "gathered", f"step {gathered.step}, {what}: {gathered.path}")
    if report.checkpoint is None:
        _line(console, "checkpoint", "none was written")
        return
    status = report.checkpoint.status
    if status == "unverified":
        status = "unverified (no trainer checksum was compared)"
    _line(console, "checkpoint", f"step {report.checkpoint.step}, {status}: {report.checkpoint.path}")


# -- small parts ------------------------------------------------------------------------------------


def _line(console: Console, label: str, text: str) -> None:
    """A labelled line; wrapped text stays clear of the label column."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=12, no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    grid.add_row(Text(label), Text(text))
    console.print(grid, width=width_of(console))


def _counts(counts: dict[str, int]) -> str:
    """Causes, most frequent first."""
    return ", ".join(f"{name} {counts[name]:,}" for name in sorted(counts, key=lambda name: -counts[name]))
