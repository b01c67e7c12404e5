"""bench pipeline: the stages of a node alone, one after another and overlapped, beside what bounds them.

The job is feed.py's: SIMPLE packets of 1 KB on 16 flows, all to be placed, fp32 gradients, no step values, every ICRC
checked. Packets are numbered and copied into a ring by a thread in C (src/feeder.c), as `copy` dumps them; everything
behind the ring is the live node's own.

    receive       packets into the ring                                  2 x the packets' bytes
    place         headers, flow, ICRC, payload into the arena            2 x the payloads' bytes
    update        evidence, verdict, and one worker of the updater       28 bytes per parameter (SGD: 12)

    pipeline.OPTIMIZER.STAGE                 the stage alone, nothing else running; limit: its bytes at the copy limit
    pipeline.OPTIMIZER.sequence              one stage after the other, an iteration at a time; limit: all their bytes
    pipeline.OPTIMIZER.overlapped            as a node runs them: a thread for each stage and one that judges, buckets
                                             applied while the next come; limit: the larger of the next two
    pipeline.OPTIMIZER.overlapped.slowest    the same beside the slowest stage alone
    pipeline.OPTIMIZER.overlapped.memory     the same beside all bytes at the copy limit
    pipeline.OPTIMIZER.overlapped.cores      the same beside all stages' times, spread over the processors

Milliseconds per GB (10^9 bytes) of gradients. The copy limit is that of two threads that copy past the cache, taken in
the same round. Each iteration is published, and nothing of it is missing.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from dataclasses import replace

import torch
from parser.placers import Placers

from flowcheck.rebuild.calibration import settle
from flowcheck.rebuild.iteration.scheduler import BATCH, IDLE_SECONDS
from flowcheck.rebuild.iteration.wire_arenas import WireArenas
from flowcheck.rebuild.version.events import Closed
from flowcheck.rebuild.version.follower import Follower
from flowcheck.rebuild.version.policy import Policy
from flowcheck.rebuild.version.replica import JobReplica, ReplicaOptions
from lab.bench import limits
from lab.bench.feed import MTU, Window, flows_for
from lab.bench.feeder import Feeder
from lab.bench.rows import Row, Setting, alternate, here, on_threads
from lab.bench.workload import aligned
from updater import tuning

__all__ = ["STAGES", "Pipeline", "run"]

LAPS = 4  # of 64 MB, in an iteration
ITERATIONS = 4  # that overlap in one sample
RING = 1 << 14  # packets, as a node's rings have them unless it is told otherwise
ARENAS = 3
STAGES = ("receive", "place", "update")
#: Optimizer, bytes that it reads and writes per fp32 parameter.
OPTIMIZERS = {"adam": 28, "sgd": 12}
TARGET = 1.10


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Rows for each optimizer. Less than 256 MB of `ring_bytes` makes the model smaller."""
    settle(MTU, recall=False, remember=False)
    chosen = tuning.settle(recall=False, remember=False).ways[tuning.PART]
    setting = here(update=str(chosen))
    window = Window(flows_for(ring_bytes))
    rows = []
    for optimizer in OPTIMIZERS:
        pipeline = Pipeline(window, optimizer)
        try:
            rows += _rows(pipeline, optimizer, rounds, setting)
        finally:
            pipeline.close()
    return rows


def _rows(pipeline: Pipeline, optimizer: str, rounds: int, setting: Setting) -> list[Row]:
    size = pipeline.gradient_bytes
    source, target = aligned(size), aligned(size)

    def copy(first: int, end: int) -> None:
        limits.copy(target.ctypes.data + first, source.ctypes.data + first, end - first)

    taken = alternate(
        {"copy": on_threads(copy, size, 2, 256), "sequence": pipeline.sequence, "overlapped": pipeline.overlapped},
        rounds,
    )
    per_gb = 1e12 / size  # seconds of an iteration to milliseconds per GB
    seconds = {name: [per_gb * s for s in samples] for name, samples in (taken | pipeline.alone(rounds)).items()}
    bounds = {
        name: [nbytes * s / (2 * size) for s in seconds["copy"]] for name, nbytes in pipeline.traffic().items()
    }
    memory = [sum(parts) for parts in zip(*bounds.values(), strict=True)]
    slowest = [max(parts) for parts in zip(*(seconds[stage] for stage in STAGES), strict=True)]
    work = [sum(parts) / pipeline.cores for parts in zip(*(seconds[stage] for stage in STAGES), strict=True)]
    larger = [max(pair) for pair in zip(slowest, memory, strict=True)]
    compared = [(stage, bounds[stage], None) for stage in STAGES] + [
        ("sequence", memory, None), ("overlapped", larger, TARGET), ("overlapped.slowest", slowest, None),
        ("overlapped.memory", memory, None), ("overlapped.cores", work, None),
    ]
    return [
        Row.of(f"pipeline.{optimizer}.{name}", "ms/GB", seconds[name.partition(".")[0]], limit, target, setting)
        for name, limit, target in compared
    ]


class Pipeline:
    """A follower that lasts, fed from two rings: one that an iteration fits into, and one of a node's size. It is
    its source itself (flowcheck.rebuild.iteration.scheduler.Source)."""

    error: Exception | None = None

    def __init__(self, window: Window, optimizer: str) -> None:
        plan = window.plan(LAPS, arenas=ARENAS)
        plan = replace(plan, engine=replace(plan.engine, check_icrc=True))
        assert plan.job.optimizer is not None
        plan.job.optimizer.name, plan.job.optimizer.rounding = optimizer, "torch-cuda-foreach"
        self._window, self._each = window, OPTIMIZERS[optimizer]
        self.gradient_bytes = plan.engine.gradient_bytes
        self.cores = len(os.sched_getaffinity(0))
        self._packets = LAPS * window.packets
        whole = 1 << (self._packets - 1).bit_length()
        self._whole, self._short = (
            Feeder(window.addresses, window.lengths, len(window.flows), entries) for entries in (whole, RING)
        )
        self._feeder = self._whole
        # A live node's, but for its giving iterations up: this source waits where a port would lose packets.
        self._arenas = WireArenas(plan, [self], ["bench"])
        self._follower = Follower(plan, self._arenas, Policy.live(0.0))
        replica = JobReplica(plan, None, ReplicaOptions(slots=2, threads=1))
        replica.start({entry.name: torch.zeros(entry.shape) for entry in plan.job.model}, {}, 0)
        self._follower.start(replica, 0)
        self._closed: list[Closed] = []
        self._fed = self._iteration = 0
        self._alone: list[tuple[float, ...]] = []

    @property
    def ring_address(self) -> int:
        return self._feeder.address

    def traffic(self) -> dict[str, int]:
        """Bytes that each stage reads and writes for an iteration."""
        received, gradients = LAPS * int(self._window.lengths.sum()), self.gradient_bytes
        return dict(zip(STAGES, (2 * received, 2 * gradients, self._each * gradients // 4), strict=True))

    def alone(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of each stage in the last so many sequences."""
        return dict(zip(STAGES, map(list, zip(*self._alone[-rounds:], strict=True)), strict=True))

    def sequence(self) -> float:
        """A contender: an iteration, each stage to its end before the next one begins."""
        self._feeder, engine = self._whole, self._arenas.engine
        times = [time.perf_counter()]
        self._whole.feed(self._next(1), self._packets)
        times.append(time.perf_counter())
        while self._whole.waiting:
            done, blocked = engine.run(0, self.ring_address, BATCH)
            assert done and not blocked
        times.append(time.perf_counter())
        if not self._iteration:
            self._prove()
            times[-1] = time.perf_counter()
        self._publish(1)
        times.append(time.perf_counter())
        self._alone.append(tuple(end - begin for begin, end in itertools.pairwise(times)))
        return times[-1] - times[0]

    def overlapped(self, iterations: int = ITERATIONS) -> float:
        """A contender: seconds per iteration of some that follow each other."""
        self._feeder = self._short
        feeding = threading.Thread(target=self._short.feed, args=(self._next(iterations), iterations * self._packets))
        with Placers([self.ring_address]) as placers:
            self._arenas.place_in_threads(placers)
            begin = time.perf_counter()
            feeding.start()
            try:
                self._publish(iterations)
                seconds = time.perf_counter() - begin
            except BaseException:
                self._short.stop()
                raise
            finally:
                feeding.join()
                self._arenas.stop()
        return seconds / iterations

    def close(self) -> None:
        self._follower.close()

    def _next(self, iterations: int) -> int:
        """The number of the packet that the next so many iterations begin with."""
        first, self._fed = self._fed, self._fed + iterations * self._packets
        return first

    def _publish(self, count: int) -> None:
        """Look at the rings, as a node does, until so many iterations have closed."""
        closed: list[Closed] = []
        while len(closed) < count:
            closed += [event for event in self._follower.poll() if isinstance(event, Closed)]
            if not self._follower.moved:
                time.sleep(IDLE_SECONDS)
        for event in closed:
            assert (event.iteration, event.published, event.updates) == (self._iteration, True, "early"), event
            self._iteration += 1

    def _prove(self) -> None:
        """Iteration 0 has one bucket, of which each flow brings a part, a piece of it in every lap."""
        flows = len(self._window.flows)
        region = self._arenas.engine.region(0).reshape(flows, LAPS, -1)
        assert (region == self._window.expected.reshape(flows, 1, -1)).all(), "other bytes than were sent"
