"""A node that asks a training process for whatever it likes. An answer is right, or a refusal; nothing else happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowcheck.control.messages import Ranges
from flowcheck.trainer.describe.description import entries
from flowcheck.trainer.ranges import Source

from ..flowcheck import pair

NAMES = ["weight", "bias", "scale", "module.weight", "", "weight\u00e9", "__class__", "model.weight", "weight.step"]
ROOM = 4000
near = st.integers(0, 140) | st.integers(0, (1 << 62) - 1)


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(13, 7))
        self.bias = torch.nn.Parameter(torch.randn(7))
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight + self.bias) * self.scale


@pytest.fixture(scope="module")
def trained() -> Any:
    torch.manual_seed(3)
    model = pair.wrapped(Small())
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    model(torch.randn(5, 13)).square().sum().backward()
    optimizer.step()
    yield model.module, optimizer, Source(model.module, optimizer, entries(model, optimizer))
    pair.leave()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(ranges=st.lists(st.tuples(st.sampled_from(NAMES) | st.sampled_from(NAMES[:3]), near, near.map(lambda n: n + 1)),
                       min_size=1, max_size=40))
def test_an_answer_is_right_or_a_refusal(trained: Any, ranges: list[tuple[str, int, int]]) -> None:
    module, optimizer, source = trained
    flat = {name: value.detach().reshape(-1) for name, value in module.named_parameters()}
    fits = all(name in flat and start + length <= len(flat[name]) for name, start, length in ranges)
    fits = fits and sum(length for _, _, length in ranges) * 4 * 4 <= ROOM
    wish = source.prepare(Ranges(0, ranges), ROOM)
    patch, copies = source.answer(wish, 1)
    assert bool(patch.refused) != fits
    if copies is None:
        assert not fits and patch.ranges == []
        return
    found = copies.on_host()
    for name in {name for name, _, _ in ranges}:
        kept = optimizer.state[module.get_parameter(name)]
        mine = [slice(start, start + length) for entry, start, length in ranges if entry == name]
        for key, whole in {f"model.{name}": flat[name], **{
            f"optimizer.{name}.{key}": value.reshape(-1) for key, value in kept.items() if key != "step"
        }}.items():
            assert torch.equal(found[key], torch.cat([whole[one] for one in mine]))
    assert sum(value.numel() for value in found.values()) <= ROOM // 4 + 3
