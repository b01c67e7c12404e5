"""What is known about an iteration: which elements are there, and why the others are not, one signal at a time."""

import numpy as np
import pytest
import torch

from flowcheck.rebuild.iteration.evidence import bucket_coverage, data_flows, elements_of
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import example_job, sharded_job
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


def test_what_is_missing_of_an_iteration_that_was_given_up_is_overload() -> None:
    """All of it, whatever else happened to it; of those before and after it as ever."""
    plan, engine = example([20, 9])
    engine.given_up = range(2, 4)
    engine.void[2], engine.lost = [(1, 2)], [loss("icrc", 16, 8)]
    place(plan, engine, 0, "1000000011")
    place(plan, engine, 1, "11111")
    one, two = bucket_coverage(plan, engine, 2)
    assert (one.missing, one.placed, two.missing, two.complete) == ({"overload": 14}, ((0, 2), (16, 20)), {}, True)
    assert missing(plan, engine, 3) == {"overload": 20}
    assert missing(plan, engine, 1) == missing(plan, engine, 4) == {"lost": 20}


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
