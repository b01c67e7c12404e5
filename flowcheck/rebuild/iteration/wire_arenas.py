"""The mirror as a source of arenas: rings of packets, the engine that places them, and what it knows when one closes.

    arenas = WireArenas(plan, sources, names, sources_wait=False)
    arenas.place_in_threads(placers)         a node's threads take the packets; else `poll` does

The wire may be joined in mid-stream: each connection finds its place by what never restarts (LL and LL128 flags, the
index of a clear-to-send), checked against the manifest's whole history of calls; until then its packets are
`unanchored`. Memory: `arenas` iterations of gradients.

Which iteration may close is the scheduler's to say (scheduler.py), what is known of it the collector's (collector.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from parser.machine import Engine
from parser.placers import Placers

from flowcheck.rebuild.iteration.capture_times import CaptureTimes
from flowcheck.rebuild.iteration.collector import EvidenceCollector, Judged
from flowcheck.rebuild.iteration.first_weights import first_weights
from flowcheck.rebuild.iteration.holes import HoleWatch
from flowcheck.rebuild.iteration.scheduler import ArenaScheduler, Source
from flowcheck.rebuild.iteration.verdict import StreamEvidence
from flowcheck.rebuild.plan import JobPlan

__all__ = ["WireArenas"]


class WireArenas:
    """An ArenaSource (arena_source.py has what the methods mean). sources[i]: the ring of stream i; names[i]: what
    people call it. sources_wait: they are files, as of Policy."""

    def __init__(
        self, plan: JobPlan, sources: Sequence[Source], names: Sequence[str], *, sources_wait: bool = False
    ) -> None:
        self.plan, self.names = plan, names
        self.engine = Engine(plan.engine)
        self.collector = EvidenceCollector(plan, self.engine)
        if sources_wait:
            self.collector.times = CaptureTimes(self.engine, names)
        self.scheduler = ArenaScheduler(
            self.engine, sources, plan.cells, in_order=sources_wait, holes=HoleWatch(plan, self.engine)
        )
        self._finished = False

    def place_in_threads(self, placers: Placers) -> None:
        """From now on these threads take packets, at all times. Their rings are those of the sources. Until `stop`."""
        self.scheduler.leave_to(placers.attach(self.engine))

    # -- which iterations have begun --

    @property
    def oldest(self) -> int:
        return self.engine.oldest

    @property
    def begun(self) -> int:
        return self.engine.begun

    @property
    def open(self) -> range:
        return self.scheduler.open

    @property
    def given_up(self) -> range:
        return self.engine.given_up

    def poll(self) -> bool:
        return self.scheduler.poll()

    # -- may they close --

    def due(self) -> range:
        return self.scheduler.due()

    def is_whole(self, iteration: int) -> bool:
        return self.scheduler.is_whole(iteration)

    def close(self, due: range) -> None:
        self.scheduler.close(due)

    def judge(self, iteration: int, *, record: bool, follows: bool) -> Judged:
        streams = tuple(
            StreamEvidence(name, self.scheduler.state(i, iteration)) for i, name in enumerate(self.names)
        )
        final = "ended" if self._finished else self.scheduler.final(iteration)
        flows = self.engine.flows()
        judged = self.collector.collect(iteration, streams, record=record, follows=follows, final=final, flows=flows)
        return replace(judged, counts=self.collector.grown(flows))

    def refused(self) -> str:
        return self.collector.refused(self.engine.disagreements())

    # -- coverage and bytes --

    def complete(self, iteration: int) -> bool:
        return bool(self.engine.covered(iteration) >= self.plan.cells[min(iteration, 1)])

    def covered_places(self, iteration: int) -> np.ndarray:
        return self.engine.covered_places(iteration)

    def missing(self, iteration: int, first: int, end: int) -> np.ndarray:
        return self.engine.missing(iteration, first, end)

    def region(self, iteration: int) -> np.ndarray:
        return self.engine.region(iteration)

    def first_weights(self) -> Mapping[str, torch.Tensor] | str:
        return first_weights(self.plan, self.engine)

    # -- letting go --

    def release(self, due: range) -> None:
        self.scheduler.retire(due)

    def forget(self) -> None:
        self.engine.forget()

    def finish(self) -> None:
        self.stop()
        self.engine.finish()
        self._finished = True

    def stop(self) -> None:
        """No thread takes packets for this job any more."""
        self.scheduler.leave_to(None)

    # -- keeping up --

    @property
    def capacity(self) -> int:
        return self.engine.config.arenas

    @property
    def fills_itself(self) -> bool:
        return self.scheduler.by_threads

    @property
    def ended(self) -> bool:
        return self.scheduler.ended

    @property
    def blocked(self) -> bool:
        return self.scheduler.blocked

    @property
    def consumed(self) -> int:
        return self.scheduler.consumed

    @property
    def fill(self) -> float:
        return self.scheduler.fill

    @property
    def room(self) -> int:
        return self.scheduler.room

    def take_highest(self) -> tuple[int, int]:
        return self.scheduler.take_highest()

    def times(self, iteration: int) -> tuple[int, int] | None:
        return self.engine.times(iteration)
