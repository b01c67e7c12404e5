"""What the engine is told of each connection's calls: which part of them it carries, and where that goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import plan_job, topology_of
from lab.synth import example_job, sharded_job
from parser.chunk_layout import Protocol
from parser.engine_config import Phase, Target
from parser.wire import edge_lane


def job(**settings: object) -> Job:
    """Buckets: 33 elements, later 24 and 9. The broadcast has 33 of fp32."""
    return example_job(**{"ranks": 2, "count": [24, 9], **settings})


def gathering(*, first: bool = False) -> Job:
    """Beside its buckets it gathers blocks of 25 elements. first: in iteration 0, too."""
    described = job()
    gather = replace(sharded_job(count=(25,), dtype="float32").collectives.steady[0], bucket=0)
    described.collectives.steady.append(gather)
    if first:
        described.collectives.iteration_0.append(replace(gather))
    return described


def test_the_communicator_as_the_wire_model_has_it() -> None:
    described = job()
    c = described.communicator
    c.buffer_bytes = {"ll": 8 * 1000, "ll128": 8 * 2000, "simple": 8 * 3000}
    c.max_threads = {"ll": 512, "ll128": 640, "simple": 384}
    found = topology_of(described)
    assert found.slot_bytes == (1000, 2000, 3000) and {type(size) for size in found.slot_bytes} == {int}
    assert [Protocol(i).name.lower() for i in range(3)] == ["ll", "ll128", "simple"]
    assert found.max_threads == (512, 640, 384) and (found.ranks, found.channels) == (2, c.channels)
    assert found.rings == tuple(tuple(c.ring(i)) for i in range(c.channels)) and found.version == c.nccl_version


def test_what_the_caller_leaves_out() -> None:
    engine = plan_job(job()).engine
    assert (engine.streams, engine.threads, engine.arenas, engine.patience) == (1, 1, 4, 0)
    engine = plan_job(job(), threads=2, streams=5, patience=9).engine
    assert (engine.streams, engine.threads, engine.patience) == (5, 2, 9)


@pytest.mark.parametrize(("mtu", "milliseconds"), [(1024, 85.899345), (4096, 343.597383)])
def test_an_outage_is_as_long_as_the_fastest_port_needs_for_all_numbers(mtu: int, milliseconds: float) -> None:
    """8388608 packets at 800 gigabits a second."""
    outage = plan_job(job(mtu=mtu)).engine.outage_ns
    assert type(outage) is int and outage == pytest.approx(1e6 * milliseconds, abs=1)


@pytest.mark.parametrize("first", [False, True])
def test_groups_of_iteration_0_lie_after_its_own_bucket(first: bool) -> None:
    plan = plan_job(gathering(first=first))
    assert [(p.offset, p.dtype, p.elements) for p in plan.groups] == [(192, "float32", 26)]
    assert [(p.offset, p.dtype, p.elements) for p in plan.groups_0] == [(192, "float32", 26)][: int(first)]
    later = 12 + 5 + 14  # cells: of both buckets, and of two blocks of 13 elements
    assert plan.cells == (17 + (14 if first else 0), later)


def test_each_call_of_a_connection_goes_where_its_tensor_lies() -> None:
    """Number of a place: among all that an iteration brings."""
    described = gathering(first=True)
    described.collectives.steady.reverse()  # the gather comes first, and bucket 1 before bucket 0
    plan = plan_job(described)
    for edge in plan.engine.edges:
        found = [(call.phase, call.target, call.base, call.place) for call in edge.calls]
        assert found[-3:] == [
            (Phase.STEADY, Target.GRADIENT, 192, 2), (Phase.STEADY, Target.GRADIENT, 128, 1),
            (Phase.STEADY, Target.GRADIENT, 0, 0),
        ]
        of_0 = [one for one in found if one[0] == Phase.ITERATION_0 and one[1] == Target.GRADIENT]
        assert of_0 == [(Phase.ITERATION_0, Target.GRADIENT, 0, 0), (Phase.ITERATION_0, Target.GRADIENT, 192, 1)]
        startup = [one[1:] for one in found if one[0] == Phase.STARTUP]
        carried = [call.carries for call in described.collectives.startup]
        assert [target for target, _, _ in startup] == [
            Target.PARAMETERS if what == "parameters" else Target.NOTHING for what in carried]
        assert all((base, place) == (0, 0) for _, base, place in startup) and Target.PARAMETERS in dict.fromkeys(
            target for target, _, _ in startup)
        assert [one[0] for one in found] == [phase for phase, *_ in plan.calls]


def test_blocks_that_are_gathered_begin_on_cells() -> None:
    """13 elements are 52 bytes, and the next block begins 56 after the one before it. All else is the wire
    model's, also what torch gathers of other things."""
    plan = plan_job(gathering())
    lanes = 0
    for edge in plan.engine.edges:
        for call, (_, described, planned, _) in zip(edge.calls, plan.calls, strict=True):
            lane = edge_lane(planned, edge.channel, edge.src, edge.dst)
            if described.op == "AllGather" and described.carries == "parameters" and lane is not None:
                lanes += 1
                assert call.lane == replace(lane, block=56) != lane
            else:
                assert call.lane == lane
    assert lanes == len(plan.engine.edges) == 2


def test_a_connection_that_a_call_does_not_use_has_no_lane() -> None:
    """A broadcast goes round the ring and ends before its root."""
    plan = plan_job(job(ranks=3))
    broadcast = next(i for i, (_, call, _, _) in enumerate(plan.calls) if call.op == "Broadcast")
    carrying = {(edge.src, edge.dst): edge.calls[broadcast].lane is not None for edge in plan.engine.edges}
    assert sum(carrying.values()) == 2 and len(carrying) >= 3
    assert not any(there for (_, dst), there in carrying.items() if dst == 0)


@pytest.mark.parametrize(("own", "commons", "algorithm"), [
    (None, "ring", "ring"), (None, "tree", "tree"), ("tree", "ring", "tree"), ("ring", "tree", "ring"),
])
def test_a_call_may_have_an_algorithm_of_its_own(own: str | None, commons: str, algorithm: str) -> None:
    described = job()
    described.communicator.algorithm = commons
    described.collectives.steady = [replace(call, algorithm=own) for call in described.collectives.steady]
    plans = [(call.op, plan.algorithm) for phase, call, plan, _ in plan_job(described).calls if phase == Phase.STEADY]
    assert plans == [("AllReduce", algorithm)] * 2
    others = {plan.algorithm for _, call, plan, _ in plan_job(described).calls if call.op != "AllReduce"}
    assert others == {"ring"}
