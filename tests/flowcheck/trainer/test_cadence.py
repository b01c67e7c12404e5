"""How often checksums are sent: as told, or as rarely as their cost demands."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flowcheck.trainer.cadence import SHARE, USUAL, Cadence


def run(cadence: Cadence, steps: int, *, step: float, cost: float) -> list[int]:
    """Steps that had checksums, of a job whose step takes so long; seconds."""
    now, due = 0.0, []
    for number in range(1, steps + 1):
        now += step
        if cadence.due(number):
            due.append(number)
            now += cost
            cadence.over(now, cost)
        else:
            cadence.over(now)
    return due


@pytest.mark.parametrize(("every", "due"), [(0, []), (3, [3, 6, 9]), (7, [7])])
def test_a_number_is_obeyed_whatever_it_costs(every: int, due: list[int]) -> None:
    said: list[str] = []
    assert run(Cadence(every, said.append), 10, step=0.001, cost=60.0) == due and said == []


@pytest.mark.parametrize(("cost", "every"), [
    (0.0, 100), (0.049, 100), (0.051, 200), (0.09, 200), (0.3, 800), (1e9, 100 << 16),
])
def test_without_a_number_they_come_as_often_as_they_may_cost(cost: float, every: int) -> None:
    """A step of 0.1 s: 100 of them may spend 50 ms."""
    said: list[str] = []
    cadence = Cadence(None, said.append)
    assert cadence.every == USUAL == 100 and SHARE == 0.005
    due = run(cadence, 2000, step=0.1, cost=cost)
    assert due == [100, *range(every, 2001, every)] if every > 100 else list(range(100, 2001, 100))
    assert cadence.every == every and len(said) == (every != 100)
    assert all(str(every) in text and "checksum_every" in text for text in said)


def test_one_slow_time_is_forgotten() -> None:
    """The first makes tables, and finds memory cold: the least counts."""
    cadence = Cadence(None, lambda text: None)
    run(cadence, 100, step=0.1, cost=1.0)
    assert cadence.every == 3200
    cadence.over(1000.0, 0.01)
    assert cadence.every == 100


def test_one_odd_step_is_not_the_usual_one() -> None:
    """Neither the last before the checksums nor what was usual a thousand steps ago."""
    cadence = Cadence(None, lambda text: None)
    now = run_from(cadence, 0.0, [0.1] * 50 + [60.0], cost=0.09)
    assert cadence.every == 200
    now = run_from(cadence, now, [0.4] * 33, cost=0.09)
    assert cadence.every == 100  # steps take longer now
    run_from(cadence, now, [0.4] * 10, cost=9.0)
    assert cadence.every == 100  # the least that was measured counts, and not the newest


def run_from(cadence: Cadence, now: float, steps: list[float], *, cost: float) -> float:
    """Steps without checksums, and then what those of one took. Returns the time after them."""
    cadence.over(now)
    for step in steps:
        now += step
        cadence.over(now)
    now += cost
    cadence.over(now, cost)
    return now


def test_what_it_costs_is_said_in_milliseconds() -> None:
    said: list[str] = []
    run(Cadence(None, said.append), 100, step=0.1, cost=0.3)
    assert len(said) == 1 and " 300 ms" in said[0] and " 100 ms" in said[0]


def test_intervals_of_several_ranks_meet() -> None:
    """Each is a multiple of every shorter one, so steps of the longest have the checksums of all."""
    made = [Cadence(None, lambda text: None) for _ in range(8)]
    for number, one in enumerate(made):
        run(one, 100, step=0.1, cost=0.02 * 3**number)
    every = sorted(one.every for one in made)
    assert all(b % a == 0 for a, b in pairwise(every)) and every[0] == 100 < every[-1]
