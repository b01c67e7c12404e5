"""What a follower returns: one dataclass for each thing that can happen to a job.

Iterations count as the manifest does. Sentences in `why` are for people and name iterations as the trainer does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.iteration.deadline import Times
from flowcheck.rebuild.iteration.measuring import Measured
from flowcheck.rebuild.iteration.merger import healed
from flowcheck.rebuild.iteration.verdict import Clause
from flowcheck.rebuild.version.building import Built

__all__ = [
    "Asked", "Begun", "Behind", "Broken", "CaughtUp", "Closed", "Event", "FromPeers", "GivenUp", "GradientsMeasured",
    "Held", "Lost", "NotCaughtUp", "OnTime", "Patched", "Read", "Resumed", "Skipped", "TakenUp", "Timed", "Waiting",
    "closed",
]


@dataclass(frozen=True)
class Event:
    """Something happened."""


@dataclass(frozen=True)
class Closed(Event):
    """One iteration as it went by. Counts are of packets, since the iteration before closed.

    published: its verdict stands, and so does the version that was built with it. status: of the versions, then.
    missing: elements by cause. final: by which sign they are missing for good (iteration/holes.py). healed: packets
    that some stream or connection lacked although nothing is missing.
    lag: iterations of which records have come and no version is published.
    updates, rebuilt: how the version was built (building.py:Built); "" and 0 where none was.
    patched: elements of its version that are the trainer's own, sent by it. stale: that still wait for that.
    why: (clause, reason) of what failed; without the step record where none was waited for.
    filled: cells of 8 bytes by the source that brought them (iteration/merger.py).
    unproven: what the verdict rests on and nothing has shown.
    sampled: tensors of its version of which the trainer's record had some elements, all of them equal.
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
    patched: int = 0
    stale: int = 0
    final: str = ""
    filled: dict[str, int] = field(default_factory=dict)
    unproven: list[str] = field(default_factory=list)
    sampled: int = 0


def closed(judged: Judged, built: Built, *, published: bool, status: str, lag: int, lost: bool) -> Closed:
    """The event of an iteration. lost: no version waits for it, so its step record is not missed."""
    counts = judged.counts
    missing: dict[str, int] = {}
    for bucket in (*judged.buckets, *judged.groups):
        for cause, count in bucket.missing.items():
            missing[cause] = missing.get(cause, 0) + count
    clauses = [(clause.value, reason) for clause, reason in judged.verdict.failing]
    if lost and not published:
        clauses = [(name, reason) for name, reason in clauses if name != Clause.STEP_RECORD.value]
    whole = max(counts["gaps"], 0) if judged.verdict.complete else 0
    patched = {"trainer": healed(built.patched, judged.buckets[0].place)} if built.patched else {}
    return Closed(
        judged.verdict.iteration, published, status, counts["packets"], counts["placed"], missing, whole,
        counts["duplicates"], lag, clauses, built.updates, built.rebuilt, judged, built.patched,
        judged.evidence.stale or 0, judged.verdict.final, judged.filled | patched,
        list(judged.verdict.unproven), built.sampled,
    )


@dataclass(frozen=True)
class Lost(Event):
    """The chain of versions has ended; a state is needed to go on from. withdrawn: nothing of what was served until now
    may be any more. diverged: the step that was found to be wrong, None: none was. Those between the last verified one
    and it are not served any more. apart: ranks contradict each other, so no version is the state of all."""

    why: str
    withdrawn: bool = False
    diverged: int | None = None
    apart: bool = False


@dataclass(frozen=True)
class Broken(Event):
    """The log of a job has a hole: iterations from `first` to `last` are not in it. What comes after them needs a base
    that is newer."""

    first: int
    last: int
    why: str


@dataclass(frozen=True)
class Resumed(Event):
    """A replica that an earlier process of this node left is taken up, and served on. steps: of its versions."""

    path: Path
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Begun(Event):
    """Versions are built from `iteration` on, of which nothing is here yet but these gradients: none is published until
    the trainers have sent their own state of so many elements. 0: the version before it is here."""

    iteration: int
    elements: int


@dataclass(frozen=True)
class Held(Event):
    """From this iteration on versions are built although gradients were lost, and none is published until the trainers
    have sent their own state of the elements that are stale. all: the iteration was lost whole."""

    iteration: int
    stale: int
    all: bool
    why: str


@dataclass(frozen=True)
class Asked(Event):
    """Trainers are asked for their state of stale elements: so many, so many bytes of parameter and optimizer state, of
    these ranks. iteration: the next one that closes."""

    iteration: int
    elements: int
    nbytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Patched(Event):
    """The version after `iteration` holds nothing stale any more: it is published, those from `since` on are not.
    elements: that were patched since then. nbytes: of state that the trainers have sent for it."""

    iteration: int
    since: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class FromPeers(Event):
    """Other nodes were asked for what an iteration lacks: so many bytes, with those next to the holes. filled: cells,
    by peer. failed: why nothing came of the others, or is not used."""

    iteration: int
    nbytes: int
    filled: Mapping[str, int]
    failed: Mapping[str, str]


@dataclass(frozen=True)
class CaughtUp(Event):
    """Everything was stale, and a peer's version was taken: step, whose it is, bytes of its tensors, seconds. It is
    published, and waits for `iteration`."""

    iteration: int
    step: int
    source: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class NotCaughtUp(Event):
    """Everything is stale, and no peer's version was taken: trainers are asked for it. failed: why not, by peer."""

    failed: Mapping[str, str]


@dataclass(frozen=True)
class Skipped(Event):
    """These iterations were not judged: after a very long outage, or, at the end of the traffic, where records say that
    they are over. why: "while no packet came"."""

    first: int
    last: int
    why: str


@dataclass(frozen=True)
class Waiting(Event):
    """An iteration waits for something that does not come over the wire; said once."""

    iteration: int
    why: str


@dataclass(frozen=True)
class Read(Event):
    """How many packets were read by now."""

    packets: int


@dataclass(frozen=True)
class Timed(Event):
    """When an iteration came that has closed, and what became of it. Said when the next one has begun to come, or when
    none will. rings: the most packets that waited in a ring since the one before, and how many a ring holds. arenas:
    the most iterations that were alive, and how many can be."""

    times: Times
    rings: tuple[int, int]
    arenas: tuple[int, int]


@dataclass(frozen=True)
class GradientsMeasured(Event):
    """A pass over what an iteration brought has ended (telemetry)."""

    measured: Measured


@dataclass(frozen=True)
class Behind(Event):
    """The node does not keep up, and has lost nothing for it so far. Said once, and again when less is left by half.

    late: nanoseconds by which the version of `iteration` is late by now. in_a_row: how many versions before were late.
    left: iterations until another finds no room, as it looks now; None: it does not get worse.
    stage: what takes longest (iteration/deadline.py); "rings": packets wait to be placed."""

    iteration: int
    late: int
    in_a_row: int
    left: int | None
    stage: str


@dataclass(frozen=True)
class OnTime(Event):
    """Versions are on time again, up to this iteration's; after `Behind`."""

    iteration: int


@dataclass(frozen=True)
class GivenUp(Event):
    """For lack of room, from this iteration on packets are counted and not placed. rings: as of `Timed`, now.
    waits: packets wait for an arena; else they are not taken from the ring fast enough."""

    first: int
    rings: tuple[int, int]
    waits: bool


@dataclass(frozen=True)
class TakenUp(Event):
    """What waited is done: iterations after `last` are placed again. packets: that were not placed."""

    first: int
    last: int
    packets: int
