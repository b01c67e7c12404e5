"""Is what an iteration lacks lost for good? Then it closes now, and not when its arena is needed.

    watch = HoleWatch(plan, engine)
    watch.final(iteration, streams)          "", or the word that says by which sign

A hole is final when every connection that would have brought it, and is in the captures, says so (parser/src/hope.c):

    acknowledged   the receiver has acknowledged the packet, so nobody sends it again
    passed         it has not, as far as the mirror shows, and so many packets of the connection have followed that a
                   repeat would have come
    all_came       every packet came, and what they brought cannot be had: damaged, unanchored, or copies that differ

Of several the weakest is said: passed, else acknowledged. A hole that no connection of the captures would have brought
is never final: one that has not begun yet may bring it.

Reads the engine between bursts, on the thread in charge. Costs a look at the newest messages of each flow; and where
they say that nothing comes any more, once for each iteration, a walk over what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from parser.machine import Engine

from flowcheck.rebuild.iteration.evidence import Carried, bucket_coverage
from flowcheck.rebuild.plan import JobPlan

__all__ = ["Finality", "HoleWatch"]

Finality = Literal["", "all_came", "acknowledged", "passed", "arena_needed", "ended"]

_SIGNS: tuple[Finality, ...] = ("all_came", "acknowledged", "passed")


class HoleWatch:
    def __init__(self, plan: JobPlan, engine: Engine) -> None:
        self._plan, self._engine, self._carried = plan, engine, Carried(plan)
        self._known: tuple[int, bytes] = (-1, b"")  # of which iteration, with which flows seen, it is known
        self._explained = False  # ... whether flows that were seen would have brought all that is missing
        self._lost = False  # ... whether packets of it never came

    def final(self, iteration: int, streams: Iterable[int]) -> Finality:
        """streams: all that may still bring something, each of them past the iteration, which lacks something."""
        signs = [self._engine.hope(stream, iteration) for stream in streams]
        if not signs or any(sign not in _SIGNS for sign in signs) or not self._is_explained(iteration):
            return ""
        sign = max(signs, key=_SIGNS.index)
        return "passed" if sign == "all_came" and self._lost else sign  # so many that nobody remembers which

    def _is_explained(self, iteration: int) -> bool:
        flows = self._engine.flows()
        seen = (iteration, (flows["packets"] > 0).tobytes())
        if seen != self._known:
            found = bucket_coverage(self._plan, self._engine, iteration, flows, self._carried)
            causes = {cause for bucket in found for cause in bucket.missing}
            self._known, self._explained, self._lost = seen, "not_mirrored" not in causes, "lost" in causes
        return self._explained
