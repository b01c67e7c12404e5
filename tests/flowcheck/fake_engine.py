"""An engine and its sources as a test writes them: one signal at a time, without packets, DPDK or threads.

    one = FakeSource([Packet(0), Packet(1)])            a capture of two packets, which then ends
    engine = FakeEngine(plan.engine, [one])             or a bare number of streams in place of the plan's engine
    engine.counters[0][2]["anchored"] = False           what the next reader is told

Packets move as in parser.machine.Engine: the first one opens the oldest iteration, one of `arenas` iterations later
blocks its stream, one of an iteration that has closed is late. Everything else says what the test has set.
A packet brings all cells of its iteration unless it says otherwise. Rings are found by address: sources[i] is stream i.

The arenas of a mirror make their engine themselves:
    monkeypatch.setattr("flowcheck.rebuild.iteration.wire_arenas.Engine", lambda config: engine)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parser.engine_config import EngineConfig, Phase, Target
from parser.flow_table import FLOW
from parser.nccl import CTS_ELEMENTS, CtsElement
from parser.wire import Kind

OUTCOMES = ("placed", "late", "icrc", "unanchored", "overload")
NO_END = (1 << 63) - 1


@dataclass(frozen=True)
class Packet:
    """past: where its stream stands afterwards; None: at the packet's own iteration. -1 as iteration: start-up traffic,
    which belongs to none. cells: first one that it fills, and the one after the last (None: all that follow). ns: when
    it was captured; 0: the source has no clock."""

    iteration: int
    past: int | None = None
    cells: tuple[int, int | None] = (0, None)
    ns: int = 0


def whole(*iterations: int) -> list[Packet]:
    """One packet for each iteration, with all of it: its stream is past it afterwards."""
    return [Packet(t, past=t + 1) for t in iterations]


class FakeSource:
    """A ring. open: more may come, so an empty ring is not drained. slow: how often look_ahead has to be asked, late:
    how often the ring is looked into, before anything is there. room: packets that it holds."""

    def __init__(self, packets: Iterable[Packet] = (), *, open: bool = False, slow: int = 0, late: int = 0) -> None:
        self.room = 1 << 14
        self.packets, self.open, self.slow, self.late = list(packets), open, slow, late
        self.error: Exception | None = None

    @property
    def ring_address(self) -> int:
        return id(self)

    def look(self) -> list[Packet]:
        """What is there now."""
        self.late -= 1
        return self.packets if self.late < 0 else []

    def end(self, error: Exception | None = None) -> None:
        self.open, self.error = False, error


class FakeEngine:
    """config: of a plan, or None with `arenas` for a scheduler alone. See the module's docstring."""

    def __init__(self, config: EngineConfig | None, sources: Sequence[FakeSource] = (), *, arenas: int = 4) -> None:
        self.config = config or EngineConfig(4096, (), (), 64, streams=max(len(sources), 1), arenas=arenas)
        self.sources = list(sources)
        streams = range(self.config.streams)
        self.oldest, self.begun, self.missed_iteration = 0, -1, -1
        self._opened, self._opener = 0, -1  # the first iteration, and who brought it
        self.disagreed, self.unlogged = 0, range(0)
        self.stand, self.want = [-1 for _ in streams], [-1 for _ in streams]  # what past() and wanted() say
        self.begins_here: bool = False  # what look_ahead() says
        self.counters = [[self._counters() for _ in self.config.flows] for _ in streams]  # [stream][flow]
        self.counts = [dict.fromkeys(OUTCOMES, (0, 0)) for _ in streams]  # what outcomes() says, by stream
        self.unseen = [0 for _ in streams]  # gaps of a stream's first flow, as flows() says
        self.log: list[dict[str, Any]] = []  # disagreements
        self.lost: list[dict[str, Any]] = []  # losses
        self.copied: dict[int | None, tuple[int, int, int]] = {}
        self.void: dict[int | None, list[tuple[int, int]]] = {}  # cells: a test also takes them out of cells()
        self.repeated: dict[int | None, int] = {}  # what late() says
        self.differing: list[dict[str, Any]] = []  # what differences() says
        self.carried: list[tuple[int, int]] = []  # what carriers() says, of any byte
        self.tags: dict[int, int] = {}
        self.forms: dict[CtsElement, int] = dict.fromkeys(CTS_ELEMENTS, 0)
        self.filled: dict[int | None, np.ndarray] = {}  # cells
        self.data: dict[int | None, np.ndarray] = {}  # regions
        self.spans: dict[int, tuple[int, int]] = {}  # what times() says
        self.given_up = range(0)
        self.hopes: dict[tuple[int, int], str] = {}  # what hope() says, by stream and iteration
        self._reached = [-1 for _ in streams]
        # what was asked of it
        self.runs: list[tuple[int, int, int]] = []  # (stream, limit, packets taken)
        self.looks: list[int] = []  # streams
        self.closed = 0
        self.retired: list[int] = []
        self.finished = self.forgotten = self.considered = 0

    @staticmethod
    def _counters() -> dict[str, Any]:
        return {
            "seen": True, "state": "ALLGATHER", "anchored": True, "ignored": range(0), "adrift": False, "packets": 1,
            "payload_bytes": 0, "missing": 0, "duplicates": 0, "retransmissions": 0, "out_of_order": 0,
            "icrc_wrong": 0, "agreements": 1, "disagreements": 0, "first_psn": 0, "next_psn": 1,
        }

    def flow(self, number: int, stream: int = 0) -> dict[str, Any]:
        """The counters of a flow, to be changed."""
        return self.counters[stream][number]

    def disagree(self, iteration: int, kind: str = "payload length", flow: int = 0, **values: Any) -> None:
        """Log a disagreement."""
        entry = {"stream": 0, "message": 5, "psn": 77, "expected": 1024, "found": 512}
        self.log.append({"kind": kind, "flow": flow, "iteration": iteration, **entry, **values})
        self.disagreed += 1

    # -- packets --

    def _ring(self, address: int) -> FakeSource:
        return next(source for source in self.sources if source.ring_address == address)

    def run(self, stream: int, ring_address: int, limit: int) -> tuple[int, bool]:
        source, done, blocked = self._ring(ring_address), 0, False
        assert self.sources.index(source) == stream
        packets = source.look()
        while packets and done < limit and not blocked:
            packet = packets[0]
            self._open(stream, packet.iteration)
            arenas = self.oldest + self.config.arenas
            blocked = packet.iteration >= arenas and packet.iteration not in self.given_up
            if blocked:
                self.want[stream] = packet.iteration
            else:
                self._take(stream, packets.pop(0))
                done += 1
        self.runs.append((stream, limit, done))
        return done, blocked

    def _open(self, stream: int, iteration: int) -> None:
        """Captures may begin in mid-stream, and one that is read later may begin earlier."""
        if self.begun < 0 <= iteration and not self.begins_here:
            self.oldest = self._opened = iteration
            self._opener = stream
        elif 0 <= iteration < self._opened and stream != self._opener:
            if self.oldest == self._opened and self.begun < iteration + self.config.arenas:
                self.oldest = self._opened = iteration
            elif self.missed_iteration < 0 or iteration < self.missed_iteration:
                self.missed_iteration = iteration

    def _take(self, stream: int, packet: Packet) -> None:
        self.stand[stream] = packet.iteration if packet.past is None else packet.past
        outcome = "late" if 0 <= packet.iteration < self.oldest else "placed"
        if packet.iteration >= 0 and outcome == "placed":
            self.begun = max(self.begun, packet.iteration)
            self._reached[stream] = max(self._reached[stream], packet.iteration)
            first, last = self.spans.get(packet.iteration, (packet.ns, packet.ns))
            self.spans[packet.iteration] = min(first, packet.ns), max(last, packet.ns)
            if packet.iteration in self.given_up:
                outcome = "overload"
            else:
                self.cells(packet.iteration)[slice(*packet.cells)] = True
        packets, size = self.counts[stream][outcome]
        self.counts[stream][outcome] = packets + 1, size + 8

    def look_ahead(self, ring_address: int) -> bool | None:
        source = self._ring(ring_address)
        assert not self.runs, "the beginning of a ring that was read already"
        self.looks.append(self.sources.index(source))
        source.slow -= 1
        return None if source.slow >= 0 else self.begins_here

    def next_ns(self, ring_address: int) -> int | None:
        packets = self._ring(ring_address).look()
        return packets[0].ns if packets else None

    def waiting(self, ring_address: int) -> tuple[int, int]:
        source = self._ring(ring_address)
        return len(source.packets), source.room

    def drained(self, ring_address: int) -> bool:
        source = self._ring(ring_address)
        return not source.open and not source.packets

    # -- iterations --

    def past(self, stream: int) -> int:
        return self.stand[stream]

    def hope(self, stream: int, iteration: int) -> str:
        return self.hopes.get((stream, iteration), "may_come")

    def wanted(self, stream: int) -> int:
        return self.want[stream]

    def close(self, count: int = 1) -> None:
        self.closed = self.oldest + count

    def retire(self, count: int = 1) -> None:
        assert self.closed == self.oldest + count, "an iteration is closed before it is judged and retires"
        self.oldest += count
        self.retired.append(count)

    def times(self, iteration: int) -> tuple[int, int] | None:
        span = self.spans.get(iteration, (0, 0))
        return span if span[0] else None

    def stream_times(self, iteration: int) -> list[tuple[int, int] | None]:
        return [self.times(iteration) for _ in range(self.config.streams)]

    flow_times = stream_times

    def give_up(self) -> int:
        assert self.oldest >= self.given_up.stop, "what was given up last has not closed"
        self.given_up = range(max(self.begun + 1, self.oldest), NO_END)
        return self.given_up.start

    def take_up(self) -> int:
        self.given_up = range(self.given_up.start, max(self.begun + 1, self.oldest))
        return self.given_up.stop

    def reached(self, stream: int) -> int:
        return self._reached[stream]

    def finish(self) -> None:
        self.finished += 1

    def forget(self) -> None:
        self.forgotten += 1

    def consider_recovery(self) -> None:
        self.considered += 1

    # -- results --

    def cells(self, iteration: int | None = None) -> np.ndarray:
        size = self.config.parameter_bytes if iteration is None else self.config.gradient_bytes
        return self.filled.setdefault(iteration, np.zeros((size + 7) // 8, bool))

    def covered(self, iteration: int) -> int:
        return int(self.covered_places(iteration).sum())

    def covered_places(self, iteration: int) -> np.ndarray:
        """Only what a call brings counts: a test may set cells between the buckets, too."""
        calls = [call for edge in self.config.edges for call in edge.calls]
        brought = np.zeros((max((call.place for call in calls), default=0) + 1, len(self.cells(iteration))), bool)
        phase = Phase.ITERATION_0 if iteration == 0 else Phase.STEADY
        for call in calls:
            if call.lane and call.target == Target.GRADIENT and call.phase == phase:
                end = max(segment.limit for segment in call.lane.segments)
                if call.lane.kind == Kind.RING_ALLGATHER:  # segments are of one rank's block
                    end += (call.lane.ranks - 1) * call.lane.block
                brought[call.place, call.base // 8 : -(-(call.base + end * call.lane.elem_bytes) // 8)] = True
        return (self.cells(iteration) & brought).sum(axis=1)

    def complete(self, iteration: int, cells: int) -> bool:
        return self.covered(iteration) == cells

    def missing(self, iteration: int | None, first: int, end: int) -> np.ndarray:
        there = np.concatenate(([True], self.cells(iteration)[first:end], [True])).astype(np.int8)
        return np.flatnonzero(np.diff(there)).reshape(-1, 2) + first

    def region(self, iteration: int | None = None) -> np.ndarray:
        size = self.config.parameter_bytes if iteration is None else self.config.gradient_bytes
        return self.data.setdefault(iteration, np.zeros(size, np.uint8))

    def copies(self, iteration: int | None = None) -> tuple[int, int, int]:
        return self.copied.get(iteration, (0, 0, 0))

    def late(self, iteration: int | None = None) -> int:
        return self.repeated.get(iteration, 0)

    def void_cells(self, iteration: int | None, first: int, end: int) -> np.ndarray:
        runs = [(max(a, first), min(b, end)) for a, b in self.void.get(iteration, [])]
        return np.array([run for run in runs if run[0] < run[1]], np.int64).reshape(-1, 2)

    def differences(self) -> list[dict[str, Any]]:
        return list(self.differing)

    def carriers(self, iteration: int, offset: int) -> list[tuple[int, int]]:
        return list(self.carried)

    def flows(self) -> np.ndarray:
        table = np.zeros((self.config.streams, len(self.config.flows)), FLOW)
        for stream, counters in enumerate(self.counters):
            for i, found in enumerate(counters):
                ignored = found["ignored"] or range(0)
                table[stream, i] = (
                    found["packets"], found["anchored"], found["state"] not in ("LOST", "ON_TRIAL"), found["adrift"],
                    ignored.start, ignored.stop, self.unseen[stream] if i == 0 else 0, found["duplicates"],
                )
        return table

    def flow_counters(self, stream: int) -> list[dict[str, Any]]:
        return self.counters[stream]

    def outcomes(self, stream: int) -> dict[str, tuple[int, int]]:
        return dict(self.counts[stream])

    def encapsulated(self) -> dict[str, int]:
        return {}

    def disagreements(self) -> list[dict[str, Any]]:
        return list(self.log)

    def late_places(self) -> list[tuple[int, int, int]]:
        return []

    def losses(self) -> list[dict[str, Any]]:
        return list(self.lost)

    def cts_tags(self) -> dict[int, int]:
        return dict(self.tags)

    def cts_forms(self) -> dict[CtsElement, int]:
        return dict(self.forms)
