"""The report as a person reads it on a terminal: one verdict first, then only what needs attention.

Nothing here is computed or decided; report.json has it all. Long lists are cut with a count of what was left out, and
file names are printed as they are (rich markup switched off).
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowcheck.offline.report import FlowReport, IterationReport, Report
from flowcheck.tables import Column, print_table, width_of

__all__ = ["print_summary"]

FLOWS, ITERATIONS, REASON = 12, 6, 300


def print_summary(report: Report, console: Console) -> None:
    """Print the summary of a run; colours only where the console has them."""
    _headline(report, console)
    for capture in report.captures:
        form = f"{capture.format}, " if capture.format else ""
        count = f"{capture.packets:,} packets, {_size(capture.bytes)}"
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
    console.print(text, width=width_of(console), overflow="fold")


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
        _line(console, "", f"{absent} of {len(flows)} flows of the manifest are not in the captures")


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
    grid.add_column(width=12, no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    grid.add_row(Text(label), Text(text))
    console.print(grid, width=width_of(console))


def _counts(counts: dict[str, int]) -> str:
    """Causes, most frequent first."""
    return ", ".join(f"{name} {counts[name]:,}" for name in sorted(counts, key=lambda name: -counts[name]))


def _size(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
