"""What came for iterations that were closed: their elements are late, whatever was the cause when they closed.

    named = with_late(plan, engine, iterations)      IterationReports whose `missing` says so

An iteration closes when packets of a much later one need its arena, so captures whose packets come in another order
than they were sent bring it when it is too late. Then nothing of it may have been seen yet, and it looked as if no port
with it was mirrored. Only at the end of the captures is known which was which.

    late            they are in the captures, after packets of an iteration that was sent long after them
    not_mirrored    no connection in the captures carries them reduced, up to the end
    lost            the rest of what was one of the two
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from parser.machine import Engine

from flowcheck.offline.report import BucketReport, IterationReport
from flowcheck.rebuild.iteration.evidence import element_range, not_mirrored
from flowcheck.rebuild.iteration.intervals import both, intervals, total, without
from flowcheck.rebuild.iteration.verdict import BucketEvidence, with_causes
from flowcheck.rebuild.plan import BucketPlace, JobPlan

__all__ = ["with_late"]

ORDER = ("disagreed", "overload", "late", "not_mirrored", "icrc", "unanchored", "disagreement", "lost")
Place = tuple[int, int]  # first region byte, bytes


def with_late(plan: JobPlan, engine: Engine, iterations: Sequence[IterationReport]) -> list[IterationReport]:
    """The same reports, with what is late named. At the end of the captures."""
    came: dict[int, list[Place]] = {}
    for iteration, offset, nbytes in engine.late_places():
        came.setdefault(iteration, []).append((offset, nbytes))
    return [_named(plan, engine, one, came[one.iteration]) if one.iteration in came else one for one in iterations]


def _named(plan: JobPlan, engine: Engine, one: IterationReport, came: Sequence[Place]) -> IterationReport:
    reports = [*one.buckets, *one.gathered]
    places = plan.iteration_places(one.iteration)
    found = [_bucket(plan, engine, one.iteration, *pair, came) for pair in zip(reports, places, strict=True)]
    if found == reports:
        return one
    return dataclasses.replace(
        one, buckets=found[: len(one.buckets)], gathered=found[len(one.buckets) :],
        verdict=with_causes(one.verdict, _evidence(reports, len(one.buckets)), _evidence(found, len(one.buckets))),
    )


def _evidence(reports: Sequence[BucketReport], buckets: int) -> list[BucketEvidence]:
    return [
        BucketEvidence(
            report.index, report.elements, report.placed_elements, report.missing,
            "bucket" if number < buckets else "parameter group",
        )
        for number, report in enumerate(reports)
    ]


def _bucket(
    plan: JobPlan, engine: Engine, iteration: int, report: BucketReport, place: BucketPlace, came: Sequence[Place]
) -> BucketReport:
    said = report.missing
    open_ = said.get("not_mirrored", 0) + said.get("lost", 0)
    placed = intervals([(part.start, part.end) for part in report.placed])
    missing = without(intervals([(0, place.elements)]), placed)
    late = both(missing, intervals([element_range(place, at - place.offset, nbytes) for at, nbytes in came]))
    if not open_ or not total(late):
        return report
    never = total(not_mirrored(plan, engine, iteration, place, without(missing, late)))
    absent = min(said.get("not_mirrored", 0), never)
    counts = {**said, "not_mirrored": absent, "late": min(total(late), open_ - absent)}
    counts["lost"] = open_ - absent - counts["late"]
    return dataclasses.replace(report, missing={cause: counts[cause] for cause in ORDER if counts.get(cause)})
