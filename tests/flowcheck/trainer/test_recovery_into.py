"""recover into tensors that are there: which may be, and what of those that share memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from flowcheck.errors import UserError
from flowcheck.trainer.recover.recovery import recover

from ..hand_api import TOKEN, HandApi, HandVersion


def freed(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """As FSDP frees storages: the tensor says of itself what it said before."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize(("given", "why"), [
    (torch.zeros(2, device="meta"), "has no memory for its elements"),
    (torch.zeros(2).to_sparse(), "has no memory for its elements"),
    (torch.zeros(1).expand(2), "share memory"),
    ([0.0, 0.0], "is a list"),
    (torch.nn.UninitializedParameter(), "has no shape yet"),
    (FakeTensorMode().from_tensor(torch.zeros(2)), "is a FakeTensor without memory of its own"),
    (freed(torch.zeros(2), 0), "is a Tensor without memory of its own"),
    (freed(torch.zeros(2), 4), "is a Tensor without memory of its own"),
], ids=["meta", "sparse", "expanded", "list", "lazy", "fake", "freed", "half freed"])
def test_what_nothing_can_be_received_into(given: Any, why: str) -> None:
    with HandApi(HandVersion(7)) as api, pytest.raises(UserError, match=why):
        recover(api.name, token=TOKEN, into={"w": given})


def test_nothing_is_received_into_a_dtensor(one_rank: None) -> None:
    """Its own address is none."""
    given = distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)), [Replicate()])
    with HandApi(HandVersion(7)) as api, pytest.raises(UserError, match="is a DTensor without memory of its own"):
        recover(api.name, token=TOKEN, into={"w": given})


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ROWS = {"w": [1.0, 2.0, 3.0, 4.0], "b": [5.0, 6.0, 7.0, 8.0]}
SPACE = torch.zeros(16)


@pytest.mark.parametrize("given", [
    {"w": SPACE[:4], "b": SPACE[:4]}, {"w": SPACE[:4], "b": SPACE[3:7]}, {"w": SPACE[::2][:4], "b": SPACE[2:6]},
    {"w": SPACE[:4].view(2, 2).t().reshape(4), "b": SPACE[0:8:2][:4], "c": SPACE[4:5]},
    {"w": SPACE[:4], "x": SPACE[8:10], "b": SPACE[1:5]},
], ids=["same", "overlapping", "strided", "three", "one between"])
def test_tensors_that_share_memory_are_not_given_different_values(given: dict[str, torch.Tensor]) -> None:
    """Each would be right when it comes, and be written over by the next."""
    held = {**ROWS, "c": [9.0], "x": [1.0, 2.0]}
    with HandApi(HandVersion(7, held, {})) as api:
        with pytest.raises(UserError, match="shares memory with others") as error:
            recover(api.name, token=TOKEN, into=given)
    assert error.value.where == "into"


def test_a_tensor_that_overlaps_itself_is_not_taken_for_one() -> None:
    given = torch.zeros(3).as_strided((2, 2), (1, 1))
    with HandApi(HandVersion(7, {"w": [1.0, 2.0, 3.0, 4.0]}, {}, shapes={"w": [2, 2]})) as api:
        with pytest.raises(UserError, match="shares memory"):
            recover(api.name, token=TOKEN, into={"w": given})


def test_tied_parameters_and_views_that_lie_between_each_other_are_right() -> None:
    space, tied = torch.zeros(8), torch.zeros(4)
    given = {"w": space[::2], "b": space[1::2], "t": tied, "u": tied, "v": tied.view(2, 2).t()}
    held = {**ROWS, "t": ROWS["w"], "u": ROWS["w"], "v": [1.0, 3.0, 2.0, 4.0]}
    with HandApi(HandVersion(7, held, {}, shapes={"v": [2, 2]})) as api:
        got = recover(api.name, token=TOKEN, into=given).model
    assert {name: tensor.flatten().tolist() for name, tensor in given.items()} == held
    assert all(got[name] is tensor for name, tensor in given.items()) and list(got) == list(held)


def test_a_view_that_negates_its_memory_has_the_values() -> None:
    memory = torch.zeros(2)
    given = torch._neg_view(memory)
    with HandApi(HandVersion(7)) as api:
        whole = recover(api.name, token=TOKEN).model["w"]
        got = recover(api.name, token=TOKEN, into={"w": given})
    assert got.model["w"] is given and torch.equal(given, whole) and torch.equal(memory, -whole)
