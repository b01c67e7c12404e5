"""Which connection carries which elements, and which parameters a broadcast brought: by the real engine."""

import functools
from functools import partial

import numpy as np
import pytest
from parser.machine import Engine

from flowcheck.rebuild.iteration import evidence
from flowcheck.rebuild.iteration.evidence import bucket_coverage, parameter_bytes
from flowcheck.rebuild.iteration.first_weights import first_weights
from flowcheck.rebuild.iteration.intervals import intervals, total
from flowcheck.rebuild.plan import JobPlan, plan_job
from flowcheck.rebuild.version.replica import JobReplica
from lab.synth import Synthesis, example_job, generate, sharded_job
from tests.flowcheck.altered import Packet, destination, messages
from tests.flowcheck.fake_engine import FakeEngine


@functools.cache
def traffic(
    rebuild: bool, protocol: str, ranks: int, qps: int, split: bool, devices: int, count: tuple[int, ...],
    dtype: str = "float32",
) -> tuple[JobPlan, Synthesis]:
    job = example_job(
        ranks=ranks, count=count, protocol=protocol, qps=qps, split_data_on_qps=split, devices=devices, mtu=1024,
        startup=rebuild, rebuild=rebuild, dtype=dtype, channels=2 if ranks == 3 else 1, seed=4,
    )
    return plan_job(job, arenas=8), generate(job, iterations=5, seed=4, ports=[0, ranks] if devices == 2 else [0])


def through(plan: JobPlan, packets: list[Packet]) -> list[tuple[int, int, dict[str, int], tuple]]:
    """(elements, covered, missing, placed) of every bucket of every iteration."""
    engine = Engine(plan.engine)
    for _, frame in packets:
        assert engine.feed(0, frame)
    engine.finish()
    assert engine.disagreements() == []
    return [
        (found.place.elements, found.covered, found.missing, found.placed)
        for iteration in range(5) for found in bucket_coverage(plan, engine, iteration)
    ]


def first_of_each(packets: list[Packet], qpns: list[int]) -> list[Packet]:
    sent = [messages(packets, qpn) for qpn in qpns]
    return [packets[at] for at in sorted(places[0][0] for places in sent if places)]


CASES = [
    ("ll", 2, 4, False, 1, (3000, 700)),
    ("ll", 2, 4, True, 1, (3001,)),
    ("ll", 3, 3, False, 1, (1700, 2000)),
    ("ll128", 2, 4, True, 1, (4000, 777)),
    ("ll128", 2, 2, True, 1, (17_001,)),
    ("ll128", 2, 3, False, 1, (4000,)),
    ("simple", 2, 4, False, 1, (5000, 300)),
    ("simple", 3, 4, True, 1, (5001,)),
    ("simple", 2, 2, False, 2, (5000, 999)),
    ("ll", 2, 1, False, 2, (3001,)),
    ("ll128", 2, 4, True, 1, (9001,), "bfloat16"),
    ("ll128", 3, 2, True, 1, (9001,), "float16"),
    ("ll", 2, 2, True, 1, (9001,), "bfloat16"),
    ("simple", 2, 4, True, 1, (9001,), "float64"),
]


@pytest.mark.parametrize("rebuild", [True, False], ids=["ddp", "bare"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_queue_pairs_that_are_not_mirrored(case: tuple, rebuild: bool) -> None:
    """A mirror that misses one queue pair of a connection: what is missing was carried by it alone, to the element.
    And what the others carry is called lost where only their first packet was seen."""
    plan, made = traffic(rebuild, *case)
    whole = through(plan, made.packets)
    assert all(found[:3] == (found[0], found[0], {}) for found in whole)
    gaps = 0
    for flow in plan.job.flows[:2]:
        for gone in flow.qpns:
            left = [packet for packet in made.packets if destination(packet[1]) != gone]
            some = through(plan, left)
            for elements, covered, missing, _ in some:
                assert missing == ({"not_mirrored": elements - covered} if covered < elements else {})
            gaps += any(covered < elements for elements, covered, _, _ in some)
            only = first_of_each(left, [qpn for each in plan.job.flows for qpn in each.qpns])
            for (elements, covered, _, _), (_, here, missing, _) in zip(some, through(plan, only), strict=True):
                rest = {"not_mirrored": elements - covered, "lost": covered - here}
                assert missing == {cause: count for cause, count in rest.items() if count}
    assert gaps >= 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_gathered_groups_that_are_not_mirrored(ranks: int) -> None:
    """One connection of the ring is seen: it brings all blocks but one; what it carries and nobody saw is lost."""
    job = sharded_job(ranks=ranks, count=[2500, 701], protocol="ll", mtu=1024)
    plan = plan_job(job, arenas=8)
    made = generate(job, iterations=5, ports=[0])
    kept = job.flows[0].qpns
    one = [packet for packet in made.packets if destination(packet[1]) in kept]
    some = through(plan, one)
    for elements, covered, missing, _ in some:
        assert covered == elements * (ranks - 1) // ranks and missing == {"not_mirrored": elements // ranks}
    only = first_of_each(one, kept)
    for (elements, covered, _, _), (_, here, missing, _) in zip(some, through(plan, only), strict=True):
        assert here == 0 and missing == {"not_mirrored": elements - covered, "lost": covered}


def test_a_group_may_be_gathered_again_over_more_channels() -> None:
    """Only the second gathering uses channel 1, and only a connection of channel 1 is seen."""
    job = sharded_job(count=[200_000], channels=2, protocol="ll")
    job.collectives.steady[0].channels = 1
    plan = plan_job(job)
    engine = FakeEngine(plan.engine)
    for number, spec in enumerate(plan.engine.flows):
        engine.flow(number)["packets"] = int(spec.data and plan.engine.edges[spec.edge].channel == 1)
    missing = bucket_coverage(plan, engine, 1)[0].missing
    assert list(missing) == ["not_mirrored", "lost"] and min(missing.values()) > 90_000  # about half


# -- initial parameters -------------------------------------------------------------------------------


def with_last(elements: int) -> tuple[JobPlan, Synthesis, str]:
    """33 parameters in one broadcast, the last entry of 1 or 3: of its packets the second holds the last element."""
    job = example_job(count={1: [9, 24], 3: [24, 9]}[elements], protocol="ll", mtu=256)
    assert (job.model[-1].elements, sum(entry.elements for entry in job.model)) == (elements, 33)
    return plan_job(job), generate(job, iterations=1, ports=[1]), job.model[-1].name


@pytest.mark.parametrize("elements", [1, 3])
def test_parameters_that_end_within_a_cell_need_that_cell(elements: int) -> None:
    plan, _, name = with_last(elements)
    engine = FakeEngine(plan.engine)
    engine.cells(None)[:17] = True
    region = engine.region(None)
    region[:] = np.arange(len(region), dtype=np.uint8)
    found = parameter_bytes(plan, engine)
    assert all(complete for _, complete in found.values()) and list(found) == [entry.name for entry in plan.job.model]
    assert found[name][0].tobytes() == bytes(range(132 - 4 * elements, 132))
    spans = {1: [(0, 84), (84, 96), (96, 128), (128, 132)], 3: [(0, 32), (32, 36), (36, 120), (120, 132)]}[elements]
    for cell in range(17):
        engine.cells(None)[:17] = True
        engine.cells(None)[cell] = False
        whole = [end <= 8 * cell or start >= 8 * cell + 8 for start, end in spans]
        assert [complete for _, complete in parameter_bytes(plan, engine).values()] == whole


@pytest.mark.parametrize("elements", [1, 3])
def test_a_broadcast_without_its_last_packet_brings_no_weights(elements: int) -> None:
    plan, made, name = with_last(elements)
    broadcast = messages(made.packets, plan.job.flows[0].qpns[0])[2]
    assert len(broadcast) == 2
    for gone in ([], broadcast[1:]):
        engine, replica = Engine(plan.engine), JobReplica(plan, None)
        for at, (_, frame) in enumerate(made.packets):
            if at not in gone:
                assert engine.feed(0, frame)
        replica.learn(partial(first_weights, plan, engine))
        absent = f"no initial weights: no --init, and {name!r} is in no complete broadcast"
        assert (replica.ready, replica.absent) == ((False, absent) if gone else (True, ""))


def test_what_connections_carry_together_is_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all queue pairs of each; of some of them it is another matter each time. No more is kept than so much."""
    plan = plan_job(example_job(ranks=4, channels=2, count=[4000, 900], qps=2, startup=False))
    carried, (place, *_) = evidence.Carried(plan), plan.iteration_places(1)
    edges = [number for number in range(len(plan.engine.edges)) if len(carried.by(number, {0, 1}, 1, place))]
    seen = {edge: {0, 1} for edge in edges}
    each = [carried.by(edge, queues, 1, place) for edge, queues in seen.items()]
    found = carried.together(seen, 1, place)
    assert len(edges) > 1 and (found == intervals(np.concatenate(each))).all() and len(found) < sum(map(len, each))
    assert carried.together(seen, 2, place) is found and carried.together(seen, 0, place) is not found
    assert len(carried.together({}, 1, place)) == 0
    part = carried.together({edges[0]: {1}}, 1, place)
    assert 0 < total(part) < total(carried.together({edges[0]: {0, 1}}, 1, place))
    assert carried.together({edges[0]: {1}}, 1, place) is not part
    monkeypatch.setattr(evidence, "UNIONS", 1)
    carried.together({edges[1]: {0, 1}}, 1, place)
    assert carried.together(seen, 1, place) is not found
