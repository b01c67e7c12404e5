"""Parity by XOR reduction: each worker multiplies its own packet, and the multiples are added up on their way (gloo).

    with Reduction(store, shape, worker, epoch=3, seconds=60.0) as together:
        made = together.encode(packet)       the same chunks as one machine that has all packets would write

Source: ECCheck; which worker sends what to which: shape.py. All W workers do this at once, each with its packet. The
first worker of each node gets that node's chunk, the packets or the row of parity of each reduction group, one after
another; the others get none. Packets that are shorter than the longest are padded with zeros.

Three stages, each with a piece of its own: multiply | add up (`_ours`) | send (`_all`). At most DEPTH pieces wait
between two of them, so besides packet and chunk a worker has 2 DEPTH + 3 pieces of each row in memory, however long
packets are.
Groups are of one epoch: a member that dies or stalls ends the round for the others, with EnvironmentProblem, and a
round after that needs another epoch. What parity there was is not touched by any of this.

gloo takes a message that is shorter than the receiver asked for without a word, and ends the receiver's process where
one is longer. So each worker says a fingerprint of its packet, and who has a chunk holds it against these: what is not
what the others had ends the round. And a worker is a process that may end, never the one that follows a job.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed

from flowcheck.checkpoint.coding import galois
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.fingerprint import WIDTH, Fingerprint
from flowcheck.checkpoint.coding.shape import DATA, Shape, data_nodes, moves, parity_nodes
from flowcheck.control.tensors import memory
from flowcheck.errors import EnvironmentProblem

__all__ = ["DEPTH", "PIECE", "Encoded", "Reduction"]

PIECE, DEPTH = 4 << 20, 2
MOST = 1 << 40  # bytes of a packet that are believed
Rows = dict[int, torch.Tensor]
T = TypeVar("T")
dist: Any = torch.distributed  # torch's stubs leave most of these names out


@dataclass(frozen=True)
class Encoded:
    """length: of each packet, the longest one's. padded: zeros that were encoded, of all workers. chunk: this node's;
    None: another worker has it."""

    length: int
    padded: int
    chunk: torch.Tensor | None


class Reduction:
    """store: of torch.distributed, the same for all. epoch: a number that no round before had. seconds: that the others
    may be silent. piece: bytes, the same for all. One round, of one thread."""

    def __init__(
        self, store: Any, shape: Shape, worker: int, epoch: int, seconds: float = 60.0, piece: int = PIECE
    ) -> None:
        self._shape, self._worker, self._piece = shape, worker, piece
        self._code, self._holders = Code(shape.data, shape.parity), data_nodes(shape)
        self._place, self._reduction = divmod(worker, shape.group)  # in its reduction group, and which that is
        self._targets = {(move.reduction, move.stream): move.target if move.kind == "share" else move.source
                         for move in moves(shape) if move.kind != DATA}
        self._of_packet = Fingerprint()
        until = timedelta(seconds=seconds)
        prefix = f"flowcheck/parity/{epoch}"
        try:
            self._all = dist.ProcessGroupGloo(
                dist.PrefixStore(f"{prefix}/all", store), worker, shape.nodes * shape.workers, until)
            self._ours = dist.ProcessGroupGloo(
                dist.PrefixStore(f"{prefix}/{self._reduction}", store), self._place, shape.data, until)
        except RuntimeError as error:
            raise self._ended(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._all = self._ours = None  # their connections go with them

    def encode(self, packet: torch.Tensor) -> Encoded:
        """packet: uint8, of any length. Raises EnvironmentProblem: the round has ended."""
        try:
            lengths = self._lengths(len(packet))
            length = max(lengths)
            chunk = self._run(packet, length)
            self._check(self._of_packet.value, chunk, length)
            return Encoded(length, sum(length - one for one in lengths), chunk)
        except RuntimeError as error:
            raise self._ended(error) from None

    def _lengths(self, own: int) -> list[int]:
        """Of all workers, as each says."""
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self._shape.nodes * self._shape.workers)]
        self._all.allgather([found], [torch.tensor([own])]).wait()
        lengths = [int(one) for one in found]
        for worker, one in enumerate(lengths):
            if not 0 <= one <= MOST:
                raise RuntimeError(f"worker {worker} says that its packet has {one} bytes")
        return lengths

    def _run(self, packet: torch.Tensor, length: int) -> torch.Tensor | None:
        shape = self._shape
        first = self._worker % shape.workers == 0
        chunk = torch.empty(shape.group * length, dtype=torch.uint8) if first else None
        multiplied: _Lane[tuple[int, torch.Tensor, Rows]] = _Lane()
        added: _Lane[tuple[int, torch.Tensor, Rows]] = _Lane()
        failed: list[Exception] = []

        def stage(work: Callable[[], None]) -> threading.Thread:
            def body() -> None:
                try:
                    work()
                except _Over:
                    pass
                except Exception as error:  # whatever it is, the other stages end and the caller is told
                    failed.append(error)
                    multiplied.end()
                    added.end()

            thread = threading.Thread(target=body, name="flowcheck reduction", daemon=True)
            thread.start()
            return thread

        def multiply() -> None:
            for at in range(0, length, self._piece):
                mine = _padded(packet, at, min(self._piece, length - at))
                self._of_packet.add(memory(mine))
                multiplied.put((at, mine, {row: self._multiple(mine, row) for row in range(shape.parity)}))

        def add() -> None:
            for _ in range(0, length, self._piece):
                at, mine, rows = multiplied.get()
                sums = {row: self._sum(one, row) for row, one in rows.items()}
                added.put((at, mine, {row: one for row, one in sums.items() if one is not None}))

        def send() -> None:
            for _ in range(0, length, self._piece):
                self._sent(*added.get(), length, chunk)

        for thread in [stage(work) for work in (multiply, add, send)]:
            thread.join()
        if failed:
            raise failed[0]
        return chunk

    def _check(self, own: bytes, chunk: torch.Tensor | None, length: int) -> None:
        """Is what came here made of what the others had? Raises RuntimeError."""
        said = [torch.empty(WIDTH, dtype=torch.uint8) for _ in range(self._shape.nodes * self._shape.workers)]
        self._all.allgather([said], [torch.frombuffer(bytearray(own), dtype=torch.uint8)]).wait()
        if chunk is None:
            return
        shape, node = self._shape, self._worker // self._shape.workers
        streams = [*self._holders, *parity_nodes(shape)]
        row = self._code.row(streams.index(node))
        for reduction in range(shape.group):
            found, wanted = Fingerprint(), bytearray(WIDTH)
            for at in range(0, length, self._piece):
                found.add(memory(chunk[reduction * length + at : reduction * length + min(at + self._piece, length)]))
            members = shape.members(reduction)
            galois.combine(row, [memory(said[member]) for member in members], [wanted])
            if found.value != wanted:
                whose = ", ".join(str(one) for one, factor in zip(members, row, strict=True) if factor)
                raise RuntimeError(f"what came here is not made of what workers {whose} say that they have")

    def _multiple(self, mine: torch.Tensor, row: int) -> torch.Tensor:
        multiple = torch.empty_like(mine)
        galois.combine(self._code.row(self._shape.data + row)[self._place : self._place + 1], [memory(mine)],
                       [memory(multiple)])
        return multiple

    def _sum(self, multiple: torch.Tensor, row: int) -> torch.Tensor | None:
        """Of all members of the reduction group; None: another one has it."""
        target, options = self._target(self._reduction, row), dist.ReduceOptions()
        options.reduceOp, options.rootRank = dist.ReduceOp.BXOR, target // self._shape.group
        self._ours.reduce([multiple], options).wait()
        return multiple if target == self._worker else None

    def _sent(self, at: int, mine: torch.Tensor, rows: Rows, length: int, chunk: torch.Tensor | None) -> None:
        """What this worker has of a piece and another node keeps goes there; a node's first worker takes all of its
        own."""
        shape, under_way = self._shape, list[Any]()
        streams = [*enumerate(self._holders), *enumerate(parity_nodes(shape), shape.data)]
        for reduction in range(shape.group):
            members = shape.members(reduction)
            for stream, node in streams:
                row, keeper = stream - shape.data, node * shape.workers
                source = members[stream] if row < 0 else self._target(reduction, row)
                piece = mine if row < 0 else rows.get(row, mine)
                begin = reduction * length + at
                if source == keeper == self._worker:
                    assert chunk is not None
                    chunk[begin : begin + len(piece)] = piece
                elif source == self._worker:
                    under_way.append(self._all.send([piece], keeper, reduction))
                elif keeper == self._worker:
                    assert chunk is not None
                    under_way.append(self._all.recv([chunk[begin : begin + len(mine)]], source, reduction))
        for one in under_way:
            one.wait()

    def _target(self, reduction: int, row: int) -> int:
        """The worker that adds up a row of parity of a reduction group."""
        return self._targets.get((reduction, row), self._shape.members(reduction)[0])

    def _ended(self, error: RuntimeError) -> EnvironmentProblem:
        return EnvironmentProblem(f"the round has ended: {str(error).partition(chr(10))[0][:200]}",
                                  where=f"worker {self._worker}", remedy="another epoch; the parity before stands")


def _padded(packet: torch.Tensor, at: int, size: int) -> torch.Tensor:
    piece = packet[at : at + size]
    if len(piece) == size:
        return piece
    out = torch.zeros(size, dtype=torch.uint8)
    out[: len(piece)] = piece
    return out


class _Over(Exception):
    """Another stage has failed."""


class _Lane(Generic[T]):
    """Between two stages; at most DEPTH pieces wait. Raises _Over once it was ended."""

    def __init__(self) -> None:
        self._waiting, self._changed, self._over = deque[T](), threading.Condition(), False

    def put(self, piece: T) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over or len(self._waiting) < DEPTH)
            if self._over:
                raise _Over
            self._waiting.append(piece)
            self._changed.notify_all()

    def get(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._over or bool(self._waiting))
            if self._over:
                raise _Over
            piece = self._waiting.popleft()
            self._changed.notify_all()
            return piece

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
