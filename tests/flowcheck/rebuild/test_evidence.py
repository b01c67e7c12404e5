"""What is known about an iteration: which elements are there, and why the others are not, one signal at a time."""

import functools

import numpy as np
import pytest
import torch
from parser.machine import Engine

from flowcheck.lab.synth import Synthesis, example_job, generate, sharded_job
from flowcheck.rebuild import evidence
from flowcheck.rebuild.evidence import bucket_coverage, data_flows, elements_of, parameter_bytes
from flowcheck.rebuild.intervals import intervals, total
from flowcheck.rebuild.plan import JobPlan, plan_job
from flowcheck.rebuild.replica import JobReplica
from tests.flowcheck.altered import Packet, destination, messages
from tests.flowcheck.fake_engine import FakeEngine

GRADIENT, PARAMETERS = 1, 2


# -- coverage, by a fake engine -----------------------------------------------------------------------


def example(count=20, **options) -> tuple[JobPlan, FakeEngine]:  # type: ignore[no-untyped-def]
    """Two ranks, both directions seen."""
    plan = plan_job(example_job(count=count, startup=False, rebuild=False, **options))
    return plan, FakeEngine(plan.engine)


def place(plan: JobPlan, engine: FakeEngine, bucket: int, cells: str, iteration: int = 2) -> None:
    first = plan.iteration_places(iteration)[bucket].offset // 8
    engine.cells(iteration)[first : first + len(cells)] = [bit == "1" for bit in cells]


def test_whole_buckets_have_no_causes() -> None:
    plan, engine = example([20, 9])
    for number, cells in enumerate(("1" * 10, "1" * 5)):
        place(plan, engine, number, cells)
    one, two = bucket_coverage(plan, engine, 2)
    assert (one.place.index, one.covered, one.placed, one.missing, one.complete) == (0, 20, ((0, 20),), {}, True)
    assert (two.place.index, two.covered, two.placed, two.missing, two.complete) == (1, 9, ((0, 9),), {}, True)
    assert (one.data.nbytes, two.data.nbytes) == (80, 36)


@pytest.mark.parametrize(
    ("dtype", "placed", "covered"),
    [
        ("float64", ((0, 1), (2, 4)), 3),
        ("float32", ((0, 2), (4, 8)), 6),
        ("bfloat16", ((0, 4), (8, 15)), 11),
    ],
)
def test_a_cell_holds_eight_bytes_of_elements(dtype: str, placed: tuple, covered: int) -> None:
    """Cells 0, 2 and 3 are there; of bfloat16 the last one is not full."""
    count = {"float64": 4, "float32": 8, "bfloat16": 15}[dtype]
    plan, engine = example(count, dtype=dtype)
    place(plan, engine, 0, "1011")
    (found,) = bucket_coverage(plan, engine, 2)
    assert (found.placed, found.covered, found.complete) == (placed, covered, False)
    assert sum(found.missing.values()) == count - covered


def test_data_are_the_bytes_of_the_bucket() -> None:
    plan, engine = example([20, 9])
    region = engine.region(2)
    region[:] = np.arange(len(region), dtype=np.uint8)
    one, two = bucket_coverage(plan, engine, 2)
    assert one.data.tobytes() == bytes(range(80))
    assert two.data.tobytes() == bytes(range(128, 164))  # on the next 64 bytes


def test_elements_of_a_bucket_lie_in_its_region() -> None:
    plan, engine = example([20, 9])
    region = engine.region(2)
    for place_of in plan.iteration_places(2):
        elements = elements_of(region, place_of)
        assert (elements.dtype, elements.shape) == (torch.float32, (place_of.elements,))
        elements.copy_(torch.arange(place_of.elements) + place_of.index)
    one, two = bucket_coverage(plan, engine, 2)
    assert one.tensor().tolist() == [*range(20)]
    assert two.data.view(np.float32).tolist() == [number + two.place.index for number in range(9)]


def test_each_iteration_has_its_own_buckets() -> None:
    plan, engine = example([20, 9])
    assert [found.place.elements for found in bucket_coverage(plan, engine, 0)] == [29]
    assert [found.place.elements for found in bucket_coverage(plan, engine, 1)] == [20, 9]


def test_gathered_groups_have_a_block_for_each_rank() -> None:
    """Three ranks with five bfloat16 elements each: blocks of ten bytes that begin on cells, so 16 bytes apart."""
    plan = plan_job(sharded_job(ranks=3, count=[13]))
    engine = FakeEngine(plan.engine)
    (group,) = plan.iteration_places(1)
    assert (group.elements, group.blocks, group.stride, group.nbytes) == (15, 3, 16, 30)
    region = engine.region(1)
    region[:] = np.arange(len(region), dtype=np.uint8)
    place(plan, engine, 0, "110111", iteration=1)
    (found,) = bucket_coverage(plan, engine, 1)
    assert found.data.tobytes() == bytes([*range(10), *range(16, 26), *range(32, 42)])
    assert (found.placed, found.covered) == (((0, 5), (9, 15)), 11)
    place(plan, engine, 0, "111111", iteration=1)
    assert bucket_coverage(plan, engine, 1)[0].complete


def test_an_empty_bucket_is_complete() -> None:
    plan, _ = example([20, 9])
    for call in plan.job.collectives.steady[1:]:
        call.count = 0
    empty = plan_job(plan.job)
    found = bucket_coverage(empty, FakeEngine(empty.engine), 2)[1]
    assert (found.covered, found.placed, found.missing, found.complete) == (0, (), {}, True)
    assert (found.tensor().dtype, found.tensor().shape) == (torch.float32, (0,))


# -- causes, in their order ---------------------------------------------------------------------------

OURS, OTHER = 0, 2  # the flows with data: of 20 elements they carry the first 12 and the last 8 reduced


def missing(plan: JobPlan, engine: FakeEngine, iteration: int = 2) -> dict[str, int]:
    return bucket_coverage(plan, engine, iteration)[0].missing


def loss(cause: str, offset: int, nbytes: int, iteration: int = 2, target: int = GRADIENT) -> dict:
    return {"cause": cause, "target": target, "iteration": iteration, "offset": offset, "bytes": nbytes}


def test_what_never_came_is_lost() -> None:
    plan, engine = example()
    assert [spec.data for spec in plan.engine.flows] == [True, False, True, False]
    assert missing(plan, engine) == {"lost": 20}
    place(plan, engine, 0, "0000000011")
    assert missing(plan, engine) == {"lost": 16}


def test_what_no_seen_connection_carries_is_not_mirrored() -> None:
    plan, engine = example()
    engine.flow(OTHER)["packets"] = 0
    assert missing(plan, engine) == {"not_mirrored": 8, "lost": 12}
    engine.flow(OURS)["packets"] = 0
    assert missing(plan, engine) == {"not_mirrored": 20}


def test_control_packets_carry_nothing() -> None:
    plan, engine = example()
    engine.flow(OURS)["packets"] = engine.flow(OTHER)["packets"] = 0
    engine.flow(1)["packets"] = engine.flow(3)["packets"] = 9
    assert missing(plan, engine) == {"not_mirrored": 20}


def test_a_second_capture_may_carry_the_rest() -> None:
    plan = plan_job(example_job(count=20, startup=False, rebuild=False), streams=2)
    engine = FakeEngine(plan.engine)
    engine.flow(OURS, 0)["packets"] = engine.flow(OTHER, 1)["packets"] = 0
    assert missing(plan, engine) == {"lost": 20}
    engine.flow(OURS, 1)["packets"] = 0
    assert missing(plan, engine) == {"not_mirrored": 12, "lost": 8}
    assert [spec.qpn for spec, _ in data_flows(plan, engine.flows())] == [
        plan.engine.flows[OURS].qpn, plan.engine.flows[OTHER].qpn
    ] * 2


@pytest.mark.parametrize("cause", ["icrc", "unanchored"])
def test_a_noted_loss_has_its_cause(cause: str) -> None:
    plan, engine = example()
    engine.lost = [loss(cause, 8, 24)]
    assert missing(plan, engine) == {cause: 6, "lost": 14}
    place(plan, engine, 0, "0010000000")  # one of them came again
    assert missing(plan, engine) == {cause: 4, "lost": 14}


def test_what_copies_differ_in_is_named_before_all_else() -> None:
    """Cells 1 and 2 are void; another packet of cell 2 came with a wrong ICRC."""
    plan, engine = example()
    place(plan, engine, 0, "1001111111")
    engine.void[2], engine.lost = [(1, 3)], [loss("icrc", 16, 8)]
    (found,) = bucket_coverage(plan, engine, 2)
    assert (found.missing, found.placed) == ({"disagreed": 4}, ((0, 2), (6, 20)))
    place(plan, engine, 0, "1000111111")  # and one that never came
    assert missing(plan, engine) == {"disagreed": 4, "lost": 2}


def test_copies_that_differ_are_of_the_bucket_they_lie_in() -> None:
    """Of nine elements the last cell of the second bucket has one; cell 1 of the first is void as well."""
    plan, engine = example([20, 9])
    place(plan, engine, 0, "1011111111")
    place(plan, engine, 1, "11010")
    first = plan.iteration_places(2)[1].offset // 8
    engine.void[2] = [(1, 2), (first + 2, first + 3), (first + 4, first + 5)]
    one, two = bucket_coverage(plan, engine, 2)
    assert (one.missing, one.placed) == ({"disagreed": 2}, ((0, 2), (4, 20)))
    assert (two.missing, two.placed, two.covered) == ({"disagreed": 3}, ((0, 4), (6, 8)), 6)


@pytest.mark.parametrize(
    "noted",
    [
        loss("icrc", 0, 80, iteration=1), loss("icrc", 0, 80, iteration=3), loss("icrc", 0, 80, target=PARAMETERS),
        loss("late", 0, 80), loss("icrc", 128, 16), loss("icrc", 80, 16), loss("lost", 0, 80),
    ],
)
def test_losses_of_something_else_do_not_count(noted: dict) -> None:
    """Of another iteration, of parameters, of another kind, or behind the bucket."""
    plan, engine = example([20, 9])
    engine.lost = [noted]
    assert missing(plan, engine) == {"lost": 20}
    engine.lost = [noted, loss("icrc", 8, 8)]
    assert missing(plan, engine) == {"icrc": 2, "lost": 18}


def test_a_loss_before_the_bucket_is_not_its_own() -> None:
    plan, engine = example([20, 9])
    engine.lost = [loss("icrc", 64, 16)]
    one, two = bucket_coverage(plan, engine, 2)
    assert one.missing == {"icrc": 4, "lost": 16} and two.missing == {"lost": 9}
    engine.lost = [loss("icrc", 128, 999)]
    one, two = bucket_coverage(plan, engine, 2)
    assert one.missing == {"lost": 20} and two.missing == {"icrc": 9}


@pytest.mark.parametrize(
    ("offset", "nbytes", "elements"), [(16, 10, 5), (20, 6, 3), (26, 6, 0), (32, 4, 2), (16, 4, 2)]
)
def test_losses_lie_in_one_block_of_a_gathered_group(offset: int, nbytes: int, elements: int) -> None:
    """Blocks of five elements in ten bytes, 16 bytes apart: what lies between them is nobody's."""
    plan = plan_job(sharded_job(ranks=3, count=[13]))
    engine = FakeEngine(plan.engine)
    engine.lost = [loss("icrc", offset, nbytes, iteration=1)]
    found = bucket_coverage(plan, engine, 1)[0].missing
    assert found == ({"icrc": elements, "lost": 15 - elements} if elements else {"lost": 15})
    block = {16: "110011", 32: "111100"}[offset // 16 * 16]
    place(plan, engine, 0, block, iteration=1)  # the other blocks are there
    assert bucket_coverage(plan, engine, 1)[0].missing.get("icrc", 0) == elements


def test_the_second_block_of_two_begins_on_a_cell_of_its_own() -> None:
    """Two ranks with seven bfloat16 elements each: 14 bytes, two of nobody, 14 bytes."""
    plan = plan_job(sharded_job(ranks=2, count=[13]))
    engine = FakeEngine(plan.engine)
    engine.lost = [loss("icrc", 16, 14, iteration=1)]
    place(plan, engine, 0, "1100", iteration=1)
    assert bucket_coverage(plan, engine, 1)[0].missing == {"icrc": 7}
    place(plan, engine, 0, "0111", iteration=1)
    assert bucket_coverage(plan, engine, 1)[0].missing == {"lost": 4}


def test_a_connection_adrift_is_unanchored() -> None:
    """It lost its place in an outage: nothing it carries is found any more."""
    plan, engine = example()
    engine.flow(OURS)["adrift"] = True
    assert missing(plan, engine) == {"unanchored": 12, "lost": 8}


def test_a_connection_that_disagreed_is_named() -> None:
    """Only for the iterations that it brought nothing to."""
    plan, engine = example()
    engine.flow(OURS)["ignored"] = range(1, 3)
    assert missing(plan, engine, 0) == {"lost": 20}
    assert missing(plan, engine, 1) == {"disagreement": 12, "lost": 8}
    assert missing(plan, engine, 2) == {"disagreement": 12, "lost": 8}
    assert missing(plan, engine, 3) == {"lost": 20}


def test_a_connection_seen_twice_that_disagreed_once_is_not_trusted() -> None:
    plan = plan_job(example_job(count=20, startup=False, rebuild=False), streams=2)
    engine = FakeEngine(plan.engine)
    engine.flow(OURS, 1)["ignored"] = range(9)
    assert missing(plan, engine) == {"disagreement": 12, "lost": 8}


def test_what_is_not_seen_neither_disagreed_nor_is_adrift() -> None:
    plan, engine = example()
    engine.flow(OURS).update(packets=0, adrift=True, ignored=range(9))
    assert missing(plan, engine) == {"not_mirrored": 12, "lost": 8}


def test_the_first_cause_that_applies_counts() -> None:
    """Each cause on elements of its own and on all that come after it in the order."""
    plan, engine = example()
    engine.flow(OTHER)["packets"] = 0
    engine.flow(OURS).update(adrift=True, ignored=range(9))
    engine.lost = [loss("icrc", 0, 80), loss("unanchored", 0, 80)]
    assert missing(plan, engine) == {"not_mirrored": 8, "icrc": 12}
    engine.lost = [loss("unanchored", 0, 80), loss("icrc", 8, 8)]
    assert missing(plan, engine) == {"not_mirrored": 8, "icrc": 2, "unanchored": 10}
    engine.flow(OURS)["adrift"] = False
    engine.lost = [loss("unanchored", 16, 8), loss("icrc", 8, 8), loss("icrc", 40, 40)]
    assert missing(plan, engine) == {"not_mirrored": 8, "icrc": 4, "unanchored": 2, "disagreement": 6}
    engine.flow(OTHER)["packets"] = 1
    assert missing(plan, engine) == {"icrc": 12, "unanchored": 2, "disagreement": 6}
    engine.lost = [loss("unanchored", 16, 8), loss("icrc", 8, 8), loss("icrc", 72, 8)]
    place(plan, engine, 0, "1000000010")
    assert missing(plan, engine) == {"icrc": 4, "unanchored": 2, "disagreement": 6, "lost": 4}


# -- which connection carries what, by the real engine ------------------------------------------------


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
        replica.learn(engine)
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
