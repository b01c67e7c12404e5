"""bench streams: what a packet costs when the packets come over N streams, against all of them over one.

Sixteen flows in LL messages, packets of 1 KB, all to be placed; each stream brings its own flows, and no packet comes
twice. ArenaScheduler.poll() takes a batch of every stream in turn. The limit is an engine of one stream that is given
the same packets in exactly that order: same loads, same places, so that nothing differs but the number of streams.

    streams.N         ns per packet, N of 1, 2, 4, 8, 16; at 1 both sides are the same, which shows the noise
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from parser.machine import Engine

from flowcheck.rebuild.iteration.scheduler import BATCH, ArenaScheduler
from lab.bench.limits import PacketRing
from lab.bench.rows import Row, alternate
from lab.bench.workload import Traffic, make
from parser.chunk_layout import Protocol

__all__ = ["run", "shares"]

COUNTS = (1, 2, 4, 8, 16)
FLOWS = 16
MTU = 1024
TARGETS = {8: 1.05}


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """One row per number of streams, over half of `ring_bytes`."""
    traffic = make(Protocol.LL, MTU, FLOWS, ring_bytes // 2)
    contenders: dict[str, Callable[[], float]] = {}
    for count in COUNTS:
        parts = shares(traffic.packets, FLOWS, count)
        contenders[f"{count}"] = _over(traffic, parts)
        contenders[f"{count} in one"] = _over(traffic, [in_turn(parts, BATCH)])
    seconds = alternate(contenders, rounds)
    per = {name: [1e9 * s / traffic.packets for s in taken] for name, taken in seconds.items()}
    return [
        Row.of(f"streams.{count}", "ns/packet", per[f"{count}"], per[f"{count} in one"], TARGETS.get(count))
        for count in COUNTS
    ]


def shares(packets: int, flows: int, streams: int) -> list[NDArray[np.uint32]]:
    """The packets of each stream, in order. Packet i is of flow i modulo `flows`, a flow of one stream only."""
    numbers = np.arange(packets, dtype=np.uint32)
    return [numbers[numbers % flows % streams == stream] for stream in range(streams)]


def in_turn(parts: Sequence[NDArray[np.uint32]], batch: int) -> NDArray[np.uint32]:
    """A batch of every part in turn, until all are used up."""
    longest = max(len(part) for part in parts)
    return np.concatenate([part[at : at + batch] for at in range(0, longest, batch) for part in parts])


@dataclass(frozen=True)
class _Source:
    """Of one stream (flowcheck.rebuild.iteration.scheduler.Source)."""

    ring: PacketRing
    error: Exception | None = None

    @property
    def ring_address(self) -> int:
        return int(self.ring.address)


def _over(traffic: Traffic, parts: Sequence[NDArray[np.uint32]]) -> Callable[[], float]:
    """A contender: a new engine with a stream per part; its arena is touched before the clock starts."""
    config = replace(traffic.config, streams=len(parts))
    rings = [PacketRing(traffic.addresses[part], traffic.lengths[part]) for part in parts]
    proven = False

    def measure() -> float:
        nonlocal proven
        engine = Engine(config)
        engine.region(0)[:] = 0
        for ring in rings:
            ring.rewind()
        streams = ArenaScheduler(engine, [_Source(ring) for ring in rings], (-1, -1))
        begin = time.perf_counter()
        while streams.poll():
            pass
        seconds = time.perf_counter() - begin
        assert streams.consumed == traffic.packets
        placed = sum(engine.outcomes(stream)["placed"][0] for stream in range(len(parts)))
        assert placed == traffic.packets, engine.disagreements()
        if not proven:
            proven = bool((engine.region(0) == traffic.expected).all() and engine.cells(0).all())
            assert proven, "the engine placed other bytes than were sent"
        return seconds

    return measure
