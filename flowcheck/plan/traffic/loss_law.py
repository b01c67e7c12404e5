"""How often a mirror's loss leaves an iteration incomplete: equation (2), and the exact laws of rings and trees.

    copies = ring_copies(ranks=8, mirrored=(0, 2, 5), direction="both")     how often each reduced packet is seen
    incomplete(copies, packets=16e6, loss=1e-9)                             probability, per iteration
    missing(copies, packets=16e6, loss=1e-9)                                packets, expected per iteration

A reduced packet is missing if all its copies are lost. So all that counts is how many copies there are of which share
of the packets: that is a Copies. packets: distinct reduced packets of an iteration (one copy of the whole gradient).

Independence is an assumption: every copy is lost by itself, with the same probability. A mirror destination that
overflows loses bursts of all its sources at once; that has to be measured. Pure functions, any thread.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from flowcheck.plan.answers.answer import need, need_at_most, need_probability
from parser.trees import tree_parent

__all__ = [
    "MOST_RANKS", "Copies", "Direction", "apart", "binomial_interval", "edge_copies", "equation_2",
    "incomplete", "mirrors_needed", "missing", "neighbours", "ring_copies", "ring_views", "tree_copies", "worst",
]

#: As in `flowcheck switch`: ingress is what the NIC sends, egress what it receives.
Direction = Literal["both", "ingress", "egress"]
MOST_RANKS = 1_000_000  # whose trees take seconds


@dataclass(frozen=True)
class Copies:
    """shares: of the reduced packets, by the number of copies that are mirrored of them. The shares add up to 1."""

    shares: Mapping[int, float]

    @property
    def least(self) -> int:
        """Of the packets that are seen least often."""
        return min(self.shares)


def incomplete(copies: Copies, packets: float, loss: float) -> float:
    """Probability that at least one reduced packet of an iteration arrives in no copy.

        1 - product over the shares of (1 - loss^copies)^(share * packets)

    Source: the exact law of rings and trees; with a ring's M single edges it is FlowCheck's equation (2). Computed by
    logarithms, so that 1e-30 is not rounded to 0. loss: 0 to 1.
    """
    need_probability(loss, "loss")
    logarithm = 0.0
    for count, share in copies.shares.items():
        gone = loss**count
        if share * packets > 0:
            logarithm += share * packets * math.log1p(-gone) if gone < 1 else -math.inf
    return -math.expm1(logarithm)


def missing(copies: Copies, packets: float, loss: float) -> float:
    """Reduced packets of an iteration that arrive in no copy, expected: the sum of share * packets * loss^copies."""
    need_probability(loss, "loss")
    return math.fsum(share * packets * loss**count for count, share in copies.shares.items())


def equation_2(ranks: int, edges: int, packets: float, loss: float) -> float:
    """FlowCheck's equation (2): `edges` different edges of one ring, each mirrored once.

        1 - (1 - loss^(M-1))^(M K / N) * (1 - loss^M)^((N - M) K / N)

    Each edge lacks one chunk of N in reduced form, each another. 1 to N edges.
    """
    need(1 <= edges <= ranks, f"{edges} edges of a ring of {ranks}", "edges", f"1 to {ranks}")
    return incomplete(edge_copies(ranks, dict.fromkeys(range(edges), 1)), packets, loss)


# -- rings -----------------------------------------------------------------------------------------------------------


def edge_copies(ranks: int, views: Mapping[int, int]) -> Copies:
    """Copies of each chunk, from the views of each edge: how often it is mirrored (once, or at both its ends).

    Edge e goes from ring position e to e + 1, and carries every chunk in reduced form but e + 1 (nccl-wire 2.2).
    """
    return _by_lack(ranks, Counter(views.values()))


def _by_lack(ranks: int, edges: Mapping[int, int]) -> Copies:
    """The same from the number of edges by their views: each edge lacks one chunk, no two the same."""
    total = sum(views * number for views, number in edges.items())
    chunks = Counter({total - views: number for views, number in edges.items()})
    chunks[total] += ranks - chunks.total()
    return Copies({count: number / ranks for count, number in sorted(chunks.items()) if number})


def ring_views(ranks: int, mirrored: Iterable[int], direction: Direction) -> dict[int, int]:
    """Views of each edge, from the ring positions of the mirrored ports: their outgoing edge, the incoming, or both."""
    views: Counter[int] = Counter()
    for position in mirrored:
        if direction != "egress":
            views[position] += 1
        if direction != "ingress":
            views[(position - 1) % ranks] += 1
    return dict(views)


def ring_copies(ranks: int, mirrored: Sequence[int], direction: Direction) -> Copies:
    """Of a ring whose ports at these positions are mirrored. Channels with the same order of ranks are alike."""
    _check_positions(ranks, mirrored)
    return edge_copies(ranks, ring_views(ranks, mirrored, direction))


# -- trees -----------------------------------------------------------------------------------------------------------


def tree_copies(ranks: int, mirrored: Sequence[int], direction: Direction, trees: Sequence[int] = (0, 1)) -> Copies:
    """Of NCCL's double binary tree, one host per node; each tree carries its share of the channels.

    Every edge from a parent to a child carries all packets of its tree in reduced form (nccl-wire 7.2): a mirrored
    node sees them once from its parent, and once for each child.
    """
    _check_positions(ranks, mirrored)
    shares: Counter[int] = Counter()
    for tree in trees:
        views = _tree_views(ranks, tree, direction)
        shares[sum(views[node] for node in mirrored)] += 1
    return Copies({count: number / len(trees) for count, number in sorted(shares.items())})


def _tree_views(ranks: int, tree: int, direction: Direction) -> list[int]:
    """By node, how often it sees every packet of a tree if it is mirrored."""
    views = [0] * ranks
    for node in range(ranks):
        parent = tree_parent(ranks, tree, node)
        if parent is not None:
            views[parent] += direction != "egress"
            views[node] += direction != "ingress"
    return views


@lru_cache(maxsize=8)
def _nodes_by_views(ranks: int, tree: int, direction: Direction) -> tuple[tuple[int, int], ...]:
    """(views, nodes that have so many), fewest views first."""
    return tuple(sorted(Counter(_tree_views(ranks, tree, direction)).items()))


# -- which ports ------------------------------------------------------------------------------------------------------


def apart(ranks: int, mirrors: int) -> tuple[int, ...]:
    """Ring positions as far from each other as they can be."""
    _check_mirrors(ranks, mirrors)
    return tuple(ranks * number // mirrors for number in range(mirrors))


def neighbours(ranks: int, mirrors: int) -> tuple[int, ...]:
    """One after the other: the worst order for ports mirrored in both directions, which then share edges."""
    _check_mirrors(ranks, mirrors)
    return tuple(range(mirrors))


def mirrors_needed(
    ranks: int, packets: float, loss: float, wanted: float, direction: Direction, algorithm: str = "ring"
) -> int | None:
    """Fewest mirrored ports with which at most `wanted` of the iterations stay incomplete; None if all do not do.

    The worst places are assumed: neighbours on a ring, and of a tree the nodes that see least.
    """
    need_probability(wanted, "wanted")

    def enough(mirrors: int) -> bool:
        return incomplete(worst(ranks, mirrors, direction, algorithm), packets, loss) <= wanted

    if not enough(ranks):
        return None
    return 1 + bisect_left(range(1, ranks + 1), True, key=enough)  # one port more is never worse


def worst(ranks: int, mirrors: int, direction: Direction, algorithm: str) -> Copies:
    """The copies that so many ports give at the worst places: on a ring those of `neighbours`."""
    _check_mirrors(ranks, mirrors)
    if algorithm == "ring":
        if direction != "both":
            return _by_lack(ranks, {1: mirrors})
        return _by_lack(ranks, {1: 2, 2: mirrors - 1} if mirrors < ranks else {2: ranks})
    shares: Counter[int] = Counter()
    for tree in (0, 1):
        seen, left = 0, mirrors
        for views, nodes in _nodes_by_views(ranks, tree, direction):
            taken = min(nodes, left)
            seen, left = seen + views * taken, left - taken
        shares[seen] += 1
    return Copies({count: number / 2 for count, number in sorted(shares.items())})


def _check_mirrors(ranks: int, mirrors: int) -> None:
    need(ranks >= 2, f"{ranks} ranks reduce nothing", "--ranks", "at least 2")
    need_at_most(ranks, MOST_RANKS, "--ranks", "no group has so many")
    need(1 <= mirrors <= ranks, f"{mirrors} mirrored ports of {ranks} ranks", "--mirrors", f"1 to {ranks}")


def _check_positions(ranks: int, mirrored: Sequence[int]) -> None:
    _check_mirrors(ranks, len(mirrored))
    outside = [position for position in mirrored if not 0 <= position < ranks]
    need(not outside, f"position {outside[0] if outside else 0} is not on a ring of {ranks}", "--positions",
         f"numbers from 0 to {ranks - 1}")
    need(len(set(mirrored)) == len(mirrored), "a position is named twice", "--positions", "name each once")


# -- comparing with what was counted ----------------------------------------------------------------------------------


def binomial_interval(trials: int, probability: float, level: float = 0.99) -> tuple[int, int]:
    """(low, high): a count of successes lies there with at least `level`, the rest split evenly above and below.

    To hold a measured rate against a law. Exact: sums the distribution outward from its mode in logarithms.
    """
    need_probability(probability, "probability")
    if trials <= 0 or probability in (0.0, 1.0):
        return (trials, trials) if probability == 1.0 and trials > 0 else (0, 0)
    tail = (1 - level) / 2
    spread = math.sqrt(trials * probability * (1 - probability))
    reach = int(12 * spread + 60)  # beyond this the tails are far below 1e-20
    first = max(0, int(trials * probability) - reach)
    last = min(trials, int(trials * probability) + reach)
    odds = math.log(probability) - math.log1p(-probability)
    logarithm = (
        math.lgamma(trials + 1) - math.lgamma(first + 1) - math.lgamma(trials - first + 1)
        + first * math.log(probability) + (trials - first) * math.log1p(-probability)
    )
    below, low, high = 0.0, -1, last
    for count in range(first, last + 1):
        below += math.exp(logarithm)
        if low < 0 and below > tail:
            low = count
        if below >= 1 - tail:
            high = count
            break
        logarithm += math.log(trials - count) - math.log(count + 1) + odds if count < trials else 0.0
    return max(low, 0), high
