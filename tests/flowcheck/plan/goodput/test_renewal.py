"""The closed form of effective time: its limits, its optimum, and simpy's own count of the same."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.plan.answers.answer import Inputs
from flowcheck.plan.goodput.cluster import DAY, read_cluster
from flowcheck.plan.goodput.renewal import (
    Rhythm,
    best_interval,
    daly_interval,
    effective_share,
    young_interval,
)
from flowcheck.plan.goodput.simulation import run
from flowcheck.plan.goodput.systems import System

seconds = st.floats(0, 50)
rhythms = st.builds(
    Rhythm, work=st.floats(0.5, 100), stall=seconds, slowdown=st.floats(0, 1), lag=seconds,
    skipped=st.floats(0, 0.9), restart=seconds, lost=st.floats(0, 1), persist_every=st.integers(1, 20),
    persist_lag=seconds, persist_restart=seconds,
)
rates = st.floats(1e-6, 0.05)


@given(rhythms, rates)
def test_a_share_is_a_share_and_falls_with_the_rate(rhythm: Rhythm, rate: float) -> None:
    share = effective_share(rhythm, rate)
    assert 0 <= share <= rhythm.work / rhythm.length * (1 + 1e-12)
    assert effective_share(rhythm, rate * 1.5) <= share * (1 + 1e-9)


@given(rhythms)
def test_without_failures_nothing_but_stalls_is_lost(rhythm: Rhythm) -> None:
    assert effective_share(rhythm, 0) == rhythm.work / rhythm.length
    assert effective_share(rhythm, 1e-12) == pytest.approx(rhythm.work / rhythm.length, abs=1e-6)


@given(st.floats(1, 100), seconds, seconds, rates)
def test_without_lag_it_is_dalys_complete_model(work: float, stall: float, restart: float, rate: float) -> None:
    """T = M exp(R/M) (exp((work + stall)/M) - 1) Ts / work (Daly 2006, eq. 13)."""
    mean = 1 / rate
    total = mean * math.exp(restart / mean) * (math.exp((work + stall) / mean) - 1) / work
    assert effective_share(Rhythm(work, stall, restart=restart), rate) == pytest.approx(1 / total, rel=1e-9)


def counted(rhythm: Rhythm, rate: float) -> float:
    """The same model by sums over what can happen between two losses of the tier, term by term, without algebra."""
    q, every = rhythm.lost, rhythm.persist_every
    z = math.exp(-rate * rhythm.length)

    def between(restart: float) -> list[float]:
        reached = math.exp(-rate * (restart + rhythm.lag))
        tails = [1.0, *(reached * z**j for j in range(1, SIZE + 1))]
        return [a - b for a, b in pairwise(tails)]

    here, total = between(rhythm.persist_restart), 0.0
    cycle = between(rhythm.restart)
    probability = q
    while probability > 1e-12:
        total += probability * math.fsum(p * (j // every) * every for j, p in enumerate(here))
        here = [math.fsum(here[i] * cycle[j - i] for i in range(j + 1)) for j in range(SIZE)]
        probability *= 1 - q
    return q * rate * rhythm.work * total * math.exp(-q * rate * rhythm.persist_lag)


SIZE = 80


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("lost", [0.5, 0.9, 1.0])
def test_with_a_persistent_tier_it_is_the_sum_of_all_ways(every: int, lost: float) -> None:
    rhythm = Rhythm(10, 2, 0.1, 4, 0, 15, lost, every, 20, 40)
    assert effective_share(rhythm, 1 / 20) == pytest.approx(counted(rhythm, 1 / 20), rel=1e-6)


@given(rhythms, rates, seconds)
def test_losing_the_tier_never_helps(drawn: Rhythm, rate: float, longer: float) -> None:
    rhythm = replace(drawn, skipped=0.0, persist_restart=drawn.restart + longer)
    assert effective_share(rhythm, rate) <= effective_share(replace(rhythm, lost=0.0), rate) * (1 + 1e-9)


def test_a_loss_that_hardly_ever_comes_changes_hardly_anything() -> None:
    plain = Rhythm(15, lag=3, restart=600)
    rare = Rhythm(15, lag=3, restart=600, lost=1e-12, persist_every=720, persist_restart=1400)
    assert effective_share(rare, 2e-5) == pytest.approx(effective_share(plain, 2e-5), rel=1e-8)


CASES = {
    "Daly": (Rhythm(10, 1, restart=20), 1 / 100),
    "lag beyond the interval": (Rhythm(10, 0, 0.1, lag=25, restart=5), 1 / 60),
    "skipped versions": (Rhythm(10, skipped=0.3, lag=3, restart=2), 1 / 80),
    "two tiers": (Rhythm(10, 1, 0.02, 4, 0, 15, 0.2, 6, 30, 50), 1 / 150),
    "always lost": (Rhythm(10, 1, lost=1, persist_every=3, persist_restart=7), 1 / 90),
    "seldom lost": (Rhythm(10, 1, 0, 0, 0, 5, 0.02, 40, 100, 60), 1 / 120),
}


@pytest.mark.parametrize("name", CASES)
def test_simulation_agrees(name: str) -> None:
    pytest.importorskip("simpy", reason="the extra `plan` is not installed")
    rhythm, rate = CASES[name]
    cluster = read_cluster({"failures_per_day": rate * DAY, "iteration": 1.0}, Inputs())
    survives = lambda order: lambda lost: True  # noqa: E731
    estimate = run(System(name, rhythm, "", survives, base_lost=rhythm.lost), cluster, failures=16000, seed=7)
    assert estimate.holds(effective_share(rhythm, rate))
    assert estimate.high - estimate.low < 0.05 * estimate.share
    assert not estimate.holds(effective_share(rhythm, rate * 1.3))


# -- intervals ---------------------------------------------------------------------------------------------------------


@given(st.floats(1e-3, 10), st.floats(1e-7, 1e-2), st.floats(0, 0.5))
def test_no_other_interval_is_better(stalls: float, rate: float, slowdown: float) -> None:
    """stalls: of the mean time between failures."""
    stall = stalls / rate

    def share(work: float) -> float:
        return effective_share(Rhythm(work, stall, slowdown), rate)

    best = best_interval(stall, rate, slowdown)
    assert best > 0
    assert all(share(best) >= share(best * factor) * (1 - 1e-9) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2))


@given(st.floats(1e-7, 1e-3))
def test_young_and_daly_near_the_best_where_stalls_are_short(rate: float) -> None:
    stall = 1e-3 / rate
    best = best_interval(stall, rate)
    assert young_interval(stall, rate) == pytest.approx(best, rel=0.03)
    assert daly_interval(stall, rate) == pytest.approx(best, rel=1e-4)
    assert daly_interval(3 / rate, rate) == 1 / rate


def test_geminis_equation_1() -> None:
    """t_ckpt + 1/(2f) + t_rtvl is what a failure costs, to first order."""
    rhythm, rate = Rhythm(2544, lag=2544, restart=100), 1e-7
    wasted = (1 - effective_share(rhythm, rate)) / rate
    assert wasted == pytest.approx(2544 + 2544 / 2 + 100, rel=1e-3)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"work": 0}, "work"), ({"work": math.inf}, "work"), ({"stall": -1}, "stall"), ({"lag": math.nan}, "lag"),
        ({"lost": 1.1}, "lost"), ({"skipped": 1}, "skipped"), ({"persist_every": 0}, "persist_every"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, float], where: str) -> None:
    with pytest.raises(UserError) as refused:
        Rhythm(**({"work": 1} | options))
    assert refused.value.where == where and refused.value.remedy


@pytest.mark.parametrize("rate", [-1, math.nan, math.inf])
def test_a_rate_is_a_rate(rate: float) -> None:
    with pytest.raises(UserError):
        effective_share(Rhythm(1), rate)
    with pytest.raises(UserError):
        best_interval(1, rate)
