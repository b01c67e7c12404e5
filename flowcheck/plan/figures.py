"""One figure of a paper beside what comes out here: printed, closed form, exact form, Monte Carlo, and the verdict."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from flowcheck.plan.answer import Value, shown

__all__ = ["AGREES", "DIFFERS", "MISSING", "Chance", "Figure", "chance"]

AGREES, DIFFERS, MISSING = "agrees", "differs", "not reproduced"
CONFIDENCE = 0.999


@dataclass(frozen=True)
class Chance:
    """A Monte Carlo estimate with its confidence interval (99.9 %)."""

    mean: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{shown(self.mean)} ({shown(self.low)} to {shown(self.high)})"


def chance(happens: Callable[[random.Random], bool], tries: int, seed: int = 1) -> Chance:
    """How often something happens, by trying; the interval is Wilson's, so that 0 and 1 have one too."""
    dice = random.Random(seed)
    share = sum(happens(dice) for _ in range(tries)) / tries
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = (share + z * z / (2 * tries)) / (1 + z * z / tries)
    half = z / (1 + z * z / tries) * math.sqrt(share * (1 - share) / tries + z * z / (4 * tries * tries))
    return Chance(share, middle - half, middle + half)


@dataclass(frozen=True)
class Figure:
    """name: what it is, with unit. printed: in the paper; None where it prints nothing to compare.

    closed: the paper's own formula; exact: without its approximation, if there is one. Both None: not reproduced, and
    `why` names the missing input. simulated: has to contain the exact value, or the closed one where that is exact.
    tolerance: relative, of what counts as agreeing (printed figures are rounded).
    """

    name: str
    printed: float | str | None
    closed: float | None = None
    exact: float | None = None
    simulated: Chance | None = None
    why: str = ""
    tolerance: float = 0.01

    @property
    def value(self) -> float | None:
        return self.closed if self.exact is None else self.exact

    @property
    def verdict(self) -> str:
        """agrees | differs | not reproduced | empty where nothing is printed."""
        if self.value is None:
            return MISSING
        if not isinstance(self.printed, float | int):
            return ""
        return AGREES if math.isclose(self.value, self.printed, rel_tol=self.tolerance) else DIFFERS

    @property
    def sound(self) -> bool:
        """Does the Monte Carlo estimate agree with our own value? A difference there would be our bug."""
        return self.simulated is None or (self.value is not None and self.simulated.holds(self.value))

    def row(self) -> list[Value]:
        simulated = "" if self.simulated is None else str(self.simulated)
        verdict = self.verdict or "nothing printed"
        return [self.name, self.printed, self.closed, self.exact, simulated, verdict, self.why]
