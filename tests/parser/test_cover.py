"""Coverage bitmaps against an array with a bool for each cell."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parser import cover

WORDS = 40
CELLS = 64 * WORDS
cells = st.integers(0, CELLS) | st.sampled_from([0, 63, 64, 65, 511, 512, 513, 1024, CELLS - 64, CELLS - 1, CELLS])
spans = st.tuples(cells, cells).map(sorted)


def runs(there: np.ndarray, first: int, end: int) -> list[tuple[int, int]]:
    """Where nothing is, cell by cell."""
    out: list[tuple[int, int]] = []
    for cell in range(first, end):
        if there[cell]:
            continue
        if out and out[-1][1] == cell:
            out[-1] = (out[-1][0], cell + 1)
        else:
            out.append((cell, cell + 1))
    return out


@settings(max_examples=300)
@given(st.lists(spans, max_size=20))
def test_what_was_put_is_there_and_nothing_else(put: list[list[int]]) -> None:
    bitmap, there = np.zeros(WORDS, np.uint64), np.zeros(CELLS, bool)
    for first, end in put:
        assert cover.any_in(bitmap, first, end) == there[first:end].any()
        cover.put(bitmap, first, end)
        there[first:end] = True
        assert (np.unpackbits(bitmap.view(np.uint8), bitorder="little").astype(bool) == there).all()


@settings(max_examples=300)
@given(st.booleans(), st.lists(spans, max_size=20), spans, st.integers(1, 5))
def test_gaps_are_where_nothing_was_put(full: bool, changed: list[list[int]], asked: list[int], room: int) -> None:
    """A few at a time, as the engine asks for them. `full`: nearly everything is there."""
    there = np.full(CELLS, full)
    for first, end in changed:
        there[first : end if not full else min(end, first + 100)] = not full
    bitmap = np.packbits(there, bitorder="little").view(np.uint64)
    (first, end), found = asked, []
    at = first
    while at < end:
        some, on = cover.gaps(bitmap, at, end, room)
        assert len(some) <= room and on > at
        found, at = found + some, on
    assert found == runs(there, first, end)


def test_a_gap_of_every_length_at_every_place_near_a_words_end() -> None:
    for start in (0, 62, 63, 64, 65, 127, 128, 575, 576, 640):
        for length in (1, 2, 63, 64, 65, 128, 511, 512, 513, 1100):
            there = np.ones(CELLS, bool)
            there[start : start + length] = False
            bitmap = np.packbits(there, bitorder="little").view(np.uint64)
            assert cover.gaps(bitmap, 0, CELLS, 9) == ([(start, start + length)], CELLS)
            within = [(start + 1, start + length)] if length > 1 else []
            assert cover.gaps(bitmap, start + 1, start + length, 9)[0] == within


def test_without_room_nothing_is_said_and_nothing_passed() -> None:
    assert cover.gaps(np.zeros(2, np.uint64), 3, 100, 0) == ([], 3)


@pytest.mark.parametrize("call", [cover.any_in, cover.put, lambda bitmap, a, b: cover.gaps(bitmap, a, b, 1)])
@pytest.mark.parametrize(("first", "end"), [(0, 129), (5, 4), (130, 131)])
def test_cells_outside_the_bitmap_are_refused(call, first: int, end: int) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(IndexError):
        call(np.zeros(2, np.uint64), first, end)
