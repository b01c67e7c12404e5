"""One clock for the three ways in which a job is counted.

    iteration   as the manifest counts: its first is 0. Engines, arenas and verdicts count like this.
    number      as the trainer counts, who may have trained before: iteration 0 is its number `first`.
                What people read and what trainers send is counted like this.
    step        updates done: the version before the trainer's iteration n has step n, the one after it n + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Clock"]


@dataclass(frozen=True)
class Clock:
    """first: the trainer's number of the manifest's iteration 0."""

    first: int = 0

    def number(self, iteration: int) -> int:
        """What the trainer calls an iteration."""
        return iteration + self.first

    def iteration(self, number: int) -> int:
        """The iteration that the trainer calls `number`; below 0: one before the manifest begins."""
        return number - self.first

    def before(self, iteration: int) -> int:
        """The step of the version that an iteration's gradients are applied to."""
        return self.number(iteration)

    def after(self, iteration: int) -> int:
        """The step of the version that an iteration makes."""
        return self.number(iteration) + 1

    def next(self, step: int) -> int:
        """The iteration that a version waits for."""
        return self.iteration(step)

    def made(self, step: int) -> int:
        """The iteration that made a version; below 0: the version is older than the manifest."""
        return self.iteration(step) - 1
