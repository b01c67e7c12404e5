"""Losses drawn copy by copy, to hold the law of loss against: how many iterations stay incomplete, and how many could.

    views = chunk_views(8, edges=3)                    of each chunk of a ring, the connections that are mirrored
    draw(views, packets=..., loss=1e-3, iterations=400, dice=numpy.random.default_rng(1))     -> incomplete iterations

Nothing here uses loss_law.py: which connection carries what in reduced form is walked through NCCL's order of sends,
and every connection loses its own copies. A loss is drawn by the gap to the next one, so that 10^10 packets of which
a thousandth is lost take as long as 10^7. Bursts come from a state with two values, as a full queue has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowcheck.plan.answers.answer import need
from parser.trees import tree_parent

__all__ = ["Bursts", "chunk_views", "draw", "tree_views"]

Positions = npt.NDArray[np.int64]
MOST_DRAWN = 100_000_000  # losses of a connection: a minute
AT_ONCE = 2_000_000  # of them in memory


@dataclass(frozen=True)
class Bursts:
    """packets: that are lost in a row, all of them. shared: of all connections at the same time, as when they are
    mirrored to one port; else of each by itself."""

    packets: int
    shared: bool = False


def chunk_views(ranks: int, edges: int) -> list[list[int]]:
    """Of each chunk of a ring, those of its first `edges` connections that carry it in reduced form.

    Walked through the sends (nccl-wire 2.2): at position r send k, from ranks - 1 on reduced, is of chunk r - k + ranks
    - 1.
    """
    need(1 <= edges <= ranks, f"{edges} connections of a ring of {ranks}", "edges", f"1 to {ranks}")
    views: list[list[int]] = [[] for _ in range(ranks)]
    for sender in range(edges):
        for k in range(ranks - 1, 2 * ranks - 2):
            views[(sender - (k - (ranks - 1))) % ranks].append(sender)
    return views


def tree_views(ranks: int, nodes: Sequence[int]) -> list[list[int]]:
    """Of each of the two trees, the copies of its packets at these nodes, mirrored both ways (nccl-wire 7.2)."""
    views: list[list[int]] = []
    number = 0
    for tree in (0, 1):
        seen = []
        for child in range(ranks):
            parent = tree_parent(ranks, tree, child)
            for end in () if parent is None else (parent, child):
                if end in nodes:
                    seen.append(number)
                    number += 1
        views.append(seen)
    return views


def draw(
    views: Sequence[Sequence[int]], packets: int, loss: float, iterations: int, dice: np.random.Generator,
    bursts: Bursts | None = None,
) -> int:
    """Iterations of which some packet is lost in all its copies. packets: of an iteration, in equal parts by `views`.

    loss: share of the copies that are lost, in bursts or each by itself. Raises UserError where too many would be
    drawn.
    """
    each = packets // len(views)
    drawn = each * loss * iterations
    need(drawn <= MOST_DRAWN, f"{drawn:.3g} losses of a connection", "packets", "fewer packets, or less loss")
    block = max(1, min(iterations, int(AT_ONCE / (each * loss))))
    sizes = [min(block, iterations - first) for first in range(0, iterations, block)]
    return sum(_block(views, each, loss, size, dice, bursts) for size in sizes)


def _block(
    views: Sequence[Sequence[int]], each: int, loss: float, iterations: int, dice: np.random.Generator,
    bursts: Bursts | None,
) -> int:
    hit = np.zeros(iterations, bool)
    shared = bursts is not None and bursts.shared
    for copies in views:
        gone: Positions | None = None
        for _ in copies[:1] if shared else copies:
            lost = _lost(each * iterations, loss, dice, bursts)
            gone = lost if gone is None else np.intersect1d(gone, lost, assume_unique=True)
            if not len(gone):
                break
        if gone is None:
            return iterations
        hit[gone // each] = True
    return int(hit.sum())


def _lost(total: int, loss: float, dice: np.random.Generator, bursts: Bursts | None) -> Positions:
    """Which of the packets of a connection are lost, in order."""
    length = 1 if bursts is None else bursts.packets
    starts = np.concatenate(list(_starts(total, loss / length, dice)))
    if length == 1:
        return starts
    runs: Positions = np.unique((starts[:, None] + np.arange(length)).ravel())
    return runs[runs < total]


def _starts(total: int, chance: float, dice: np.random.Generator) -> Iterator[Positions]:
    """Positions below `total` at which something of this probability happens, by the gaps between them."""
    at = -1
    while at < total:
        gaps = dice.geometric(chance, max(16, min(1 << 20, int((total - at) * chance * 1.1) + 16)))
        found: Positions = at + np.cumsum(gaps, dtype=np.int64)
        at = int(found[-1])
        yield found[found < total]
