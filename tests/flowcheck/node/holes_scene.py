"""A live session whose traffic has holes, and ranks that answer: what goes on from lost gradients is tried with it.

Every version is 0.5 less than the one before it, in all elements; what lies in a hole is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck.rebuild.version.events import Closed
from flowcheck.rebuild.version.partial import Partial, Patch
from flowcheck.rebuild.version.stale import Range

from ..fake_engine import Packet
from .live_scene import NAMES, Live

HOLE = (5, 8)  # cells of the first bucket: its elements 10 to 16
LOTS = 1 << 20


class Scene(Live):
    """The wire brings all iterations at once, with holes in some; one closes when its records come, which ranks 0 and 1
    send. asked: (rank, request, ranges) that were not answered. empty: there is no state to go on from, but perhaps
    what an earlier process has `left`."""

    def __init__(self, patch: pytest.MonkeyPatch, holes: dict[int, tuple[int, int]] | None = None,
                 wire: Iterable[int] = range(2, 16), empty: bool = False, left: Path | None = None,
                 **options: Any) -> None:
        super().__init__(patch, **{"slots": 3, "patched": True, "arenas": 2, **options})
        self.asked: list[tuple[int, int, list[Range]]] = []
        if empty:
            self.begin(left)
        else:
            self.state(2)
        for t in wire:
            first, end = (holes or {}).get(t, (0, 0))
            region = self.engine.region(t).view(np.float32)
            region[:] = 1.0
            region[2 * first : 2 * end] = np.nan
            self.sources[0].packets += [Packet(t, None, (0, first)), Packet(t, t + 1, (end, None))]

    @property
    def partial(self) -> Partial:
        return self.joining.ranges.partial

    def go(self, iteration: int, ranks: tuple[int, ...] = (0, 1), **fields: Any) -> Closed:
        """The records of an iteration come, and it closes. Without a version to go on from, so do all others."""
        for rank in ranks:
            assert self.record(iteration, rank, **fields) == ""
        self.poll()
        found = [one for one in self.closed if one.iteration == iteration]
        assert found and (self.session.next is None or found[-1] is self.closed[-1])
        return found[-1]

    def ask(self, budget: int = LOTS, ranks: tuple[int, ...] = (0, 1)) -> int:
        """How many elements are asked for."""
        new = self.partial.ask(budget, ranks)
        self.asked += new
        return sum(length for _, _, ranges in new for _, _, length in ranges)

    def answer(self, iteration: int, value: float, state: Mapping[str, float] | None = None) -> list[bool]:
        """The trainers send what they were asked for: their state after an iteration. state: of the optimizer."""
        found = []
        types = {entry.name: getattr(torch, entry.dtype) for entry in self.job.model}
        for rank, request, ranges in self.asked:
            sizes: dict[str, int] = {}
            for name, _, length in ranges:
                sizes[name] = sizes.get(name, 0) + length
            values = {name: torch.full((size,), value, dtype=types[name]) for name, size in sizes.items()}
            held = {name: {key: torch.full((() if key == "step" else (size,)), one) for key, one in state.items()}
                    for name, size in sizes.items() if name in NAMES} if state else {}
            assert self.session.next is not None
            patch = Patch(rank, request, iteration, tuple(ranges), values, held)
            found.append(self.partial.take(patch, self.session.next))
        self.asked = []
        return found

    @property
    def last(self) -> tuple[int, bool, int, int]:
        one = self.closed[-1]
        return one.iteration, one.published, one.patched, one.stale
