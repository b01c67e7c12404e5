"""bench place: gradients into the arena, against a roof of the same traffic (limits.traffic).

The roof loads every cache line of the same payloads, in the same order, and stores every line of the same places, past
the cache; it does nothing else. It is taken at four prefetch distances in every round, the best of which counts. Both
sides of a ratio are bytes read plus bytes written per second: an LL packet is read whole and written half, a SIMPLE one
read and written whole.

    place.PROTOCOL.MTU          the engine: headers, flow, schedule, every flag, coverage, fence, and the bytes
    place.PROTOCOL.MTU.kernel   the bare kernel, packet by packet to places in random order; its roof has that order
    place.PROTOCOL.MTU.again    the engine, the same packets once more over a second stream, BEHIND packets after the
                                first: nothing is placed, all is compared with what is there. Its limit is the first
                                time, only reported
    place.PROTOCOL.MTU.4flows, .4flows.again    the same two where four flows take turns and not 16, beside those
    place.PROTOCOL.MTU.roof     that roof, beside a plain copy of the packets' memory past the cache: only reported
    place.PROTOCOL.MTU.icrc     what the ICRC adds to the engine, beside isa-l's time for the same bytes in the nearest
                                cache; .icrc.NAME: by a lesser way to compute it that this processor has,
                                only reported, as isa-l's takes the best

How this machine places is measured first, as a node does when it starts, and is part of every row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import parser.place as kernels
from numpy.typing import NDArray
from parser.machine import Engine, choose_icrc, icrc_kernels

from flowcheck.rebuild.calibration import NAMES, Way, settle
from lab.bench import limits
from lab.bench.limits import PacketRing
from lab.bench.rows import Row, alternate, here, timed
from lab.bench.workload import Traffic, aligned, data_bytes, make
from parser.chunk_layout import Protocol

__all__ = ["FLOWS", "engine", "run"]

ENGINE_TARGETS = {1024: 0.82, 4096: 0.90}
KERNEL_TARGETS = {Protocol.LL: 0.95, Protocol.LL128: 0.92, Protocol.SIMPLE: 0.95}
ICRC_TARGET = 1.2
FLOWS, FEW = 16, 4
#: A ring's packets leave a port a few steps after they have come to it: 8 slots of 512 KB, or fewer (nccl-wire 1.5).
BEHIND = 2048
ROOF_AHEAD = {1024: (0, 2, 4, 8), 4096: (0, 1, 2, 4)}
LRH, ETHERNET, ICRC = 8, 14, 4

Addresses = NDArray[np.uint64]


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Rows for every protocol and MTU."""
    rows = []
    for mtu in ENGINE_TARGETS:
        ways = settle(mtu, recall=False, remember=False).ways
        for protocol in Protocol:
            rows += _rows(protocol, mtu, ways[NAMES[protocol]], rounds, ring_bytes)
    return rows


def _rows(protocol: Protocol, mtu: int, way: Way, rounds: int, ring_bytes: int) -> list[Row]:
    traffic, few = (make(protocol, mtu, flows, ring_bytes, icrc=True) for flows in (FLOWS, FEW))
    arena = aligned(traffic.frames.size)
    number, piece = np.arange(traffic.packets, dtype=np.uint64), np.uint64(data_bytes(protocol, mtu))
    each = np.uint64(traffic.packets // FLOWS)
    base = np.uint64(arena.ctypes.data)
    # the engine's places are the same in its own arena: every flow has an equal part
    in_turns = base + (number % np.uint64(FLOWS) * each + number // np.uint64(FLOWS)) * piece
    at_random = base + np.random.default_rng(2).permutation(number) * piece
    icrcs, best = icrc_kernels(), icrc_kernels()[0]
    contenders: dict[str, Callable[[], float]] = {
        "copy": _copy(traffic, arena),
        "engine": engine(traffic, None),
        "kernel": _kernel(protocol, way, traffic, at_random),
        "isal": _isal(traffic), "again": engine(traffic, None, again=True),
        "few": engine(few, None), "few.again": engine(few, None, again=True),
    }
    for ahead in ROOF_AHEAD[mtu]:
        contenders[f"engine.roof.{ahead}"] = _roof(traffic, in_turns, int(piece), ahead)
        contenders[f"kernel.roof.{ahead}"] = _roof(traffic, at_random, int(piece), ahead)
    for name in icrcs:
        contenders[f"icrc.{name}"] = engine(traffic, name)
    seconds = alternate(contenders, rounds)
    moved, of_few = (1e-9 * (one.wire_bytes + one.expected.size) for one in (traffic, few))
    rate = {
        name: [(of_few if name.startswith("few") else moved) / s for s in taken] for name, taken in seconds.items()
    }
    rate["copy"] = [2e-9 * _whole(traffic) / s for s in seconds["copy"]]
    roof = {
        name: [max(of) for of in zip(*(rate[f"{name}.roof.{ahead}"] for ahead in ROOF_AHEAD[mtu]), strict=True)]
        for name in ("engine", "kernel")
    }
    per = {name: [1e9 * s / traffic.packets for s in seconds[name]] for name in seconds}
    title = f"place.{protocol.name.lower()}.{mtu}"
    rows = [
        Row.of(title, "GB/s", rate["engine"], roof["engine"], ENGINE_TARGETS[mtu]),
        Row.of(f"{title}.again", "GB/s", rate["again"], rate["engine"], None),
        Row.of(f"{title}.4flows", "GB/s", rate["few"], rate["engine"], None),
        Row.of(f"{title}.4flows.again", "GB/s", rate["few.again"], rate["again"], None),
        Row.of(f"{title}.kernel", "GB/s", rate["kernel"], roof["kernel"], KERNEL_TARGETS[protocol]),
        Row.of(f"{title}.roof", "GB/s", roof["kernel"], rate["copy"], None),
    ]
    for name in icrcs:
        added = [with_it - without for with_it, without in zip(per[f"icrc.{name}"], per["engine"], strict=True)]
        whole = f"{title}.icrc" if name == best else f"{title}.icrc.{name}"
        target = ICRC_TARGET if name == best else None
        rows.append(Row.of(whole, "ns/packet", added, per["isal"], target, here(icrc=name)))
    return rows


def _whole(traffic: Traffic) -> int:
    return traffic.frames.size // 256 * 256


def _copy(traffic: Traffic, arena: NDArray[np.uint8]) -> Callable[[], float]:
    return timed(lambda: limits.copy(arena.ctypes.data, traffic.frames.ctypes.data, _whole(traffic)))


def _roof(traffic: Traffic, to: Addresses, piece: int, ahead: int) -> Callable[[], float]:
    assert not (to % np.uint64(64)).any()
    return timed(lambda: limits.traffic(to, traffic.payloads, traffic.mtu, piece, ahead))


def _kernel(protocol: Protocol, way: Way, traffic: Traffic, to: Addresses) -> Callable[[], float]:
    """Every packet to a place of its own."""
    ahead, name = max(1, way.ahead // traffic.mtu), kernels.in_use()
    return timed(
        lambda: kernels.sweep(name, int(protocol), way.name, to, traffic.payloads, traffic.flags, traffic.mtu, ahead)
    )


def _isal(traffic: Traffic) -> Callable[[], float]:
    """As many bytes as the ICRC of a MIDDLE packet is of: the LRH's ones, then all behind Ethernet but itself."""
    length = int(traffic.payloads[-FLOWS - 1] - traffic.frames[-FLOWS - 1].ctypes.data) + traffic.mtu + ICRC
    data = np.random.default_rng(3).integers(0, 256, LRH + length - ETHERNET - ICRC, dtype=np.uint8)

    return timed(lambda: limits.crc_hot(data, traffic.packets) is None)


def engine(traffic: Traffic, icrc: str | None, again: bool = False) -> Callable[[], float]:
    """A new engine each time, so that no cell is covered; its arena is touched before the clock starts. icrc: how it is
    computed, None: not. again: the second copy of every packet is timed, and not the first."""
    config = replace(traffic.config, check_icrc=icrc is not None, streams=1 + again)
    rings = [traffic.ring, *(PacketRing(traffic.addresses, traffic.lengths) for _ in range(again))]
    turn = BEHIND if again else traffic.packets
    proven = False

    def measure() -> float:
        nonlocal proven
        choose_icrc(icrc or icrc_kernels()[0])
        machine = Engine(config)
        machine.region(0)[:] = 0
        seconds = [0.0] * len(rings)
        for ring in rings:
            ring.rewind()
        for begun in range(0, traffic.packets, turn):
            most = min(turn, traffic.packets - begun)
            for stream, ring in enumerate(rings):
                seconds[stream] += _run(machine, stream, ring, most)
        for stream, outcome in enumerate(("placed", "compared")[: len(rings)]):
            assert machine.outcomes(stream)[outcome][0] == traffic.packets, machine.disagreements()
        if not proven:  # the bytes, once: a round should not read the arena more often than it must
            proven = bool((machine.region(0) == traffic.expected).all() and machine.cells(0).all())
            assert proven, "the engine placed other bytes than were sent"
        return seconds[-1]

    return measure


def _run(machine: Engine, stream: int, ring: PacketRing, packets: int) -> float:
    """Seconds of so many packets of a stream."""
    begin = time.perf_counter()
    done, blocked = machine.run(stream, ring.address, packets)
    seconds = time.perf_counter() - begin
    assert not blocked and done == packets
    return seconds
