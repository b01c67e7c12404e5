"""When the job of a training loop is known, by the calls of its iterations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowcheck.trainer.describe import description
from flowcheck.trainer.describe.description import Watch, entries

from .described import EveryKind, call, net, refusal


class Training:
    """A DDP job of one bucket of 12 (or of another model), whose communicator's calls the test makes up."""

    def __init__(
        self, wrap: Any, said: list[dict[str, Any]], model: torch.nn.Module | None = None, **options: Any
    ) -> None:
        self.said, self.asked = said, list[int]()
        self.model = wrap(model or net(), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.watch = Watch(
            self.model, self.optimizer, entries(self.model, self.optimizer), self.calls,
            lambda: {"ranks": 2, "nccl_version": "2.27.7"}, "a run", 7,
        )

    def calls(self, since: int) -> list[dict[str, Any]]:
        self.asked.append(since)
        return self.said[since:]

    def look(self, *calls: dict[str, Any]) -> Any:
        self.said.extend(calls)
        return self.watch.look()

    def again(self, iteration: int, *calls: dict[str, Any]) -> str:
        self.said.extend(calls)
        return self.watch.again(iteration)

    def known(self, *calls: dict[str, Any]) -> Any:
        """The job, after three iterations of these calls."""
        assert self.look(*calls) is None and self.look(*calls) is None
        return self.look(*calls)


REDUCE, OTHER = call("AllReduce", 12), call("Broadcast", 3, "int32")


def test_the_job_is_known_after_three_iterations(wrapped) -> None:
    training = Training(wrapped, [call("AllGather", 1, "int64"), call("AllReduce", 9)])
    assert training.watch.why == "the job's iterations are being watched"
    job = training.known(OTHER, REDUCE).to_dict()
    plain = {"root": 0, "bucket": None, "tensors": [], "layout": [], "after_update": False, "protocol": None,
             "algorithm": None, "channels": None}
    other = plain | OTHER | {"carries": "other"}
    iteration = [other, plain | REDUCE | {"carries": "gradient", "bucket": 0}]
    before = plain | REDUCE | {"carries": "other"}
    assert job["collectives"] == {
        "startup": [plain | call("AllGather", 1, "int64") | {"carries": "other"},
                    plain | call("AllReduce", 9) | {"carries": "other"}, other, before, other, before],
        "iteration_0": [one | {"carries": one["carries"] if one["op"] == "AllReduce" else ""} for one in iteration],
        "rebuild": [],
        "steady": [one | {"carries": one["carries"] if one["op"] == "AllReduce" else ""} for one in iteration],
    }
    assert (job["run_id"], job["epoch"], job["flows"], job["step_values"]) == ("a run", 7, [], ["lr"])
    assert (job["communicator"]["ranks"], job["communicator"]["nccl_version"]) == (2, "2.27.7")
    assert job["gradients"] == {"dtype": "float32", "divisor": 1}
    assert job["optimizer"] == {
        "name": "sgd", "rounding": "torch-cpu", "masters": "", "threads": 0, "corrections": {},
        "torch_version": torch.__version__,
        "groups": [{"params": ["first.weight", "first.bias", "last.weight", "last.bias"], "options": {
            "lr": 0.5, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}}],
    }
    assert [entry["name"] for entry in job["model"]] == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert job["buckets"]["iteration_0"] == [] and [len(b["slices"]) for b in job["buckets"]["steady"]] == [4]
    assert training.asked == [0, 2, 4, 6]  # each call is asked for once


def test_a_communicator_that_is_known_late_loses_no_call(wrapped) -> None:
    """It is known after the first iteration: all calls until then are `startup`, as the wire has it."""
    training = Training(wrapped, [call("AllGather", 1, "int64")])
    hidden, training.said = training.said, []
    training.watch._seen, training.watch._count = [], 0  # as attach found it: nothing yet
    assert training.look() is None
    training.said = [*hidden, OTHER, REDUCE]
    assert training.look(OTHER, REDUCE) is None
    job = training.look(OTHER, REDUCE)
    before = ["AllGather", *["Broadcast", "AllReduce"] * 2]
    assert [one.op for one in job.collectives.startup] == before
    assert [one.op for one in job.collectives.steady] == ["Broadcast", "AllReduce"]


def test_buffers_are_a_value_of_the_step(wrapped) -> None:
    model = wrapped(torch.nn.BatchNorm1d(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    said: list[dict[str, Any]] = []
    watch = Watch(model, optimizer, entries(model, optimizer), lambda since: said[since:],
                  lambda: {"ranks": 2, "nccl_version": "2.27.7"}, "run", 0)
    for _ in range(3):
        said.append(REDUCE)
        job = watch.look()
    assert job is not None and job.step_values == ["lr", "buffers"]


def test_groups_that_optimize_nothing_are_not_in_the_manifest(wrapped) -> None:
    model = wrapped(EveryKind())
    inner = model.module
    groups = [{"params": [inner.frozen], "lr": 1.0}, {"params": [inner.bias, inner.weight], "lr": 2.0}]
    optimizer = torch.optim.SGD(groups)
    said: list[dict[str, Any]] = []
    watch = Watch(model, optimizer, entries(model, optimizer), lambda since: said[since:],
                  lambda: {"ranks": 2, "nccl_version": "2.27.7"}, "run", 0)
    for _ in range(3):
        said.append(call("AllReduce", 9))
        job = watch.look()
    assert [(group.params, group.options["lr"]) for group in job.optimizer.groups] == [(["bias", "weight"], 2.0)]


def test_buckets_that_were_built_anew_are_watched_once_more(wrapped) -> None:
    """The third iteration has other buckets than the second: the fourth is the first one that repeats."""
    training = Training(wrapped, [], bucket_cap_mb=1e-5)
    assert training.look(REDUCE) is None and training.look(REDUCE) is None
    for _ in range(2):
        training.model(torch.ones(1, 2)).sum().backward()
    counts = [bucket.buffer().numel() for bucket in training.model.reducer._get_zeros_like_grad_buckets()]
    steady = [call("AllReduce", count) for count in counts]
    assert len(counts) > 1
    assert training.look(*steady) is None
    job = training.look(*steady)
    assert [(one.count, one.bucket, one.carries) for one in job.collectives.steady] == [
        (count, number, "gradient") for number, count in enumerate(counts)
    ]
    assert [one.count for one in job.collectives.startup] == [12, 12, *counts]


def test_buckets_that_are_reduced_in_another_order_are_waited_past(wrapped) -> None:
    """The n-th gradient call of an iteration is taken for bucket n."""
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    training = Training(wrapped, [], layers, bucket_cap_mb=1e-5)
    assert training.look() is None and training.look() is None
    for _ in range(2):
        training.model(torch.ones(1, 2)).sum().backward()
    counts = [bucket.buffer().numel() for bucket in training.model.reducer._get_zeros_like_grad_buckets()]
    steady = [call("AllReduce", count) for count in counts]
    assert counts != counts[::-1] and training.look(*steady) is None
    assert training.look(*steady[::-1]) is None
    assert training.watch.why.startswith(
        f"an iteration reduced {counts[::-1]} elements where DDP has buckets of {counts}; waiting for one that agrees"
    )
    assert training.look(*steady) is not None


@pytest.mark.parametrize(("calls", "found"), [
    ([], "[]"), ([call("AllReduce", 11)], "[]"), ([REDUCE, REDUCE], "[12, 12]"), ([call("Broadcast", 12)], "[]"),
    ([call("AllReduce", 12, "float16")], "[]"), ([call("AllReduce", 12, carries="other")], "[]"),
])
def test_an_iteration_that_reduces_something_else_is_waited_past(wrapped, calls: list[Any], found: str) -> None:
    training = Training(wrapped, [])
    assert training.known(*calls) is None
    assert training.watch.why.startswith(
        f"an iteration reduced {found} elements where DDP has buckets of [12]; waiting for one that agrees"
    )
    job = training.look(REDUCE)
    assert [one.count for one in job.collectives.steady] == [12]
    assert len(job.collectives.startup) == 3 * len(calls)


def test_the_last_of_several_passes_carries_the_sum(wrapped) -> None:
    """Accumulation without no_sync. As many AllReduces that were no pass's are not taken for one."""
    training = Training(wrapped, [])
    for passes in (3, 3, 2, 1):
        training.said.extend([OTHER, REDUCE, REDUCE, REDUCE])
        assert training.watch.look(passes) is None
    assert training.watch.look(0) is None and "reduced [] elements" in training.watch.why, "nothing at all"
    training.said.extend([OTHER, REDUCE, REDUCE, REDUCE])
    assert training.watch.look(1) is None
    assert "[12, 12, 12]" in training.watch.why and "process group of its own" in training.watch.why
    training.said.extend([OTHER, REDUCE, REDUCE, REDUCE])
    job = training.watch.look(3)
    assert [(one.carries, one.bucket) for one in job.collectives.steady] == [
        ("", None), ("other", None), ("other", None), ("gradient", 0)
    ]


def test_iterations_of_which_no_two_are_alike_are_named(wrapped) -> None:
    """Once the job was known a new way of iterating has to show twice."""
    training = Training(wrapped, [])
    training.known(REDUCE)
    assert training.again(3, *[OTHER] * 2, REDUCE)
    for turn in range(3, 6):
        assert training.look(*[OTHER] * turn, REDUCE) is None
        assert "waiting for two alike" in training.watch.why and f"{turn + 1} calls" in training.watch.why


def test_other_reductions_of_an_iteration_carry_something_else(wrapped) -> None:
    """Of another length, or of another type: a loss, a norm, a counter."""
    training = Training(wrapped, [])
    job = training.known(call("AllReduce", 1), REDUCE, call("AllReduce", 12, "int64"))
    assert [(one.carries, one.bucket) for one in job.collectives.steady] == [
        ("other", None), ("gradient", 0), ("other", None)
    ]


@pytest.mark.parametrize(("before", "known"), [(65534, True), (65535, False)])
def test_a_long_history_is_not_kept(wrapped, before: int, known: bool) -> None:
    """65536 calls may have passed when the second look is over."""
    training = Training(wrapped, [OTHER] * before)
    assert training.look(REDUCE) is None
    if known:
        assert training.look(REDUCE) is None
        assert refusal(lambda: training.look(REDUCE)) == ("attach", "65537 calls have passed on the communicator")
    else:
        assert refusal(lambda: training.look(REDUCE)) == ("attach", "65537 calls have passed on the communicator")


def test_a_communicator_that_cannot_be_is_refused_in_the_manifests_words(wrapped) -> None:
    training = Training(wrapped, [])
    training.watch._communicator = lambda: {"ranks": 2, "nccl_version": "new"}
    where, what = refusal(lambda: training.known(REDUCE))
    assert where == "the live job: communicator.nccl_version" and "'new' is not a version" in what


def test_iterations_like_those_before_go_on(wrapped) -> None:
    training = Training(wrapped, [])
    training.known(OTHER, REDUCE)
    for iteration in range(3, 6):
        assert training.again(iteration, OTHER, REDUCE) == ""
    assert training.asked == [0, 0, 2, 4, 6, 8, 10]


TWO = "on DDP's communicator, and 2 are an iteration's"


@pytest.mark.parametrize(("calls", "what", "whole"), [
    ([OTHER, REDUCE, REDUCE], f"3 calls {TWO}: number 2 is AllReduce of 12 float32", False),
    ([OTHER, REDUCE, OTHER, call("AllReduce", 1)], f"4 calls {TWO}: number 2 is Broadcast of 3 int32", True),
    ([OTHER, REDUCE, call("AllReduce", 12, "float16")], f"3 calls {TWO}: number 2 is AllReduce of 12 float16", True),
    ([OTHER, REDUCE, OTHER, REDUCE], f"4 calls {TWO}: number 2 is Broadcast of 3 int32", False),
    ([call("AllReduce", 1), OTHER, REDUCE], f"3 calls {TWO}: number 0 is AllReduce of 1 float32", False),
    ([OTHER], f"1 calls {TWO}: number 1 is AllReduce of 12 float32, which is missing", False),
    ([], f"0 calls {TWO}: number 0 is Broadcast of 3 int32, which is missing", False),
    ([REDUCE], f"1 calls {TWO}: number 0 is AllReduce of 12 float32", False),
    ([OTHER, call("AllReduce", 13)], f"2 calls {TWO}: number 1 is AllReduce of 13 float32", False),
    ([call("Broadcast", 4, "int32"), REDUCE], f"2 calls {TWO}: number 0 is Broadcast of 4 int32", False),
    ([OTHER, call("AllReduce", 12, "float16")], f"2 calls {TWO}: number 1 is AllReduce of 12 float16", False),
    ([OTHER | {"root": 1}, REDUCE], f"2 calls {TWO}: number 0 is Broadcast of 3 int32", False),
    ([REDUCE, OTHER], f"2 calls {TWO}: number 0 is AllReduce of 12 float32", False),
])
def test_an_iteration_unlike_those_before_is_named(wrapped, calls: list[Any], what: str, whole: bool) -> None:
    """As many calls as before are not enough: one other count, type, root or order, and it is another iteration. It has
    its gradients whole if they came first, and nothing after them could be one of them."""
    training = Training(wrapped, [])
    training.known(OTHER, REDUCE)
    training.again(3, OTHER, REDUCE)
    assert training.again(4, *calls).startswith(f"iteration 4 made {what}; ")
    assert training.watch.why.startswith("iteration 4 made ") and training.watch.whole == whole


@pytest.mark.parametrize("odd", [
    [OTHER, REDUCE, call("AllReduce", 1)], [call("AllReduce", 1), OTHER, REDUCE], [OTHER, REDUCE, REDUCE], [],
])
def test_the_job_is_known_again_by_the_next_iteration_like_those(wrapped, odd: list[Any]) -> None:
    """Everything that was called until then is what a connection's place is counted from, in its order."""
    training = Training(wrapped, [call("AllGather", 1, "int64")])
    first = training.known(OTHER, REDUCE).collectives
    for iteration in (3, 4):
        assert training.again(iteration, OTHER, REDUCE) == ""
    assert training.again(5, *odd)
    again = training.look(OTHER, REDUCE).collectives
    assert again.steady == first.steady and again.iteration_0 == first.iteration_0
    assert [(one.op, one.count) for one in again.startup] == [(one["op"], one["count"]) for one in training.said[:-2]]
    assert training.again(7, OTHER, REDUCE) == "" and training.again(8, *odd)
    again = training.look(OTHER, REDUCE).collectives
    assert [(one.op, one.count) for one in again.startup] == [(one["op"], one["count"]) for one in training.said[:-2]]


def test_odd_iterations_one_after_the_other(wrapped) -> None:
    training = Training(wrapped, [])
    training.known(OTHER, REDUCE)
    assert training.again(3, OTHER, REDUCE, call("AllReduce", 1))
    assert training.look(OTHER, REDUCE, call("AllReduce", 2)) is None
    assert training.look(OTHER, REDUCE) is not None


def test_a_new_way_of_iterating_shows_twice(wrapped) -> None:
    """A metric that every iteration computes from now on."""
    training, metric = Training(wrapped, []), call("AllReduce", 1)
    training.known(OTHER, REDUCE)
    assert training.again(3, OTHER, REDUCE, metric)
    job = training.look(OTHER, REDUCE, metric)
    assert [one.carries for one in job.collectives.steady] == ["", "gradient", "other"]
    assert training.again(5, OTHER, REDUCE, metric) == ""


def test_a_history_that_is_too_long_is_refused_by_name(wrapped, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(wrapped, [])
    training.known(OTHER, REDUCE)
    monkeypatch.setattr(description, "CALLS", 10)
    assert training.again(3, OTHER, REDUCE) == ""
    where, what = refusal(lambda: training.again(4, OTHER, REDUCE, OTHER))
    assert where == "attach" and "number 2 is Broadcast of 3 int32" in what and "after 11 calls" in what
