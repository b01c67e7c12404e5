"""What a packet costs a placing thread where a node follows several jobs: decision 0015.

    .venv/bin/python -P benchmarks/many_groups.py [--json] [--rounds N] [--megabytes N]

The packets are the same for every number of groups: 32 flows in LL messages, packets of 1 KB, all to be placed, in
turns as on a mirror port. Groups share the flows out among them: neighbours in the ring are of different groups.

    groups.N       ns of processor time per packet of one placing thread, N groups at its queue; limit: one group

Rows as those of `flowcheck bench`: the median of rounds in which the contenders alternate, with 10th and 90th
percentile.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from parser.machine import Engine
from parser.placers import Placers
from rich.console import Console

from lab.bench.rows import Row, alternate, print_rows
from lab.bench.workload import Traffic, make
from parser.chunk_layout import Protocol
from parser.engine_config import EngineConfig

FLOWS, MTU = 32, 1024
GROUPS = (1, 2, 4, 8)
TARGET = 1.15  # at 8 groups
LOOK_SECONDS = 50e-6


def share(config: EngineConfig, flows: Sequence[int]) -> EngineConfig:
    """The engine of a group that has some of the flows. What they bring lies where it would in the whole region."""
    edges = tuple(config.edges[flow] for flow in flows)
    specs = tuple(replace(config.flows[flow], edge=number) for number, flow in enumerate(flows))
    return replace(config, edges=edges, flows=specs)


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
            traffic.ring.rewind()
            while not all(seat.passed(last) for seat in seats):
                time.sleep(LOOK_SECONDS)
            seconds = time.clock_gettime(clock) - begin
        assert sum(engine.outcomes(0)["placed"][0] for engine in engines) == traffic.packets
        for engine in engines:
            covered = np.repeat(engine.cells(0), 8)
            assert covered.sum() * groups == len(traffic.expected)
            assert (engine.region(0)[covered] == traffic.expected[covered]).all()
        return seconds

    return measure


def run(rounds: int, megabytes: int) -> list[Row]:
    traffic = make(Protocol.LL, MTU, FLOWS, megabytes << 20)
    taken = alternate({f"{count}": grouped(traffic, count) for count in GROUPS}, rounds)
    per = {name: [1e9 * s / traffic.packets for s in seconds] for name, seconds in taken.items()}
    return [
        Row.of(f"groups.{count}", "ns/packet", per[f"{count}"], per["1"], TARGET if count == 8 else None)
        for count in GROUPS
    ]


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--json", action="store_true")
    asked.add_argument("--rounds", type=int, default=11)
    asked.add_argument("--megabytes", type=int, default=128)
    given = asked.parse_args()
    rows = run(given.rounds, given.megabytes)
    if given.json:
        print("\n".join(json.dumps(row.as_dict()) for row in rows))
    else:
        print_rows(rows, Console(width=100))


if __name__ == "__main__":
    main()
