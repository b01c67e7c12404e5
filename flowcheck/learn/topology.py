"""Who talks to whom: from connections to hypotheses of ranks, rings and channels.

    bootstrap          every flow is named; the ring is known as far as its edges are
    log                rings in full; ranks of addresses by QP number
    traffic alone      ranks by CTS tag, channels by QP order, the ring by who sends to whom

Each hypothesis is a Topology with its wires; what cannot be known is several hypotheses, which the messages then
decide between, or not. Pure. Section numbers: nccl-wire.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from flowcheck.errors import UserError
from flowcheck.learn.bootstrap import Bootstrap
from flowcheck.learn.hints import Hints
from flowcheck.learn.logs import LogFacts
from flowcheck.learn.traffic import Connection
from flowcheck.learn.walk import Wire
from flowcheck.manifest import Job

__all__ = ["Layout", "layouts", "versions_of"]

RANKS_TRIED = 16  # with a single rank mirrored and nothing that says how many there are

# One version of each family whose layout differs, by what is known of the version.
VERSIONS = {
    "2.12-2.18": ("2.18.6",), "2.19": ("2.19.4",), "2.12-2.19": ("2.19.4",),
    "2.20-2.23": ("2.20.5", "2.22.3", "2.23.4"),
    "2.24-2.25": ("2.24.3",), "2.26-2.28": ("2.27.7",), "2.30": ("2.30.7",),
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A hypothesis without version: ranks, rings (one per channel, rank 0 first), wires, and why.

    channels: connected channels if known, else 0. handshake: versions by QP info, or "". said: (what, confidence,
    reason). about: what distinguishes it from its siblings, for refusals."""

    ranks: int
    rings: tuple[tuple[int, ...], ...]
    wires: tuple[Wire, ...]
    channels: int = 0
    handshake: str = ""
    said: tuple[tuple[str, str, str], ...] = ()
    about: str = ""
    qps: dict[tuple[int, int, int], tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)


def versions_of(layout: Layout, wires: Sequence[Wire], hints: Hints, log: LogFacts) -> tuple[tuple[str, ...], str]:
    """(versions to try, one per family that is possible; why)."""
    if hints.version or hints.given is not None:
        return (hints.version or hints.given.communicator.nccl_version,), "given"  # type: ignore[union-attr]
    if log.version:
        return (log.version,), "NCCL's log names it"
    seen = {w.connection.layout for w in wires if w.connection.layout}
    order = {w.connection.imm_order for w in wires if w.connection.imm_order}
    pairs = any(w.connection.pairs for w in wires)
    if len(seen) > 1 or len(order) > 1:
        raise UserError(
            f"the connections of one ring speak different NCCL versions ({', '.join(sorted(seen | order))})",
            remedy="capture one job, or name its flows in a manifest",
        )
    known, why = layout.handshake, "size of the QP handshake"
    if not known:
        known, why = (seen.pop() if seen else ""), "form of the clear-to-send writes"
    big = order == {"big"}
    if known in ("2.12-2.18", "2.12-2.19") and pairs:
        return ("2.12.12",), f"{why}, and adaptive-routing pairs, which 2.12-2.15 always sends"
    if known == "2.24-2.29":
        if big:
            return ("2.29.2",), f"{why}, big-endian immediates"
        return ("2.24.3", "2.27.7") if order else ("2.24.3", "2.27.7", "2.29.2"), why
    if known in VERSIONS:
        return VERSIONS[known], why
    if big:
        return ("2.29.2", "2.30.7"), "big-endian immediates"
    every = ("2.19.4", "2.20.5", "2.22.3", "2.23.4", "2.27.7")
    return every if order else (*every, "2.29.2", "2.30.7"), "no clear-to-send write was captured"


def layouts(found: list[Connection], bootstrap: Bootstrap, log: LogFacts, hints: Hints) -> list[list[Layout]]:
    """Alternatives for each group of connections that may be one communicator. Raises UserError."""
    if hints.given is not None:
        return [[_given(hints.given, found)]]
    groups = [g for magic in bootstrap.ranks if (g := list(_named(magic, found, bootstrap, log)))]
    if groups:
        return groups
    usable = [c for c in found if not c.point_to_point and (c.layout or c.imm_order) and c.messages]
    if not usable:
        raise UserError(
            "no NCCL collective is in the captures: no write with NCCL's immediate, none announced by clear-to-send",
            remedy="mirror the ports that carry the gradients; `flowcheck inspect` shows what is there. Encrypted "
            "traffic (MACsec, IPsec) cannot be read: switch it off or mirror behind the decryption",
        )
    if any(c.split for c in usable):
        raise UserError(
            "messages are split over several QPs of a connection, and which belong together cannot be learnt from the "
            "traffic alone", where=next(c.name() for c in usable if c.split),
            remedy="capture the TCP bootstrap too, give a manifest, or run the job with NCCL_IB_QPS_PER_CONNECTION=1",
        )  # fmt: skip
    return [list(_unnamed(usable, log, hints))]


# -- manifest --------------------------------------------------------------------------------------------


def _given(job: Job, found: list[Connection]) -> Layout:
    by_key = {(ip_address(c.src), ip_address(c.dst), c.qpn): c for c in found}
    c, wires, qps = job.communicator, [], {}
    for f in job.flows:
        qps[f.channel, f.src, f.dst] = (tuple(f.qpns), tuple(f.cts_qpns))
        connection = by_key.get((ip_address(f.src_addr), ip_address(f.dst_addr), f.qpns[0]))
        if connection is not None and connection.messages:
            wires.append(Wire(f.channel, f.src, f.dst, connection))
    if not wires:
        raise UserError(
            "none of the manifest's flows is in the captures", where="flows",
            remedy="`flowcheck inspect` lists the connections; correct addresses and QP numbers",
        )
    rings = tuple(tuple(c.ring(channel)) for channel in range(c.channels))
    said = (("flows", "given", "the manifest names them"),)
    return Layout(c.ranks, rings, tuple(sorted(wires, key=lambda w: (w.channel, w.src))), c.channels, "", said, "", qps)


# -- bootstrap -------------------------------------------------------------------------------------------


def _named(magic: int, found: list[Connection], bootstrap: Bootstrap, log: LogFacts) -> Iterator[Layout]:
    ranks = bootstrap.ranks[magic]
    flows = [f for f in bootstrap.flows if f.communicator == magic and f.graph == "ring"]
    by_key = {(c.src, c.dst, c.qpn): c for c in found if not c.point_to_point}
    wires, qps = [], {}
    for f in flows:
        connection = by_key.get((f.sender.gid, f.receiver.gid, f.qpns[0]))
        qps[f.channel, f.src, f.dst] = (f.qpns, f.cts_qpns)
        if connection is not None and connection.messages:
            wires.append(Wire(f.channel, f.src, f.dst, connection))
    if not wires or not ranks:
        return
    channels = max(n for (m, graph, _, _), n in bootstrap.connected.items() if m == magic and graph == "ring")
    following: dict[int, dict[int, int]] = {}
    for f in flows:
        following.setdefault(f.channel, {})[f.src] = f.dst
    count = len(wires)
    said = (
        ("flows", "certain", f"NCCL's bootstrap in the capture: communicator {magic:#018x}, {ranks} ranks, {channels} "
         f"connected channels; {count} of its {len(flows)} ring connections carry data"),
        ("addresses", "certain", "the QP handshakes name the GIDs and QP numbers of both ends"),
    )  # fmt: skip
    for rings, about in _complete(following, ranks, channels, log):
        yield Layout(
            ranks, rings, tuple(sorted(wires, key=lambda w: (w.channel, w.src))), channels, flows[0].versions, said,
            about, qps,
        )  # fmt: skip


def _complete(
    following: dict[int, dict[int, int]], ranks: int, channels: int, log: LogFacts
) -> Iterator[tuple[tuple[tuple[int, ...], ...], str]]:
    """Rings with these edges. What the edges leave open is tried at every place that differs for them."""
    if log.rings and len(log.rings[0]) == ranks:
        rings = tuple(_from_zero(log.rings[c % len(log.rings)]) for c in range(channels))
        yield rings, "rings as in NCCL's log"
        return
    options = {c: list(_orders(edges, ranks)) for c, edges in following.items() if c < channels}
    spare = next(iter(options.values()))[0]  # of channels without a connection: nothing travels on them
    for turn in range(max(map(len, options.values()))):
        chosen = {c: orders[min(turn, len(orders) - 1)] for c, orders in options.items()}
        about = f"ring {list(chosen[min(chosen)])}" if any(len(o) > 1 for o in options.values()) else ""
        yield tuple(chosen.get(c, spare) for c in range(channels)), about


def _from_zero(ring: Sequence[int]) -> tuple[int, ...]:
    at = list(ring).index(0)
    return (*ring[at:], *ring[:at])


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
        yield _from_zero([*path, *rest])
        return
    rest.remove(0)
    for before in range(len(rest) + 1):  # how many unknown ranks lie between rank 0 and the path
        yield (0, *rest[:before], *path, *rest[before:])


# -- traffic alone ---------------------------------------------------------------------------------------


def _labels(found: list[Connection], log: LogFacts, hints: Hints) -> tuple[dict[str, int], str, str]:
    """(address -> rank, confidence, reason)."""
    if hints.ranks:
        return dict(hints.ranks), "given", "given"
    by_log = log.ranks_of_addresses([(c.src, c.cts_qpn) for c in found] + [(c.dst, c.qpn) for c in found])
    if by_log:
        return by_log, "probable", "QP numbers in NCCL's logs, which name the rank"
    tags: dict[str, set[int]] = {}
    for c in found:
        if c.tag is not None:
            tags.setdefault(c.src, set()).add(c.tag)
    single = {address: next(iter(t)) for address, t in tags.items() if len(t) == 1}
    if len(set(single.values())) == len(single) and single and (len(single) > 1 or max(single.values()) > 0):
        return single, "certain", "the tag of the clear-to-send writes is the sender's rank"
    if len(single) == 1 and len({c.src for c in found}) == 1:
        return single, "probable", "the tag of the clear-to-send writes is the sender's rank"
    return {}, "none", "the clear-to-send tags are all equal or absent: they say nothing"


def _unnamed(found: list[Connection], log: LogFacts, hints: Hints) -> Iterator[Layout]:
    edges: dict[tuple[str, str], list[Connection]] = {}
    for c in sorted(found, key=lambda c: c.qpn):
        edges.setdefault((c.src, c.dst), []).append(c)
    following: dict[str, str] = {}
    for src, dst in edges:
        if src in following or dst in following.values():
            raise UserError(
                f"{src} sends collectives to more than one peer, or {dst} gets them from several: a tree, or several "
                "communicators", where=edges[src, dst][0].name(),
                remedy="capture the TCP bootstrap, give NCCL's log with --nccl-log, or name the flows in a manifest",
            )  # fmt: skip
        following[src] = dst
    used = max(len(cs) for cs in edges.values())
    if len({len(cs) for cs in edges.values()}) > 1:
        raise UserError(
            "the directions have different numbers of connections: several communicators, or a channel is not captured",
            where=", ".join(f"{s} -> {d}: {len(cs)}" for (s, d), cs in edges.items()),
            remedy="capture the TCP bootstrap, or name the flows of the gradients in a manifest",
        )
    labels, confidence, reason = _labels(found, log, hints)
    path = [*_path(following)]
    closed = following.get(path[-1]) == path[0]
    for ranks, order, about in _rankings(path, closed, labels, log, hints):
        wires = []
        for (src, dst), cs in edges.items():
            wires += [Wire(ch, order[src], order[dst], c) for ch, c in enumerate(cs)]
        ring = about[1]
        guessed = [a for a in order if a not in labels] if labels and ranks > len(labels) + 1 else []
        said = (
            *((f"rank of {a}", "none", "a placeholder: its rank shows nowhere, and no byte depends on it")
              for a in guessed),
            ("rank of each address", confidence if labels else "none", reason),
            ("channels", "probable" if used > 1 else "certain",
             "QP numbers of a pair ascend with the channel" if used > 1 else "one connection per direction"),
        )  # fmt: skip
        yield Layout(
            ranks, (ring,) * 1, tuple(sorted(wires, key=lambda w: (w.channel, w.src))), log.channels, "", said, about[0]
        )


def _path(following: dict[str, str]) -> list[str]:
    starts = [a for a in following if a not in following.values()]
    if len(starts) > 1:
        raise UserError(
            f"the senders {', '.join(starts[:4])} are not parts of one ring that can be seen",
            remedy="mirror neighbouring ranks, or name the flows in a manifest",
        )
    at = starts[0] if starts else next(iter(following))
    path = [at]
    while path[-1] in following and following[path[-1]] not in path:
        path.append(following[path[-1]])
    return path


def _rankings(
    path: list[str], closed: bool, labels: dict[str, int], log: LogFacts, hints: Hints
) -> Iterator[tuple[int, dict[str, int], tuple[str, tuple[int, ...]]]]:
    """(ranks, address -> rank, (description, ring)) for every place of the path in a ring of every size."""
    t = len(path)
    if log.rings:
        sizes: Sequence[int] = [len(log.rings[0])]
    elif closed:
        sizes = [t]
    else:
        least = max(t, 1 + max(labels.values(), default=0), 2)
        sizes = range(least, max(RANKS_TRIED, least) + 1)
    for n in sizes:
        if n < t:
            continue
        for offset in range(n):
            placed = {(offset + j) % n: address for j, address in enumerate(path)}
            ring = [-1] * n
            for position, address in placed.items():
                ring[position] = labels.get(address, -1)
            if (ring[0] not in (0, -1)) or 0 in ring[1:]:
                continue
            ring[0] = 0
            known = [r for r in ring if r >= 0]
            if len(set(known)) != len(known) or any(r >= n for r in known):
                continue
            free = iter(r for r in range(n) if r not in known)
            ring = [next(free) if r < 0 else r for r in ring]
            if log.rings and _from_zero(log.rings[0]) != tuple(ring):
                continue
            ranks = {address: ring[position] for position, address in placed.items()}
            first = path[0]
            yield n, ranks, (f"{n} ranks, {first} at place {offset} of the ring", tuple(ring))
