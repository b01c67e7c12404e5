"""Which rank of a group sends which bucket of gradients that all of them have.

    givers([n, ...], ranks) -> [rank, ...]

Trainers and nodes work it out for themselves, from the manifest's buckets: nothing has to be agreed on.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["givers"]


def givers(sizes: Sequence[int], ranks: int) -> list[int]:
    """sizes: bytes of each bucket. One after the other goes to the rank that has least so far."""
    least = [(0, rank) for rank in range(ranks)]
    out = []
    for size in sizes:
        has, rank = least[0]
        heapq.heapreplace(least, (has + size, rank))
        out.append(rank)
    return out
