"""What a journal has room for: iterations in its ring, and how often it takes a base. Pure.

    sizes = sizes_of(plan)                     bytes of an iteration in the ring, and of a base
    room = room_of(settings, entry_bytes, state_bytes)
    room.entries, room.every, room.back        iterations in the ring, steps from one base to the next, steps back
    too_little(settings, entry_bytes, state_bytes)         what does not fit, "": it does

Two bases are kept, a third one is being written at times, and one step that was made again lies there. A base is due
every two fifths of the ring. So the older of the two that are whole is still within the ring when the newer one has
just come, also where writing that took a fifth of the ring; and so many steps back can be had at all times.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowcheck.job.model import dtype_size
from flowcheck.node.config.journal import JournalSettings
from flowcheck.node.versions.journal.entries import Heads
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.recipe import replica_bytes

__all__ = ["BASES", "LEAST", "Room", "room_of", "sizes_of", "too_little", "wants"]

BASES = 2
OF_LOG = 4  # times what parameters take: a base of a log, whatever the optimizer keeps
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


def sizes_of(plan: JobPlan) -> tuple[int, int]:
    """Bytes of an iteration in the ring, and of a base."""
    job = plan.job
    state = replica_bytes(job, 2) // 2 if job.optimizer is not None else OF_LOG * sum(
        entry.elements * dtype_size(entry.dtype) for entry in job.model)
    return Heads(plan, "0" * 64).most, state


def too_little(settings: JournalSettings, entry: int, state: int) -> str:
    room = room_of(settings, entry, state)
    if room.entries >= LEAST and room.back >= settings.keep:
        return ""
    return (f"{settings.megabytes} MiB hold {room.entries} iterations of {entry >> 20} MiB beside {BASES + 2} states of"
            f" {state >> 20} MiB: {room.back if room.entries >= LEAST else 0} steps back")


def wants(settings: JournalSettings, entry: int, state: int) -> int:
    """MiB that `keep` needs, or the least that is of any use."""
    return -(-(_entries(settings.keep) * entry + (BASES + 2) * state) >> 20)


def _entries(keep: int) -> int:
    """Of a ring with which so many steps back can be had."""
    return max(LEAST, -(-5 * keep // 2))
