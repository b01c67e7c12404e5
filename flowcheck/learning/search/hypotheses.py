"""What could explain the connections: structures proposed by the best source there is, and their variants.

    proposals(connections, bootstrap, log, hints) -> groups of hypotheses
        manifest           flows and rings are given
        bootstrap          every connection is named; the ring is known as far as its edges are
        traffic alone      ranks.py: clear-to-send tags, logs, QP order, which rank sends to which
    variants(groups, log, hints)  -> each in every NCCL version, number of channels and algorithm that is possible

What cannot be known is several hypotheses, which the messages then decide between, or not. Versions: the form of the
clear-to-send writes, the size of the QP handshake, the byte order of immediates and adaptive-routing pairs each exclude
some (nccl-wire.md 5.2, 5.4, 6.1). A version from an option, a log or a manifest that one of them excludes is refused:
it would lay out every call otherwise. What each does is in parser/nccl.py. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from ipaddress import ip_address

from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.learning.bootstrap import Bootstrap
from flowcheck.learning.connections import Connection, PlacedConnection
from flowcheck.learning.flow_order import byte_order
from flowcheck.learning.hints import Hints
from flowcheck.learning.logs import LogFacts
from flowcheck.learning.messages import Flow, head_flags
from flowcheck.learning.search.ranks import by_traffic, from_zero, longest_path
from flowcheck.learning.search.walk import AR_THRESHOLD, DEFAULT_SLOTS, Hypothesis, Variant
from parser.nccl import TABLE, Chunks, Parts, span

__all__ = ["of_flows", "proposals", "variants"]

def proposals(
    found: list[Connection], bootstrap: Bootstrap, log: LogFacts, hints: Hints
) -> list[list[Hypothesis]]:
    """Alternatives for each group of connections that may be one communicator. Raises UserError."""
    if hints.given is not None:
        if hints.ranks:
            raise UserError(
                "the manifest names the ranks, so this has no meaning", where="--rank",
                remedy="leave --rank out, or correct flows in the manifest",
            )
        return [[_given(hints.given, found)]]
    groups = [g for magic in bootstrap.ranks if (g := list(_named(magic, found, bootstrap, log)))]
    for hypothesis in (hypothesis for group in groups for hypothesis in group):
        _agree(hypothesis, hints)
    return groups or [[*by_traffic(found, log, hints)]]


# -- manifest --------------------------------------------------------------------------------------------


def _given(job: Job, found: list[Connection]) -> Hypothesis:
    c, named, qps = job.communicator, [], {}
    for f in job.flows:
        qps[f.channel, f.src, f.dst] = (tuple(f.qpns), tuple(f.cts_qpns))
        ends = []
        for i, qpn in enumerate(f.qpns):
            src, dst = f.addresses(i)
            ends.append((str(ip_address(src)), str(ip_address(dst)), qpn))
        named.append((f.channel, f.src, f.dst, ends))
    placed = _carrying(named, found, c.queue_pairs_used)
    if not placed:
        raise UserError(
            "none of the manifest's flows is in the captures", where="flows",
            remedy="`flowcheck inspect` lists the connections; correct addresses and QP numbers",
        )
    rings = tuple(tuple(c.ring(channel)) for channel in range(c.channels))
    said = (("flows", f"{len(job.flows)} connections", "given", "the manifest names them"),)
    return Hypothesis(c.ranks, rings, placed, "job", c.channels, said=said, qps=qps, ranks_by="the manifest")


_ByFlow = dict[tuple[str, str, int], tuple[Connection, Flow]]


def _carrying(
    named: Iterable[tuple[int, int, int, Sequence[tuple[str, str, int]]]], found: Sequence[Connection], used: int
) -> tuple[PlacedConnection, ...]:
    """The named connections (channel, source and destination rank, ends of its flows) that carry anything."""
    by_flow = {(flow.src, flow.dst, flow.qpn): (c, flow) for c in found for flow in c.flows}
    placed = [
        PlacedConnection(channel, src, dst, connection) for channel, src, dst, ends in named
        if (connection := of_flows(by_flow, ends, used)) is not None
    ]
    return tuple(sorted(placed, key=lambda on: (on.channel, on.src)))


def of_flows(by_flow: _ByFlow, ends: Sequence[tuple[str, str, int]], used: int) -> Connection | None:
    """The connection with these flows, which something better than their traffic names; None if none of them carries
    anything. used: over how many a message is spread, 0 if that is not named."""
    known = [by_flow[end] for end in ends if end in by_flow]
    if not any(flow.messages for _, flow in known):
        return None
    first = known[0][0]
    flows = tuple(
        by_flow[end][1] if end in by_flow else Flow(*end, sport=0, mtu=None, largest=0, messages=[], whole=0)
        for end in ends
    )
    if first.flows == flows and used in (0, first.used):
        return first
    if not used:
        used = len(flows) if any(c.used > 1 or c.unsure for c, _ in known) else 1
    order, fit, other = byte_order(flows, used)
    unsure = "its messages do not go round the QPs that are named" if other * 8 > fit else ""
    announced = next((c for c, _ in known if c.cts_flows), first)
    devices = len({flow.src for flow in flows} | {flow.dst for flow in flows}) // 2
    return replace(
        announced, flows=flows, used=used, devices=devices, imm_order=order, unsure=unsure, doubt="", order=""
    )


# -- bootstrap -------------------------------------------------------------------------------------------


def _named(magic: int, found: list[Connection], bootstrap: Bootstrap, log: LogFacts) -> Iterator[Hypothesis]:
    ranks = bootstrap.ranks[magic]
    flows = [f for f in bootstrap.connections if f.communicator == magic and f.graph == "ring"]
    named = [
        (f.channel, f.src, f.dst, [(f.sender.gid, f.receiver.gid, qpn) for qpn in f.qpns]) for f in flows
    ]
    placed = _carrying(named, [c for c in found if not c.point_to_point], 0)
    if not placed or not ranks:
        return
    qps = {(f.channel, f.src, f.dst): (f.qpns, f.cts_qpns) for f in flows}
    channels = max(n for (m, graph, _, _), n in bootstrap.connected.items() if m == magic and graph == "ring")
    following: dict[int, dict[int, int]] = {}
    for f in flows:
        following.setdefault(f.channel, {})[f.src] = f.dst
    said = (
        ("flows", f"{len(placed)} connections", "certain",
         f"NCCL's bootstrap in the capture: communicator {magic:#018x}, {ranks} ranks, {channels} "
         f"connected channels; {len(placed)} of its {len(flows)} ring connections carry data"),
        ("addresses", ", ".join(f"{a} = {r}" for a, r in sorted(_addresses(placed).items(), key=lambda x: x[1])[:8]),
         "certain", "the QP handshakes name the GIDs and QP numbers of both ends"),
    )
    for rings, about in _complete(following, ranks, channels, log):
        yield Hypothesis(
            ranks, rings, placed, "bootstrap", channels, flows[0].versions, said, about, qps, "NCCL's bootstrap",
        )


def _addresses(placed: Sequence[PlacedConnection]) -> dict[str, int]:
    """Rank by address, of addresses that have one."""
    found: dict[str, set[int]] = {}
    for on in placed:
        found.setdefault(on.connection.src, set()).add(on.src)
        found.setdefault(on.connection.dst, set()).add(on.dst)
    return {address: min(ranks) for address, ranks in found.items() if len(ranks) == 1}


def _agree(hypothesis: Hypothesis, hints: Hints) -> None:
    """--rank with a bootstrap can only say the same."""
    known = _addresses(hypothesis.connections)
    for address, rank in hints.ranks.items():
        if known.get(address) != rank:
            says = f"rank {known[address]}" if address in known else "none of the ranks with gradients"
            raise UserError(
                f"--rank says {address} is rank {rank}, NCCL's bootstrap in the capture says it is {says}",
                where="--rank", remedy="leave --rank out: the bootstrap names every rank",
            )


def _complete(
    following: dict[int, dict[int, int]], ranks: int, channels: int, log: LogFacts
) -> Iterator[tuple[tuple[tuple[int, ...], ...], str]]:
    """Rings with these edges. What the edges leave open is tried at every place that differs for them."""
    if log.rings and len(log.rings[0]) == ranks:
        rings = tuple(from_zero(log.rings[c % len(log.rings)]) for c in range(channels))
        yield rings, "rings as in NCCL's log"
        return
    options = {c: list(_orders(edges, ranks)) for c, edges in following.items() if c < channels}
    spare = next(iter(options.values()))[0]  # of channels without a connection: nothing travels on them
    for turn in range(max(map(len, options.values()))):
        chosen = {c: orders[min(turn, len(orders) - 1)] for c, orders in options.items()}
        about = f"ring {list(chosen[min(chosen)])}" if any(len(o) > 1 for o in options.values()) else ""
        yield tuple(chosen.get(c, spare) for c in range(channels)), about


def _orders(following: dict[int, int], ranks: int) -> Iterator[tuple[int, ...]]:
    """Rings over `ranks` ranks that contain the known path; one for each distance of it from rank 0."""
    path = longest_path(following)
    rest = [r for r in range(ranks) if r not in path]
    if 0 in path:
        yield from_zero([*path, *rest])
        return
    rest.remove(0)
    for before in range(len(rest) + 1):  # how many unknown ranks lie between rank 0 and the path
        yield (0, *rest[:before], *path, *rest[before:])


# -- variants --------------------------------------------------------------------------------------------


def variants(groups: Sequence[Sequence[Hypothesis]], log: LogFacts, hints: Hints) -> Iterator[Hypothesis]:
    """Every proposal in every NCCL family, number of channels and choice of algorithms that the traffic allows. Raises
    UserError where the connections of a group contradict each other or what was said."""
    proposal = 0
    for number, group in enumerate(groups):
        if not group:
            continue
        placed = group[0].connections  # a group is of the same connections
        versions, why = _versions(group[0], hints, log)
        mtu, slots = _mtu(placed), _slots(placed)
        for h in group:
            proposal += 1
            used = 1 + max(on.channel for on in h.connections)
            known = h.connected or log.channels
            for version in versions:
                for channels in [max(known, used)] if known else range(used, 2 * used + 1):
                    for algorithms in _algorithms(h, log, hints):
                        variant = Variant(version, why, channels, slots, mtu, algorithms)
                        yield replace(h, group=number, proposal=proposal, variant=variant)


def _algorithms(h: Hypothesis, log: LogFacts, hints: Hints) -> list[tuple[str, ...]]:
    """Ways that AllReduce may go, the preferred one first: with two ranks ring and tree use the same connections, so
    each has to be looked for. A tree of more ranks has connections of its own."""
    if hints.algorithm:
        return [(hints.algorithm,)]
    chosen = {algorithm for function, _, algorithm, _ in log.choices if function in ("AllReduce", "")}
    if len(chosen) == 1 and chosen <= {"ring", "tree"}:
        return [(chosen.pop(),)]
    if hints.given is not None and hints.given.communicator.algorithm == "tree":
        return [("tree", "ring"), ("ring", "tree")]
    return [("ring", "tree"), ("tree", "ring")] if h.ranks == 2 or h.tree else [("ring",)]


def _mtu(placed: Sequence[PlacedConnection]) -> int:
    found = {mtu for on in placed for mtu in on.connection.mtus}
    if len(found) > 1:
        raise UserError(f"the connections have different path MTUs: {sorted(found)}", remedy="name flows with --job")
    if found:
        return found.pop()
    largest = max(flow.largest for on in placed for flow in on.connection.flows)
    if largest > 4096:
        raise UserError(f"a packet carries {largest} bytes, more than any path MTU", where=placed[0].connection.name())
    return 4096


def _slots(placed: Sequence[PlacedConnection]) -> tuple[int, int, int]:
    """Wire bytes of a step by protocol: defaults, unless one protocol alone is used and announces another size."""
    kinds = {head_flags(m.head, m.size)[0] for on in placed for m in on.connection.first(256) if m.size}
    sizes = {size for on in placed for size in on.connection.cts_sizes}
    ll, ll128, simple = DEFAULT_SLOTS
    if not sizes or len(kinds) != 1:
        return DEFAULT_SLOTS
    largest = max(sizes)
    if kinds == {""}:
        return ll, ll128, simple if largest in (simple, 2 * simple) else largest // 2
    return (largest, ll128, simple) if kinds == {"ll"} else (ll, largest, simple)


def _versions(h: Hypothesis, hints: Hints, log: LogFacts) -> tuple[tuple[str, ...], str]:
    """(versions to try, one of each family that is possible; why). Raises UserError where the connections, or what was
    said and the wire, contradict each other."""
    found = [on.connection for on in h.connections]
    seen = {c.layout for c in found if c.layout}
    order = {c.imm_order for c in found if c.imm_order}
    if len(seen) > 1 or len(order) > 1:
        raise UserError(
            f"the connections of one ring speak different NCCL versions ({', '.join(sorted(seen | order))})",
            remedy="capture one job, or name its flows in a manifest",
        )
    said = list(_said(hints, log))
    for version, where in said:
        for other, elsewhere in said:
            if _minor(version) != _minor(other):
                raise UserError(
                    f"{where} says NCCL {version}, {elsewhere} says {other}", where=where,
                    remedy="give the log of this very job, and leave the version out",
                )
        against = next(_against(_minor(version), h), "")
        if against:
            raise UserError(
                f"{where} says NCCL {version}, and the wire says otherwise: {against}", where=where,
                remedy="leave the version out, or give what belongs to this capture",
            )
    if said:
        return (said[0][0],), "NCCL's log names it" if said[0][1] == "--nccl-log" else f"given by {said[0][1]}"
    known, why = (h.handshake, "size of the QP handshake") if h.handshake else (
        "".join(seen), "form of the clear-to-send writes" if seen else "no clear-to-send write was captured"
    )
    rows = [row for row in TABLE if _overlaps(known, row.first, row.last)]
    if known and rows[0].always_pairs and any(c.pairs for c in found):
        return (rows[0].example,), f"{why}, and adaptive-routing pairs, which {rows[0].versions} always sends"
    told = [row for row in rows if order == {"big" if row.big_endian else "little"}]
    if told and len(told) < len(rows):
        big = told[0].big_endian
        rows, why = told, (f"{why}, big-endian immediates" if known else "big-endian immediates") if big else why
    alike: dict[Chunks, str] = {}  # one version of those that lay out calls alike
    for row in rows:
        if row.chunks.parts == Parts.LOOPS or row.chunks not in alike:
            alike[row.chunks] = row.example
    return tuple(alike.values()), why


def _said(hints: Hints, log: LogFacts) -> Iterator[tuple[str, str]]:
    if hints.version:
        yield hints.version, "--nccl-version"
    if log.version:
        yield log.version, "--nccl-log"
    if hints.given is not None:
        yield hints.given.communicator.nccl_version, "--job"


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def _overlaps(versions: str, first: int, last: int) -> bool:
    """Is one of 2.`first` to 2.`last` among these, such as "2.24-2.29" or "2.12-2.15 or 2.19"? All are among ""."""
    ends = [run.partition("-") for run in versions.split(" or ") if run]
    return not ends or any(_minor(low) <= last and first <= _minor(high or low) for low, _, high in ends)


def _against(minor: int, h: Hypothesis) -> Iterator[str]:
    """What on the wire rules the version out."""
    row = [TABLE[0], *(row for row in TABLE if row.first <= minor)][-1]
    for c in (on.connection for on in h.connections):
        for form, what in ((c.layout, "clear-to-send writes"), (h.handshake, "QP handshakes")):
            if not _overlaps(form, minor, minor):
                yield f"its {what} are of {form}"
        if c.imm_order and (c.imm_order == "big") != row.big_endian:
            alike = span([other for other in TABLE if other.big_endian == (c.imm_order == "big")])
            yield f"its immediates are {c.imm_order}-endian, as of {alike}"
        large = [m for m in c.pieces() if m.size > AR_THRESHOLD and m.imm is not None]
        if row.always_pairs and large and not any(m.pair for m in large):
            yield f"no message above 8192 bytes left as an adaptive-routing pair, as every one does in {row.versions}"
