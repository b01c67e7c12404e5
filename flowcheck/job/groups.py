"""Parameter groups of a manifest: the AllGathers of an iteration that carry parameters, checked.

`check_groups(job, iteration, place)` raises UserError at the first contradiction: groups not numbered 0..n-1,
two calls of one group that differ, slices outside the gathered tensor or over one another, an entry of which
a part is never gathered. Called by check.py; standard library only.
"""

from __future__ import annotations

from flowcheck.job.form import Place, shown
from flowcheck.job.model import Collective, Job

__all__ = ["check_groups"]


def check_groups(job: Job, iteration: int, place: Place) -> None:
    """Raise UserError if the parameter groups of an iteration contradict the model or each other."""
    calls = job.parameter_calls(iteration)
    here = place / "collectives" / ("steady" if iteration else "iteration_0")
    groups: dict[int, Collective] = {}
    for group, call in calls:
        first = groups.setdefault(group, call)
        if (first.count, first.dtype, first.tensors, first.layout) != (
            call.count, call.dtype, call.tensors, call.layout,
        ):
            here.fail(f"two AllGathers are of parameter group {group} and differ in count, dtype or layout")
        if call.after_update != calls[0][1].after_update:
            here.fail("some of the parameters are gathered before the iteration's update and some after it")
    if sorted(groups) != list(range(len(groups))):
        here.fail(f"the parameter groups of an iteration must be 0..{len(groups) - 1}, and are {sorted(groups)[:16]}")
    covered: dict[str, list[tuple[int, int]]] = {}
    dtypes: dict[str, str] = {}
    for group, call in sorted(groups.items()):
        _check_group(job, call, here, f"parameter group {group}")
        for piece in job.parameter_slices(call):
            covered.setdefault(piece.name, []).append((piece.start, piece.start + piece.length))
            if dtypes.setdefault(piece.name, call.dtype) != call.dtype:
                here.fail(f"{shown(piece.name)} is gathered partly as {dtypes[piece.name]}, partly as {call.dtype}")
    for entry in job.model:
        if entry.name in covered:
            end = 0
            for start, stop in sorted(covered[entry.name]):
                if start != end:
                    which = f"element {end}" if start > end else f"element {start} twice"
                    here.fail(f"{shown(entry.name)} is not gathered exactly once: {which}")
                end = stop
            if end != entry.elements:
                here.fail(f"{shown(entry.name)} is not gathered whole: element {end} is in no group")


def _check_group(job: Job, call: Collective, here: Place, name: str) -> None:
    entries = {entry.name: entry for entry in job.model}
    total = call.count * job.communicator.ranks
    reach = 0
    for piece in sorted(job.parameter_slices(call), key=lambda piece: (piece.offset, piece.length)):
        end = piece.start + piece.length
        if piece.length < 0 or piece.start < 0 or end > entries[piece.name].elements:
            here.fail(
                f"{name}: elements {piece.start}..{end} are outside {shown(piece.name)}"
                f" ({entries[piece.name].elements})"
            )
        if piece.offset < reach or piece.offset + piece.length > total:
            here.fail(
                f"{name}: {shown(piece.name)} at elements {piece.offset}..{piece.offset + piece.length} overlaps"
                f" another slice or leaves the gathered tensor of {total}"
            )
        reach = piece.offset + piece.length
