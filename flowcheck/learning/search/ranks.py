"""Structures by traffic alone: ranks of addresses, places in the ring, rings and double binary trees.

    by_traffic(connections, log, hints) -> [Hypothesis]
    parents_of(ranks, connections)      parent_ranks for the manifest

Options, logs and clear-to-send tags say which address is which rank. A tag numbers the ranks of the communicator that
this one was split from (nccl-wire.md 5.4). Nothing on the wire tells whether it was split, so tags are a claim:
rankings that agree with them come as they are, all others as `split`, with the tags as numbers of the parent. Which
bytes go where depends on the place of rank 0 alone, not on the names of the other ranks.

A rank of a tree of more than two talks to its parent and its children, in both directions, and to its neighbours in
the ring, which carries all calls but AllReduce. The tree is a function of the number of ranks (7.1), which of its two
shapes a channel has of the number of connected channels. So hosts with known ranks either fit or do not; sizes decide
the rest. Which of two ranks is the parent the walk compares in time: a result comes after what it was made of. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from flowcheck.errors import UserError
from flowcheck.learning.connections import Connection, PlacedConnection
from flowcheck.learning.hints import Hints
from flowcheck.learning.logs import LogFacts
from flowcheck.learning.search.walk import Hypothesis, tree_number
from parser.trees import tree_parent

__all__ = ["RANKS_TRIED", "by_traffic", "from_zero", "longest_path", "parents_of"]

RANKS_TRIED = 64  # with a single rank mirrored and nothing that says how many there are

Node = TypeVar("Node", int, str)
Edges = Mapping[tuple[str, str], Sequence[Connection]]  # connections of each (source, destination), by QP number


@dataclass(frozen=True)
class _Labels:
    """Who is said to be which rank. ranks: by address. source: "--rank", "log", "tags" or "" (nothing known)."""

    ranks: dict[str, int]
    source: str
    reason: str


def by_traffic(found: Sequence[Connection], log: LogFacts, hints: Hints) -> Iterator[Hypothesis]:
    """A hypothesis for each place and number of ranks that fits. Raises UserError: no collective, or no structure."""
    usable, strangers = _strangers(_usable(found))
    _need_one_shape(usable)
    edges: dict[tuple[str, str], list[Connection]] = {}
    for c in sorted(usable, key=lambda c: min(q.qpn for q in c.flows)):
        edges.setdefault((c.src, c.dst), []).append(c)
    labels = _labels_of(usable, log, hints)
    following = dict(list(edges))
    path = longest_path(following)
    if len(following) < len(edges) or len(set(following.values())) < len(edges) or not following.keys() <= set(path):
        yield from _trees(edges, labels, log)
        return
    if len({len(cs) for cs in edges.values()}) > 1:
        raise UserError(
            "the directions have different numbers of connections: several communicators, or a channel is not captured",
            where=", ".join(f"{s} -> {d}: {len(cs)}" for (s, d), cs in edges.items()),
            remedy="capture the TCP bootstrap, or name the flows of the gradients in a manifest",
        )
    closed = following.get(path[-1]) == path[0]
    proposed = False
    for ranks, ring, about, split in _rankings(path, closed, labels, log):
        proposed = True
        placed = [
            PlacedConnection(channel, ranks[src], ranks[dst], c)
            for (src, dst), cs in edges.items() for channel, c in enumerate(cs)
        ]
        unknown = [a for a in ranks if a not in labels.ranks]
        guessed = unknown if labels.ranks and len(ring) > len(labels.ranks) + 1 else []
        said = (
            ("flows", f"{len(placed)} connections", "probable", "addresses and QP numbers of the writes" + (
                f"; {strangers} without flags beside those that have them are of another communicator" * bool(strangers)
            )),
            *((f"rank of {a}", f"{ranks[a]}?", "none", "a placeholder: the rank shows nowhere, no byte depends on it")
              for a in guessed),
        )
        yield Hypothesis(
            len(ring), (ring,), tuple(sorted(placed, key=lambda on: (on.channel, on.src))), "traffic", log.channels,
            said=said, about=about, ranks_by=labels.reason, split=split, several=not closed and not log.rings,
        )
    if not proposed:
        raise UserError(
            f"the ranks do not fit: {len(path)} hosts {'form a ring' if closed else 'were seen'}, and by "
            f"{labels.source} they are ranks {', '.join(str(r) for r in sorted(labels.ranks.values()))}",
            where="--rank" if hints.ranks else "NCCL's log",
            remedy="ranks are those of this communicator, from 0 without gaps; a whole ring has a rank 0",
        )


def _usable(found: Sequence[Connection]) -> list[Connection]:
    """Those that carry calls of a collective. Raises UserError where none does."""
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
            "traffic (MACsec, IPsec) cannot be read: switch it off or mirror after the decryption",
        )
    return usable


def _need_one_shape(usable: Sequence[Connection]) -> None:
    """Raises UserError for connections of different numbers of QPs."""
    shapes = {(len(c.flows), c.used, c.devices) for c in usable}
    if len(shapes) > 1 and not any(c.unsure for c in usable):
        few, many = (min(usable, key=lambda c: len(c.flows)), max(usable, key=lambda c: len(c.flows)))
        raise UserError(
            f"connections have different numbers of QPs: {len(few.flows)} and {len(many.flows)}; every connection of "
            "a job has as many, so some are not in the capture, or it holds several jobs",
            where=f"{few.name()}; {many.name()}",
            remedy="mirror all ports of the rank, capture the TCP bootstrap too, or name the flows in a manifest",
        )


def _strangers(found: list[Connection]) -> tuple[list[Connection], int]:
    """Leave out what is surely of another communicator; and how many. The channels of one use the same protocol for a
    call, so a connection without a single flag does not belong to connections on which every message has flags. It
    matters where one direction alone was captured: then no clear-to-send tells point-to-point."""
    silent = [c for c in found if not (c.cts_sizes or c.flagged or c.empty_part)]
    others = [c for c in found if c.cts_sizes or c.flagged or c.empty_part]
    if silent and others and all(c.flagged == sum(bool(m.size) for m in c.messages) for c in others):
        return others, len(silent)
    return found, 0


def longest_path(following: Mapping[Node, Node]) -> list[Node]:
    """The longest path of these edges, from a node that nothing leads to (or anywhere on a cycle)."""
    starts = [node for node in following if node not in following.values()] or list(following)[:1]
    best: list[Node] = []
    for start in starts:
        path = [start]
        while path[-1] in following and following[path[-1]] not in path:
            path.append(following[path[-1]])
        best = max(best, path, key=len)
    return best


# -- ranks and places in the ring ------------------------------------------------------------------------


def _labels_of(found: Sequence[Connection], log: LogFacts, hints: Hints) -> _Labels:
    """Raises UserError for an address of --rank that is not there."""
    hosts = {address for c in found for address in (c.src, c.dst)}
    if hints.ranks:
        absent = [address for address in hints.ranks if address not in hosts]
        if absent:
            raise UserError(
                f"{absent[0]} sends and receives no collective in the captures", where="--rank",
                remedy=f"name some of {', '.join(sorted(hosts)[:8])}",
            )
        return _Labels(dict(hints.ranks), "--rank", "given")
    by_log = log.ranks_of_addresses(
        [(c.src, c.cts_qpns[0]) for c in found if c.cts_qpns] + [(c.dst, c.flows[0].qpn) for c in found]
    )
    if by_log:
        return _Labels(by_log, "log", "QP numbers in NCCL's logs, which name the rank")
    tags: dict[str, set[int]] = {}
    for c in found:
        if c.tag is not None:
            tags.setdefault(c.src, set()).add(c.tag)
    single = {address: next(iter(t)) for address, t in tags.items() if len(t) == 1}
    several = len(single) > 1 or (bool(single) and max(single.values()) > 0)
    if len(set(single.values())) == len(single) and (several or (single and len({c.src for c in found}) == 1)):
        return _Labels(single, "tags", "the tag of the clear-to-send writes is the sender's rank")
    return _Labels({}, "", "the clear-to-send tags are all equal or absent: they say nothing")


def from_zero(ring: Sequence[int]) -> tuple[int, ...]:
    """The same ring, beginning with rank 0."""
    at = list(ring).index(0)
    return (*ring[at:], *ring[:at])


def _rankings(
    path: list[str], closed: bool, labels: _Labels, log: LogFacts
) -> Iterator[tuple[dict[str, int], tuple[int, ...], str, bool]]:
    """Every place of the path in a ring of every size, what agrees with the labels first: (rank of each address, ring,
    what it is called in a refusal, are the tags a parent's numbers)."""
    t, largest = len(path), max(labels.ranks.values(), default=0)
    if log.rings:
        sizes: Sequence[int] = [len(log.rings[0])]
    elif closed:
        sizes = [t]
    else:
        least = max(t, 2) if labels.source == "tags" else max(t, 1 + largest, 2)
        sizes = range(least, max(RANKS_TRIED, 1 + largest) + 1)
    split = []
    for n in sizes:
        if n < t:
            continue
        for offset in range(n):
            about = f"{n} ranks, {path[0]} at place {offset} of the ring"
            ring = _ring_of(path, offset, n, labels.ranks)
            if ring is not None and log.rings and from_zero(log.rings[0]) != ring:
                continue
            if ring is not None:
                yield {a: ring[(offset + j) % n] for j, a in enumerate(path)}, ring, about, False
            elif labels.source == "tags" and not log.rings:
                split.append((n, offset, about))
    for n, offset, about in split:
        ranks = {address: (offset + j) % n for j, address in enumerate(path)}
        yield ranks, tuple(range(n)), f"{about}, tags numbered in a parent communicator", True


def _ring_of(path: list[str], offset: int, n: int, labels: dict[str, int]) -> tuple[int, ...] | None:
    """The ring with the labels in it and other ranks ascending, None if the labels do not allow this place."""
    ring = [-1] * n
    for j, address in enumerate(path):
        ring[(offset + j) % n] = labels.get(address, -1)
    if ring[0] not in (0, -1) or 0 in ring[1:]:
        return None
    ring[0] = 0
    known = [r for r in ring if r >= 0]
    if len(set(known)) != len(known) or any(r >= n for r in known):
        return None
    free = iter(r for r in range(n) if r not in known)
    return tuple(next(free) if r < 0 else r for r in ring)


def parents_of(ranks: int, placed: Sequence[PlacedConnection]) -> list[int]:
    """communicator.parent_ranks: the tags, where they differ from the ranks; [] where they agree or say nothing.
    Ranks that show nowhere get numbers that nobody has."""
    tags = {on.src: on.connection.tag for on in placed if on.connection.tag is not None}
    values = set(tags.values())
    told = len(values) == len(tags) and (len(tags) > 1 or values - {0})
    if not told or all(tag == rank for rank, tag in tags.items()):
        return []
    free = iter(n for n in range(ranks + len(tags)) if n not in values)
    return [tags[r] if r in tags else next(free) for r in range(ranks)]


# -- double binary trees ---------------------------------------------------------------------------------


def _trees(edges: Edges, labels: _Labels, log: LogFacts) -> Iterator[Hypothesis]:
    """A tree for each number of ranks and of connected channels that fits. None where too few ranks are known: then
    nothing says who is whose parent. Raises UserError."""
    proposed = False
    hosts = {address for ends in edges for address in ends}
    largest, most = max(labels.ranks.values(), default=0), max(map(len, edges.values()))
    sizes = [len(log.rings[0])] if log.rings else range(max(3, len(hosts), 1 + largest), RANKS_TRIED + 1)
    for n in sizes:
        ring = from_zero(log.rings[0]) if log.rings else tuple(range(n))
        ranks = _tree_ranks(edges, labels, ring)
        if ranks is None:
            continue
        for channels in [log.channels] if log.channels else [1, *range(2, 4 * most + 1, 2)]:
            about = f"{n} ranks in a double binary tree of {channels} channel{'s' * (channels > 1)}"
            for placed in _tree_places(edges, ranks, ring, channels):
                said = (
                    ("flows", f"{len(placed)} connections", "probable", "addresses and QP numbers of the writes"),
                    ("tree", f"{channels} connected channels", "certain",
                     "who talks to whom in both directions, and when: a result follows what it was made of"),
                )
                proposed = True
                placed = tuple(sorted(placed, key=lambda on: (on.channel, on.src, on.dst)))
                yield Hypothesis(
                    n, (ring,), placed, "traffic", channels, said=said, about=about, ranks_by=labels.reason,
                    several=not log.rings, tree=True,
                )
    if not proposed:
        raise UserError(
            f"{len(edges)} pairs of hosts exchange collectives that are not part of one ring, and no double binary "
            "tree of ranks that are known explains who talks to whom: another tree, or several communicators",
            where=next(iter(edges.values()))[0].name(),
            remedy="say ranks with --rank, capture the TCP bootstrap, give NCCL's log with --nccl-log, or name the "
            "flows in a manifest",
        )


def _tree_ranks(edges: Edges, labels: _Labels, ring: tuple[int, ...]) -> dict[str, int] | None:
    """Rank of every host: known, or the successor in the ring of the one that it only receives from."""
    ranks = dict(labels.ranks)
    if any(rank not in ring for rank in ranks.values()):
        return None
    for src, dst in edges:
        if dst not in ranks and src in labels.ranks:
            ranks[dst] = ring[(ring.index(ranks[src]) + 1) % len(ring)]
        elif src not in ranks and dst in labels.ranks:
            ranks[src] = ring[ring.index(ranks[dst]) - 1]
    hosts = {address for ends in edges for address in ends}
    if not hosts <= ranks.keys() or len(set(ranks.values())) < len(ranks):
        return None
    return ranks


def _tree_places(
    edges: Edges, ranks: Mapping[str, int], ring: tuple[int, ...], channels: int
) -> Iterator[tuple[PlacedConnection, ...]]:
    """Every connection with its channel, in all ways that have a meaning. Calls use the first channels, as many as they
    are large; so a connection was captured where a tree call or a ring call came that far."""
    n = len(ring)
    trees = [tree_number(channels, c) for c in range(channels)]
    places = []
    for src, dst in edges:
        a, b = ranks[src], ranks[dst]
        in_tree = [a == tree_parent(n, tree, b) or b == tree_parent(n, tree, a) for tree in trees]
        places.append((a, b, in_tree, ring[(ring.index(a) + 1) % n] == b))
    proposed: set[tuple[tuple[int, ...], ...]] = set()
    for by_tree, by_ring in product(range(channels, -1, -1), repeat=2):
        chosen = []
        for found, (_, _, in_tree, in_ring) in zip(edges.values(), places, strict=True):
            carrying = tuple(
                c for c in range(channels) if (c < by_tree and in_tree[c]) or (c < by_ring and in_ring)
            )
            if len(carrying) != len(found):
                break
            chosen.append(carrying)
        else:
            if tuple(chosen) in proposed:
                continue
            proposed.add(tuple(chosen))
            yield tuple(
                PlacedConnection(c, a, b, connection)
                for found, (a, b, _, _), carrying in zip(edges.values(), places, chosen, strict=True)
                for c, connection in zip(carrying, found, strict=True)
            )
