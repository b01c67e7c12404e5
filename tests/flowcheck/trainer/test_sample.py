"""What a sampler takes of a training state: against an oracle of its own, and by how many operators of torch."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flowcheck.errors import UserError
from flowcheck.job.model import ModelEntry
from flowcheck.trainer.boundary import library
from flowcheck.trainer.describe.described import Model, Stepping
from flowcheck.trainer.describe.parts import Part
from flowcheck.trainer.sample import AHEAD, OPERATORS, OPERATORS_AHEAD, Sampler, states

from ..hand_node import HandNode
from ..sample_oracle import sample_of
from .training import Every, joined

ADAM: dict[str, Any] = {"lr": 0.1}


class Held(Part):
    """Tensors by name."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self._named, self.others = named, frozenset()

    def _entries(self) -> dict[str, torch.Tensor]:
        return dict(self._named)

    def reduced(self) -> list[tuple[str, torch.Tensor]]:
        return []

    def layout(self, names: Mapping[int, str]) -> None:
        return None


class State:
    """Parameters t0, t1, ... of these sizes and a constant, their optimizer, and a sampler of all."""

    def __init__(self, *sizes: int, make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
                 dtype: torch.dtype = torch.float32, constant: torch.Tensor | None = None, **options: Any) -> None:
        self.named = {f"t{i}": torch.nn.Parameter(torch.randn(size).to(dtype)) for i, size in enumerate(sizes)}
        self.optimizer = make(self.named.values(), **(options or ADAM))
        self.all: dict[str, torch.Tensor] = dict(self.named)
        if constant is not None:
            self.all["constant"] = torch.nn.Parameter(constant, requires_grad=False)
        entries = [
            ModelEntry(name, list(one.shape), str(one.dtype)[6:], "optimized" if name in self.named else "constant")
            for name, one in self.all.items()
        ]
        kind = type(self.optimizer).__name__.lower()
        names = {id(one): name for name, one in self.named.items()}
        self.described = Model(entries, names, [list(self.named)], Stepping(kind, ("torch-cpu", "")))
        self.sampler = Sampler(Held(self.all), self.optimizer, self.described, "run", 3)

    def step(self) -> None:
        for one in self.named.values():
            one.grad = torch.randn_like(one)
        self.optimizer.step()

    def text(self, number: int) -> str:
        return self.sampler.take(number, {}).text()

    def due(self, number: int) -> str:
        kept = {name: self.optimizer.state.get(one, {}) for name, one in self.named.items()}
        kept = {name: {k: v for k, v in of.items() if isinstance(v, torch.Tensor)} for name, of in kept.items()}
        return sample_of(self.all, kept, number, "run", 3)

    def check(self, first: int = 0) -> None:
        """By torch, and by C where that knows the tensors as they are: what it does not know it leaves to torch."""
        numbers = range(first, first + 17)
        due = [self.due(number) for number in numbers]
        assert all(said in ("", one) for one, said in zip(due, map(self.sampler.text, numbers), strict=True))
        assert [self.text(number) for number in numbers] == due
        again = [self.sampler.text(number) for number in numbers]
        assert all(said in ("", one) for one, said in zip(due, again, strict=True))
        self.by_c = sum(map(bool, again))


SIZES = (1, 16, 17, 5000, 3, 400)
STATES: list[dict[str, Any]] = [
    {}, {"amsgrad": True, "lr": 0.1}, {"make": torch.optim.AdamW, "lr": 0.1},
    {"make": torch.optim.SGD, "lr": 0.1}, {"make": torch.optim.SGD, "lr": 0.1, "momentum": 0.9},
    {"dtype": torch.bfloat16}, {"constant": torch.randn(50, 7).to(torch.float64)},
    {"constant": torch.arange(40, dtype=torch.uint8)}, {"constant": torch.randn(6, 70).t()},
    {"fused": True, "lr": 0.1},
]


@pytest.mark.parametrize("options", STATES, ids=lambda one: ",".join(one) or "adam")
def test_a_sample_is_what_the_definition_says(options: dict[str, Any]) -> None:
    """Before the first step, and after some; with more tensors than one iteration looks at."""
    at = State(*SIZES * 12, **options)
    at.check()
    for number in range(3):
        at.step()
        at.check(number * 100)


@pytest.mark.skipif(library() is None, reason="no C compiler, or no headers of Python")
def test_what_is_as_it_was_is_sampled_by_c() -> None:
    at = State(*SIZES * 12)
    at.step()
    at.check()
    at.step()
    at.check(100)
    assert at.by_c == 17


def test_a_nan_keeps_its_bits() -> None:
    at = State(4, 4)
    with torch.no_grad():
        at.named["t0"].view(torch.int32)[:] = torch.tensor([0x7FC00001, 0x7F800001, -0x400000, -1])
    at.check()
    assert b"\x01\0\xc0\x7f\x01\0\x80\x7f\0\0\xc0\xff\xff\xff\xff\xff" in base64.b64decode(at.text(0))


def _new_memory(at: State) -> None:
    at.named["t1"].data = torch.randn(16)


def _rolled_back(at: State) -> None:
    before = at.optimizer.state_dict()
    at.step()
    at.optimizer.load_state_dict(before)


def _cleared(at: State) -> None:
    at.optimizer.state.clear()


def _one_gone(at: State) -> None:
    del at.optimizer.state[at.named["t2"]]["exp_avg"]


def _renamed(at: State) -> None:
    entry = at.optimizer.state[at.named["t2"]]
    entry["max_exp_avg_sq"] = entry.pop("exp_avg_sq")


@pytest.mark.parametrize("change", [_new_memory, _rolled_back, _cleared, _one_gone, _renamed])
def test_what_has_other_memory_is_looked_at_there(change: Callable[[State], None]) -> None:
    at = State(*SIZES)
    at.step()
    at.check()
    change(at)
    at.check(50)
    at.step() if change not in (_one_gone, _renamed) else None
    at.check(80)


def test_a_state_in_another_form_is_not_said() -> None:
    """And nothing is read beyond its memory. The step may have a type of its own: then nothing is wrong with it."""
    at = State(100, 100)
    at.step()
    state = at.optimizer.state[at.named["t0"]]
    state["exp_avg"] = state["exp_avg"].bfloat16()
    state["exp_avg_sq"] = torch.zeros(7)
    assert base64.b64decode(at.text(0))[8:10] == bytes([0b001, 0b111])
    state["step"] = state["step"].double()
    assert base64.b64decode(at.text(0))[8:10] == bytes([0x80, 0b111])
    assert states(at.described, at.optimizer)["optimizer.t0.step"].dtype == torch.float32


@pytest.mark.parametrize("data", [torch.randn(99), torch.zeros(0)])
def test_a_parameter_that_was_given_another_shape_is_named(data: torch.Tensor) -> None:
    at = State(100)
    at.named["t0"].data = data
    with pytest.raises(UserError) as refused:
        at.text(0)
    assert (refused.value.what, refused.value.where) == ("is no longer what the manifest says", "'t0'")


class Counted(TorchDispatchMode):
    """found: operators of torch, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("parameters", [48, 800])
def test_a_boundary_costs_few_operators_however_many_tensors_there_are(parameters: int) -> None:
    """On a GPU each is a kernel, and one that asks for a value would wait for all before it."""
    at = State(*[20] * parameters, constant=torch.arange(100))
    at.step()
    period = 12 if parameters == 48 else 16
    for number in range(period):
        at.text(number)  # what is looked up once
    for number in range(period, period * (AHEAD + 1)):
        with Counted() as counted:
            taken = at.sampler.take(number, {})
        widths = 1 + (number % 16 == parameters % 16 or (parameters == 48 and number % 12 == 0))
        ahead = OPERATORS_AHEAD if number >= period * AHEAD else 0
        assert counted.found.total() <= (OPERATORS + ahead) * widths, counted.found
        assert not counted.found.keys() & {"item", "_local_scalar_dense", "copy_", "_to_copy", "nonzero"}
        assert taken.text() == at.due(number)


# -- in a record --


def test_every_record_has_a_sample(training, hand_node: HandNode) -> None:
    one = training(layer=Every(), make=lambda p: torch.optim.Adam(p, lr=0.5), run_id="r", epoch=2)
    peer = joined(one, hand_node)
    for number in range(3, 6):
        one.iterate(skipped=number == 4)
        message, _ = peer.receive()
        model = one.model.module
        kept = {"weight": one.optimizer.state[model.weight]}
        assert message["sample"] == sample_of(
            {"weight": model.weight, "frozen": model.frozen}, kept, number, "r", 2), "a buffer is in the record whole"


def test_the_sample_is_of_its_iteration(training, hand_node: HandNode) -> None:
    """Training goes on before it is sent."""
    one = training()
    peer = joined(one, hand_node)
    due = []
    for number in range(3, 6):
        one.iterate()
        due.append(sample_of(one.values, {}, number))
    assert [peer.expect("record")["sample"] for _ in due] == due and len(set(due)) == 3
    peer.close()


def test_checksums_are_of_the_optimizers_state_as_well(training, hand_node: HandNode) -> None:
    from flowcheck.control.checksum import checksum

    one = training(make=lambda p: torch.optim.AdamW(p, lr=0.0, amsgrad=True), checksum_every=1)
    peer = joined(one, hand_node)
    one.iterate()
    due = {name: f"{checksum(value):016x}" for name, value in one.values.items()}
    for name, parameter in one.model.module.named_parameters():
        for key, value in one.optimizer.state[parameter].items():
            due[f"optimizer.{name}.{key}"] = f"{checksum(value):016x}"
    assert len(due) == 10 and peer.expect("record")["checksums"] == due
