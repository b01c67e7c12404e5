"""The laws of incomplete iterations: the paper's numbers, every pattern of losses enumerated, and what must hold."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.plan.traffic import loss_law as law

WAYS: tuple[law.Direction, ...] = get_args(law.Direction)
DIRECTIONS = st.sampled_from(WAYS)
LOSSES = st.one_of(st.just(0.0), st.floats(1e-12, 1.0))
#: Edges parent > child of the two trees, from the reference (nccl-wire 7.1).
TREES = {
    2: ([(0, 1)], [(1, 0)]),
    3: ([(0, 2), (2, 1)], [(1, 0), (0, 2)]),
    4: ([(0, 2), (2, 1), (2, 3)], [(3, 1), (1, 2), (1, 0)]),
    8: (
        [(0, 4), (4, 2), (4, 6), (2, 1), (2, 3), (6, 5), (6, 7)],
        [(7, 3), (3, 5), (3, 1), (5, 6), (5, 4), (1, 2), (1, 0)],
    ),
}


# -- the paper's numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edges", "probability", "every"), [(2, 3.992e-3, 250), (3, 6.000e-12, 1.7e11)]
)
def test_equation_2_gives_what_the_reference_says(edges: int, probability: float, every: float) -> None:
    """Tiers, section 5: the paper's text says once in 1000 and in 1e12 iterations, its formula 250 and 1.7e11."""
    found = law.equation_2(8, edges, 16e6, 1e-9)
    assert found == pytest.approx(probability, rel=1e-3)
    assert 1 / found == pytest.approx(every, rel=0.03)


def test_equation_2_as_it_is_printed() -> None:
    for edges, packets, loss in itertools.product(range(1, 9), (8, 1000, 16e6), (1e-9, 1e-4, 0.1)):
        printed = 1 - (1 - loss ** (edges - 1)) ** (edges * packets / 8) * (1 - loss**edges) ** (
            (8 - edges) * packets / 8
        )
        assert law.equation_2(8, edges, packets, loss) == pytest.approx(printed, rel=1e-6, abs=1e-9)


def test_three_ports_both_ways_that_are_no_neighbours_are_six_edges() -> None:
    apart = law.ring_copies(8, law.apart(8, 3), "both")
    assert len(law.ring_views(8, law.apart(8, 3), "both")) == 6
    assert apart.shares == {5: 6 / 8, 6: 2 / 8}
    assert law.incomplete(apart, 16e6, 1e-9) == law.equation_2(8, 6, 16e6, 1e-9)
    assert law.ring_copies(8, law.neighbours(8, 3), "both").least == 4, "two edges are seen at both ends"


def test_figure_13_cannot_be_shown_by_a_hundred_iterations() -> None:
    rate = law.incomplete(law.ring_copies(8, (0, 3, 6), "both"), 16e6, 1e-9)
    assert rate < 1e-8 and law.binomial_interval(100, rate) == (0, 0)


# -- every pattern of losses ------------------------------------------------------------------------------------------


def ring_packets(ranks: int, mirrored: tuple[int, ...], direction: str) -> dict[int, int]:
    """Chunk -> copies, by walking NCCL's order of sends (nccl-wire 2.2): send k of ring index r, 0 <= k < 2n-2."""
    copies: Counter[int] = Counter(dict.fromkeys(range(ranks), 0))
    for rank in mirrored:
        senders = [rank] * (direction != "egress") + [(rank - 1) % ranks] * (direction != "ingress")
        for sender in senders:
            for k in range(ranks - 1, 2 * ranks - 2):
                copies[(sender - (k - (ranks - 1))) % ranks] += 1
    return copies


def tree_packets(ranks: int, mirrored: tuple[int, ...], direction: str) -> dict[int, int]:
    """Tree -> copies of its one packet."""
    return {
        tree: sum((parent in mirrored and direction != "egress") + (child in mirrored and direction != "ingress")
                  for parent, child in edges)
        for tree, edges in enumerate(TREES[ranks])
    }


def by_enumeration(copies: dict[int, int], loss: float) -> tuple[float, float]:
    """(probability that a packet is missing, expected missing), summed over all patterns of lost copies."""
    names = [packet for packet, count in copies.items() for _ in range(count)]
    incomplete = expected = 0.0
    for pattern in itertools.product((False, True), repeat=len(names)):
        kept = {name for name, lost in zip(names, pattern, strict=True) if not lost}
        chance = math.prod(loss if lost else 1 - loss for lost in pattern)
        incomplete += chance * (len(kept) < len(copies))
        expected += chance * (len(copies) - len(kept))
    return incomplete, expected


CASES = [
    (ranks, mirrored, direction)
    for ranks in (2, 3, 4)
    for count in (1, 2)
    for mirrored in itertools.combinations(range(ranks), count)
    for direction in WAYS
]


@pytest.mark.parametrize(("ranks", "mirrored", "direction"), CASES)
@pytest.mark.parametrize("loss", [0.0, 0.2, 0.7, 1.0])
def test_the_ring_law_is_the_sum_over_all_patterns(
    ranks: int, mirrored: tuple[int, ...], direction: law.Direction, loss: float
) -> None:
    chance, expected = by_enumeration(ring_packets(ranks, mirrored, direction), loss)
    copies = law.ring_copies(ranks, mirrored, direction)
    assert law.incomplete(copies, ranks, loss) == pytest.approx(chance, abs=1e-12)
    assert law.missing(copies, ranks, loss) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("ranks", TREES)
@pytest.mark.parametrize("direction", WAYS)
def test_the_tree_law_is_the_sum_over_all_patterns(ranks: int, direction: law.Direction) -> None:
    for mirrored in itertools.combinations(range(ranks), min(2, ranks - 1)):
        chance, expected = by_enumeration(tree_packets(ranks, mirrored, direction), 0.3)
        copies = law.tree_copies(ranks, mirrored, direction)
        assert law.incomplete(copies, 2, 0.3) == pytest.approx(chance, abs=1e-12)
        assert law.missing(copies, 2, 0.3) == pytest.approx(expected, abs=1e-12)


def test_the_worst_places_are_the_worst() -> None:
    """Over all choices of ports of rings and trees, for small groups; the worst of a tree may be a bound."""
    for ranks, direction in itertools.product((3, 4, 6, 8), WAYS):
        for mirrors in range(1, min(4, ranks) + 1):
            choices = list(itertools.combinations(range(ranks), mirrors))
            rings = [law.incomplete(law.ring_copies(ranks, one, direction), 64, 0.01) for one in choices]
            trees = [law.incomplete(law.tree_copies(ranks, one, direction), 64, 0.01) for one in choices]
            assert law.incomplete(law.worst(ranks, mirrors, direction, "ring"), 64, 0.01) == pytest.approx(max(rings))
            assert law.incomplete(law.worst(ranks, mirrors, direction, "tree"), 64, 0.01) >= max(trees) * (1 - 1e-12)


def test_copies_that_are_drawn_at_random_obey_the_law() -> None:
    """Monte Carlo of whole iterations, within the 99.9 % interval of the law."""
    chance = random.Random(22)
    copies = law.ring_copies(5, (0, 2), "both")
    trials, packets, loss = 4000, 10, 0.2
    failed = 0
    for _ in range(trials):
        views = [count for count, share in copies.shares.items() for _ in range(round(share * packets))]
        failed += any(all(chance.random() < loss for _ in range(count)) for count in views)
    low, high = law.binomial_interval(trials, law.incomplete(copies, packets, loss), 0.999)
    assert low <= failed <= high


# -- what must hold ---------------------------------------------------------------------------------------------------


@st.composite
def rings(draw: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    ranks = draw(st.integers(2, 40))
    return ranks, tuple(draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=8, unique=True)))


@given(rings(), DIRECTIONS, LOSSES, LOSSES, st.floats(1, 1e9))
def test_more_loss_is_never_better(
    ring: tuple[int, tuple[int, ...]], direction: law.Direction, one: float, two: float, packets: float
) -> None:
    ranks, mirrored = ring
    less, more = sorted((one, two))
    for copies in (law.ring_copies(ranks, mirrored, direction), law.tree_copies(ranks, mirrored, direction)):
        assert 0 <= law.incomplete(copies, packets, less) <= law.incomplete(copies, packets, more) <= 1
        assert law.missing(copies, packets, less) <= law.missing(copies, packets, more) * (1 + 1e-12)
        assert sum(copies.shares.values()) == pytest.approx(1)


@given(rings(), DIRECTIONS, LOSSES, st.floats(1, 1e9), st.integers(0, 39))
def test_one_more_port_is_never_worse(
    ring: tuple[int, tuple[int, ...]], direction: law.Direction, loss: float, packets: float, added: int
) -> None:
    ranks, mirrored = ring
    more = (*mirrored, added % ranks) if added % ranks not in mirrored else mirrored
    for copies in (law.ring_copies, law.tree_copies):
        worse, better = copies(ranks, mirrored, direction), copies(ranks, more, direction)
        assert better.least >= worse.least
        assert law.incomplete(better, packets, loss) <= law.incomplete(worse, packets, loss) * (1 + 1e-9)


@given(rings(), LOSSES, st.integers(1, 10**6))
def test_an_iteration_is_incomplete_at_most_as_often_as_packets_are_missing(
    ring: tuple[int, tuple[int, ...]], loss: float, of_each_chunk: int
) -> None:
    """Markov's bound, which needs whole packets."""
    copies, packets = law.ring_copies(*ring, "both"), of_each_chunk * ring[0]
    assert law.incomplete(copies, packets, loss) <= law.missing(copies, packets, loss) * (1 + 1e-9) + 1e-300


def test_one_direction_of_one_port_is_never_enough_and_both_are() -> None:
    for ranks in range(2, 20):
        for direction in ("ingress", "egress"):
            assert law.incomplete(law.ring_copies(ranks, (1,), direction), ranks, 0.0) == 1
        assert law.incomplete(law.ring_copies(ranks, (1,), "both"), ranks, 0.0) == 0


def test_enough_ports_are_the_fewest() -> None:
    for wanted in (1e-2, 1e-5, 1e-8, 1e-20):
        needed = law.mirrors_needed(8, 16e6, 1e-9, wanted, "both")
        assert needed is not None
        assert law.incomplete(law.worst(8, needed, "both", "ring"), 16e6, 1e-9) <= wanted
        assert needed == 1 or law.incomplete(law.worst(8, needed - 1, "both", "ring"), 16e6, 1e-9) > wanted
    assert law.mirrors_needed(2, 16e6, 0.5, 1e-8, "egress") is None


@pytest.mark.parametrize("direction", WAYS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 13])
def test_the_worst_and_the_fewest_are_those_of_the_definition(ranks: int, direction: law.Direction) -> None:
    """They are computed without walking the ring, and by halving."""
    for mirrors in range(1, ranks + 1):
        walked = law.ring_copies(ranks, law.neighbours(ranks, mirrors), direction)
        assert law.worst(ranks, mirrors, direction, "ring") == walked
        nodes = [[law.tree_copies(ranks, [node], direction, [tree]).least for node in range(ranks)] for tree in (0, 1)]
        least = Counter(sum(sorted(seen)[:mirrors]) for seen in nodes)
        assert law.worst(ranks, mirrors, direction, "tree").shares == {
            count: number / 2 for count, number in least.items()
        }
    for kind, loss, wanted in itertools.product(("ring", "tree"), (0.0, 1e-9, 1e-3, 0.3, 1.0), (0.0, 1e-8, 0.01, 1.0)):
        rates = [law.incomplete(law.worst(ranks, count, direction, kind), 1e6, loss) for count in range(1, ranks + 1)]
        fewest = next((count for count, rate in enumerate(rates, 1) if rate <= wanted), None)
        assert law.mirrors_needed(ranks, 1e6, loss, wanted, direction, kind) == fewest


def test_small_probabilities_are_not_rounded_away() -> None:
    copies = law.ring_copies(8, (0, 2, 4, 6), "both")
    assert law.incomplete(copies, 16e6, 1e-9) == pytest.approx(16e6 * 1e-63, rel=1e-3)


# -- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trials", "probability"), [(10, 0.5), (50, 0.02), (400, 0.3), (3, 0.9), (1000, 0.001)])
@pytest.mark.parametrize("level", [0.9, 0.99])
def test_the_interval_is_the_exact_binomial_one(trials: int, probability: float, level: float) -> None:
    def upto(count: int) -> float:
        return math.fsum(
            math.comb(trials, k) * probability**k * (1 - probability) ** (trials - k) for k in range(count + 1)
        )

    low, high = law.binomial_interval(trials, probability, level)
    tail = (1 - level) / 2
    assert upto(low) > tail and (low == 0 or upto(low - 1) <= tail)
    assert upto(high) >= 1 - tail and (high == 0 or upto(high - 1) < 1 - tail)


@given(st.integers(0, 10**6), st.floats(0, 1))
def test_the_interval_holds_the_mean(trials: int, probability: float) -> None:
    low, high = law.binomial_interval(trials, probability)
    assert 0 <= low <= high <= trials
    assert low - 1 <= trials * probability <= high + 1


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [-0.1, 1.1, math.nan])
def test_a_loss_that_is_no_probability_is_refused(loss: float) -> None:
    with pytest.raises(UserError, match="not a probability"):
        law.incomplete(law.ring_copies(4, (0,), "both"), 10, loss)


@pytest.mark.parametrize("mirrored", [(), (4,), (-1,), (1, 1), (0, 1, 2, 3, 0)])
def test_ports_that_cannot_be_are_refused(mirrored: tuple[int, ...]) -> None:
    for copies in (law.ring_copies, law.tree_copies):
        with pytest.raises(UserError) as caught:
            copies(4, mirrored, "both")
        assert caught.value.where and caught.value.remedy
