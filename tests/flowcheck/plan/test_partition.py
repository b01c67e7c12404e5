"""Gemini's Algorithm 2: everything is sent once, in time, and the loops end where the printed ones do not."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.plan.partition import Link, partition, spilled

links = st.builds(
    Link, bandwidth=st.floats(1e3, 1e6), start=st.floats(0, 0.5), share=st.floats(0.1, 1),
    buffer=st.integers(1000, 100_000), parts=st.integers(1, 8),
)
spans_of = st.lists(st.floats(0, 2), min_size=1, max_size=6)


@given(spans_of, st.integers(1, 200_000), st.integers(0, 3), links)
def test_every_copy_is_sent_once_and_in_order(spans: list[float], size: int, copies: int, link: Link) -> None:
    pieces = partition(spans, size, copies, link)
    at = [0] * copies
    for piece in pieces:
        assert 0 < piece.size <= link.most and piece.offset == at[piece.copy]
        at[piece.copy] += piece.size
    assert at == [size] * copies
    assert [(piece.span, piece.copy) for piece in pieces] == sorted((piece.span, piece.copy) for piece in pieces)


@given(spans_of, st.integers(1, 200_000), st.integers(1, 3), links)
def test_no_span_but_the_last_is_overrun(spans: list[float], size: int, copies: int, link: Link) -> None:
    pieces = partition(spans, size, copies, link)
    for span, idle in enumerate(spans[:-1]):
        used = math.fsum(link.seconds(piece.size) for piece in pieces if piece.span == span)
        assert used <= link.share * idle * (1 + 1e-9)
    assert spilled(spans, pieces, link) >= 0


def test_a_span_as_short_as_the_start_of_a_send_is_left() -> None:
    """Printed, this loops for ever."""
    pieces = partition([0.1, 0.1, 5.0], 1000, 1, Link(1000, start=0.09, share=0.9, buffer=4000))
    assert {piece.span for piece in pieces} == {2}


def test_by_hand() -> None:
    """128 B/s, 0.125 s to start, 32 bytes at a time: 32 take 0.375 s, 16 go in the 0.25 s left, then the rest."""
    link = Link(128, start=0.125, share=0.5, buffer=128, parts=4)
    pieces = partition([1.25, 10.0], 100, 1, link)
    assert [(piece.span, piece.offset, piece.size) for piece in pieces] == [
        (0, 0, 32), (0, 32, 16), (1, 48, 32), (1, 80, 20),
    ]
    assert spilled([1.25, 10.0], pieces, link) == 0
    assert spilled([1.25, 0.5], pieces, link) == 0.375 + 0.28125 - 0.25


@pytest.mark.parametrize(
    "call",
    [
        lambda: Link(0, 1), lambda: Link(1, -1), lambda: Link(1, 1, share=0), lambda: Link(1, 1, buffer=3, parts=4),
        lambda: partition([], 1, 1, Link(1, 1)), lambda: partition([-1.0], 1, 1, Link(1, 1)),
        lambda: partition([1.0], 0, 1, Link(1, 1)),
    ],
)
def test_what_makes_no_sense_is_refused(call) -> None:
    with pytest.raises(UserError) as refused:
        call()
    assert refused.value.where and refused.value.remedy
