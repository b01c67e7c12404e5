"""Who talks to whom in a double binary tree of more than two ranks: hypotheses of ranks and channels.

    tree_layouts(edges, labels, log) -> Layout     one for each number of ranks and of connected channels that fits

A rank of a tree talks to its parent and its children, in both directions, and to its neighbours in the ring, which
carries all calls but AllReduce. The tree is a function of the number of ranks (nccl-wire.md 7.1), which of its two
shapes a channel has of the number of connected channels. So hosts with known ranks either fit or do not; sizes decide
the rest. Which of two ranks is the parent the walk compares in time: a result comes after what it was made of. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from flowcheck.learning.connections import Connection
from flowcheck.learning.layout import Layout
from flowcheck.learning.logs import LogFacts
from flowcheck.learning.ranks import RANKS_TRIED, Labels, from_zero
from flowcheck.learning.walk import Wire, tree_number
from parser.wire import tree_parent

__all__ = ["tree_layouts"]

Edges = Mapping[tuple[str, str], Sequence[Connection]]  # connections of each (source, destination), by QP number


def tree_layouts(edges: Edges, labels: Labels, log: LogFacts) -> Iterator[Layout]:
    """Nothing where too few ranks are known: then nothing says who is whose parent."""
    hosts = {address for ends in edges for address in ends}
    largest, most = max(labels.ranks.values(), default=0), max(map(len, edges.values()))
    sizes = [len(log.rings[0])] if log.rings else range(max(3, len(hosts), 1 + largest), RANKS_TRIED + 1)
    for n in sizes:
        ring = from_zero(log.rings[0]) if log.rings else tuple(range(n))
        ranks = _ranks(edges, labels, ring)
        if ranks is None:
            continue
        for channels in [log.channels] if log.channels else [1, *range(2, 4 * most + 1, 2)]:
            about = f"{n} ranks in a double binary tree of {channels} channel{'s' * (channels > 1)}"
            for wires in _wires(edges, ranks, ring, channels):
                said = (
                    ("flows", f"{len(wires)} connections", "probable", "addresses and QP numbers of the writes"),
                    ("tree", f"{channels} connected channels", "certain",
                     "who talks to whom in both directions, and when: a result follows what it was made of"),
                )
                yield Layout(
                    n, (ring,), tuple(sorted(wires, key=lambda w: (w.channel, w.src, w.dst))), "traffic", channels,
                    "", said, about, ranks_by=labels.reason, several=not log.rings, tree=True,
                )


def _ranks(edges: Edges, labels: Labels, ring: tuple[int, ...]) -> dict[str, int] | None:
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


def _wires(
    edges: Edges, ranks: Mapping[str, int], ring: tuple[int, ...], channels: int
) -> Iterator[tuple[Wire, ...]]:
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
                Wire(c, a, b, connection)
                for found, (a, b, _, _), carrying in zip(edges.values(), places, chosen, strict=True)
                for c, connection in zip(carrying, found, strict=True)
            )
