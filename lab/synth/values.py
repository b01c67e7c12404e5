"""Data of the collectives and every stage of its reduction, in the element type's own arithmetic.

The generator is a published hash (mix32, the one of the shared soft-RoCE captures and NCCL vectors), so
that a capture's truth can be recomputed from (seed, rank, element) alone. bfloat16 has no numpy type: its
arrays are uint16 and sums are formed in float32 and rounded to nearest even, as the GPU does; float32 is
wide enough for the second rounding to change nothing.
Source: nccl-vectors README ("Data"), reference nccl-wire.md 2.2, 7.2, 8. Pure functions; any thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lab.synth.chunk_layout import Operation, chunks
from lab.synth.schedule import tree_of

__all__ = ["Array", "Stages", "add", "generate_values", "storage"]

Array = npt.NDArray[np.generic]

_STORAGE = {
    "int8": "i1", "uint8": "u1", "float16": "<f2", "bfloat16": "<u2", "int32": "<i4", "uint32": "<u4",
    "float32": "<f4", "int64": "<i8", "uint64": "<u8", "float64": "<f8",
}


def storage(dtype: str) -> np.dtype[np.generic]:
    """numpy dtype that holds a manifest dtype (bfloat16: its bits as uint16)."""
    return np.dtype(_STORAGE[dtype])


def _mix32(h: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    h = h ^ (h >> np.uint32(16))
    h = h * np.uint32(0x7FEB352D)
    h = h ^ (h >> np.uint32(15))
    h = h * np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))


def generate_values(dtype: str, seed: int, rank: int, count: int, mode: int = 1) -> Array:
    """`count` elements of `dtype` for (seed, rank).

    mode 1: 24-bit mantissas in [-1, 1), sums depend on the order; 0: small multiples of 1/16, sums are
    exact; 2: integers -128..127. Integer types take mode 2 widened, int8 and uint8 the top byte of the hash.
    """
    base = _mix32(np.array([(seed * 0x9E3779B9 + rank) & 0xFFFFFFFF], np.uint32))
    index: npt.NDArray[np.uint32] = np.arange(count, dtype=np.uint32)
    h = _mix32(index + base)
    if dtype in ("int8", "uint8"):
        return (h >> np.uint32(24)).astype(np.uint8).view(storage(dtype))
    if dtype in ("int32", "uint32", "int64", "uint64"):
        return (h.astype(np.int64) - (1 << 31)).astype(storage(dtype))
    if mode == 0:
        real = ((h >> np.uint32(20)).astype(np.int32) - 2048).astype(np.float32) * np.float32(1 / 16)
    elif mode == 1:
        real = ((h >> np.uint32(8)).astype(np.int32) - 8388608).astype(np.float32) * np.float32(1 / 8388608)
    else:
        real = ((h >> np.uint32(24)).astype(np.int32) - 128).astype(np.float32)
    if dtype == "bfloat16":
        return _to_bfloat16(real)
    return real.astype(storage(dtype))


def _to_bfloat16(real: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = real.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)


def _from_bfloat16(bits: Array) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def add(dtype: str, a: Array, b: Array) -> Array:
    """a + b, one rounding, in the element type's arithmetic."""
    if dtype == "bfloat16":
        return _to_bfloat16(_from_bfloat16(a) + _from_bfloat16(b))
    return np.add(a, b)


class Stages:
    """The tensor at each stage of a reduction: `tensor(source)` for the `source` of schedule.Message.

    inputs: one array per rank; for AllGather each rank's block, for Broadcast only the root's is used.
    `.result` is what every rank ends with (ReduceScatter: the blocks one after the other).
    """

    def __init__(self, op: Operation, dtype: str, inputs: list[Array]) -> None:
        self.result: Array
        self._tensors: dict[int, Array] = {}
        if op.op == "AllGather":
            self.result = np.concatenate(inputs)
            self._tensors[0] = self.result
        elif op.op == "Broadcast":
            self.result = inputs[op.root]
            self._tensors[0] = self.result
        elif op.algorithm == "tree":
            self._reduce_tree(op, dtype, inputs)
        else:
            self._reduce_ring(op, dtype, inputs)

    def tensor(self, source: int) -> Array:
        return self._tensors[source]

    def _reduce_ring(self, op: Operation, dtype: str, inputs: list[Array]) -> None:
        n = op.ranks
        owned = [np.empty_like(inputs[0]) for _ in range(n)]  # [k]: the k-th contribution to each element
        for channel, loops in chunks(op).items():
            ring = op.rings[channel]
            for loop in loops:
                for j in range(n):
                    start, count = loop[j if op.op == "AllReduce" else 0]
                    if op.op == "ReduceScatter":
                        start += ring[j] * op.count
                    part = slice(start, start + count)
                    for k in range(n):
                        owned[k][part] = inputs[ring[(j + 1 + k) % n]][part]
        total = owned[0]
        self._tensors[0] = total
        for k in range(1, n):
            total = add(dtype, total, owned[k])
            self._tensors[k] = total
        self.result = total

    def _reduce_tree(self, op: Operation, dtype: str, inputs: list[Array]) -> None:
        for rank in range(op.ranks):
            self._tensors[rank] = inputs[rank].copy()
        self.result = np.empty_like(inputs[0])
        for channel, loops in chunks(op).items():
            tree = tree_of(op.ranks, channel, op.channels)
            root = tree.parent.index(-1)
            order = [root]
            for rank in order:
                order.extend(tree.children[rank])
            for ((start, count),) in loops:
                part = slice(start, start + count)
                for rank in reversed(order):
                    for child in tree.children[rank]:
                        self._tensors[rank][part] = add(dtype, self._tensors[rank][part], self._tensors[child][part])
                self.result[part] = self._tensors[root][part]
