"""Parameter groups of a manifest: what an iteration gathers is every parameter, once, or the manifest is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from lab.synth.example import example_job, sharded_job

Calls = list[dict[str, Any]]
FIRST, SECOND, SECOND_AGAIN, FIRST_AGAIN = range(4)  # of an iteration's calls: gathered forwards, and then backwards


def manifest(**options: Any) -> dict[str, Any]:
    """Groups of 20 and 12 elements, a weight and a bias in each; two ranks gather 10 and 6 each, in bfloat16."""
    return sharded_job(count=(20, 12), **options).to_dict()


def refused(change: Callable[[Calls], object], part: str = "steady", **options: Any) -> UserError:
    job = manifest(**options)
    change(job["collectives"][part])
    with pytest.raises(UserError) as error:
        job_from_dict(job, where="m.json")
    return error.value


def both(*calls: int, **fields: Any) -> Callable[[Calls], None]:
    """The same fields in these calls."""
    def change(found: Calls) -> None:
        for call in calls:
            found[call].update(fields)
    return change


def piece(call: int, number: int, **fields: Any) -> Callable[[Calls], None]:
    """A slice of a call's layout, and of the call that gathers the same group again."""
    def change(found: Calls) -> None:
        for one in (call, 3 - call):
            found[one]["layout"][number].update(fields)
    return change


@pytest.mark.parametrize("options", [{}, {"again": False}, {"after_update": True}, {"per_parameter": True}])
def test_what_is_gathered_whole_is_a_job(options: dict[str, Any]) -> None:
    for part in ("steady", "iteration_0"):
        calls = job_from_dict(manifest(**options), where="m.json").parameter_calls(int(part == "steady"))
        assert {group for group, _ in calls} == {0, 1}


@pytest.mark.parametrize("part", ["steady", "iteration_0"])
@pytest.mark.parametrize(("change", "what"), [
    (both(FIRST_AGAIN, count=11), "parameter group 0 and differ"),
    (both(SECOND_AGAIN, dtype="float32"), "parameter group 1 and differ"),
    (lambda calls: calls[FIRST_AGAIN]["layout"].pop(), "parameter group 0 and differ"),
    (both(SECOND, after_update=True), "some of the parameters"),
    (both(FIRST_AGAIN, after_update=True), "some of the parameters"),
    (both(FIRST, SECOND, SECOND_AGAIN, after_update=True), "some of the parameters"),
    (both(FIRST, FIRST_AGAIN, bucket=2), "must be 0..1, and are [1, 2]"),
    (piece(FIRST, 0, length=19), "elements 0..19 are outside 'group0.weight' (18)"),
    (piece(SECOND, 1, start=1), "elements 1..2 are outside 'group1.bias' (1)"),
    (piece(FIRST, 0, start=-1), "elements -1..17 are outside 'group0.weight' (18)"),
    (piece(FIRST, 0, length=-1), "elements 0..-1 are outside 'group0.weight' (18)"),
    (piece(FIRST, 1, offset=17), "'group0.bias' at elements 17..19 overlaps"),
    (piece(SECOND, 1, offset=12), "'group1.bias' at elements 12..13 overlaps another slice or leaves the gathered"),
    (piece(FIRST, 0, length=17), "'group0.weight' is not gathered whole: element 17 is in no group"),
    (piece(FIRST, 0, length=17, start=1), "'group0.weight' is not gathered exactly once: element 0"),
    (lambda calls: [one["layout"].append({"name": "group0.bias", "offset": 12, "length": 1, "start": 0})
                    for one in (calls[SECOND], calls[SECOND_AGAIN]) if one.update(count=7) is None],
     "'group0.bias' is not gathered exactly once: element 0 twice"),
    (lambda calls: [one["layout"].pop() for one in (calls[SECOND], calls[SECOND_AGAIN])], ""),
])
def test_what_is_not_gathered_once_and_whole_is_refused(
    part: str, change: Callable[[Calls], object], what: str
) -> None:
    """The last one: an entry that no group gathers is none of the groups' business."""
    if not what:
        job = manifest()
        change(job["collectives"][part])
        assert job_from_dict(job, where="m.json")
        return
    error = refused(change, part)
    assert what in error.what and error.where.endswith(f"collectives.{part}")


def test_an_entry_in_two_groups_has_one_type_on_the_wire() -> None:
    def change(calls: Calls) -> None:
        calls[FIRST]["layout"][0]["length"] = calls[FIRST_AGAIN]["layout"][0]["length"] = 17
        for one in (calls[SECOND], calls[SECOND_AGAIN]):
            one["layout"].append({"name": "group0.weight", "offset": 12, "length": 1, "start": 17})
            one.update(count=7, dtype="float32")

    assert "'group0.weight' is gathered partly as bfloat16, partly as float32" in refused(change).what


def test_groups_without_a_number_are_counted_as_they_come() -> None:
    job = manifest(again=False)
    for part in ("steady", "iteration_0"):
        for call in job["collectives"][part]:
            call["bucket"] = None
    assert [group for group, _ in job_from_dict(job, where="m.json").parameter_calls(1)] == [0, 1]


def test_tensors_lie_one_behind_the_other_where_nothing_else_is_said() -> None:
    """FSDP1's flat tensor, by the names of its entries alone."""
    job = manifest()
    for part in ("steady", "iteration_0"):
        for call in job["collectives"][part]:
            call["tensors"], call["layout"] = [one["name"] for one in call["layout"]], []
    read = job_from_dict(job, where="m.json")
    slices = [read.parameter_slices(call) for _, call in read.parameter_calls(1)]
    assert [[(one.name, one.offset, one.length, one.start) for one in found] for found in slices[:2]] == [
        [("group0.weight", 0, 18, 0), ("group0.bias", 18, 2, 0)],
        [("group1.weight", 0, 11, 0), ("group1.bias", 11, 1, 0)],
    ]
    assert slices[2:] == slices[1::-1]
    job["collectives"]["steady"][FIRST]["tensors"].reverse()
    with pytest.raises(UserError, match="parameter group 0 and differ"):
        job_from_dict(job, where="m.json")


def test_each_queue_pair_of_a_merged_nic_has_addresses_of_its_own() -> None:
    one, merged = (example_job(count=100, qps=2, devices=devices).flows[0] for devices in (1, 2))
    assert {one.addresses(queue) for queue in range(2)} == {(one.src_addr, one.dst_addr)}
    assert [merged.addresses(queue) for queue in range(len(merged.qpns))] == list(
        zip(merged.src_addrs, merged.dst_addrs, strict=True))
    assert len({merged.addresses(queue) for queue in range(len(merged.qpns))}) > 1
