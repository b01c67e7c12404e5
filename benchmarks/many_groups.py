"""What a packet costs a placing thread where a node follows several jobs, and what more threads give: decision 0015.

    .venv/bin/python -P benchmarks/many_groups.py [--json] [--rounds N] [--megabytes N] [--threads N]

The packets are the same for every number of groups: 32 flows in LL messages, packets of 1 KB, all to be placed, in
turns as on a mirror port. Groups share the flows out among them: neighbours in the ring are of different groups.

    groups.N       ns of processor time per packet of one placing thread, N groups at its queue; limit: one group
    threads.N      Mpkt/s of N placing threads on N queues, a group on each; limit: one thread, one such queue. Needs
                   as many free cores as there are threads, and one more

Rows as those of `flowcheck bench`: the median of rounds in which the contenders alternate, with 10th and 90th
percentile.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from flowcheck.lab.bench.limits import PacketRing
from parser.machine import Engine
from parser.placers import Placers
from rich.console import Console

from flowcheck.lab.bench.rows import Row, alternate, print_rows
from flowcheck.lab.bench.workload import Traffic, make
from parser.chunk_layout import Protocol
from parser.engine_config import EngineConfig

FLOWS, MTU = 32, 1024
GROUPS = (1, 2, 4, 8)
TARGET = 1.15  # at 8 groups
THREADS_TARGET = 1.7  # of two


def share(config: EngineConfig, flows: Sequence[int], streams: int = 1) -> EngineConfig:
    """The engine of a group that has some of the flows. What they bring lies where it would in the whole region."""
    edges = tuple(config.edges[flow] for flow in flows)
    specs = tuple(replace(config.flows[flow], edge=number) for number, flow in enumerate(flows))
    return replace(config, edges=edges, flows=specs, streams=streams, threads=streams)


def rest(rings: Sequence[PacketRing], passed: Callable[[], bool]) -> None:
    """Show all packets, and wait until they were taken. Looks all the time: this is what the last core is for."""
    for ring in rings:
        ring.rewind()
    while not passed():
        pass


def grouped(traffic: Traffic, groups: int) -> Callable[[], float]:
    """A contender: seconds of processor time of one placing thread for all packets."""
    configs = [share(traffic.config, range(group, FLOWS, groups)) for group in range(groups)]

    def measure() -> float:
        traffic.ring.show(np.zeros(0, np.uint32))
        engines = [Engine(config) for config in configs]
        for engine in engines:
            engine.region(0)[:] = 0
        placers = Placers([traffic.ring.address])
        seats = [placers.attach(engine) for engine in engines]
        with placers:
            (thread,) = (one for one in threading.enumerate() if one.name == "fc-place 0")
            clock = time.pthread_getcpuclockid(thread.ident or 0)
            last = [traffic.packets]
            begin = time.clock_gettime(clock)
            rest([traffic.ring], lambda: seats[-1].passed(last))
            seconds = time.clock_gettime(clock) - begin
        assert sum(engine.outcomes(0)["placed"][0] for engine in engines) == traffic.packets
        for engine in engines:
            covered = np.repeat(engine.cells(0), 8)
            assert covered.sum() * groups == len(traffic.expected)
            assert (engine.region(0)[covered] == traffic.expected[covered]).all()
        return seconds

    return measure


def on_threads(parts: Sequence[Traffic], threads: int) -> Callable[[], float]:
    """A contender: seconds until `threads` threads have placed as many parts, each of a queue and group of its own."""
    mine = parts[:threads]

    def measure() -> float:
        engines, seats, placers = [], [], []
        for part in mine:
            part.ring.show(np.zeros(0, np.uint32))
            engines.append(Engine(part.config))
            engines[-1].region(0)[:] = 0
            placers.append(Placers([part.ring.address]))
            seats.append(placers[-1].attach(engines[-1]))
            placers[-1].start()
        try:
            begin = time.perf_counter()
            rest([part.ring for part in mine], lambda: all(
                seat.passed([part.packets]) for seat, part in zip(seats, mine, strict=True)))
            seconds = time.perf_counter() - begin
        finally:
            for one in placers:
                one.stop()
        for engine, part in zip(engines, mine, strict=True):
            assert engine.outcomes(0)["placed"][0] == part.packets
        return seconds

    return measure


def run(rounds: int, megabytes: int, threads: int) -> list[Row]:
    traffic = make(Protocol.LL, MTU, FLOWS, megabytes << 20)
    taken = alternate({f"{count}": grouped(traffic, count) for count in GROUPS}, rounds)
    per = {name: [1e9 * s / traffic.packets for s in seconds] for name, seconds in taken.items()}
    rows = [
        Row.of(f"groups.{count}", "ns/packet", per[f"{count}"], per["1"], TARGET if count == 8 else None)
        for count in GROUPS
    ]
    if threads > 1:
        parts = [make(Protocol.LL, MTU, FLOWS, (megabytes << 20) // threads) for _ in range(threads)]
        taken = alternate({f"{n}": on_threads(parts, n) for n in (1, threads)}, rounds)
        rate = {n: [n * parts[0].packets / s / 1e6 for s in taken[f"{n}"]] for n in (1, threads)}
        target = THREADS_TARGET * threads / 2
        rows.append(Row.of(f"threads.{threads}", "Mpkt/s", rate[threads], rate[1], target))
    return rows


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--json", action="store_true")
    asked.add_argument("--rounds", type=int, default=11)
    asked.add_argument("--megabytes", type=int, default=128)
    asked.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    given = asked.parse_args()
    rows = run(given.rounds, given.megabytes, given.threads)
    if given.json:
        print("\n".join(json.dumps(row.as_dict()) for row in rows))
    else:
        print_rows(rows, Console(width=100))


if __name__ == "__main__":
    main()
