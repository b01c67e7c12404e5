"""What was made of an optimizer's options is used again only where nothing can have changed in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowcheck.trainer.unchanged import Unchanged


def made_anew(groups: list[dict[str, Any]], change: Callable[[list[dict[str, Any]]], None]) -> bool:
    """Was what is made of the options made again after this change?"""
    one, counted = Unchanged(), list[int]()

    def look() -> int:
        found: int = one.of(groups, lambda: counted.append(1) or len(counted))
        return found

    first = look()
    change(groups)
    return look() != first


def with_betas(betas: Any) -> list[dict[str, Any]]:
    return [{"params": [torch.ones(1)], "lr": 0.1, "betas": betas, "fused": None}]


def nothing(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"] = [torch.zeros(2)]  # none of the options


@pytest.mark.parametrize(("change", "anew"), [
    (nothing, False),
    (lambda groups: groups[0].update(lr=0.25), True),
    (lambda groups: groups[0].update(lr=True), True),
    (lambda groups: groups[0].update(betas=(0.5, 0.9)), True),
    (lambda groups: groups[0].update(initial_lr=0.1), True),
    (lambda groups: groups[0].pop("fused"), True),
    (lambda groups: groups.append({"params": [], "lr": 0.1}), True),
    (lambda groups: groups[0].update({"weight_decay": groups[0].pop("lr")}), True),
], ids=["nothing", "rate", "type", "betas", "added", "taken", "group", "renamed"])
def test_options_that_change_are_read_again(change: Callable[[list[dict[str, Any]]], None], anew: bool) -> None:
    assert made_anew(with_betas((0.9, 0.999)), change) is anew


@pytest.mark.parametrize("betas", [[0.9, 0.999], (torch.tensor(0.9), 0.999), {"a": 1}], ids=["list", "tensor", "dict"])
def test_what_can_change_in_itself_is_read_each_time(betas: Any) -> None:
    assert made_anew(with_betas(betas), lambda groups: None)
