"""How long a node's stages take together, where cores or memory are fewer than the stages want: no printing.

    seconds = together(Load(receive, place, update, parts=8, pace=0.2, ring=0.06, watchers=1), cores=2, copy_gbs=None)

Three stages work at the same time: packets are received, each is placed as soon as it has been received, and a part
(a bucket) is updated when all of it is placed. A thread for each group watches meanwhile, and looks again as soon as
anything has moved: it wants a core until all is placed. Where threads want more cores than there are, each gets the
same part of one, and one that wants less leaves the rest to the others (the kernel's fair scheduler). Where they move
more bytes per second than the memory carries, all go slower by one factor, and keep their cores.

With enough of both it is the makespan of a flow shop of equal jobs. Packets are continuous here, threads of a stage
share it evenly, and nothing is lost by changing between threads. Of many parts MOST_PARTS are followed one by one: the
rest of the time is linear in the length of a part. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

__all__ = ["Load", "Stage", "together"]

HALVINGS = 48  # of what is looked for; a double has 53 bits
CLOSE = 1e-12  # of an iteration: as good as there
MOST_PARTS = 64


@dataclass(frozen=True)
class Stage:
    """seconds: of one core, for an iteration. threads: among which they are shared. nbytes: read and written."""

    seconds: float
    threads: int
    nbytes: float = 0.0


@dataclass(frozen=True)
class Load:
    """An iteration. parts: buckets. pace: seconds in which its packets come at the least. ring: packets that may wait
    to be placed, as a part of the iteration's; receiving waits where they do. watchers: threads that look on."""

    receive: Stage
    place: Stage
    update: Stage
    parts: int
    pace: float
    ring: float
    watchers: int

    @property
    def seconds(self) -> float:
        """Of one core, all stages together; without watchers."""
        return self.receive.seconds + self.place.seconds + self.update.seconds

    @property
    def nbytes(self) -> float:
        """Read and written by all stages."""
        return self.receive.nbytes + self.place.nbytes + self.update.nbytes


@dataclass(frozen=True)
class _Doing:
    """What each stage does. waits: receiving, for room in the ring. follows: placing, what has just been received."""

    receiving: bool
    waits: bool
    placing: bool
    follows: bool
    updating: bool


@dataclass(frozen=True)
class _Rates:
    """Parts of an iteration per second, and what that takes: cores, bytes per second."""

    receive: float
    place: float
    update: float
    cores: float
    nbytes: float


def together(load: Load, cores: float | None, copy_gbs: float | None) -> float:
    """Seconds from the first packet to the last part's update. None: as many cores, as fast a memory, as is wanted."""
    have = math.inf if cores is None else cores, math.inf if copy_gbs is None else 1e9 * copy_gbs
    if load.parts <= MOST_PARTS:
        return _seconds(load, *have)
    few, many = (_seconds(replace(load, parts=parts), *have) for parts in (MOST_PARTS // 2, MOST_PARTS))
    return many - (few - many) * (1 - MOST_PARTS / load.parts)


def _seconds(load: Load, cores: float, nbytes: float) -> float:
    received = placed = seconds = 0.0
    updated = 0.0  # of an iteration, as the others
    known: dict[_Doing, _Rates] = {}
    while updated < 1 - CLOSE:
        ready = math.floor(placed * load.parts + CLOSE) / load.parts
        doing = _Doing(
            received < 1, received - placed >= load.ring - CLOSE, placed < 1, received - placed <= CLOSE,
            updated < ready - CLOSE,
        )
        if doing not in known:
            known[doing] = _rates(load, doing, cores, nbytes)
        rates = known[doing]
        step = min(_ends(load, (received, placed, updated), ready, doing, rates))
        seconds += step
        received, placed, updated = (
            1.0 if done + rate * step >= 1 - CLOSE else done + rate * step
            for done, rate in ((received, rates.receive), (placed, rates.place), (updated, rates.update))
        )
    return seconds


def _ends(
    load: Load, at: tuple[float, float, float], ready: float, doing: _Doing, rates: _Rates
) -> Iterator[float]:
    """Seconds after which something else is done than now."""
    received, placed, updated = at
    if doing.receiving:
        yield (1 - received) / rates.receive
    if doing.placing:
        yield (1 - placed) / rates.place
        closing = rates.place - rates.receive
        if closing > 0 and not doing.follows:
            yield (received - placed) / closing
        if closing < 0 and not doing.waits:
            yield (load.ring - received + placed) / -closing
        if not doing.updating:
            yield (ready + 1 / load.parts - placed) / rates.place
    if doing.updating:
        yield (ready - updated) / rates.update


def _rates(load: Load, doing: _Doing, cores: float, nbytes: float) -> _Rates:
    """At full speed, or with as much of a core for each thread, and then at such a speed, as do."""

    def at_speed(speed: float) -> _Rates:
        def at_share(share: float) -> _Rates:
            return _running(load, doing, share, speed)

        return at_share(_most(lambda share: at_share(share).cores <= cores))

    return at_speed(_most(lambda speed: at_speed(speed).nbytes <= nbytes))


def _most(holds: Callable[[float], bool]) -> float:
    """The largest number up to 1 with which this holds; it holds below it."""
    if holds(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low or high


def _running(load: Load, doing: _Doing, share: float, speed: float) -> _Rates:
    """Each thread has this share of a core, unless it wants less, and is slowed to this speed by the memory."""

    def full(stage: Stage) -> float:
        return stage.threads * share * speed / stage.seconds

    place = full(load.place) if doing.placing else 0.0
    receive = min(1 / load.pace, full(load.receive)) if doing.receiving else 0.0
    if doing.receiving and doing.waits:
        receive = min(receive, place)
    elif doing.receiving and doing.follows:
        place = min(place, receive)
    update = full(load.update) if doing.updating else 0.0
    stages = ((receive, load.receive), (place, load.place), (update, load.update))
    watching = share * load.watchers if doing.placing else 0.0
    return _Rates(
        receive, place, update, watching + sum(rate * stage.seconds / speed for rate, stage in stages),
        sum(rate * stage.nbytes for rate, stage in stages),
    )
