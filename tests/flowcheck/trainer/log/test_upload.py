"""A base on its way to a node over a link that is slow: all of it comes, and nothing waits for it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flowcheck.control.protocol import Bye, Ranges, Record
from flowcheck.control.tensors import HEADER_LIMIT
from flowcheck.errors import UserError
from flowcheck.trainer.connection import bulk_queue
from flowcheck.trainer.connection.sender import Sender
from flowcheck.trainer.describe.optimizers import optimizer_of, refresh
from flowcheck.trainer.log.base import BaseHead, BasePiece
from flowcheck.trainer.log.codec import unpacked
from flowcheck.trainer.log.upload import BaseUpload
from flowcheck.trainer.ranges import Wish
from flowcheck.trainer.starts import Identity

from ...hand_node import TOKEN, HandNode, Peer, until

BOUND = 4 << 20
ELEMENTS = 1 << 17  # of a parameter: 512 KiB, and as much of momentum
COUNT = 24


def _nothing(message: Ranges, room: int) -> Wish:
    raise AssertionError("elements were asked for")


class Training:
    """A rank whose optimizer is logged, and the node that asks for its base."""

    def __init__(self, node: HandNode) -> None:
        self.named = {f"p{at}": torch.nn.Parameter(torch.full((ELEMENTS,), float(at))) for at in range(COUNT)}
        self.optimizer = torch.optim.SGD(self.named.values(), lr=1.0, momentum=1.0)
        self.sender = Sender(node.address, TOKEN, Identity("run", 0, 0, 2, ""), list, print, _nothing)
        self.upload = BaseUpload(self.optimizer, lambda: self.named, dict)
        self.number = 0
        self.sender.start()

    def iterate(self, count: int) -> None:
        for _ in range(count):
            for one in self.named.values():
                one.grad = torch.ones_like(one)
            self.optimizer.step()
            refresh(self.upload._optimizer)
            self.sender.put(Record(self.number, [], None, None, False))
            self.number += 1
            self.upload.over([self.sender], self.number)

    def value(self, name: str, step: int) -> float:
        """Of each element before iteration `step`."""
        return float(name[1:]) - step * (step + 1) / 2


@pytest.fixture
def training(hand_node: HandNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setattr(bulk_queue, "UNSENT", BOUND)
    made = Training(hand_node)
    yield made
    made.sender.close(Bye(), 0.0)


def asked(training: Training, peer: Peer, steps: int, **more: Any) -> None:
    peer.send("basewanted", steps=steps, **more)
    until(lambda: training.sender.node.base_steps)


def narrow(peer: Peer) -> Peer:
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    return peer


class Read:
    """What a node reads, one message at a time."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.parts, self.records = peer, list[Any](), list[int]()
        self._data, self.began = bytearray(), 0
        self.whole = False

    def message(self) -> str:
        said, data = self.peer.receive()
        if said["type"] == "record":
            self.records.append(said["iteration"])
        else:
            if (said["number"], said["first"]) == (0, 0):
                self.parts, self.began = [], self.began + 1
            assert said["first"] == (len(self._data) if said["first"] else 0)
            self._data = self._data + data if said["first"] else bytearray(data)
            if len(self._data) == said["total"]:
                assert said["number"] == len(self.parts)
                self.parts.append(unpacked(self._data, "part"))
                self.whole = len(self.parts) == said["of"]
        return str(said["type"])


def test_one_of_several_that_keeps_a_state_of_all_together_is_refused(
    training: Training, hand_node: HandNode
) -> None:
    """Its first step may make that."""
    others = torch.nn.Parameter(torch.ones(2))
    training.upload = BaseUpload(optimizer_of([training.optimizer, torch.optim.SGD([others], lr=1.0)]),
                                 lambda: training.named, dict)
    peer = hand_node.welcome()
    asked(training, peer, 1)
    training.optimizer.state["all"] = {"norm": 1.0}
    with pytest.raises(UserError):
        training.iterate(1)


def test_a_base_comes_to_its_end_over_a_link_that_takes_little(training: Training, hand_node: HandNode) -> None:
    """The node asks for all of it at one boundary, six times what may wait, and reads none of it for 40 boundaries."""
    peer = narrow(hand_node.welcome())
    asked(training, peer, 1)
    training.iterate(40)  # nothing is read meanwhile: whoever waited would wait for ever
    read = Read(peer)
    while len(read.records) < 40:
        read.message()
    assert len(read.parts) <= BOUND // (8 * ELEMENTS) + 1  # records do not wait for the rest of it
    while not read.whole:
        if read.message() == "base":
            training.iterate(1)
    head, *pieces = read.parts
    assert isinstance(head, BaseHead) and head.names == [piece.name for piece in pieces] == list(training.named)
    for piece in pieces:
        assert isinstance(piece, BasePiece)
        assert piece.value.tensor.unique().tolist() == [training.value(piece.name, piece.step)]
    late = [piece.name for piece in pieces if piece.step > 40]
    assert len(late) >= COUNT - BOUND // (8 * ELEMENTS) - 1  # what could not go out was not taken


@pytest.mark.parametrize(("again", "begun"), [(True, 1), (False, 2)])
def test_one_that_is_on_its_way_goes_on_when_it_is_asked_for_again(
    training: Training, hand_node: HandNode, again: bool, begun: int
) -> None:
    peer = narrow(hand_node.welcome())
    asked(training, peer, 1)
    training.iterate(2)
    read = Read(peer)
    while len(read.parts) < 2:
        read.message()
    asked(training, peer, 1, again=again)
    training.iterate(1)
    while not read.whole:
        if read.message() == "base":
            training.iterate(1)
    assert read.began == begun and [one.name for one in read.parts[1:]] == list(training.named)


def test_a_base_that_cannot_be_encoded_is_the_training_threads_to_hear(
    training: Training, hand_node: HandNode
) -> None:
    peer = hand_node.welcome()
    training.named["x" * HEADER_LIMIT] = training.named.pop("p0")
    asked(training, peer, 1)
    with pytest.raises(UserError):
        until(lambda: training.iterate(1))
