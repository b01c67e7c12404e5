"""Several nodes: each is served as if it were the only one, and one that is gone costs nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch

from ..hand_node import LONGEST, HandNode, Peer, until
from .training import Every, Training, clock_of_waiting


@pytest.fixture
def other() -> Iterator[HandNode]:
    node = HandNode()
    yield node
    node.close()


@pytest.fixture
def pair(wrapped: Any, hand_node: HandNode, other: HandNode) -> Iterator[Any]:
    """pair(**options) -> a training with two nodes, the first of them hand_node."""
    made: list[Training] = []

    def start(**options: Any) -> Training:
        made.append(Training(wrapped, hand_node.address, other.address, **options))
        return made[-1]

    yield start
    for one in made:
        one.attachment.close(0.0)


def connected(one: Training, *nodes: HandNode, **more: Any) -> list[Peer]:
    peers = [node.welcome(**more) for node in nodes]
    for sender in one.attachment._senders:
        until(lambda sender=sender: sender.connected and not sender._again.is_set())
    return peers


def joined(one: Training, *nodes: HandNode) -> list[Peer]:
    peers = connected(one, *nodes)
    one.iterate(3)
    for peer in peers:
        peer.expect("flows")
        peer.expect("manifest")
        peer.send("joined", iteration=3)
    until(lambda: all(sender.attached for sender in one.attachment._senders))
    return peers


def named(node: HandNode) -> str:
    return f"{node.address[0]}:{node.address[1]}"


def test_records_go_to_all(pair, hand_node, other) -> None:
    one = pair(layer=Every(), checksum_every=1)
    peers = joined(one, hand_node, other)
    one.iterate(2)
    came = [[peer.receive() for _ in range(2)] for peer in peers]
    assert came[0] == came[1]
    assert [message["iteration"] for message, _ in came[0]] == [3, 4] and came[0][0][0]["checksums"]
    assert safetensors.torch.load(came[0][0][1])["buffer.count"].item() == 4


def test_each_says_who_it_is_alike(pair, hand_node, other) -> None:
    pair(run_id="a run")
    hellos = [node.accept().welcome() for node in (hand_node, other)]
    for hello in hellos:
        del hello["nonce"], hello["proof"]
    assert hellos[0] == hellos[1]  # the instance, too: it is one attachment


def test_one_that_is_lost_takes_nothing_from_the_other(pair, hand_node, other, caplog) -> None:
    one = pair()
    caplog.clear()
    first, second = joined(one, hand_node, other)
    first.close()
    until(lambda: not one.attachment._senders[0].connected)
    one.iterate(2)
    assert [second.expect("record")["iteration"] for _ in range(2)] == [3, 4]
    assert one.attachment.state == "attached"
    until(lambda: one.attachment.why)
    assert one.attachment.why.startswith(f"{named(hand_node)}: connection ")
    assert [line.getMessage() for line in caplog.records] == [f"flowcheck: rank 0: {one.attachment.why}"]
    again = hand_node.welcome()
    assert again.expect("flows") and again.expect("manifest")["first"] == 2


def test_one_that_was_never_there_is_not_waited_for(wrapped, hand_node, monkeypatch, script) -> None:
    """Neither its first attempt to connect, which goes nowhere, nor an answer."""
    begun = threading.Event()
    connect = socket.create_connection

    def nowhere(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        if address[0] == "192.0.2.1":
            begun.set()
            assert ended.wait(LONGEST)
            raise TimeoutError(110, "Connection timed out")
        return connect(address, timeout=timeout)

    ended = threading.Event()
    monkeypatch.setattr(socket, "create_connection", nowhere)
    one = Training(wrapped, ("192.0.2.1", 7070), hand_node.address, max_stall_s=3600.0)
    peer = hand_node.welcome()
    until(lambda: one.attachment._senders[1].connected and not one.attachment._senders[1]._again.is_set())
    assert begun.wait(LONGEST)

    def node() -> None:
        peer.expect("flows")
        peer.expect("manifest")
        peer.send("wanted", what=["state"], why="a state to begin with")
        assert peer.receive()[0]["type"] == "state"
        peer.send("joined", iteration=3)

    script(node)
    one.iterate(4)
    assert peer.expect("record")["iteration"] == 3
    assert (one.attachment.state, one.attachment.why) == ("attached", "192.0.2.1:7070: not connected yet")
    ended.set()
    one.attachment.close(LONGEST)
    assert one.attachment.state == "closed"


def test_both_get_a_state_at_the_boundary_where_the_job_is_known(pair, hand_node, other, script) -> None:
    """The second asks while the first is still taking its own in."""
    one = pair(max_stall_s=LONGEST)
    peers = connected(one, hand_node, other)
    taken = threading.Event()

    def first() -> None:
        peers[0].expect("flows")
        peers[0].expect("manifest")
        peers[0].send("wanted", what=["state"], why="a state")
        assert peers[0].receive()[0].items() >= {"type": "state", "iteration": 3}.items()
        taken.set()
        assert done.wait(LONGEST)
        peers[0].send("joined", iteration=3)

    def second() -> None:
        peers[1].expect("flows")
        peers[1].expect("manifest")
        assert taken.wait(LONGEST)
        peers[1].send("wanted", what=["state"], why="a state")
        assert peers[1].receive()[0].items() >= {"type": "state", "iteration": 3}.items()
        peers[1].send("joined", iteration=3)
        done.set()

    done = threading.Event()
    script(first)
    script(second)
    one.iterate(3)
    assert all(sender.attached for sender in one.attachment._senders) and one.attachment.why == ""


def test_a_state_goes_to_who_wants_it(pair, hand_node, other) -> None:
    one = pair()
    first, second = joined(one, hand_node, other)
    second.send("wanted", what=["state"], why="iteration 2 is lost")
    until(lambda: one.attachment._senders[1].node.wanted)
    assert (one.attachment.state, one.attachment.why) == ("attached", f"{named(other)}: iteration 2 is lost")
    one.iterate(2)
    assert [first.expect("record")["iteration"] for _ in range(2)] == [3, 4]
    assert second.expect("record")["iteration"] == 3
    assert second.receive()[0].items() >= {"type": "state", "iteration": 4}.items()
    assert second.expect("record")["iteration"] == 4


def test_each_gets_the_elements_that_it_asks_for(pair, hand_node, other) -> None:
    one = pair()
    peers = joined(one, hand_node, other)
    for number, peer in enumerate(peers):
        peer.send("ranges", request=number, ranges=[["weight", number, 1]])
        until(lambda number=number: one.attachment._senders[number].requests._waiting)
    one.iterate()
    weight = one.values["weight"].reshape(-1)
    for number, peer in enumerate(peers):
        message, payload = peer.receive()
        assert (message["type"], message["request"], message["iteration"]) == ("patch", number, 3)
        assert safetensors.torch.load(payload)["model.weight"].tolist() == [weight[number].item()]
        assert peer.expect("record")["iteration"] == 3


def test_nobody_waits_for_nodes_that_ask_for_ranges(pair, hand_node, other, monkeypatch) -> None:
    one = pair(max_stall_s=3600.0)
    peers = connected(one, hand_node, other, resync="ranges")
    clock_of_waiting(monkeypatch, lambda: 1000.0)
    one.iterate(4)
    for peer in peers:
        peer.expect("flows")
        peer.expect("manifest")


def test_the_newest_version_of_any_is_the_one_that_is_published(pair, hand_node, other) -> None:
    one = pair()
    assert one.attachment.published == (-1, "")
    first, second = joined(one, hand_node, other)
    first.send("progress", iteration=5, status="verified")
    second.send("progress", iteration=4, status="unverified")
    until(lambda: all(sender.node.iteration > 0 for sender in one.attachment._senders))
    assert one.attachment.published == (5, "verified")


def test_all_hear_the_last_word(pair, hand_node, other) -> None:
    one = pair()
    peers = joined(one, hand_node, other)
    one.attachment.close(LONGEST)
    assert [peer.rest() for peer in peers] == [["bye"], ["bye"]]
    assert (one.attachment.state, one.attachment.why) == ("closed", "")
