"""The table of scenarios: training scripts that do something after `attach`, and what may come of it.

    @scenario(Expected.NAMED)
    def weights_clamped(run: Run) -> None: ...

A script is one function. It is called in every rank of a job of two, in a process of its own (rank.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

__all__ = ["CHANGES_AT", "ITERATIONS", "PERIOD", "SCENARIOS", "SUMS", "Expected", "Scenario", "scenario"]

ITERATIONS = 19  # 0 to 18; versions begin with iteration 4
SUMS = 10  # so one checksum matches after iteration 9, and no other is due in these
CHANGES_AT = 11  # the iteration in which most scripts do what they should not
PERIOD = 6  # iterations within which a wrong version has to be found


class Expected(IntEnum):
    """The least that has to come of a scenario. More than that is allowed."""

    CAUGHT = 1  # wrong versions for PERIOD iterations at most, none of them verified; then somebody says so
    NAMED = 2  # no wrong version, and `attachment.why` says something within one boundary
    EQUAL = 3  # all versions from the first on are the trainers' state


@dataclass(frozen=True)
class Scenario:
    """
    name: of the script's function.
    script: what each rank calls.
    expected: the least that has to come of it.
    at: the iteration that the change is made in; None: it is there from the beginning.
    iterations: so many of each start.
    starts: times that the script is called, in new processes and with the same run id.
    sums: checksum_every of its attachment.
    quick: part of `make test`.
    """

    name: str
    script: Callable[[Any], None]
    expected: Expected
    at: int | None = CHANGES_AT
    iterations: int = ITERATIONS
    starts: int = 1
    sums: int = SUMS
    quick: bool = False

    @property
    def about(self) -> str:
        return " ".join((self.script.__doc__ or "").split())


SCENARIOS: dict[str, Scenario] = {}


def scenario(expected: Expected, **settings: Any) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Enter a script into the table."""

    def enter(script: Callable[[Any], None]) -> Callable[[Any], None]:
        name = script.__name__
        if name in SCENARIOS:
            raise ValueError(f"two scenarios are called {name}")
        SCENARIOS[name] = Scenario(name, script, expected, **settings)
        return script

    return enter
