"""What fills the arenas of a job's iterations, as whoever judges them and builds versions of them sees it.

    source.poll()                          take what has come
    source.due()                           iterations that may close now
    source.close(due)                      nothing more is written into them
    source.judge(iteration, ...)           what is known of one that has closed, and the verdict on it
    source.release(due)                    its arena is free: the last moment at which its bytes can be kept elsewhere

Between `close` and `release` the bytes of an iteration stay as they are: workers of a replica read them. The mirror is
one such source (wire_arenas.py). One thread calls all of this; whatever fills the arenas may have threads of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from flowcheck.rebuild.iteration.collector import Judged

__all__ = ["ArenaSource"]


class ArenaSource(Protocol):
    """Arenas by iteration, counted as the manifest does."""

    # -- which iterations have begun --

    @property
    def oldest(self) -> int:
        """The first iteration that is not released."""

    @property
    def begun(self) -> int:
        """The newest iteration of which anything has come; -1: none has begun."""

    @property
    def open(self) -> range:
        """Iterations that have begun and are not released."""

    @property
    def given_up(self) -> range:
        """Iterations that are counted and not kept, for lack of room."""

    def poll(self) -> bool:
        """Take what has come. True if there was anything. Raises UserError: it cannot deliver what it promised."""

    # -- may they close --

    def due(self) -> range:
        """The oldest iteration, if it may close now; several that passed unseen; or none."""

    def is_whole(self, iteration: int) -> bool:
        """May it close because all of it is there?"""

    def close(self, due: range) -> None:
        """From now on nothing is written into the arenas of these, and what is known of them does not change."""

    def judge(self, iteration: int, *, record: bool, follows: bool) -> Judged:
        """The verdict on an iteration that was closed. record: its step record is here. follows: the version before it
        is one to build on."""

    def refused(self) -> str:
        """Why what comes is not what the manifest describes, as a whole; "": nothing says so."""

    # -- coverage --

    def complete(self, iteration: int) -> bool:
        """Has every cell been written?"""

    def covered_places(self, iteration: int) -> np.ndarray:
        """Cells of 8 bytes that are there: (places,) int64, in the order of JobPlan.iteration_places."""

    def missing(self, iteration: int, first: int, end: int) -> np.ndarray:
        """Those of cells [first, end) that are not there: runs, (n, 2) int64."""

    # -- bytes --

    def region(self, iteration: int) -> np.ndarray:
        """An iteration's bytes, uint8, laid out as its places say; meaningful where they are there."""

    def first_weights(self) -> Mapping[str, torch.Tensor] | str:
        """Parameters of the first version, by entry; or why none have come."""

    # -- letting go --

    def release(self, due: range) -> None:
        """These were judged, and nobody reads them any more."""

    def forget(self) -> None:
        """What is known of closed iterations alone is of no more use."""

    def finish(self) -> None:
        """Nothing more comes: what is open can be closed as it is."""

    def stop(self) -> None:
        """Take nothing more. May be called twice."""

    # -- keeping up --

    @property
    def capacity(self) -> int:
        """Iterations that can be open."""

    @property
    def fills_itself(self) -> bool:
        """Do threads of its own fill the arenas? Then `poll` only looks at what they have done."""

    @property
    def ended(self) -> bool:
        """Has all that was promised come?"""

    @property
    def blocked(self) -> bool:
        """Does something that has come wait for an arena?"""

    @property
    def consumed(self) -> int:
        """Packets, or messages, that were taken so far."""

    @property
    def fill(self) -> float:
        """Part of the room for what waits that was taken at the last look."""

    @property
    def room(self) -> int:
        """How much may wait, in the unit of `consumed`."""

    def take_highest(self) -> tuple[int, int]:
        """(the most that waited at any look since this was asked last, its room)."""

    def times(self, iteration: int) -> tuple[int, int] | None:
        """When the first and the last of an iteration came, nanoseconds; None: nobody knows."""
