"""The job manifest from live DDP objects: what every entry becomes, and each refusal once."""

from __future__ import annotations

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
from flowcheck.trainer.describe.described import Model, Stepping, check_gradients, group_options
from flowcheck.trainer.describe.description import entries
from flowcheck.trainer.describe.parts import bucket_layout
from flowcheck.trainer.describe.wrapped import parts_of

from ..pair import leave
from .described import EveryKind, net, refusal

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


# -- entries -------------------------------------------------------------------------------------------------


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
    assert (found.stepping.name, found.stepping.rounding) == ("sgd", ("torch-cpu", torch.__version__))


@pytest.mark.parametrize(("make", "name", "rounding"), [
    (lambda p: SGD(p, lr=0.1), "sgd", "torch-cpu"), (Adam, "adam", "torch-cpu"), (AdamW, "adamw", "torch-cpu"),
    (lambda p: AdamW(p, fused=True), "adamw", "torch-cpu-fused"),
])
def test_the_optimizers_that_are_followed(wrapped, make: Any, name: str, rounding: str) -> None:
    model = wrapped(net())
    found = entries(model, make(model.parameters()))
    assert (found.stepping.name, found.stepping.rounding[0]) == (name, rounding)


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
        where, what = refusal(lambda: parts_of(model))
        with pytest.raises(UserError) as caught:
            parts_of(model)
    finally:
        dist.destroy_process_group()
    assert where == "model" and "is sharded by fully_shard without replicas: ReduceScatter" in what
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
    (_hooked, "uses a communication hook (torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook)"
     ": what it sends is its own"),
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


def _with_buffer(dtype: torch.dtype) -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    layer.register_buffer("mask", torch.zeros(2, dtype=dtype))
    return layer


def _with_parameter(name: str) -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    layer.register_parameter(name, torch.nn.Parameter(torch.zeros(2)))
    return layer


def _with_named_buffer(name: str) -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    layer.register_buffer(name, torch.zeros(2))
    return layer


METADATA = "the name '__metadata__' is safetensors' own: nobody could read a checkpoint that has it"


@pytest.mark.parametrize(("make", "where", "what"), [
    (lambda: _with_parameter("__metadata__"), "state_dict: '__metadata__'", METADATA),
    (lambda: _with_named_buffer("__metadata__"), "state_dict: '__metadata__'", METADATA),
    (lambda: _with_named_buffer("half\ud800"), "state_dict: 'half\\ud800'",
     "the name has half of a surrogate pair, which no file can hold"),
    (lambda: _with_buffer(torch.complex128), "state_dict: mask", "is torch.complex128"),
    (lambda: torch.nn.Linear(2, 2, dtype=torch.float64), "state_dict: weight", "is optimized in torch.float64"),
    (lambda: torch.nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last), "state_dict: weight",
     "is not in row-major order, and so is its gradient"),
])
def test_entries_that_are_refused(wrapped, make: Any, where: str, what: str) -> None:
    model = wrapped(make())
    assert refusal(lambda: entries(model, SGD(model.parameters(), lr=0.1))) == (where, what)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                                   torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
                                   torch.complex64], ids=str)
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
    assert group_options(Model([], {}, [["a"]], Stepping(kind, ("", ""))), optimizer) == [options]


def _model(groups: list[list[str] | None]) -> Model:
    return Model([], {}, groups, Stepping("sgd", ("torch-cpu", "")))


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
    model = Model([], {}, [["a"]], Stepping(type(optimizer).__name__.lower(), ("", "")))
    assert refusal(lambda: group_options(model, optimizer)) == ("optimizer", what)


# -- before a step -------------------------------------------------------------------------------------------


def test_a_step_of_what_the_manifest_says() -> None:
    weight, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    model = Model([], {id(weight): "weight"}, [["weight"], None], Stepping("sgd", ("", "")))
    optimizer = SGD([{"params": [weight]}, {"params": [frozen]}], lr=0.1)
    weight.grad = torch.zeros(2)  # zeros are a gradient
    check_gradients(model, optimizer)
    weight.grad = None
    assert refusal(lambda: check_gradients(model, optimizer)) == ("optimizer", "parameter weight has no gradient")
    weight.grad, frozen.grad = torch.zeros(2), torch.zeros(3)
    assert refusal(lambda: check_gradients(model, optimizer)) == (
        "optimizer", "parameter one of shape (3,), group 1 has a gradient and had requires_grad off"
    )


def test_a_step_with_a_beta_whose_powers_are_not_in_the_manifest() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    model = Model([], {id(weight): "weight"}, [["weight"]], Stepping("adamw", ("torch-cuda-fused", "2.11.0"), 0,
                  {"0.9": {}, "0.999": {}}))
    optimizer = AdamW([weight])
    weight.grad = torch.zeros(2)
    check_gradients(model, optimizer)
    optimizer.param_groups[0]["betas"] = (0.95, 0.999)  # as OneCycleLR does
    where, what = refusal(lambda: check_gradients(model, optimizer))
    assert where == "torch.optim" and what.startswith("the optimizer has a beta of 0.95 that it had not before")


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
