"""What a journal can make: from each base the steps up to the first iteration that is not in it. Reads files alone.

    reach = reach_of(folder)                    None: nothing of one can be read
    reach.spans                                 what can be had, of each line the base that is nearest before it
    reach.base_for(step)                        which base a step is made from; None: it cannot be
    reach.holes                                 iterations between entries that are there

An entry belongs to a line, and is applied to a base of that line alone (folders.py). A line that has diverged ends with
the last step that was verified. Of a log, which has no versions of its own: log_shelf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from flowcheck.errors import FlowcheckError
from flowcheck.journal.reader import RingReader
from flowcheck.node.versions.journal.entries import line_of
from flowcheck.node.versions.journal.folders import Folder, Place
from flowcheck.node.versions.journal.job_text import JobText

__all__ = ["Reach", "Span", "reach_of"]


@dataclass(frozen=True)
class Span:
    """Steps after `base` up to `last` can be made from it; last: base.step if none can."""

    base: Place
    last: int


@dataclass(frozen=True)
class Reach:
    """job: of the journal. lines: by iteration, of what is in it. entry: bytes of the largest entry."""

    folder: Folder
    job: JobText
    spans: tuple[Span, ...]
    lines: Mapping[int, str]
    entry: int

    def base_for(self, step: int) -> Place | None:
        """The nearest base before a step, of those from which it can be made; of the newest line, if there are
        several."""
        fit = [one.base for one in self.spans if one.base.step < step <= one.last]
        return fit[-1] if fit else None

    @property
    def holes(self) -> list[tuple[int, int]]:
        """First and last iteration of each."""
        there = sorted(self.lines)
        return [(one + 1, other - 1) for one, other in pairwise(there) if other > one + 1]


def reach_of(folder: Folder) -> Reach | None:
    """An entry belongs to a base if it names the base's line, and so do all between them."""
    job = JobText.read(folder.job)
    if job is None:
        return None
    try:
        entries = RingReader(folder.ring).entries
    except (OSError, FlowcheckError):
        return None
    lines = {one.number: line for one in entries if (line := line_of(one.head, job.plan))}
    spans = []
    for base in folder.bases:
        ends, last = folder.ends(base.line), base.step
        if ends is not None and base.step > ends:
            continue
        while lines.get(last) == base.line and (ends is None or last < ends):
            last += 1
        spans.append(Span(base, last))
    return Reach(folder, job, tuple(spans), lines, max((one.nbytes for one in entries), default=0))
