"""Small parts of a group: counts that have grown, flows of all ranks, a state's payload, jobs that can be followed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from flowcheck.errors import UserError
from flowcheck.node.config.replica import ReplicaSettings
from flowcheck.node.groups.checks import check_gathered, check_job, check_memory, split, union
from flowcheck.node.ports.counts import grown
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.recipe import replica_bytes
from lab.synth import example_job, sharded_job


def test_only_counts_that_have_grown_are_named() -> None:
    assert grown({"a": 1, "b": 2, "c": 5}, {"a": 1, "b": 3, "c": 4, "d": 7, "e": 0}) == {"b": 1, "d": 7}
    assert grown({}, {"a": 1}) == {"a": 1} and grown({"a": 1}, {}) == {}


def _flow(channel: int, src: int, dst: int, **known: Any) -> dict[str, Any]:
    return {"channel": channel, "src": src, "dst": dst, **known}


def test_both_ends_of_a_connection_are_one_flow() -> None:
    """Each end knows its own numbers; what only one says is taken, 0 and "" are not known."""
    found = union([
        [_flow(1, 0, 1, src_qpn=17, dst_qpn=0, src_ip="10.0.0.1"), _flow(0, 0, 1, src_qpn=16)],
        [_flow(1, 0, 1, src_qpn=0, dst_qpn=18, src_ip=""), _flow(0, 1, 0, src_qpn=9)],
    ])
    assert found == [
        _flow(0, 0, 1, src_qpn=16), _flow(0, 1, 0, src_qpn=9),
        _flow(1, 0, 1, src_qpn=17, dst_qpn=18, src_ip="10.0.0.1"),
    ]
    assert union([]) == union([[], []]) == []


def test_ends_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UserError) as refused:
        union([[_flow(2, 0, 1, dst_qpn=18)], [_flow(2, 0, 1, dst_qpn=19)]])
    assert (refused.value.what, refused.value.where) == (
        "the ends of connection 2, 0, 1 say different dst_qpn", "flows")
    same = [_flow(2, 0, 1, dst_qpn=18)]
    assert union([same, same]) == same


def test_flows_without_channel_or_rank_are_told_apart_by_what_they_have() -> None:
    assert union([[{"src": 0, "dst": 1}], [{"src": 1, "dst": 0}]]) == [{"src": 0, "dst": 1}, {"src": 1, "dst": 0}]


def _end(qpns: list[int], cts_qpns: list[int], **known: Any) -> dict[str, Any]:
    return {"src": 0, "dst": 1, "qpns": qpns, "cts_qpns": cts_qpns, **known}


def test_connections_without_channels_are_told_apart_by_their_queue_pairs() -> None:
    """Several between two ranks; one is a flow where both ends have named it, each with its own address."""
    ends = [_end([4], [7]), _end([5], [7]), _end([4], [8]), _end([4], [7]) | {"dst": 2}]
    found = union([[{**one, "src_addr": "10.0.0.1"} for one in ends],
                   [{**one, "src_addr": "", "dst_addr": "10.0.0.2"} for one in ends]])
    both = {"src_addr": "10.0.0.1", "dst_addr": "10.0.0.2"}
    assert found == [_end([4], [7], **both), _end([4], [8], **both), _end([5], [7], **both),
                     _end([4], [7], **both) | {"dst": 2}]
    both_named = {**_end([9], [9]), **both, "channel": None}
    assert union([[both_named], [{**both_named, "dst_addr": ""}]]) == [both_named], "channel None is no channel"


@pytest.mark.parametrize("address", ["src_addr", "dst_addr"])
def test_a_connection_that_one_end_alone_has_named_is_left_out(address: str) -> None:
    other = {"src_addr": "10.0.0.1", "dst_addr": "10.0.0.2"}
    whole, half = _end([1], [2], **other), _end([3], [4], **{**other, address: ""})
    assert union([[whole, half], []]) == [whole]
    with pytest.raises(UserError) as refused:
        union([[half], [half]])
    assert (refused.value.what, refused.value.where) == ("no connection has been named by both of its ends", "flows")
    assert refused.value.remedy == "all ranks' NCCL logs and queue pairs (docs/use/nccl.md); or topology="


def test_a_channel_0_is_a_channel() -> None:
    """Its ends may say other queue pairs, which are checked and not what it is known by."""
    with pytest.raises(UserError, match="the ends of connection 0, 0, 1 say different qpns"):
        union([[{**_end([4], [7]), "channel": 0}], [{**_end([5], [7]), "channel": 0}]])


def test_a_payload_is_parameters_and_the_state_of_each() -> None:
    """Names may hold dots; the last part of an optimizer's name is torch's key."""
    one, two, three, four = (torch.tensor([float(i)]) for i in range(4))
    parameters, state = split({
        "model.layer.0.weight": one, "optimizer.layer.0.weight.exp_avg": two, "optimizer.layer.0.weight.step": three,
        "optimizer.bias.step": four,
    })
    assert parameters == {"layer.0.weight": one}
    assert state == {"layer.0.weight": {"exp_avg": two, "step": three}, "bias": {"step": four}}
    assert split({}) == ({}, {})


def _job(**options: Any) -> Any:
    job = example_job(**{"ranks": 2, "count": [700, 300], "optimizer": "adamw", "options": {"lr": 0.01}, **options})
    job.run_id, job.epoch = "run", 3
    return job


def test_a_manifest_of_this_run_is_taken() -> None:
    check_job(_job(), ("run", 3, 2), journal=False)


@pytest.mark.parametrize("run", [("other", 3, 2), ("run", 4, 2), ("run", 3, 4)])
def test_a_manifest_of_another_run_is_refused(run: tuple[str, int, int]) -> None:
    with pytest.raises(UserError) as refused:
        check_job(_job(), run, journal=False)
    assert refused.value.where == "manifest"
    assert refused.value.what == (
        f"the manifest is of run 'run', epoch 3, 2 ranks; this is {run[0]!r}, {run[1]}, {run[2]}")


def test_a_manifest_without_an_optimizer_is_refused() -> None:
    job = _job()
    job.optimizer = None
    with pytest.raises(UserError, match="names no optimizer") as refused:
        check_job(job, ("run", 3, 2), journal=False)
    assert refused.value.where == "manifest"


@pytest.mark.parametrize("arenas", [2, 5])
@pytest.mark.parametrize("slots", [2, 4])
def test_a_job_that_takes_all_of_memory_mb_fits_and_one_byte_more_does_not(arenas: int, slots: int) -> None:
    """The largest model that fits: found by adding elements; the formula is the page's, in whole MiB."""
    def fits(elements: int) -> bool:
        plan = plan_job(_job(count=[elements], ranks=2), arenas=arenas)
        try:
            check_memory(plan, ReplicaSettings(memory_mb=1, slots=slots))
        except UserError as refused:
            took = re.match(rf"the job takes (\d+) MiB \({slots} slots .*, {arenas} iterations", refused.what)
            assert took and int(took[1]) >= 2 and refused.where == "replica.memory_mb"
            return False
        return True

    least, most = 1000, 400_000
    assert fits(least) and not fits(most)
    while most - least > 2:
        middle = (least + most) // 4 * 2
        least, most = (middle, most) if fits(middle) else (least, middle)

    def taken(elements: int) -> int:
        plan = plan_job(_job(count=[elements], ranks=2), arenas=arenas)
        gradients = plan.engine.gradient_bytes
        return replica_bytes(plan.job, slots) + arenas * gradients + arenas * (gradients // 64)

    assert taken(least) <= 1 << 20 < taken(most)


# -- jobs without trainers -----------------------------------------------------------------------------------------


def test_a_job_that_gathers_its_parameters_can_be_followed() -> None:
    check_gathered(sharded_job(), "job.json")


def _refused(job: Any) -> tuple[str, str]:
    with pytest.raises(UserError) as refused:
        check_gathered(job, "job.json")
    assert refused.value.where == "job.json"
    return refused.value.what, refused.value.remedy


def test_a_job_that_gathers_none_cannot() -> None:
    what, remedy = _refused(_job())
    assert what == "no AllGather of it carries parameters, so without its trainers there is nothing to follow"
    assert remedy.startswith("flowcheck.attach in the trainers of a job that reduces gradients; carries: \"para")


def test_nor_one_of_which_no_call_says_what_lies_in_it() -> None:
    job = sharded_job()
    first, *others = [call for _, call in job.parameter_calls(0)]
    for call in others:
        call.layout = []
    check_gathered(job, "job.json")  # one that says it is enough
    first.layout = []
    what, remedy = _refused(job)
    assert what == "no AllGather of it says what lies in it"
    assert remedy == ("`layout` or `tensors` of its calls that carry parameters (docs/reference/manifest.md)")


@pytest.mark.parametrize("has", ["optimizer", "step values", "gradients of its first iteration", "gradients later"])
def test_nor_one_that_has_what_trainers_alone_can_say(has: str) -> None:
    job, reduced = sharded_job(), _job()
    if has == "optimizer":
        job.optimizer = reduced.optimizer
    elif has == "step values":
        job.step_values = ["lr"]
    elif has == "gradients later":
        job.collectives.iteration_0 = list(job.collectives.steady)
        job.collectives.steady = [*job.collectives.steady, *(call for _, call in reduced.gradient_calls(1))]
    else:
        job.collectives.iteration_0 = [*job.collectives.steady, *(call for _, call in reduced.gradient_calls(0))]
    what, remedy = _refused(job)
    assert what == "it has gradients, an optimizer or step_values, which need trainers that attach"
    assert remedy == "leave them out, to follow gathered parameters alone; or flowcheck.attach in its trainers"


@pytest.mark.parametrize("arenas", [2, 5, 64, 65])
def test_three_sets_of_parameters_and_the_arenas_have_to_fit(arenas: int) -> None:
    """To the last byte, with 64 of them."""
    job = sharded_job(count=[1 << 18], dtype="float32")  # 1 MiB
    plan = plan_job(job, arenas=arenas)
    assert plan.engine.gradient_bytes == 1 << 20
    least = 3 + arenas + -(-arenas // 64)  # and a bit for every 8 bytes of an arena
    check_memory(plan, ReplicaSettings(memory_mb=least))
    with pytest.raises(UserError) as refused:
        check_memory(plan, ReplicaSettings(memory_mb=least - 1))
    assert refused.value.what == f"the job takes {least} MiB (3 sets of parameters, {arenas} iterations of them)"
    assert f"set it to {least} or more" in refused.value.remedy
