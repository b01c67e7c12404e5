"""What a set of mirrored ranks delivers of an allreduce: ring and double-binary-tree arithmetic.

Ring (NCCL's all_reduce.h): per channel the rank at ring position s sends every chunk reduced but one, (s + 1)
mod n, on its edge to s + 1. So one edge never suffices, and any two different edges of a channel do. Only edges
between hosts are on a switch. Where the order is unknown: a host has one edge out and one in per ring, which
differ as soon as there are two hosts; the edges out of two hosts differ, an edge in may be another's edge out.

Tree (trees.cc): results travel down. A parent's edge to a child carries every chunk of that tree's channels; a
node sends them unless it is a leaf, receives them unless it is the root. Two trees, each for half of the channels.

Directions are the switch port's: ingress = sent by the host, egress = received by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from switch_configs.schema import Direction

__all__ = ["duplicates", "missing", "ring_edges", "survives", "tree_parents"]

Views = dict[str, Direction]  # host -> what of it is mirrored, all its NICs of the group together


def tree_parents(nodes: int, tree: int) -> list[int]:
    """Parent of every node in tree 0 or 1 of `nodes`, -1 for the root."""

    def parents(n: int) -> list[int]:
        out = [-1]
        for x in range(1, n):
            bit = x & -x
            up = (x ^ bit) | (bit << 1)
            out.append(up if up < n else x ^ bit)
        return out

    base = parents(nodes)
    if tree == 0:
        return base
    if nodes % 2 == 0:  # mirrored: node x stands where nodes - 1 - x did
        place, back = (lambda x: nodes - 1 - x), (lambda x: nodes - 1 - x)
    else:  # shifted by one
        place, back = (lambda x: (x - 1) % nodes), (lambda x: (x + 1) % nodes)
    return [-1 if base[place(x)] < 0 else back(base[place(x)]) for x in range(nodes)]


def ring_edges(ring: Sequence[int], hosts: dict[int, str]) -> list[tuple[int, str, str]]:
    """(position, sending host, receiving host) of the edges of one channel that leave a host."""
    out = []
    for position, rank in enumerate(ring):
        follower = ring[(position + 1) % len(ring)]
        if hosts[rank] != hosts[follower]:
            out.append((position, hosts[rank], hosts[follower]))
    return out


def _sends(views: Views, host: str) -> bool:
    return views.get(host) in ("ingress", "both")


def _receives(views: Views, host: str) -> bool:
    return views.get(host) in ("egress", "both")


def _ring_missing(rings: Sequence[Sequence[int]], hosts: dict[int, str], views: Views) -> str:
    if not rings:
        sending = sum(_sends(views, host) for host in views)
        receiving = sum(_receives(views, host) for host in views)
        both = 2 * any(view == "both" for view in views.values())
        if max(sending, receiving, both) < 2:
            return (
                "ring of unknown order: one direction of one host is one edge, and an edge lacks one chunk of n; "
                "mirror both directions, or the same direction of two hosts"
            )
        return ""
    for channel, ring in enumerate(rings):
        seen = {at for at, a, b in ring_edges(ring, hosts) if _sends(views, a) or _receives(views, b)}
        if len(seen) >= 2:
            continue
        if not seen:
            return f"ring of channel {channel}: none of its edges between hosts passes a mirrored port"
        lacking = (seen.pop() + 1) % len(ring)
        return f"ring of channel {channel}: one edge is seen, and on it chunk {lacking} of {len(ring)} is never reduced"
    return ""


def _tree_witnesses(order: Sequence[str], views: Views, tree: int) -> set[str]:
    """Hosts of `views` that show a whole result of this tree: what a parent sends, or a child receives."""
    parents = tree_parents(len(order), tree)
    inner = set(parents)
    return {
        host
        for node, host in enumerate(order)
        if (_sends(views, host) and node in inner) or (_receives(views, host) and parents[node] >= 0)
    }


def _tree_missing(order: Sequence[str], views: Views) -> str:
    for tree in (0, 1):
        if not _tree_witnesses(order, views, tree):
            return f"tree {tree}: results travel down, and no edge from a parent to a child passes a mirrored port"
    return ""


def missing(
    algorithm: str, rings: Sequence[Sequence[int]], hosts: dict[int, str], ranks: Sequence[int], views: Views
) -> str:
    """Why `views` can never hold a complete allreduce of the group, or "" if they always do.

    algorithm: ring, tree, or any (NCCL chooses by size: both must hold). hosts: of every rank of the group.
    """
    order = list(dict.fromkeys(hosts[rank] for rank in ranks))
    if len(ranks) < 2:
        return "a group of one rank reduces nothing"
    if len(order) < 2:
        return f"all ranks are on host {order[0]}: nothing of this group reaches a switch"
    if not views:
        return "nothing of it is mirrored"
    if algorithm in ("ring", "any") and (why := _ring_missing(rings, hosts, views)):
        return why
    if algorithm in ("tree", "any") and (why := _tree_missing(order, views)):
        return why
    return ""


def survives(
    algorithm: str, rings: Sequence[Sequence[int]], hosts: dict[int, str], ranks: Sequence[int], views: Views
) -> int:
    """How many mirrored GPUs can be lost, whichever they are, before the group is incomplete; -1: already is.

    A lost GPU takes its whole host out of the views (which of the others would have stood in is NCCL's affair), so
    the worst case is one loss per host. Every condition below is "of these hosts so many must be left": the group
    falls with the first that no longer holds, and no subsets have to be tried.
    """
    if missing(algorithm, rings, hosts, ranks, views):
        return -1
    order = list(dict.fromkeys(hosts[rank] for rank in ranks))
    falls = [len(views)]  # with all hosts lost nothing is seen
    if algorithm in ("ring", "any"):
        for ring in rings:
            shown: dict[str, set[int]] = {host: set() for host in views}
            for at, a, b in ring_edges(ring, hosts):
                for host, sees in ((a, _sends(views, a)), (b, _receives(views, b))):
                    if sees:
                        shown[host].add(at)
            # complete is two edges; it falls when what the hosts left see is at most one, whichever
            edges = set().union(*shown.values())
            falls.append(min(sum(bool(seen - {kept}) for seen in shown.values()) for kept in edges))
        if not rings:
            falls.append(_unknown_ring_falls(views))
    if algorithm in ("tree", "any"):
        for tree in (0, 1):
            falls.append(len(_tree_witnesses(order, views, tree)))
    return min(falls) - 1


def _unknown_ring_falls(views: Views) -> int:
    """Fewest hosts to lose until the rest are no two hosts of one direction and none in both."""
    whole = sum(view == "both" for view in views.values())
    sending = sum(view == "ingress" for view in views.values())
    receiving = sum(view == "egress" for view in views.values())
    return whole + max(sending - 1, 0) + max(receiving - 1, 0)


def duplicates(rings: Iterable[Sequence[int]], hosts: dict[int, str], views: Views) -> tuple[int, int]:
    """(edges seen, views of them): a packet between two mirrored ports is copied by each that sees it."""
    seen = copies = 0
    for ring in rings:
        for _, a, b in ring_edges(ring, hosts):
            count = _sends(views, a) + _receives(views, b)
            seen += count > 0
            copies += count
    return seen, copies
