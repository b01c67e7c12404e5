"""What `recover` gives, in words and loaded: what fits goes in, and of what does not nothing does. Without a node."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowcheck.errors import UserError
from flowcheck.trainer.recover import recovered
from flowcheck.trainer.recover.recovered import Recovered
from flowcheck.trainer.user import rng_state

OPTIONS = {**torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9).defaults}
VERSION = Recovered(
    7, 2, "run", "", {"w": torch.tensor([1.5, 2.5]), "b": torch.tensor([3.5])},
    {"state": {0: {"momentum_buffer": torch.tensor([4.0, 5.0])}}, "param_groups": [{**OPTIONS, "params": [0, 1]}]},
    status="verified", source="node0, memory", nbytes=1234567, seconds=1.239, version_epoch=1,
)


class Job:
    def __init__(self, make: Callable[[list[Any]], Any] | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(2, dtype=dtype)),
                                             "b": torch.nn.Parameter(torch.zeros(1, dtype=dtype))})
        them = [self.model["w"], self.model["b"]]
        self.optimizer = make(them) if make else torch.optim.SGD(them, lr=1.0, momentum=0.5)

    def refuses(self, version: Recovered) -> str:
        """Why it is not loaded; and nothing of it is."""
        with pytest.raises(UserError) as caught:
            version.load(self.model, self.optimizer)
        assert caught.value.where == "recover" and caught.value.remedy
        assert not any(value.any() for value in self.model.values()) and not self.optimizer.state
        return caught.value.what


def groups(*sizes: int, **options: Any) -> dict[str, Any]:
    """Of an optimizer of parameters 0, 1, ... in groups of so many."""
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    return {"state": {}, "param_groups": [{**OPTIONS, **options, "params": list(range(start, start + size))}
                                          for start, size in zip(first, sizes, strict=True)]}


def test_all_of_it_is_loaded() -> None:
    job = Job()
    VERSION.load(job.model, job.optimizer)
    assert job.model["w"].tolist() == [1.5, 2.5] and job.model["b"].tolist() == [3.5]
    assert job.optimizer.state[job.model["w"]]["momentum_buffer"].tolist() == [4.0, 5.0]
    assert job.model["b"] not in job.optimizer.state and job.optimizer.param_groups[0]["momentum"] == 0.9


def test_how_many_steps_there_were_has_no_shape_of_a_parameter() -> None:
    job = Job(lambda them: torch.optim.AdamW(them, lr=1.0))
    held = {"step": torch.tensor(7.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    adam = {**torch.optim.AdamW([torch.zeros(1)]).defaults, "params": [0, 1]}
    replace(VERSION, optimizer={"state": {0: held}, "param_groups": [adam]}).load(job.model, job.optimizer)
    assert job.optimizer.state[job.model["w"]]["step"].item() == 7.0


def test_state_of_another_type_is_the_optimizers_own_business() -> None:
    """torch makes it that of the parameter."""
    job = Job()
    held = {0: {"momentum_buffer": torch.tensor([4.0, 5.0], dtype=torch.float64)}}
    replace(VERSION, optimizer={**VERSION.optimizer, "state": held}).load(job.model, job.optimizer)
    assert job.optimizer.state[job.model["w"]]["momentum_buffer"].tolist() == [4.0, 5.0]


def test_a_fresh_start_has_nothing_to_load() -> None:
    assert Job().refuses(replace(VERSION, source="")).startswith(
        "Recovered(nothing: no node has a version of run 'run', a fresh start at step 0) has 2 entries and 2 optimized")
    assert "has 0 entries and 0 optimized parameters; here are 2 and 2" in Job().refuses(Recovered(0, 0, "", ""))


@pytest.mark.parametrize(("change", "what"), [
    ({"model": {"w": torch.zeros(2), "c": torch.zeros(1)}}, "has 2 entries and 2 optimized parameters; here are 2 and"
     " 2, or others"),
    ({"model": {"w": torch.zeros(2)}}, "has 1 entries and 2 optimized parameters; here are 2 and 2"),
    ({"optimizer": groups(1)}, "has 2 entries and 1 optimized parameters; here are 2 and 2"),
    ({"optimizer": groups(2, 1)}, "has 2 entries and 3 optimized parameters; here are 2 and 2"),
    ({"optimizer": groups(1, 1)}, "is of another optimizer: its groups have [1, 1] parameters; here is SGD of [2]"),
    ({"optimizer": groups(2, 0)}, "is of another optimizer: its groups have [2, 0] parameters; here is SGD of [2]"),
    ({"model": {"w": torch.zeros(1, 2), "b": torch.zeros(1)}}, "w has the shape [1, 2], and here [2]"),
    ({"model": {"w": torch.zeros(2), "b": torch.zeros(1, dtype=torch.float64)}},
     "b is torch.float64, and here torch.float32"),
    ({"optimizer": {**groups(2), "state": {1: {"momentum_buffer": torch.zeros(2)}}}},
     "momentum_buffer has the shape [2], and here [1]"),
    ({"stepped": ("b", "w")}, "is of another optimizer: the one here has 'w' as its parameter 0"),
    ({"stepped": ("w", "b", "more")}, "is of another optimizer: the one here lacks 'more'"),
])
def test_what_does_not_fit_is_refused_whole(change: dict[str, Any], what: str) -> None:
    assert what in Job().refuses(replace(VERSION, **change))


def test_options_that_a_group_does_not_say_are_named_in_order() -> None:
    held = groups(1, 1)
    for group, names in zip(held["param_groups"], (("nesterov", "lr"), ("momentum", "lr")), strict=True):
        for name in names:
            del group[name]
    job = Job(lambda them: torch.optim.SGD([{"params": them[:1]}, {"params": them[1:]}], lr=1.0))
    what = job.refuses(replace(VERSION, optimizer=held))
    assert "is of another optimizer: its groups do not say lr, momentum, nesterov; here is SGD of [1, 1]" in what


@pytest.mark.parametrize(("model", "optimizer", "what"), [
    ({}, None, "a dict is given for the model"), (torch.nn.Linear(1, 1), [], "a list is given for the optimizer"),
])
def test_what_is_no_model_and_no_optimizer(model: Any, optimizer: Any, what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        VERSION.load(model, optimizer)
    assert (caught.value.where, caught.value.remedy) == ("recover", "recovered.load(model, optimizer)")


def test_pieces_of_megatron_are_put_where_its_optimizers_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of them; test_megatron.py has Megatron-Core's own, where that is installed."""
    job, said = Job(), list[Any]()

    class Pieces:
        def __init__(self, model: Any, optimizer: Any) -> None:
            said.append((model, optimizer))

        def entries(self) -> dict[str, torch.Tensor]:
            return {"w": torch.zeros(2), "b": torch.zeros(1)}

        def put(self, values: Any) -> None:
            said.append(sorted(values))

        def to_model(self) -> None:
            said.append(dict(job.optimizer.state_dict()["state"]))

    monkeypatch.setattr(recovered, "pieces_of", Pieces)
    monkeypatch.setattr(recovered, "is_megatron", lambda model: model is job.model)
    job.model = torch.nn.ParameterDict({"of another name": job.model["w"], "b": job.model["b"]})
    VERSION.load(job.model, job.optimizer)
    assert said == [(job.model, job.optimizer), ["b", "w"], job.optimizer.state_dict()["state"]] and said[-1]
    assert not any(value.any() for value in job.model.values()), "by them alone"


# -- in words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "words"), [
    ({}, "Recovered(step 7 of run 'run', epoch 1, verified, from node0, memory: 1,234,567 bytes in 1.24 s)"),
    ({"unproven": ("a", "b"), "passed": ("y", "z")}, "Recovered(step 7 of run 'run', epoch 1, verified, unproven: a; b,"
     " from node0, memory: 1,234,567 bytes in 1.24 s; not taken: y; z)"),
    ({"source": ""}, "Recovered(nothing: no node has a version of run 'run', a fresh start at step 0)"),
    ({"source": "", "run_id": "", "passed": ("y",)},
     "Recovered(nothing: no node has a version, a fresh start at step 0; not taken: y)"),
    ({"source": "\ud800", "nbytes": 999},
     "Recovered(step 7 of run 'run', epoch 1, verified, from \\ud800: 999 bytes in 1.24 s)"),
])
def test_what_it_says_of_itself(change: dict[str, Any], words: str) -> None:
    one = replace(VERSION, **change)
    assert repr(one) == str(one) == words and bool(one) is bool(one.source)


def test_what_a_fresh_start_has() -> None:
    one = Recovered(0, 3, "run", "a")
    assert (one.model, one.optimizer) == ({}, {})
    for part in recovered.PARTS:
        assert not one.has(part)
        with pytest.raises(UserError, match="starts fresh"):
            getattr(one, part)
    with pytest.raises(UserError, match="is not one of user, scheduler, scaler, rng"):
        one.has("model")
    assert (one.status, one.unproven, one.passed, one.version_epoch) == ("", (), (), -1)
    assert (one.nbytes, one.seconds, one.source) == (0, 0.0, "")


def test_random_numbers_go_on_where_they_were() -> None:
    random.seed(3)
    torch.manual_seed(3)
    one = replace(VERSION, parts={"rng": rng_state()})
    drawn = random.random(), torch.rand(2).tolist()
    one.restore_rng()
    assert (random.random(), torch.rand(2).tolist()) == drawn
    with pytest.raises(UserError, match="step 7 does not have it for this rank"):
        VERSION.restore_rng()
