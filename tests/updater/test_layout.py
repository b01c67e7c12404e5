import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.job.model import BucketSlice
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


# -- one layout at a time: the whole message, and the edge at which it is none -------------------------------

A, B = {"a": (2, 2), "b": (2,)}, {"a": (2, 2)}


@pytest.mark.parametrize(
    ("shapes", "buckets", "elements", "why"),
    [
        (B, [[S("a", -1, 4)]], None, "bucket 0: a slice of 'a' has a negative field"),
        (B, [[S("a", 0, -1)]], None, "bucket 0: a slice of 'a' has a negative field"),
        (B, [[S("a", 0, 4, -1)]], None, "bucket 0: a slice of 'a' has a negative field"),
        (B, [[], [S("a", 0, 4, 1)]], None, "bucket 1: elements [1, 5) are outside 'a', which has 4"),
        (B, [[S("a", 0, 0, 5)]], None, "bucket 0: elements [5, 5) are outside 'a', which has 4"),
        (B, [[], [S("z", 0, 1)]], None, "bucket 1: 'z' is not an optimized tensor"),
        (B, [[], [S("a", 3, 4)]], [0, 6], "bucket 1: 'a' ends at element 7 of a bucket of 6"),
        (B, [[S("a", 0, 4)]], [4, 4], "1 buckets described, 2 bucket lengths given"),
        (B, [[S("a", 0, 4)]], [], "1 buckets described, 0 bucket lengths given"),
        (A, [[], [S("b", 3, 2), S("a", 0, 4)]], None, "bucket 1: elements [3, 4) are claimed by 'a' and 'b'"),
        (A, [[S("a", 0, 4), S("b", 1, 2)]], None, "bucket 0: elements [1, 3) are claimed by 'a' and 'b'"),
        (A, [[S("a", 5, 4), S("b", 4, 2)]], None, "bucket 0: elements [5, 6) are claimed by 'b' and 'a'"),
        (B, [[S("a", 0, 3, 1)]], None, "'a': elements [0, 1) are in no bucket"),
        (B, [[S("a", 0, 1)], [S("a", 0, 2, 2)]], None, "'a': elements [1, 2) are in no bucket"),
        (B, [[S("a", 0, 3)]], None, "'a': elements [3, 4) are in no bucket"),
        (B, [], None, "'a': elements [0, 4) are in no bucket"),
        (B, [[S("a", 0, 3)], [], [S("a", 0, 2, 2)]], None,
         "'a': elements [2, 3) are covered twice (again by bucket 2)"),
        (B, [[S("a", 0, 1, 1)], [S("a", 0, 4)]], None, "'a': elements [1, 2) are covered twice (again by bucket 0)"),
        ({"s": ()}, [[]], None, "'s': elements [0, 1) are in no bucket"),
        ({"s": ()}, [[S("s", 0, 2)]], None, "bucket 0: elements [0, 2) are outside 's', which has 1"),
    ],
)
def test_every_gap_overlap_and_reach_is_named(shapes, buckets, elements, why):
    with pytest.raises(LayoutError) as caught:
        Layout(buckets, shapes, elements)
    assert str(caught.value) == why


def test_layouts_at_the_edge_of_what_is_refused():
    """Slices that touch, that end with their bucket and tensor, and that have no elements."""
    Layout([[S("a", 0, 4), S("b", 4, 2)]], A, [6])
    Layout([[S("b", 0, 2), S("a", 2, 4)]], A, [6])
    Layout([[S("a", 0, 4), S("b", 2, 0, 2), S("b", 7, 2)]], A, [9])
    Layout([[S("a", 0, 3)], [S("a", 9, 1, 3)]], B)
    Layout([[S("a", 0, 2, 2)], [S("a", 9, 2)]], B)
    Layout([], {}, [])


def test_scalars_have_one_element_and_empty_tensors_none():
    layout = Layout([[S("s", 0, 1)]], {"s": (), "nothing": (0, 4)}, [1])
    assert layout.sizes == {"s": 1, "nothing": 0} and layout.shapes == {"s": (), "nothing": (0, 4)}
    assert layout.bucket_names(0) == ["s"]


def test_a_layout_keeps_what_it_was_given():
    buckets = [[S("b", 0, 1), S("a", 1, 4), S("b", 5, 1, 1), S("b", 6, 0)], [S("a", 0, 0)]]
    layout = Layout(buckets, {"a": [2, 2], "b": [2]}, [6, 0])
    assert layout.buckets == tuple(map(tuple, buckets)) and layout.elements == (6, 0)
    assert layout.shapes == A
    assert [layout.bucket_names(i) for i in (0, 1)] == [["b", "a"], []]
    assert Layout([[S("a", 0, 4)]], B).elements is None


# -- taking a bucket's data --------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [-1, 2, 3])
def test_buckets_that_the_layout_does_not_have(index):
    layout = Layout([[S("a", 0, 4)], []], B)
    with pytest.raises(LayoutError) as caught:
        layout.take(index, torch.zeros(4))
    assert str(caught.value) == f"bucket {index}: the layout has 2 buckets"


def test_a_bucket_has_the_length_it_was_given_or_at_least_what_its_slices_need():
    given_lengths, none_given = Layout([[S("a", 1, 4)]], B, [7]), Layout([[S("a", 1, 4)], []], B)
    assert given_lengths.take(0, torch.zeros(7)).numel() == 7
    for count in (5, 6, 8):
        with pytest.raises(LayoutError) as caught:
            given_lengths.take(0, torch.zeros(count))
        assert str(caught.value) == f"bucket 0: {count} elements given, the layout says 7"
    assert [none_given.take(0, torch.zeros(count)).numel() for count in (5, 6)] == [5, 6]
    assert none_given.take(1, torch.zeros(0)).numel() == 0
    with pytest.raises(LayoutError, match=r"^bucket 0: 4 elements given, the layout says 5$"):
        none_given.take(0, torch.zeros(4))


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_taken_as_the_element_type_of_the_wire(wire):
    layout = Layout([[S("a", 0, 4)], []], B, [4, 0])
    data = torch.tensor([1.5, -2.0, 0.0, 3.0]).to(wire)
    for raw in (data, data.view(torch.uint8), data.view(torch.uint8).numpy(), data.view(torch.int16)):
        taken = layout.take(0, raw, wire)
        assert taken.dtype == wire and torch.equal(taken, data) and taken.data_ptr() == data.data_ptr()
    assert layout.take(1, np.zeros(0, np.uint8), wire).dtype == wire
    assert layout.take(0, data).dtype == wire


def test_read_only_and_scattered_data_is_copied_and_nothing_else():
    layout = Layout([[S("a", 0, 4)]], B, [4])
    array = np.arange(4, dtype=np.float32)
    assert layout.take(0, array).data_ptr() == array.ctypes.data
    array.setflags(write=False)
    taken = layout.take(0, array)  # torch warns of read-only arrays, and a warning fails a test
    assert taken.tolist() == [0, 1, 2, 3] and taken.data_ptr() != array.ctypes.data
    scattered = torch.arange(8.0)[::2]
    assert layout.take(0, scattered).tolist() == [0, 2, 4, 6] and layout.take(0, scattered).is_contiguous()
    assert layout.take(0, torch.arange(32, dtype=torch.uint8)[::2], torch.float32).is_contiguous()
    assert not layout.take(0, torch.zeros(4, requires_grad=True)).requires_grad


@pytest.mark.parametrize(
    ("data", "dtype", "why"),
    [
        (torch.zeros(()), None, "a bucket is one-dimensional, found shape ()"),
        (torch.zeros(2, 2), None, "a bucket is one-dimensional, found shape (2, 2)"),
        (torch.zeros(4, dtype=torch.int32), None, "a gradient bucket holds floating-point elements, found torch.int32"),
        (torch.zeros(4, dtype=torch.int32), torch.int64, "a gradient bucket holds floating-point elements, found"
                                                         " torch.int64"),
        (torch.zeros(4), torch.float16, "a bucket of torch.float32 cannot be taken as torch.float16"),
        (torch.zeros(17, dtype=torch.uint8), torch.float32, "a bucket of torch.uint8 cannot be taken as torch.float32"),
        (torch.zeros(4, dtype=torch.float64), None,
         "bucket 0: a torch.float64 gradient does not fit torch.float32 without rounding"),
    ],
)
def test_data_of_another_kind(data, dtype, why):
    layout = Layout([[S("a", 0, 4)]], B)
    with pytest.raises(LayoutError) as caught:
        layout.take(0, torch.cat([data, data]) if dtype is torch.int64 else data, dtype)
    assert str(caught.value) == why
