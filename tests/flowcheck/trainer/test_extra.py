"""What modules give of themselves besides tensors is kept with a version, or said by name not to be."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from flowcheck.control.user_state import UserState
from flowcheck.errors import UserError
from flowcheck.trainer.describe.extra import extra_of
from flowcheck.trainer.recover.recovered import Recovered

from ..hand_node import until
from .training import joined, known


class Giving(torch.nn.Linear):
    """A layer that gives a value beside its weights, another one after each forward pass, and keeps what it gets."""

    def __init__(self, *values: Any) -> None:
        super().__init__(2, 2)
        self.values, self.got, self.turn = values, [], 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return self.values[self.turn % len(self.values)]

    def set_extra_state(self, state: Any) -> None:
        self.got.append(state)


def version(model: torch.nn.Module, said: Mapping[str, Any]) -> Recovered:
    """What `recover` gives of a version in which a rank has said that."""
    tensors = {name: value.detach() for name, value in model.state_dict().items() if "extra" not in name}
    return Recovered(4, 1, "run", "", tensors | extra_of(said, ""), missing=said.get("missing", {}), parts={"rng": {}},
                     source="node")


def given(training: Any, hand_node: Any, layer: torch.nn.Module) -> Mapping[str, Any]:
    """What a node gets of rank 0 beside a record."""
    one = training(layer=layer)
    peer = joined(one, hand_node)
    peer.send("wanted", what=["user"], why="")
    until(lambda: one.attachment._senders[0].node.takes_user)
    one.iterate()
    message, payload = peer.receive()
    assert message["type"] == "user" and peer.expect("record")["iteration"] == 3
    state: Mapping[str, Any] = UserState.of(payload, "x").state
    return state


@pytest.mark.parametrize("value", [
    torch.arange(5, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8), torch.ones(2, 3), None, b"pickled \x80",
    io.BytesIO(b"of Transformer Engine"), {"scale": [1.0, 2.0], "at": 3},
], ids=lambda value: type(value).__name__)
def test_what_a_module_gives_comes_back(training, hand_node, value: Any) -> None:
    layer = Giving(value)
    found = version(layer, given(training, hand_node, layer))
    assert layer.load_state_dict(found.model, strict=True).missing_keys == []
    (got,) = layer.got
    assert type(got) is type(value)
    if isinstance(value, torch.Tensor):
        assert torch.equal(got, value)
    else:
        assert (got.getvalue() == value.getvalue()) if isinstance(value, io.BytesIO) else got == value


def test_it_may_be_of_another_size_each_time(training, hand_node) -> None:
    """And comes from the boundary where the next iteration begins."""
    layer = torch.nn.Sequential(Giving(b"", b"1", b"22", b"333", b"4444"), torch.nn.Linear(2, 2))
    found = version(layer, given(training, hand_node, layer))
    assert found.model["0._extra_state"] == b"4444"
    layer.load_state_dict(found.model)
    assert layer[0].got == [b"4444"]


@pytest.mark.parametrize(("value", "why"), [
    (object(), "a builtins.object cannot be kept"), (bytes(2 << 20), "has 2,097,"),
], ids=["a type", "a size"])
def test_what_cannot_be_kept_is_named(training, hand_node, value: Any, why: str) -> None:
    layer = torch.nn.Sequential(Giving(value), Giving(b"small"))
    said = given(training, hand_node, layer)
    assert why in said["missing"]["extra['0._extra_state']"] and said["rng"]
    found = version(layer, said)
    assert found.model["1._extra_state"] == b"small"
    with pytest.raises(UserError) as caught:
        found.load(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    assert "has no 0._extra_state" in caught.value.what and why in caught.value.what


def test_a_checkpoint_names_what_its_model_has_not(training, hand_node) -> None:
    """Wherever a version goes its manifest's `unproven` goes, too."""
    one = training(layer=torch.nn.Sequential(torch.nn.Linear(2, 2), Giving(b"x")))
    peer = known(one, hand_node, manifest=False)
    job = peer.expect("manifest")["job"]
    (mark,) = job["unproven"]
    assert "1._extra_state" in mark
    assert [entry["name"] for entry in job["model"]] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_version_without_any_is_refused_by_name() -> None:
    """Of an earlier release, or for other ranks: torch would say a missing key."""
    layer = Giving(b"x")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with pytest.raises(UserError) as caught:
        version(layer, {}).load(layer, optimizer)
    assert "has no _extra_state: the rank gave none" in caught.value.what
