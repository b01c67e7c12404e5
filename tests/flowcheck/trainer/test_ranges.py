"""Elements of a trainer's state: what is given is what is there, bit for bit, and what cannot be given is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flowcheck.control.messages import PATCH_BYTES, Ranges
from flowcheck.job.model import ModelEntry
from flowcheck.trainer.describe.described import Model, Stepping
from flowcheck.trainer.describe.description import entries
from flowcheck.trainer.ranges import FEW, Source

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}
KEYS = {
    "sgd": set(), "momentum": {"momentum_buffer"}, "nesterov": {"momentum_buffer"},
    **{kind: {"step", "exp_avg", "exp_avg_sq"} for kind in ("adam", "adamw", "fused")},
    "amsgrad": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
}


class Shapes(torch.nn.Module):
    """Every kind of entry: optimized of two, one and no dimension, tied, frozen, buffers that are replaced and of
    columns first."""

    def __init__(self, wide: int = 70) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(30, wide))
        self.bias = torch.nn.Parameter(torch.randn(wide))
        self.scale = torch.nn.Parameter(torch.tensor(1.25))
        self.again = self.bias
        self.frozen = torch.nn.Parameter(torch.randn(3, 40).t(), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("columns", torch.arange(6.0).reshape(2, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return (x @ self.weight + self.bias) * self.scale


class Made:
    """A model that trains, and its Source."""

    def __init__(self, wrap: Any, kind: str = "adam", dtype: torch.dtype = torch.float32, wide: int = 70) -> None:
        torch.manual_seed(5)
        self.module = Shapes(wide).to(dtype)
        self.model = wrap(self.module)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.source = Source(self.module, self.optimizer, entries(self.model, self.optimizer))
        self.train(2)

    def train(self, times: int = 1) -> None:
        for _ in range(times):
            self.model(torch.randn(4, 30, dtype=self.module.weight.dtype)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def ask(self, ranges: list[tuple[str, int, int]], iteration: int = 7, request: int = 3) -> dict[str, torch.Tensor]:
        patch, copies = self.source.answer(self.source.prepare(Ranges(request, ranges), PATCH_BYTES), iteration)
        assert (patch.request, patch.iteration, patch.ranges, patch.refused) == (request, iteration, ranges, "")
        assert copies is not None
        return dict(copies.on_host())

    def refusal(self, ranges: list[tuple[str, int, int]], room: int = PATCH_BYTES) -> str:
        patch, copies = self.source.answer(self.source.prepare(Ranges(3, ranges), room), 7)
        assert copies is None and (patch.request, patch.iteration, patch.ranges) == (3, 7, [])
        assert patch.refused.isprintable()
        return patch.refused

    def expected(self, ranges: list[tuple[str, int, int]]) -> dict[str, torch.Tensor]:
        """By the plain words of the contract, from the live objects."""
        state = self.module.state_dict(keep_vars=True)
        out: dict[str, torch.Tensor] = {}
        for name in dict.fromkeys(name for name, _, _ in ranges):
            mine = [(start, length) for entry, start, length in ranges if entry == name]

            def part(tensor: torch.Tensor, mine: list[tuple[int, int]] = mine) -> torch.Tensor:
                flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
                return torch.cat([flat[start : start + length] for start, length in mine])

            out[f"model.{name}"] = part(state[name])
            for key, value in self.optimizer.state.get(state[name], {}).items():
                if key != "note":
                    out[f"optimizer.{name}.{key}"] = value.clone() if key == "step" else part(value)
        return out


@pytest.fixture
def made(wrapped: Any) -> Iterator[Callable[..., Made]]:
    yield lambda *arguments, **options: Made(wrapped, *arguments, **options)


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: (value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).tolist())
        for name, value in tensors.items()
    }


def scattered(one: Made, count: int, seed: int = 1) -> list[tuple[str, int, int]]:
    """Short ranges of every entry in no order; they may overlap."""
    chance = random.Random(seed)
    sizes = {name: value.numel() for name, value in one.module.state_dict().items() if name != "again"}
    out = []
    for _ in range(count):
        name = chance.choice(list(sizes))
        start = chance.randrange(sizes[name])
        out.append((name, start, chance.randint(1, min(5, sizes[name] - start))))
    return out


def whole(one: Made) -> list[tuple[str, int, int]]:
    return [(name, 0, value.numel()) for name, value in one.module.state_dict().items() if name != "again"]


# -- what is given -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "dtype"), [
    *((kind, torch.float32) for kind in OPTIMIZERS),
    *((kind, torch.bfloat16) for kind in OPTIMIZERS if kind != "fused"),  # that one is refused with 16 bits
])
@pytest.mark.parametrize("choose", [whole, lambda one: scattered(one, 400), lambda one: scattered(one, 9)],
                         ids=["whole", "many", "few"])
def test_what_is_given_is_what_is_there(made, kind: str, dtype: torch.dtype, choose: Any) -> None:
    one = made(kind, dtype)
    ranges = choose(one)
    assert bits(one.ask(ranges)) == bits(one.expected(ranges))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_tensor_of_the_optimizer_comes_with_the_elements(made, kind: str) -> None:
    found = made(kind).ask([("weight", 69, 2), ("scale", 0, 1), ("frozen", 5, 1), ("count", 0, 1)])
    optimized = {f"optimizer.{name}.{key}" for name in ("weight", "scale") for key in KEYS[kind]}
    assert found.keys() == {"model.weight", "model.scale", "model.frozen", "model.count"} | optimized
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        name: () if name.endswith(".step") else (2,) if "weight" in name else (1,) for name in found
    }


def test_masters_come_with_the_elements(made) -> None:
    """And what an optimizer keeps that is no tensor does not."""
    one = made("adam", torch.bfloat16)
    for parameter, state in one.optimizer.state.items():
        state |= {"master": torch.randn(parameter.shape), "note": "of no use"}
    for ranges in (whole(one), scattered(one, 300)):
        found = one.ask(ranges)
        assert found["optimizer.weight.master"].dtype == torch.float32
        assert found["optimizer.weight.exp_avg"].dtype == found["model.weight"].dtype == torch.bfloat16
        assert bits(found) == bits(one.expected(ranges))


@pytest.mark.parametrize("ranges", [1, FEW, FEW + 1])
def test_a_nan_keeps_its_bits(made, ranges: int) -> None:
    one = made()
    with torch.no_grad():
        one.module.bias.view(torch.int32)[:20] = 0x7F800001 + torch.arange(20, dtype=torch.int32)
    found = one.ask([("bias", number, 2) for number in range(ranges)])
    expected = [0x7F800001 + number + more for number in range(ranges) for more in (0, 1)]
    assert found["model.bias"].view(torch.int32).tolist() == expected


def test_the_order_is_the_one_asked(made) -> None:
    one = made()
    flat = torch.arange(70.0)
    with torch.no_grad():
        one.module.bias.copy_(flat)
    found = one.ask([("bias", 60, 3), ("weight", 0, 1), ("bias", 0, 2), ("bias", 1, 2)])
    assert found["model.bias"].tolist() == [60.0, 61.0, 62.0, 0.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("choose", [whole, lambda one: scattered(one, 400)], ids=["whole", "many"])
@pytest.mark.parametrize("kind", ["momentum", "amsgrad", "fused"])
def test_it_is_the_state_of_its_boundary_whatever_is_trained_meanwhile(made, kind: str, choose: Any) -> None:
    """The optimizer writes in place, before anything of the answer has been sent."""
    one = made(kind)
    ranges = choose(one)
    wish = one.source.prepare(Ranges(0, ranges), PATCH_BYTES)
    one.train()  # the request was there before this step
    expected = bits(one.expected(ranges))
    _, copies = one.source.answer(wish, 2)
    one.train(2)
    assert bits(dict(copies.on_host())) == expected != bits(one.expected(ranges))


def test_state_that_was_loaded_is_given(made) -> None:
    """An optimizer that loads a state has other tensors and other groups after it."""
    one = made("amsgrad")
    one.optimizer.load_state_dict(one.optimizer.state_dict())
    one.train()
    assert bits(one.ask(whole(one))) == bits(one.expected(whole(one)))


@pytest.mark.parametrize("device", [
    "cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")),
])
@pytest.mark.parametrize("count", [1, 500])
def test_a_device_that_is_behind_gives_the_state_of_the_boundary(device: str, count: int) -> None:
    """A GPU runs what it was told long after that: the copies have their place in the order of its stream, and are
    brought to the CPU from another one, on another thread."""
    module = torch.nn.Linear(1000, 1000, bias=False, device=device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    entry = ModelEntry("weight", [1000, 1000], "float32")
    how = Stepping("adamw", ("torch-cuda-foreach", ""))
    described = Model([entry], {id(module.weight): "weight"}, [["weight"]], how)
    source = Source(module, optimizer, described)
    ranges = [("weight", 1001 * number, 7) for number in range(count)]
    found, expected = [], []
    with ThreadPoolExecutor(1) as other:
        for _ in range(20):
            wish = other.submit(source.prepare, Ranges(0, ranges), PATCH_BYTES).result()
            module.weight.grad = torch.full_like(module.weight, float(len(found) - 7))
            optimizer.step()
            _, copies = source.answer(wish, 0)
            found.append(other.submit(copies.on_host))
            state = optimizer.state[module.weight]
            expected.append([state["step"].clone(), *(
                torch.cat([whole.detach().view(-1)[start : start + length] for _, start, length in ranges])
                for whole in (state["exp_avg"], state["exp_avg_sq"], module.weight)
            )])
    names = [*(f"optimizer.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")), "model.weight"]
    for one, values in zip(found, expected, strict=True):
        tensors = one.result()
        assert all(tensors[name].device.type == "cpu" for name in names)
        assert all(torch.equal(tensors[name], value.cpu()) for name, value in zip(names, values, strict=True))


# -- what it costs -------------------------------------------------------------------------------------------


class Copied(TorchDispatchMode):
    """Bytes of new tensors that torch makes or writes: what is no view of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {one.untyped_storage().data_ptr() for one in torch.utils._pytree.tree_leaves((args, kwargs))
               if isinstance(one, torch.Tensor)}
        for one in torch.utils._pytree.tree_leaves(out):
            if not isinstance(one, torch.Tensor):
                continue
            if func._schema.is_mutable or one.untyped_storage().data_ptr() not in old:
                self.nbytes += one.numel() * one.element_size()
        return out


@pytest.mark.parametrize("kind", ["momentum", "amsgrad"])
@pytest.mark.parametrize("count", [3, 300])
def test_a_boundary_copies_what_was_asked_for_and_no_more(made, kind: str, count: int) -> None:
    copied, given = {}, {}
    for wide in (70, 7000):
        one = made(kind, wide=wide)
        wish = one.source.prepare(Ranges(0, [("weight", 7 * number, 2) for number in range(count)]), PATCH_BYTES)
        with Copied() as mode:
            _, copies = one.source.answer(wish, 0)
        copied[wide] = mode.nbytes
        given[wide] = sum(value.numel() * value.element_size() for value in copies.on_host().values())
    assert copied[70] == copied[7000] == given[70] == given[7000] < 40 * count + 8


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranges", "why"), [
    ([("other", 0, 1)], "'other': is not an entry of this model"),
    ([("", 0, 1)], "'': is not an entry of this model"),
    ([("weight", 0, 1), ("module.weight", 0, 1)], "'module.weight': is not an entry of this model"),
    ([("again", 0, 1)], "'again': is tied to bias: ask for that"),
    ([("bias", 70, 1)], "'bias': has 70 elements, not 1 from 70 on"),
    ([("bias", 0, 71)], "'bias': has 70 elements, not 71 from 0 on"),
    ([("bias", 1 << 61, 1 << 61)], f"'bias': has 70 elements, not {1 << 61} from {1 << 61} on"),
    ([("scale", 1, 1)], "'scale': has 1 elements, not 1 from 1 on"),
    ([("count", 0, 2)], "'count': has 1 elements, not 2 from 0 on"),
    ([("columns", 5, 2)], "'columns': has 6 elements, not 2 from 5 on"),
])
def test_a_request_that_lies(made, ranges: list[Any], why: str) -> None:
    assert made().refusal(ranges) == why


def test_as_much_as_there_is_room_for_and_not_more(made) -> None:
    """Adam's parameter with at most three tensors, an int64 buffer, a float32 that is frozen."""
    one = made()
    ranges = [("bias", 0, 10), ("count", 0, 1), ("frozen", 0, 2)]
    size = 10 * 4 * 4 + 8 + 2 * 4
    assert one.source.prepare(Ranges(0, ranges), size).nbytes == size
    assert one.refusal(ranges, size - 1) == f"request: {size} bytes of state, at most {size - 1} are given now"


def test_room_is_looked_at_before_anything_of_its_size_is_made(made) -> None:
    """One entry, asked for so often that its index alone would not fit into any machine."""
    one = made()
    with Copied() as mode:
        wish = one.source.prepare(Ranges(0, [("weight", 0, 2100)] * 16384), PATCH_BYTES)
    assert "bytes of state, at most" in wish.patch.refused and not wish.parts and mode.nbytes == 0


def _absent(one: Made) -> None:
    del one.optimizer.state[one.module.weight]["exp_avg_sq"]


def _never_stepped(one: Made) -> None:
    one.optimizer.state.clear()


def _part_of_it(one: Made) -> None:
    state = one.optimizer.state[one.module.weight]
    state["exp_avg"] = state["exp_avg"].reshape(-1)[:1050]


def _by_rows(one: Made) -> None:
    one.optimizer.state[one.module.weight]["row"] = torch.ones(30)


def _columns_first(one: Made) -> None:
    state = one.optimizer.state[one.module.weight]
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()


def _sparse(one: Made) -> None:
    state = one.optimizer.state[one.module.weight]
    state["exp_avg"] = state["exp_avg"].to_sparse()


def _another_shape(one: Made) -> None:
    one.module.weight.data = one.module.weight.data[:20]


def _another_type(one: Made) -> None:
    one.module.weight.data = one.module.weight.data.double()


@pytest.mark.parametrize(("spoil", "why"), [
    (_absent, "'weight': the optimizer has no exp_avg_sq of it on this rank"),
    (_never_stepped, "'weight': the optimizer has no step of it on this rank"),
    (_part_of_it, "'weight': exp_avg has the shape [1050]: it is not element by element, or not all on this rank"),
    (_by_rows, "'weight': row has the shape [30]: it is not element by element, or not all on this rank"),
    (_columns_first, "'weight': exp_avg is not in row-major order"),
    (_another_shape, "'weight': is no longer what the manifest says"),
    (_another_type, "'weight': is no longer what the manifest says"),
])
def test_a_state_that_is_not_element_by_element_and_whole(made, spoil: Callable[[Made], None], why: str) -> None:
    """What is asked for together is refused together, and the next request that fits is answered."""
    one = made()
    spoil(one)
    assert one.refusal([("frozen", 0, 1), ("weight", 3, 2)]) == why
    assert one.ask([("frozen", 0, 1)]).keys() == {"model.frozen"}


@pytest.mark.parametrize(("kind", "key"), [("momentum", "momentum_buffer"), ("amsgrad", "max_exp_avg_sq")])
def test_what_the_options_of_the_group_need_is_asked_for(made, kind: str, key: str) -> None:
    one = made(kind)
    del one.optimizer.state[one.module.bias][key]
    assert one.refusal([("bias", 0, 1)]) == f"'bias': the optimizer has no {key} of it on this rank"


def test_what_torch_itself_cannot_copy_is_refused(made) -> None:
    one = made()
    _sparse(one)
    assert one.refusal([("weight", 3, 2)]).startswith(("RuntimeError: ", "NotImplementedError: "))


def test_a_state_on_another_device_than_its_parameter_is_refused_where_there_is_an_index(made) -> None:
    one = made()
    state = one.optimizer.state[one.module.weight]
    state["exp_avg"] = state["exp_avg"].to("meta")
    many = [("weight", 3 * number, 1) for number in range(FEW + 1)]
    assert one.refusal(many) == "'weight': exp_avg is on meta, not on cpu"


def test_a_buffer_that_is_gone_is_refused(made) -> None:
    one = made()
    del one.module.count
    assert one.refusal([("count", 0, 1)]) == "'count': is no longer what the manifest says"


@pytest.mark.parametrize("kind", ["adam", "momentum"])
def test_a_tensor_without_elements_brings_what_is_kept_of_it_with_every_answer(wrapped, kind: str) -> None:
    """A shard may have none, and no range can name it: how many steps there were comes all the same."""
    layer = torch.nn.Linear(3, 2)
    layer.register_parameter("none", torch.nn.Parameter(torch.zeros(0, 4)))
    model = wrapped(layer)
    optimizer = OPTIMIZERS[kind](model.parameters())
    source = Source(layer, optimizer, entries(model, optimizer))
    for _ in range(2):
        (model(torch.ones(1, 3)).sum() + layer.none.sum()).backward()
        optimizer.step()
    _, copies = source.answer(source.prepare(Ranges(3, [("bias", 1, 1)]), PATCH_BYTES), 7)
    assert copies is not None
    found = {name.rpartition(".")[2]: value for name, value in copies.on_host().items() if ".none." in name}
    assert found.keys() == optimizer.state[layer.none].keys() and found
    assert all(value.numel() == int(key == "step") for key, value in found.items())
    assert "step" not in found or float(found["step"]) == 2.0
