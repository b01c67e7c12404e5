"""Peak against mean: gradients are on the wire for a few percent of the time, and then at line rate.

    burst = Burst(peak_gbps=2400, mean_gbps=60, seconds=0.3)
    burst.buffer_mb(room_gbps=1200)                   what the switch would have to hold, so that no copy is lost
    burst.lost(room_gbps=1200, buffer_mb=64)          share of the copies that is lost
    most_peak(...), fewest_ports(...)                 what monitor ports carry without a buffer, as `switch plan` deals

A monitor port that is slower than its sources' peak is emptied in the pauses. What comes meanwhile waits in the
switch's buffer, and is dropped when that is full. Pure functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowcheck.plan.traffic.loss_law import Direction

__all__ = ["Burst", "fewest_ports", "most_peak"]


@dataclass(frozen=True)
class Burst:
    """Copies for all ports of one node together. peak_gbps: while gradients are sent. mean_gbps: over an iteration.
    seconds: of one burst; pauses are taken to be long enough to empty the buffer."""

    peak_gbps: float
    mean_gbps: float
    seconds: float

    def buffer_mb(self, room_gbps: float) -> float:
        """10^6 bytes that wait at the end of a burst, of all its monitor ports together."""
        return max(0.0, self.peak_gbps - room_gbps) * self.seconds * 1e9 / 8 / 1e6

    def lost(self, room_gbps: float, buffer_mb: float) -> float:
        """Share of the copies that find no room. buffer_mb: that the switch gives to all of them together."""
        if self.mean_gbps > room_gbps:  # never empty
            return 1 - room_gbps / self.mean_gbps
        sent = self.peak_gbps * self.seconds * 1e9 / 8 / 1e6
        return max(0.0, self.buffer_mb(room_gbps) - buffer_mb) / sent


def most_peak(ports: int, monitor_gbps: float, streams: int, direction: Direction, splits: bool) -> float:
    """Gb/s of each direction of a mirrored port up to which so many monitor ports carry all copies.

    What is copied of a port is not cut: a port goes whole to one monitor port; where the platform splits, its two
    directions may go to two, and a monitor port then has one direction of all its sources.
    """
    if direction != "both":
        return monitor_gbps / math.ceil(streams / ports)
    whole = monitor_gbps / (2 * math.ceil(streams / ports))
    if not splits or ports < 2:
        return whole
    return max(whole, monitor_gbps / math.ceil(streams / (ports // 2)))


def fewest_ports(load_gbps: float, monitor_gbps: float, streams: int, direction: Direction, splits: bool) -> int | None:
    """Monitor ports that carry `streams` mirrored ports at this load of each direction; None: no number does."""
    most = streams * 2
    if most_peak(most, monitor_gbps, streams, direction, splits) < load_gbps:
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        enough = most_peak(middle, monitor_gbps, streams, direction, splits) >= load_gbps
        low, high = (low, middle) if enough else (middle + 1, high)
    return low
