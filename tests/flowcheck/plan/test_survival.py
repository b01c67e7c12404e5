"""REFT's equations 5 and 6 and Figure 8; the just-in-time paper's costs and Table 8."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.plan.jit_costs import DAY, JitCase, gpu_dollars, wasted_share
from flowcheck.plan.renewal import Rhythm, effective_share, young_interval
from flowcheck.plan.survival import days_at, unprotected_survival, with_parity_survival

NODES, GROUP, RATE = 3072, 6, 1e-4


@pytest.mark.parametrize(("shape", "days"), [(1.0, 37.3), (1.3, 16.18), (1.5, 11.2), (2.0, 6.1)])
def test_figure_8(shape: float, days: float) -> None:
    found = days_at(lambda t: with_parity_survival(t, NODES, GROUP, RATE, shape), 0.9)
    assert found == pytest.approx(days, rel=6e-3)


def test_figure_8_without_reft_and_as_the_text_asks() -> None:
    assert days_at(lambda t: unprotected_survival(t, NODES, RATE, 1.3), 0.9) == pytest.approx(0.44, abs=5e-3)
    assert days_at(lambda t: unprotected_survival(t, NODES, RATE, 1.3, 1e-5), 0.9) == pytest.approx(0.41, abs=5e-3)
    asked = days_at(lambda t: with_parity_survival(t, NODES, GROUP, RATE, 1.3, 1e-5), 0.9)
    assert asked == pytest.approx(2.56, abs=5e-3)


@given(st.floats(0.01, 20), st.integers(1, 50), st.integers(2, 8))
def test_parity_never_hurts(days: float, groups: int, group: int) -> None:
    nodes = groups * group
    assert with_parity_survival(days, nodes, group, 1e-3, 1.3) >= unprotected_survival(days, nodes, 1e-3, 1.3)


def test_a_survival_that_does_not_fall_has_no_day() -> None:
    assert days_at(lambda t: 1.0, 0.9) == math.inf
    with pytest.raises(UserError):
        days_at(lambda t: math.exp(-t), 1)


@pytest.mark.parametrize(("gpus", "per_hour", "percent"), [(4, 0.346, 0.096), (1024, 5.54, 1.54), (8192, 15.7, 4.35)])
def test_table_8_periodic(gpus: int, per_hour: float, percent: float) -> None:
    case = JitCase(gpus, 2, 5, 9.9)
    assert case.best_rate() * 3600 == pytest.approx(per_hour, rel=3e-3)
    assert 100 * wasted_share(case.periodic()) == pytest.approx(percent, rel=3e-3)


@given(st.integers(1, 20000), st.floats(0.01, 20), st.floats(0.1, 100))
def test_the_papers_interval_is_youngs(gpus: int, failures: float, stall: float) -> None:
    case = JitCase(gpus, failures, stall, 0)
    assert 1 / case.best_rate() == pytest.approx(young_interval(stall, case.rate))
    c = case.best_rate()
    assert case.periodic() == pytest.approx(c * stall + case.rate / (2 * c))


@given(st.integers(1, 2000), st.floats(0.1, 5), st.floats(0, 60), st.floats(0.1, 10))
def test_just_in_time_to_first_order(gpus: int, failures: float, restart: float, minibatch: float) -> None:
    """The paper's user level, without f o and o_jit, is the closed form's loss to first order in the rate."""
    case = JitCase(gpus, failures, 5, restart, minibatch)
    exact = effective_share(Rhythm(minibatch, restart=restart), case.rate)
    loss = case.rate * (restart + minibatch / 2)
    assert case.user_level() - case.gpu_rate * 5 == pytest.approx(loss)
    assert 1 - exact == pytest.approx(wasted_share(loss), abs=2 * loss**2 + 1e-9)


def test_dollars_of_the_introduction() -> None:
    assert gpu_dollars(1000, 1, 15, 4, 30) == 30_000
    assert gpu_dollars(10_000, 10, 15, 4, 30) == 3_000_000
    assert JitCase(1000, 1, 1, 0).rate * DAY == pytest.approx(1)


@pytest.mark.parametrize("options", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, -1)])
def test_what_makes_no_sense_is_refused(options: tuple[int, float, float, float]) -> None:
    with pytest.raises(UserError) as refused:
        JitCase(*options)
    assert refused.value.where
