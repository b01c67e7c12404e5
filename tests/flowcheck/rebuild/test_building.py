"""When values of a step are assumed before its record is here."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.rebuild.version.building import AGREED, MOST, Assumption
from updater.step import StepValues


def values(lr: float, skip: bool = False) -> StepValues:
    return StepValues(groups=({"lr": lr},), skip=skip)


class Counted(Assumption):
    """assumed, wrong: steps of which values were assumed, and of these, wrongly."""

    def __init__(self, rates: Iterable[float] = (), *, known: bool = False) -> None:
        super().__init__(known=known)
        self.assumed: list[int] = []
        self.wrong: list[int] = []
        self.steps = 0
        self.go(rates)

    def go(self, rates: Iterable[float]) -> None:
        for rate in rates:
            self.step(values(rate))

    def step(self, said: StepValues) -> None:
        if self.values is not None:
            self.assumed.append(self.steps)
            if not self.values.updates_as(said):
                self.wrong.append(self.steps)
        self.learn(said)
        self.steps += 1


def test_nothing_is_assumed_before_records_have_agreed() -> None:
    assert Counted([0.5] * 10).assumed == list(range(AGREED + 1, 10)) and AGREED == 2


def test_what_is_assumed_is_what_the_record_before_said() -> None:
    at = Counted([0.5] * 5)
    assert at.values == values(0.5)


def test_values_that_differ_in_every_step_are_never_assumed() -> None:
    """A schedule that moves in each step, or a clip coefficient."""
    assert Counted([1 / (1 + t) for t in range(200)]).assumed == []


def test_what_fails_again_and_again_is_tried_seldom() -> None:
    """Three steps agree, the fourth does not, for ever; now and then four do."""
    at = Counted([1.0 + t // 4 for t in range(4000)])
    assert at.wrong == [4]
    twice = Counted([1.0 + t // 40 for t in range(40)] + [2.0 + t // 5 for t in range(4000)])
    assert len(twice.wrong) == 2


def test_a_schedule_of_long_stairs_costs_one_version_a_stair() -> None:
    at = Counted([1.0 + t // 100 for t in range(1000)])
    assert at.wrong == list(range(100, 1000, 100))
    assert len(at.assumed) > 900, "and what was right makes up for it"


def test_the_number_of_records_that_must_agree_has_an_end() -> None:
    at, rate = Counted(), 1.0
    for _ in range(12):
        while at.values is None:
            at.go([rate])
        rate += 1
        at.go([rate])
    at.assumed.clear()
    begin = at.steps
    at.go([rate] * (MOST + 1))
    assert at.assumed == [begin + MOST] and MOST == 256


@pytest.mark.parametrize(("right", "wait"), [(7, 8), (8, 4)])
def test_as_many_right_assumptions_make_up_for_a_wrong_one(right: int, wait: int) -> None:
    """After a wrong one four records have to agree; four more that are assumed and right, and it is two again."""
    at = Counted([0.5] * 4 + [1.0] * (1 + right) + [2.0])
    assert at.wrong == [4, 5 + right]
    at.assumed.clear()
    begin = at.steps
    at.go([2.0] * 20)
    assert at.assumed[0] == begin + wait


def test_the_first_record_agrees_with_nothing() -> None:
    """Whatever it says: a job that declares values and sends none in its first steps."""
    at = Counted()
    for _ in range(AGREED):
        at.step(StepValues())
    assert at.values is None
    at.step(StepValues())
    assert at.values == StepValues()


def test_a_step_that_is_skipped_is_no_reason_to_skip_the_next() -> None:
    """GradScaler: the scale is another one afterwards, and stays."""
    at = Counted([0.5] * 4)
    at.step(values(0.5, skip=True))
    assert at.wrong == [4] and at.values is None
    at.go([0.5] * 3)
    assert at.values is None
    at.go([0.5])
    assert at.values == values(0.5)


def test_where_nothing_is_declared_nothing_has_to_agree() -> None:
    at = Counted(known=True)
    assert at.values == StepValues()
    at.step(StepValues())
    assert at.values == StepValues() and at.wrong == []


def test_records_that_nobody_declared_are_learnt_from_all_the_same() -> None:
    at = Counted([0.5] * 6, known=True)
    assert at.wrong == [0] and at.assumed == [0, 3, 4, 5] and at.values == values(0.5)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60), st.booleans())
def test_only_what_the_last_records_agreed_on_is_assumed(script: list[tuple[int, bool]], known: bool) -> None:
    at, said = Counted(known=known), list[StepValues]()
    for rate, skip in script:
        if at.values is not None and said and not (known and len(said) == at.steps == 0):
            last = said[-1 - AGREED :] if at.wrong or not known else said[-1:]
            assert all(at.values.updates_as(one) for one in last[1:]) and not at.values.skip
        at.step(values(float(rate), skip))
        said.append(values(float(rate), skip))


@pytest.mark.parametrize("known", [True, False])
def test_buffers_are_never_assumed(known: bool) -> None:
    at = Counted(known=known)
    for _ in range(4):
        at.step(StepValues(buffers={"mean": object()}))  # type: ignore[dict-item]
    assert at.values is not None and at.values.buffers == {}
