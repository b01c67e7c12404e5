"""What `flowcheck plan capacity` says of monitor ports: do they fit, what would, and what fewer of them would lose."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from flowcheck.plan.answers.answer import Grid, Result, Value
from flowcheck.plan.capacity.capacity import Capacity, Job
from flowcheck.plan.capacity.capacity_request import Case
from flowcheck.plan.capacity.fabric import LeafPorts, leaf_refusal, splits
from flowcheck.plan.traffic.bursts import Burst, fewest_ports, most_peak
from flowcheck.plan.traffic.loss_law import Copies, Direction, incomplete, worst
from flowcheck.plan.traffic.wire_volume import reduced_packets

__all__ = ["burst_results", "changes", "packets_of", "port_grid", "ports_refused"]

SPEEDS = (100, 200, 400, 800, 1600)
ROWS = 8  # of the table
SEARCHED = 24  # mirrored ports of a leaf up to which every dealing is tried before it is refused
ONE_COPY = Copies({1: 1.0})
LAW = (
    "the exact law of iterations that stay incomplete, where each copy is lost by itself, and where all copies of a "
    "packet are lost together, as one. A full buffer is between the two: measure it before you buy fewer ports"
)


def ports_refused(case: Case, found: Capacity) -> str:
    """Why the node's monitor ports cannot carry the copies, by `flowcheck switch plan`'s rule; empty if they can."""
    if case.ports is None:  # the planner has made a plan of the topology
        return ""
    quick = leaf_refusal(case.ports, quick=True)
    if quick and case.ports.mirrors * case.ports.groups * case.ports.nodes <= SEARCHED:
        return leaf_refusal(case.ports, quick=False)
    return quick


def changes(ports: LeafPorts) -> list[str]:
    """Options with which it would fit, those that cost nothing first."""
    return [some for some in (next(_holding(kind), "") for kind in _options(ports)) if some]


def _holding(kind: Iterator[tuple[str, LeafPorts]]) -> Iterator[str]:
    return (option for option, ports in kind if not leaf_refusal(ports, quick=True))


def _options(ports: LeafPorts) -> Iterator[Iterator[tuple[str, LeafPorts]]]:
    if ports.direction == "both":
        one_way: Direction = "egress"
        yield iter([("--direction egress (LL and LL128)", replace(ports, direction=one_way))])
    some = sorted({ports.mirrors - 1, *(ports.mirrors * part // 8 for part in range(1, 8))} - {0}, reverse=True)
    yield ((f"--mirrors {fewer}", replace(ports, mirrors=fewer)) for fewer in some)
    if not splits(ports.switch, ports.split):
        wanted = fewest_ports(ports.load_gbps, ports.monitor_gbps, ports.mirrors * ports.groups, ports.direction, True)
        tried = [ports.ports] if wanted is None else sorted({ports.ports, max(wanted, ports.ports)})
        yield (
            (f"--split-directions{f' --node-ports {some}' if some != ports.ports else ''} (untried on {ports.switch})",
             replace(ports, split=True, ports=some)) for some in tried
        )
    more = fewest_ports(ports.load_gbps, ports.monitor_gbps, ports.mirrors * ports.groups, ports.direction,
                        splits(ports.switch, ports.split))
    if more is not None and more > ports.ports:
        yield iter([(f"--node-ports {more}", replace(ports, ports=more))])
    yield (
        (f"--monitor-gbps {speed}", replace(ports, monitor_gbps=float(speed)))
        for speed in SPEEDS if speed > ports.monitor_gbps
    )


def packets_of(job: Job) -> float:
    """Distinct reduced packets of an iteration."""
    elements = min(job.group_parameters, max(1, int(job.bucket_bytes / job.call.element_bytes)))
    return reduced_packets(job.call, elements, job.mtu)


def _burst(case: Case, found: Capacity) -> Burst:
    streams = case.node.mirrors * case.node.groups
    gbits = streams * found.traffic.all_frames * 8 / 1e9
    return Burst(found.peak_gbps, gbits / case.job.iteration_s, gbits / found.peak_gbps / case.bursts)


def burst_results(case: Case, found: Capacity) -> list[Result]:
    burst = _burst(case, found)
    filled = burst.seconds * case.bursts / case.job.iteration_s
    return [
        Result("gradients are on the wire", 100 * filled, "% of the time", "bytes / peak / iteration"),
        Result("copies at the mean", burst.mean_gbps, "Gb/s", "bytes that come to the node / iteration"),
        Result("copies at the peak", found.peak_gbps, "Gb/s", "mirrors x directions x peak-gbps"),
        Result("the node's ports carry", found.room_gbps, "Gb/s", "node-ports x monitor-gbps"),
    ]


def port_grid(case: Case, found: Capacity) -> Grid:
    """What the node's ports and fewer of them carry without a buffer, and what they lose with the switch's."""
    burst, node, job = _burst(case, found), case.node, case.job
    copies, packets = worst(job.ranks, min(node.mirrors, job.ranks), node.direction, job.algorithm), packets_of(job)

    def row(ports: int) -> list[Value]:
        room = ports * node.monitor_gbps
        lost = burst.lost(room, case.buffer_mb)
        peak = None if case.ports is None else most_peak(
            ports, node.monitor_gbps, node.mirrors * node.groups, node.direction,
            splits(case.ports.switch, case.ports.split),
        )
        alone, together = (incomplete(some, packets, lost) for some in (copies, ONE_COPY))
        return [ports, peak, burst.buffer_mb(room), 100 * lost, alone, together]

    least = max(1, min(node.ports, math.ceil(burst.mean_gbps / node.monitor_gbps)))
    step = max(1, math.ceil((node.ports - least) / (ROWS - 1)))
    counts = sorted({*range(node.ports, least, -step), least})
    return Grid(
        "ports", f"By monitor ports of a node, with {case.buffer_mb:g} MB of the switch's buffer",
        ("ports", "fit up to peak-gbps", "MB that wait", "lost %", "incomplete", "incomplete, as one"),
        [row(count) for count in counts], f"bursts.py; {LAW}",
    )
