"""Several optimizers of a rank, which are followed as one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Muon, Optimizer

from flowcheck.errors import UserError
from flowcheck.trainer.changes import Changes, Rule
from flowcheck.trainer.describe.optimizers import members, optimizer_of, refresh


class Container(Optimizer):
    """As torchtitan's: what it is asked to do its optimizers do."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        super().__init__([one for each in optimizers for group in each.param_groups for one in group["params"]], {})
        self.optimizers = optimizers


def made(count: int = 3) -> tuple[list[torch.nn.Parameter], list[Optimizer]]:
    matrices = [torch.nn.Parameter(torch.randn(3, 2)) for _ in range(count)]
    others = [torch.nn.Parameter(torch.randn(4)) for _ in range(count)]
    return matrices + others, [Muon(matrices, lr=0.1), AdamW([{"params": others[:1]}, {"params": others[1:], "lr": 9}])]


def step(parameters: list[torch.nn.Parameter], optimizers: list[Optimizer]) -> None:
    for one in parameters:
        one.grad = torch.randn_like(one)
    for each in optimizers:
        each.step()


@pytest.mark.parametrize("form", [list, tuple, Container, lambda given: dict(enumerate(given)),
                                  lambda given: [Container(given[:1]), *given[1:]]])
def test_what_a_script_has_of_several(form: Callable[[list[Optimizer]], Any]) -> None:
    _, optimizers = made()
    one = optimizer_of(form(optimizers))
    assert members(one) == optimizers
    assert one.param_groups == [group for each in optimizers for group in each.param_groups]
    assert optimizer_of(form(optimizers[:1])) is optimizers[0] and members(optimizers[0]) == optimizers[:1]


def test_what_is_none_comes_back() -> None:
    for given in ("adam", None, [], {}, [3]):
        assert optimizer_of(given) is given


def test_two_of_several_have_no_parameter_in_common() -> None:
    parameters, optimizers = made()
    with pytest.raises(UserError):
        optimizer_of([*optimizers, SGD(parameters[-1:], lr=0.1)])


def test_groups_and_state_are_as_the_optimizers_have_them() -> None:
    parameters, optimizers = made()
    one = optimizer_of(optimizers)
    groups, state = one.param_groups, one.state
    assert not state
    step(parameters, optimizers)
    refresh(one)
    assert one.param_groups is groups and one.state is state
    assert set(state) == set(parameters)
    assert all(state[each] is optimizers[at >= 3].state[each] for at, each in enumerate(parameters))
    del optimizers[0].state[parameters[0]]
    optimizers[1].state[parameters[-1]] = {"step": 3}
    refresh(one)
    assert one.state is state and parameters[0] not in state and state[parameters[-1]] == {"step": 3}
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    refresh(one)
    assert one.param_groups is not groups and one.state is not state  # whoever has looked at these sees it


@pytest.mark.parametrize("to", [0, 1], ids=["to the first", "to the second"])
def test_what_an_optimizer_keeps_of_a_parameter_that_went_to_another_is_not_its_state(to: int) -> None:
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(4)]
    optimizers: list[Optimizer] = [AdamW(parameters[:2]), AdamW(parameters[2:])]
    one = optimizer_of(optimizers)
    step(parameters, optimizers)
    refresh(one)
    moved = optimizers[1 - to].param_groups[0]["params"].pop(0)
    optimizers[to].param_groups[0]["params"].append(moved)
    refresh(one)
    assert moved in optimizers[1 - to].state and moved not in one.state
    step(parameters, optimizers)
    refresh(one)
    assert one.state[moved] is optimizers[to].state[moved] and len(one.state) == 4


def test_what_is_written_is_written_to_the_optimizer_that_has_the_parameter() -> None:
    parameters, optimizers = made()
    one = optimizer_of(optimizers)
    step(parameters, optimizers)
    refresh(one)
    one.state[parameters[0]] = {"momentum_buffer": torch.ones(3, 2)}
    one.state.update({parameters[4]: {"step": 7}})
    assert optimizers[0].state[parameters[0]] is one.state[parameters[0]]
    assert optimizers[1].state[parameters[4]] == {"step": 7} and parameters[4] not in optimizers[0].state
    one.state.pop(parameters[0])
    assert one.state.pop(parameters[0], None) is None
    del one.state[parameters[4]]
    assert {*optimizers[0].state, *optimizers[1].state} == set(one.state) == {*parameters} - {
        parameters[0], parameters[4]}
    one.state.clear()
    assert not optimizers[0].state and not optimizers[1].state and not one.state


def test_a_state_dict_of_all_is_loaded_by_each() -> None:
    parameters, optimizers = made()
    step(parameters, optimizers)
    here, there = made()[1], [one.state_dict() for one in optimizers]
    whole: dict[str, Any] = {"state": {}, "param_groups": []}
    for each in there:
        first = sum(len(group["params"]) for group in whole["param_groups"])
        whole["state"] |= {first + number: held for number, held in each["state"].items()}
        whole["param_groups"] += [{**group, "params": [first + number for number in group["params"]]}
                                  for group in each["param_groups"]]
    optimizer_of(here).load_state_dict(whole)
    for one, wanted in zip(here, there, strict=True):
        torch.testing.assert_close(one.state_dict(), wanted, rtol=0, atol=0)


def zeroed(optimizer: Optimizer) -> None:
    for entry in optimizer.state.values():
        next(one for one in entry.values() if isinstance(one, torch.Tensor) and one.dim()).zero_()


def replaced(optimizer: Optimizer) -> None:
    for parameter, entry in list(optimizer.state.items()):
        optimizer.state[parameter] = dict(entry)


BETWEEN: dict[str, Callable[[Optimizer], Any]] = {
    "zeroed": zeroed, "replaced": replaced, "cleared": lambda one: one.state.clear(),
    "loaded": lambda one: one.load_state_dict(copy.deepcopy(one.state_dict())),
    "parameters": lambda one: one.param_groups[0]["params"][0].mul_(2),
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("which", [0, 1], ids=["the first", "the second"])
@pytest.mark.parametrize("what", BETWEEN)
def test_what_is_changed_between_two_steps_is_seen(what: str, which: int, order: tuple[int, int]) -> None:
    parameters, optimizers = made()
    one = optimizer_of(optimizers)
    changes = Changes(one, [], [], {})

    def iterate(between: Callable[[Optimizer], Any] = lambda _: None) -> Any:
        for each in parameters:
            each.grad = torch.randn_like(each)
        for number in order:
            refresh(one)
            changes.ready(True, number)
            optimizers[number].step()
            refresh(one)
            changes.stepped(number)
            if number == order[0]:
                with torch.no_grad():
                    between(optimizers[order[which]])
        refresh(one)
        return changes.over([1, 1])

    assert [iterate() for _ in range(4)] == [None] * 4
    found = iterate(BETWEEN[what])
    assert found is not None and found.rule is Rule.RENEWED
