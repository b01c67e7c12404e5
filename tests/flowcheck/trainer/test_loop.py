"""What a script says of an iteration without arithmetic of its own, on real DDP models: records and gradients agree."""

from __future__ import annotations

import json

import pytest
import torch

import flowcheck
from flowcheck.control.user_state import UserState

from ..hand_node import until
from .training import Every, joined, known


def gradients(one) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in one.model.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("most", "norm_type"), [(0.001, 2.0), (1e9, 2.0), (0.3, float("inf"))])
def test_the_factor_is_in_the_record(training, hand_node, most: float, norm_type: float) -> None:
    """To the bit: the gradients of before, times the factor in fp32, are those of after."""
    one = training()
    peer = joined(one, hand_node)
    one.train(step=0)
    one.model(torch.randn(5, 2)).square().sum().backward()
    before = gradients(one)
    norm = one.attachment.clip_grad_norm_(one.model.parameters(), most, norm_type)
    expected = torch.nn.utils.get_total_norm(list(before.values()), norm_type)
    assert torch.equal(norm, expected)
    one.optimizer.step()
    after = gradients(one)
    one.attachment.step()
    factor = torch.tensor(peer.expect("record")["clip"])
    assert all(torch.equal(before[name] * factor, after[name]) for name in before)
    assert (factor < 1).item() == (most < 1)
    one.iterate()  # and it is of that iteration alone
    assert peer.expect("record")["clip"] is None


@pytest.mark.parametrize(("clip", "why"), [
    (lambda one: one.attachment.clip_grad_norm_(one.model.module.weight, 1.0), "not all gradients"),
    (lambda one: [one.attachment.clip_grad_norm_(one.model.parameters(), 1.0) for _ in "ab"], "clipped twice"),
])
def test_clipping_that_no_single_factor_says(training, hand_node, clip, why: str) -> None:
    """It is refused by name, before a record says something else than what was done."""
    one = training()
    joined(one, hand_node)
    one.model(torch.ones(3, 2)).square().sum().backward()
    one.said.append({"op": "AllReduce", "count": one.elements, "dtype": "float32"})
    clip(one)
    one.optimizer.step()
    one.attachment.step()
    assert one.attachment.state is flowcheck.AttachmentState.REFUSED and why in one.attachment.why


def test_a_factor_given_twice(training, hand_node) -> None:
    one = training()
    joined(one, hand_node)
    one.train(step=0)
    one.model(torch.ones(3, 2)).square().sum().backward()
    one.attachment.clip_grad_norm_(one.model.parameters(), 1.0)
    one.optimizer.step()
    one.attachment.step(clip=0.5)
    assert one.attachment.state == "refused" and "step() has a clip besides" in one.attachment.why


def test_parameters_without_gradients_need_not_be_clipped(training, hand_node) -> None:
    one = training(layer=Every())
    peer = joined(one, hand_node)
    one.train(step=0)
    one.model(torch.ones(3, 2)).square().sum().backward()
    one.attachment.clip_grad_norm_([one.model.module.weight], 0.5)
    one.optimizer.step()
    one.attachment.step()
    assert 0 < peer.receive()[0]["clip"] < 1


def test_with_a_block_for_an_iteration(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    for _ in range(2):
        with one.attachment.iteration():
            one.train()
    with pytest.raises(ZeroDivisionError), one.attachment.iteration():
        raise ZeroDivisionError  # it is none, and the next one is
    with one.attachment.iteration():
        one.train()
    assert [peer.expect("record")["iteration"] for _ in range(3)] == [3, 4, 5]
    assert one.attachment.number == 6 and one.attachment.state == "attached"


def test_what_the_next_iteration_begins_with_is_asked_at_the_end_of_the_block(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    peer.send("wanted", what=["user"], why="")
    until(lambda: one.attachment._senders[0].node.takes_user)
    seen = [0]
    with one.attachment.iteration(user=lambda: {"seen": seen[0]}):
        one.train()
        seen[0] = 7
    message, data = peer.receive()
    assert message["type"] == "user" and UserState.of(data, "x").state["user"] == {"seen": 7}
    peer.expect("record")
    with one.attachment.iteration(user=lambda: {"seen": 1 // 0}):
        one.train()
    message, data = peer.receive()
    state = UserState.of(data, "x").state
    assert message["type"] == "user" and "user" not in state and list(state["missing"]) == ["user"]
    assert peer.expect("record")["iteration"] == 4
    assert "ZeroDivisionError" in one.attachment.why


class Overflow:
    """A training loop with GradScaler, whose gradients overflow where they are told to."""

    def __init__(self, training, **options) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, **options)
        self.one = training(scaler=self.scaler)

    def iterate(self, overflow: bool = False) -> None:
        one, scaler = self.one, self.scaler
        with one.attachment.iteration():
            loss = one.model(torch.ones(3, 2)).square().sum()
            scaler.scale(loss * (torch.inf if overflow else 1.0)).backward()
            one.said.append({"op": "AllReduce", "count": one.elements, "dtype": "float32"})
            scaler.unscale_(one.optimizer)
            one.attachment.clip_grad_norm_(one.model.parameters(), 0.5)
            scaler.step(one.optimizer)
            scaler.update()
            one.optimizer.zero_grad()


def test_the_scaler_says_the_scale_and_what_was_skipped(training, hand_node) -> None:
    """The scale of an iteration is that of before it: it grows or shrinks at its end."""
    job = Overflow(training)
    peer = hand_node.welcome()
    until(lambda: job.one.attachment._senders[0].connected and not job.one.attachment._senders[0]._again.is_set())
    for _ in range(3):
        job.iterate()
    peer.expect("flows")
    peer.expect("manifest")
    peer.send("joined", iteration=3)
    until(lambda: job.one.attachment.state == "attached")
    for overflow in (False, True, False, False, False, False):
        job.iterate(overflow)
    found = [peer.expect("record") for _ in range(6)]
    assert [(one["scale"], one["skipped"]) for one in found] == [
        (2048.0, False), (2048.0, True), (1024.0, False), (1024.0, False), (1024.0, False), (2048.0, False),
    ]
    assert all(0 < one["clip"] < 1 for one in found if not one["skipped"])


def test_a_scaler_that_is_switched_off_says_nothing(training, hand_node) -> None:
    one = training(scaler=torch.amp.GradScaler("cpu", enabled=False))
    peer = joined(one, hand_node)
    one.iterate()
    one.iterate(scale=4.0)
    assert [peer.expect("record")["scale"] for _ in range(2)] == [None, 4.0]


def test_states_are_what_they_were(training, hand_node) -> None:
    """Of old scripts, which compare and print text."""
    one = training()
    known(one, hand_node)
    state = one.attachment.state
    assert state is flowcheck.AttachmentState.ATTACHING and state == "attaching" and f"{state}" == "attaching"
    assert json.dumps({"state": state}) == '{"state": "attaching"}'
    one.attachment.close(0.0)
    assert one.attachment.state == flowcheck.AttachmentState.CLOSED == "closed"


def test_clipping_goes_on_where_nothing_is_attached(training, hand_node) -> None:
    one = training(layer=torch.nn.Linear(2, 2, dtype=torch.float64))
    assert one.attachment.state == "refused"
    for _ in range(5):
        one.model(torch.ones(3, 2, dtype=torch.float64)).square().sum().backward()
        assert one.attachment.clip_grad_norm_(one.model.parameters(), 0.25) > 0.25
        assert torch.nn.utils.get_total_norm([p.grad for p in one.model.parameters()]) <= 0.25
        one.attachment.step()
    assert len(one.attachment._clips) <= 2
