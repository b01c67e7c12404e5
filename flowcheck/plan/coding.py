"""Erasure code between nodes: how much crosses the network, what survives.

Source: ECCheck. n nodes = k data + m parity nodes of g workers each, W = n g workers; who sends what:
flowcheck/checkpoint/coding/shape.py. The printed volume is m W packets; counted by the paper's own rules it is more
where a data group contains no whole node.
"""

from __future__ import annotations

import math

from flowcheck.checkpoint.coding.shape import Shape, data_nodes, moves
from flowcheck.errors import UserError

__all__ = [
    "cluster_survival", "coded_survival", "counted_volume", "law_volume", "printed_volume", "replicated_survival",
]


def printed_volume(shape: Shape) -> int:
    """Packets that cross between workers for one checkpoint, as printed: m W."""
    return shape.parity * shape.nodes * shape.workers


def law_volume(shape: Shape) -> int:
    """m W, and what a data group's own node does not hold of it although it could: sum over j of (g - overlap_j)."""
    holders = data_nodes(shape)
    missing = sum(shape.workers - shape.overlap(node, group) for group, node in enumerate(holders))
    return printed_volume(shape) + missing


def counted_volume(shape: Shape) -> int:
    """The same, counted packet by packet by the paper's rules."""
    return sum(1 for _ in moves(shape))


# -- survival --------------------------------------------------------------------------------------------


def _probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise UserError(f"{p} is not a probability", where="node loss", remedy="give a number from 0 to 1")


def replicated_survival(p: float, nodes: int = 4) -> float:
    """Pairs of nodes keep each other's state: sum_i C(n/2, i) 2^i p^i (1-p)^(n-i), each node lost with p.

    The paper prints ((n/2)/i)^i for the binomial coefficient; for n = 4 both it and this give
    (1-p)^4 + 4p(1-p)^3 + (6-2)p^2(1-p)^2.
    """
    _probability(p)
    if nodes < 2 or nodes % 2:
        raise UserError(f"{nodes} nodes are not pairs", where="nodes", remedy="give an even number")
    half = nodes // 2
    return math.fsum(math.comb(half, i) * 2**i * p**i * (1 - p) ** (nodes - i) for i in range(half + 1))


def coded_survival(p: float, nodes: int = 4, parity: int = 2) -> float:
    """Any `parity` of `nodes` nodes may be lost: sum over i <= parity of C(n, i) p^i (1-p)^(n-i)."""
    _probability(p)
    if not 0 <= parity <= nodes:
        raise UserError(f"{parity} of {nodes} nodes hold parity", where="parity", remedy="give fewer parity nodes")
    return math.fsum(math.comb(nodes, i) * p**i * (1 - p) ** (nodes - i) for i in range(parity + 1))


def cluster_survival(group: float, groups: int) -> float:
    """All groups of a cluster survive: group ** groups, computed so that values close to 1 keep their digits."""
    _probability(group)
    return math.exp(groups * math.log(group)) if group > 0 else 0.0
