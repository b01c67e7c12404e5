"""Tensors that a version is received into: which fit, which share memory, and what stands in them at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flowcheck.ask.into import Into
from flowcheck.control.tensors import TensorSpec
from flowcheck.control.version import MODEL, OPTIMIZER, Digest, Version
from flowcheck.errors import UserError


def version(given: dict[str, torch.Tensor]) -> Version:
    """Of which these are the tensors."""
    digests = {name: Digest(TensorSpec(str(one.dtype).removeprefix("torch."), tuple(one.shape)), "0" * 64)
               for name, one in given.items()}
    return Version("run", 0, 7, "", "verified", (), {}, "torch-cpu", {MODEL: digests, OPTIMIZER: {}})


def shared(**given: torch.Tensor) -> set[str]:
    """Names of those that are not received straight into."""
    into = Into(version(given), given)
    assert all(into.alone[name] is given[name] for name in into.alone)
    return given.keys() - into.alone.keys()


def space(size: int = 24) -> torch.Tensor:
    return torch.zeros(size)


def refused(call: Any, *given: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*given)
    assert caught.value.where == "into" and caught.value.remedy
    return caught.value.what


# -- who shares memory -----------------------------------------------------------------------------------------------


def test_neighbours_share_nothing() -> None:
    one = space()
    assert shared(a=one[:4], b=one[4:8], c=one[8:9], d=one[20:]) == set()
    assert shared(d=one[20:], c=one[8:9], b=one[4:8], a=one[:4]) == set()
    assert shared(a=torch.zeros(4), b=torch.zeros(4)) == set() and shared() == set()


def test_a_byte_in_common_is_enough() -> None:
    one = space()
    assert shared(a=one[:5], b=one[4:8], c=one[8:]) == {"a", "b"}
    assert shared(a=one[:4], b=one[4:9], c=one[8:]) == {"b", "c"}
    assert shared(a=one[:4], b=one[:4], c=one[4:]) == {"a", "b"}
    raw = torch.zeros(16, dtype=torch.uint8)
    assert shared(a=raw[:5], b=raw[4:8].view(torch.float32)) == {"a", "b"}
    assert shared(a=raw[:4], b=raw[4:8].view(torch.float32)) == set()


def test_one_that_reaches_far_meets_all_until_its_end() -> None:
    one = space()
    assert shared(a=one[:12], b=one[2:4], c=one[5:7], d=one[12:14]) == {"a", "b", "c"}
    assert shared(a=one[:3], b=one[4:20], c=one[6:8], d=one[18:22], e=one[22:]) == {"b", "c", "d"}


def test_views_that_lie_between_each_other_may_share() -> None:
    """They do not, and that is too hard to say in general: they are received apart."""
    one = space()
    assert shared(a=one[::2][:4], b=one[1::2][:4]) == {"a", "b"}
    assert shared(a=one[::2][:4], b=one[7:9]) == set(), "its last element is the seventh"
    assert shared(a=one[::2][:4], b=one[6:9]) == {"a", "b"}


def test_what_has_no_elements_shares_nothing() -> None:
    one = space()
    assert shared(a=one[:4], b=one[2:2], c=one[1:1].view(0, 3)) == set()


@pytest.mark.parametrize(("size", "stride", "apart"), [
    ((2, 3), (3, 1), True), ((2, 3), (2, 1), False), ((3, 2), (1, 3), True), ((3, 2), (1, 2), False),
    ((2, 2), (1, 1), False), ((2, 2), (4, 2), True), ((2, 2), (3, 2), True), ((1, 3), (1, 1), True),
    ((2, 1, 3), (3, 7, 1), True), ((2, 2, 2), (4, 2, 1), True), ((2, 2, 2), (3, 2, 1), False), ((4,), (5,), True),
    ((), (), True), ((0, 2), (1, 1), True),
])
def test_elements_of_one_tensor(size: tuple[int, ...], stride: tuple[int, ...], apart: bool) -> None:
    assert shared(a=space().as_strided(size, stride)) == (set() if apart else {"a"})


# -- what fits -------------------------------------------------------------------------------------------------------


def test_all_of_a_storage_to_its_last_byte() -> None:
    for one in (torch.zeros(4), space()[23:], space()[20:].as_strided((2, 2), (2, 1)), space()[::23],
                torch.zeros(3, dtype=torch.uint8)[2:], torch.zeros(0), torch.zeros(2, 0, 3), torch.zeros(())):
        assert shared(a=one) == set()


def test_what_has_lost_its_memory() -> None:
    whole = torch.zeros(4)
    for nbytes, good in ((16, True), (15, False), (12, False), (0, False)):
        whole.untyped_storage().resize_(nbytes)
        if good:
            assert shared(a=whole) == set()
        else:
            assert refused(Into, version({"a": whole}), {"a": whole}) == (
                "tensor 'a' is a Tensor without memory of its own")
    empty = torch.zeros(4)[2:2]
    empty.untyped_storage().resize_(0)
    assert shared(a=empty) == set(), "nothing is received into it"


@pytest.mark.parametrize(("given", "why"), [
    ([0.0, 0.0], "is a list"), (torch.nn.UninitializedParameter(), "has no shape yet"),
    (torch.zeros(2, device="meta"), "is on meta, torch.strided: it has no memory for its elements"),
    (torch.zeros(2).to_sparse(), "is on cpu, torch.sparse_coo: it has no memory for its elements"),
    (torch.zeros(1).expand(2), "has elements that share memory (it was expanded)"),
    (torch.zeros(2, 1).expand(2, 2), "has elements that share memory (it was expanded)"),
    (FakeTensorMode().from_tensor(torch.zeros(2)), "is a FakeTensor without memory of its own"),
])
def test_what_is_no_place(given: Any, why: str) -> None:
    assert refused(Into, version({"a": torch.zeros(2)}), {"a": given}) == f"tensor 'a' {why}"


def test_an_expanded_tensor_of_one_element_is_a_place() -> None:
    assert shared(a=torch.zeros(3, 1).as_strided((3, 1), (1, 0))) == set()


@pytest.mark.parametrize(("given", "why"), [
    ({"b": torch.zeros(2)}, "tensor 'b' is float32 [2], step 7 does not have it"),
    ({"a": torch.zeros(3)}, "tensor 'a' is float32 [3], step 7 has float32 [2]"),
    ({"a": torch.zeros(2, 1)}, "tensor 'a' is float32 [2, 1], step 7 has float32 [2]"),
    ({"a": torch.zeros(2, dtype=torch.bfloat16)}, "tensor 'a' is bfloat16 [2], step 7 has float32 [2]"),
])
def test_what_is_another_tensor(given: dict[str, torch.Tensor], why: str) -> None:
    assert refused(Into, version({"a": torch.zeros(2)}), given) == why


# -- the end ---------------------------------------------------------------------------------------------------------


def test_those_that_share_get_copies_and_are_what_is_handed_out() -> None:
    one, alone = space(8), torch.zeros(2)
    given = {"w": one[::2], "b": one[1::2], "c": alone}
    into = Into(version(given), given)
    model = {"b": torch.tensor([5.0, 6.0, 7.0, 8.0]), "c": torch.ones(2), "w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    into.finish(model)
    assert one.tolist() == [1.0, 5.0, 2.0, 6.0, 3.0, 7.0, 4.0, 8.0] and alone.tolist() == [0.0, 0.0]
    assert model["w"] is given["w"] and model["b"] is given["b"] and list(model) == ["b", "c", "w"]


def test_tied_ones_with_one_value_are_right_and_with_two_are_not() -> None:
    tied = torch.nn.Parameter(torch.zeros(2))
    given = {"w": tied, "t": tied}
    Into(version(given), given).finish({"w": torch.ones(2), "t": torch.ones(2)})
    assert tied.tolist() == [1.0, 1.0]
    assert refused(Into(version(given), given).finish, {"w": torch.ones(2), "t": torch.zeros(2)}) == (
        "tensor 't' shares memory with others, or within itself, and step 7 has different values there")


def test_values_are_compared_as_bytes_of_what_a_view_says() -> None:
    """NaN is what it is, and a view that negates or conjugates its memory has what it shows."""
    memory = torch.zeros(2)
    given = {"a": torch._neg_view(memory), "b": torch._neg_view(memory)}
    nan = torch.tensor([float("nan"), 2.0])
    Into(version(given), given).finish({"a": nan, "b": nan.clone()})
    assert memory[1] == -2.0 and torch.isnan(memory[0])
    held = torch.zeros(2, dtype=torch.complex64)
    views = {"a": held.conj(), "b": held.conj()}
    value = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    Into(version(views), views).finish({"a": value, "b": value.clone()})
    assert torch.equal(held, value.conj().resolve_conj())
