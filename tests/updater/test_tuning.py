"""Which way of storing and fetching is chosen, from samples that a test makes up; and the form of real samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from updater import kernels, tuning
from updater.tuning import CHOICES, MARGIN, Tuning, measure, pick

FIRST, OTHER, THIRD = CHOICES[:3]


def test_the_first_choice_stays_unless_it_is_beaten_by_more_than_the_margin() -> None:
    assert pick({FIRST: [1.0], OTHER: [0.99 - MARGIN]}) == OTHER
    assert pick({FIRST: [1.0], OTHER: [1.01 - MARGIN]}) == FIRST
    assert pick({FIRST: [1.0], OTHER: [0.9], THIRD: [0.8]}) == THIRD
    assert pick({FIRST: [1.0], OTHER: [1.0]}) == FIRST


def test_a_round_that_was_disturbed_decides_nothing() -> None:
    assert pick({FIRST: [1.0, 9.0, 1.0], OTHER: [1.1, 1.1, 0.1]}) == FIRST
    assert pick({FIRST: [1.0, 0.1, 1.0], OTHER: [0.9, 9.0, 0.9]}) == OTHER


@given(st.dictionaries(st.sampled_from(CHOICES), st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=9), min_size=1))
def test_what_is_picked_was_measured(seconds: dict[Tuning, list[float]]) -> None:
    assert pick(seconds) in seconds


@pytest.mark.parametrize("kernel", kernels.names()[:-1])
def test_every_choice_is_one_that_a_pool_takes_and_is_measured_each_round(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "PIECE", 1 << 12)
    seconds = measure(3, kernel)
    assert list(seconds) == list(CHOICES) and len(set(CHOICES)) == len(CHOICES)
    assert all(len(taken) == 3 and min(taken) > 0 for taken in seconds.values())
    assert str(Tuning(2, 1024)) == "2 vectors, 1024 bytes ahead" and str(FIRST) == "8 vectors, nothing fetched"
