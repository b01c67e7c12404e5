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

__all__ = ["GroupCoverage", "duplicates", "missing", "ring_edges", "survives", "tree_parents"]

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


class GroupCoverage:
    """One group, asked about many sets of mirrored hosts: what does not depend on the set is worked out once.

    algorithm: ring, tree, or any (NCCL chooses by size: both must hold). hosts: of every rank of the group.
    """

    def __init__(
        self, algorithm: str, rings: Sequence[Sequence[int]], hosts: dict[int, str], ranks: Sequence[int]
    ) -> None:
        self._ranks = len(ranks)
        self._order = list(dict.fromkeys(hosts[rank] for rank in ranks))
        self._ring, self._tree = algorithm in ("ring", "any"), algorithm in ("tree", "any")
        # per channel: host -> positions of its edges out, and of its edges in
        self._edges: list[tuple[dict[str, set[int]], dict[str, set[int]]]] = []
        for ring in rings:
            out: dict[str, set[int]] = {}
            into: dict[str, set[int]] = {}
            for position, a, b in ring_edges(ring, hosts):
                out.setdefault(a, set()).add(position)
                into.setdefault(b, set()).add(position)
            self._edges.append((out, into))
        # per tree: hosts with children, hosts with a parent
        self._trees: list[tuple[set[str], set[str]]] = []
        for tree in (0, 1):
            parents = tree_parents(len(self._order), tree)
            above = {self._order[parent] for parent in parents if parent >= 0}
            self._trees.append((above, {host for host, up in zip(self._order, parents, strict=True) if up >= 0}))

    def missing(self, views: Views) -> str:
        """Why `views` can never hold a complete allreduce of the group, or "" if they always do."""
        if self._ranks < 2:
            return "a group of one rank reduces nothing"
        if len(self._order) < 2:
            return f"all ranks are on host {self._order[0]}: nothing of this group reaches a switch"
        if not views:
            return "nothing of it is mirrored"
        if self._ring and (why := self._ring_missing(views)):
            return why
        if self._tree:
            for tree in (0, 1):
                if not self._tree_witnesses(views, tree):
                    return (
                        f"tree {tree}: results travel down, and no edge from a parent to a child passes a mirrored port"
                    )
        return ""

    def survives(self, views: Views) -> int:
        """How many mirrored GPUs can be lost, whichever they are, before the group is incomplete; -1: already is.

        A lost GPU takes its whole host out of the views (which of the others would have stood in is NCCL's affair), so
        the worst case is one loss per host. Every condition below is "of these hosts so many must be left": the group
        falls with the first that no longer holds, and no subsets have to be tried.
        """
        if self.missing(views):
            return -1
        falls = [len(views)]  # with all hosts lost nothing is seen
        if self._ring:
            for channel in range(len(self._edges)):
                shown = self._shown(views, channel)
                # complete is two edges; it falls when what the hosts left see is at most one, whichever
                edges = set().union(*shown.values())
                falls.append(min(sum(bool(seen - {kept}) for seen in shown.values()) for kept in edges))
            if not self._edges:
                falls.append(_unknown_ring_falls(views))
        if self._tree:
            falls += [len(self._tree_witnesses(views, tree)) for tree in (0, 1)]
        return min(falls) - 1

    def _shown(self, views: Views, channel: int) -> dict[str, set[int]]:
        """Positions of this channel's edges that each host of `views` shows."""
        out, into = self._edges[channel]
        nothing: set[int] = set()
        return {
            host: (out.get(host, nothing) if _sends(views, host) else nothing)
            | (into.get(host, nothing) if _receives(views, host) else nothing)
            for host in views
        }

    def _ring_missing(self, views: Views) -> str:
        if not self._edges:
            sending = sum(_sends(views, host) for host in views)
            receiving = sum(_receives(views, host) for host in views)
            both = 2 * any(view == "both" for view in views.values())
            if max(sending, receiving, both) < 2:
                return (
                    "ring of unknown order: one direction of one host is one edge, and an edge lacks one chunk of n; "
                    "mirror both directions, or the same direction of two hosts"
                )
            return ""
        for channel in range(len(self._edges)):
            seen = set().union(*self._shown(views, channel).values())
            if len(seen) >= 2:
                continue
            if not seen:
                return f"ring of channel {channel}: none of its edges between hosts passes a mirrored port"
            lacking, n = (seen.pop() + 1) % self._ranks, self._ranks
            return f"ring of channel {channel}: one edge is seen, and on it chunk {lacking} of {n} is never reduced"
        return ""

    def _tree_witnesses(self, views: Views, tree: int) -> set[str]:
        """Hosts of `views` that show a whole result of this tree: what a parent sends, or a child receives."""
        above, below = self._trees[tree]
        return {
            host for host in views
            if (_sends(views, host) and host in above) or (_receives(views, host) and host in below)
        }


def missing(
    algorithm: str, rings: Sequence[Sequence[int]], hosts: dict[int, str], ranks: Sequence[int], views: Views
) -> str:
    """GroupCoverage.missing of a group that is asked about once."""
    return GroupCoverage(algorithm, rings, hosts, ranks).missing(views)


def survives(
    algorithm: str, rings: Sequence[Sequence[int]], hosts: dict[int, str], ranks: Sequence[int], views: Views
) -> int:
    """GroupCoverage.survives of a group that is asked about once."""
    return GroupCoverage(algorithm, rings, hosts, ranks).survives(views)


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
