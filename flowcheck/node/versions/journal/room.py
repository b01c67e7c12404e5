"""What a journal has room for: iterations in its ring, and how often it takes a base. Pure.

    room = room_of(settings, entry_bytes, state_bytes)
    room.entries, room.every, room.back        iterations in the ring, steps from one base to the next, steps back

Two bases are kept, a third one is being written at times, and one step that was made again lies there. A base is due
every two fifths of the ring. So the older of the two that are whole is still within the ring when the newer one has
just come, also where writing that took a fifth of the ring; and so many steps back can be had at all times.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowcheck.node.config.journal import JournalSettings

__all__ = ["BASES", "LEAST", "Room", "room_of", "wants"]

BASES = 2
LEAST = 4  # iterations, of a ring that is of any use


@dataclass(frozen=True)
class Room:
    """ring: bytes. entries: iterations that it holds. every: steps from a base to the next. back: steps back that can
    be had at all times, once there is a base that old."""

    ring: int
    entries: int

    @property
    def every(self) -> int:
        return max(1, self.entries * 2 // 5)

    @property
    def back(self) -> int:
        return self.every


def room_of(settings: JournalSettings, entry: int, state: int) -> Room:
    """entry: bytes of an iteration in the ring. state: of a base. `entries` is less than LEAST where that is too little
    room."""
    left = max(0, (settings.megabytes << 20) - (BASES + 2) * state)
    fit = left // max(entry, 1)
    wanted = min(fit, _entries(settings.keep)) if settings.keep else fit
    return Room(min(left, (wanted + 1) * entry), wanted)


def wants(settings: JournalSettings, entry: int, state: int) -> int:
    """MiB that `keep` needs, or the least that is of any use."""
    return -(-(_entries(settings.keep) * entry + (BASES + 2) * state) >> 20)


def _entries(keep: int) -> int:
    """Of a ring with which so many steps back can be had."""
    return max(LEAST, -(-5 * keep // 2))
