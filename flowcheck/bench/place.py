"""bench place: gradients into the arena, against a copy past the cache (limits.copy) of the same memory.

Both sides of a ratio are bytes read plus bytes written per second. The limit copies the packets' memory once; an LL
packet is read whole and written half, a SIMPLE one read and written whole.

    place.PROTOCOL.MTU          the engine: headers, flow, schedule, every flag, coverage, fence, and the bytes
    place.PROTOCOL.MTU.kernel   the bare kernel, packet by packet to places in random order
    place.PROTOCOL.MTU.icrc     the engine with the ICRC checked; here value and limit are times with and without
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from parser.machine import Engine

from flowcheck.bench import limits
from flowcheck.bench.rows import Row, alternate
from flowcheck.bench.traffic import Traffic, aligned, data_bytes, make
from parser.wire import Protocol

__all__ = ["run"]

TARGETS = {1024: 0.78, 4096: 0.80}
ICRC_TARGET = 1.3
FLOWS = 16
KERNEL_AHEAD = {1024: 4, 4096: 1}


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Three rows for every protocol and MTU."""
    rows = []
    for protocol in Protocol:
        for mtu, target in TARGETS.items():
            rows += _rows(protocol, mtu, target, rounds, ring_bytes)
    return rows


def _rows(protocol: Protocol, mtu: int, target: float, rounds: int, ring_bytes: int) -> list[Row]:
    traffic = make(protocol, mtu, FLOWS, ring_bytes, icrc=True)
    arena = aligned(traffic.frames.size)
    seconds = alternate(
        {
            "limit": _copy(traffic, arena),
            "engine": _engine(traffic, check_icrc=False),
            "kernel": _kernel(protocol, traffic, arena),
            "icrc": _engine(traffic, check_icrc=True),
        },
        rounds,
    )
    limit = [2e-9 * _whole(traffic) / s for s in seconds["limit"]]
    moved = 1e-9 * (traffic.wire_bytes + traffic.expected.size)
    name = f"place.{protocol.name.lower()}.{mtu}"
    per = {key: [1e9 * s / traffic.packets for s in seconds[key]] for key in ("engine", "icrc")}
    return [
        Row.of(name, "GB/s", [moved / s for s in seconds["engine"]], limit, target),
        Row.of(f"{name}.kernel", "GB/s", [moved / s for s in seconds["kernel"]], limit, target),
        Row.of(f"{name}.icrc", "ns/packet", per["icrc"], per["engine"], ICRC_TARGET),
    ]


def _whole(traffic: Traffic) -> int:
    return traffic.frames.size // 256 * 256


def _copy(traffic: Traffic, arena: NDArray[np.uint8]) -> Callable[[], float]:
    def measure() -> float:
        begin = time.perf_counter()
        limits.copy(arena.ctypes.data, traffic.frames.ctypes.data, _whole(traffic))
        return time.perf_counter() - begin

    return measure


def _kernel(protocol: Protocol, traffic: Traffic, arena: NDArray[np.uint8]) -> Callable[[], float]:
    """Every packet to a place of its own, in random order."""
    piece = data_bytes(protocol, traffic.mtu)
    to = arena.ctypes.data + np.random.default_rng(2).permutation(traffic.packets).astype(np.uint64) * np.uint64(piece)

    def measure() -> float:
        begin = time.perf_counter()
        wrong = limits.place(protocol, to, traffic.payloads, traffic.flags, traffic.mtu, KERNEL_AHEAD[traffic.mtu])
        seconds = time.perf_counter() - begin
        assert wrong == 0
        return seconds

    return measure


def _engine(traffic: Traffic, check_icrc: bool) -> Callable[[], float]:
    """A new engine each time, so that no cell is covered; its arena is touched before the clock starts."""
    config = replace(traffic.config, check_icrc=check_icrc)
    proven = False

    def measure() -> float:
        nonlocal proven
        machine = Engine(config)
        machine.region(0)[:] = 0
        traffic.ring.rewind()
        begin = time.perf_counter()
        done, blocked = machine.run(0, traffic.ring.address, traffic.packets)
        seconds = time.perf_counter() - begin
        assert not blocked and done == traffic.packets
        assert machine.outcomes(0)["placed"][0] == traffic.packets, machine.disagreements()
        if not proven:  # the bytes, once: a round should not read the arena more often than it must
            proven = bool((machine.region(0) == traffic.expected).all() and machine.cells(0).all())
            assert proven, "the engine placed other bytes than were sent"
        return seconds

    return measure
