"""What is measured of gradients and weights, against numpy in fp64: every kernel, dtype, length, cut and number of
threads."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from updater import kernels
from updater.measure import Found, Measurer, Parts

BITS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
# Denormals, zeros of both signs, the largest, infinities and NaNs of both kinds: patterns of fp32; others are its first
# or other bits.
ODD = [0, 1 << 31, 1, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF,
       0x7C00_7C00, 0xFC01_FC01, 0x0001_0001, 0x7BFF_7BFF]


def elements(draw: Any, dtype: str, n: int) -> np.ndarray:
    """n bit patterns: any, with odd ones here and there."""
    size = 8 * BITS[dtype]().itemsize
    seed = draw(st.integers(0, 2**32 - 1))
    found = np.random.default_rng(seed).integers(0, 2**size, n).astype(BITS[dtype])
    for at in draw(st.lists(st.integers(0, n - 1), max_size=8)) if n else []:
        odd = draw(st.sampled_from(ODD))
        found[at] = odd >> 16 if dtype == "bfloat16" else odd % 2**size
    return found


def widened(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(np.float32 if dtype == "float32" else np.float16).astype(np.float64)


def first(flags: np.ndarray) -> int:
    return int(np.flatnonzero(flags)[0]) if flags.any() else -1


def measured(parts: Parts, threads: int = 0, kernel: str = "") -> list[Found]:
    measurer = Measurer(threads, kernel)
    try:
        assert measurer.wait(measurer.begin(parts))
        return parts.found()
    finally:
        measurer.close()


@st.composite
def cut_gradients(draw: Any) -> tuple[str, np.ndarray, list[tuple[int, int, int]], int]:
    """(dtype, a tensor's elements, spans (at, first, n) of it in some region, the region's bytes)."""
    dtype = draw(st.sampled_from(sorted(BITS)))
    n = draw(st.one_of(st.integers(0, 70), st.integers(0, 9000), st.sampled_from([4095, 4096, 4097, 65536, 70_001])))
    bits = elements(draw, dtype, n)
    cuts = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))})
    pieces = list(itertools.pairwise(cuts))
    spans, at = {}, 0
    for begin, end in draw(st.permutations(pieces)):  # buckets do not lie in the order of a tensor's elements
        at += bits.itemsize * draw(st.integers(0, 9))
        spans[begin] = (at, begin, end - begin)
        at += bits.itemsize * (end - begin)
    return dtype, bits, [spans[begin] for begin, _ in pieces], at


@settings(deadline=None, max_examples=150)
@given(cut_gradients())
@np.errstate(invalid="ignore")  # signalling NaNs, which numpy reports when it widens them
def test_gradients_are_measured_as_numpy_does(case: tuple[str, np.ndarray, list[tuple[int, int, int]], int]) -> None:
    dtype, bits, spans, nbytes = case
    region = np.zeros(nbytes + 1, np.uint8)
    for at, begin, n in spans:
        region[at : at + n * bits.itemsize] = bits[begin : begin + n].view(np.uint8)
    values = widened(bits, dtype)
    finite = values[np.isfinite(values)]
    results = []
    for kernel in kernels.names():
        parts = Parts([(0, dtype, *span) for span in spans], 1)
        parts.gradients(region.ctypes.data)
        results.append(measured(parts, kernel=kernel)[0])
    assert all(one == results[0] for one in results), "kernels differ in some bit"
    found = results[0]
    assert found.elements == len(bits) and found.zeros == int((values == 0).sum())
    assert (found.nans, found.infs) == (int(np.isnan(values).sum()), int(np.isinf(values).sum()))
    assert (found.first_nan, found.first_inf) == (first(np.isnan(values)), first(np.isinf(values)))
    assert found.largest == (np.abs(finite).max() if len(finite) else 0)
    exact = math.fsum(finite * finite)
    assert abs(found.squares - exact) <= 1e-13 * exact


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(sorted(BITS)), st.integers(0, 9000))
@np.errstate(invalid="ignore")
def test_changes_are_measured_as_numpy_does(data: Any, dtype: str, n: int) -> None:
    before, after = (elements(data.draw, dtype, n) for _ in range(2))
    old, new = widened(before, dtype), widened(after, dtype)
    moved = new - old
    expected = [float(np.sum(old * old)), float(np.sum(moved * moved))]
    results = []
    for kernel in kernels.names():
        parts = Parts([(0, dtype, 0, 0, n)], 1)
        parts.weights([before.ctypes.data], [after.ctypes.data])
        found = measured(parts, kernel=kernel)[0]
        results.append((found.squares, found.change))
    np.testing.assert_array_equal(results, [results[0]] * len(results))
    np.testing.assert_allclose(results[0], expected, rtol=1e-13)


def test_threads_change_no_bit_and_tensors_stay_apart() -> None:
    random = np.random.default_rng(1)
    sizes = [1, 0, 300_000, 17, 131_072]
    region = random.standard_normal(sum(sizes)).astype(np.float32)
    starts = np.cumsum([0, *sizes])
    spans = [(i, "float32", int(4 * starts[i]), 0, n) for i, n in enumerate(sizes)]
    parts = Parts(spans, len(sizes))
    parts.gradients(region.ctypes.data)
    alone = measured(parts)
    assert [one.elements for one in alone] == sizes
    assert [measured(parts, threads) for threads in (1, 3)] == [alone, alone]
    for i, one in enumerate(alone):
        mine = region[starts[i] : starts[i + 1]].astype(np.float64)
        assert one.squares == pytest.approx(float(mine @ mine), rel=1e-13)
    parts.gradients(region.ctypes.data, {2})
    assert measured(parts, 2) == [*alone[:2], Found(0, 0.0, 0.0, 0.0, 0, 0, 0, -1, -1), *alone[3:]]


def test_the_order_of_the_sums_is_the_documented_one() -> None:
    """Blocks of 4096, 16 lanes, added as a tree: what include/measure.h says, to the last bit."""
    values = np.random.default_rng(2).standard_normal(10_007).astype(np.float32)
    total = 0.0
    for begin in range(0, len(values), 4096):
        lanes = [0.0] * 16
        for i, value in enumerate(values[begin : begin + 4096].astype(np.float64).tolist()):
            lanes[i % 16] += value * value
        for apart in (8, 4, 2, 1):
            lanes = [lanes[i] + lanes[i + apart] for i in range(apart)]
        total += lanes[0]
    parts = Parts([(0, "float32", 0, 0, len(values))], 1)
    parts.gradients(values.ctypes.data)
    assert measured(parts)[0].squares == total


def test_weights_without_an_address_are_left_out() -> None:
    weights = torch.ones(100)
    parts = Parts([(0, "float32", 0, 0, 100), (1, "float32", 0, 0, 100)], 2)
    parts.weights([weights.data_ptr(), weights.data_ptr()], [weights.data_ptr(), 0])
    assert [(one.elements, one.squares, one.change) for one in measured(parts)] == [(100, 100.0, 0.0), (0, 0.0, 0.0)]


@pytest.mark.parametrize("spans", [
    [(1, "float32", 0, 0, 1)], [(0, "float32", 0, 5, 5), (0, "float32", 0, 0, 5)],
])
def test_spans_that_could_not_be_folded_in_order_are_refused(spans: list[tuple[int, str, int, int, int]]) -> None:
    with pytest.raises(ValueError, match="span"):
        Parts(spans, 1)
