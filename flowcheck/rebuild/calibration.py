"""How this machine places and updates best: measured when a node starts, remembered, overridden by a setting each.

Processors disagree about how payload should be fetched and stored (docs/understand/performance.md), and about the next
one nobody knows. So whoever captures from a live port measures the ways of parser/include/place.h for some 50 ms on
memory like its own, each protocol for itself, and the best is used by every engine of the process. updater/choosing.py
decides, remembers and reads the setting; updater/tuning.py asks it in the same way about the update.

    chosen = settle(mtu, huge)                     before engines run; says what is used from now on
    FLOWCHECK_PLACING=t0-whole@2048                everything this way, fetched 2048 payload bytes ahead
    FLOWCHECK_PLACING=ll=t0@4096,simple=none       these protocols so, the rest as without it
    FLOWCHECK_PLACING=default | measure            nothing measured, nor remembered | measured, whatever is remembered

    chosen = settle_updates()                      before replicas begin; FLOWCHECK_UPDATING is its setting
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import parser.place as place
from parser.machine import choose_placing

from flowcheck.errors import UserError
from parser.chunk_layout import Protocol
from updater import choosing, tuning
from updater.choosing import Choice, Measured, Question, SettingError, quickest
from updater.tuning import Tuning

__all__ = [
    "DEFAULT", "NAMES", "SETTING", "Ground", "Way", "calibrate", "look_at_updates", "question", "settle",
    "settle_updates",
]

SETTING = "FLOWCHECK_PLACING"
INSTRUCTIONS = "FLOWCHECK_SIMD"  # read by the kernels, which cannot refuse a name
INSTRUCTION_SETS = ("avx512", "avx2", "portable")
NAMES = {Protocol.LL: "ll", Protocol.LL128: "ll128", Protocol.SIMPLE: "simple"}
DISTANCES = (1024, 2048, 4096, 8192)
MOST_AHEAD = 1 << 20
MEMORY = 16 << 20  # each of the packets and of where they go: more pages than a processor has addresses at hand
SAMPLE = 256 << 10
ROUNDS = 9
MAP_HUGETLB = 0x40000


@dataclass(frozen=True, slots=True)
class Way:
    """One of parser.place.ways(), and how many payload bytes ahead it fetches."""

    name: str
    ahead: int

    def __str__(self) -> str:
        return self.name if self.name.startswith("none") else f"{self.name}@{self.ahead}"


DEFAULT = Way("t0", 4096)


def settle(
    mtu: int = 1024, huge: bool = False, *, measure: bool = True, recall: bool = True, remember: bool = True
) -> Choice[Way]:
    """Decide how packets are placed, and let every engine of this process do it: call before engines run.

    huge: packets lie in huge pages. measure: measure where nothing is remembered; else take the default then.
    recall, remember: as in choosing.settle. Raises UserError if the setting is not a setting.
    """

    def measured() -> Measured[Way]:
        with Ground(mtu, huge) as ground:
            ways = {NAMES[protocol]: way for protocol, way in calibrate(ground.seconds, mtu).items()}
            return Measured(ways, f"on {'huge' if ground.huge else 'normal'} pages", keep=ground.huge == huge)

    with _settings():
        choice = choosing.settle(
            question(mtu, huge), measured, measuring=measure, recall=recall, remember=remember
        )
    for protocol, name in NAMES.items():
        choose_placing(protocol, choice.ways[name].name, choice.ways[name].ahead)
    return choice


def settle_updates() -> Choice[Tuning]:
    """Decide how the replicas of this process are updated, once. Raises UserError if the setting is not a setting."""
    with _settings():
        return tuning.settled()


def look_at_updates(measure: bool, *, recall: bool = True) -> Choice[Tuning]:
    """What settle_updates would say: nothing is decided or remembered. measure: may it measure? recall: as in
    choosing.settle. Raises the same."""
    with _settings():
        return tuning.settle(measuring=measure, recall=recall, remember=False)


@contextmanager
def _settings() -> Iterator[None]:
    """Settings that are wrong, also that of the instructions, are the user's errors."""
    wanted = os.environ.get(INSTRUCTIONS, "")
    try:
        if wanted and wanted not in INSTRUCTION_SETS:
            remedy = "avx2 or portable for lesser ones than the processor has; unset it for the best"
            raise SettingError(f"{wanted!r} is not a set of instructions", INSTRUCTIONS, remedy)
        yield
    except SettingError as error:
        raise UserError(error.what, where=error.where, remedy=error.remedy) from None


def question(mtu: int, huge: bool) -> Question[Way]:
    pages = "huge" if huge else "normal"
    facts = {"version": place.version(), "pages": pages, "mtu": mtu}
    name = f"placing-{mtu}-{pages}"
    return Question(name, SETTING, tuple(NAMES.values()), DEFAULT, _parse, place.in_use(), facts)


def _parse(text: str) -> Way:
    name, at, ahead = text.partition("@")
    if name not in place.ways():
        remedy = f"default, measure or one of {', '.join(place.ways())}"
        raise SettingError(f"{name!r} is not a way of placing", SETTING, remedy)
    if at and not (ahead.isascii() and ahead.isdecimal() and len(ahead) <= 7 and 0 < int(ahead) <= MOST_AHEAD):
        remedy = f"payload bytes, 1 to {MOST_AHEAD}, as in t0@4096"
        raise SettingError(f"{ahead!r} is not a distance", SETTING, remedy)
    return Way(name, int(ahead) if at else DEFAULT.ahead)


# -- measuring ---------------------------------------------------------------------------------------------


Seconds = Callable[[Protocol, bool, Way], float]


def calibrate(seconds: Seconds, mtu: int) -> dict[Protocol, Way]:
    """The best way of each protocol. seconds(protocol, written, way): a short sample; written: until the bytes are in
    memory, which is what a way that stores through the cache leaves for later."""
    fetches = [name for name in place.ways() if not name.endswith("-regular")]
    distances = sorted({max(mtu, distance) for distance in DISTANCES})
    near_and_far = [Way(name, ahead) for name in fetches for ahead in dict.fromkeys((distances[0], DEFAULT.ahead))]
    candidates = [DEFAULT, *(way for way in near_and_far if way.name != "none" or way.ahead == DEFAULT.ahead)]
    best: dict[Protocol, Way] = {}
    for protocol in NAMES:
        read, written = partial(seconds, protocol, False), partial(seconds, protocol, True)
        way = quickest(candidates, read, ROUNDS)
        if way.name != "none":
            way = quickest([way, *(Way(way.name, distance) for distance in distances)], read, ROUNDS)
        best[protocol] = quickest([way, Way(f"{way.name}-regular", way.ahead)], written, ROUNDS)
    return best


class Ground:
    """Packets in memory and places for them, cold at each sample. Packets: headers, a payload of zeros (so flags are 0
    and right), in slots of whole cache lines, as a node's buffers hold them.

    huge: use huge pages for the packets; `huge` says afterwards whether there were enough. Places lie in ordinary
    memory, as an engine's arenas do."""

    def __init__(self, mtu: int, huge: bool) -> None:
        self.mtu = max(1024, mtu // 1024 * 1024)  # LL128 comes in pieces of 1024
        self._memory, self.huge = _pages(MEMORY, huge)
        source = np.frombuffer(self._memory, np.uint8)
        source[:] = 0
        self._target = np.full(MEMORY + 64, 0, np.uint8)
        self._to = np.uint64(self._target.ctypes.data + -self._target.ctypes.data % 64)
        slot = self.mtu + 128
        self._packets = MEMORY // slot
        first = source.ctypes.data + 54  # behind Ethernet, IPv4, UDP and BTH; pages begin on a cache line
        self._payloads = first + np.arange(self._packets - 1, dtype=np.uint64) * np.uint64(slot)
        self._order = np.random.default_rng(1).permutation(self._packets - 1).astype(np.uint64)
        self._flags = np.zeros(SAMPLE // self.mtu, np.uint64)
        self._next = 0

    def seconds(self, protocol: Protocol, written: bool, way: Way) -> float:
        """One sample: another stretch of packets each time, none of it in any cache."""
        n = self._flags.size
        if self._next + n > self._payloads.size:
            self._next = 0
        half = self.mtu // 2
        piece = {Protocol.LL: half, Protocol.LL128: self.mtu // 1024 * 960, Protocol.SIMPLE: self.mtu}[protocol]
        payloads = self._payloads[self._next : self._next + n]
        to = self._to + self._order[self._next : self._next + n] * np.uint64(piece)
        self._next += n
        ahead = max(1, way.ahead // self.mtu)
        place.flush(payloads, self.mtu)
        place.flush(to, piece)
        begin = time.perf_counter()
        place.sweep(place.in_use(), int(protocol), way.name, to, payloads, self._flags, self.mtu, ahead)
        if written:
            place.flush(to, piece)
        return time.perf_counter() - begin

    def __enter__(self) -> Ground:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()


def _pages(size: int, huge: bool) -> tuple[mmap.mmap, bool]:
    """Memory of its own, in huge pages if that is wanted and so many are free."""
    plain = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if huge:
        try:
            return mmap.mmap(-1, size, plain | MAP_HUGETLB), True
        except OSError:
            pass
    return mmap.mmap(-1, size, plain), False
