"""What periodic and just-in-time checkpoints cost, as the just-in-time paper counts it.

Source: just-in-time checkpointing (EuroSys'24), section 5 and Table 8. N GPUs, f failures per GPU and second, o seconds
of stall per checkpoint, r seconds to come back, m seconds of a minibatch, c checkpoints per second:

    periodic       w = c o + N f r + N f / 2c       c* = sqrt(N f / 2 o)
    user level     w = f o + o_jit + N f r + N f m / 2
    transparent    w = o_jit + N f m / 2

w is wasted per useful time; the wasted share of all time is w_f = w / (1 + w) (printed with a capital W). These are
first order in f: flowcheck/plan/renewal.py has the exact form, and `flowcheck plan verify` shows both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowcheck.plan.answer import need, need_positive

__all__ = ["JitCase", "gpu_dollars", "wasted_share"]

DAY = 86400.0


@dataclass(frozen=True)
class JitCase:
    """gpus N; failures per 1000 GPUs and day; stall o, restart r, minibatch m in seconds; steady: o_jit, a share."""

    gpus: int
    failures: float
    stall: float
    restart: float
    minibatch: float = 0.0
    steady: float = 0.0

    def __post_init__(self) -> None:
        need_positive(self.gpus, "gpus")
        need_positive(self.failures, "failures")
        need_positive(self.stall, "stall", "seconds")
        for name in ("restart", "minibatch", "steady"):
            need(getattr(self, name) >= 0, f"{getattr(self, name)} is below 0", name, "0 or more")

    @property
    def gpu_rate(self) -> float:
        """f, per GPU and second."""
        return self.failures / 1000 / DAY

    @property
    def rate(self) -> float:
        """N f, of the job, per second."""
        return self.gpus * self.gpu_rate

    def best_rate(self) -> float:
        """c* = sqrt(N f / 2 o), checkpoints per second."""
        return math.sqrt(self.rate / (2 * self.stall))

    def periodic(self) -> float:
        """w* at c*: sqrt(N f o / 2) + N f r + sqrt(N f o / 2)."""
        half = math.sqrt(self.rate * self.stall / 2)
        return half + self.rate * self.restart + half

    def user_level(self) -> float:
        return self.gpu_rate * self.stall + self.steady + self.rate * (self.restart + self.minibatch / 2)

    def transparent(self) -> float:
        return self.steady + self.rate * self.minibatch / 2


def wasted_share(wasted: float) -> float:
    """w_f = w / (1 + w): of all time, from w per useful time."""
    return wasted / (1 + wasted)


def gpu_dollars(gpus: int, failures_per_day: float, minutes_lost: float, dollars_per_hour: float, days: float) -> float:
    """Dollars that failures cost: every GPU of the job stands or repeats `minutes_lost` minutes per failure."""
    return gpus * failures_per_day * days * minutes_lost / 60 * dollars_per_hour
