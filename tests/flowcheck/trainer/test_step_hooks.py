"""Steps of optimizers whose class calls the step of another one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowcheck.trainer.step_hooks import StepHooks

from ..hand_node import HandNode
from .training import Training, joined


class Scaled(torch.optim.AdamW):
    """As a user writes it: gradients are scaled, and a counter is kept in the group."""

    fails = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for one in group["params"]:
                one.grad.mul_(0.5)
        if self.fails:
            self.fails -= 1
            raise ArithmeticError
        return super().step(closure)


@pytest.fixture(autouse=True)
def hooked() -> None:
    """Torch calls hooks of a class's step from the first optimizer of that class on."""
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])


def calls(peer: Any) -> tuple[int, int]:
    """The next record's iteration, and what the group had counted before that step."""
    while True:
        said, _ = peer.receive()
        if said["type"] == "record":
            ((_, options), *_) = said["groups"][0]["dict"]
            return said["iteration"], dict(options[0]["dict"])["calls"]


def test_a_step_that_calls_that_of_its_parent_is_one(
    training: Callable[..., Training], hand_node: HandNode
) -> None:
    mine = training(kind="log", make=lambda parameters: Scaled(parameters, lr=0.1))
    peer = joined(mine, hand_node)
    mine.iterate(4)
    assert [calls(peer) for _ in range(4)] == [(number, number) for number in range(3, 7)]
    assert mine.attachment.state == "attached"


def test_one_that_raised_hides_no_later_step() -> None:
    optimizer = Scaled([torch.nn.Parameter(torch.ones(1))])
    ready, stepped = list[int](), list[int]()
    hooks = StepHooks(optimizer, ready.append, stepped.append)
    hooks.begin()
    optimizer.fails = 1
    for _ in range(3):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        with contextlib.suppress(ArithmeticError):
            optimizer.step()
    hooks.end()
    assert (hooks.taken(), len(ready), len(stepped)) == ([3], 3, 2)
    assert hooks.taken() == [0]
