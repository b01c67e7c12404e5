"""The node's mirror ports: captures that all groups read, and what their counters say.

    port = Port(planned, sources, groups)   planned[i]: a capture of the settings; sources[i]: what was opened for it
    port.open(reader)                       rings of its own for one group: every group sees every packet
    port.arrived, port.drops                packets so far, and those that the node itself has lost, by cause
    port.explain(drops)                     the same in words, with the setting that would have kept them

Queues are numbered over all captures, as streams are. Where a node has several captures, a cause has its device before
it: "af_packet:eth2 ring_full".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataplane.live import LiveSource
from flowcheck.node.captures import PlannedCapture
from flowcheck.node.drops import OWN, describe
from flowcheck.node.ring_fanout import RingFanout
from flowcheck.node.silence import Arrivals

__all__ = ["Port", "Queue"]


class Port(Arrivals):
    """The queues of all captures, each read by up to `groups` readers."""

    def __init__(self, planned: Sequence[PlannedCapture], sources: Sequence[LiveSource], groups: int) -> None:
        self._planned, self._sources = planned, sources
        self.name = " and ".join(one.device for one in planned)
        self._fanouts = [
            (i, RingFanout(address, groups)) for i, source in enumerate(sources) for address in source.ring_addresses
        ]

    def open(self, reader: int) -> list[Queue]:
        return [Queue(self, i, at, fanout, fanout.open(reader)) for i, (at, fanout) in enumerate(self._fanouts)]

    def close(self, reader: int) -> None:
        for _, fanout in self._fanouts:
            fanout.close(reader)

    def error(self, capture: int) -> Exception | None:
        return self._sources[capture].error

    @property
    def arrived(self) -> int:
        return sum(source.counters()["received"] for source in self._sources)

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


@dataclass(frozen=True)
class Queue:
    """One rx queue as a group's source of packets. index: among the queues of all captures. address: of the group's
    ring."""

    port: Port
    index: int
    capture: int
    _fanout: RingFanout
    address: int

    @property
    def ring_address(self) -> int:
        """Asked before each look: what has come meanwhile is shown now."""
        self._fanout.refresh()
        return self.address

    @property
    def fanout_address(self) -> int:
        """For threads that look without asking here."""
        return int(self._fanout.address)

    @property
    def error(self) -> Exception | None:
        return self.port.error(self.capture)
