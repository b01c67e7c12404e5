"""Small models, and what a communicator and a refusal say of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowcheck.errors import UserError


def net() -> torch.nn.Module:
    """Two layers of 2 x 2: 8 weights and 4 biases."""
    return torch.nn.Sequential(OrderedDict(first=torch.nn.Linear(2, 2), last=torch.nn.Linear(2, 2)))


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


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    """(where, what) of the UserError that the call raises; it has a remedy."""
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.remedy
    return caught.value.where, caught.value.what


def call(op: str, count: int, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {"op": op, "count": count, "dtype": dtype, **more}
