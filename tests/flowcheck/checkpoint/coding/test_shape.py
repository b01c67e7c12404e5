"""Who sends what when nodes encode together: the code's own parity comes out, and the bytes are those of the law."""

from __future__ import annotations

import random
from collections.abc import Sequence

from flowcheck.checkpoint.coding import galois
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.shape import DATA, PARITY, SHARE, Shape, data_nodes, moves, parity_nodes

SHAPES = [
    Shape(nodes, data, workers)
    for nodes in range(2, 13) for workers in range(1, 9) for data in range(1, nodes) if nodes * workers % data == 0
]


def printed_volume(shape: Shape) -> int:
    """Packets that cross between workers for one checkpoint, as ECCheck prints it: m W."""
    return shape.parity * shape.nodes * shape.workers


def law_volume(shape: Shape) -> int:
    """m W, and what a data group's own node does not hold of it although it could: sum over j of (g - overlap_j)."""
    return printed_volume(shape) + sum(
        shape.workers - shape.overlap(node, group) for group, node in enumerate(data_nodes(shape)))


def test_pulling_everything_costs_the_same_where_each_group_holds_a_whole_node() -> None:
    """A parity node that pulls all packets: m (W - g) + (W - k g)."""
    for shape in SHAPES:
        if law_volume(shape) == printed_volume(shape):
            workers = shape.nodes * shape.workers
            pulled = shape.parity * (workers - shape.workers) + workers - shape.data * shape.workers
            assert pulled == sum(1 for _ in moves(shape)), shape


def test_the_sweep_finds_the_largest_overlap() -> None:
    for shape in SHAPES:
        found = data_nodes(shape)
        assert found == [max(range(shape.nodes), key=lambda node: (shape.overlap(node, group), -node))
                         for group in range(shape.data)], shape
        assert len(set(found)) == shape.data
        assert sorted([*found, *parity_nodes(shape)]) == list(range(shape.nodes))


class Nodes:
    """Workers with a packet each, and what nodes have been sent."""

    def __init__(self, shape: Shape, size: int) -> None:
        self.shape, self.size, self.sent = shape, size, 0
        self.code = Code(shape.data, shape.parity)
        dice = random.Random(str(shape))
        self.packets = [dice.randbytes(size) for _ in range(shape.nodes * shape.workers)]
        self.sums: dict[tuple[int, int, int], bytearray] = {}  # by reduction, row, worker
        self.chunks: dict[tuple[str, int, int], bytes] = {}  # by kind, stream, reduction

    def share(self, reduction: int, row: int, worker: int) -> bytes:
        """A worker's multiple of its packet."""
        group = self.shape.members(reduction).index(worker)
        out = bytearray(self.size)
        galois.combine(self.code.row(self.shape.data + row)[group : group + 1], [self.packets[worker]], [out])
        return bytes(out)

    def total(self, reduction: int, row: int, worker: int) -> bytearray:
        """What a worker has added up; it begins with its own."""
        key = reduction, row, worker
        if key not in self.sums:
            self.sums[key] = bytearray(self.share(*key))
        return self.sums[key]

    def run(self) -> None:
        holders, rows = data_nodes(self.shape), parity_nodes(self.shape)
        for move in moves(self.shape):
            self.sent += self.size
            if move.kind == SHARE:
                total = self.total(move.reduction, move.stream, move.target)
                total[:] = _xor(total, self.share(move.reduction, move.stream, move.source))
            elif move.kind == PARITY:
                assert move.target == rows[move.stream]
                self.chunks[PARITY, move.stream, move.reduction] = bytes(
                    self.total(move.reduction, move.stream, move.source))
            else:
                assert (move.kind, move.target) == (DATA, holders[move.stream])
                self.chunks[DATA, move.stream, move.reduction] = self.packets[move.source]
        for reduction in range(self.shape.group):  # what was there without being sent
            members = self.shape.members(reduction)
            for row, node in enumerate(rows):
                own = [worker for worker in members if worker // self.shape.workers == node]
                assert ((PARITY, row, reduction) in self.chunks) != bool(own)
                if own:
                    self.chunks[PARITY, row, reduction] = bytes(self.total(reduction, row, own[0]))
            for group, worker in enumerate(members):
                if worker // self.shape.workers == holders[group]:
                    assert (DATA, group, reduction) not in self.chunks
                    self.chunks[DATA, group, reduction] = self.packets[worker]

    def chunk(self, kind: str, stream: int) -> bytes:
        return b"".join(self.chunks[kind, stream, reduction] for reduction in range(self.shape.group))


def _xor(one: Sequence[int], other: Sequence[int]) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def test_the_volume_law_to_the_byte() -> None:
    """All shapes up to 12 nodes of 8 workers, 22 of which exceed what is printed: real bytes are sent, counted, and
    give the chunks of the plain code."""
    exceed = 0
    for shape in SHAPES:
        size = 3 + shape.workers
        nodes = Nodes(shape, size)
        nodes.run()
        assert nodes.sent == size * law_volume(shape), shape
        exceed += nodes.sent > size * printed_volume(shape)
        data = [b"".join(nodes.packets[group * shape.group : (group + 1) * shape.group]) for group in range(shape.data)]
        parity = [bytearray(len(data[0])) for _ in range(shape.parity)]
        nodes.code.encode(data, parity)
        assert [nodes.chunk(DATA, group) for group in range(shape.data)] == data, shape
        assert [nodes.chunk(PARITY, row) for row in range(shape.parity)] == parity, shape
    assert exceed == 22


def test_rows_are_added_up_by_different_workers() -> None:
    """Where a row's parity node has no worker in the group, and there are as many workers as rows."""
    shape = Shape(12, 9, 3)
    for reduction in range(shape.group):
        targets = [move.source for move in moves(shape) if move.kind == PARITY and move.reduction == reduction]
        assert len(set(targets)) == len(targets)
