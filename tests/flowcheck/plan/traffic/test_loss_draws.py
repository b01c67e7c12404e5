"""The laws of loss against losses that are drawn copy by copy: rings of 4 and 8, 2 to 6 connections, and trees.

Each case has so many packets that EXPECTED iterations stay incomplete. What would need more losses than can be drawn is
in docs/use/planning.md with the number of packets that it takes: it cannot be measured on a wire either.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from flowcheck.errors import UserError
from flowcheck.plan.traffic import loss_law as law
from flowcheck.plan.traffic.loss_draws import MOST_DRAWN, Bursts, chunk_views, draw, tree_views

EXPECTED, ITERATIONS = 60, 400
RINGS = [
    (ranks, edges, loss)
    for ranks in (4, 8)
    for edges, losses in (
        (2, (1e-3, 1e-4, 1e-5, 1e-6)), (3, (1e-3, 1e-4, 1e-5, 1e-6)), (4, (1e-2, 1e-3)), (5, (0.03, 0.01)),
        (6, (0.05,)),
    )
    for loss in losses
    if edges <= ranks
]


def packets_for(copies: law.Copies, loss: float, ranks: int) -> int:
    """Of an iteration, so that EXPECTED of ITERATIONS stay incomplete."""
    wanted = -math.log1p(-EXPECTED / ITERATIONS)
    per_packet = math.fsum(-share * math.log1p(-(loss**count)) for count, share in copies.shares.items())
    return max(1, round(wanted / per_packet / ranks)) * ranks


def held(copies: law.Copies, packets: int, loss: float, found: int) -> bool:
    low, high = law.binomial_interval(ITERATIONS, law.incomplete(copies, packets, loss), 0.99)
    return low <= found <= high and low >= 30


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "edges", "loss"), RINGS)
def test_a_ring_loses_as_many_iterations_as_the_law_says(ranks: int, edges: int, loss: float) -> None:
    copies = law.edge_copies(ranks, dict.fromkeys(range(edges), 1))
    packets = packets_for(copies, loss, ranks)
    found = draw(chunk_views(ranks, edges), packets, loss, ITERATIONS, np.random.default_rng(22))
    assert held(copies, packets, loss, found), (found, packets)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "nodes", "loss"), [
    (4, (1,), 1e-3), (4, (1,), 1e-5), (4, (0, 3), 1e-2), (8, (4,), 1e-2), (8, (1,), 1e-6), (8, (0, 7), 1e-3),
])
def test_a_tree_loses_as_many_iterations_as_the_law_says(ranks: int, nodes: tuple[int, ...], loss: float) -> None:
    copies = law.tree_copies(ranks, nodes, "both")
    packets = packets_for(copies, loss, 2)
    found = draw(tree_views(ranks, nodes), packets, loss, ITERATIONS, np.random.default_rng(22))
    assert held(copies, packets, loss, found), (found, packets)


@pytest.mark.parametrize(("ranks", "edges", "loss"), [(4, 2, 1e-4), (8, 3, 1e-3), (8, 6, 0.1)])
def test_some_of_them_at_once(ranks: int, edges: int, loss: float) -> None:
    copies = law.edge_copies(ranks, dict.fromkeys(range(edges), 1))
    packets = packets_for(copies, loss, ranks)
    found = draw(chunk_views(ranks, edges), packets, loss, ITERATIONS, np.random.default_rng(7))
    assert held(copies, packets, loss, found), (found, packets)


def test_where_copies_are_lost_together_the_law_does_not_hold() -> None:
    """Three connections at one monitor port that overflows: each loses one copy in a thousand, in runs of 50, and all
    the same ones. Runs of each by itself come closer, but not to the law."""
    copies = law.edge_copies(8, dict.fromkeys(range(3), 1))
    packets = packets_for(copies, 1e-3, 8)

    def found(bursts: Bursts | None) -> int:
        return draw(chunk_views(8, 3), packets, 1e-3, ITERATIONS, np.random.default_rng(3), bursts)

    assert held(copies, packets, 1e-3, found(None)) and held(copies, packets, 1e-3, found(Bursts(1)))
    assert found(Bursts(50, shared=True)) >= ITERATIONS - 2
    assert found(Bursts(50)) < EXPECTED / 2, "the same packets are missing, in fewer iterations"


def test_more_losses_than_can_be_drawn_are_refused() -> None:
    with pytest.raises(UserError) as caught:
        draw(chunk_views(8, 6), 10**15, 1e-3, 2, np.random.default_rng(1))
    assert caught.value.remedy and f"{MOST_DRAWN:.3g}" not in caught.value.what
