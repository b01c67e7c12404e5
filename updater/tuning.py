"""How the update kernels run best on this processor's memory: vectors stored in a row, and bytes fetched ahead.

No choice changes a bit (tests/updater/test_kernels.py), and none suits all: on AMD Zen 5 eight vectors between the
stores of two arrays are best; on Intel Cascade Lake they cost 20 % against two with a fetch 1 KiB ahead.

`measure` times the contenders in turns, each on memory that no cache holds any more; `pick` is pure; `chosen` is what
replicas take: once per process, when the first one begins.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from updater import kernels

__all__ = ["CHOICES", "Tuning", "chosen", "measure", "pick"]


class Tuning(NamedTuple):
    """together: vectors of an array stored in a row. ahead: bytes by which every array is fetched ahead."""

    together: int
    ahead: int

    def __str__(self) -> str:
        return f"{self.together} vectors, {f'{self.ahead} bytes ahead' if self.ahead else 'nothing fetched'}"


#: The first is taken unless another one is faster by more than MARGIN.
CHOICES = (Tuning(8, 0), Tuning(4, 0), Tuning(2, 0), Tuning(2, 1024), Tuning(8, 1024))
MARGIN = 0.05  # less is noise
PIECE = 1 << 16  # parameters that one contender updates at a time: 1.8 MB of memory
PIECES = 28  # 51 MB, so that no cache holds what was used so many pieces ago


@functools.cache
def chosen() -> Tuning:
    return pick(measure())


def pick(seconds: Mapping[Tuning, Sequence[float]]) -> Tuning:
    """From the samples of alternating rounds: seconds[c][i] are of round i. The first choice unless it is beaten."""
    medians = {choice: statistics.median(taken) for choice, taken in seconds.items()}
    first = next(iter(seconds))
    best = min(medians, key=medians.__getitem__)
    return best if medians[best] < (1 - MARGIN) * medians[first] else first


def measure(rounds: int = 9, kernel: str = "") -> dict[Tuning, list[float]]:
    """Seconds that each of CHOICES takes for a piece of Adam's update, by rounds; some 20 ms in all."""
    memory = torch.empty(7 * PIECE * PIECES + 16).fill_(1.0)  # touched: pages of zeros would be one page in the cache
    base = memory.data_ptr() + -memory.data_ptr() % 64
    rule = kernels.Rule(order="torch-cpu-fused", beta1=0.9, w1=0.1, beta2=0.99, omb2=0.01, eps=1e-8, step=-1e-3)
    pools = {choice: kernels.Pool(0, kernel, *choice) for choice in CHOICES}
    found: dict[Tuning, list[float]] = {choice: [] for choice in CHOICES}
    turn = 0
    for number in range(rounds):
        for choice in CHOICES if number % 2 else reversed(CHOICES):
            g, p, m, v, *after = (base + 4 * PIECE * (array * PIECES + turn % PIECES) for array in range(7))
            turn += 1
            begin = time.perf_counter()
            pools[choice].submit([rule], [(0, PIECE, g, p, m, v, 0, *after, 0, 0, 0)])
            found[choice].append(time.perf_counter() - begin)
    return found
