"""The node's mirror ports: captures, the threads that place what they bring, and what their counters say.

    port = Port(planned, sources)           planned[i]: a capture of the settings; sources[i]: what was opened for it
    port.placers                            a thread for each queue, for all groups (parser.placers); start and stop it
    port.queues                             what each group has as sources: one for each ring of the placers
    port.claimed(capture)                   packets of jobs that are followed, or were
    port.arrived, port.drops                packets so far, and those that the node itself has lost, by cause
    port.explain(drops)                     the same in words, with the setting that would have kept them

Queues are numbered over all captures, as streams are. Where a node has several captures, a cause has its device before
it: "af_packet:eth2 ring_full".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parser.placers import Placers

from dataplane.live import LiveSource
from flowcheck.node.ports.captures import PlannedCapture, place_cores
from flowcheck.node.ports.drops import OWN, describe
from flowcheck.node.ports.silence import Arrivals

__all__ = ["Port", "Queue"]


@dataclass(frozen=True)
class Queue:
    """One rx queue, as a group's source of packets. index: among the queues of all captures."""

    port: Port
    index: int
    capture: int
    ring_address: int

    @property
    def error(self) -> Exception | None:
        return self.port.error(self.capture)


class Port(Arrivals):
    """The queues of all captures."""

    def __init__(self, planned: Sequence[PlannedCapture], sources: Sequence[LiveSource]) -> None:
        self._planned, self._sources = planned, sources
        self.name = " and ".join(one.device for one in planned)
        rings = [(i, address) for i, source in enumerate(sources) for address in source.ring_addresses]
        self.queues: list[Queue] = [
            Queue(self, index, capture, address) for index, (capture, address) in enumerate(rings)]
        self._of = [[one.index for one in self.queues if one.capture == i] for i in range(len(sources))]
        self.placers = Placers([address for _, address in rings], cores=place_cores(planned))

    def error(self, capture: int) -> Exception | None:
        return self._sources[capture].error

    @property
    def arrived(self) -> int:
        return sum(source.counters()["received"] for source in self._sources)

    def empty(self) -> list[int | None]:
        return [count for source in self._sources for count in source.empty()]

    def claimed(self, capture: int) -> int:
        return sum(self.placers.claimed(queue) for queue in self._of[capture])

    def drops_of(self, capture: int) -> dict[str, int]:
        """By cause, without causes that did not occur."""
        counters = self._sources[capture].counters()
        return {cause: counters[cause] for cause in OWN if counters[cause]}

    @property
    def drops(self) -> dict[str, int]:
        return {
            self._label(i, cause): count
            for i in range(len(self._sources)) for cause, count in self.drops_of(i).items()
        }

    @property
    def unclaimed(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for queue in range(len(self.queues)):
            for outcome, (packets, _) in self.placers.strangers(queue).items():
                found[outcome] = found.get(outcome, 0) + packets
        return found

    def stream_names(self, streams: int) -> list[str]:
        if len(self._planned) == 1:
            return super().stream_names(streams)
        return [f"{one.device} queue {queue}" for one in self._planned for queue in range(one.live.queues)]

    def explain(self, drops: Mapping[str, int]) -> str:
        parts = []
        for i, one in enumerate(self._planned):
            mine = {cause: drops[label] for cause in OWN if (label := self._label(i, cause)) in drops}
            if mine:
                parts.append(describe(mine, one) if len(self._planned) == 1 else f"{one.device} {describe(mine, one)}")
        return "; ".join(parts)

    def _label(self, capture: int, cause: str) -> str:
        return cause if len(self._planned) == 1 else f"{self._planned[capture].device} {cause}"
