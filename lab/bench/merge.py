"""bench merge: three mirrors of the same traffic into one arena, against one of them alone.

The first copy of every byte is placed, the second and the third are compared with it, all of it: that is what a node
with three mirrored ports does. Each mirror has packets of its own in memory; they take turns, a batch of each, and all
ICRCs are checked. The limit is an engine with one stream that is given them once. A ratio of three says that a copy
costs no more to compare than to place.

    merge.PROTOCOL.MTU         ns for a packet and its two copies
    merge.PROTOCOL.MTU.bare    the same without ICRCs, only reported
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from parser.machine import Engine

from flowcheck.rebuild.iteration.scheduler import BATCH
from lab.bench.limits import PacketRing
from lab.bench.rows import Row, alternate
from lab.bench.workload import Traffic, aligned, make
from parser.chunk_layout import Protocol

__all__ = ["run"]

FLOWS = 16
MTUS = (1024, 4096)
MIRRORS = 3
TARGET = 3.0


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Rows for every protocol and MTU, over a quarter of `ring_bytes`."""
    return [row for mtu in MTUS for protocol in Protocol for row in _rows(protocol, mtu, rounds, ring_bytes // 4)]


def _rows(protocol: Protocol, mtu: int, rounds: int, ring_bytes: int) -> list[Row]:
    traffic = make(protocol, mtu, FLOWS, ring_bytes, icrc=True)
    seconds = alternate({
        f"{streams}.{icrc}": _over(traffic, streams, icrc) for streams in (1, MIRRORS) for icrc in (True, False)
    }, rounds)
    per = {name: [1e9 * s / traffic.packets for s in taken] for name, taken in seconds.items()}
    title = f"merge.{protocol.name.lower()}.{mtu}"
    return [
        Row.of(title, "ns/packet", per[f"{MIRRORS}.True"], per["1.True"], TARGET),
        Row.of(f"{title}.bare", "ns/packet", per[f"{MIRRORS}.False"], per["1.False"], None),
    ]


def _over(traffic: Traffic, streams: int, icrc: bool) -> Callable[[], float]:
    """A contender: a new engine that is given all packets by each stream; its arena is touched before the clock."""
    config = replace(traffic.config, streams=streams, check_icrc=icrc)
    frames = [traffic.frames, *(aligned(traffic.frames.size) for _ in range(streams - 1))]
    for copy in frames[1:]:
        copy[:] = traffic.frames.reshape(-1)
    first = np.uint64(traffic.frames.ctypes.data)
    rings = [PacketRing(traffic.addresses - first + np.uint64(of.ctypes.data), traffic.lengths) for of in frames]
    proven = False

    def measure() -> float:
        nonlocal proven
        engine = Engine(config)
        engine.region(0)[:] = 0
        assert len(frames) == len(rings)  # the rings have addresses in them
        for ring in rings:
            ring.rewind()
        moved = True
        begin = time.perf_counter()
        while moved:
            moved = False
            for stream, ring in enumerate(rings):
                moved |= engine.run(stream, ring.address, BATCH)[0] > 0
        seconds = time.perf_counter() - begin
        counts = [engine.outcomes(stream) for stream in range(streams)]
        assert counts[0]["placed"][0] == traffic.packets, engine.disagreements()
        assert all(count["compared"][0] == traffic.packets for count in counts[1:])
        if not proven:
            proven = bool((engine.region(0) == traffic.expected).all() and engine.cells(0).all())
            proven &= engine.copies(0) == (0, 0, (streams - 1) * traffic.expected.size)
            assert proven, "the engine placed other bytes than were sent, or compared others than it placed"
        return seconds

    return measure
