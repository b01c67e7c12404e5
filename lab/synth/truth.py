"""Bookkeeping of what the captured packets can tell a reader at best.

A Carried is one tensor (a gradient bucket, a broadcast): `carried` are the element ranges whose reduced value
passes a mirrored port in a captured direction, `present` what is left of them after the mirror's faults.
The truth file has, per iteration and bucket: elements, dtype, data_seed (contents.data_seed), sha256 of the
reduced bytes, carried, present as [start, stop) ranges of elements; then parameters, and every packet that
was dropped, moved, duplicated, corrupted (by port) or retransmitted.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flowcheck.job.model import Collective, dtype_size
from lab.synth.encode import positions
from lab.synth.values import Array

__all__ = ["Carried", "Ledger"]


_HAPPENINGS = ("dropped", "moved", "duplicated", "corrupted", "retransmitted")


class _Message(NamedTuple):
    owner: Carried
    protocol: str
    start: int  # bytes of the tensor
    length: int
    wire: int
    passed: dict[int, int]  # wire offset -> bytes: past a mirrored port
    arrived: dict[int, int]  # and still there after the mirror's faults


@dataclass
class Carried:
    """One tensor and the captured messages that carry reduced parts of it."""

    describe: dict[str, Any]
    size: int
    count: int
    ledger: Ledger
    messages: list[_Message] = field(default_factory=list)

    def message(self, protocol: str, start: int, length: int, wire: int) -> int:
        """Register a captured message of `length` tensor bytes from `start`; its id for Record.piece."""
        entry = _Message(self, protocol, start, length, wire, {}, {})
        self.messages.append(entry)
        self.ledger.messages.append(entry)
        return len(self.ledger.messages) - 1

    def summary(self) -> dict[str, Any]:
        carried = np.zeros(self.count * self.size, bool)
        present = carried.copy()
        for m in self.messages:
            part = slice(m.start, m.start + m.length)
            for mask, pieces in ((carried, m.passed), (present, m.arrived)):
                if sum(pieces.values()) == m.wire:
                    mask[part] = True
                    continue
                wire = np.zeros(m.wire, bool)
                for offset, length in pieces.items():
                    wire[offset:offset + length] = True
                mask[part] |= wire[positions(m.protocol, m.length)]
        return {**self.describe, "carried": _ranges(carried, self.size), "present": _ranges(present, self.size)}


class Ledger:
    """All tensors of a synthesis."""

    def __init__(self) -> None:
        self.messages: list[_Message] = []
        self._buckets: dict[tuple[int, int], Carried] = {}
        self._groups: dict[tuple[int, int], Carried] = {}
        self._parameters: list[Carried] = []

    def bucket(self, iteration: int, bucket: int, call: Collective, result: Array, data_seed: int) -> Carried:
        self._buckets[iteration, bucket] = self._carried("bucket", bucket, call, result, data_seed=data_seed)
        return self._buckets[iteration, bucket]

    def group(self, iteration: int, group: int, call: Collective, result: Array) -> Carried:
        """A parameter group that an AllGather carries; a second AllGather of it adds to the first."""
        if (iteration, group) not in self._groups:
            self._groups[iteration, group] = self._carried("group", group, call, result)
        return self._groups[iteration, group]

    def parameters(self, index: int, call: Collective, result: Array) -> Carried:
        self._parameters.append(self._carried("call", index, call, result, tensors=call.tensors))
        return self._parameters[-1]

    def _carried(self, what: str, number: int, call: Collective, result: Array, **more: Any) -> Carried:
        size = dtype_size(call.dtype)
        elements, digest = result.nbytes // size, hashlib.sha256(result.tobytes()).hexdigest()
        describe = {what: number, "elements": elements, "dtype": call.dtype, **more, "sha256": digest}
        return Carried(describe, size, elements, self)

    def passed(self, piece: tuple[int, int, int]) -> None:
        """A packet's payload passes a mirrored port (Record.piece)."""
        number, offset, length = piece
        if number >= 0 and length:  # the empty half of an AR pair ends where the next piece begins
            self.messages[number].passed[offset] = length

    def arrived(self, piece: tuple[int, int, int]) -> None:
        """A packet's payload is in a capture."""
        number, offset, length = piece
        if number >= 0 and length:
            self.messages[number].arrived[offset] = length

    def summary(self, iterations: range, happened: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        return {
            "parameters": [carried.summary() for carried in self._parameters],
            "iterations": [
                {
                    "iteration": iteration,
                    "buckets": [c.summary() for (i, _), c in sorted(self._buckets.items()) if i == iteration],
                    "gathered": [c.summary() for (i, _), c in sorted(self._groups.items()) if i == iteration],
                }
                for iteration in iterations
            ],
            **{name: happened.get(name, []) for name in _HAPPENINGS},
        }


def _ranges(mask: npt.NDArray[np.bool_], size: int) -> list[list[int]]:
    """[start, stop) of every run of elements whose `size` bytes are all True."""
    whole = np.zeros(len(mask) // size + 2, np.int8)
    whole[1:-1] = np.logical_and.reduce(mask.reshape(-1, size), axis=1)
    edges = np.flatnonzero(np.diff(whole))
    return [[int(a), int(b)] for a, b in edges.reshape(-1, 2)]
