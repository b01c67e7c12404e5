"""What a script has said of an iteration, before any of it is sent: factors, scales, and what contradicts itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.errors import UserError
from flowcheck.trainer import loop
from flowcheck.trainer.loop import IterationInputs


class Script(IterationInputs):
    """Two parameters, and their gradients. told: what `step` was called with."""

    def __init__(self, scaler: Any = None) -> None:
        self.first, self.second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        self.told: list[dict[str, Any]] = []
        super().__init__(torch.optim.SGD([self.first, self.second], lr=1.0), scaler)
        self._scale = self._scale_now()
        self.backward()

    def backward(self, value: float = 3.0) -> None:
        for parameter in (self.first, self.second):
            parameter.grad = torch.full((2,), value)

    def step(self, **told: Any) -> None:  # type: ignore[override]
        self.told.append(told)

    def said(self, *, heard: Any = None, **told: Any) -> tuple[float | None, float | None, bool]:
        return self._said_of_it(told.get("clip"), told.get("scale"), told.get("skipped", False), heard)


# -- clipping --------------------------------------------------------------------------------------------------


def test_what_torch_is_asked_for_is_what_the_script_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    clip = torch.nn.utils.clip_grad_norm_

    def listened(*given: Any) -> torch.Tensor:
        asked.append(given[1:])
        return clip(*given)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", listened)
    one = Script()
    one.clip_grad_norm_(iter([one.first, one.second]), 0.5, 1.0, True, False)
    one.clip_grad_norm_([one.first, one.second], 0.5)
    assert asked == [(0.5, 1.0, True, False), (0.5, 2.0, False, None)]


def test_a_norm_that_is_no_number_is_torchs_business() -> None:
    one = Script()
    one.backward(float("nan"))
    assert one.clip_grad_norm_([one.first, one.second], 1.0).isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        one.clip_grad_norm_([one.first, one.second], 1.0, error_if_nonfinite=True)
    clip, scale, skipped = one.said()
    assert clip != clip and (scale, skipped) == (None, False)


@pytest.mark.parametrize(("most", "norm_type", "factor"), [(3.0, 2.0, 0.5), (3.0, float("inf"), 1.0), (6.0, 1.0, 0.5)])
def test_the_factor_is_torchs(most: float, norm_type: float, factor: float) -> None:
    """The norm of four gradients of 3 is 6, or 3, or 12."""
    one = Script()
    one.clip_grad_norm_([one.first, one.second], most, norm_type)
    clip, _, _ = one.said()
    assert clip == pytest.approx(factor) and clip <= 1.0
    assert torch.equal(one.first.grad, torch.full((2,), 3.0) * torch.tensor(clip))
    assert one.said() == (None, None, False), "it is of one iteration"


def test_one_tensor_and_what_has_no_gradient() -> None:
    one = Script()
    one.second.grad = None
    one.clip_grad_norm_(one.first, 1.0)
    assert 0 < one.said()[0] < 1
    one.backward()
    one.clip_grad_norm_(one.first, 1.0)
    with pytest.raises(UserError, match="not all gradients of the optimizer were clipped"):
        one.said()


@pytest.mark.parametrize(("clips", "told", "what"), [
    (2, {}, "clipped twice"), (3, {}, "clipped twice"), (1, {"clip": 1.0}, "a clip besides"),
])
def test_a_factor_that_is_said_twice(clips: int, told: dict[str, float], what: str) -> None:
    one = Script()
    for _ in range(clips):
        one.clip_grad_norm_([one.first, one.second], 1.0)
    with pytest.raises(UserError, match=what) as caught:
        one.said(**told)
    assert caught.value.where == "clip_grad_norm_" and one.said(clip=0.5) == (0.5, None, False)


# -- what the optimizer says itself ------------------------------------------------------------------------------


def test_what_was_heard_of_the_optimizer_counts() -> None:
    one = Script()
    assert one.said(heard=(0.5, 8.0, False)) == (0.5, 8.0, False)
    assert one.said(heard=(None, None, True)) == (None, None, True)
    assert one.said(heard=(None, None, False), skipped=True) == (None, None, True)


@pytest.mark.parametrize("told", [{"clip": 1.0}, {"scale": 1.0}, None], ids=str)
def test_a_script_says_no_other_factor(told: dict[str, float] | None) -> None:
    one = Script()
    if told is None:
        one.clip_grad_norm_([one.first, one.second], 1.0)
    with pytest.raises(UserError, match="the script says another factor") as caught:
        one.said(heard=(0.5, None, False), **(told or {}))
    assert caught.value.where == "step"


# -- scalers -----------------------------------------------------------------------------------------------------


class Scaler:
    def __init__(self, *scales: float | None) -> None:
        self.scales, self.enabled = list(scales), True

    def is_enabled(self) -> bool:
        return self.enabled

    def get_scale(self) -> Any:
        return self.scales.pop(0)


def test_a_scale_is_that_of_before_and_a_smaller_one_tells_of_an_overflow() -> None:
    one = Script(Scaler(4, 4.0, 8.0, 2.0, 2.0, 1.0))
    assert [one.said() for _ in range(3)] == [(None, 4.0, False), (None, 4.0, False), (None, 8.0, True)]
    assert one.said(skipped=True) == (None, 2.0, True), "although it is the same afterwards"
    assert one.said(scale=7.0) == (None, 7.0, False), "what is told goes before it"


def test_a_scaler_that_is_switched_off_on_the_way() -> None:
    one = Script(Scaler(4.0, 4.0))
    one._scaler.enabled = False
    assert one.said() == (None, 4.0, False) and one.said() == (None, None, False)


@pytest.mark.parametrize(("scaler", "scale"), [
    (None, None), (SimpleNamespace(), None), (SimpleNamespace(get_scale=7), None),
    (SimpleNamespace(get_scale=lambda: 7), 7.0), (SimpleNamespace(get_scale=lambda: 7, is_enabled=lambda: False), None),
    (SimpleNamespace(get_scale=lambda: torch.tensor(2.0)), 2.0),
])
def test_scalers_of_others(scaler: Any, scale: float | None) -> None:
    found = Script(scaler)._scale_now()
    assert found == scale and type(found) is type(scale)


# -- a block ------------------------------------------------------------------------------------------------------


def test_a_block_is_one_iteration() -> None:
    one = Script()
    with one.iteration():
        assert one.told == []
    with one.iteration(user={"seen": 1}):
        pass
    with pytest.raises(ZeroDivisionError), one.iteration():
        raise ZeroDivisionError
    assert one.told == [{"user": None}, {"user": {"seen": 1}}]


def test_states_from_the_best_to_the_worst() -> None:
    assert [str(state) for state in loop.AttachmentState] == [
        "attached", "attaching", "watching", "lost", "refused", "closed"]
