"""Numbers that five papers print, by the planner's formulas. Where they part, docs/use/planning.md says why."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from flowcheck.checkpoint.coding.holders import place
from flowcheck.plan.answers.answer import Inputs
from flowcheck.plan.goodput.cluster import DAY, read_cluster
from flowcheck.plan.goodput.renewal import Rhythm, effective_share, young_interval
from flowcheck.plan.holders.placement import beyond_most, survival

from .asking import answer_of

REFT_NODES, REFT_RATE = 3072, 1e-4


def mixed(nodes: int, p: float, survives: Callable[[int], float], most: int) -> float:
    """Each node is lost with p: over how many are lost, up to `most`."""
    return math.fsum(math.comb(nodes, lost) * p**lost * (1 - p) ** (nodes - lost) * survives(lost)
                     for lost in range(min(most, nodes) + 1))


def wasted(rhythm: Rhythm, rate: float) -> float:
    """Percent of the time."""
    return 100 * (1 - effective_share(rhythm, rate))


# -- Gemini (SOSP'23); its table of 16 machines is in holders/test_placement.py --------------------------------------


def test_a_checkpoint_of_mt_nlg_takes_42_minutes() -> None:
    cluster = read_cluster({"parameters": 530e9}, Inputs())
    assert cluster.state / cluster.speeds.storage / 60 == pytest.approx(42.4)


@pytest.mark.parametrize(("minutes", "percent"), [(4, 90.8), (5.5, 89.4), (7, 88.0)])
def test_figure_15_at_1000_machines(minutes: float, percent: float) -> None:
    """About 91 % is printed; 15 failures a day, 15 s to detect one, 4 to 7 minutes for a machine, 4 to start."""
    rhythm = Rhythm(60.0, lag=30.0, restart=15 + 60 * minutes + 240)
    assert 100 - wasted(rhythm, 15 / DAY) == pytest.approx(percent, abs=0.05)


# -- ECCheck ---------------------------------------------------------------------------------------------------------


def test_500_groups_of_four() -> None:
    p = 0.01
    pairs, parity = (mixed(4, p, one, 4) for one in (
        lambda lost: survival(place(4, 2), lost), lambda lost: beyond_most(4, 4, 2, lost)))
    assert pairs**500 == pytest.approx(0.905, abs=5e-4) and parity**500 == pytest.approx(0.998, abs=5e-4)
    assert parity - pairs == pytest.approx(2 * p**2 * (1 - p) ** 2)


def test_pairs_of_twelve() -> None:
    """The printed factor ((n/2)/i)^i is a misprint of C(n/2, i): by it the ways would not add up."""
    p, closed = 0.1, math.fsum(math.comb(6, i) * 2**i * 0.1**i * 0.9 ** (12 - i) for i in range(7))
    assert mixed(12, p, lambda lost: survival(place(12, 2), lost), 12) == pytest.approx(closed)
    assert closed == pytest.approx(0.9415, abs=5e-5)


# -- REFT ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "days"), [(1.0, 37.3), (1.3, 16.18), (1.5, 11.2), (2.0, 6.1)])
def test_figure_8(shape: float, days: float) -> None:
    """After so many days 3072 nodes in groups of 6, each of which bears one loss, survive with 0.9. 16.22 is printed
    for 1.3."""
    p = 1 - math.exp(-REFT_RATE * days**shape)
    found = mixed(REFT_NODES, p, lambda lost: beyond_most(REFT_NODES, 6, 1, lost), 60)
    assert found == pytest.approx(0.9, abs=1.5e-3)
    one = (1 - p) ** 6 + 6 * p * (1 - p) ** 5
    assert found == pytest.approx(one ** (REFT_NODES / 6))  # equation 5


def test_figure_8_was_drawn_without_software_failures() -> None:
    """With those that the text asks for it would be 2.56 days."""
    p, software = (1 - math.exp(-rate * 2.56**1.3) for rate in (REFT_RATE, 1e-5))
    found = mixed(REFT_NODES, p, lambda lost: beyond_most(REFT_NODES, 6, 1, lost), 60) * (1 - software) ** REFT_NODES
    assert found == pytest.approx(0.9, abs=1.5e-3)


# -- just-in-time checkpointing (EuroSys'24): 2 failures a day of 1000 GPUs --------------------------------------------


def rate_of(gpus: int) -> float:
    return gpus * 2 / 1000 / DAY


@pytest.mark.parametrize(("gpus", "per_hour", "percent", "printed"), [
    (4, 0.346, 0.0963, 0.096), (1024, 5.54, 1.555, 1.53), (8192, 15.7, 4.47, 4.5)])
def test_bert_with_periodic_checkpoints(gpus: int, per_hour: float, percent: float, printed: float) -> None:
    """5 s of stall, 9.9 s to restart. The paper's own formula is of first order: 4.35 % for 8192."""
    work = young_interval(5.0, rate_of(gpus))
    assert 3600 / work == pytest.approx(per_hour, rel=3e-3)
    found = wasted(Rhythm(work, 5.0, restart=9.9), rate_of(gpus))
    assert found == pytest.approx(percent, rel=1e-3) and found == pytest.approx(printed, rel=0.02)


@pytest.mark.parametrize(("gpus", "percent"), [(4, 0.0073), (8192, 0.195)])
def test_bert_at_user_level_where_a_percent_is_a_percent(gpus: int, percent: float) -> None:
    """Table 8 prints 0.75 and 0.94 %: it takes its Table 3's percent for a fraction."""
    assert wasted(Rhythm(0.1, slowdown=7.2e-5, restart=9.9), rate_of(gpus)) == pytest.approx(percent, rel=0.012)
    printed = {4: 0.75, 8192: 0.94}[gpus]
    assert wasted(Rhythm(0.1, slowdown=7.2e-3, restart=9.9), rate_of(gpus)) == pytest.approx(printed, rel=0.06)


@pytest.mark.parametrize(("gpus", "printed"), [(4, 0.0003), (1024, 0.07)])
def test_gpt2_at_user_level(gpus: int, printed: float) -> None:
    """Its wait of a failure follows from the 0.57 % of 8192 GPUs."""
    wait = 0.0057 / (1 - 0.0057) / rate_of(8192)
    assert wasted(Rhythm(0.1, restart=wait), rate_of(gpus)) == pytest.approx(printed, rel=0.1)


# -- FlowCheck; its equation (2) is in traffic/test_loss_law.py, its dollars in goodput/test_goodput_command.py --------


def test_llama2_7b_in_ll(capsys: pytest.CaptureFixture[str]) -> None:
    """60 GB are printed for a data-parallel group; SIMPLE, which has no flags, is half."""
    reduced = "gradient in reduced form, once"
    found = {protocol: answer_of(capsys, f"capacity --model llama2-7b --protocol {protocol}")["results"][reduced]
             for protocol in ("ll", "simple")}
    assert found == {"ll": pytest.approx(56.0, rel=6e-3), "simple": pytest.approx(28.0, rel=6e-3)}
