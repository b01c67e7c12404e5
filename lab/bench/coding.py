"""bench protect: parity of streams of bytes, as versions are protected (flowcheck/checkpoint/coding/), on one thread.

    protect.encode.K+M           GB/s of bytes read and written for M streams of parity of K streams of data, against
                                 the limit: the longer of copying as many bytes (non-temporal) and of reading the data
    protect.encode.K+M.isal      the same by isa-l, against the same limit
    protect.decode.K+M           M lost streams of data from the rest

Each stream is an eighth of the bytes that the bench is given, and lies where no cache holds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from flowcheck.checkpoint.coding import galois
from flowcheck.checkpoint.coding.code import Code
from lab.bench import roof
from lab.bench.limits import copy
from lab.bench.rows import Row, alternate, here, timed
from lab.bench.workload import aligned

__all__ = ["run"]

SHAPES = ((2, 1), (2, 2), (4, 1), (4, 2), (6, 2), (8, 2), (8, 3))
TARGETS = {1: 0.70, 2: 0.85, 3: 0.85}


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Rows of every shape, in streams of `ring_bytes` / 8."""
    length = ring_bytes // 8 // 512 * 512
    most = max(k + m for k, m in SHAPES)
    memory = aligned(most * length).reshape(most, length)
    memory[:] = np.random.default_rng(1).integers(0, 256, (most, length), np.uint8)
    rows = []
    for k, m in SHAPES:
        rows += _shape(Code(k, m), memory, rounds)
    return rows


def _shape(code: Code, memory: np.ndarray, rounds: int) -> list[Row]:
    k, m, length = code.data, code.parity, memory.shape[1]
    streams = [memoryview(row) for row in memory]
    data, parity = streams[:k], streams[k : k + m]
    encoding = b"".join(code.row(k + i) for i in range(m))
    gone = list(range(min(k, m)))
    there = [number for number in range(k + m) if number not in gone][:k]
    decoding = code.coefficients(there, gone)

    def work(coefficients: bytes, numbers: list[int], out: list[memoryview], kernel: str = "") -> Callable[[], float]:
        given = [(data + parity)[number] for number in numbers]
        return timed(lambda: galois.combine(coefficients, given, out, kernel))

    spare = streams[k + m : k + m + len(gone)]
    every = list(range(k))
    contenders = {
        "encode": work(encoding, every, parity), "isal": work(encoding, every, parity, "isal"),
        "copy": _copy(memory, (k + m) * length // 2),
        "read": timed(lambda: roof.read(memory.ctypes.data, k * length) < 0),
    }
    if m > 1 and len(spare) == len(gone):
        contenders["decode"] = work(decoding, there, spare)
    seconds = alternate(contenders, rounds)
    limit = [max(pair) for pair in zip(seconds.pop("copy"), seconds.pop("read"), strict=True)]
    moved = 1e-9 * (k + m) * length
    speeds = {name: [moved / one for one in taken] for name, taken in seconds.items()}
    limits = [moved / one for one in limit]
    setting = here(code=galois.kernels()[0])
    names = {"encode": (f"protect.encode.{k}+{m}", TARGETS[m]), "isal": (f"protect.encode.{k}+{m}.isal", None),
             "decode": (f"protect.decode.{k}+{m}", TARGETS[m])}
    return [Row.of(names[name][0], "GB/s", values, limits, names[name][1], setting) for name, values in speeds.items()]


def _copy(memory: np.ndarray, nbytes: int) -> Callable[[], float]:
    """So many bytes from the first half of all streams to the second, as often as it takes."""
    half = memory.nbytes // 2 // 256 * 256
    begin = memory.ctypes.data
    pieces = [half] * (nbytes // half) + [nbytes % half // 256 * 256]

    def work() -> None:
        for size in itertools.filterfalse(lambda one: not one, pieces):
            copy(begin + half // 64 * 64, begin, size)

    return timed(work)
