"""`flowcheck lab run`: build what is not there, train, follow, compare, and say what was shown, in numbers.

    run_lab(options, console) -> exit status: 0 every version equal, 1 anything else

Exit 0 means: from its first state on, the node has published a version for every iteration, and every tensor of each is
bit for bit the trainers' own. Iterations whose gradients were lost on purpose (impairments) are not published; then the
status is 1, as for a replay of a capture with gaps.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flowcheck.interrupts import handled
from lab import nodes_lost
from lab.children import Cores
from lab.compare import Summary
from lab.fault import Fault, lose_a_rank, say
from lab.jobs import Training
from lab.network.fabric import Fabric
from lab.record import nobody
from lab.run import LabRun
from lab.shape import FabricConfig
from lab.view import Screen

__all__ = ["LabOptions", "attach_steps", "report", "run_lab", "step_times"]

WATCHED = 3  # iterations before attach sends anything
SETTLING = 5  # first iterations of an arm without node: DDP's second bucket layout; attach takes as many
TROUBLE = ("silent", "dropped", "lost", "deferred", "waiting", "refused", "problem")  # what a node says of itself
DEEP = {"capture": {"ring_size": 1 << 16}}  # some iterations of packets: a node that shares its core must not lose any
ARMS = (True, False, False, True)  # with and without mirror and node, interleaved


@dataclass(frozen=True)
class LabOptions:
    """iterations: versions wanted; arm: iterations of each arm of the step-time check, 0: no check; fault: a rank that
    is killed after them. api: nodes serve versions, metrics and their status page in the lab's control network."""

    fabric: FabricConfig
    job: Training
    out: Path
    iterations: int = 30
    arm: int = 0
    fault: Fault | None = None
    api: bool = False

    @property
    def protects(self) -> bool:
        """Nodes are lost after them, and what they had comes back from parity."""
        return self.fabric.holders > 0


def run_lab(options: LabOptions, console: Console) -> int:
    """Raises EnvironmentProblem (no root, no namespaces), UserError (settings)."""
    begin = time.monotonic()
    with (
        handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP),  # taken down as after Ctrl-C
        Fabric.of(options.fabric) as fabric,
        LabRun(fabric, options.out, api=options.api or options.fault is not None or options.protects,
               node_settings=DEEP | (nodes_lost.protected(options.fabric) if options.protects else {})) as run,
    ):
        ends = options.fault is None and not options.protects
        with Screen(console, _title(options)) as run.watch:
            run.start_nodes(options.job)
            run.start_holders()
            started = time.monotonic() - begin
            first = run.attach(options.job)
            run.train(options.iterations)
            if ends:
                run.end()
            run.wait_for_nodes(run.trained - 1)
            if ends:
                run.finish_nodes()
            run.ledger.over = True
            run.watch(run.ledger, last=True)
            summary, events = run.ledger.summary(), [event for _, event in run.events]
            trained = time.monotonic() - begin - started
            attaching = attach_steps([(one["iteration"], one["seconds"]) for one in run.iterations], first)
        run.watch = nobody
        outcome, lost = None, None
        if options.fault is not None:
            run.ledger.over = False
            outcome = lose_a_rank(run, options.job, options.fault)
        if options.protects:
            run.ledger.over = False
            lost = nodes_lost.lose_nodes(run, options.job)
        if options.arm:
            _say_step_times(step_times(run, options.job, options.arm), console)
        run.finish_trainers()
    console.print(attaching, highlight=False)
    status = report(options, summary, events, (started, trained), console)
    equal = (outcome is None or say(outcome, console)) and (lost is None or nodes_lost.say(lost, console))
    return status if equal else 1


def step_times(run: LabRun, job: Training, iterations: int) -> dict[bool, list[float]]:
    """Seconds per step, with mirror and node (True) and without, in alternating arms of the same job. A step is as long
    as the rank takes that reports it; ranks wait for each other in every one."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for arm in ARMS:
        if arm:
            run.start_nodes(job)
            run.attach(job)
        else:
            run.begin(job)
            run.train(SETTLING)
        first = len(run.iterations)
        run.train(iterations)
        times[arm] += [line["seconds"] for line in run.iterations[first:]]
        run.end()
        if arm:
            run.finish_nodes()
    return times


def attach_steps(steps: Sequence[tuple[int, float]], first: int) -> str:
    """How long the longest step around attach was, in words. steps: (iteration, seconds) of all of a job; first: the
    iteration of the node's first version."""
    around = [(seconds, i) for i, seconds in steps if WATCHED <= i <= first + 1]
    others = [seconds for i, seconds in steps if i > first + 1]
    if not around or not others:
        return "attach       too few steps to compare"
    longest, at = max(around)
    return (
        f"attach       longest step {longest * 1e3:.1f} ms (iteration {at} of {WATCHED} to {first + 1}, from the"
        f" manifest to the first\n             version); median of the {len(others)} after them"
        f" {statistics.median(others) * 1e3:.1f} ms, longest {max(others) * 1e3:.1f} ms"
    )


# -- words ------------------------------------------------------------------------------------------------


def _wire(job: Training) -> str:
    wire = {"protocol": "LL", "algorithm": "ring", "channels": 1, "mtu": 4096, **job.softroce}
    many = "s" if wire["channels"] > 1 else ""
    return f"{wire['protocol']}, {wire['algorithm']}, {wire['channels']} channel{many}, path MTU {wire['mtu']}"


def _title(options: LabOptions) -> str:
    job, config = options.job, options.fabric
    parts = (("pipeline stages", job.stages), ("shards", job.shards), ("experts", job.experts))
    stages = "".join(f", {number} {what}" for what, number in parts if number > 1)
    ports = sorted({rank for node in config.mirrored for rank in node})
    switch = "a Linux bridge and tc" if config.switch == "tc" else "Open vSwitch"
    return (
        f"{job.model} on {job.ranks} ranks{stages} over RoCEv2 ({_wire(job)}); {switch} mirrors"
        f" {len(ports)} of {job.ranks} ports to {config.nodes} node{'s' if config.nodes > 1 else ''}"
    )


def _say_step_times(times: dict[bool, list[float]], console: Console) -> None:
    with_node, without = statistics.median(times[True]), statistics.median(times[False])
    two = "trainers on one core, the node on the other" if Cores().rest is not None else "all on one core"
    lines = [
        f"step time    {with_node * 1e3:.1f} ms with mirror and node, {without * 1e3:.1f} ms without: ratio"
        f" {with_node / without:.2f}",
        f"medians of {len(times[True])} and {len(times[False])} steps, arms interleaved; a check of this harness:",
        f"{two}.",
        "Here the trainers' own core sends every copy. Two shared cores",
        "prove nothing about a cluster, where copies are the switch's work",
        "and the node is another machine.",
    ]
    console.print("\n             ".join(lines), highlight=False)


def _say_trouble(events: list[dict[str, Any]], console: Console) -> None:
    """What the nodes said last of what is in their way, and where all packets went: a node that follows nothing has
    no iterations to count them in."""
    last = {(event.get("name", ""), event["event"]): event for event in events if event["event"] in TROUBLE}
    for (name, kind), event in last.items():
        console.print(f"a node said  {f'{name} ' if name else ''}{kind}: {event.get('why', '')}", highlight=False)
    for event in events:
        if event["event"] == "capture":
            console.print(f"a node had   {event['text']}", highlight=False)


def report(
    options: LabOptions, summary: Summary, events: list[dict[str, Any]], seconds: tuple[float, float], console: Console
) -> int:
    """The last words of a run. Returns its exit status."""
    job = options.job
    lines = [event for event in events if event.get("event") == "iteration"]
    packets, placed, twice = (sum(line[key] for line in lines) for key in ("packets", "placed", "duplicates"))
    console.print(f"time         {seconds[0]:.0f} s to build and start, {seconds[1]:.0f} s to train and follow",
                  highlight=False)
    counted = f"{packets:,} mirrored packets, {placed:,} placed, {twice:,} seen twice"
    console.print("captured     " + (counted if lines else "no iteration that could be judged"), highlight=False)
    cells = {source: sum(line.get("filled", {}).get(source, 0) for line in lines) for source in ("peer", "trainer")}
    if any(cells.values()):
        by = " and ".join(f"{count:,} by the {source}" for source, count in cells.items() if count)
        console.print(f"healed       of cells of 8 bytes {by}", highlight=False)
    for row in [*summary.differing, *summary.unpublished][:20]:
        console.print(f"iteration {row.iteration} {row.verdict}: {row.why}", highlight=False)
    console.print(f"files        {options.out}", highlight=False)
    if not summary.all_equal:
        _say_trouble(events, console)
    total = summary.equal + len(summary.differing) + len(summary.unpublished)
    wanted = options.iterations * len(job.names)
    by = "fully_shard" if job.shards > 1 else "DistributedDataParallel"
    if summary.all_equal and summary.published >= wanted:
        console.print(
            f"before       {summary.before} iterations, until the node had manifest and state\n"
            f"EQUAL: {summary.equal} of {total} versions of the replica, one per iteration, are bit for bit\n"
            f"the trainers' own state: {summary.tensors:,} tensors (parameters, optimizer state, buffers)\n"
            f"compared by SHA-256, none differs. {job.ranks} ranks trained with torch's\n"
            f"{by}; their gradients came to the node in mirrored packets\n"
            + ("and in no other way." if not any(cells.values()) else "but for what was healed."), highlight=False,
        )
        return 0
    console.print(
        f"before       {summary.before} iterations, until the node had manifest and state\n"
        f"NOT ALL EQUAL: of {total} iterations from the first state on {summary.equal} are equal,\n"
        f"{len(summary.differing)} differ, {len(summary.unpublished)} were not published ({wanted} versions were"
        " wanted);\nthe node offers only what it has published.", highlight=False,
    )
    return 1
