import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.manifest import BucketSlice
from updater.errors import LayoutError
from updater.layout import Layout


def S(name, offset, length, start=0):
    return BucketSlice(name, offset, length, start)


@st.composite
def layouts(draw):
    """Tensors cut into pieces, the pieces dealt to buckets in any order, with padding between them."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    count = draw(st.integers(1, 4))
    pieces = []
    for t, size in enumerate(sizes):
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        pieces += [(f"t{t}", a, b - a) for a, b in itertools.pairwise(cuts)]
    buckets = [[] for _ in range(count)]
    reach = [0] * count
    for name, start, length in draw(st.permutations(pieces)):
        b = draw(st.integers(0, count - 1))
        offset = reach[b] + draw(st.integers(0, 3))
        buckets[b].append(S(name, offset, length, start))
        reach[b] = offset + length
    return {f"t{t}": (size,) for t, size in enumerate(sizes)}, buckets, reach


@given(layouts(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_every_element_lies_where_the_layout_says(case, wire):
    shapes, buckets, reach = case
    layout = Layout(buckets, shapes, reach)
    truth = {name: torch.randn(shape).to(wire) for name, shape in shapes.items()}
    found = {name: torch.full(shape, float("nan"), dtype=wire) for name, shape in shapes.items()}
    for index, bucket in enumerate(buckets):
        data = torch.full((reach[index],), 7.0, dtype=wire)
        for s in bucket:
            data[s.offset : s.offset + s.length] = truth[s.name][s.start : s.start + s.length]
        bits = data.view(torch.uint8).numpy()
        bits.setflags(write=False)
        taken = layout.take(index, bits, wire)
        for s in layout.buckets[index]:
            found[s.name][s.start : s.start + s.length] = taken[s.offset : s.offset + s.length]
    for name in shapes:
        assert torch.equal(found[name], truth[name])


@given(layouts(), st.data())
def test_a_missing_or_repeated_piece_is_named(case, data):
    shapes, buckets, _ = case
    b = data.draw(st.sampled_from([i for i, bucket in enumerate(buckets) if bucket]))
    s = data.draw(st.sampled_from(buckets[b]))
    span = rf"'{s.name}': elements \[{s.start}, {s.start + s.length}\)"
    without = [[p for p in bucket if p is not s] for bucket in buckets]
    with pytest.raises(LayoutError, match=span + " are in no bucket"):
        Layout(without, shapes)
    again = [list(bucket) for bucket in buckets]
    again.append([S(s.name, 0, s.length, s.start)])
    with pytest.raises(LayoutError, match=span + " are covered twice"):
        Layout(again, shapes)


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([[S("a", 0, 4), S("b", 3, 2)]], r"elements \[3, 4\) are claimed by 'a' and 'b'"),
        ([[S("a", 0, 5), S("b", 5, 2)]], r"elements \[0, 5\) are outside 'a'"),
        ([[S("a", 0, 4), S("c", 4, 2)]], "'c' is not an optimized tensor"),
        ([[S("a", 0, 4), S("b", 5, 2)]], "ends at element 7 of a bucket of 6"),
        ([[S("a", 0, 4), S("b", -1, 2)]], "negative field"),
        ([[S("a", 0, 4)], [S("b", 0, 2)]], "2 buckets described, 1 bucket lengths"),
        ([[S("a", 0, 3), S("b", 4, 2)]], r"'a': elements \[3, 4\) are in no bucket"),
    ],
)
def test_wrong_layouts(buckets, message):
    with pytest.raises(LayoutError, match=message):
        Layout(buckets, {"a": (2, 2), "b": (2,)}, [6])


def test_data_that_does_not_fit():
    layout = Layout([[S("a", 0, 4)]], {"a": (2, 2)}, [4])
    for data, dtype, message in [
        (np.zeros(3, np.float32), None, "3 elements given, the layout says 4"),
        (np.zeros(5, np.float32), None, "5 elements given, the layout says 4"),
        (np.zeros(10, np.uint8), torch.float16, "5 elements given, the layout says 4"),
        (np.zeros((2, 2), np.float32), None, "one-dimensional"),
        (np.zeros(4, np.int32), None, "floating-point"),
        (np.zeros(4, np.float64), None, "does not fit torch.float32"),
        (np.zeros(4, np.float32), torch.float16, "cannot be taken as"),
        (np.zeros(15, np.uint8), torch.float32, "cannot be taken as"),
    ]:
        with pytest.raises(LayoutError, match=message):
            layout.take(0, data, dtype)
    with pytest.raises(LayoutError, match="bucket 1: the layout has 1"):
        layout.take(1, np.zeros(4, np.float32))
    with pytest.raises(LayoutError, match="bucket -1: the layout has 1"):
        layout.take(-1, np.zeros(4, np.float32))


def test_where_no_length_is_given_padding_is_allowed_and_what_is_missing_is_not():
    layout = Layout([[S("a", 2, 4)], []], {"a": (2, 2)})
    assert layout.take(0, np.zeros(6, np.float32)).numel() == 6
    assert layout.take(0, np.zeros(9, np.float32)).numel() == 9
    assert layout.take(1, np.zeros(0, np.float32)).numel() == 0
    with pytest.raises(LayoutError, match="5 elements given, the layout says 6"):
        layout.take(0, np.zeros(5, np.float32))


def test_tensors_without_a_gradient_lie_in_no_bucket():
    shapes = {"a": (4,), "frozen": (3,)}
    assert Layout([[S("a", 0, 4)]], shapes, [4], without=["frozen"]).without == {"frozen"}
    with pytest.raises(LayoutError, match="'frozen' is said to have no gradient and lies in bucket 0"):
        Layout([[S("a", 0, 4), S("frozen", 4, 3)]], shapes, [7], without=["frozen"])
    with pytest.raises(LayoutError, match="'z' is not an optimized tensor"):
        Layout([[S("a", 0, 4)]], {"a": (4,)}, [4], without=["z"])
