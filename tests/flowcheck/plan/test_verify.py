"""Every number that the papers print, and what comes out here. docs/use/planning.md shows the same."""

import random

import pytest

from flowcheck.plan.figures import AGREES, DIFFERS, MISSING, Chance, Figure, chance
from flowcheck.plan.verify import PAPERS, answer, figures

# Figures that must agree with what is printed, those that must not, and those that lack an input; by their names.
AGREE = {
    "a checkpoint of MT-NLG over 20 Gb/s, minutes": 42.4,
    "wasted per failure at f = 1 / t_ckpt, minutes": 106.0,
    "group, N = 16, m = 2, k = 2": 0.9333, "group, N = 16, m = 2, k = 3": 0.8, "ring, N = 16, m = 2, k = 2": 0.8667,
    "Theorem 1: fatal sets above the fewest, of 2m - 3, N <= 12, m <= 4": 1.0,
    "Figure 15: effective % at 1000 machines, 1.5 % a day, fastest replacement": 90.8,
    "Figure 15: effective % at 1000 machines, 1.5 % a day, middle replacement": 89.4,
    "Algorithm 2: largest piece of 128 MB in 4 parts, MB": 32.0,
    "shapes in which the data nodes are different nodes": 264.0,
    "coded above replicated, p = 0.01: 2 p^2 (1-p)^2": 1.96e-4,
    "500 groups, replicated, p = 0.01": 0.905, "500 groups, coded, p = 0.01": 0.998,
    "Figure 8, c = 1.3, with REFT, days at 0.9": 16.18,
    "survival of that cluster after those 16.18 days": 0.9,
    "BERT-L-PT, N = 4: wasted %, periodic": 0.0963, "BERT-L-PT, N = 1024: wasted %, periodic": 1.555,
    "BERT-L-PT, N = 8192: wasted %, periodic": 4.47,
    "the same with the percent as a fraction, N = 4": 0.715,
    "the same with the percent as a fraction, N = 8192": 0.90,
    "Table 8, GPT2-8B, N = 4: wasted %, user level": 0.0003,
    "Table 8, GPT2-8B, N = 1024: wasted %, user level": 0.0716,
    "Table 8, GPT2-8B, N = 8192: wasted %, user level": 0.57,
    "failures cost a month, 1000 GPUs, $": 30_000.0, "failures cost a month, 10,000 GPUs, $": 3_000_000.0,
    "eq. (2), N = 8, K = 16e6, p = 1e-9, M = 2: incomplete": 3.992e-3,
    "eq. (2), N = 8, K = 16e6, p = 1e-9, M = 3: incomplete": 6.0e-12,
    "175B on 1536 GPUs: $ a day without FlowCheck": 5760.0, "the same with FlowCheck: $ a day": 526.08,
    "section 9: GB per data-parallel group of Llama2-7B, LL": 56.0,
}
DIFFER = {
    "group, N = 16, m = 2, k = 4": 0.6154, "ring, N = 16, m = 2, k = 3": 0.6286, "ring, N = 16, m = 2, k = 4": 0.3626,
    "ring lower than group at k = 3, %": 21.4,
    "Figure 15: effective % at 1000 machines, 1.5 % a day, slowest replacement": 88.0,
    "Algorithm 2, m = 2: remote copies that are sent": 1.0,
    "shapes (n <= 12, g <= 8) whose volume is above m s W, of 264": 22.0,
    "volume of n = 5, k = 4, g = 4, in packets": 22.0,
    "general base3, n = 12, p = 0.1": 0.9415,
    "the same with P_re = exp(-1e-5 t^c), days": 2.56,
    "Figure 8, c = 1.3, without REFT, days: hardware": 0.44, "the same: hardware and software": 0.41,
    "Table 8, BERT-L-PT, N = 4: wasted %, user level": 0.0073,
    "Table 8, BERT-L-PT, N = 8192: wasted %, user level": 0.195,
    "the same: one of so many iterations, M = 2": 250.5, "the same: one of so many iterations, M = 3": 1.667e11,
    "three nodes per leaf on 24 leaves, as the text says: $ a day": 2367.36, "the same in SIMPLE": 28.0,
}
NOTHING_PRINTED = {
    "Figure 8, c = 1.0, with REFT, days at 0.9": 37.3, "Figure 8, c = 1.5, with REFT, days at 0.9": 11.2,
    "Figure 8, c = 2.0, with REFT, days at 0.9": 6.1,
    "BERT-L-PT, N = 4: c*, checkpoints per hour": 0.346, "BERT-L-PT, N = 1024: c*, checkpoints per hour": 5.54,
    "BERT-L-PT, N = 8192: c*, checkpoints per hour": 15.7,
    "fewest copies of a packet, 3 GPUs apart mirrored both ways (6 edges)": 5.0,
}


@pytest.fixture(scope="module")
def found() -> dict[str, Figure]:
    pytest.importorskip("simpy", reason="the extra `plan` is not installed")
    return {figure.name: figure for rows in figures().values() for figure in rows}


@pytest.mark.parametrize(("name", "value"), AGREE.items())
def test_agrees(found: dict[str, Figure], name: str, value: float) -> None:
    assert found[name].verdict == AGREES
    assert found[name].value == pytest.approx(value, rel=6e-3 if value > 0.001 else 0.1)


@pytest.mark.parametrize(("name", "value"), DIFFER.items())
def test_differs_and_says_why(found: dict[str, Figure], name: str, value: float) -> None:
    assert found[name].verdict == DIFFERS and found[name].value == pytest.approx(value, rel=1.2e-2)
    assert found[name].why


@pytest.mark.parametrize(("name", "value"), NOTHING_PRINTED.items())
def test_what_comes_out_where_nothing_is_printed(found: dict[str, Figure], name: str, value: float) -> None:
    assert found[name].verdict == "" and found[name].value == pytest.approx(value, rel=6e-3)


def test_the_lists_above_are_complete(found: dict[str, Figure]) -> None:
    verdicts = {word: {name for name, figure in found.items() if figure.verdict == word} for word in (AGREES, DIFFERS)}
    assert verdicts[AGREES] == AGREE.keys() and verdicts[DIFFERS] == DIFFER.keys()


def test_what_is_not_reproduced_names_its_input(found: dict[str, Figure]) -> None:
    missing = [figure for figure in found.values() if figure.verdict == MISSING]
    assert len(missing) >= 10 and all(figure.why.startswith("missing input: ") for figure in missing)


def test_monte_carlo_holds(found: dict[str, Figure]) -> None:
    tried = [figure for figure in found.values() if figure.simulated is not None]
    assert len(tried) >= 14 and [figure.name for figure in tried if not figure.sound] == []


def test_an_answer_of_all_papers(monkeypatch: pytest.MonkeyPatch, found: dict[str, Figure]) -> None:
    rows = {key: [figure] for key, figure in zip(PAPERS, found.values(), strict=False)}
    monkeypatch.setattr("flowcheck.plan.verify.figures", lambda: rows)
    said = answer()
    assert said.good and [grid.name for grid in said.grids] == list(PAPERS)
    rows["reft"] = [Figure("a formula of ours", None, 0.5, simulated=Chance(0.2, 0.1, 0.3))]
    wrong = answer()
    assert not wrong.good and "a formula of ours" in wrong.verdict


def test_a_chance_has_an_interval_even_at_the_ends() -> None:
    never = chance(lambda dice: False, 1000)
    assert never.mean == 0 and never.low == pytest.approx(0, abs=1e-12) and 0 < never.high < 0.02
    third = chance(lambda dice: dice.random() < 1 / 3, 20000)
    assert third.holds(1 / 3) and not third.holds(0.36)
    assert chance(random.Random.random, 10) == chance(random.Random.random, 10)
