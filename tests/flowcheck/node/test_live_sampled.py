"""A session whose trainer's state is not what its gradients make of it: what the record's sample and checksums stop.

The model is live_scene.py's, under Adam with a learning rate of 0: parameters stay 1.0 whatever becomes of its state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowcheck.control.checksum import checksum

from ..sample_oracle import sample_of
from .live_scene import NAMES, Live, small_job


class Trained:
    """The trainer's side: torch's Adam, fed with gradients of 1.0. broken: what a script does to it after a step."""

    def __init__(self, at: Live, lr: float = 0.0) -> None:
        self.at = at
        self.parameters = {entry.name: torch.nn.Parameter(torch.ones(entry.shape)) for entry in at.job.model}
        self.optimizer = torch.optim.Adam(self.parameters.values(), lr=lr, foreach=False)

    @property
    def state(self) -> dict[str, Any]:
        return {name: self.optimizer.state[one] for name, one in self.parameters.items() if self.optimizer.state[one]}

    def step(self, *, skipped: bool = False) -> None:
        for one in self.parameters.values():
            one.grad = torch.ones_like(one)
        if not skipped:
            self.optimizer.step()

    def sample(self, number: int) -> str:
        return sample_of(self.parameters, self.state, number)

    def sums(self) -> dict[str, str]:
        kept = {f"optimizer.{name}.{key}": one for name, of in self.state.items() for key, one in of.items()}
        return {name: f"{checksum(one.detach()):016x}" for name, one in (self.parameters | kept).items()}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trained]:
    def start(first: int = 2, lr: float = 0.0) -> Trained:
        job = small_job(optimizer="adam", options={"lr": lr})
        at = Live(monkeypatch, job, first=100)
        one = Trained(at, lr)
        at.state(first)
        return one

    return start


def test_equal_samples_are_counted_and_verify_nothing(trained) -> None:
    """Before the first step, too, and of one that was skipped."""
    one = trained(0)
    for t, skipped in enumerate((True, False, True, False)):
        one.step(skipped=skipped)
        closed = one.at.step(t, sample=one.sample(100 + t), skipped=skipped)
        assert (closed.published, closed.status) == (True, "unverified"), closed.why
        assert closed.sampled == len(NAMES) * (4 if t else 1)
    assert one.at.session.matches == 0


def test_a_trainer_that_sends_no_sample_is_followed_as_before(trained) -> None:
    one = trained()
    assert (one.at.step(2).published, one.at.closed[-1].sampled, one.at.closed[-1].status) == (True, 0, "unverified")


def _weights(one: Trained) -> None:
    one.parameters["layer1.bias"].data.clamp_(max=0.5)


def _state_lost(one: Trained) -> None:
    one.optimizer.state[one.parameters["layer1.bias"]].clear()


@pytest.mark.parametrize(("broken", "name"), [
    (_weights, "layer1.bias"), (_state_lost, "optimizer.layer1.bias.step"),
    *((lambda one, key=key: one.optimizer.state[one.parameters["layer1.bias"]][key].add_(1.0),
       f"optimizer.layer1.bias.{key}") for key in ("step", "exp_avg", "exp_avg_sq")),
])
@pytest.mark.parametrize("skipped", [False, True])
def test_a_sample_that_differs_stops_the_version(trained, broken: Any, name: str, skipped: bool) -> None:
    one, at = trained(), None
    at = one.at
    one.step()
    assert at.step(2, sample=one.sample(102)).published
    one.step(skipped=skipped)
    broken(one)
    closed = at.step(3, sample=one.sample(103), skipped=skipped)
    assert (closed.published, closed.status) == (False, "diverged") and [clause for clause, _ in closed.why] == [
        "checksum"]
    assert at.lost == [f"tensor {name!r} of iteration 103 differs from the trainer's"] and at.withdrawn == [True]


def test_with_a_learning_rate_of_0_a_wrong_state_is_not_verified(trained) -> None:
    """Sums of parameters are right; of all tensors they are not."""
    one = trained()
    for t in (2, 3):
        one.step()
        assert one.at.step(t, checksums=one.sums()).status == "verified"
    one.step()
    one.optimizer.state[one.parameters["layer0.weight"]]["exp_avg"].mul_(2)
    only = {name: text for name, text in one.sums().items() if name in NAMES}
    before = one.at.session.matches
    assert one.at.step(4, checksums=only).published and one.at.session.matches == before
    one.step()
    assert one.at.step(5, checksums=one.sums()).status == "diverged"
    assert one.at.lost == ["tensor 'optimizer.layer0.weight.exp_avg' of iteration 105 differs from the trainer's"]


@pytest.mark.parametrize("lacks", ["layer0.bias", "optimizer.layer1.weight.step", "optimizer.layer1.bias.exp_avg_sq"])
def test_sums_of_all_but_one_tensor_verify_nothing(trained, lacks: str) -> None:
    one = trained()
    one.step()
    sums = one.sums()
    assert one.at.step(2, checksums={n: text for n, text in sums.items() if n != lacks}).status == "unverified"
    one.step()
    assert one.at.step(3, checksums=one.sums()).status == "verified"


def test_a_state_that_the_version_has_not_is_named(trained) -> None:
    """amsgrad was switched on after attach."""
    one = trained()
    one.step()
    closed = one.at.step(2, checksums=one.sums() | {"optimizer.layer0.weight.max_exp_avg_sq": "0" * 16})
    assert closed.status == "diverged" and "max_exp_avg_sq" in one.at.lost[0]
