"""What a rehearsal found, as a document, as questions with answers, and as text: docs/use/rehearse.md has the keys.

    document = report(config, planned, made, ...)         rehearsal.py
    render(document, console)

A port is known by its hosts: the few addresses of which one is in every packet that it brings. A host that only sends
there, or only receives, and of which no other port brings the rest, is a direction that is not mirrored. Pure, but for
the console.
"""

from __future__ import annotations

import ipaddress
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from flowcheck import __version__
from flowcheck.diagnose.checks import Check, alone, arrival, gaps, sound
from flowcheck.diagnose.remedies import remedy_of
from flowcheck.node.check.budget import Budget, CaptureFigures
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.ports.captures import PlannedCapture
from flowcheck.node.ports.drops import OWN, describe
from flowcheck.node.rehearse.jobs import Followed
from flowcheck.rebuild.iteration.wording import flow_name
from flowcheck.tables import Column, print_table
from parser.findings import ranks_of

__all__ = ["SCHEMA", "Host", "hosts_of", "one_sided", "render", "report"]

SCHEMA = "flowcheck-rehearsal/1"
MOST_HOSTS = 64  # of a port that are told apart
NAMED = 8  # connections and addresses that one sentence names
# Of the packets: what is less costs an iteration now and then, which the trainers' own state heals (ranges).
LOSS = 1e-4
INCOMPLETE = 0.05  # of the iterations, as the alert FlowcheckMirrorLoses has it
FULL = 0.5  # of a ring: no room is left for a pause
Found = Mapping[str, Any]


@dataclass(frozen=True)
class Host:
    """An address of which a port brings packets. sent, received: flows from it and to it."""

    address: str
    sent: int
    received: int

    @property
    def whole(self) -> bool:
        return self.sent > 0 and self.received > 0


def hosts_of(flows: Sequence[Found]) -> list[Host]:
    """The fewest addresses, or nearly, that every flow comes from or goes to."""
    left, found = [(flow["src"], flow["dst"]) for flow in flows], list[Host]()
    while left and len(found) < MOST_HOSTS:
        counts = Counter(address for pair in left for address in set(pair))
        address = min(counts, key=lambda one: (-counts[one], one))
        mine = [pair for pair in left if address in pair]
        found.append(Host(address, sum(src == address for src, _ in mine), sum(dst == address for _, dst in mine)))
        left = [pair for pair in left if address not in pair]
    return found


def one_sided(ports: Sequence[Sequence[Host]]) -> list[list[Host]]:
    """Of each port the hosts of which it has one direction, and no other port just the other one: an optical splitter's
    two fibres are two ports with a direction each. A port with both is somebody else's, who talks to that host."""

    def elsewhere(port: int, host: Host) -> bool:
        others = (one for i, hosts in enumerate(ports) for one in hosts if i != port and one.address == host.address)
        return any(not one.whole and bool(one.sent) != bool(host.sent) for one in others)

    return [[host for host in hosts if not host.whole and not elsewhere(i, host)] for i, hosts in enumerate(ports)]


# -- the document --------------------------------------------------------------------------------------------------


def report(
    config: NodeConfig, planned: Sequence[PlannedCapture], made: Budget, *, began: float, seconds: tuple[float, float],
    found: dict[str, Any], streams: Sequence[int], rates: Sequence[tuple[float, float]],
    looked: Sequence[Mapping[str, int]], ended: Sequence[Mapping[str, int]], followed: Sequence[Followed],
) -> dict[str, Any]:
    """began: seconds since 1970. seconds: of the first look, and of following. found: the survey, as `inspect` has it;
    streams: its packets by stream. rates: of each capture the most packets and bytes in a second. looked, ended: its
    counters after the first look, and by how much they grew since."""
    ports = list(_ports(planned, made, found, streams, rates, looked, ended))
    groups = [_group(one, found) for one in followed]
    checks = [*_checks(config, planned, made, ports, found), *(check for one in groups for check in _of_group(one))]
    bad = [check for check in checks if not check.good]
    return {
        "schema": SCHEMA, "good": not bad, "remedy": bad[0].remedy if bad else "", "node": config.name,
        "version": __version__, "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": {"looked": seconds[0], "followed": seconds[1]},
        "packets": dict(found["packets"]), "ports": ports, "seen": _seen(found), "groups": groups,
        "checks": [asdict(check) for check in checks],
    }


def _ports(
    planned: Sequence[PlannedCapture], made: Budget, found: Found, streams: Sequence[int],
    rates: Sequence[tuple[float, float]], looked: Sequence[Mapping[str, int]], ended: Sequence[Mapping[str, int]],
) -> Iterator[dict[str, Any]]:
    flows = [flow for flow in sound(found) if flow["requests"] or flow["answers"]]
    mine = [[flow for flow in flows if set(flow["captures"]) & set(one.live.streams)] for one in planned]
    hosts = [hosts_of(of) for of in mine]
    lacking = one_sided(hosts)
    for i, (one, figures) in enumerate(zip(planned, made.captures, strict=True)):
        packets, size = rates[i]
        yield {
            "device": one.device, "packets": sum(streams[stream] for stream in one.live.streams), "flows": len(mine[i]),
            "received": looked[i]["received"] + ended[i].get("received", 0),
            "hosts": [asdict(host) for host in hosts[i]], "one_sided": [asdict(host) for host in lacking[i]],
            "most_packets_per_second": round(packets), "most_gbps": round(size * 8e-9, 3),
            "ring": _ring(figures, packets),
            "dropped": {
                "looked": {cause: n for cause in OWN if (n := looked[i].get(cause, 0))},
                "followed": {cause: n for cause in OWN if (n := ended[i].get(cause, 0))},
            },
        }


def _ring(figures: CaptureFigures, packets: float) -> dict[str, Any]:
    """bears_ms: until one queue's ring is full, if all that came in the fastest tenth of a second comes to it."""
    return {
        "packets": figures.ring_packets, "link_mbps": figures.mbps if figures.mbps > 0 else None,
        "bears_ms": round(1e3 * figures.ring_packets / packets, 1) if packets else None,
        "bears_at_link_speed_ms": round(figures.pause_ms, 1),
    }


def _seen(found: Found) -> list[dict[str, Any]]:
    """Hosts that are joined by NCCL's connections, or by a direction of one."""
    ranks, single = ranks_of(found["connections"]), [one for one in alone(found) if one["kind"].startswith("NCCL")]
    nccl = [one for one in found["connections"] if one["is"] == "NCCL"]
    ends = [(one["source"], one["destination"]) for one in nccl] + [(one["src"], one["dst"]) for one in single]
    group: dict[str, int] = {}
    for number, pair in enumerate(ends):
        joined = {group[address] for address in pair if address in group}
        group = {address: number if of in joined else of for address, of in group.items()}
        group |= dict.fromkeys(pair, number)
    return [
        {
            "addresses": sorted(address for address, of in group.items() if of == number),
            "ranks": sorted({rank for address, of in group.items() if of == number for rank in ranks.get(address, [])}),
            "connections": sum(group[one["source"]] == number for one in nccl),
            "one_sided": sum(group[one["src"]] == number for one in single),
        }
        for number in sorted(set(group.values()))
    ]


def _address(text: str) -> str:
    """As packets have it: an IPv4 address that a job writes as IPv6 is the same."""
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _group(one: Followed, found: Found) -> dict[str, Any]:
    job = one.plan.job
    there = {(_address(flow["src"]), _address(flow["dst"]), flow["dest_qp"]) for flow in sound(found)}
    ways: dict[str, list[int]] = {"both": [], "data": [], "back": [], "none": []}
    sends: dict[str, bool] = {}
    takes: dict[str, bool] = {}
    for edge, flow in enumerate(job.flows):
        data, back = False, False
        for queue, qpn in enumerate(flow.qpns):
            src, dst = map(_address, flow.addresses(queue))
            forth = (src, dst, qpn) in there or edge in one.seen  # in the second half
            home = any((dst, src, back_qpn) in there for back_qpn in flow.cts_qpns[queue : queue + 1])
            sends[src], takes[dst] = sends.get(src, False) or forth, takes.get(dst, False) or forth
            sends[dst], takes[src] = sends.get(dst, False) or home, takes.get(src, False) or home
            data, back = data or forth, back or home
        known = bool(flow.cts_qpns)
        ways["both" if data and (back or not known) else "data" if data else "back" if back else "none"].append(edge)
    counted = one.complete[one.complete.index(True):] if True in one.complete else one.complete
    addresses = sorted({*sends, *takes})
    return {
        "run_id": job.run_id, "ranks": job.communicator.ranks,
        "connections": {way: [flow_name(job, edge) for edge in edges] for way, edges in ways.items()},
        "placed": len(one.placed),
        "addresses": {
            "unseen": [a for a in addresses if not sends.get(a) and not takes.get(a)],
            "only_sent": [a for a in addresses if sends.get(a) and not takes.get(a)],
            "only_received": [a for a in addresses if takes.get(a) and not sends.get(a)],
        },
        "iterations": len(counted), "before_the_first": len(one.complete) - len(counted), "complete": sum(counted),
        "missing": dict(one.missing), "why": dict(one.why.most_common(NAMED)), "given_up": one.given_up,
        "period_ms": _ms(statistics.median(one.periods)) if one.periods else None,
        "left_ms": {"median": _ms(statistics.median(one.left)), "least": _ms(min(one.left))} if one.left else None,
        "fullest_ring": round(one.ring[0] / one.ring[1], 4), "arenas": list(one.arenas),
    }


def _ms(ns: float) -> float:
    return round(ns / 1e6, 3)


# -- questions -----------------------------------------------------------------------------------------------------


def _checks(
    config: NodeConfig, planned: Sequence[PlannedCapture], made: Budget, ports: Sequence[Found], found: Found
) -> Iterator[Check]:
    problems = "; ".join(problem.message().replace("\n", " ") for problem in made.problems)
    yield Check("memory", not problems, problems or "what the settings ask for is there (`flowcheck-node --check`)",
                problems)
    for one in ports:
        yield _of_port(one)
    yield from arrival(found)
    largest = max((flow["mtu"] for flow in found["flows"] if flow["mtu"]), default=0)
    small = [one for one in planned if 0 < one.live.path_mtu < largest]
    yield Check(
        "path MTU", not small, f"{largest or 'not shown'}",
        f"{', '.join(f'{one.table}.path_mtu = {largest}' for one in small)}: what is larger is dropped",
    )
    single = alone(found)
    yield Check(
        "both directions", not single,
        f"{len(found['connections'])} connections in both directions, {len(single)} flows in one",
        "one direction is not copied: on Cumulus and tc each direction is a session or filter of its own",
    )
    missing, total = gaps(found["flows"])
    own = sum(sum(one["dropped"]["looked"].values()) for one in ports)
    said = f"{missing} of {total} request packets missing"
    said += f"; {own} packets were dropped here, by looking at each of them" if own else ""
    yield Check(
        "no gaps", missing <= LOSS * total + own, said,
        "copies are lost: is the destination's MTU 9216, and is it as fast as all sources together?",
    )
    for i, one in enumerate(ports):
        yield _of_ring(one, planned[i])


def _of_port(one: Found) -> Check:
    name, packets = f"port {one['device']}", one["packets"]
    where = ("look at its cable, at the switch's port, and at the mirror session that ends there"
             " (`flowcheck switch show`)")
    if not packets:
        return Check(name, False, "no packet", f"{one['device']} brings nothing: {where}")
    if not one["flows"]:
        return Check(name, False, f"{packets} packets, and no RoCEv2 of a connection among them",
                     f"what comes to {one['device']} is not of the job: {where}, and does the job run?")
    whole = [host for host in one["hosts"] if host not in one["one_sided"]]
    said = [f"{packets} packets, {one['most_gbps']:g} Gb/s in the fastest tenth of a second"]
    if whole:
        said.append(f"whole: {_names([host['address'] for host in whole])}")
    lacks = [_lacks(host) for host in one["one_sided"]]
    said += lacks[:NAMED]
    return Check(name, not lacks, "; ".join(said),
                 f"{one['device']}: {lacks[0]}: that direction of its port is not mirrored, or that half of the mirror"
                 f" is unplugged; {where}" if lacks else "")


def _lacks(host: Found) -> str:
    return f"nothing that is {'sent to' if host['sent'] else 'sent by'} {host['address']} comes"


def _of_ring(one: Found, planned: PlannedCapture) -> Check:
    ring, dropped = one["ring"], one["dropped"]["followed"]
    said = f"{ring['packets']} packets"
    if ring["bears_ms"] is not None:
        said += f", which bear a pause of {ring['bears_ms']:g} ms at {one['most_packets_per_second']} packets/s"
    link = f"{ring['link_mbps'] / 1000:g}" if ring["link_mbps"] else "100"
    said += f", {ring['bears_at_link_speed_ms']:g} ms at {link} Gb/s"
    if dropped:
        said += f"; dropped while the job was followed: {', '.join(f'{cause} {n}' for cause, n in dropped.items())}"
    return Check(f"ring of {one['device']}", not dropped, said, describe(dropped, planned) if dropped else "")


def _of_group(one: Found) -> Iterator[Check]:
    name, ways, addresses = f"job {one['run_id']!r}", one["connections"], one["addresses"]
    all_ = sum(map(len, ways.values()))
    part = [f"{len(ways[way])} {text}" for way, text in (
        ("data", "without what comes back"), ("back", "without their data"), ("none", "not at all")) if ways[way]]
    said = f"{len(ways['both'])} of {all_} in both directions{''.join(f', {text}' for text in part)}"
    for key, text in (("unseen", "neither sent by nor sent to"), ("only_sent", "nothing sent to"),
                      ("only_received", "nothing sent by")):
        if addresses[key]:
            said += f"; {text} {_names(addresses[key])}"
    counted, complete = one["iterations"], one["complete"]
    good = counted > 0 and counted - complete <= INCOMPLETE * counted
    # Not every connection has to be mirrored: what is lacking is said where iterations are not complete.
    yield Check(f"{name}: connections", good or not part, said,
                "mirror the ports of the addresses named, in both directions (`flowcheck switch plan`)")
    yield Check(f"{name}: complete", good, _completeness(one), _to_do(one))
    if one["left_ms"]:
        median, least = one["left_ms"]["median"], one["left_ms"]["least"]
        yield Check(
            f"{name}: time", median > 0,
            f"an iteration takes {one['period_ms']:g} ms; from its last element to the next one's first packet there"
            f" are {median:g} ms, {least:g} at least, for its record and its update; fullest ring"
            f" {100 * one['fullest_ring']:.1f} %, arenas {one['arenas'][0]} of {one['arenas'][1]}",
            "packets are placed too slowly: more capture.queues, each with cores of its own",
        )
    yield Check(f"{name}: keeps up", not one["given_up"] and one["fullest_ring"] < FULL,
                f"iterations given up {one['given_up']} times, fullest ring {100 * one['fullest_ring']:.1f} %",
                "more capture.queues with cores of their own, or larger rings")


def _completeness(one: Found) -> str:
    if not one["iterations"]:
        return "no iteration has closed: none was long enough in sight, or nothing of it came"
    said = f"{one['complete']} of {one['iterations']} iterations"
    if one["before_the_first"]:
        said += f", after {one['before_the_first']} until every connection had found its place"
    if one["missing"]:
        said += f"; missing elements: {', '.join(f'{cause} {n}' for cause, n in sorted(one['missing'].items()))}"
    if one["why"]:
        said += f"; {next(iter(one['why']))}"
    return said


def _to_do(one: Found) -> str:
    if not one["iterations"]:
        return "does the job run, and is --job the manifest of this very start of it? Otherwise a longer --seconds"
    most = max(one["missing"], key=one["missing"].__getitem__, default="")
    return remedy_of(one["missing"]) or {
        "not_mirrored": "a connection that carries these elements is not mirrored: the line above names addresses",
        "lost": "copies are lost between the switch's port and this one: is the mirror port as fast as its sources?",
        "unanchored": "mirror both directions of each port: SIMPLE finds its place by clear-to-sends, which go back",
        "overload": "the node has no room: more capture.queues with cores of their own",
    }.get(most, "docs/use/replay.md says what to do for each cause")


def _names(several: Sequence[str]) -> str:
    return ", ".join(several[:NAMED]) + (f" and {len(several) - NAMED} more" if len(several) > NAMED else "")


# -- for people ----------------------------------------------------------------------------------------------------


def render(found: Found, console: Console) -> None:
    """The document as text: ports, what was seen, groups, and each question with its answer."""

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    seconds = found["seconds"]
    line(f"rehearsal of node {found['node']} with flowcheck {found['version']}, {found['began']}: looked for"
         f" {seconds['looked']:g} s" + (f", followed for {seconds['followed']:g} s" if seconds["followed"] else ""))
    columns = [Column("port", folds=True), Column("packets", number=True), Column("most packets/s", number=True),
               Column("most Gb/s", number=True), Column("ring bears ms", number=True), Column("hosts", folds=True)]
    print_table(console, columns, [
        [one["device"], f"{one['packets']:,}", f"{one['most_packets_per_second']:,}", f"{one['most_gbps']:g}",
         "-" if one["ring"]["bears_ms"] is None else f"{one['ring']['bears_ms']:g}",
         _names([host["address"] for host in one["hosts"]]) or "none"] for one in found["ports"]
    ], "Mirror ports")
    if found["seen"]:
        columns = [Column("hosts that NCCL joins", folds=True), Column("ranks (CTS tag)", folds=True),
                   Column("connections", number=True), Column("one direction alone", number=True)]
        print_table(console, columns, [
            [_names(one["addresses"]), ", ".join(map(str, one["ranks"])) or "unknown", str(one["connections"]),
             str(one["one_sided"])] for one in found["seen"][:MOST_HOSTS]
        ])
    if not found["groups"]:
        line("No --job was given, so nothing says which iterations would be complete: `flowcheck learn` makes a"
             " manifest of a capture.")
    for check in found["checks"]:
        line(f"{'ok ' if check['good'] else 'BAD'} {check['name']}: {check['found']}")
    changes = list(dict.fromkeys(check["remedy"] for check in found["checks"] if not check["good"]))
    line("To change, in this order:" if changes else "Nothing to change: a node would follow what comes.")
    for number, text in enumerate(changes, 1):
        line(f"{number}. {text}")
