"""Share of effective training time under failures: one closed form for every checkpointing system.

The model. Failures of the whole job are a Poisson process of rate f per second, also while the job recovers. A job
computes `work` seconds of useful training, which take `work * (1 + slowdown)` seconds, then stops for `stall` seconds;
the checkpoint of that moment can be used `lag` seconds later. A failure throws away what is newer than the last usable
checkpoint, and training goes on `restart` seconds after the failure; a failure meanwhile begins the recovery again.
With probability `lost` a failure takes the checkpoints of this tier with it. Then the last persistent copy is loaded
(every `persist_every`-th checkpoint, usable `persist_lag` seconds later), `persist_restart` seconds after the failure.

The derivation. With L = work * (1 + slowdown) + stall and z = exp(-f L), the number K of checkpoints that are usable
when the next failure comes has P(K >= j) = A z^j for j >= 1, A = exp(-f (restart + lag)). Without `lost` failures renew
the process, so that the share is f * work * E[K] = f * work * A z / (1 - z): for lag = 0 this is Daly's complete model
(A higher order estimate of the optimum checkpoint interval, 2006, eq. 13), and to first order Gemini's eq. 1,
t_ckpt + 1/(2f) + t_rtvl. With `lost` = q the process renews at failures that lose the tier. The progress S up to there
is a geometric number of such K, the first one with B = exp(-f (persist_restart + lag)), and its generating function
gives P(S >= j) = w y^j with y = z (q + (1-q) A) / (q + (1-q) A z) and w = ((1-q) A + q B) / ((1-q) A + q). So the
expected number of whole persistent intervals in S is w y^M / (1 - y^M), M = persist_every, and each is usable with
exp(-q f persist_lag). Nothing is approximated but two things of second order: `skipped` checkpoints delay
persistent ones, and an ordinary failure while the persistent copy is loaded is taken to need `restart` only.
The simulation (flowcheck/plan/goodput/simulation.py) makes the same assumptions, event by event.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowcheck.errors import UserError

__all__ = ["Rhythm", "best_interval", "daly_interval", "effective_share", "young_interval"]


@dataclass(frozen=True)
class Rhythm:
    """How one system makes checkpoints and comes back. All times in seconds.

    work: useful training between two checkpoints, > 0.
    stall: training stands still per checkpoint.
    slowdown: share by which training between checkpoints is slower than without them, for example 0.03.
    lag: from the end of the stall until the checkpoint can be used.
    skipped: probability that a checkpoint is never usable, in [0, 1); later ones do not depend on it.
    restart: from a failure until training goes on from this tier.
    lost: probability that a failure takes this tier's checkpoints with it, in [0, 1].
    persist_every: every so many checkpoints one goes to the persistent tier.
    persist_lag: from usable here until usable there.
    persist_restart: from a failure until training goes on from the persistent tier.
    """

    work: float
    stall: float = 0.0
    slowdown: float = 0.0
    lag: float = 0.0
    skipped: float = 0.0
    restart: float = 0.0
    lost: float = 0.0
    persist_every: int = 1
    persist_lag: float = 0.0
    persist_restart: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.work) and self.work > 0):
            raise UserError(f"{self.work} is not a time between checkpoints", where="work", remedy="give seconds > 0")
        for name in ("stall", "slowdown", "lag", "restart", "persist_lag", "persist_restart"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{value} is not a finite number >= 0", where=name, remedy="give 0 or more")
        for name, most in (("skipped", "below 1"), ("lost", "at most 1")):
            value = getattr(self, name)
            if not 0 <= value <= 1 or (name == "skipped" and value == 1):
                raise UserError(f"{value} is not a probability {most}", where=name, remedy="give a number from 0 to 1")
        if self.persist_every < 1:
            raise UserError(f"{self.persist_every} is not a number of checkpoints", where="persist_every",
                            remedy="give 1 or more")

    @property
    def length(self) -> float:
        """Seconds from one checkpoint to the next while nothing fails."""
        return self.work * (1 + self.slowdown) + self.stall


def _first(rhythm: Rhythm, rate: float, restart: float) -> float:
    """A of P(K >= j) = A z^j for j >= 1, K the newest usable checkpoint when the next failure comes."""
    complete = (1 - rhythm.skipped) / (1 - rhythm.skipped * math.exp(-rate * rhythm.length))
    return math.exp(-rate * (restart + rhythm.lag)) * complete


def _over(log: float) -> float:
    """x / (1 - x) for x = exp(log), log < 0: the sum of x^j over j >= 1."""
    return 0.0 if log == -math.inf else math.exp(log) / -math.expm1(log)


def effective_share(rhythm: Rhythm, rate: float) -> float:
    """Useful training per second of the wall clock, in (0, 1]. rate: failures per second, >= 0; 0 gives work / length.

    Source: the module's derivation; Daly's complete model where lag, skipped and lost are 0.
    Raises UserError if rate is not a rate.
    """
    if not (math.isfinite(rate) and rate >= 0):
        raise UserError(f"{rate} is not a rate of failures", where="failures", remedy="give failures >= 0")
    if rate * rhythm.length < 1e-13:  # so rare that the quotients below are the limit
        return rhythm.work / rhythm.length
    log_z = -rate * rhythm.length
    z, one_minus_z = math.exp(log_z), -math.expm1(log_z)
    after_fast = _first(rhythm, rate, rhythm.restart)
    if rhythm.lost < 1e-200:  # the quotients below would overflow before it matters
        return rate * rhythm.work * after_fast * _over(log_z)
    q = rhythm.lost
    after_lost = _first(rhythm, rate, rhythm.persist_restart)
    weight = ((1 - q) * after_fast + q * after_lost) / ((1 - q) * after_fast + q)
    one_minus_y = one_minus_z * q / (q + (1 - q) * after_fast * z)
    log_y = math.log1p(-one_minus_y) if one_minus_y < 1 else -math.inf
    intervals = weight * _over(rhythm.persist_every * log_y)
    return q * rate * rhythm.work * rhythm.persist_every * intervals * math.exp(-q * rate * rhythm.persist_lag)


def young_interval(stall: float, rate: float) -> float:
    """sqrt(2 stall / rate): seconds of work between checkpoints (Young 1974; c* = sqrt(N f / 2 o) of just-in-time)."""
    _positive("stall", stall)
    _positive("rate", rate)
    return math.sqrt(2 * stall / rate)


def daly_interval(stall: float, rate: float) -> float:
    """Daly's higher order estimate (2006, eq. 37), seconds of work: 1/rate where the stall is above 2 / rate."""
    _positive("stall", stall)
    _positive("rate", rate)
    mean = 1 / rate
    if stall >= 2 * mean:
        return mean
    ratio = stall / (2 * mean)
    return math.sqrt(2 * stall * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def best_interval(stall: float, rate: float, slowdown: float = 0.0) -> float:
    """The seconds of work between checkpoints at which effective_share is largest, exactly.

    The derivative of work / (exp(rate L) - 1) is zero where y = 1 - exp(-(y + rate stall)), y = rate (L - stall)
    (Daly 2006, eq. 20, there with Lambert's W). Lag and restart only scale the share, so they do not move it.
    """
    _positive("stall", stall)
    _positive("rate", rate)
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if -math.expm1(-(middle + rate * stall)) > middle:
            low = middle
        else:
            high = middle
    return high / rate / (1 + slowdown)


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{value} is not a number above 0", where=name, remedy="give a number above 0")
