"""Memory traffic of an update out of place, in place, and of the copy before it: decision 0004.

    .venv/bin/python -P benchmarks/in_place.py [ROUNDS]

ns per parameter, median over alternating rounds, and the median ratio to out of place on one thread. 20 million
parameters, fp32: seven arrays of 80 MB.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from lab.bench import roof
from lab.bench.rows import alternate
from lab.bench.workload import aligned
from updater import kernels

COUNT = 20_000_000 // 32 * 32


def array() -> int:
    """Address of one array. It stays for good."""
    tensor = torch.from_numpy(aligned(4 * COUNT).view(np.float32)).fill_(1.0)
    KEPT.append(tensor)
    return tensor.data_ptr()


KEPT: list[torch.Tensor] = []
GRADIENT, NOW, NEXT = array(), [array() for _ in range(3)], [array() for _ in range(3)]


def step(to_copy: bool, part: int = 0, parts: int = 1) -> None:
    """The traffic of Adam: NOW to NEXT, or NEXT to itself, of one part of the parameters."""
    at = 4 * COUNT // parts * part
    source, target = ([a + at for a in arrays] for arrays in (NEXT if to_copy else NOW, NEXT))
    roof.adam(GRADIENT + at, False, tuple(source), tuple(target), COUNT // parts)


def copy() -> None:
    for source, target in zip(NOW, NEXT, strict=True):
        kernels.copy(target, source, 4 * COUNT)


def timed(*work: Callable[[], None]) -> Callable[[], float]:
    """Seconds until all of it is done, each on a thread of its own."""

    def measure() -> float:
        others = [threading.Thread(target=one) for one in work[1:]]
        begin = time.perf_counter()
        for other in others:
            other.start()
        work[0]()
        for other in others:
            other.join()
        return time.perf_counter() - begin

    return measure


def main() -> None:
    seconds = alternate({
        "out of place, 1 thread": timed(lambda: step(False)),
        "in place, 1 thread": timed(lambda: step(True)),
        "copy, 1 thread": timed(copy),
        "out of place, 2 threads": timed(lambda: step(False, 0, 2), lambda: step(False, 1, 2)),
        "in place, 2 threads": timed(lambda: step(True, 0, 2), lambda: step(True, 1, 2)),
        "in place, beside a copy": timed(lambda: step(True), copy),
    }, int(sys.argv[1]) if len(sys.argv) > 1 else 21)
    first = seconds["out of place, 1 thread"]
    for name, taken in seconds.items():
        ratio = statistics.median(one / other for one, other in zip(taken, first, strict=True))
        print(f"{name:24}  {1e9 * statistics.median(taken) / COUNT:6.3f} ns  {ratio:5.2f}")


main()
