"""A code group of nodes with several workers each: which nodes hold data, and what crosses between workers.

    shape = Shape(nodes=4, data=2, workers=2)
    data_nodes(shape)                    [0, 2]: the node of each data group; the others hold parity
    for move in moves(shape): ...        one packet from a worker to a worker or node

Source: ECCheck. n nodes = k data + m parity nodes of g workers each, W = n g workers; k divides W. Worker w has one
packet. Data group j is workers [j W/k, (j+1) W/k); reduction group r is the workers j W/k + r. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from flowcheck.errors import UserError

__all__ = ["DATA", "PARITY", "SHARE", "Move", "Shape", "data_nodes", "moves", "parity_nodes"]

SHARE, PARITY, DATA = "share", "parity", "data"


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

    def members(self, reduction: int) -> list[int]:
        """Workers of a reduction group, one of each data group."""
        return [group * self.group + reduction for group in range(self.data)]


@dataclass(frozen=True)
class Move:
    """A packet's worth of bytes from a worker. kind: SHARE: its multiple of its own packet, for parity row `stream`, to
    the worker `target`; PARITY: what it has added up of row `stream`, to the node `target`; DATA: its packet, of data
    group `stream`, to the node `target`. reduction: its place in the chunk."""

    kind: str
    reduction: int
    stream: int
    source: int
    target: int


def data_nodes(shape: Shape) -> list[int]:
    """For each data group the node that overlaps it most; ties: the lower number. Always different nodes.

    A sweep over the sorted ends of both kinds of intervals: between two of them one node and one group are open.
    """
    workers = shape.nodes * shape.workers
    ends = sorted({*range(0, workers + 1, shape.workers), *range(0, workers + 1, shape.group)})
    most = [(0, -1)] * shape.data
    for first, after in pairwise(ends):
        node, group = first // shape.workers, first // shape.group
        if after - first > most[group][0]:
            most[group] = after - first, node
    return [node for _, node in most]


def parity_nodes(shape: Shape) -> list[int]:
    """Of each row of parity."""
    holders = set(data_nodes(shape))
    return [node for node in range(shape.nodes) if node not in holders]


def moves(shape: Shape) -> Iterator[Move]:
    """All packets that cross between workers for one checkpoint, by XOR reduction.

    In each reduction group, for each parity row, k multiples are added up at a target: the worker of the row's parity
    node if that has one in the group. Otherwise it is member i for k = m, i floor(k/m) for k > m, i mod k for k < m,
    and the sum goes on to the parity node. Each data packet that is not on its group's data node goes there.
    """
    holders, rows = data_nodes(shape), parity_nodes(shape)
    for reduction in range(shape.group):
        members = shape.members(reduction)
        for row, node in enumerate(rows):
            own = [worker for worker in members if worker // shape.workers == node]
            target = own[0] if own else members[_chosen(row, shape)]
            yield from (Move(SHARE, reduction, row, worker, target) for worker in members if worker != target)
            if not own:
                yield Move(PARITY, reduction, row, target, node)
        for group, worker in enumerate(members):
            if worker // shape.workers != holders[group]:
                yield Move(DATA, reduction, group, worker, holders[group])


def _chosen(row: int, shape: Shape) -> int:
    """The member that adds up a row whose parity node has none. For k >= m rows have different ones."""
    return row * (shape.data // shape.parity) if shape.data >= shape.parity else row % shape.data
