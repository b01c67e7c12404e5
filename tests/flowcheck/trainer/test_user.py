"""What a rank gives of itself: random numbers that go on where they were, scheduler, scaler, and what the script adds;
and how it goes to the node."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck.control.user_state import USER_BYTES, UserState
from flowcheck.errors import UserError
from flowcheck.trainer.connection import backlog
from flowcheck.trainer.user import Keeper, restore_rng, rng_state

from ..hand_node import until
from .training import joined, known


def drawn() -> list[Any]:
    generators = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]
    return [*generators, torch.randperm(9).tolist(), torch.nn.functional.dropout(torch.ones(64)).tolist()]


def kept(user: Any = None, *given: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """As it comes back."""
    model = torch.nn.Linear(2, 2)
    keeper = Keeper(optimizer or torch.optim.SGD(model.parameters(), lr=1.0), *given)
    data = keeper.give(user, 20, 3, 4, pytest.fail)
    assert data is not None and keeper.why == ""
    found = UserState.of(data, "x")
    assert (found.step, found.rank, found.ranks) == (20, 3, 4)
    return dict(found.state)


def test_random_numbers_go_on_where_they_were() -> None:
    random.gauss(0, 1)  # keeps a second one for the next call, and so does numpy's
    np.random.randn()
    rng = kept()["rng"]
    first = drawn()
    assert drawn() != first
    restore_rng(rng)
    assert drawn() == first


def test_numpy_is_taken_only_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "numpy" in rng_state()
    state = rng_state()
    monkeypatch.delitem(sys.modules, "numpy")
    assert rng_state().keys() == {"python", "torch"}
    restore_rng(rng_state())
    with pytest.raises(UserError, match="numpy is not imported here yet"):
        restore_rng(state)


class Module:
    """Of a kind of device that this machine lacks."""

    count = 2

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [torch.tensor([number], dtype=torch.uint8) for number in range(self.count)]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.were = [state.item() for state in states]

    def device_count(self) -> int:
        return self.count


def test_devices_go_on_too_if_there_are_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: {"odd": module}[device])
    state = rng_state(["odd"])
    restore_rng(state)
    assert module.were == [0, 1]
    module.count = 1
    with pytest.raises(UserError, match="2 odd devices had one, here are 1"):
        restore_rng(state)


@pytest.mark.parametrize("state", [{}, {"python": 7, "torch": 1}, {"python": random.getstate(), "torch": torch.ones(2)},
                                   rng_state() | {"numpy": ("MT19937",)}, rng_state() | {"device none": []},
                                   rng_state() | {"numpy": ("MT19937", torch.zeros(3), 1, 2, 3)},
                                   rng_state() | {"python": (3, (2**70,) * 625, None)}])
def test_a_state_that_does_not_fit_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="does not fit this process"):
        restore_rng(state)


def test_schedulers_go_on_bit_for_bit() -> None:
    """MultiStepLR keeps a Counter; the cosine goes on from the rate that the group has."""

    def made(rate: float) -> Any:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        ], milestones=[6])

    def rates(pair: Any, count: int) -> list[float]:
        optimizer, schedule = pair
        out = []
        for _ in range(count):
            optimizer.step()
            schedule.step()
            out.append(optimizer.param_groups[0]["lr"])
        return out

    for done in (0, 3, 8):
        one = made(0.3)
        rates(one, done)
        state = kept(None, one[1], optimizer=one[0])
        other = made(0.7)
        other[0].param_groups[0] |= {key: value for key, value in state["groups"][0].items() if key != "params"}
        other[1].load_state_dict(state["scheduler"])
        assert rates(other, 6) == rates(one, 6)


def test_a_scaler_and_what_the_script_adds() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = kept({"loader": {"at": 7}}, None, scaler)
    assert state["user"] == {"loader": {"at": 7}} and state["scaler"] == scaler.state_dict()
    assert kept()["user"] == {} and "scaler" not in kept() and "scheduler" not in kept()


@pytest.mark.parametrize("options", [{"scheduler": 7}, {"scaler": torch.nn.functional}])
def test_what_has_no_state_dict_is_refused(options: Any) -> None:
    with pytest.raises(UserError, match="has no state_dict"):
        Keeper(torch.optim.SGD([torch.zeros(1)], lr=1.0), **options)


class Wrong:
    def state_dict(self) -> Any:
        raise RuntimeError("no")


class Odd:
    def state_dict(self) -> Any:
        return {"seen": {1}}


@pytest.mark.parametrize(("user", "scheduler", "path", "why"), [
    ({"a": {1}, "b": 2}, None, "user['a']", "user state['user']['a']: a builtins.set cannot be kept"),
    ([], None, "user", "user: a list is not a dict"), (None, Wrong(), "scheduler", "RuntimeError: no"),
    (None, Odd(), "scheduler", "user state['scheduler']['seen']"),
    ({"a": "x" * USER_BYTES, "b": 2}, None, "user['a']", "at most"), (lambda: 1 / 0, None, "user", "ZeroDivisionError"),
    ({("odd", "key"): 1, "b": 2}, None, "user[('odd', 'key')]", "a key that is a tuple"),
])
def test_what_cannot_be_kept_costs_nothing_else(user: Any, scheduler: Any, path: str, why: str) -> None:
    said: list[str] = []
    scaler = torch.amp.GradScaler("cpu")
    keeper = Keeper(torch.optim.SGD([torch.zeros(1)], lr=0.5), scheduler, scaler)
    for step in (20, 21):
        data = keeper.give(user, step, 0, 2, said.append)
        assert why in keeper.why and f"step {step} is without" in keeper.why and data is not None
        state = UserState.of(data, "x").state
        assert list(state["missing"]) == [path] and why in state["missing"][path]
        assert state["scaler"] == scaler.state_dict() and state["groups"][0]["lr"] == 0.5 and "torch" in state["rng"]
        assert state.get("user", {}) == ({"b": 2} if path.startswith("user[") else state.get("user", {}))
        assert "scheduler" not in state
    assert len(said) == 1 and why in said[0]
    assert keeper.give({}, 22, 0, 2, said.append) is not None or scheduler is not None


def test_a_rate_of_numpy_costs_no_state() -> None:
    """As loops compute it that take the cosine from numpy."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 8))
    optimizer.step()
    schedule.step()
    rate = optimizer.param_groups[0]["lr"]
    assert type(rate) is np.float64
    state = kept({"seen": np.int64(3)}, schedule, optimizer=optimizer)
    assert state["groups"][0]["lr"] == rate and type(state["groups"][0]["lr"]) is float and state["user"] == {"seen": 3}
    assert state["scheduler"]["_last_lr"] == [rate] and state["scheduler"]["last_epoch"] == 1


def test_an_odd_option_of_a_group_costs_itself_alone() -> None:
    class Rate(float):
        """As some readers of configuration files give."""

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=Rate(0.25))
    optimizer.param_groups[0] |= {"role": object(), "scale": np.float64(2.5)}
    data = Keeper(optimizer).give(None, 1, 0, 2, lambda why: None)
    assert data is not None
    state = UserState.of(data, "x").state
    assert (state["groups"][0]["lr"], state["groups"][0]["scale"]) == (0.25, 2.5)
    assert list(state["missing"]) == ["groups[0]['role']"] and "role" not in state["groups"][0]


def test_a_scheduler_that_steps_after_the_boundary_is_said() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    keeper = Keeper(optimizer, schedule)
    said: list[str] = []
    keeper.look(said.append)  # before the first boundary
    optimizer.step()
    for _ in range(2):
        schedule.step()
        keeper.over()
        keeper.look(said.append)
    assert said == []
    for _ in range(2):
        schedule.step()
        keeper.look(said.append)
    assert len(said) == 1 and "call scheduler.step() first" in said[0]


# -- to the node -----------------------------------------------------------------------------------------------


def asked(one: Any, peer: Any) -> None:
    peer.send("wanted", what=["user"], why="")
    until(lambda: one.attachment._senders[0].node.takes_user)


def test_a_node_that_asks_gets_it_before_each_record(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    one.iterate(user={"at": 0})
    assert peer.receive()[0]["type"] == "record"  # nobody asked: an older node would not know the message
    asked(one, peer)
    assert one.attachment.state == "attached" and one.attachment.why == ""
    one.iterate(user={"at": 5})
    message, payload = peer.receive()
    assert message == {"type": "user", "iteration": 4, "rank": 0}
    state = UserState.of(payload, "x")
    assert (state.step, state.rank, state.ranks) == (5, 0, 2) and state.state["user"] == {"at": 5}
    first = torch.rand(3).tolist()
    restore_rng(state.state["rng"])
    assert torch.rand(3).tolist() == first, "the next iteration draws the same"
    assert peer.expect("record")["iteration"] == 4


def test_what_cannot_be_kept_costs_the_record_nothing(training, hand_node, caplog) -> None:
    one = training()
    peer = joined(one, hand_node)
    asked(one, peer)
    one.iterate(user={"a": object})
    assert peer.receive()[0]["type"] == "user"
    assert peer.expect("record")["iteration"] == 3 and one.attachment.state == "attached"
    assert "iteration" not in one.attachment.why and "user state['user']['a']" in one.attachment.why
    assert "versions are without a part of this rank's own state" in caplog.text
    one.iterate()
    assert peer.receive()[0]["type"] == "user" and one.attachment.why == ""


def test_what_has_not_changed_is_not_sent_again(training, hand_node) -> None:
    """To a node that says that it knows this; on each connection anew. What it has then is the whole file."""
    one = training()
    peer = joined(one, hand_node)
    peer.send("wanted", what=["user", "userhead"], why="")
    until(lambda: one.attachment._senders[0].node.takes_head)
    before, sizes = b"", list[int]()
    for does in (None, None, random.random, None):
        if does is not None:
            does()
        one.iterate(user={"at": len(sizes)})
        message, payload = peer.receive()
        file = payload + before[len(before) - message.get("same", 0):]
        assert UserState.of(file, "x").state["user"] == {"at": len(sizes)}
        assert UserState.of(file, "x").step == message["iteration"] + 1
        assert peer.receive()[0]["type"] == "record"
        before, sizes = file, [*sizes, len(payload)]
    assert sizes[0] > 8000 < sizes[2] and sizes[1] < 3000 > sizes[3]


def test_what_waits_to_be_sent_is_bounded(training, hand_node, monkeypatch: pytest.MonkeyPatch) -> None:
    one = training()
    peer = joined(one, hand_node)
    asked(one, peer)
    monkeypatch.setattr(backlog, "USER_UNSENT", 100)
    with one.attachment._senders[0]._outlet.lock:  # nothing can be sent at once
        one.iterate()
    assert peer.expect("record")["iteration"] == 3
    monkeypatch.undo()
    one.iterate()
    assert peer.receive()[0] == {"type": "user", "iteration": 4, "rank": 0}
    until(lambda: one.attachment._senders[0]._backlog._unsent == 0)


def test_a_new_connection_is_asked_anew(training, hand_node) -> None:
    one = training()
    peer = known(one, hand_node)
    asked(one, peer)
    peer.close()
    until(lambda: not one.attachment._senders[0].node.takes_user)


def test_the_scheduler_given_to_attach_is_kept(training, hand_node) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    one = training(scaler=scaler)
    peer = joined(one, hand_node)
    asked(one, peer)
    one.iterate()
    _, payload = peer.receive()
    assert UserState.of(payload, "x").state["scaler"]["scale"] == 8.0


def test_a_device_that_knows_one_generator_goes_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's module of it has no get_rng_state_all."""

    class One:
        def get_rng_state(self) -> torch.Tensor:
            return torch.tensor([7], dtype=torch.uint8)

        def set_rng_state(self, state: torch.Tensor) -> None:
            self.was = state.tolist()

    module = One()
    monkeypatch.setattr(torch, "get_device_module", lambda device: {"odd": module}[device])
    state = rng_state(["odd"])
    assert state["device odd"] == [b"\x07"]
    restore_rng(state)
    assert module.was == [7]


@pytest.mark.parametrize("where", ["scheduler", "scaler"])
def test_what_has_no_state_is_refused_by_its_name(where: str) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    with pytest.raises(UserError, match=r"a int has no state_dict\(\)") as raised:
        Keeper(optimizer, **{where: 7})
    assert raised.value.where == where


def test_parameters_of_meta_and_cpu_have_no_generators_of_their_own() -> None:
    """And groups say of each whether it is stepped."""
    model = torch.nn.Linear(2, 2, device="meta")
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": [model.weight, frozen.bias]}, {"params": frozen.weight}], lr=1.0)
    state = kept(optimizer=optimizer)
    assert state["rng"].keys() == {"python", "torch", "numpy"}
    assert [(group["params"], group["lr"]) for group in state["groups"]] == [([True, False], 1.0), ([False], 1.0)]


def test_why_is_the_error_as_people_read_it() -> None:
    keeper, said = Keeper(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)), list[str]()
    assert keeper.why == ""
    assert keeper.give([1], 20, 3, 4, said.append) is not None  # type: ignore[arg-type]
    what = UserError("a list is not a dict", where="user", remedy='user={"loader": ...}').message()
    assert said == [f"versions are without a part of this rank's own state: user: {what}"]
    assert keeper.why == f"step 20 is without a part of this rank's own state: user: {what}"


def test_what_the_script_adds_may_be_a_function_that_is_asked_each_time() -> None:
    seen = iter((7, 8))

    def user() -> dict[str, int]:
        return {"seen": next(seen)}

    assert [kept(user)["user"] for _ in "ab"] == [{"seen": 7}, {"seen": 8}]
