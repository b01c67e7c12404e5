"""Who talks to whom: from connections to hypotheses of ranks, rings and channels.

    bootstrap          every flow is named; the ring is known as far as its edges are
    log                rings in full; ranks of addresses by QP number
    traffic alone      ranks by CTS tag, channels by QP order, the ring by who sends to whom

Each hypothesis is a Topology with its wires; what cannot be known is several hypotheses, which the messages then
decide between, or not. Pure. Section numbers: nccl-wire.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from ipaddress import ip_address

from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.learning.bootstrap import Bootstrap
from flowcheck.learning.connections import Connection
from flowcheck.learning.hints import Hints
from flowcheck.learning.layout import Layout
from flowcheck.learning.logs import LogFacts
from flowcheck.learning.queuepairs import byte_order
from flowcheck.learning.ranks import Labels, from_zero, labels_of, rankings
from flowcheck.learning.traffic import Queue
from flowcheck.learning.treeshape import tree_layouts
from flowcheck.learning.walk import Wire

__all__ = ["layouts"]


def layouts(found: list[Connection], bootstrap: Bootstrap, log: LogFacts, hints: Hints) -> list[list[Layout]]:
    """Alternatives for each group of connections that may be one communicator. Raises UserError."""
    if hints.given is not None:
        if hints.ranks:
            raise UserError(
                "the manifest names the ranks, so this has no meaning", where="--rank",
                remedy="leave --rank out, or correct flows in the manifest",
            )
        return [[_given(hints.given, found)]]
    groups = [g for magic in bootstrap.ranks if (g := list(_named(magic, found, bootstrap, log)))]
    if groups:
        for layout in (layout for group in groups for layout in group):
            _agree(layout, hints)
        return groups
    usable = [c for c in found if not c.point_to_point and (c.layout or c.imm_order or c.empty_part) and c.total]
    parts = next((c for c in found if c.unsure and any(m.imm for m in c.pieces())), None)
    if not usable and parts is not None:
        raise UserError(
            f"no whole message of an NCCL collective is in the captures: {parts.unsure}", where=parts.name(),
            remedy="mirror all ports of a merged NIC in both directions: clear-to-send says which belong together",
        )
    if not usable:
        raise UserError(
            "no NCCL collective is in the captures: no write with NCCL's immediate, none announced by clear-to-send",
            remedy="mirror the ports that carry the gradients; `flowcheck inspect` shows what is there. Encrypted "
            "traffic (MACsec, IPsec) cannot be read: switch it off or mirror behind the decryption",
        )
    usable, strangers = _strangers(usable)
    shapes = {(len(c.queues), c.used, c.devices) for c in usable}
    if len(shapes) > 1 and not any(c.unsure for c in usable):
        few, many = (min(usable, key=lambda c: len(c.queues)), max(usable, key=lambda c: len(c.queues)))
        raise UserError(
            f"connections have different numbers of QPs: {len(few.queues)} and {len(many.queues)}; every connection of "
            "a job has as many, so some are not in the capture, or it holds several jobs",
            where=f"{few.name()}; {many.name()}",
            remedy="mirror all ports of the rank, capture the TCP bootstrap too, or name the flows in a manifest",
        )
    return [list(_unnamed(usable, strangers, log, hints))]


def _strangers(found: list[Connection]) -> tuple[list[Connection], int]:
    """Leave out what is surely of another communicator; and how many. The channels of one use the same protocol for a
    call, so a connection without a single flag does not belong to connections on which every message has flags. It
    matters where one direction alone was captured: then no clear-to-send tells point-to-point."""
    silent = [c for c in found if not (c.cts_sizes or c.flagged or c.empty_part)]
    others = [c for c in found if c.cts_sizes or c.flagged or c.empty_part]
    if silent and others and all(c.flagged == sum(bool(m.size) for m in c.messages) for c in others):
        return others, len(silent)
    return found, 0


# -- manifest --------------------------------------------------------------------------------------------


def _given(job: Job, found: list[Connection]) -> Layout:
    by_queue = _by_queue(found)
    c, wires, qps = job.communicator, [], {}
    for f in job.flows:
        qps[f.channel, f.src, f.dst] = (tuple(f.qpns), tuple(f.cts_qpns))
        places = [f.addresses(i) for i in range(len(f.qpns))]
        ends = [
            (str(ip_address(src)), str(ip_address(dst)), qpn) for (src, dst), qpn in zip(places, f.qpns, strict=True)
        ]
        connection = _of_queues(by_queue, ends, c.queue_pairs_used)
        if connection is not None:
            wires.append(Wire(f.channel, f.src, f.dst, connection))
    if not wires:
        raise UserError(
            "none of the manifest's flows is in the captures", where="flows",
            remedy="`flowcheck inspect` lists the connections; correct addresses and QP numbers",
        )
    rings = tuple(tuple(c.ring(channel)) for channel in range(c.channels))
    said = (("flows", f"{len(job.flows)} connections", "given", "the manifest names them"),)
    return Layout(
        c.ranks, rings, tuple(sorted(wires, key=lambda w: (w.channel, w.src))), "job", c.channels, "", said, "", qps,
        "the manifest",
    )


_ByQueue = dict[tuple[str, str, int], tuple[Connection, Queue]]


def _by_queue(found: Sequence[Connection]) -> _ByQueue:
    return {(q.src, q.dst, q.qpn): (c, q) for c in found for q in c.queues}


def _of_queues(by_queue: _ByQueue, ends: Sequence[tuple[str, str, int]], used: int) -> Connection | None:
    """The connection with these QPs, which something better than their traffic names; used: 0 if it is not named. None
    if none of them carries anything."""
    known = [by_queue[end] for end in ends if end in by_queue]
    if not any(queue.messages for _, queue in known):
        return None
    first = known[0][0]
    queues = tuple(
        by_queue[end][1] if end in by_queue else Queue(*end, sport=0, mtu=None, largest=0, messages=[], whole=0)
        for end in ends
    )
    if first.queues == queues and used in (0, first.used):
        return first
    if not used:
        used = len(queues) if any(c.used > 1 or c.unsure for c, _ in known) else 1
    order, fit, other = byte_order(queues, used)
    unsure = "its messages do not go round the QPs that are named" if other * 8 > fit else ""
    announced = next((c for c, _ in known if c.cts_qpns), first)
    devices = len({queue.src for queue in queues} | {queue.dst for queue in queues}) // 2
    return replace(
        announced, queues=queues, used=used, devices=devices, imm_order=order, unsure=unsure, doubt="", order=""
    )


# -- bootstrap -------------------------------------------------------------------------------------------


def _named(magic: int, found: list[Connection], bootstrap: Bootstrap, log: LogFacts) -> Iterator[Layout]:
    ranks = bootstrap.ranks[magic]
    flows = [f for f in bootstrap.flows if f.communicator == magic and f.graph == "ring"]
    by_queue = _by_queue([c for c in found if not c.point_to_point])
    wires, qps = [], {}
    for f in flows:
        qps[f.channel, f.src, f.dst] = (f.qpns, f.cts_qpns)
        ends = [(f.sender.gid, f.receiver.gid, qpn) for qpn in f.qpns]
        connection = _of_queues(by_queue, ends, 0)
        if connection is not None:
            wires.append(Wire(f.channel, f.src, f.dst, connection))
    if not wires or not ranks:
        return
    channels = max(n for (m, graph, _, _), n in bootstrap.connected.items() if m == magic and graph == "ring")
    following: dict[int, dict[int, int]] = {}
    for f in flows:
        following.setdefault(f.channel, {})[f.src] = f.dst
    count = len(wires)
    said = (
        ("flows", f"{count} connections", "certain",
         f"NCCL's bootstrap in the capture: communicator {magic:#018x}, {ranks} ranks, {channels} "
         f"connected channels; {count} of its {len(flows)} ring connections carry data"),
        ("addresses", ", ".join(f"{a} = {r}" for a, r in sorted(_addresses(wires).items(), key=lambda x: x[1])[:8]),
         "certain", "the QP handshakes name the GIDs and QP numbers of both ends"),
    )
    for rings, about in _complete(following, ranks, channels, log):
        yield Layout(
            ranks, rings, tuple(sorted(wires, key=lambda w: (w.channel, w.src))), "bootstrap", channels,
            flows[0].versions, said, about, qps, "NCCL's bootstrap",
        )


def _addresses(wires: Sequence[Wire]) -> dict[str, int]:
    """Rank by address, of addresses that have one."""
    found: dict[str, set[int]] = {}
    for w in wires:
        found.setdefault(w.connection.src, set()).add(w.src)
        found.setdefault(w.connection.dst, set()).add(w.dst)
    return {address: min(ranks) for address, ranks in found.items() if len(ranks) == 1}


def _agree(layout: Layout, hints: Hints) -> None:
    """--rank beside a bootstrap can only say the same."""
    known = _addresses(layout.wires)
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


def _chain(following: dict[int, int]) -> list[int]:
    """The longest path of the known edges, from a rank that nobody known sends to (or anywhere on a cycle)."""
    starts = [r for r in following if r not in following.values()] or list(following)[:1]
    best: list[int] = []
    for start in starts:
        path = [start]
        while path[-1] in following and following[path[-1]] not in path:
            path.append(following[path[-1]])
        best = max(best, path, key=len)
    return best


def _orders(following: dict[int, int], ranks: int) -> Iterator[tuple[int, ...]]:
    """Rings over `ranks` ranks that contain the known path; one for each distance of it from rank 0."""
    path = _chain(following)
    rest = [r for r in range(ranks) if r not in path]
    if 0 in path:
        yield from_zero([*path, *rest])
        return
    rest.remove(0)
    for before in range(len(rest) + 1):  # how many unknown ranks lie between rank 0 and the path
        yield (0, *rest[:before], *path, *rest[before:])


# -- traffic alone ---------------------------------------------------------------------------------------


def _unnamed(found: list[Connection], strangers: int, log: LogFacts, hints: Hints) -> Iterator[Layout]:
    edges: dict[tuple[str, str], list[Connection]] = {}
    for c in sorted(found, key=lambda c: min(q.qpn for q in c.queues)):
        edges.setdefault((c.src, c.dst), []).append(c)
    labels = labels_of(found, log, hints)
    following = dict(list(edges))
    path = _path(following)
    if len(following) < len(edges) or len(set(following.values())) < len(edges) or not following.keys() <= set(path):
        yield from _in_a_tree(edges, labels, log)
        return
    if len({len(cs) for cs in edges.values()}) > 1:
        raise UserError(
            "the directions have different numbers of connections: several communicators, or a channel is not captured",
            where=", ".join(f"{s} -> {d}: {len(cs)}" for (s, d), cs in edges.items()),
            remedy="capture the TCP bootstrap, or name the flows of the gradients in a manifest",
        )
    closed = following.get(path[-1]) == path[0]
    proposed = False
    for ranking in rankings(path, closed, labels, log):
        proposed = True
        ranks, order = len(ranking.ring), ranking.ranks
        wires = []
        for (src, dst), cs in edges.items():
            wires += [Wire(ch, order[src], order[dst], c) for ch, c in enumerate(cs)]
        guessed = [a for a in order if a not in labels.ranks] if labels.ranks and ranks > len(labels.ranks) + 1 else []
        said = (
            ("flows", f"{len(wires)} connections", "probable", "addresses and QP numbers of the writes" + (
                f"; {strangers} without flags beside those that have them are of another communicator" * bool(strangers)
            )),
            *((f"rank of {a}", f"{order[a]}?", "none", "a placeholder: the rank shows nowhere, no byte depends on it")
              for a in guessed),
        )
        yield Layout(
            ranks, (ranking.ring,), tuple(sorted(wires, key=lambda w: (w.channel, w.src))), "traffic", log.channels, "",
            said, ranking.about, ranks_by=labels.reason, split=ranking.split, several=not closed and not log.rings,
        )
    if not proposed:
        raise UserError(
            f"the ranks do not fit: {len(path)} hosts {'form a ring' if closed else 'were seen'}, and by "
            f"{labels.source} they are ranks {', '.join(str(r) for r in sorted(labels.ranks.values()))}",
            where="--rank" if hints.ranks else "NCCL's log",
            remedy="ranks are those of this communicator, from 0 without gaps; a whole ring has a rank 0",
        )


def _in_a_tree(
    edges: dict[tuple[str, str], list[Connection]], labels: Labels, log: LogFacts
) -> Iterator[Layout]:
    proposed = False
    for layout in tree_layouts(edges, labels, log):
        proposed = True
        yield layout
    if not proposed:
        raise UserError(
            f"{len(edges)} pairs of hosts exchange collectives that are no part of one ring, and no double binary tree "
            "of ranks that are known explains who talks to whom: another tree, or several communicators",
            where=next(iter(edges.values()))[0].name(),
            remedy="say ranks with --rank, capture the TCP bootstrap, give NCCL's log with --nccl-log, or name the "
            "flows in a manifest",
        )


def _path(following: dict[str, str]) -> list[str]:
    starts = [a for a in following if a not in following.values()]
    path = [starts[0] if starts else next(iter(following))]
    while path[-1] in following and following[path[-1]] not in path:
        path.append(following[path[-1]])
    return path
