"""What more placing threads give: N threads on N queues place the packets of one job, whose arena they share.

    .venv/bin/python -P benchmarks/place_threads.py [--json] [--rounds N] [--megabytes N] [--threads N ...]
        [--cores C ...]

The packets are the same for every number of threads: 32 flows in LL messages, packets of 1 KB, all to be placed, each
connection at one queue, as a port spreads them. N has to divide 32.

    threads.N          Mpkt/s of N placing threads; limit: one thread, one queue. Target: 0.85 for each of them
    threads.N.cores    processors that the threads had while they placed, of those that they asked for

The second row says what the first is worth: where it is below 0.95 the machine had something else to do, and the rate
is not that of N cores. Whoever waits for the threads sleeps, so N free cores are enough. cores: where threads are
pinned, as `capture.place_cores` does it. Rows as those of `flowcheck bench`: the median of rounds in which the
contenders alternate, with 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from lab.bench.limits import PacketRing
from numpy.typing import NDArray
from parser.machine import Engine
from parser.placers import Placers
from rich.console import Console

from lab.bench.rows import Row, alternate, print_rows
from lab.bench.workload import Bytes, Traffic, aligned, make
from parser.chunk_layout import Protocol

FLOWS, MTU = 32, 1024
TARGET = 0.85  # of one thread, for each
ALMOST = 0.8  # of the time that it takes, before anybody looks
LOOK_SECONDS = 50e-6


class OnThreads:
    """Contender: the packets of all flows, on as many queues as there are threads. had: processors that they had."""

    def __init__(self, traffic: Traffic, threads: int, cores: Sequence[int]) -> None:
        flow = np.arange(traffic.packets) % FLOWS
        self._traffic, self._cores, self._least = traffic, tuple(cores[:threads]), 0.0
        self._config = replace(traffic.config, streams=threads, threads=threads)
        self._memory: list[Bytes] = []  # the packets of each queue one after the other, as in a pool of its own
        self._rings = [self._ring(flow % threads == queue) for queue in range(threads)]
        self.had: list[float] = []

    def _ring(self, chosen: NDArray[np.bool_]) -> PacketRing:
        frames = self._traffic.frames
        own = aligned(int(chosen.sum()) * frames.shape[1]).reshape(-1, frames.shape[1])
        own[:] = frames[chosen]
        self._memory.append(own)
        starts = np.uint64(own.ctypes.data) + np.arange(len(own), dtype=np.uint64) * np.uint64(frames.shape[1])
        return PacketRing(starts, self._traffic.lengths[chosen])

    def measure(self) -> float:
        for ring in self._rings:
            ring.show(np.zeros(0, np.uint32))
        engine = Engine(self._config)
        engine.region(0)[:] = 0
        placers = Placers([ring.address for ring in self._rings], cores=self._cores)
        seat, last = placers.attach(engine), [ring.packets for ring in self._rings]
        with placers:
            clocks = [
                time.pthread_getcpuclockid(one.ident or 0)
                for one in threading.enumerate() if one.name.startswith("fc-place")
            ]
            before, begin = sum(map(time.clock_gettime, clocks)), time.perf_counter()
            for ring in self._rings:
                ring.rewind()
            time.sleep(ALMOST * self._least)
            while not seat.passed(last):
                time.sleep(LOOK_SECONDS)
            seconds = time.perf_counter() - begin
            self.had.append((sum(map(time.clock_gettime, clocks)) - before) / seconds)
        self._least = min(self._least or seconds, seconds)
        assert sum(engine.outcomes(i)["placed"][0] for i in range(len(last))) == self._traffic.packets
        assert engine.cells(0).all() and (engine.region(0) == self._traffic.expected).all()
        return seconds


def run(rounds: int, megabytes: int, threads: Sequence[int], cores: Sequence[int]) -> list[Row]:
    traffic = make(Protocol.LL, MTU, FLOWS, megabytes << 20)
    contenders = {n: OnThreads(traffic, n, cores) for n in sorted({1, *threads})}
    taken = alternate({f"{n}": one.measure for n, one in contenders.items()}, rounds)
    rate = {n: [traffic.packets / s / 1e6 for s in taken[f"{n}"]] for n in contenders}
    rows = []
    for n, one in contenders.items():
        rows.append(Row.of(f"threads.{n}", "Mpkt/s", rate[n], rate[1], TARGET * n if n > 1 else None))
        rows.append(Row.of(f"threads.{n}.cores", "cores", one.had[1:], [float(n)] * rounds, None))
    return rows


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--json", action="store_true")
    asked.add_argument("--rounds", type=int, default=11)
    asked.add_argument("--megabytes", type=int, default=256)
    asked.add_argument("--threads", type=int, nargs="+", default=[2], choices=(2, 4, 8, 16, 32))
    asked.add_argument("--cores", type=int, nargs="*", default=[])
    given = asked.parse_args()
    if given.cores and len(given.cores) < max(given.threads):
        asked.error(f"--cores: {len(given.cores)} for {max(given.threads)} threads")
    rows = run(given.rounds, given.megabytes, given.threads, given.cores)
    if given.json:
        print("\n".join(json.dumps(row.as_dict()) for row in rows))
    else:
        print_rows(rows, Console(width=100))


if __name__ == "__main__":
    main()
