"""What a follower returns: one dataclass for each thing that can happen to a job.

Iterations count as the manifest does. Sentences in `why` are for people and name iterations as the trainer does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowcheck.rebuild.collector import Judged

__all__ = ["Closed", "Event", "Lost", "Read", "Skipped", "Waiting"]


@dataclass(frozen=True)
class Event:
    """Something happened."""


@dataclass(frozen=True)
class Closed(Event):
    """One iteration as it went by. Counts are of packets, since the iteration before closed.

    published: its verdict stands, and so does the version that was built with it. status: of the versions, then.
    missing: elements by cause. healed: packets that some stream or connection lacked although nothing is missing.
    lag: iterations of which records have come and no version is published.
    updates, rebuilt: how the version was built (building.py:Built); "" and 0 where none was.
    why: (clause, reason) of what failed; without the step record where none was waited for.
    judged: all that is known. The bytes of its buckets lie in the arena until the next event is asked for, and where
    checksums were compared they are gone.
    """

    iteration: int
    published: bool
    status: str
    packets: int
    placed: int
    missing: dict[str, int]
    healed: int
    duplicates: int
    lag: int
    why: list[tuple[str, str]] = field(default_factory=list)
    updates: str = ""
    rebuilt: int = 0
    judged: Judged | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Lost(Event):
    """The chain of versions has ended; a state is needed to go on from."""

    why: str


@dataclass(frozen=True)
class Skipped(Event):
    """After a very long outage these iterations were not judged: no packet of them came."""

    first: int
    last: int


@dataclass(frozen=True)
class Waiting(Event):
    """An iteration waits for something that does not come over the wire; said once."""

    iteration: int
    why: str


@dataclass(frozen=True)
class Read(Event):
    """How many packets were read by now."""

    packets: int
