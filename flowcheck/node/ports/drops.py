"""Packets that the node itself has lost: named at once, with the setting that would have kept them.

A node that is too slow for its traffic drops packets where its own queues are full. For the verdict they are as lost
as those that a mirror dropped; for people they are something else, because a setting ends them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from flowcheck.node.ports.captures import PlannedCapture
from flowcheck.node.ports.counts import grown

__all__ = ["OWN", "SAID_SECONDS", "Drops", "describe"]

SAID_SECONDS = 10.0  # between two lines while drops go on
_SLOW_PORT = (
    "the thread that empties the port is too slow: more {table}.queues (now {queues}), each with a core of its own in"
    " {table}.cores"
)
# counter of dataplane/include/rx_counters.h -> what to change
OWN = {
    "ring_full": "raise {table}.ring_size (now {entries}, a power of two), or give the updater replica.threads",
    "kernel_ring_full": _SLOW_PORT,
    "nic_missed": _SLOW_PORT,
    "no_mbuf": _SLOW_PORT,
    "oversize": "{table}.path_mtu (now {path_mtu}) is smaller than the job's; 0 takes whole frames",
}


def describe(drops: Mapping[str, int], capture: PlannedCapture) -> str:
    """The causes with their counts, and for each the setting to change."""
    counts = ", ".join(f"{cause} {count}" for cause, count in drops.items())
    live = capture.live
    facts = {"table": capture.table, "queues": live.queues, "entries": live.entries, "path_mtu": live.path_mtu}
    settings = dict.fromkeys(OWN[cause].format(**facts) for cause in drops)
    return f"{counts}: {'; '.join(settings)}"


class Drops:
    """Of one capture. drops(): its own drops so far, by cause. say: events. `look` belongs to one thread."""

    def __init__(
        self, capture: PlannedCapture, drops: Callable[[], Mapping[str, int]], say: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capture, self._drops, self._say, self._clock = capture, drops, say, clock
        self._said: Mapping[str, int] = {}
        self._next = 0.0

    def look(self) -> None:
        """Say what was dropped since the last line: at once the first time, then not more often than SAID_SECONDS."""
        drops, now = self._drops(), self._clock()
        if drops == self._said or now < self._next:
            return
        new = grown(self._said, drops)
        self._said, self._next = drops, now + SAID_SECONDS
        self._say("dropped", port=self._capture.device, drops=new,
                  why=f"the node itself has dropped packets: {describe(new, self._capture)}")
