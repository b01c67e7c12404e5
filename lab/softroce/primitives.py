"""From one collective to what a rank does for it: primitives per channel in NCCL's order.

    Planner(settings, rank, size, inbound, outbound, lanes).plan(kind, count, dtype, root) -> Plan for the engine

Layout (channels, chunks, sizes) is synth's; the primitives are those of NCCL's device code: send, recvReduceSend,
recvReduceCopySend, recvCopySend, recv. Plans are kept, so that a repeated bucket costs a look-up.
Source: nccl-wire.md 2.2, 2.7, 7.2, 8. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowcheck.job.model import dtype_size
from lab.softroce._engine import MAX_FAN, PART, PRIMITIVE, USE, Plan
from lab.softroce.settings import P2P_SLOT, Settings
from lab.synth.chunk_layout import Chunk, Operation, chunks, first_slice, steps_per_chunk
from lab.synth.schedule import tree_of

__all__ = ["DTYPES", "Planner", "edges"]

# Numbers of sr_codec.h.
PROTOCOLS = {"ll": 0, "ll128": 1, "simple": 2}
_P2P = 3
DTYPES = {"uint8": 0, "int8": 0, "int32": 1, "int64": 2, "float16": 3, "bfloat16": 4, "float32": 5, "float64": 6}
USE_INPUT, STORE = 1, 2


@dataclass
class _Step:
    """One primitive, in elements; peers are ranks."""

    count: int
    receive: tuple[int, ...] = ()
    send: tuple[int, ...] = ()
    source: int | None = None
    target: int | None = None


Strand = list[_Step]
Rows = npt.NDArray[np.void]


def edges(settings: Settings, size: int) -> dict[str, list[tuple[int, int, int]]]:
    """(channel, source, destination) of every connection, by the graph that needs it first."""
    ring = [
        (channel, order[i], order[(i + 1) % size])
        for channel in range(settings.channels) for order in [settings.ring(channel, size)] for i in range(size)
    ]
    tree: list[tuple[int, int, int]] = []
    if settings.algorithm == "tree":
        for channel in range(settings.channels):
            for rank, up in enumerate(tree_of(size, channel, settings.channels).parent):
                if up >= 0:
                    tree += [edge for edge in ((channel, rank, up), (channel, up, rank)) if edge not in ring]
    return {"ring": ring, "tree": tree}


class Planner:
    """inbound, outbound: engine's number of the connection from or to (channel, peer). lanes: by channel."""

    def __init__(
        self, settings: Settings, rank: int, size: int, inbound: dict[tuple[int, int], int],
        outbound: dict[tuple[int, int], int], lanes: list[int],
    ) -> None:
        self._settings, self._rank, self._size = settings, rank, size
        self._inbound, self._outbound, self._lanes = inbound, outbound, lanes
        self._rings = tuple(settings.ring(channel, size) for channel in range(settings.channels))
        self._known: dict[tuple[str, int, str, int], Plan] = {}

    def plan(self, kind: str, count: int, dtype: str, root: int = 0) -> Plan:
        """kind: AllReduce, Broadcast, AllGather, ReduceScatter. count: elements as given to NCCL (AllGather,
        ReduceScatter: of one rank)."""
        key = (kind, count, dtype, root)
        if key not in self._known:
            op = self._operation(kind, count, dtype, root)
            slot, steps = op.buffers[op.protocol] // 8, steps_per_chunk(op)
            sliced = 2 if steps == 4 else 1
            self._known[key] = Plan(
                *self.arrays(op), protocol=PROTOCOLS[op.protocol], dtype=DTYPES[dtype], steps=sliced, round_to=steps,
                posted=sliced * slot,
            )
        return self._known[key]

    def point_to_point(self, connection: int, lane: int, size: int, *, outbound: bool) -> Plan:
        """`size` bytes over a connection of its own, in messages of at most 128 KiB."""
        starts = range(0, size, P2P_SLOT)
        rows = np.zeros(len(starts), PRIMITIVE)
        rows["receive"] = rows["send"] = -1
        rows["input"] = rows["output"] = list(starts)
        rows["bytes"] = [min(P2P_SLOT, size - start) for start in starts]
        rows["flags"] = USE_INPUT if outbound else STORE
        rows["send" if outbound else "receive"][:, 0] = connection
        uses = np.array([(connection, 0 if outbound else len(rows))], USE)
        parts = np.array([(lane, (0, len(rows)), (len(rows), 0), 0, 1)], PART)
        return Plan(rows, uses, parts, protocol=_P2P, dtype=0, steps=1, round_to=1, posted=P2P_SLOT)

    def _operation(self, kind: str, count: int, dtype: str, root: int) -> Operation:
        s, size = self._settings, dtype_size(dtype)
        as_bytes = kind in ("AllGather", "Broadcast")
        return Operation(
            kind, s.algorithm if kind == "AllReduce" else "ring", s.protocol.lower(),
            count * size if as_bytes else count, 1 if as_bytes else size, root, self._size, s.channels, self._rings,
            s.threads, s.buffers, s.wire_family,
        )

    def arrays(self, op: Operation) -> tuple[Rows, Rows, Rows]:
        """Primitives, connections used and parts by lane of this rank, as the engine takes them."""
        rows: list[tuple[object, ...]] = []
        uses: list[tuple[int, int]] = []
        parts: list[tuple[object, ...]] = []
        ring_steps = steps_per_chunk(op)
        for channel, loops in chunks(op).items():
            starts, counts, first_use = [0, 0], [0, 0], len(uses)
            received: dict[int, int] = {}
            sent: set[int] = set()
            for number, strand in enumerate(self._strands(op, channel, loops)):
                starts[number] = len(rows)
                for step in (piece for whole in strand for piece in _slices(op, whole, ring_steps)):
                    rows.append(self._row(op, channel, step))
                    for peer in step.receive:
                        connection = self._inbound[channel, peer]
                        received[connection] = received.get(connection, 0) + 1
                    sent.update(self._outbound[channel, peer] for peer in step.send)
                counts[number] = len(rows) - starts[number]
            uses += [*received.items(), *((connection, 0) for connection in sorted(sent))]
            parts.append((self._lanes[channel], starts, counts, first_use, len(uses) - first_use))
        return np.array(rows, PRIMITIVE), np.array(uses, USE), np.array(parts, PART)

    def _row(self, op: Operation, channel: int, step: _Step) -> tuple[object, ...]:
        def named(peers: tuple[int, ...], table: dict[tuple[int, int], int]) -> list[int]:
            return [*(table[channel, peer] for peer in peers), *[-1] * (MAX_FAN - len(peers))]

        flags = (USE_INPUT if step.source is not None else 0) | (STORE if step.target is not None else 0)
        return (
            (step.source or 0) * op.size, (step.target or 0) * op.size, step.count * op.size, flags,
            named(step.receive, self._inbound), named(step.send, self._outbound),
        )

    def _strands(self, op: Operation, channel: int, loops: list[list[Chunk]]) -> list[Strand]:
        if op.algorithm == "tree":
            return self._tree(op, channel, loops)
        ring = op.rings[channel]
        index = ring.index(self._rank)
        before, after = ring[index - 1], ring[(index + 1) % op.ranks]
        make: Callable[..., Iterator[_Step]] = {
            "AllReduce": _allreduce, "AllGather": _allgather, "ReduceScatter": _reducescatter, "Broadcast": _broadcast,
        }[op.op]
        return [[step for loop in loops for step in make(op, ring, index, loop, before, after)]]

    def _tree(self, op: Operation, channel: int, loops: list[list[Chunk]]) -> list[Strand]:
        tree = tree_of(op.ranks, channel, op.channels)
        up, down = tree.parent[self._rank], tuple(tree.children[self._rank])
        whole = [chunk for loop in loops for chunk in loop]
        if up < 0:
            return [[_Step(count, down, down, start, start) for start, count in whole]]
        return [
            [_Step(count, down, (up,), start) for start, count in whole],
            [_Step(count, (up,), down, None, start) for start, count in whole],
        ]


def _slices(op: Operation, step: _Step, ring_steps: int) -> Iterator[_Step]:
    """A chunk of a SIMPLE ring leaves as two messages, the second maybe empty (2.7)."""
    if ring_steps == 1:
        yield step
        return
    first = first_slice(op, step.count)
    yield _Step(first, step.receive, step.send, step.source, step.target)
    yield _Step(
        step.count - first, step.receive, step.send, None if step.source is None else step.source + first,
        None if step.target is None else step.target + first,
    )


def _allreduce(
    op: Operation, ring: tuple[int, ...], index: int, loop: list[Chunk], before: int, after: int,
) -> Iterator[_Step]:
    n = op.ranks
    for k in range(2 * n - 1):
        start, count = loop[(index - 1 - k) % n]
        yield _Step(
            count, (before,) if k > 0 else (), (after,) if k < 2 * n - 2 else (), start if k < n else None,
            start if k >= n - 1 else None,
        )


def _allgather(
    op: Operation, ring: tuple[int, ...], index: int, loop: list[Chunk], before: int, after: int,
) -> Iterator[_Step]:
    ((start, count),) = loop
    for k in range(op.ranks):
        yield _Step(
            count, (before,) if k > 0 else (), (after,) if k < op.ranks - 1 else (), start if k == 0 else None,
            ring[index - k] * op.count + start,
        )


def _reducescatter(
    op: Operation, ring: tuple[int, ...], index: int, loop: list[Chunk], before: int, after: int,
) -> Iterator[_Step]:
    ((start, count),) = loop
    for k in range(op.ranks):
        last = k == op.ranks - 1
        yield _Step(
            count, (before,) if k > 0 else (), () if last else (after,),
            ring[(index - 1 - k) % op.ranks] * op.count + start, start if last else None,
        )


def _broadcast(
    op: Operation, ring: tuple[int, ...], index: int, loop: list[Chunk], before: int, after: int,
) -> Iterator[_Step]:
    ((start, count),) = loop
    first = ring[index] == op.root
    yield _Step(
        count, () if first else (before,), () if after == op.root else (after,), start if first else None, start,
    )
