"""bench parse: what a packet costs that carries nothing to keep, against the least a parser can do with it.

Same packets, same ring, alternating. The engine decides from its schedule that they are partial sums, checks what
their headers say against the packet count, counts and lets them go; the minimal parser (src/baseline.c) knows nothing
but flows and PSNs. The cost must depend neither on the number of flows nor on the size of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from parser.machine import Engine

from lab.bench.limits import MinimalParser
from lab.bench.rows import Row, alternate
from lab.bench.workload import Traffic, make
from parser.chunk_layout import Protocol

__all__ = ["MODELS", "engine", "run"]

FLOWS = (1, 16, 256)
MODELS = {"small": 16 << 20, "huge": 4 << 30}  # gradient bytes of an iteration
TARGET = 1.2
AHEAD = 16


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """One row per number of flows and model size."""
    rows = []
    for flows in FLOWS:
        for model, size in MODELS.items():
            # Partial sums in LL slots of 64 KB, as most messages of a job are.
            traffic = make(Protocol.LL, 1024, flows, ring_bytes, final=False, model_bytes=size)
            seconds = alternate({"limit": minimal(traffic), "engine": engine(traffic)}, rounds)
            per = {name: [1e9 * s for s in taken] for name, taken in seconds.items()}
            rows.append(Row.of(f"parse.{flows}flows.{model}", "ns/packet", per["engine"], per["limit"], TARGET))
    return rows


def minimal(traffic: Traffic) -> Callable[[], float]:
    """A contender: seconds per packet in the minimal parser, the first quarter not counted."""
    parser = MinimalParser(traffic.flows)

    def measure() -> float:
        parser.reset()
        traffic.ring.rewind()
        first = traffic.packets // 4
        known, gaps = parser.run(traffic.ring, first, AHEAD)
        begin = time.perf_counter()
        more, gaps = parser.run(traffic.ring, traffic.packets - first, AHEAD)
        seconds = time.perf_counter() - begin
        assert (known + more, gaps) == (traffic.packets, 0)
        return seconds / (traffic.packets - first)

    return measure


def engine(traffic: Traffic) -> Callable[[], float]:
    """A contender: seconds per packet in a new engine, that has to let all of them go. The first quarter, in
    which it touches its memory for the first time, is not counted."""

    def measure() -> float:
        machine = Engine(traffic.config)
        traffic.ring.rewind()
        first = traffic.packets // 4
        _drive(machine, traffic, first)
        begin = time.perf_counter()
        _drive(machine, traffic, traffic.packets - first)
        seconds = time.perf_counter() - begin
        assert machine.outcomes(0)["released"][0] == traffic.packets, machine.disagreements()
        return seconds / (traffic.packets - first)

    return measure


def _drive(machine: Engine, traffic: Traffic, packets: int) -> None:
    while packets:
        done, blocked = machine.run(0, traffic.ring.address, packets)
        packets -= done
        if blocked:
            machine.retire()
