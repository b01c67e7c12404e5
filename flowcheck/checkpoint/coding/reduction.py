"""Parity by XOR reduction: each worker multiplies its own packet, and the multiples are added up on their way (gloo).

    together = Reduction(store, shape, worker, epoch=3, seconds=60.0)
    chunk = together.encode(packet)          the same chunks as one machine that has all packets would write

Source: ECCheck; who sends what to whom: shape.py. All W workers do this at once, each with its packet of s bytes. The
first worker of each node gets that node's chunk, the packets or the row of parity of each reduction group, one after
another; the others get none. Groups are of one epoch: a member that dies or stalls ends the round for the others, with
EnvironmentProblem, and a round after that needs another epoch. What parity there was is not touched by any of this.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from flowcheck.checkpoint.coding import galois
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.shape import DATA, Shape, data_nodes, moves, parity_nodes
from flowcheck.control.tensors import memory
from flowcheck.errors import EnvironmentProblem

__all__ = ["Reduction"]

dist: Any = torch.distributed  # torch's stubs leave most of these names out


class Reduction:
    """store: of torch.distributed, the same for all. epoch: a number that no round before had. seconds: that the others
    may be silent. One thread."""

    def __init__(self, store: Any, shape: Shape, worker: int, epoch: int, seconds: float = 60.0) -> None:
        self._shape, self._worker = shape, worker
        self._code, self._holders = Code(shape.data, shape.parity), data_nodes(shape)
        self._place, self._reduction = divmod(worker, shape.group)  # in its reduction group, and which that is
        self._targets = {(move.reduction, move.stream): move.target if move.kind == "share" else move.source
                         for move in moves(shape) if move.kind != DATA}
        until = timedelta(seconds=seconds)
        prefix = f"flowcheck/parity/{epoch}"
        try:
            self._all = dist.ProcessGroupGloo(
                dist.PrefixStore(f"{prefix}/all", store), worker, shape.nodes * shape.workers, until)
            self._ours = dist.ProcessGroupGloo(
                dist.PrefixStore(f"{prefix}/{self._reduction}", store), self._place, shape.data, until)
        except RuntimeError as error:
            raise self._ended(error) from None

    def encode(self, packet: torch.Tensor) -> torch.Tensor | None:
        """packet: uint8, as long as everybody's. Raises EnvironmentProblem."""
        rows = {}
        try:
            for row in range(self._shape.parity):
                target, multiple = self._target(self._reduction, row), torch.empty_like(packet)
                galois.combine(self._code.row(self._shape.data + row)[self._place : self._place + 1], [memory(packet)],
                               [memory(multiple)])
                options = dist.ReduceOptions()
                options.reduceOp, options.rootRank = dist.ReduceOp.BXOR, target // self._shape.group
                self._ours.reduce([multiple], options).wait()
                if target == self._worker:
                    rows[row] = multiple
            return self._gathered(packet, rows)
        except RuntimeError as error:
            raise self._ended(error) from None

    def _gathered(self, packet: torch.Tensor, rows: dict[int, torch.Tensor]) -> torch.Tensor | None:
        """What this worker has and another node keeps is sent there; a node's first worker takes all of its own."""
        shape, chunk, under_way = self._shape, dict[int, torch.Tensor](), list[Any]()
        streams = [(group, node) for group, node in enumerate(self._holders)]
        streams += [(shape.data + row, node) for row, node in enumerate(parity_nodes(shape))]
        for reduction in range(shape.group):
            members = shape.members(reduction)
            for stream, node in streams:
                row, keeper = stream - shape.data, node * shape.workers
                source = members[stream] if row < 0 else self._target(reduction, row)
                mine = packet if row < 0 else rows.get(row, packet)
                if source == keeper == self._worker:
                    chunk[reduction] = mine
                elif source == self._worker:
                    under_way.append(self._all.send([mine], keeper, reduction))
                elif keeper == self._worker:
                    chunk[reduction] = torch.empty_like(packet)
                    under_way.append(self._all.recv([chunk[reduction]], source, reduction))
        for one in under_way:
            one.wait()
        return torch.cat([chunk[reduction] for reduction in sorted(chunk)]) if chunk else None

    def _target(self, reduction: int, row: int) -> int:
        """The worker that adds up a row of parity of a reduction group."""
        return self._targets.get((reduction, row), self._shape.members(reduction)[0])

    def _ended(self, error: RuntimeError) -> EnvironmentProblem:
        return EnvironmentProblem(f"the round has ended: {str(error).splitlines()[0][:200]}",
                                  where=f"worker {self._worker}", remedy="another epoch; the parity before stands")
