"""The clock: the trainer's numbers, the manifest's iterations and the steps of versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.job.clock import Clock


@pytest.mark.parametrize(("first", "iteration", "number", "before", "after"), [
    (0, 0, 0, 0, 1), (0, 7, 7, 7, 8), (5, 0, 5, 5, 6), (5, 3, 8, 8, 9),
])
def test_what_an_iteration_is_to_the_trainer_and_to_versions(first, iteration, number, before, after) -> None:
    clock = Clock(first)
    assert (clock.number(iteration), clock.before(iteration), clock.after(iteration)) == (number, before, after)


def test_a_trainer_and_a_manifest_count_alike_unless_it_is_said() -> None:
    assert Clock().first == 0 and Clock().iteration(4) == 4


def test_what_came_before_the_manifest_has_negative_numbers() -> None:
    assert Clock(5).iteration(4) == -1 and Clock(5).made(5) == -1


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_there_and_back(first: int, iteration: int) -> None:
    clock = Clock(first)
    assert clock.iteration(clock.number(iteration)) == iteration
    assert clock.next(clock.before(iteration)) == iteration == clock.made(clock.after(iteration))
    assert clock.next(clock.after(iteration)) == iteration + 1  # what an iteration makes, the next one waits for
