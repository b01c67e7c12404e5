"""What came of a scenario: versions of the node against the trainers' own state, and what was said of them.

    verdict = judge(expected, at, boundaries, versions, ...)

Pure, and it knows nothing of how versions are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .table import PERIOD, Expected

__all__ = ["LEAST_EQUAL", "Boundary", "Offer", "Verdict", "Version", "judge"]

LEAST_EQUAL = 4  # versions before a change: else nothing was tried
Hashes = Mapping[str, str]


@dataclass(frozen=True)
class Boundary:
    """A rank at the end of an iteration.

    tensors, optimizer: SHA-256 by name.
    buffers: names among `tensors` that DDP takes from rank 0.
    attachment: which one of the start it is, where the script attaches again.
    state, why, published: of the attachment after its `step`.
    """

    start: int
    iteration: int
    rank: int
    tensors: Hashes
    optimizer: Hashes
    buffers: Sequence[str] = ()
    attachment: int = 0
    state: str = "attached"
    why: str = ""
    published: tuple[int, str] = (-1, "")


@dataclass(frozen=True)
class Version:
    """A version that the node has published: SHA-256 by name, and the status that it had then and later."""

    start: int
    iteration: int
    tensors: Hashes
    optimizer: Hashes
    statuses: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Offer:
    """
    A version that somebody would get who asks for one after the scenario.

    chosen: it is the one that `recover` gives, and `tensors` are what came.
    """

    iteration: int
    status: str
    chosen: bool = False
    tensors: Hashes = field(default_factory=dict)


@dataclass
class Verdict:
    """
    outcome: equal, named, caught; or what must not be:
        silent: versions are wrong, and nobody says so in time;
        verified: a wrong version was said to be verified;
        kept: wrong versions were found, and are still offered without a mark;
        abandoned: `recover` gives a version that is not of the last start;
        nothing: there are neither versions nor a reason;
        early, late: a reason that has to do with something else than the change.
    equal, wrong: iterations of versions that are so.
    marks: iterations at which something was said.
    why: the first thing that was said.
    """

    outcome: str
    equal: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    why: str = ""
    differs: str = ""  # the first tensor that does

    def good(self, expected: Expected) -> bool:
        known = {"equal": Expected.EQUAL, "named": Expected.NAMED, "caught": Expected.CAUGHT}
        return self.outcome in known and known[self.outcome] >= expected

    def __str__(self) -> str:
        parts = [f"{self.outcome}: {len(self.equal)} equal"]
        if self.wrong:
            parts.append(f"{len(self.wrong)} wrong ({self.wrong[0]} to {self.wrong[-1]}, {self.differs})")
        elif self.differs:
            parts.append(self.differs)
        if self.marks:
            parts.append(f"said at {self.marks[0]}: {self.why}")
        return ", ".join(parts)


def judge(
    at: int | None, boundaries: Iterable[Boundary], versions: Iterable[Version],
    said: Mapping[int, str], offers: Iterable[Offer] = (), period: int = PERIOD,
) -> Verdict:
    """at: the iteration of the change, None: from the beginning. said: what the node said of iterations that it could
    not publish, or found to be wrong. offers: of the end."""
    truth: dict[tuple[int, int], list[Boundary]] = {}
    for one in boundaries:
        truth.setdefault((one.start, one.iteration), []).append(one)
    marks = dict(said) | _named(truth)
    equal, wrong, differs, verified = [], [], "", False
    for version in sorted(versions, key=lambda one: (one.start, one.iteration)):
        difference = _difference(version, truth.get((version.start, version.iteration), []))
        if not difference:
            equal.append(version.iteration)
            continue
        wrong.append(version.iteration)
        differs = differs or difference
        verified = verified or "verified" in version.statuses
    verdict = Verdict("", equal, wrong, sorted(marks), marks[min(marks)] if marks else "", differs)
    verdict.outcome = _outcome(at, verdict, verified, period)
    if verdict.outcome in ("equal", "named", "caught"):
        last = max((start for start, _ in truth), default=0)
        for offer in offers:
            if offer.chosen and not _of_start(offer, truth, last):
                verdict.outcome, verdict.differs = "abandoned", f"step {offer.iteration + 1}, {offer.status}"
            elif not offer.chosen and offer.iteration in wrong and offer.status != "diverged":
                verdict.outcome = "kept"
    return verdict


def _of_start(offer: Offer, truth: Mapping[tuple[int, int], Sequence[Boundary]], start: int) -> bool:
    """Is it on the line of that start? A step before its first one is on an earlier start's line."""
    first = min((iteration for one, iteration in truth if one == start), default=0)
    starts = [start] if offer.iteration >= first else [one for one, i in truth if i == offer.iteration]
    return any(boundary.tensors == offer.tensors for one in starts
               for boundary in truth.get((one, offer.iteration), ())[:1])


def _outcome(at: int | None, it: Verdict, verified: bool, period: int) -> str:
    if verified:
        return "verified"
    if it.wrong:
        found = all(any(one <= mark <= one + period for mark in it.marks) for one in it.wrong)
        return "caught" if found else "silent"
    if it.marks:
        if at is None:
            return "named"
        if it.marks[0] < at or len(it.equal) < LEAST_EQUAL:
            return "early"
        return "named" if it.marks[0] <= at + 1 else "late"
    return "equal" if len(it.equal) >= LEAST_EQUAL else "nothing"


def _named(truth: Mapping[tuple[int, int], Sequence[Boundary]]) -> dict[int, str]:
    """
    Boundaries at which an attachment said something that counts: it was attached in all ranks before, or is refused or
    without a connection, or it is the last boundary and it has never been attached.
    """
    found: dict[int, str] = {}
    for start in {start for start, _ in truth}:
        numbers = sorted(number for one, number in truth if one == start)
        attached: set[int] = set()
        for iteration in numbers:
            ranks = truth[start, iteration]
            if all(one.state == "attached" for one in ranks):
                attached.add(ranks[0].attachment)
            for one in ranks:
                odd = one.attachment in attached and (one.state != "attached" or one.why)
                never = iteration == numbers[-1] and one.attachment not in attached
                if one.why and (odd or never or one.state in ("refused", "lost")):
                    found.setdefault(iteration, f"{one.state}: {one.why}")
    return found


def _difference(version: Version, ranks: Sequence[Boundary]) -> str:
    """The first name whose hash differs from any rank's, "": there is none."""
    if not ranks:
        return "an iteration that no rank has done"
    for one in ranks:
        ignored = one.buffers if one.rank else ()
        for mine, theirs in ((version.tensors, one.tensors), (version.optimizer, one.optimizer)):
            for name in sorted(mine.keys() | theirs.keys()):
                if mine.get(name) != theirs.get(name) and name not in ignored:
                    return name if one.rank == 0 else f"{name} of rank {one.rank}"
    return ""
