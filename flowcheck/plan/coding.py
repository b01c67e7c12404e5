"""Erasure code between nodes: which nodes hold data, what crosses the network, what survives.

Source: ECCheck. n nodes = k data + m parity nodes of g workers each, W = n g workers; k divides W. Worker w has one
packet. Data group j is workers [j W/k, (j+1) W/k); reduction group r is the workers j W/k + r. The printed volume is
m W packets; counted by the paper's own rules it is more where a data group contains no whole node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowcheck.errors import UserError

__all__ = [
    "Shape", "cluster_survival", "coded_survival", "counted_volume", "data_nodes", "law_volume", "printed_volume",
    "replicated_survival",
]


@dataclass(frozen=True)
class Shape:
    """nodes in all, data of them hold data (the others parity), workers on each node."""

    nodes: int
    data: int
    workers: int

    def __post_init__(self) -> None:
        if not 1 <= self.data < self.nodes:
            raise UserError(f"{self.data} data nodes of {self.nodes}", where="data nodes",
                            remedy="give at least one data node and one parity node")
        if self.workers < 1 or (self.nodes * self.workers) % self.data:
            raise UserError(f"{self.data} data nodes do not divide {self.nodes} x {self.workers} workers",
                            where="data nodes", remedy="choose data nodes that divide the number of workers")

    @property
    def parity(self) -> int:
        return self.nodes - self.data

    @property
    def group(self) -> int:
        """Workers in a data group, W / k."""
        return self.nodes * self.workers // self.data

    def overlap(self, node: int, group: int) -> int:
        """Workers of `node` that are in data group `group`."""
        first = max(node * self.workers, group * self.group)
        return max(0, min((node + 1) * self.workers, (group + 1) * self.group) - first)


def data_nodes(shape: Shape) -> list[int]:
    """For each data group the node that overlaps it most; ties: the lower number. Always different nodes."""
    return [max(range(shape.nodes), key=lambda node: (shape.overlap(node, group), -node))
            for group in range(shape.data)]


def printed_volume(shape: Shape) -> int:
    """Packets that cross between workers for one checkpoint, as printed: m W."""
    return shape.parity * shape.nodes * shape.workers


def law_volume(shape: Shape) -> int:
    """m W, and what a data group's own node does not hold of it although it could: sum over j of (g - overlap_j)."""
    holders = data_nodes(shape)
    missing = sum(shape.workers - shape.overlap(node, group) for group, node in enumerate(holders))
    return printed_volume(shape) + missing


def counted_volume(shape: Shape) -> int:
    """The same, counted packet by packet by the paper's rules.

    In each reduction group, per parity row, k results are combined into a target: k - 1 packets. The target is the
    worker of the row's parity node if that has one in the group; otherwise the result then goes to the parity node.
    Each data packet that is not on its group's data node goes there.
    """
    holders = data_nodes(shape)
    parity = [node for node in range(shape.nodes) if node not in holders]
    packets = 0
    for reduction in range(shape.group):
        members = [group * shape.group + reduction for group in range(shape.data)]
        on_nodes = [worker // shape.workers for worker in members]
        for node in parity:
            packets += shape.data - 1 + (node not in on_nodes)
        packets += sum(at != holders[group] for group, at in enumerate(on_nodes))
    return packets


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
