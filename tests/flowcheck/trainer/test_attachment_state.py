"""The one boundary that waits, until the node has the state; and what is in that state."""

from __future__ import annotations

import threading

import pytest
import safetensors.torch
import torch

from ..hand_node import LONGEST, until
from .training import COMMUNICATOR, FLOW, Every, Training, clock_of_waiting, connected, joined


def test_the_boundary_waits_until_the_node_has_joined_and_has_the_state(training, hand_node, script) -> None:
    one = training(max_stall_s=LONGEST)
    peer = connected(one, hand_node)
    states: list[dict[str, torch.Tensor]] = []

    def node() -> None:
        peer.expect("flows")
        peer.expect("manifest")
        peer.send("progress", iteration=0, status="")  # it says something that is not what is waited for
        peer.send("wanted", what=["state"], why="a state to begin with")
        message, payload = peer.receive()
        (group,) = message.pop("groups")  # of the step that made it
        assert message == {"type": "state", "iteration": 3} and group["lr"] == 1.0
        states.append(safetensors.torch.load(payload))
        peer.send("progress", iteration=1, status="")
        peer.send("joined", iteration=3)

    script(node)
    one.iterate(3)
    assert one.attachment.state == "attached"
    (state,) = states
    assert {name: value.tolist() for name, value in state.items()} == {
        f"model.{name}": value.tolist() for name, value in one.values.items()
    }


def test_the_first_attempt_is_waited_for_as_long_as_told(training) -> None:
    told: list[float | None] = []

    class Tried(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            told.append(timeout)
            return False

    one = training(max_stall_s=0.25)
    one.attachment._senders[0].tried = Tried()
    one.iterate(4)
    assert told == [0.25] and one.attachment.number == 4


@pytest.mark.parametrize("state", [False, True], ids=["no state", "a state"])
def test_less_than_a_second_is_waited_too(training, hand_node, script, monkeypatch, state: bool) -> None:
    """The clock stands still, so that half a second is never over: what ends the wait is the node's answer."""
    one = training(max_stall_s=0.5)
    peer = connected(one, hand_node)
    clock_of_waiting(monkeypatch, lambda: 1000.0)

    def node() -> None:
        peer.expect("flows")
        peer.expect("manifest")
        if state:
            peer.send("wanted", what=["state"], why="a state to begin with")
            assert peer.receive()[0].items() >= {"type": "state", "iteration": 3}.items()
        peer.send("joined", iteration=3)

    script(node)
    one.iterate(3)
    assert one.attachment.state == "attached"


def test_without_any_time_nothing_is_waited_for(training, hand_node, monkeypatch) -> None:
    """Neither for the node nor for its answer to a state: the clock stands still at the deadline."""
    one = training(max_stall_s=0.0)
    peer = connected(one, hand_node)
    clock_of_waiting(monkeypatch, lambda: 1000.0)
    one.iterate(3)
    assert one.attachment.state == "attaching"
    peer.send("wanted", what=["state"], why="a state")
    until(lambda: one.attachment._senders[0].node.wanted)
    one.iterate()
    assert (one.attachment.state, one.attachment.number) == ("attaching", 4)


def test_other_ranks_wait_at_that_boundary_too(training, hand_node, script) -> None:
    one = training(max_stall_s=LONGEST, rank=1)
    peer = connected(one, hand_node)

    def node() -> None:
        peer.expect("flows")
        peer.send("wanted", what=["state"], why="of rank 0")
        until(lambda: one.attachment._senders[0].node.wanted)
        peer.send("joined", iteration=3)

    script(node)
    one.iterate(3)
    assert one.attachment.state == "attached"
    one.iterate()
    assert peer.expect("record")["iteration"] == 3  # no state was sent by this rank


def test_a_node_that_looks_for_channels_first_is_not_waited_for(training, hand_node, script) -> None:
    """It joins when it has found them. The state that it asks for then is given at a boundary of its own."""
    flows = [FLOW, {key: value for key, value in FLOW.items() if key != "channel"}]
    one = training(max_stall_s=3600.0, topology=lambda: {"communicator": COMMUNICATOR, "flows": flows})
    peer = connected(one, hand_node)
    one.iterate(4)
    assert peer.expect("flows")["flows"][0] == FLOW and peer.expect("manifest")["first"] == 2
    peer.send("wanted", what=["state"], why="a state to begin with")
    until(lambda: one.attachment._senders[0].node.wanted)

    def node() -> None:
        assert peer.receive()[0].items() >= {"type": "state", "iteration": 5}.items()
        peer.send("joined", iteration=5)

    script(node)
    one.iterate()
    assert one.attachment.state == "attached"


def test_the_wait_ends_with_the_connection(training, hand_node, script) -> None:
    one = training(max_stall_s=3600.0)
    peer = connected(one, hand_node)

    def node() -> None:
        peer.expect("flows")
        peer.close()

    script(node)
    one.iterate(3)
    assert one.attachment.state == "lost"


def test_the_wait_for_the_first_attempt_ends_with_it(wrapped, hand_node) -> None:
    """A node that does not listen costs nothing."""
    address = hand_node.address
    hand_node.close()
    one = Training(wrapped, address, max_stall_s=3600.0)
    one.iterate(3)
    assert one.attachment.state == "lost"
    one.attachment.close(0.0)


def test_a_state_that_came_too_late_is_sent_again_at_the_next_boundary(training, hand_node, script) -> None:
    one = training(max_stall_s=3600.0)
    peer = connected(one, hand_node)

    def node() -> None:
        peer.expect("flows")
        peer.expect("manifest")
        peer.send("wanted", what=["state"], why="a state to begin with")
        assert peer.receive()[0].items() >= {"type": "state", "iteration": 3}.items()
        peer.send("wanted", what=["state"], why="too late")

    script(node)
    one.iterate(3)
    assert (one.attachment.state, one.attachment.why) == ("attaching", "too late")

    def later() -> None:
        assert peer.receive()[0].items() >= {"type": "state", "iteration": 4}.items()
        peer.send("joined", iteration=3)  # of the state before: not what is waited for
        peer.send("joined", iteration=4)

    script(later)
    one.iterate()
    assert one.attachment._senders[0].node.joined == 4


def test_a_node_that_notices_something_while_it_takes_a_state_is_not_waited_for(training, hand_node, script) -> None:
    """What it had noticed before is no reason: it has asked all the same."""
    one = training(max_stall_s=3600.0)
    peer = connected(one, hand_node)
    waited: list[int | None] = []

    def node() -> None:
        peer.expect("flows")
        peer.expect("manifest")
        peer.send("notice", why="the mirror brings nothing")
        peer.send("wanted", what=["state"], why="a state to begin with")
        assert peer.receive()[0].items() >= {"type": "state", "iteration": 3}.items()
        peer.send("progress", iteration=1, status="")
        until(lambda: one.attachment.published == (1, ""))
        waited.append(one.attachment.number)
        peer.send("notice", why="it came too late; a state is asked for later")

    script(node)
    one.iterate(3)
    until(lambda: waited)
    assert waited == [2]  # the boundary was not over yet
    assert (one.attachment.state, one.attachment._senders[0].node.joined) == ("attaching", None)


def test_a_state_that_is_no_longer_wanted_is_not_waited_for(training, hand_node, monkeypatch) -> None:
    """The node may take it back while the boundary begins."""
    one = training(max_stall_s=3600.0)
    peer = connected(one, hand_node, resync="ranges")
    one.iterate(3)
    peer.expect("flows")
    peer.expect("manifest")
    sender = one.attachment._senders[0]
    peer.send("wanted", what=["state"], why="iteration 2 is lost")
    until(lambda: sender.node.wanted)

    def clock() -> float:
        if sender.node.wanted:
            peer.send("wanted", what=[], why="")
            until(lambda: not sender.node.wanted)
        return 1000.0

    clock_of_waiting(monkeypatch, clock)
    one.iterate()
    assert one.attachment.number == 4 and not sender.node.pledged


def test_a_state_that_is_taken_back_a_moment_later_is_not_waited_for_either(training, hand_node, monkeypatch) -> None:
    """Nor is a node that has not joined yet, at a boundary of which only the state was the reason to wait."""
    one = training(max_stall_s=3600.0)
    peer = connected(one, hand_node, resync="ranges")
    one.iterate(3)
    peer.expect("flows")
    peer.expect("manifest")
    sender = one.attachment._senders[0]
    peer.send("wanted", what=["state"], why="iteration 2 is lost")
    until(lambda: sender.node.wanted)

    class Answered(threading.Event):
        def clear(self) -> None:
            if sender.node.wanted:
                peer.send("wanted", what=[], why="")
                until(lambda: not sender.node.wanted)
            super().clear()

    one.attachment._parts[0]._upload._answered = Answered()
    one.iterate()
    assert one.attachment.number == 4 and not sender.node.pledged and sender.node.joined is None


def test_a_state_without_time_is_sent_and_not_waited_for(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    peer.send("wanted", what=["state"], why="iteration 2 is lost")
    until(lambda: one.attachment._senders[0].node.wanted)
    one.iterate()
    assert peer.expect("record")["iteration"] == 3
    assert peer.receive()[0].items() >= {"type": "state", "iteration": 4}.items()
    assert (one.attachment.state, one.attachment._senders[0].node.wanted) == ("attaching", frozenset())
    one.iterate(2)  # the node is still busy with the state: what it will need next is on its way all the same
    assert [peer.expect("record")["iteration"] for _ in range(2)] == [4, 5]
    peer.send("joined", iteration=4)
    until(lambda: one.attachment.state == "attached")
    one.iterate()
    assert peer.expect("record")["iteration"] == 6


def test_no_records_follow_a_state_that_no_queue_took(training, hand_node) -> None:
    one, queued = training(), list[str]()
    peer = joined(one, hand_node)
    peer.send("wanted", what=["state"], why="iteration 2 is lost")
    sender = one.attachment._senders[0]
    until(lambda: sender.node.wanted)

    def put(message: object, *_: object) -> bool:
        queued.append(type(message).__name__)
        return queued[-1] != "State"

    sender.put, sender.put_all = put, lambda messages, fill: put(messages[-1][0])
    one.iterate(2)
    assert queued == ["Record", "State"] and not sender.follows
    del sender.put, sender.put_all


def test_a_state_ends_with_its_connection_and_so_do_the_records_after_it(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    peer.send("wanted", what=["state"], why="iteration 2 is lost")
    until(lambda: one.attachment._senders[0].node.wanted)
    one.iterate()
    assert peer.expect("record")["iteration"] == 3 and peer.receive()[0]["type"] == "state"
    peer.close()
    peer = connected(one, hand_node)
    one.iterate()  # no record: nobody has the state that it would follow
    peer.expect("flows")
    peer.expect("manifest")
    peer.send("wanted", what=["state"], why="a state to begin with")
    until(lambda: one.attachment._senders[0].node.wanted)
    one.iterate()
    assert peer.receive()[0].items() >= {"type": "state", "iteration": 6}.items()


def test_a_state_that_is_not_wanted_is_not_sent(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    peer.send("wanted", what=["flows"], why="of rank 1")
    until(lambda: one.attachment._senders[0].node.wanted)
    one.iterate(2)
    assert [peer.expect("record")["iteration"] for _ in range(2)] == [3, 4]
    one.attachment.close(LONGEST)
    assert peer.expect("bye") == {}


def test_a_state_has_every_entry_and_every_tensor_of_the_optimizer(training, hand_node) -> None:
    one = training(layer=Every(), make=lambda p: torch.optim.AdamW(p, lr=0.5))
    peer = joined(one, hand_node)
    peer.send("wanted", what=["state"], why="a state")
    until(lambda: one.attachment._senders[0].node.wanted)
    one.iterate()
    peer.receive()
    state = safetensors.torch.load(peer.receive()[1])
    assert state.keys() == {
        "model.weight", "model.frozen", "model.count", "optimizer.weight.step", "optimizer.weight.exp_avg",
        "optimizer.weight.exp_avg_sq",
    }
    mine = one.optimizer.state[one.model.module.weight]
    assert all(torch.equal(state[f"model.{name}"], value) for name, value in one.values.items())
    assert all(torch.equal(state[f"optimizer.weight.{key}"], value) for key, value in mine.items())
    assert state["optimizer.weight.step"].item() == 4.0 and state["model.count"].item() == 4


def test_a_state_is_the_one_of_its_boundary(training, hand_node) -> None:
    """It is copied before it is queued: training goes on while it is sent."""
    one = training(make=lambda p: torch.optim.AdamW(p, lr=0.5))
    queued: list[dict[str, torch.Tensor]] = []
    peer = joined(one, hand_node)
    peer.send("wanted", what=["state"], why="a state")
    until(lambda: one.attachment._senders[0].node.wanted)
    one.attachment._senders[0].put = lambda message, tensors: queued.append(tensors)
    one.iterate()
    del one.attachment._senders[0].put
    (state,) = queued
    then = {name: value.clone() for name, value in state.items()}
    one.train()
    assert len(state) == 8 and all(torch.equal(state[name], value) for name, value in then.items())
    assert not torch.equal(one.values["weight"], then["model.weight"])


def test_a_state_of_a_device_is_copied_to_the_host(training, hand_node) -> None:
    """There is none here: what is asked of such a tensor is looked at."""
    asked: list[tuple[str, bool]] = []

    class OfDevice(torch.Tensor):
        def detach(self) -> OfDevice:
            return self

        def to(self, device: str, *, copy: bool) -> torch.Tensor:  # type: ignore[override]
            asked.append((device, copy))
            return torch.tensor([7.0])

    one = training()
    peer = joined(one, hand_node)
    one.attachment._parts[0].part.state_dict = lambda: {"weight": torch.ones(1).as_subclass(OfDevice)}
    one.optimizer.state[one.model.module.weight]["momentum_buffer"] = torch.ones(1).as_subclass(OfDevice)
    peer.send("wanted", what=["state"], why="a state")
    until(lambda: one.attachment._senders[0].node.wanted)
    one.iterate()
    peer.expect("record")
    state = safetensors.torch.load(peer.receive()[1])
    assert asked == [("cpu", True)] * 2
    assert {name: value.tolist() for name, value in state.items()} == {
        "model.weight": [7.0], "optimizer.weight.momentum_buffer": [7.0]
    }


def test_what_is_not_in_the_manifest_is_not_in_a_state(training, hand_node) -> None:
    """An optimizer may keep something of a tensor that it does not step, and things that are no tensors."""
    one = training(layer=Every())
    one.optimizer.state[one.model.module.frozen]["momentum_buffer"] = torch.ones(1)
    one.optimizer.state[one.model.module.weight]["note"] = 7
    peer = joined(one, hand_node)
    peer.send("wanted", what=["state"], why="a state")
    until(lambda: one.attachment._senders[0].node.wanted)
    one.iterate()
    peer.receive()
    assert safetensors.torch.load(peer.receive()[1]).keys() == {"model.weight", "model.frozen", "model.count"}


def test_a_node_that_says_nothing_is_not_waited_for_for_ever(training, hand_node, script) -> None:
    """Neither for its first word nor for its answer to a state."""
    one = training(max_stall_s=0.3)
    peer = connected(one, hand_node)
    one.iterate(3)
    assert one.attachment.state == "attaching"
    peer.send("wanted", what=["state"], why="a state")
    until(lambda: one.attachment._senders[0].node.wanted)
    one.attachment._senders[0].answered.clear()
    one.iterate()
    assert one.attachment.state == "attaching" and one.attachment._senders[0].node.wanted == frozenset()
