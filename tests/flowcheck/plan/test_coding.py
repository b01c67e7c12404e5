"""ECCheck: data nodes, volume and survival, counted and against what is printed."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.checkpoint.coding.shape import Shape
from flowcheck.errors import UserError
from flowcheck.plan.coding import (
    cluster_survival,
    coded_survival,
    counted_volume,
    law_volume,
    printed_volume,
    replicated_survival,
)

SHAPES = [
    Shape(nodes, data, workers)
    for nodes in range(2, 13) for workers in range(1, 9) for data in range(1, nodes) if nodes * workers % data == 0
]


def test_volume_is_counted_by_the_law() -> None:
    for shape in SHAPES:
        assert counted_volume(shape) == law_volume(shape) >= printed_volume(shape), shape


def test_22_shapes_exceed_what_is_printed() -> None:
    more = [shape for shape in SHAPES if counted_volume(shape) > printed_volume(shape)]
    assert len(more) == 22
    shape = Shape(5, 4, 4)
    assert (counted_volume(shape), printed_volume(shape)) == (22, 20)


def test_fetching_everything_costs_the_same() -> None:
    """A parity node that fetches all packets: m (W - g) + (W - k g), where each group holds a whole node."""
    for shape in SHAPES:
        if law_volume(shape) == printed_volume(shape):
            workers = shape.nodes * shape.workers
            fetched = shape.parity * (workers - shape.workers) + workers - shape.data * shape.workers
            assert fetched == counted_volume(shape)


@given(st.floats(0, 1))
def test_survival_by_all_ways_to_fail(p: float) -> None:
    pairs = parity = 0.0
    for count in range(5):
        for gone in combinations(range(4), count):
            way = p**count * (1 - p) ** (4 - count)
            parity += way * (count <= 2)
            pairs += way * (not {0, 1} <= set(gone) and not {2, 3} <= set(gone))
    assert replicated_survival(p) == pytest.approx(pairs, abs=1e-12)
    assert coded_survival(p) == pytest.approx(parity, abs=1e-12)
    assert coded_survival(p) - replicated_survival(p) == pytest.approx(2 * p**2 * (1 - p) ** 2, abs=1e-12)


def test_500_groups() -> None:
    assert cluster_survival(replicated_survival(0.01), 500) == pytest.approx(0.905, abs=5e-4)
    assert cluster_survival(coded_survival(0.01), 500) == pytest.approx(0.998, abs=5e-4)
    assert cluster_survival(0, 3) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: Shape(4, 4, 1), lambda: Shape(4, 3, 1), lambda: replicated_survival(1.5),
        lambda: replicated_survival(0, 3), lambda: coded_survival(0.1, 4, 5),
    ],
)
def test_what_makes_no_sense_is_refused(call) -> None:
    with pytest.raises(UserError) as refused:
        call()
    assert refused.value.where and refused.value.remedy
