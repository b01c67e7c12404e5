"""How long a cluster's state in memory survives with a given probability, by REFT's equations 5 and 6.

Source: REFT (reliable and efficient in-memory fault tolerance), eq. 5 and 6 and Figure 8. A node survives t days with
P = exp(-rate t^shape). Eq. 5: every sharding group of n nodes survives if at most one of them fails; eq. 6, without
REFT: all nodes must. Under eq. 5 the paper's text names P_re and 1 - P_s the wrong way round.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flowcheck.plan.answer import need

__all__ = ["days_at", "node_survival", "unprotected_survival", "with_parity_survival"]


def node_survival(days: float, rate: float, shape: float) -> float:
    """exp(-rate days^shape); rate per day where shape is 1 (a Weibull law)."""
    return math.exp(-rate * days**shape)


def with_parity_survival(
    days: float, nodes: int, group: int, rate: float, shape: float, software_rate: float = 0.0
) -> float:
    """Eq. 5: (P^n + n (1-P) P^(n-1))^(k/n) P_re^k; k `nodes` in groups of n; P_re from `software_rate`, 1 for 0."""
    p = node_survival(days, rate, shape)
    one = p**group + group * (1 - p) * p ** (group - 1)
    return one ** (nodes / group) * node_survival(days, software_rate, shape) ** nodes


def unprotected_survival(days: float, nodes: int, rate: float, shape: float, software_rate: float = 0.0) -> float:
    """Eq. 6: P_s^k P_tr^k, every one of k `nodes` must survive hardware and software."""
    return (node_survival(days, rate, shape) * node_survival(days, software_rate, shape)) ** nodes


def days_at(survival: Callable[[float], float], probability: float) -> float:
    """The days after which a falling survival function is at `probability`; infinity if it never falls so far.

    By halving. Raises UserError for a probability outside (0, 1).
    """
    need(0 < probability < 1, f"{probability} is not between 0 and 1", "probability", "a number between 0 and 1")
    high = 1.0
    while survival(high) > probability:
        high *= 2
        if high > 1e12:
            return math.inf
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if survival(middle) > probability else (low, middle)
    return high
