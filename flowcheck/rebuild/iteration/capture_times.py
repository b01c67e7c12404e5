"""Are captures of one run? By the times of their packets: nothing else tells two runs of one script apart.

    times = CaptureTimes(engine, names)
    found = times.look(iteration)        when it closes, in order: why it is refused, and marks

Two runs of a job have the same addresses, queue pairs and packet numbers as a rule. Where each brings another part of
the reduced bytes no two copies differ, and what is put together is a gradient that no trainer had. In one run all flows
of an iteration are on the wire at the same time: none begins after another has ended. Two runs are further apart than
the clocks of two machines should be.

    all flows of an iteration overlap, up to APART seconds     nothing
    more than APART seconds                                    a mark: two runs, or clocks that differ
    more than REFUSED seconds                                  the iteration is refused
    an iteration follows another one PAUSE seconds later       a mark; HANDED_OVER seconds, where no capture has both

The marks stay: what comes later is built on what was marked. One thread, between runs of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parser.machine import Engine

__all__ = ["CaptureTimes", "Found"]

APART, REFUSED, HANDED_OVER, PAUSE = 1.0, 60.0, 60.0, 600.0  # seconds
START_UP = -1  # the parameters that the start-up brings, as an iteration
ONE_RUN = "captures of two runs, or clocks that differ (editcap -t)"

_Spans = dict[int, tuple[int, int]]  # by stream: (first, last), nanoseconds


class Found(NamedTuple):
    """refused: why the captures are not of one run, "". marks: of this iteration and of those before."""

    refused: str
    marks: tuple[str, ...]


class CaptureTimes:
    """names[i]: what people call stream i."""

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        self._engine, self._names = engine, names
        self._marks: dict[str, str] = {}  # by their kind: each is said once, of the first that was found
        self._before: tuple[int, _Spans] | None = None  # the iteration looked at last

    def look(self, iteration: int) -> Found:
        """`iteration` closes: all its packets have come."""
        spans = self._spans(iteration)
        if self._before is None:
            self._before = START_UP, self._spans(START_UP)
            self._apart(START_UP, self._before[1])
        before, self._before = self._before, (iteration, spans)
        self._follows(*before, iteration, spans)
        if len(spans) > 1 and (untimed := [stream for stream, (first, _) in spans.items() if not first]):
            self._marks.setdefault("untimed", f"{self._names[untimed[0]]} has no times: it may be of another run")
            return Found("", tuple(self._marks.values()))
        flows = {stream: found for stream, found in enumerate(self._engine.flow_times(iteration)) if found is not None}
        return Found(self._apart(iteration, flows), tuple(self._marks.values()))

    def _spans(self, iteration: int) -> _Spans:
        return {stream: span for stream, span in enumerate(self._engine.stream_times(iteration)) if span is not None}

    def _apart(self, iteration: int, flows: _Spans) -> str:
        """Marks what does not overlap; returns why it is refused. flows: by stream, when the last flow began and when
        the first one ended."""
        if not flows:
            return ""
        late, early = max(flows, key=lambda i: flows[i][0]), min(flows, key=lambda i: flows[i][1])
        seconds = (flows[late][0] - flows[early][1]) / 1e9
        if seconds <= APART:
            return ""
        two = f"{self._names[early]} and {self._names[late]}" if early != late else f"flows in {self._names[late]}"
        what = "the start-up" if iteration == START_UP else f"iteration {iteration}"
        said = f"times of {what} in {two} are {seconds:.1f} s apart: {ONE_RUN}"
        self._marks.setdefault("apart", said)
        return said if seconds > REFUSED else ""

    def _follows(self, before: int, earlier: _Spans, iteration: int, later: _Spans) -> None:
        """Marks an iteration that may be of another run than the one before."""
        if not earlier or not later:
            return
        common = earlier.keys() & later.keys()
        stream = min(common or later)
        end = earlier[stream][1] if common else max(last for _, last in earlier.values())
        seconds = abs(later[stream][0] - end) / 1e9
        if seconds <= (PAUSE if common else HANDED_OVER) or (common and before == START_UP):
            return
        what = "the start-up" if before == START_UP else f"iteration {before}"
        where = self._names[stream] if common else f"{self._names[stream]}, which has nothing of {what}"
        self._marks.setdefault(
            "follows", f"{what} and iteration {iteration} are {seconds:.1f} s apart, in {where}: {ONE_RUN}"
        )

