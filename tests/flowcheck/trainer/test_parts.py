"""Several groups of one rank: which parameter is whose, under which name, and what is refused by its name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import flowcheck
from flowcheck.errors import UserError
from flowcheck.job.model import LOG
from flowcheck.trainer.describe.description import entries
from flowcheck.trainer.describe.optimizers import optimizer_of
from flowcheck.trainer.describe.parts import position
from flowcheck.trainer.describe.wrapped import MEGATRON, parts_of, refuse_model, refuse_optimizer

from ..hand_node import TOKEN, until
from ..pair import join, leave
from .described import call, net, refusal
from .training import COMMUNICATOR, FLOW, clock_of_waiting

SGD = torch.optim.SGD


class Layered(torch.nn.Module):
    """A dense layer, and experts that are in a DDP of their own."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.dense, self.experts = torch.nn.Linear(2, 2), experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.dense(x))


def two(wrapped: Any, ignore: bool = True) -> tuple[DistributedDataParallel, DistributedDataParallel]:
    inner = wrapped(torch.nn.Linear(2, 3))
    model = Layered(inner)
    names = [name for name, _ in model.named_parameters() if name.startswith("experts.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names if ignore else [])
    return wrapped(model), inner


# -- whose is what -------------------------------------------------------------------------------------------


def test_each_parameter_is_in_the_part_that_reduces_it(wrapped) -> None:
    outer, inner = two(wrapped)
    optimizer = SGD([{"params": [inner.module.weight, outer.module.dense.weight]},
                     {"params": [inner.module.bias, outer.module.dense.bias]}], lr=0.1)
    parts = parts_of({"dense": outer, "expert0": inner})
    assert [part.name for part in parts] == ["dense", "expert0"]
    found = [entries(part, optimizer) for part in parts]
    assert [[entry.name for entry in one.entries] for one in found] == [
        ["dense.weight", "dense.bias"], ["weight", "bias"]]
    assert [one.groups for one in found] == [[["dense.weight"], ["dense.bias"]], [["weight"], ["bias"]]]
    buckets = [part.layout(one.names) for part, one in zip(parts, found, strict=True)]
    assert [[bucket is not None and bucket[1]] for bucket in buckets] == [[[6]], [[9]]]


def test_a_parameter_that_two_parts_reduce_is_refused(wrapped) -> None:
    outer, inner = two(wrapped, ignore=False)
    where, what = refusal(lambda: parts_of({"a": outer, "b": inner}))
    assert where == "model" and what.startswith("weight is reduced by two parts, 'a' and 'b'")


def test_a_parameter_that_the_optimizer_has_and_nobody_reduces(wrapped) -> None:
    outer, _ = two(wrapped)
    (part,) = parts_of(outer)
    found = refusal(lambda: entries(part, SGD(outer.parameters(), lr=0.1)))
    assert found == ("state_dict: experts.module.weight", "is optimized, and DDP does not reduce it")


def test_an_optimizer_of_none_of_the_parts(wrapped) -> None:
    outer, inner = two(wrapped)
    parts = parts_of({"a": outer, "b": inner})
    other = torch.nn.Parameter(torch.zeros(5))
    where, what = refusal(lambda: entries(parts[0], SGD([*outer.parameters(), other], lr=0.1)))
    assert (where, what) == ("optimizer", "has a parameter of shape (5,) that is not in the model's state_dict")


def test_what_the_script_reduces_itself_is_its_own_part(wrapped) -> None:
    """DDP reduces it, too, before that: in DDP's part it is padding."""
    model = wrapped(net())
    weight = model.module.last.weight
    optimizer = SGD(model.parameters(), lr=0.1)
    parts = parts_of({"stage0": model, "embedding0": flowcheck.Reduced({"embedding": weight}, model.process_group)})
    found = [entries(part, optimizer) for part in parts]
    assert [[entry.name for entry in one.entries] for one in found] == [
        ["first.weight", "first.bias", "last.bias"], ["embedding"]]
    (bucket,), counts, dtype = parts[0].layout(found[0].names)
    assert counts == [12] and sum(piece.length for piece in bucket.slices) == 8
    (bucket,), counts, dtype = parts[1].layout(found[1].names)
    assert [(s.name, s.offset, s.length) for s in bucket.slices] == [("embedding", 0, 4)]
    assert (counts, dtype, parts[1].by) == ([4], "float32", "the script")
    assert torch.equal(parts[1].state_dict()["embedding"], weight)


def test_reductions_of_a_script_that_are_refused(wrapped) -> None:
    model = wrapped(net())
    group, weight = model.process_group, model.module.last.weight
    one = flowcheck.Reduced({"embedding": weight}, group)
    where, what = refusal(lambda: parts_of({"a": one, "b": flowcheck.Reduced({"other": weight}, group)}))
    assert where == "model" and what.startswith("other is reduced by two parts, 'a' and 'b'")
    for named in ({}, {"embedding": weight.detach()}):
        assert refusal(lambda named=named: parts_of(flowcheck.Reduced(named, group))) == (
            "flowcheck.Reduced", "names no parameters")
    half = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    (part,) = parts_of(flowcheck.Reduced({"a": weight, "b": half}, group))
    assert refusal(lambda: part.layout({})) == ("flowcheck.Reduced", "reduces gradients in bfloat16, float32")


# -- names ---------------------------------------------------------------------------------------------------


@pytest.fixture
def eight() -> Iterator[None]:
    """Rank 5 of 8."""
    leave()
    join(5, 8)
    yield
    leave()


def mesh_of(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    size = torch.Size(shape).numel()
    return DeviceMesh("cpu", torch.arange(size).view(shape), mesh_dim_names=names, _init_backend=False)


@pytest.mark.parametrize(("shape", "names", "reduced", "position_of"), [
    ((4, 2), ("replicate", "shard"), 0, "shard1"), ((2, 4), ("replicate", "shard"), 0, "shard1"),
    ((2, 4), ("replicate", "shard"), 1, "replicate1"), ((2, 2, 2), ("pp", "replicate", "shard"), 1, "pp1.shard1"),
    ((8, 1), ("replicate", "shard"), 0, ""), ((8,), ("dp",), 0, ""), ((2, 1, 4), ("pp", "dp", "tp"), 1, "pp1.tp1"),
])
def test_the_place_in_a_mesh(eight, shape: tuple[int, ...], names: tuple[str, ...], reduced: int, position_of: str
                             ) -> None:
    assert position(mesh_of(shape, *names), reduced) == position_of


def test_the_place_in_a_mesh_that_was_cut_out_of_another(eight) -> None:
    class Cut:
        """What DeviceMesh.__getitem__ gives of "replicate" and "shard", without its process groups."""

        def __init__(self, root: DeviceMesh) -> None:
            self._root, self.mesh, self.mesh_dim_names = root, root.mesh[1], ("replicate", "shard")

        def _get_root_mesh(self) -> DeviceMesh:
            return self._root

        def get_coordinate(self) -> list[int]:
            return [0, 1]

        def size(self, dim: int) -> int:
            return 2

    assert position(Cut(mesh_of((2, 2, 2), "pp", "replicate", "shard")), 0) == "pp1.shard1"


@pytest.mark.parametrize(("names", "what"), [
    (lambda a, b: [a, b], "one of several has no place in a mesh of devices"),
    (lambda a, b: {"": a, "b": b}, "one of several has no place in a mesh of devices"),
    (lambda a, b: {}, "there is none"),
])
def test_parts_that_nobody_could_tell_apart(wrapped, names: Callable[..., Any], what: str) -> None:
    assert refusal(lambda: parts_of(names(*two(wrapped)))) == ("model", what)


# -- refused by name -----------------------------------------------------------------------------------------


def made(module: str, name: str, base: type = object) -> Any:
    return type("Derived", (type(name, (base,), {"__module__": module}),), {"__module__": "script"})()


@pytest.mark.parametrize(("module", "name", "what"), [
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "is DeepSpeed's engine"),
    ("deepspeed.runtime.pipe.engine", "PipelineEngine", "is DeepSpeed's pipeline engine"),
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel", "is Megatron-Core's own"),
    ("fairscale.nn.data_parallel.fully_sharded_data_parallel", "FullyShardedDataParallel", "is sharded by FairScale"),
    ("deepspeedy", "DeepSpeedEngine", "is a Derived"), ("deepspeed.runtime", "Other", "is a Derived"),
])
def test_models_of_others(module: str, name: str, what: str) -> None:
    found = refuse_model(made(module, name, torch.nn.Module))
    assert found.what.startswith(what) and found.where == "model"
    assert ("docs/use/qualify.md" in found.remedy) == (what != "is a Derived")
    where, said = refusal(lambda: parts_of(made(module, name, torch.nn.Module), None, LOG))  # nor is a log kept of it
    assert where == "model" and said.startswith(what)


@pytest.mark.parametrize(("settings", "what"), [
    ({}, "without its distributed optimizer its AllReduces"),
    ({"num_distributed_optimizer_instances": 4}, "without its distributed optimizer its AllReduces"),
    ({"use_distributed_optimizer": True}, "ReduceScatter for its distributed optimizer"),
])
def test_what_megatron_puts_on_the_wire(settings: dict[str, Any], what: str) -> None:
    model = made("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel", torch.nn.Module)
    model.ddp_config = SimpleNamespace(**settings)
    found = refuse_model(model)
    assert found.what.startswith(f"{MEGATRON}: {what}")
    assert "over a mesh of replicas and shards" in found.remedy and "replay" in found.remedy
    assert found.remedy.startswith("num_distributed_optimizer_instances of 2 or more")


def test_several_instances_of_a_megatron_that_is_not_known() -> None:
    """test_megatron.py has Megatron-Core's own, where that is installed."""
    model = made("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel", torch.nn.Module)
    model.ddp_config = SimpleNamespace(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    optimizer = made("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer")
    assert refusal(lambda: parts_of([model], optimizer)) == (
        "Megatron-Core", "is another one than is known: its DistributedDataParallel has no module")


@pytest.mark.parametrize("module", ["megatron.core.optimizer.optimizer", "accelerate.optimizer"])
def test_torchs_optimizer_is_looked_for_in_megatrons_alone(module: str) -> None:
    inner = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    one = made(module, "ChainedOptimizer")
    one.optimizer = inner
    assert optimizer_of(one) is (inner if module.startswith("megatron") else one)
    assert optimizer_of(inner) is inner
    one.chained_optimizers = [one, made(module, "MegatronOptimizer")]
    assert optimizer_of(one) is one


@pytest.mark.parametrize(("module", "name", "what"), [
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer", "(ZeRO-1)"),
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "is DeepSpeed's ZeRO-3"),
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "is DeepSpeed's ZeRO-1 or ZeRO-2"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer", "is Megatron-Core's distributed optimizer"),
])
def test_optimizers_of_others(module: str, name: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        refuse_optimizer(made(module, name))
    assert what in caught.value.what and caught.value.where == "optimizer" and "replay" in caught.value.remedy
    refuse_optimizer(made("script", name))  # of which `entries` says that it is not followed


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by the import of it
def test_the_real_zero_redundancy_optimizer_is_known_by_name(wrapped) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = wrapped(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=SGD, lr=0.1)
    attachment = flowcheck.attach(model, optimizer, node="127.0.0.1:1", token=TOKEN.decode())
    assert attachment.state == "refused" and "ZeRO-1" in attachment.why
    attachment.close(0.0)


# -- an attachment of two parts ------------------------------------------------------------------------------


class Both:
    """A training loop of a dense part and experts, whose communicators' calls are made up."""

    def __init__(self, wrapped: Any, node: Any, **options: Any) -> None:
        torch.manual_seed(1)
        self.outer, self.inner = two(wrapped)
        self.optimizer = SGD(self.outer.parameters(), lr=1.0)
        self.said: dict[str, list[dict[str, Any]]] = {"dense": [], "expert0": []}
        topology = {name: lambda: {"communicator": COMMUNICATOR, "flows": [FLOW]} for name in self.said}
        calls = {name: lambda since, one=one: one[since:] for name, one in self.said.items()}
        self.attachment = flowcheck.attach(
            {"dense": self.outer, "expert0": self.inner}, self.optimizer, node="{}:{}".format(*node.address),
            token=TOKEN.decode(), **{"max_stall_s": 0.0, "topology": topology, "collectives": calls} | options,
        )

    def iterate(self, times: int = 1, calls: tuple[int, int] = (1, 1)) -> None:
        for _ in range(times):
            self.outer(torch.ones(3, 2)).square().sum().backward()
            for (name, said), count in zip(self.said.items(), calls, strict=True):
                said += [call("AllReduce", 6 if name == "dense" else 9)] * count
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.attachment.step(user={"seen": 1})


@pytest.fixture
def both(wrapped, hand_node) -> Iterator[Callable[..., Both]]:
    started: list[Both] = []

    def start(**options: Any) -> Both:
        started.append(Both(wrapped, hand_node, **options))
        return started[-1]

    yield start
    for one in started:
        one.attachment.close(0.0)


def test_each_part_is_a_group_of_the_nodes_with_records_of_the_same_iterations(both, hand_node) -> None:
    one = both(group="job", checksum_every=1)
    peers: dict[str, Any] = {}
    for _ in range(2):
        peer = hand_node.accept()
        peers[peer.welcome()["group"]] = peer
    assert set(peers) == set(one.attachment.parts) == {"job.dense", "job.expert0"}
    until(lambda: all(sender.connected and not sender._again.is_set() for sender in one.attachment._senders))
    one.iterate(3)
    sizes = {}
    for name, peer in peers.items():
        peer.expect("flows")
        job = peer.expect("manifest")["job"]
        sizes[name] = [entry["name"] for entry in job["model"]], [c["count"] for c in job["collectives"]["steady"]]
    assert sizes == {"job.dense": (["dense.weight", "dense.bias"], [6]), "job.expert0": (["weight", "bias"], [9])}
    assert one.attachment.state == "attaching"
    peers["job.dense"].send("joined", iteration=3)
    until(lambda: one.attachment._parts[0].state == "attached")
    assert one.attachment.state == "attaching"  # of two the worse
    assert one.attachment.why == "job.expert0: the node has not joined yet"
    peers["job.expert0"].send("joined", iteration=3)
    until(lambda: one.attachment.state == "attached")
    peers["job.dense"].send("progress", iteration=5, status="verified")
    peers["job.expert0"].send("progress", iteration=4, status="unverified")
    until(lambda: one.attachment.published == (4, "unverified"))
    one.iterate()
    records = {name: peer.expect("record") for name, peer in peers.items()}
    assert {name: (record["iteration"], sorted(record["checksums"])) for name, record in records.items()} == {
        "job.dense": (3, ["dense.bias", "dense.weight"]), "job.expert0": (3, ["bias", "weight"])}


def test_an_odd_call_of_one_part_costs_the_other_nothing(both, hand_node) -> None:
    one = both()
    peers: dict[str, Any] = {}
    for _ in range(2):
        peer = hand_node.accept()
        peers[peer.welcome()["group"]] = peer
    until(lambda: all(sender.connected and not sender._again.is_set() for sender in one.attachment._senders))
    one.iterate(3)
    for peer in peers.values():
        peer.expect("flows"), peer.expect("manifest")
        peer.send("joined", iteration=3)
    until(lambda: one.attachment.state == "attached")
    one.iterate(calls=(1, 2))
    assert one.attachment.state == "watching" and "expert0: iteration 3 made 2 calls" in one.attachment.why
    assert peers["dense"].expect("record")["iteration"] == 3
    one.iterate()
    assert peers["dense"].expect("record")["iteration"] == 4
    peers["expert0"].expect("flows")
    assert peers["expert0"].expect("manifest")["first"] == 4


@pytest.mark.parametrize(("takes", "told"), [(0.0, [0.25, 0.25]), (0.125, [0.25, 0.125]), (1.0, [0.25, 0.0])])
def test_parts_wait_no_longer_than_one_would(both, monkeypatch, takes: float, told: list[float]) -> None:
    """Where no node has answered by the boundary at which the job is known: what one waits is no more the other's."""
    now, waited = [1000.0], list[float | None]()

    class Tried(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            now[0] += takes
            return False

    one = both(max_stall_s=0.25)
    clock_of_waiting(monkeypatch, lambda: now[0])
    for sender in one.attachment._senders:
        sender.tried = Tried()
    one.iterate(4)
    assert waited == told


@pytest.mark.parametrize(("options", "what"), [
    ({"topology": dict}, "topology: one for 2 parts, each of which has a communicator of its own"),
    ({"collectives": {"dense": lambda since: []}}, "collectives: none of 'expert0'; there are: 'dense'"),
])
def test_sources_of_several_parts(both, options: dict[str, Any], what: str) -> None:
    attachment = both(**options).attachment
    assert attachment.state == "refused" and what in attachment.why and attachment.parts in ([], ["dense"])
