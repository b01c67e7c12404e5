"""Where following captures and following a live port, with trainers or without, differ. All else is the follower's
(follower.py), for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

__all__ = ["Policy"]


@dataclass(frozen=True)
class Policy:
    """sources_wait: sources are files. They wait while a stream is blocked, so nothing is dropped, and until the first
        iteration has begun they are read in the order of their times. A live port does not wait.
    trainers: trainers send records and the state that versions begin with. Without them the first weights are those
        that the captures bring or that somebody gives; nothing says which values a step had.
    record_seconds: how long an iteration that could close waits for its record, where the manifest declares one,
        before that counts as one that will not come.
    endless: no end is in sight, so what is known of closed iterations is dropped."""

    sources_wait: bool
    trainers: bool
    record_seconds: float
    endless: bool

    @classmethod
    def offline(cls) -> Self:
        """Captures: they can wait, and nobody sends a record."""
        return cls(sources_wait=True, trainers=False, record_seconds=0.0, endless=False)

    @classmethod
    def live(cls, record_seconds: float) -> Self:
        """A port that mirrors running trainers."""
        return cls(sources_wait=False, trainers=True, record_seconds=record_seconds, endless=True)

    @classmethod
    def unattended(cls) -> Self:
        """A port that mirrors running trainers of which none attaches: parameters alone can be followed."""
        return cls(sources_wait=False, trainers=False, record_seconds=0.0, endless=True)
