"""The verdict: the only gate to publishing version t+1.

`judge(evidence)` is a pure function from what is known about one iteration to a Verdict. It fails closed:
an iteration without buckets or streams, books that do not balance, or a word it does not know fail the
clause they belong to. Only this decides that a version may be published. The scheduler closes an iteration by a count
of cells, which proves nothing.

    clause         holds when                                                    about
    covered        every element of every bucket is there, or patched           gradients
    anchored       every flow is anchored, no two witnesses disagreed           gradients
    streams_past   every stream is past the last message, ended, or lost        gradients
    copies_agree   copies that differed left holes, which `covered` names       gradients
    supported      the job is one whose traffic we can place                    gradients
    one_run        no capture's times say that it is of another run             gradients
    step_record    the step record is there, if the manifest declares one       this update
    checksum       no checksum of the trainer mismatched                        this update
    previous       the previous iteration was published                         this update

A verdict is *complete* when the clauses about gradients hold without a patch: the reduced gradients are the trainer's.
A version into which the trainer's own state of every element that was lost has been written is as good as one whose
gradients were all there; one that waits for such elements, of this iteration or of one before, is not published.
It is *publishable* when all hold: then, and only then, the caller may publish the new version. A packet with a wrong
ICRC is not placed: its elements are missing, and `covered` names the cause. ICRCs that nobody checks fail no clause,
nor does a flow that disagreed in an earlier iteration and was trusted again, nor captures whose times are
some seconds apart, nor bytes that another node gave, until a checksum of the trainer has matched; they mark the verdict
*unproven*, and the mark goes wherever the result goes.

Clause values are stable names: reports, metrics and status use them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["BucketEvidence", "Clause", "Evidence", "StreamEvidence", "Verdict", "judge", "with_causes"]


class Clause(enum.Enum):
    COVERED = "covered"
    ANCHORED = "anchored"
    STREAMS_PAST = "streams_past"
    COPIES_AGREE = "copies_agree"
    SUPPORTED = "supported"
    ONE_RUN = "one_run"
    STEP_RECORD = "step_record"
    CHECKSUM = "checksum"
    PREVIOUS = "previous"


ABOUT_GRADIENTS = frozenset({
    Clause.COVERED, Clause.ANCHORED, Clause.STREAMS_PAST, Clause.COPIES_AGREE, Clause.SUPPORTED, Clause.ONE_RUN,
})


@dataclass(frozen=True)
class BucketEvidence:
    """One gradient bucket, counted in elements. missing: by cause, adding up to elements - covered.
    what: how reasons name it; "parameter group" for gathered parameters, to which the same clauses apply."""

    index: int
    elements: int
    covered: int
    missing: Mapping[str, int]
    what: str = "bucket"


@dataclass(frozen=True)
class StreamEvidence:
    """One captured stream. past: it is beyond the iteration's last message; ended: its capture is over;
    lost: declared lost; behind: more of the iteration may still come."""

    name: str
    state: Literal["past", "ended", "lost", "behind"]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that counts for one iteration. No field has a default: what nobody looked at must not pass.

    final: by which sign nothing more of what is missing comes (holes.py); "": nothing is missing.
    unanchored: names of flows of this iteration whose packet count no other witness confirmed.
    disagreements: one logged sentence per disagreement between witnesses, values included.
    recovered: one sentence per flow that disagreed before this iteration and has been trusted again since.
    icrc_checked: the ICRC of every packet that was placed was right. (One that was wrong is a loss: it shows as
        missing elements, cause icrc.)
    differences: one sentence per copy that differed from the one before, with connection and PSN of both. What they
        carry is missing, cause disagreed.
    copies_disagreed: bytes of copies that differ and are not missing; copies_first: the first place of any that differ.
    step_record_declared, step_record_present: the manifest declares per-step values; the record is here.
    checksum: what the trainer's checksum of this iteration said, None if there was none.
    refused: why the traffic cannot be placed at all ("" if it can).
    another_run: why the captures are not of one run ("": nothing says so); times: marks, where they may not be
        (capture_times.py).
    previous_published: the version before was published (true for the first iteration of a replica), or is partial and
        known to the element.
    stale: elements of the version, which was built although gradients of this iteration or of one before are missing,
        that still wait for the trainer's own state of them. None: it was not built so.
    from_peers: what the version holds of other nodes' bytes, of this iteration or of one before, that no checksum of an
        earlier iteration has confirmed; "" if nothing.
    """

    iteration: int
    buckets: tuple[BucketEvidence, ...]
    final: str
    unanchored: tuple[str, ...]
    disagreements: tuple[str, ...]
    recovered: tuple[str, ...]
    icrc_checked: bool
    streams: tuple[StreamEvidence, ...]
    differences: tuple[str, ...]
    copies_disagreed: int
    copies_first: str
    step_record_declared: bool
    step_record_present: bool
    checksum: Literal["match", "mismatch"] | None
    refused: str
    another_run: str
    times: tuple[str, ...]
    previous_published: bool
    stale: int | None
    from_peers: str


@dataclass(frozen=True)
class Verdict:
    """complete: the gradients are all there and right. publishable: version t+1 may be published.

    failing: (clause, reason) of every clause that does not hold, in the order of the module's table.
    unproven: marks that go wherever the result goes; empty when every packet was checked.
    final: by which sign its holes are holes for good: the evidence's word.
    """

    iteration: int
    complete: bool
    publishable: bool
    failing: tuple[tuple[Clause, str], ...]
    unproven: tuple[str, ...]
    final: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "complete": self.complete,
            "publishable": self.publishable,
            "failing": [{"clause": clause.value, "reason": reason} for clause, reason in self.failing],
            "unproven": list(self.unproven),
            "final": self.final,
        }


def judge(evidence: Evidence) -> Verdict:
    """The verdict over one iteration; see the module's table."""
    holes = _covered(evidence)
    reasons = {
        Clause.COVERED: holes if evidence.stale is None else _patched(evidence.stale, holes),
        Clause.ANCHORED: _anchored(evidence),
        Clause.STREAMS_PAST: _streams_past(evidence),
        Clause.COPIES_AGREE: _copies_agree(evidence),
        Clause.SUPPORTED: evidence.refused,
        Clause.ONE_RUN: evidence.another_run,
        Clause.STEP_RECORD: _step_record(evidence),
        Clause.CHECKSUM: _checksum(evidence),
        Clause.PREVIOUS: _previous(evidence),
    }
    failing = tuple((clause, reason) for clause, reason in reasons.items() if reason)
    gradients = {clause for clause, _ in failing if clause in ABOUT_GRADIENTS} - {Clause.COVERED}
    return Verdict(
        iteration=evidence.iteration,
        complete=not holes and not gradients,
        publishable=not failing,
        failing=failing,
        unproven=tuple(_unproven(evidence)),
        final=evidence.final,
    )


def _unproven(evidence: Evidence) -> Iterator[str]:
    if not evidence.icrc_checked:
        yield "icrc off"
    yield from evidence.recovered
    yield from evidence.times
    if evidence.from_peers and evidence.checksum != "match":
        yield evidence.from_peers


# -- one function per clause: the reason why it fails, or "" -------------------------------------------


def with_causes(verdict: Verdict, before: Sequence[BucketEvidence], now: Sequence[BucketEvidence]) -> Verdict:
    """The same verdict, where more is known by now about what is missing: other causes, never other elements."""
    old, new = _some(_holes(before)), _some(_holes(now))
    failing = tuple(
        (clause, new + reason.removeprefix(old) if clause is Clause.COVERED else reason)
        for clause, reason in verdict.failing
    )
    return dataclasses.replace(verdict, failing=failing)


def _covered(evidence: Evidence) -> str:
    if not evidence.buckets:
        return "no gradient bucket and no parameter group was seen"
    texts = _holes(evidence.buckets)
    return "; ".join([_some(texts)] + ([_some(list(evidence.differences))] if texts and evidence.differences else []))


def _holes(buckets: Sequence[BucketEvidence]) -> list[str]:
    texts = []
    for bucket in buckets:
        if bucket.covered == bucket.elements and not any(bucket.missing.values()):
            continue
        causes = ", ".join(f"{cause} {count}" for cause, count in bucket.missing.items() if count)
        text = f"{bucket.what} {bucket.index}: {bucket.covered} of {bucket.elements} elements"
        text += f", missing by cause: {causes}" if causes else ""
        if bucket.covered + sum(bucket.missing.values()) != bucket.elements:
            text += " (the counts do not add up)"
        texts.append(text)
    return texts


def _patched(stale: int, holes: str) -> str:
    if not stale:
        return ""
    waiting = f"{stale} elements of the version wait for the trainer's own state of them"
    return f"{waiting}; {holes}" if holes else waiting


def _anchored(evidence: Evidence) -> str:
    texts = list(evidence.disagreements)
    texts += [f"{flow}: no witness confirms the packet count" for flow in evidence.unanchored]
    return _some(texts)


def _streams_past(evidence: Evidence) -> str:
    if not evidence.streams:
        return "no stream was seen"
    return _some([
        f"{stream.name} is {stream.state}" for stream in evidence.streams
        if stream.state not in ("past", "ended", "lost")
    ])


def _copies_agree(evidence: Evidence) -> str:
    if not evidence.copies_disagreed:
        return ""
    return f"{evidence.copies_disagreed} bytes of later copies differ, first at {evidence.copies_first}"


def _step_record(evidence: Evidence) -> str:
    absent = evidence.step_record_declared and not evidence.step_record_present
    return "the manifest declares per-step values and their record is not here" if absent else ""


def _checksum(evidence: Evidence) -> str:
    if evidence.checksum in (None, "match"):
        return ""
    return "the trainer's checksum or sample of its state differs from the replica's"


def _previous(evidence: Evidence) -> str:
    if evidence.previous_published:
        return ""
    return "the iteration before was not published; there is nothing to build on"


def _some(texts: list[str], limit: int = 3) -> str:
    """Reasons in one line; the report's tables have the rest."""
    more = [f"and {len(texts) - limit} more"] if len(texts) > limit else []
    return "; ".join(texts[:limit] + more)
