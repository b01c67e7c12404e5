"""A systematic erasure code: k streams of data, m of parity; any k of them give all.

    code = Code(data=2, parity=2)
    code.encode([d0, d1], [p0, p1])                       p0 and p1 are written
    code.rebuild({0: d0, 3: p1}, {1: d1, 2: p0})          what is there gives what is lost

Streams are numbered: data from 0, parity from k. Parity i of data j has the coefficient 1 / (x_i + y_j), x_i = k + i
and y_j = j, all different (Cauchy: every square part of it has an inverse, which is why any k streams do). With one
stream of parity all coefficients are 1: XOR. Source: ECCheck, section 3; isa-l's `gf_gen_cauchy1_matrix` has the same
numbers.

A stream is any buffer; all of one code are equally long, so shorter data is padded with zeros by whoever has it. Parity
belongs to one step of all shards: to mix steps is an error that nobody finds but a hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowcheck.checkpoint.coding import galois
from flowcheck.errors import UserError

__all__ = ["Code", "Stream"]

Stream = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Code:
    """data: k; parity: m; k + m at most 32."""

    data: int
    parity: int

    def __post_init__(self) -> None:
        if self.data < 1 or self.parity < 1 or self.data + self.parity > galois.MOST:
            raise UserError(
                f"{self.data} streams of data and {self.parity} of parity", where="erasure code",
                remedy=f"one of each at least, and {galois.MOST} together at most",
            )

    def row(self, number: int) -> bytes:
        """Which multiples of the data a stream is the sum of: k coefficients."""
        k = self.data
        if number < k:
            return bytes(int(j == number) for j in range(k))
        if self.parity == 1:
            return bytes([1]) * k
        return bytes(galois.reciprocal(number ^ j) for j in range(k))

    def encode(self, data: Sequence[Stream], parity: Sequence[Stream]) -> None:
        """Write all parity. ValueError: streams of different length, or not so many."""
        if len(data) != self.data or len(parity) != self.parity:
            raise ValueError(f"{len(data)} and {len(parity)} streams for {self.data} + {self.parity}")
        rows = b"".join(self.row(self.data + i) for i in range(self.parity))
        galois.combine(rows, data, parity)

    def rebuild(self, there: Mapping[int, Stream], lost: Mapping[int, Stream]) -> None:
        """Write the streams that are lost. Raises UserError where fewer than k are there."""
        numbers = self._chosen(there)
        if unknown := [number for number in (*there, *lost) if not 0 <= number < self.data + self.parity]:
            raise ValueError(f"no stream is number {unknown[0]}")
        if lost:
            galois.combine(self.coefficients(numbers, list(lost)), [there[one] for one in numbers], list(lost.values()))

    def coefficients(self, there: Sequence[int], lost: Sequence[int]) -> bytes:
        """How k streams that are there give others: a row of k coefficients for each of these."""
        k = self.data
        if len(there) != k:
            raise ValueError(f"{len(there)} streams where {k} are needed")
        back = galois.inverse(b"".join(self.row(number) for number in there), k)
        return b"".join(galois.product(self.row(number), back, k) for number in lost)

    def _chosen(self, there: Mapping[int, Stream]) -> list[int]:
        """k of them: data before parity, because its rows are the cheapest."""
        if len(there) < self.data:
            raise UserError(
                f"{len(there)} of {self.data + self.parity} streams are there, and {self.data} are needed",
                where="erasure code", remedy="a version of another tier",
            )
        return sorted(there)[: self.data]
