"""DDP's announcements against torch's own tensors, and numbers that are none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.learning.search.ddp_rules import initial_buckets, parse_buckets, parse_shapes
from flowcheck.learning.search.position import Mismatch

shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12)


def announce(tensors: list[torch.Tensor]) -> list[int]:
    """As reducer.cpp's verify_params_across_processes writes them."""
    return [number for t in tensors for number in (*t.shape, *t.stride())]


@settings(max_examples=300)
@given(shapes)
def test_the_true_reading_is_among_those_found(true: list[tuple[int, ...]]) -> None:
    values = announce([torch.empty(shape) for shape in true])
    found = parse_shapes(values, len(true))
    assert true in found or len(found) == 2  # two readings are refused, whichever they are
    for reading in found:
        assert announce([torch.empty(shape) for shape in reading]) == values


def test_models_as_they_are_have_one_reading() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 1), torch.nn.Linear(1, 5000, bias=False)
    )
    true = [tuple(p.shape) for p in model.parameters()]
    assert parse_shapes(announce(list(model.parameters())), len(true)) == [true]


def test_channels_last_is_refused() -> None:
    weight = torch.empty(8, 3, 3, 3).to(memory_format=torch.channels_last)
    with pytest.raises(Mismatch, match="channels-last"):
        parse_shapes(announce([weight]), 1)


@settings(max_examples=300)
@given(st.lists(st.integers(-5, 1 << 62), max_size=40), st.integers(-1, 20))
def test_any_numbers(values: list[int], count: int) -> None:
    try:
        found = parse_shapes(values, count)
    except Mismatch:
        return
    assert all(len(reading) == count for reading in found)


def test_many_equal_numbers_do_not_explode() -> None:
    assert len(parse_shapes([1] * 4000, 500)) == 2


def test_buckets() -> None:
    assert parse_buckets([2, 1, 0, 2], [1, 2], 3) == [[2], [1, 0]]
    for indices, sizes in (([2, 1, 1, 2], [1, 2]), ([2, 1, 0, 3], [1, 2]), ([2, 1, 0, 2], [0, 3]), ([0], [1])):
        with pytest.raises(Mismatch):
            parse_buckets(indices, sizes, 3)


def test_initial_buckets_as_torch_assigns_them() -> None:
    sizes = [400_000, 300_000, 900_000, 20 << 20, 6 << 20, 100]
    tensors = [torch.empty(size // 4) for size in sizes]
    assigned, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [1 << 20, 25 << 20])
    assert initial_buckets(sizes) == [[[0, 1, 2, 3, 4, 5]], [list(b) for b in reversed(assigned)]]
