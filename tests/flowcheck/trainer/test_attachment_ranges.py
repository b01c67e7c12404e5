"""Ranges over a real connection: answered at the next boundary, before its record, and no boundary waits."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import safetensors.torch
import torch

from flowcheck.control import protocol
from flowcheck.trainer.connection import range_requests

from ..hand_node import LONGEST, Peer, until
from .training import Every, Training, connected, joined

ADAM = {"make": lambda p: torch.optim.AdamW(p, lr=0.5)}
ALL = [["weight", 0, 4], ["bias", 0, 2]]


def asked(one: Training, peer: Peer, request: int, ranges: list[Any]) -> None:
    """The request lies ready for the next boundary."""
    before = len(one.attachment._senders[0].requests._waiting)
    peer.send("ranges", request=request, ranges=ranges)
    until(lambda: len(one.attachment._senders[0].requests._waiting) > before)


def state(one: Training) -> dict[str, list[float]]:
    """All of it, flat."""
    out = {f"model.{name}": value.reshape(-1).tolist() for name, value in one.values.items()}
    for name, parameter in one.model.module.named_parameters():
        for key, value in one.optimizer.state.get(parameter, {}).items():
            out[f"optimizer.{name}.{key}"] = value.reshape(-1).tolist()
    return out


def patch(peer: Peer) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The next message, which is a patch, and its values."""
    message, payload = peer.receive()
    assert message.pop("type") == "patch"
    values = safetensors.torch.load(payload) if payload else {}
    return message, {name: value.reshape(-1).tolist() for name, value in values.items()}


def test_the_patch_of_an_iteration_comes_before_its_record_and_has_the_state_after_it(training, hand_node) -> None:
    one = training(**ADAM)
    peer = joined(one, hand_node)
    for iteration in (3, 4):
        asked(one, peer, 70 + iteration, ALL)
        one.iterate()
        then = state(one)
        one.iterate(3)  # at once
        assert patch(peer) == (
            {"request": 70 + iteration, "iteration": one.attachment.number - 4, "ranges": ALL, "refused": ""}, then
        )
        assert [peer.expect("record")["iteration"] for _ in range(4)] == [
            one.attachment.number - number for number in (4, 3, 2, 1)
        ]


def test_elements_of_two_requests_before_one_boundary(training, hand_node) -> None:
    one = training(**ADAM, rank=1)
    peer = joined(one, hand_node, manifest=False)
    asked(one, peer, 1, [["weight", 1, 2]])
    asked(one, peer, 2, [["bias", 1, 1], ["weight", 3, 1], ["weight", 0, 1]])
    one.iterate()
    now = state(one)
    found = [patch(peer), patch(peer)]
    assert peer.expect("record")["iteration"] == 3
    assert [(message["request"], message["iteration"]) for message, _ in found] == [(1, 3), (2, 3)]
    for (_, values), which in zip(found, ({"weight": [1, 2]}, {"bias": [1], "weight": [3, 0]}), strict=True):
        assert values == {
            f"{kind}.{name}{key}": now[f"{kind}.{name}{key}"] if key == ".step" else
            [now[f"{kind}.{name}{key}"][element] for element in which[name]]
            for name in which for kind, keys in (("model", [""]), ("optimizer", [".step", ".exp_avg", ".exp_avg_sq"]))
            for key in keys
        }


def test_a_patch_is_the_one_of_its_boundary_however_late_it_is_sent(training, hand_node) -> None:
    """The sending thread is held up by an opening, while the optimizer writes in place."""
    one = training(**ADAM)
    peer = joined(one, hand_node)
    asked(one, peer, 1, ALL)
    release, held = threading.Event(), threading.Event()

    def opening() -> list[Any]:
        held.set()
        assert release.wait(LONGEST)
        return []

    one.attachment._senders[0]._opening = opening
    one.attachment._senders[0].open_again()
    assert held.wait(LONGEST)
    one.iterate()
    then = state(one)
    one.iterate(3)
    release.set()
    assert patch(peer)[1] == then != state(one)
    assert [peer.expect("record")["iteration"] for _ in range(4)] == [3, 4, 5, 6]


def test_a_refusal_is_an_answer_and_the_record_follows_it(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    asked(one, peer, 5, [["weight", 3, 2]])
    asked(one, peer, 6, [["weight", 3, 1]])
    one.iterate()
    why = "'weight': has 4 elements, not 2 from 3 on"
    assert patch(peer) == ({"request": 5, "iteration": 3, "ranges": [], "refused": why}, {})
    assert patch(peer)[1] == {"model.weight": [state(one)["model.weight"][3]]}
    assert peer.expect("record")["iteration"] == 3 and one.attachment.state == "attached"


def test_a_boundary_without_a_record_leaves_requests_for_the_next(training, hand_node) -> None:
    """A patch without its record would belong to nothing."""
    one = training()
    peer = joined(one, hand_node)
    asked(one, peer, 1, ALL)
    one.iterate(clip=float("nan"))
    one.iterate()
    assert patch(peer)[0]["iteration"] == 4 and peer.expect("record")["iteration"] == 4


def test_requests_before_the_node_has_joined_wait_for_the_first_record(training, hand_node) -> None:
    one = training()
    peer = connected(one, hand_node)
    asked(one, peer, 1, ALL)
    one.iterate(4)
    peer.expect("flows")
    peer.expect("manifest")
    peer.send("joined", iteration=4)
    until(lambda: one.attachment.state == "attached")
    one.iterate()
    assert patch(peer)[0]["iteration"] == 4 and peer.expect("record")["iteration"] == 4


def test_what_is_more_than_a_boundary_gives_waits_for_the_next(training, hand_node, monkeypatch) -> None:
    """Also as long as an earlier answer is still being sent."""
    monkeypatch.setattr(range_requests, "PATCH_BYTES", 48)  # 6 elements, with SGD's momentum reckoned in
    one = training()
    peer = joined(one, hand_node)
    release, held = threading.Event(), threading.Event()

    def opening() -> list[Any]:
        held.set()
        assert release.wait(LONGEST)
        return []

    for request, ranges in ((1, [["weight", 0, 4]]), (2, [["weight", 0, 3]]), (3, [["weight", 3, 1]])):
        asked(one, peer, request, ranges)
    one.attachment._senders[0]._opening = opening
    one.attachment._senders[0].open_again()
    assert held.wait(LONGEST)
    one.iterate(2)
    release.set()
    assert patch(peer)[0]["request"] == 1
    assert [peer.expect("record")["iteration"] for _ in range(2)] == [3, 4]
    until(lambda: not one.attachment._senders[0]._backlog.copied)
    one.iterate()
    assert [patch(peer)[0]["request"] for _ in range(2)] == [2, 3] and peer.expect("record")["iteration"] == 5
    asked(one, peer, 4, [["weight", 0, 4], ["bias", 0, 2], ["bias", 0, 1]])
    one.iterate()
    assert patch(peer)[0]["refused"] == "request: 56 bytes of state, at most 48 are given now"


def test_requests_end_with_their_connection(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    asked(one, peer, 1, ALL)
    peer.close()
    peer = connected(one, hand_node)
    peer.expect("flows")
    peer.expect("manifest")
    peer.send("joined", iteration=3)
    until(lambda: one.attachment.state == "attached")
    one.iterate()
    assert peer.expect("record")["iteration"] == 3


def test_an_answer_does_not_go_to_another_connection(training, hand_node) -> None:
    """The connection ends between the question and the answer to it."""
    one = training()
    peer = joined(one, hand_node)
    asked(one, peer, 1, ALL)
    ((link, wish),) = one.attachment._senders[0].requests.asked()
    peer.close()
    peer = connected(one, hand_node)
    assert not one.attachment._senders[0].put(*one.attachment._parts[0].records.source.answer(wish, 3), asked_on=link)
    assert one.attachment._senders[0]._backlog.copied == 0
    one.attachment.close(LONGEST)
    assert peer.rest() == ["flows", "manifest", "bye"]


# -- nobody waits --------------------------------------------------------------------------------------------


def test_an_answer_that_is_made_meanwhile_does_not_either(training, hand_node) -> None:
    """The node that is connected again has asked for nothing yet, and numbers its requests anew."""
    one, again = training(), list[Peer]()
    peer, source = joined(one, hand_node), one.attachment._parts[0].records.source
    asked(one, peer, 1, ALL)
    answer = source.answer

    def slowly(*given: Any) -> Any:
        peer.close()
        again.append(connected(one, hand_node))
        return answer(*given)

    source.answer = slowly
    one.iterate()
    assert [again[0].receive()[0]["type"] for _ in range(3)] == ["flows", "manifest", "record"]


def test_nobody_waits_for_a_node_that_asks_for_ranges(training, hand_node) -> None:
    """At the boundary where the job is known, and at no other; and no state goes up."""
    one = training(max_stall_s=3600.0, layer=Every(), **ADAM)
    peer = connected(one, hand_node, resync="ranges")
    one.iterate(4)
    peer.expect("flows")
    assert peer.expect("manifest")["first"] == 2
    peer.send("joined", iteration=4)
    until(lambda: one.attachment.state == "attached")
    everything = [["weight", 0, 2], ["frozen", 0, 1], ["count", 0, 1]]
    asked(one, peer, 1, everything)
    one.iterate()
    assert patch(peer) == ({"request": 1, "iteration": 4, "ranges": everything, "refused": ""}, state(one))
    assert peer.receive()[0].items() >= {"type": "record", "iteration": 4}.items()
    one.attachment.close(LONGEST)
    assert peer.rest() == ["bye"]


def test_a_node_that_falls_back_to_a_state_gets_one(training, hand_node, script) -> None:
    one = training(max_stall_s=3600.0)
    peer = connected(one, hand_node, resync="ranges")
    one.iterate(3)
    peer.expect("flows")
    peer.expect("manifest")
    peer.send("wanted", what=["state"], why="an optimizer that is not followed by elements")
    until(lambda: one.attachment._senders[0].node.wanted)

    def node() -> None:
        assert peer.receive()[0].items() >= {"type": "state", "iteration": 4}.items()
        peer.send("joined", iteration=4)

    script(node)
    one.iterate()
    assert one.attachment.state == "attached"


# -- a node that is not what it should be --------------------------------------------------------------------


def test_more_requests_than_a_node_has_any_use_for_end_the_connection(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    for request in range(8):
        asked(one, peer, request, ALL)
    peer.send("ranges", request=8, ranges=ALL)
    until(lambda: one.attachment.state == "lost")
    assert one.attachment.why == "asks for ranges again, with 8 requests that no boundary has answered yet"
    one.iterate()
    assert one.attachment.state != "refused"
    connected(one, hand_node)  # it is tried again, and nothing of before is answered
    until(lambda: not one.attachment._senders[0].requests._waiting)


def test_what_waits_for_a_boundary_is_bounded_in_bytes(training, hand_node, monkeypatch) -> None:
    monkeypatch.setattr(range_requests, "PATCH_BYTES", 48)
    one = training()
    peer = joined(one, hand_node)
    for request in range(3):
        asked(one, peer, request, ALL)  # 48 bytes
    one.iterate()
    assert [patch(peer)[0]["refused"] for _ in range(1)] == [""]
    assert peer.expect("record")["iteration"] == 3
    until(lambda: not one.attachment._senders[0]._backlog.copied)
    one.iterate()
    assert [patch(peer)[0]["refused"] for _ in range(2)] == ["", "request: 48 bytes of state, at most 0 are given now"]


@pytest.mark.parametrize("hostile", [
    lambda peer: peer.send("ranges", request=1, ranges=[["weight", 0, 0]]),
    lambda peer: peer.send("ranges", request=1, ranges=[["weight", -1, 2]]),
    lambda peer: peer.send("ranges", request=-1, ranges=ALL),
    lambda peer: peer.send("ranges", request=1, ranges=[]),
    lambda peer: peer.send("ranges", request=1, ranges=[["weight", 0, 1]] * (protocol.MOST_RANGES + 1)),
    lambda peer: peer.send("ranges", b"payload", request=1, ranges=ALL),
    lambda peer: peer.send("ranges", request=1, ranges=ALL, why="x" * protocol.RANGES_TEXT),
    lambda peer: peer.send("patch", request=1, iteration=3, ranges=ALL, refused=""),
])
def test_nothing_that_is_said_wrongly_reaches_training(training, hand_node, hostile: Any) -> None:
    one = training()
    peer = joined(one, hand_node)
    with contextlib.suppress(ConnectionError):  # the trainer may end it before all of it was said
        hostile(peer)
    until(lambda: one.attachment.state == "lost")
    before = one.values["weight"].clone()
    one.iterate(2)
    assert one.attachment.number == 5 and not torch.equal(before, one.values["weight"])
    connected(one, hand_node)
