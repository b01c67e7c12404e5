"""A base: a few parameters a boundary, whatever the optimizer keeps of them, and a record's options."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowcheck.errors import UserError
from flowcheck.trainer.log.base import Base, BaseHead, BasePiece, Taker
from flowcheck.trainer.log.copies import copy_of
from flowcheck.trainer.log.record import Opaque, StepRecord, options_of, set_options

from .optimizers import EightBit, Lion, Normed
from .recorded import plain


def parameters(sizes: tuple[int, ...] = (10, 10, 1000, 10, 0)) -> dict[str, torch.Tensor]:
    return {f"p{at}": torch.nn.Parameter(torch.ones(size)) for at, size in enumerate(sizes)}


def taken(taker: Taker, step: int) -> list[str]:
    found = taker.take(step)
    return [] if found is None else [one.name for one in found.parts() if isinstance(one, BasePiece)]


def test_a_boundary_takes_what_its_budget_has_room_for_and_one_in_any_case() -> None:
    held = parameters()
    taker = Taker(Lion(list(held.values())), held, 80)
    assert [taken(taker, step) for step in range(4)] == [["p0", "p1"], ["p2"], ["p3", "p4"], []]
    assert taker.whole
    taker.begin()
    assert not taker.whole and taken(taker, 9) == ["p0", "p1"]


def test_pieces_are_copies_of_their_own_step() -> None:
    held = parameters((3, 4))
    optimizer = torch.optim.Adam(held.values(), lr=0.1)
    taker = Taker(optimizer, held, 1)
    base: Base | None = None
    for step in range(2):
        for one in held.values():
            one.grad = torch.ones_like(one)
        optimizer.step()
        found = taker.take(step + 1)
        assert found is not None and found.nbytes in (3 * 12 + 4, 4 * 12 + 4)
        for part in found.parts():
            if isinstance(part, BaseHead):
                base = Base(part)
            elif base is not None:
                base.add(part)
    assert base is not None and base.whole and (base.first, base.last) == (1, 2)
    steps = {name: float(piece.state["step"].tensor) for name, piece in base.pieces.items() if piece.state}
    assert steps == {"p0": 1.0, "p1": 2.0}
    with pytest.raises(UserError):
        base.add(base.pieces["p0"])


def test_what_could_not_be_taken_is_taken_the_next_time() -> None:
    held = parameters((2, 2))
    optimizer = Lion(list(held.values()))
    optimizer.state[held["p1"]] = {"odd": object()}
    taker = Taker(optimizer, held, 1 << 20)
    with pytest.raises(UserError):
        taker.take(0)
    optimizer.state[held["p1"]] = {}
    found = taker.take(1)
    assert found is not None and isinstance(found.parts()[0], BaseHead)
    assert [(one.name, one.step) for one in found.parts() if isinstance(one, BasePiece)] == [("p0", 1), ("p1", 1)]


def test_no_state_and_an_empty_one_are_two_things() -> None:
    held = parameters((2, 2))
    optimizer = Lion(list(held.values()))
    optimizer.state[held["p1"]] = {}
    found = Taker(optimizer, held, 1 << 20).take(0)
    assert found is not None
    assert [one.state for one in found.parts() if isinstance(one, BasePiece)] == [None, {}]
    assert held["p0"] not in optimizer.state  # asking makes none


def test_state_under_other_keys_is_taken_with_all_parameters_at_once() -> None:
    held = parameters()
    optimizer = Normed(list(held.values()))
    optimizer.state["all"] = {"norm": torch.tensor(3.0)}  # type: ignore[index]
    with pytest.raises(UserError):
        Taker(optimizer, held, 1).take(0)
    taker = Taker(optimizer, held, 1, at_once=True)
    assert taken(taker, 0) == list(held) and taker.whole


class Strange:
    """Something that a state may not hold."""


class Sub(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize("value", [Strange(), {1, 2}, torch.zeros(2).as_subclass(Sub), torch.zeros(2, device="meta"),
                                   torch.zeros(9).as_strided((2, 2), (1, 1)), torch.zeros(1 << 16)[:: 1 << 14]])
def test_state_that_could_not_be_given_back_is_refused_by_name(value: Any) -> None:
    held = parameters((2,))
    optimizer = EightBit(list(held.values()))
    optimizer.state[held["p0"]] = {"odd": [value]}
    with pytest.raises(UserError) as caught:
        Taker(optimizer, held, 1 << 20).take(0)
    assert "p0" in caught.value.where and "odd" in caught.value.where and caught.value.remedy


def test_numbers_of_numpys_that_compute_otherwise_are_refused() -> None:
    numpy = pytest.importorskip("numpy")
    assert plain(copy_of(numpy.float64(0.5), None, "x")) == plain(0.5)
    with pytest.raises(UserError):
        copy_of(numpy.float32(0.5), None, "x")


# -- options -----------------------------------------------------------------------------------------------------


def schedule(step: int) -> float:
    return 0.1


def test_options_are_copied_whole_and_set_whole() -> None:
    held = list(parameters((2, 3)).values())
    rate = torch.tensor(0.5)
    optimizer = Lion([{"params": held[:1], "lr": rate, "count": 3, "betas": (0.9, None), "by": schedule,
                       "both": [1, schedule]},
                      {"params": held[1:]}])
    options = options_of(optimizer)
    rate.fill_(0.1)
    optimizer.param_groups[0] |= {"lr": 7.0, "later": 1}
    del optimizer.param_groups[0]["count"]
    set_options(optimizer.param_groups, options)
    group = optimizer.param_groups[0]
    assert group.pop("params") == held[:1] and group.pop("lr") == torch.tensor(0.5)
    assert group == {"count": 3, "betas": (0.9, None), "by": schedule, "both": [1, schedule]}
    assert isinstance(options[0]["by"], Opaque) and optimizer.param_groups[1]["lr"] == 0.01


def test_an_option_that_cannot_be_written_has_to_be_here() -> None:
    held = list(parameters((2,)).values())
    options = options_of(Lion([{"params": held, "by": schedule}]))
    plainer = Lion(held)
    with pytest.raises(UserError) as caught:
        set_options(plainer.param_groups, options)
    assert "by" in caught.value.what and plainer.param_groups[0]["lr"] == 0.01


def test_large_tensors_in_options_are_refused() -> None:
    held = list(parameters((2,)).values())
    with pytest.raises(UserError) as caught:
        StepRecord.of(Lion([{"params": held, "masters": [torch.zeros(1 << 20)]}]))
    assert "masters" in caught.value.where
