"""The job manifest from live DDP objects: what every entry becomes, when the job is known, and each refusal once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from flowcheck.errors import UserError
from flowcheck.trainer.description import Model, Watch, bucket_layout, check_gradients, entries, group_options

from ..pair import leave

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def net() -> torch.nn.Module:
    """Two layers of 2 x 2: 8 weights and 4 biases."""
    return torch.nn.Sequential(OrderedDict(first=torch.nn.Linear(2, 2), last=torch.nn.Linear(2, 2)))


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    """(where, what) of the UserError that the call raises; it has a remedy."""
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.remedy
    return caught.value.where, caught.value.what


# -- entries -------------------------------------------------------------------------------------------------


class EveryKind(torch.nn.Module):
    """An optimized tensor, the same again, one that is frozen, a buffer, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3))
        self.frozen = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.tied = self.weight
        self.bias = torch.nn.Parameter(torch.ones(3))


def test_every_kind_of_entry_in_the_state_dicts_order(wrapped) -> None:
    model = wrapped(EveryKind())
    inner = model.module
    groups = [{"params": [inner.bias]}, {"params": [inner.frozen]}, {"params": [inner.weight]}]
    found = entries(model, SGD(groups, lr=0.1))
    assert [(one.name, one.shape, one.dtype, one.kind, one.tied) for one in found.entries] == [
        ("weight", [2, 3], "float32", "optimized", ""), ("frozen", [4], "bfloat16", "constant", ""),
        ("tied", [2, 3], "float32", "optimized", "weight"), ("bias", [3], "float32", "optimized", ""),
        ("count", [], "int64", "buffer", ""),
    ]
    assert found.names == {id(inner.weight): "weight", id(inner.bias): "bias"}
    assert found.groups == [["bias"], None, ["weight"]]
    assert found.buffers == ["count"]
    assert (found.optimizer, found.rounding) == ("sgd", ("torch-cpu", torch.__version__))


@pytest.mark.parametrize(("make", "name", "rounding"), [
    (lambda p: SGD(p, lr=0.1), "sgd", "torch-cpu"), (Adam, "adam", "torch-cpu"), (AdamW, "adamw", "torch-cpu"),
    (lambda p: AdamW(p, fused=True), "adamw", "torch-cpu-fused"),
])
def test_the_optimizers_that_are_followed(wrapped, make: Any, name: str, rounding: str) -> None:
    model = wrapped(net())
    found = entries(model, make(model.parameters()))
    assert (found.optimizer, found.rounding[0]) == (name, rounding)


class OwnAdam(torch.optim.Adam):
    """What a class of somebody's own does in step is not known, whatever it is derived from."""


@pytest.mark.parametrize(("make", "what"), [
    (torch.optim.Adagrad, "Adagrad is not followed"), (OwnAdam, "OwnAdam is not followed"),
])
def test_other_optimizers_are_refused(wrapped, make: Any, what: str) -> None:
    model = wrapped(net())
    assert refusal(lambda: entries(model, make(model.parameters()))) == ("optimizer", what)


def test_only_the_ddp_object_knows_the_buckets() -> None:
    model = net()
    assert refusal(lambda: entries(model, SGD(model.parameters(), lr=0.1))) == ("model", "is a Sequential")


def test_a_sharded_model_is_told_what_sharding_means() -> None:
    """FSDP2 makes a class of its own for each module: "not what it wraps" would be no remedy."""
    leave()  # the other tests' process group, which they make anew
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(net())
        where, what = refusal(lambda: entries(model, SGD(model.parameters(), lr=0.1)))  # type: ignore[arg-type]
        with pytest.raises(UserError) as caught:
            entries(model, SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
    assert where == "model" and what.startswith("is sharded by fully_shard: ReduceScatter")
    assert "docs/use/qualify.md" in caught.value.remedy and "wraps" not in caught.value.remedy


def _hooked(wrap: Any) -> DistributedDataParallel:
    model = wrap(net())
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def _delayed(wrap: Any) -> DistributedDataParallel:
    inner = net()
    delayed = [("first.weight", inner.first.weight)]
    return wrap(inner, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=inner.last.weight)


@pytest.mark.parametrize(("make", "what"), [
    (_hooked, "uses a communication hook: what it sends is its own"),
    (lambda wrap: wrap(net(), find_unused_parameters=True),
     "uses find_unused_parameters: which gradients are absent is not said"),
    (lambda wrap: wrap(net(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)),
     "uses DDP's own mixed precision"),
    (_delayed, "uses delay_all_reduce_named_params"),
])
def test_what_ddp_may_not_do(wrapped, make: Any, what: str) -> None:
    model = make(wrapped)
    found = refusal(lambda: entries(model, SGD(model.module.parameters(), lr=0.1)))
    assert found == ("DistributedDataParallel", what)


class Spoken(torch.nn.Linear):
    """A layer whose state_dict has something that is not a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: object) -> None:
        pass


def _with_buffer(dtype: torch.dtype) -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    layer.register_buffer("mask", torch.zeros(2, dtype=dtype))
    return layer


@pytest.mark.parametrize(("make", "where", "what"), [
    (lambda: Spoken(2, 2), "state_dict: _extra_state", "is dict"),
    (lambda: _with_buffer(torch.bool), "state_dict: mask", "is torch.bool"),
    (lambda: _with_buffer(torch.int16), "state_dict: mask", "is torch.int16"),
    (lambda: _with_buffer(torch.uint16), "state_dict: mask", "is torch.uint16"),
    (lambda: _with_buffer(torch.complex64), "state_dict: mask", "is torch.complex64"),
    (lambda: torch.nn.Linear(2, 2, dtype=torch.float64), "state_dict: weight", "is optimized in torch.float64"),
    (lambda: torch.nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last), "state_dict: weight",
     "is not in row-major order, and so is its gradient"),
])
def test_entries_that_are_refused(wrapped, make: Any, where: str, what: str) -> None:
    model = wrapped(make())
    assert refusal(lambda: entries(model, SGD(model.parameters(), lr=0.1))) == (where, what)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
                                   torch.uint64, torch.uint32, torch.uint8], ids=str)
def test_buffers_of_other_types_are_kept(wrapped, dtype: torch.dtype) -> None:
    model = wrapped(_with_buffer(dtype))
    found = entries(model, SGD(model.parameters(), lr=0.1)).entries
    assert [(one.name, f"torch.{one.dtype}", one.kind) for one in found[2:]] == [("mask", str(dtype), "buffer")]


def test_a_frozen_tensor_may_have_any_form(wrapped) -> None:
    model = net()
    model.last.weight = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float64).T, requires_grad=False)
    model = wrapped(model)
    found = entries(model, SGD(model.parameters(), lr=0.1)).entries
    assert [(one.name, one.shape, one.kind) for one in found if one.dtype == "float64"] == [
        ("last.weight", [3, 2], "constant")
    ]


def test_a_parameter_of_another_model_is_refused(wrapped) -> None:
    model, other = wrapped(net()), torch.nn.Parameter(torch.ones(5, 7))
    optimizer = SGD([*model.parameters(), other], lr=0.1)
    assert refusal(lambda: entries(model, optimizer)) == (
        "optimizer", "has a parameter of shape (5, 7) that is not in the model's state_dict"
    )
    other.requires_grad_(False)  # it will not be stepped
    assert len(entries(model, optimizer).names) == 4


def test_a_parameter_that_is_reduced_and_not_optimized_is_refused(wrapped) -> None:
    inner = net()
    model = wrapped(inner)
    optimizer = SGD([inner.first.weight, inner.first.bias, inner.last.weight], lr=0.1)
    assert refusal(lambda: entries(model, optimizer)) == (
        "optimizer", "has no last.bias, whose gradient DDP reduces"
    )


def test_a_parameter_that_ddp_ignores_may_be_left_out(wrapped) -> None:
    inner = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["last.bias"])
    found = entries(wrapped(inner), SGD([inner.first.weight, inner.first.bias, inner.last.weight], lr=0.1))
    assert [one.kind for one in found.entries if one.name == "last.bias"] == ["constant"]


# -- hyper-parameters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "options"), [
    (lambda p: SGD(p, lr=0.1, momentum=0.5, weight_decay=0.25, nesterov=True, maximize=True),
     {"lr": 0.1, "momentum": 0.5, "dampening": 0, "weight_decay": 0.25, "nesterov": True, "maximize": True}),
    (lambda p: Adam(p, lr=0.2, betas=(0.5, 0.75), eps=1e-3, amsgrad=True),
     {"lr": 0.2, "betas": [0.5, 0.75], "eps": 1e-3, "weight_decay": 0, "amsgrad": True, "maximize": False,
      "decoupled_weight_decay": False}),
    (lambda p: AdamW(p, lr=0.3), {"lr": 0.3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-2,
                                  "amsgrad": False, "maximize": False}),
])
def test_hyper_parameters_are_plain_numbers_by_torchs_names(make: Any, options: dict[str, Any]) -> None:
    optimizer = make(net().parameters())
    kind = type(optimizer).__name__.lower()
    assert group_options(Model([], {}, [["a"]], kind, ("", "")), optimizer) == [options]


def _model(groups: list[list[str] | None]) -> Model:
    return Model([], {}, groups, "sgd", ("torch-cpu", ""))


def _two_groups() -> torch.optim.Optimizer:
    one, other = net().first.parameters()
    return SGD([{"params": [one], "lr": 0.5}, {"params": [other], "lr": 0.25}])


def test_groups_that_optimize_nothing_are_left_out() -> None:
    assert [group["lr"] for group in group_options(_model([["a"], ["b"]]), _two_groups())] == [0.5, 0.25]
    assert [group["lr"] for group in group_options(_model([None, ["b"]]), _two_groups())] == [0.25]


def test_an_option_that_an_older_torch_does_not_have_is_left_out() -> None:
    optimizer = _two_groups()
    del optimizer.param_groups[0]["maximize"]
    first, second = group_options(_model([["a"], ["b"]]), optimizer)
    assert "maximize" not in first and second.keys() - first.keys() == {"maximize"}


@pytest.mark.parametrize(("groups", "what"), [
    ([["a"]], "has 2 parameter groups, and had 1"), ([["a"], ["b"], None], "has 2 parameter groups, and had 3"),
])
def test_groups_that_were_added_or_removed_are_refused(groups: Any, what: str) -> None:
    assert refusal(lambda: group_options(_model(groups), _two_groups())) == ("optimizer", what)


@pytest.mark.parametrize(("key", "value", "what"), [
    ("lr", float("nan"), "lr is nan"), ("lr", float("inf"), "lr is inf"), ("lr", "0.1", "lr is '0.1'"),
    ("lr", torch.tensor(0.5), "lr is tensor(0.5000)"), ("momentum", None, "momentum is None"),
    ("betas", (0.5, float("inf")), "betas is (0.5, inf)"), ("betas", (float("nan"), 0.5), "betas is (nan, 0.5)"),
    ("betas", [0.5, 0.5], "betas is [0.5, 0.5]"),
])
def test_what_is_not_a_finite_number_is_refused(key: str, value: object, what: str) -> None:
    optimizer = (Adam if key == "betas" else SGD)(net().parameters(), lr=0.1)
    optimizer.param_groups[0][key] = value
    model = Model([], {}, [["a"]], type(optimizer).__name__.lower(), ("", ""))
    assert refusal(lambda: group_options(model, optimizer)) == ("optimizer", what)


# -- before a step -------------------------------------------------------------------------------------------


def test_a_step_of_what_the_manifest_says() -> None:
    weight, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    model = Model([], {id(weight): "weight"}, [["weight"], None], "sgd", ("", ""))
    optimizer = SGD([{"params": [weight]}, {"params": [frozen]}], lr=0.1)
    weight.grad = torch.zeros(2)  # zeros are a gradient
    check_gradients(model, optimizer)
    weight.grad = None
    assert refusal(lambda: check_gradients(model, optimizer)) == ("optimizer", "parameter weight has no gradient")
    weight.grad, frozen.grad = torch.zeros(2), torch.zeros(3)
    assert refusal(lambda: check_gradients(model, optimizer)) == (
        "optimizer", "parameter one of shape (3,), group 1 has a gradient and had requires_grad off"
    )


# -- buckets -------------------------------------------------------------------------------------------------


def _slices(buckets: Any) -> list[list[tuple[str, int, int, int]]]:
    return [[(one.name, one.offset, one.length, one.start) for one in bucket.slices] for bucket in buckets]


def test_buckets_are_those_of_ddps_reducer(wrapped) -> None:
    """One bucket in the model's order at first. Then DDP builds them anew, in the order in which gradients came."""
    model = wrapped(net(), bucket_cap_mb=1e-5)
    names = {id(value): name for name, value in model.module.named_parameters()}
    buckets, counts, dtype = bucket_layout(model, names)
    assert (_slices(buckets), counts, dtype) == ([[
        ("first.weight", 0, 4, 0), ("first.bias", 4, 2, 0), ("last.weight", 6, 4, 0), ("last.bias", 10, 2, 0)]],
        [12], "float32")
    missing = {key: name for key, name in names.items() if name != "first.bias"}  # it keeps its place in the bucket
    assert _slices(bucket_layout(model, missing)[0]) == [
        [("first.weight", 0, 4, 0), ("last.weight", 6, 4, 0), ("last.bias", 10, 2, 0)]
    ]
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    buckets, counts, _ = bucket_layout(model, names)
    assert len(counts) > 1 and [sum(one.length for one in bucket.slices) for bucket in buckets] == counts
    assert {one.name for bucket in buckets for one in bucket.slices} == set(names.values())


def test_gradients_of_two_types_are_refused(wrapped) -> None:
    model = net()
    model.last.double()
    found = refusal(lambda: bucket_layout(wrapped(model), {}))
    assert found == ("DDP", "reduces gradients in float32, float64")


def _bucket(index: int, elements: int, *parameters: int) -> Any:
    return SimpleNamespace(
        index=lambda: index, buffer=lambda: torch.zeros(elements),
        parameters=lambda: [torch.zeros(length) for length in parameters],
    )


@pytest.mark.parametrize(("buckets", "what"), [
    ([_bucket(0, 5, 2, 3), _bucket(1, 6, 2, 3)], "bucket 1 has 6 elements, its tensors 5"),
    ([_bucket(0, 4, 2, 3)], "bucket 0 has 4 elements, its tensors 5"),
    ([], "reduces gradients in "),
])
def test_a_reducer_that_contradicts_itself_is_refused(buckets: list[Any], what: str) -> None:
    """No torch is known that does; a later one may pad its buckets."""
    model: Any = SimpleNamespace(reducer=SimpleNamespace(_get_zeros_like_grad_buckets=lambda: buckets))
    assert refusal(lambda: bucket_layout(model, {})) == ("DDP", what)


# -- watching ------------------------------------------------------------------------------------------------


def call(op: str, count: int, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {"op": op, "count": count, "dtype": dtype, **more}


class Training:
    """A DDP job of one bucket of 12 (or of another model), whose communicator's calls the test makes up."""

    def __init__(
        self, wrap: Any, said: list[dict[str, Any]], model: torch.nn.Module | None = None, **options: Any
    ) -> None:
        self.said, self.asked = said, list[int]()
        self.model = wrap(model or net(), **options)
        self.optimizer = SGD(self.model.parameters(), lr=0.5)
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

    def again(self, iteration: int, *calls: dict[str, Any]) -> None:
        self.said.extend(calls)
        self.watch.again(iteration)

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
        "name": "sgd", "rounding": "torch-cpu", "masters": "", "threads": 0,
        "torch_version": torch.__version__,
        "groups": [{"params": ["first.weight", "first.bias", "last.weight", "last.bias"], "options": {
            "lr": 0.5, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}}],
    }
    assert [entry["name"] for entry in job["model"]] == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert job["buckets"]["iteration_0"] == [] and [len(b["slices"]) for b in job["buckets"]["steady"]] == [4]
    assert training.asked == [0, 2, 4, 6]  # each call is asked for once


def test_buffers_are_a_value_of_the_step(wrapped) -> None:
    model = wrapped(torch.nn.BatchNorm1d(6))
    optimizer = SGD(model.parameters(), lr=0.5)
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
    optimizer = SGD([{"params": [inner.frozen], "lr": 1.0}, {"params": [inner.bias, inner.weight], "lr": 2.0}])
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
    assert training.watch.why == (
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
    assert training.watch.why == (
        f"an iteration reduced {found} elements where DDP has buckets of [12]; waiting for one that agrees"
    )
    job = training.look(REDUCE)
    assert [one.count for one in job.collectives.steady] == [12]
    assert len(job.collectives.startup) == 3 * len(calls)


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
        training.again(iteration, OTHER, REDUCE)
    assert training.asked == [0, 0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(("calls", "what"), [
    ([OTHER, REDUCE, REDUCE], f"3 calls on DDP's communicator where 2 are an iteration's; number 2 is {REDUCE}"),
    ([OTHER], "1 calls on DDP's communicator where 2 are an iteration's; number 1 is missing"),
    ([], "0 calls on DDP's communicator where 2 are an iteration's; number 0 is missing"),
    ([REDUCE], f"1 calls on DDP's communicator where 2 are an iteration's; number 0 is {REDUCE}"),
    ([OTHER, call("AllReduce", 13)],
     f"2 calls on DDP's communicator where 2 are an iteration's; number 1 is {call('AllReduce', 13)}"),
    ([call("Broadcast", 4, "int32"), REDUCE],
     f"2 calls on DDP's communicator where 2 are an iteration's; number 0 is {call('Broadcast', 4, 'int32')}"),
    ([OTHER, call("AllReduce", 12, "float16")],
     f"2 calls on DDP's communicator where 2 are an iteration's; number 1 is {call('AllReduce', 12, 'float16')}"),
    ([call("Reduce", 3, "int32"), REDUCE],
     f"2 calls on DDP's communicator where 2 are an iteration's; number 0 is {call('Reduce', 3, 'int32')}"),
    ([OTHER | {"root": 1}, REDUCE],
     f"2 calls on DDP's communicator where 2 are an iteration's; number 0 is {OTHER | {'root': 1}}"),
    ([REDUCE, OTHER], f"2 calls on DDP's communicator where 2 are an iteration's; number 0 is {REDUCE}"),
])
def test_an_iteration_unlike_those_before_is_refused(wrapped, calls: list[Any], what: str) -> None:
    """As many calls as before are not enough: one other count, type, root or order, and it is another iteration."""
    training = Training(wrapped, [])
    training.known(OTHER, REDUCE)
    training.again(3, OTHER, REDUCE)
    assert refusal(lambda: training.again(4, *calls)) == ("iteration 4", what)
