"""The plan of a job: where everything lies, and what the engine is told of its NCCL version.

Numbers of versions are those of NCCL's wire format, 5.3 and 5.4.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.rebuild.plan import plan_job
from lab.synth import example_job, sharded_job
from tests.nccl_versions import UNREAD


def job(**settings: object) -> Job:
    """Buckets: 33 elements, later 24 and 9. The broadcast has 8, 1, 21 and 3 elements of fp32."""
    return example_job(**{"ranks": 2, "count": [24, 9], **settings})


# -- regions -----------------------------------------------------------------------------------------------


def test_buckets_begin_on_lines_of_64_bytes_in_the_order_of_their_numbers() -> None:
    described = job()
    described.collectives.steady.reverse()  # bucket 1 is reduced first
    plan = plan_job(described)
    assert [(p.index, p.offset, p.nbytes) for p in plan.iteration_buckets(1)] == [(0, 0, 96), (1, 128, 36)]
    assert [(p.index, p.offset, p.nbytes) for p in plan.iteration_buckets(0)] == [(0, 0, 132)]
    assert [base for phase, call, _, base in plan.calls if call in described.collectives.steady] == [128, 0]


@pytest.mark.parametrize(("count", "size"), [([24, 9], 192), ([16, 16], 128), ([1] * 5, 320), ([33], 192)])
def test_the_region_holds_the_largest_iteration(count: list[int], size: int) -> None:
    """Iteration 0 has all elements in one bucket; later ones have buckets of their own lines."""
    assert plan_job(job(count=count)).engine.gradient_bytes == size


def test_the_region_holds_iteration_0_as_well() -> None:
    described = job()
    described.collectives.steady.pop()  # 24 elements are left, and iteration 0 has 33
    assert plan_job(described).engine.gradient_bytes == 192


def test_gathered_groups_lie_after_the_buckets() -> None:
    described = job()
    gather = replace(sharded_job(count=(25,), dtype="float32").collectives.steady[0], bucket=0)
    described.collectives.steady.append(gather)
    plan = plan_job(described)
    (group,) = plan.groups
    assert (group.offset, group.nbytes, group.blocks, group.stride, group.carries) == (192, 104, 2, 56, "parameters")
    assert plan.groups_0 == () and [p.offset for p in plan.iteration_places(1)] == [0, 128, 192]
    assert [p.offset for p in plan.iteration_places(0)] == [0] and plan.engine.gradient_bytes == 320
    assert plan.calls[-1][3] == 192  # bucket 0 and group 0 have the same number and are not the same


def test_each_broadcast_begins_on_a_line_and_its_entries_are_packed() -> None:
    described = job()
    whole = described.collectives.startup.pop()
    for tensors, count in ((whole.tensors[:2], 9), (whole.tensors[2:], 24)):
        described.collectives.startup.append(replace(whole, tensors=tensors, count=count))
    plan = plan_job(described)
    assert [(p.name, p.offset, p.nbytes) for p in plan.parameters] == [
        ("layer0.weight", 0, 32), ("layer0.bias", 32, 4), ("layer1.weight", 64, 84), ("layer1.bias", 148, 12),
    ]
    assert plan.engine.parameter_bytes == 192
    assert [base for _, call, _, base in plan.calls if call.carries == "parameters"] == [0, 64]


@pytest.mark.parametrize(("change", "words"), [
    ({"count": 32}, "has 32 elements, its tensors have 33"), ({"count": 34}, "has 34 elements, its tensors have 33"),
    ({"tensors": ["layer0.weight", "nothing"]}, "names 'nothing', which is no float32 entry"),
    ({"dtype": "float16"}, "names 'layer0.weight', which is no float16 entry"),
])
def test_a_broadcast_that_is_not_of_the_model_is_refused(change: dict[str, object], words: str) -> None:
    """Entries would be taken from the bytes of their neighbours."""
    described = job()
    described.collectives.startup.append(replace(described.collectives.startup.pop(), **change))
    with pytest.raises(UserError, match=words) as refused:
        plan_job(described)
    assert refused.value.where == "collectives.startup"


# -- what the engine is told -------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "index", "tag", "big_endian"), [
    ("2.19.4", 24, 20, False), ("2.20.5", 32, 24, False), ("2.23.4", 32, 24, False), ("2.24.3", 40, 36, False),
    ("2.28.9", 40, 36, False),
    ("2.29.2", 40, 36, True), ("2.30.7", 56, 52, True),
])
def test_the_form_of_a_version(version: str, index: int, tag: int, big_endian: bool) -> None:
    """Bytes of the index and the tag in a clear-to-send, and the order of bytes of the immediate."""
    engine = plan_job(job(version=version)).engine
    assert (engine.cts.number_at, engine.cts.tag_at) == (index, tag)
    assert {edge.imm_big_endian for edge in engine.edges} == {big_endian}


@pytest.mark.parametrize(("version", "adaptive", "above"), [
    ("2.15.5", False, 4096), ("2.16.5", False, None), ("2.16.5", True, 4096), ("2.27.7", False, None),
])
def test_large_messages_leave_as_pairs_with_adaptive_routing_and_always_until_2_15(
    version: str, adaptive: bool, above: int | None
) -> None:
    described = job(version=version)
    described.communicator.adaptive_routing, described.communicator.ar_threshold = adaptive, 4096
    assert {edge.ar_above for edge in plan_job(described).engine.edges} == {above}


def test_data_goes_to_the_receiver_and_clear_to_send_comes_back() -> None:
    described = job()
    described.flows[0].qpns, described.flows[0].cts_qpns = [17, 18], [33, 34]
    described.communicator.qps_per_connection, described.communicator.split_data_on_qps = 2, False
    plan = plan_job(described)
    here, there = b"\x0a\x00\x00\x01", b"\x0a\x00\x00\x02"
    assert [(f.src_addr, f.dst_addr, f.qpn, f.qp, f.data) for f in plan.engine.flows if f.edge == 0] == [
        (here, there, 17, 0, True), (here, there, 18, 1, True),
        (there, here, 33, 0, False), (there, here, 34, 1, False),
    ]
    assert (plan.engine.edges[0].qps, plan.engine.edges[0].used) == (2, 1)


@pytest.mark.parametrize("checked", [True, False])
def test_what_the_caller_chooses(checked: bool) -> None:
    engine = plan_job(job(mtu=1024), streams=3, arenas=7, check_icrc=checked).engine
    assert (engine.mtu, engine.streams, engine.arenas, engine.check_icrc) == (1024, 3, 7, checked)
    assert plan_job(job()).engine.arenas == 4 and plan_job(job()).engine.check_icrc


def test_a_version_that_was_never_read_is_refused() -> None:
    described = job()
    described.communicator.nccl_version = UNREAD
    with pytest.raises(UserError, match="its wire layout has not been read"):
        plan_job(described)
