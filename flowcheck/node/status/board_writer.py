"""What a node says of itself: its tally and the counters of its captures, put on the board a few times a second.

    writer = BoardWriter(config, planned, sources, port, connected)
    say = writer.tally.counting(say)
    writer.look()                           again and again, on the node's main thread; costs a millisecond

Nothing is asked of the threads that capture, place or follow: the former count in memory that everybody may read, and
the latter say events. Nobody waits for who reads the board.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowcheck import __version__
from flowcheck.node.status.board import Board
from flowcheck.node.status.counters import EVENTS, Tally
from flowcheck.node.status.group_tally import ROWS

if TYPE_CHECKING:  # what has no port runs without DPDK
    from flowcheck.node.ports.captures import PlannedCapture
    from flowcheck.node.ports.silence import Arrivals

__all__ = ["LOST", "BoardWriter"]

EVERY_SECONDS = 0.25
# Counters of packets that were lost before they could be placed (docs/reference/events.md).
LOST = ("ring_full", "oversize", "bad_checksum", "unfinished", "nic_missed", "errors", "no_mbuf", "kernel_ring_full")


class BoardWriter:
    """name: the node's. planned, sources: captures, as of Port. port: None: there are none. connected(): ranks that are
    connected, by group. now: a clock that never goes back. stamp: seconds since 1970. common(): as of Common.document.
    shadow: api.shadow. doors(): connections by port, as of ControlServer.connected, inboxes by group, and
    what was measured of gradients, by group."""

    def __init__(
        self, name: str, planned: Sequence[PlannedCapture], sources: Sequence[Any], port: Arrivals | None,
        connected: Callable[[], Mapping[str, int]], now: Callable[[], float] = time.monotonic,
        stamp: Callable[[], float] = time.time, common: Callable[[], Mapping[str, Any]] = dict, shadow: int = 0,
        doors: Callable[[], Mapping[str, Any]] = lambda: {"ports": {}, "inboxes": {}, "telemetry": {}},
    ) -> None:
        self._shadow, self._doors = shadow, doors
        self.tally = Tally(name, stamp)
        self.board = Board()
        self._planned, self._sources, self._port, self._connected = planned, sources, port, connected
        self._now, self._stamp = now, stamp
        self._common = common
        self._next = 0.0
        self._last = [(0, 0.0)] * len(planned)  # packets, and when the newest had come
        self._last_claimed = [(0, 0.0)] * len(planned)  # the same of packets of jobs that are followed
        self._last_lost = [(0, 0.0)] * len(planned)  # and of those that were lost here

    def look(self) -> None:
        """Put on the board what there is, unless that was done just now."""
        now = self._now()
        if now < self._next:
            return
        self._next = now + EVERY_SECONDS
        more = {
            "version": __version__, "captures": [self._capture(i) for i in range(len(self._planned))],
            "unclaimed": dict(self._port.unclaimed) if self._port is not None else {},
            "connected": dict(self._connected()), "common": dict(self._common()), "shadow": self._shadow,
            **self._doors(),
        }
        rows, events = ROWS, EVENTS
        while not self.board.write(json.dumps(self.tally.document(rows, events) | more).encode()):
            if not rows and not events:
                break  # names and numbers alone are bounded, and far smaller than the board
            rows, events = rows // 2, events // 2

    def _capture(self, index: int) -> dict[str, Any]:
        counters, one = self._sources[index].counters(), self._planned[index]
        claimed = self._port.claimed(index) if self._port is not None else 0
        lost = {cause: counters.get(cause, 0) for cause in LOST}
        return {
            "device": one.device, "received": counters["received"], "bytes": counters.get("bytes", 0),
            "last": self._when(self._last, index, counters["received"]),
            "claimed": claimed, "last_claimed": self._when(self._last_claimed, index, claimed),
            "streams": [self._sources[index].counters(queue)["received"] for queue in range(one.live.queues)],
            "lost": lost, "last_lost": self._when(self._last_lost, index, sum(lost.values())),
        }

    def _when(self, last: list[tuple[int, float]], index: int, packets: int) -> float:
        """When this number changed last, to the time between two looks."""
        if packets != last[index][0]:
            last[index] = packets, self._stamp()
        return last[index][1]

    def close(self) -> None:
        self.board.close()
