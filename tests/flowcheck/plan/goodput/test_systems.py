"""Systems on a cluster: their rhythms, what takes their copies away, and the event-by-event simulation of them."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.checkpoint.coding.holders import place, ring
from flowcheck.errors import UserError
from flowcheck.plan.answers.answer import Inputs
from flowcheck.plan.goodput.cluster import DEFAULTS, Cluster, read_cluster
from flowcheck.plan.goodput.renewal import effective_share
from flowcheck.plan.goodput.simulation import Bursts, run, t_quantile
from flowcheck.plan.goodput.systems import by_name, grouped_survivor, systems
from flowcheck.plan.jobs.models import LARGE, PRESETS

SMALL = {
    "gpus": 96, "gpus_per_server": 8, "data_parallel": 4, "parameters": 1e9, "iteration": 20.0, "version_lag": 8.0,
    "failures_per_day": 40.0, "storage": 0.2, "spare": 0.05, "device": 0.1, "disk": 0.05, "persist_hours": 0.5,
    "detect": 5.0, "replacement": 60.0, "start": 30.0, "jit_user": 10.0, "reft_group": 4, "incomplete": 0.05,
    "nodes": 3, "node_failures": 2.0, "simultaneous": 3,
}


def small(**changes: float) -> Cluster:
    return read_cluster(SMALL | changes, Inputs())


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_every_field_has_a_default_and_a_source() -> None:
    assert list(small().values()) == list(DEFAULTS)
    inputs = Inputs()
    read_cluster({}, inputs)
    rows = list(inputs)
    assert [row.name for row in rows] == [name.replace("_", "-") for name in DEFAULTS]
    assert all(row.source.startswith("default: ") and len(row.source) > 15 for row in rows)


@pytest.mark.parametrize("scale", LARGE)
def test_scales_say_so(scale: str) -> None:
    inputs = Inputs()
    cluster = read_cluster({"parameters": 1e9}, inputs, scale)
    assert cluster.job.gpus == PRESETS[scale].gpus and cluster.job.parameters == 1e9
    sources = {row.name: row.source for row in inputs}
    assert PRESETS[scale].title in sources["gpus"] and sources["parameters"] == "given"


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"incomplete": 1.5}, "--set incomplete="), ({"hardware": 2}, "--set hardware="), ({"gpus": 100}, "--gpus"),
        ({"simultaneous": 13}, "--set simultaneous="), ({"replicas": 13}, "--set replicas="),
        ({"storage": 0}, "--set storage="), ({"parameters": 1e300}, "--parameters"),
        ({"iteration": -1}, "--iteration"), ({"failures_per_day": -1}, "--failures-per-day"),
        ({"failures_per_day": 1e5}, "--failures-per-day"), ({"data_parallel": 5}, "--set data-parallel="),
        ({"reft_group": 20}, "--set reft-group="), ({"code_data": 12}, "--set code-data="),
        ({"nodes": 0}, "--set nodes="),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, float], where: str) -> None:
    with pytest.raises(UserError) as refused:
        small(**changes)
    assert refused.value.where == where and refused.value.remedy


# -- rhythms -----------------------------------------------------------------------------------------------------------


def test_intervals_are_whole_iterations_and_never_below_the_checkpoints_own_time() -> None:
    for per_day in (1.0, 40.0, 300.0):
        for system in systems(small(failures_per_day=per_day)):
            assert system.rhythm.work / 20 == pytest.approx(round(system.rhythm.work / 20))
            if system.name not in ("flowcheck", "jit-user"):
                assert system.rhythm.work >= system.rhythm.lag
    with pytest.raises(UserError) as refused:
        systems(small(), interval=30)  # storage takes 12e9 B / 0.2 GB/s = 60 s
    assert refused.value.where == "--interval" and "60" in str(refused.value)
    assert {s.name: s for s in systems(small(), interval=70)}["storage"].rhythm.work == 80


def test_the_best_interval_is_the_best_of_whole_iterations() -> None:
    cluster = small(storage=2.0)
    best = {system.name: system for system in systems(cluster)}["storage"].rhythm
    shares = {n: effective_share(replace(best, work=n * 20.0), cluster.rate) for n in range(1, 60)}
    assert shares[round(best.work / 20)] >= max(shares.values()) * (1 - 1e-4)


def test_probabilities_of_losing_the_tier() -> None:
    found = {system.name: system.rhythm for system in systems(small())}
    assert found["storage"].lost == found["checkfreq"].lost == 0
    assert found["disk"].lost == 1
    away = 2.0 * 600 / 86400
    assert found["flowcheck"].lost == pytest.approx(away)
    # 12 servers, 3 at once: pairs 1 - 10 C.. = group survives with C(6,3) 2^3 / C(12,3), ring 12/9 C(9,3) / C(12,3)
    assert found["gemini-group"].lost == pytest.approx(1 - 160 / 220)
    assert found["gemini-ring"].lost == pytest.approx(1 - 112 / 220)
    assert found["eccheck"].lost == pytest.approx(3 * 4 / 220)
    assert found["jit-user"].lost == 0  # four servers hold each shard
    half = {system.name: system.rhythm for system in systems(small(hardware=0.5))}
    assert half["gemini-group"].lost == pytest.approx((1 - 160 / 220) / 2)


def test_mixed_where_replicas_do_not_divide() -> None:
    assert "gemini-mixed" in [system.name for system in systems(small(replicas=5))]


@pytest.mark.parametrize("name", ["gemini-group", "gemini-ring", "eccheck", "reft", "jit-user"])
def test_the_rule_of_the_simulation_is_the_law_of_the_closed_form(name: str) -> None:
    """Over all sets of 3 of 12 servers."""
    system = by_name(systems(small()), [name])[0]
    survives = system.survives(list(range(12)))
    sets = list(combinations(range(12), 3))
    assert 1 - sum(survives(frozenset(gone)) for gone in sets) / len(sets) == pytest.approx(system.rhythm.lost)


@given(st.integers(2, 5), st.integers(1, 4), st.permutations(range(12)), st.sets(st.integers(0, 11), max_size=8))
def test_groups_follow_the_order(group: int, most: int, order: list[int], lost: set[int]) -> None:
    survives = grouped_survivor(group, most)(order)
    groups = [set(order[at : at + group]) for at in range(0, 12 // group * group, group)]
    assert survives(frozenset(lost)) == all(len(lost & members) <= most for members in groups)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(UserError):
        by_name(systems(small()), ["tape"])
    with pytest.raises(UserError):
        systems(small(failures_per_day=0))


# -- simulation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["flowcheck", "storage", "disk", "checkfreq", "gemini-group", "gemini-ring", "eccheck", "reft", "jit-user",
     "jit-transparent"],
)
def test_every_closed_form_lies_in_its_simulation(name: str) -> None:
    pytest.importorskip("simpy", reason="the extra `plan` is not installed")
    cluster = small(incomplete=0.0) if name == "flowcheck" else small()
    system = by_name(systems(cluster), [name])[0]
    estimate = run(system, cluster, failures=4000, seed=3)
    share = effective_share(system.rhythm, cluster.rate)
    assert estimate.holds(share), (share, estimate)
    assert estimate.high - estimate.low < 0.08
    assert abs(estimate.lost / estimate.failures - system.rhythm.lost) < 0.05


def test_versions_that_stay_incomplete() -> None:
    """Skipped versions with a loss of the tier: the simulation may store the next one instead, so it is not below."""
    pytest.importorskip("simpy", reason="the extra `plan` is not installed")
    cluster = small(incomplete=0.3)
    system = by_name(systems(cluster), ["flowcheck"])[0]
    estimate = run(system, cluster, failures=4000, seed=3)
    share = effective_share(system.rhythm, cluster.rate)
    assert estimate.high > share and estimate.low < share * 1.02


def test_the_same_seed_gives_the_same_figures() -> None:
    pytest.importorskip("simpy", reason="the extra `plan` is not installed")
    cluster = small()
    system = by_name(systems(cluster), ["gemini-group"])[0]
    assert run(system, cluster, 400, 5) == run(system, cluster, 400, 5) != run(system, cluster, 400, 6)


def test_a_leaf_that_dies_takes_neighbours_but_not_copies_that_are_spread() -> None:
    pytest.importorskip("simpy", reason="the extra `plan` is not installed")
    cluster = small(simultaneous=1)
    system = by_name(systems(cluster), ["gemini-group"])[0]
    near = run(system, cluster, 800, 2, Bursts(leaf=0.3, leaf_size=4))
    apart = run(system, cluster, 800, 2, Bursts(leaf=0.3, leaf_size=4, spread=True))
    alone = run(system, cluster, 800, 2)
    assert alone.lost == 0 and near.lost > 800 * 0.2 and apart.lost < near.lost / 4
    assert near.high < apart.low <= apart.share < alone.high


def test_a_leaf_takes_flowchecks_nodes_on_it_a_rack_does_not() -> None:
    pytest.importorskip("simpy", reason="the extra `plan` is not installed")
    cluster = small(simultaneous=1, node_failures=0.0)
    system = by_name(systems(cluster), ["flowcheck"])[0]
    assert run(system, cluster, 400, 2, Bursts(rack=0.3)).lost == 0
    leaf = run(system, cluster, 400, 2, Bursts(leaf=0.3, leaf_size=4))
    assert 60 < leaf.lost < 180  # each of the three leaves has a node


def test_failures_that_follow_hit_copies_that_are_not_whole_yet() -> None:
    pytest.importorskip("simpy", reason="the extra `plan` is not installed")
    cluster = small(simultaneous=1)
    system = by_name(systems(cluster), ["gemini-group"])[0]
    assert run(system, cluster, 800, 2, Bursts(follow=0.5, within=60)).lost > 0


@pytest.mark.parametrize("options", [{"leaf": 1.2}, {"leaf": 0.6, "rack": 0.6}, {"follow": 1}, {"leaf_size": 0}])
def test_bursts_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Bursts(**options)


def test_too_few_failures_give_no_interval() -> None:
    pytest.importorskip("simpy", reason="the extra `plan` is not installed")
    cluster = small()
    with pytest.raises(UserError) as refused:
        run(systems(cluster)[0], cluster, 10, 1)
    assert refused.value.where == "--failures"


@pytest.mark.parametrize(("degrees", "share", "value"), [(39, 0.95, 2.0227), (39, 0.999, 3.5581), (10, 0.95, 2.2281)])
def test_students_t(degrees: int, share: float, value: float) -> None:
    assert t_quantile(degrees, share) == pytest.approx(value, abs=1e-3)


def test_placements_are_the_papers() -> None:
    assert place(12, 2).survives({0, 2}) and not place(12, 2).survives({0, 1})
    assert not ring(12, 2).survives({1, 2})
