"""How the update kernels run best on this processor's memory: vectors stored in a row, and bytes fetched ahead.

No choice changes a bit (tests/updater/test_kernels.py), and none suits all: on AMD Zen 5 eight vectors between the
stores of two arrays are best; on Intel Cascade Lake they cost 20 % against two with a fetch 1 KiB ahead.

`settled` is what the replicas of this process take, decided once, when the first one begins or a node starts:
updater/choosing.py has the rule, the cache file and the setting. `settle` decides again, for who only wants to know.

    FLOWCHECK_UPDATING=2-vectors@1024        two vectors of an array in a row, every array fetched 1024 bytes ahead
    FLOWCHECK_UPDATING=8-vectors             eight, nothing fetched
    FLOWCHECK_UPDATING=default | measure     the same | measured, whatever is remembered
"""

from __future__ import annotations

import functools
import re
import time
from typing import NamedTuple

import torch

from updater import choosing, kernels
from updater.choosing import Choice, Measured, Question, SettingError, quickest

__all__ = ["CHOICES", "PART", "SETTING", "Ground", "Tuning", "chosen", "question", "settle", "settled"]

SETTING = "FLOWCHECK_UPDATING"
VERSION = 1  # to be raised when a kernel moves memory in another way: what was measured before is worth nothing
PART = "update"
PIECE = 1 << 16  # parameters that one contender updates at a time: 1.8 MB of memory
PIECES = 28  # 51 MB, so that no cache holds what was used so many pieces ago
ROUNDS = 25  # of some 50 us for each choice
MOST_AHEAD = 1 << 16


class Tuning(NamedTuple):
    """together: vectors of an array stored in a row. ahead: bytes by which every array is fetched ahead."""

    together: int
    ahead: int

    def __str__(self) -> str:
        return f"{self.together}-vectors" + (f"@{self.ahead}" if self.ahead else "")


#: Those that are measured. The first is the default.
CHOICES = (Tuning(8, 0), Tuning(4, 0), Tuning(2, 0), Tuning(2, 1024), Tuning(8, 1024))


@functools.cache
def settled() -> Choice[Tuning]:
    """What this process does. Raises SettingError."""
    return settle()


def chosen() -> Tuning:
    return settled().ways[PART]


def settle(*, measuring: bool = True, recall: bool = True, remember: bool = True) -> Choice[Tuning]:
    """Decide, for nobody but the caller; the options are those of choosing.settle."""
    return choosing.settle(question(), _measure, measuring=measuring, recall=recall, remember=remember)


def question() -> Question[Tuning]:
    return Question("updating", SETTING, (PART,), CHOICES[0], _parse, kernels.in_use(), {"version": VERSION})


def _parse(text: str) -> Tuning:
    found = re.fullmatch(r"([0-9]{1,2})-vectors(?:@([0-9]{1,6}))?", text)
    tuning = Tuning(int(found[1]), int(found[2] or 0)) if found else None
    if tuning is None or tuning.together not in kernels.TOGETHER or tuning.ahead > MOST_AHEAD:
        remedy = f"default, measure or {', '.join(map(str, CHOICES))}; 1, 2, 4 or 8 vectors, at most @{MOST_AHEAD}"
        raise SettingError(f"{text!r} is not a way of updating", SETTING, remedy)
    return tuning


def _measure() -> Measured[Tuning]:
    return Measured({PART: quickest(CHOICES, Ground().seconds, ROUNDS)}, "on normal pages")


class Ground:
    """Memory for samples, none of it in any cache when its turn comes. kernel: of kernels.names(), "" the best."""

    def __init__(self, kernel: str = "") -> None:
        self._memory = torch.empty(7 * PIECE * PIECES + 16)
        self._memory.fill_(1.0)  # touched: pages of zeros would be one page in the cache
        self._base = self._memory.data_ptr() + -self._memory.data_ptr() % 64
        self._turn = 0
        self._pool = functools.cache(lambda choice: kernels.Pool(0, kernel, *choice))
        self._rule = kernels.Rule(
            order="torch-cpu-fused", beta1=0.9, w1=0.1, beta2=0.99, omb2=0.01, eps=1e-8, step=-1e-3,
        )

    def seconds(self, choice: Tuning) -> float:
        """One sample: another piece each time."""
        pool = self._pool(choice)
        g, p, m, v, *after = (self._base + 4 * PIECE * (array * PIECES + self._turn % PIECES) for array in range(7))
        self._turn += 1
        begin = time.perf_counter()
        pool.submit([self._rule], [(0, PIECE, g, p, m, v, 0, *after, 0, 0, 0)])
        return time.perf_counter() - begin
