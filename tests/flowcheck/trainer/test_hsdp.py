"""What fully_shard reduces over a mesh of replicas and shards, seen by one rank whose others need no process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from flowcheck.trainer.changes import Changes
from flowcheck.trainer.describe.described import check_gradients
from flowcheck.trainer.describe.description import Watch, entries
from flowcheck.trainer.describe.parts import local
from flowcheck.trainer.describe.wrapped import parts_of
from flowcheck.trainer.ranges import Source
from flowcheck.trainer.recover.recovery import Recovered

from ..pair import join, leave
from .described import call, refusal

# fully_shard imports torch's compiler, which scripts a function of its own with what torch itself calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
WIDTH = 3  # of two shards the first has two rows, the second one and a row of padding
LAYER = 2 * WIDTH + 2  # elements that a layer's AllReduce has: rows of its weight, and of its bias


class Chain(torch.nn.Module):
    """Two layers of one size, in either order, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.tensor(0))
        self.turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.two, self.one) if self.turned else (self.one, self.two)
        return layers[1](layers[0](x))


def mesh_of(*names: str) -> DeviceMesh:
    """2 x 2, of which this is rank 0; one group does for both dimensions."""
    return DeviceMesh.from_group([dist.group.WORLD] * 2, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=names)


@pytest.fixture
def world() -> Iterator[None]:
    leave()
    join()
    yield
    leave()


class Sharded:
    """A model in shards, its part, and a training loop."""

    def __init__(self, model: Any = None, mesh: Any = None, **options: Any) -> None:
        self.model: Any = model or Chain()
        mesh = mesh or mesh_of("replicate", "shard")
        for layer in self.model.children():
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(self.model, mesh=mesh, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)

    def part(self) -> Any:
        (part,) = parts_of(self.model)
        return part

    def backward(self) -> None:
        self.model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()


def test_entries_are_this_ranks_shards(world) -> None:
    one = Sharded()
    part = one.part()
    found = entries(part, one.optimizer)
    assert (part.name, part.by) == ("shard0", "fully_shard")
    assert [(e.name, e.shape, e.kind) for e in found.entries] == [
        ("count", [], "buffer"), ("one.weight", [2, 3], "optimized"), ("one.bias", [2], "optimized"),
        ("two.weight", [2, 3], "optimized"), ("two.bias", [2], "optimized"),
    ]
    assert {name: list(value.shape) for name, value in part.state_dict().items()} == {
        e.name: e.shape for e in found.entries}
    assert all(type(value) is torch.Tensor for value in part.state_dict().values())
    assert torch.equal(part.state_dict()["one.weight"], one.model.one.weight.to_local())


def watched(one: Sharded, *, times: int = 3, dtype: str = "float32") -> tuple[Any, Any, Watch]:
    """(part, job, watch) after iterations whose calls are two layers' AllReduces."""
    part = one.part()
    said: list[dict[str, Any]] = []
    watch = Watch(part, one.optimizer, entries(part, one.optimizer), lambda since: said[since:],
                  lambda: {"ranks": 2, "nccl_version": "2.27.7"}, "", 0)
    job = None
    for _ in range(times):
        one.backward()
        said += [call("AllReduce", LAYER, dtype)] * 2
        part.check()
        one.optimizer.step()
        one.optimizer.zero_grad()
        part.over()
        job = watch.look()
    return part, job, watch


def test_a_bucket_is_a_parameter_groups_padded_shard_in_the_order_of_the_calls(world) -> None:
    _, job, _ = watched(Sharded())
    assert [[(s.name, s.offset, s.length) for s in b.slices] for b in job.buckets.steady] == [
        [("two.weight", 0, 6), ("two.bias", 6, 2)], [("one.weight", 0, 6), ("one.bias", 6, 2)]]
    assert [(one.op, one.count, one.carries, one.bucket) for one in job.collectives.steady] == [
        ("AllReduce", LAYER, "gradient", 0), ("AllReduce", LAYER, "gradient", 1)]
    assert (job.gradients.dtype, job.gradients.divisor) == ("float32", 1)


def test_padding_lies_behind_a_shard(world) -> None:
    """The second of two shards: one row of weight and bias, where the first has two."""
    leave()
    join(rank=1)
    one = Sharded()
    part, job, _ = watched(one)
    assert part.name == "shard1"
    assert [[(s.name, s.offset, s.length) for s in b.slices] for b in job.buckets.steady] == [
        [("two.weight", 0, 3), ("two.bias", 6, 1)], [("one.weight", 0, 3), ("one.bias", 6, 1)]]
    assert [call.count for call in job.collectives.steady] == [LAYER, LAYER]


def test_layers_that_change_places_are_seen_although_their_calls_are_the_same(world) -> None:
    one = Sharded()
    part, _, _ = watched(one)
    part.known(True)
    for turned, changed in ((False, False), (True, True), (False, False)):
        one.model.turned = turned
        one.backward()
        one.optimizer.zero_grad()
        part.over()
        assert part.changed is changed
    one.model.one.set_gradient_divide_factor(2.0)
    assert part.changed
    one.model.turned = True
    part.known(False)
    one.backward()
    part.over()
    assert not part.changed  # the job is not known, so nothing contradicts it


@pytest.mark.parametrize(("policy", "setting", "wire"), [
    ({}, None, ("float32", 1)),
    ({"reduce_dtype": torch.bfloat16}, None, ("bfloat16", 1)),
    ({"param_dtype": torch.bfloat16}, None, ("bfloat16", 1)),
    ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, None, ("float32", 1)),
    ({"reduce_dtype": torch.float16}, None, ("float16", 2)),  # halved before and after
    ({}, lambda model: model.set_force_sum_reduction_for_comms(True), ("float32", 4)),
    ({}, lambda model: model.set_gradient_divide_factor(2.0), ("float32", 1)),
    ({"reduce_dtype": torch.bfloat16}, lambda model: model.set_force_sum_reduction_for_comms(True), ("bfloat16", 4)),
])
def test_type_and_divisor_are_torchs(world, policy: dict[str, Any], setting: Any, wire: tuple[str, int]) -> None:
    one = Sharded(mp_policy=MixedPrecisionPolicy(**policy))
    if setting is not None:
        for module in (one.model.one, one.model.two, one.model):
            setting(module)
    _, job, _ = watched(one, dtype=wire[0])
    assert (job.gradients.dtype, job.gradients.divisor) == wire


def test_an_accumulation_that_reduces_once_is_no_trouble(world) -> None:
    one = Sharded()
    part = one.part()
    for setting in (one.model.set_requires_all_reduce, one.model.set_requires_gradient_sync):
        setting(False)
        one.backward()
        setting(True)
        one.backward()
        part.check()
        part.over()
        one.optimizer.zero_grad()
        assert part.layout(entries(part, one.optimizer).names)[1] == [LAYER, LAYER]


@pytest.mark.parametrize("clear", [lambda optimizer: None, lambda optimizer: optimizer.zero_grad(set_to_none=False)],
                         ids=["none at all", "zeros in place"])
def test_gradients_that_were_added_to_others_are_refused(world, clear: Callable[[Any], None]) -> None:
    """What the second AllReduce carries is not what the optimizer gets."""
    one = Sharded()
    part = one.part()
    one.backward()
    part.check()
    clear(one.optimizer)
    one.backward()
    where, what = refusal(part.check)
    assert where == "fully_shard" and what.startswith("gradients were added to those of an earlier AllReduce")


def test_an_iteration_that_reduces_twice_is_no_layout(world) -> None:
    one = Sharded()
    part = one.part()
    one.backward()
    one.optimizer.zero_grad()
    one.backward()
    part.over()
    assert part.layout({}) is None
    part.over()
    assert part.layout({}) is None  # nothing was reduced


def _one_type(one: Sharded) -> None:
    one.model.two.set_force_sum_reduction_for_comms(True)


def _hook(one: Sharded) -> None:
    one.model.one.set_all_reduce_hook(lambda reduced: None)


def _half(one: Sharded) -> None:
    for module in (one.model.one, one.model.two):
        module.set_gradient_divide_factor(2.5)
        module.set_force_sum_reduction_for_comms(True)


@pytest.mark.parametrize(("change", "what"), [
    (_one_type, "reduces gradients as float32 over 1 and float32 over 4"),
    (_hook, "has an all-reduce hook (_hook.<locals>.<lambda>), which may do anything"),
    (_half, "divides reduced gradients by 2.5"),
])
def test_reductions_that_are_refused(world, change: Callable[[Sharded], None], what: str) -> None:
    one = Sharded()
    change(one)
    part = one.part()
    one.backward()
    part.over()
    assert refusal(lambda: part.layout({})) == ("fully_shard", what)


def test_bf16_parameters_whose_gradients_are_rounded_to_them_are_refused(world) -> None:
    one = Sharded(Chain().to(torch.bfloat16), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    part = one.part()
    one.model(torch.ones(2, WIDTH, requires_grad=True, dtype=torch.bfloat16)).sum().backward()
    part.over()
    assert refusal(lambda: part.layout({}))[1] == "reduces gradients of torch.bfloat16 parameters in torch.float32"


def test_shards_without_replicas_are_told_what_serves_them(world) -> None:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    where, what = refusal(lambda: parts_of(Sharded(mesh=mesh).model))
    assert where == "model" and "is sharded by fully_shard without replicas: ReduceScatter" in what


def test_offloaded_parameters_are_refused(world) -> None:
    model = Sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)).model
    assert refusal(lambda: parts_of(model)) == ("fully_shard", "uses CPUOffloadPolicy")


def test_ranges_of_a_shard_are_its_own_elements(world) -> None:
    from flowcheck.control.messages import Ranges

    one = Sharded()
    part, _, _ = watched(one)
    source = Source(part, one.optimizer, entries(part, one.optimizer))
    patch, copies = source.answer(source.prepare(Ranges(1, [["one.weight", 1, 3]]), 1 << 20), 7)
    assert copies is not None and not patch.refused
    held = copies.on_host()
    flat = one.model.one.weight.to_local().detach().reshape(-1)
    momentum = one.optimizer.state[one.model.one.weight]["momentum_buffer"].to_local().reshape(-1)
    assert torch.equal(held["model.one.weight"], flat[1:4])
    assert torch.equal(held["optimizer.one.weight.momentum_buffer"], momentum[1:4])
    assert "has 6 elements" in source.prepare(Ranges(1, [["one.weight", 4, 3]]), 1 << 20).patch.refused


def test_what_no_step_may_leave_alone(world) -> None:
    one = Sharded()
    part = one.part()
    described = entries(part, one.optimizer)
    one.backward()
    check_gradients(described, one.optimizer)
    one.model.two.bias.grad = None
    assert refusal(lambda: check_gradients(described, one.optimizer))[1] == "parameter two.bias has no gradient"


def test_two_meshes_are_two_parts(world) -> None:
    """Layers in replicas of their own, as experts have them: the names of the dimensions tell them apart."""
    other = dist.new_group([0], use_local_synchronization=True)
    mesh = DeviceMesh.from_group([other, dist.group.WORLD], "cpu", mesh=torch.arange(4).view(2, 2),
                                 mesh_dim_names=("expert_replicate", "expert"))
    model = Chain()
    fully_shard(model.two, mesh=mesh)
    fully_shard(model, mesh=mesh_of("replicate", "shard"))
    parts = parts_of(model)
    assert {part.name: sorted(part.state_dict()) for part in parts} == {
        "shard0": ["count", "one.bias", "one.weight"], "expert0": ["two.bias", "two.weight"]}


def test_other_modules_in_a_sharded_model(world) -> None:
    model = torch.nn.Sequential(OrderedDict(one=torch.nn.Linear(2, 2), two=torch.nn.Linear(2, 2)))
    mesh = mesh_of("replicate", "shard")
    fully_shard(model.one, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=set(model.two.parameters()))
    (part,) = parts_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where, what = refusal(lambda: entries(part, optimizer))
    assert (where, what) == ("state_dict: two.weight", "is optimized, and fully_shard does not reduce it")


# -- back into shards ----------------------------------------------------------------------------------------


def version_of(one: Sharded) -> Recovered:
    """What `recover` gives of this rank's shard: plain tensors, in torch's own numbering."""
    state = one.optimizer.state_dict()
    held = {number: {key: local(value).clone() for key, value in values.items()}
            for number, values in state["state"].items()}
    model = {name: local(value).clone() for name, value in one.model.state_dict().items()}
    return Recovered(3, 1, "run", "shard0", model, {**state, "state": held}, source="a node")


def test_a_version_is_put_into_shards(world) -> None:
    trained, fresh = Sharded(), Sharded()
    for _ in range(2):
        trained.backward()
        trained.optimizer.step()
        trained.optimizer.zero_grad()
    version_of(trained).load(fresh.model, fresh.optimizer)
    for one in (trained, fresh):  # and it goes on as the one that it was taken of
        one.backward()
        one.optimizer.step()
    for (name, value), other in zip(trained.model.named_parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(value.to_local(), other.to_local()), name
        mine, theirs = (made.optimizer.state[p]["momentum_buffer"] for made, p in ((trained, value), (fresh, other)))
        assert torch.equal(mine.to_local(), theirs.to_local()) and theirs.placements == other.placements


def test_a_shard_goes_to_the_device_of_the_one_that_it_replaces(world) -> None:
    """There is none but this here: what is asked of each is looked at."""
    asked: list[Any] = []

    class Came(torch.Tensor):
        def to(self, device: Any) -> torch.Tensor:  # type: ignore[override]
            asked.append(device)
            return self.as_subclass(torch.Tensor)

    one = Sharded()
    version = version_of(one)
    version.model.update({name: value.as_subclass(Came) for name, value in version.model.items()})
    version.load(one.model, one.optimizer)
    assert asked == [torch.device("cpu")] * 4, "what every rank has whole is torch's business"


@pytest.mark.parametrize(("change", "what"), [
    (lambda version: version.model.update({"one.bias": torch.zeros(3)}), "one.bias has the shape [3], and here [2]"),
    (lambda version: version.model.pop("one.bias"), "has 4 entries and 4 optimized parameters; here are 5 and 4"),
    (lambda version: version.optimizer["param_groups"][0]["params"].pop(), "has 5 entries and 3 optimized parameters"),
])
def test_a_version_of_another_layout_is_refused(world, change: Callable[[Recovered], Any], what: str) -> None:
    one = Sharded()
    version = version_of(one)
    change(version)
    assert what in refusal(lambda: version.load(one.model, one.optimizer))[1]


@torch.no_grad()
def _halve_a_shard(one: Sharded) -> None:
    one.model.two.weight.mul_(0.5)


CHANGED: dict[str, tuple[Callable[[Sharded], Any], Callable[[Sharded], Any]]] = {  # between reduction and step; after
    "nothing": (lambda one: None, lambda one: None),
    "a gradient": (lambda one: one.model.one.weight.grad.mul_(2), lambda one: None),
    "a gradient's shard": (lambda one: one.model.one.bias.grad.to_local().add_(1), lambda one: None),
    "another gradient": (lambda one: setattr(one.model.one.bias, "grad", one.model.one.bias.grad.clone()),
                         lambda one: None),
    "a parameter": (lambda one: None, _halve_a_shard),
    "a parameter's shard": (lambda one: None, lambda one: local(one.model.two.bias).add_(1)),
    "momentum": (lambda one: None, lambda one: one.optimizer.state[one.model.one.weight]["momentum_buffer"].zero_()),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_is_changed_in_shards_is_seen(world, what: str) -> None:
    one = Sharded()
    part, job, _ = watched(one)
    assert job is not None
    changes = Changes(one.optimizer, [part.gradients()], [], {})
    part.listen(lambda whole: changes.reduced(0, whole))
    between, after = CHANGED[what]
    for turn in range(2):  # what a step does by itself is known after the first
        one.backward()
        if turn:
            between(one)
        changes.ready(True)
        one.optimizer.step()
        changes.stepped()
        one.optimizer.zero_grad()
        if turn:
            after(one)
        found = changes.over([1])
        assert (found is None) == (not turn or what == "nothing"), found
    part.close()
