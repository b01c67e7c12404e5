"""A trainer that the control port has let in, and a group that only notes what comes of it. The connection is a real
pair of sockets; the trainer is the product's Link, or frames made by hand."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flowcheck.control.protocol import Hello, Link, RecordsError
from flowcheck.control.tensors import header, packed_bytes, pieces
from flowcheck.node.groups import connection
from flowcheck.node.groups.inbox import Inbox


class NotedGroup:
    """What a connection asks of a group, in order."""

    def __init__(self, plan: Any = None, why: str = "", refuses: Exception | None = None, final: str = ""
                 ) -> None:
        self.plan, self.why, self.refuses, self.final = plan, why, refuses, final
        self.inbox = Inbox(1 << 30)
        self.ranks = self
        self.joined: list[tuple[Any, ...]] = []
        self.member: Any = None
        self.said: queue.Queue[Any] = queue.Queue()

    def refused(self, run: tuple[str, int, int]) -> str:
        return self.final

    def join(self, run: tuple[str, int, int], member: Any, instance: str = "") -> str:
        self.joined.append((run, member.rank, instance))
        self.member = member
        return self.why

    def leave(self, member: Any) -> None:
        self.said.put(("left", member is self.member))

    def announce(self, member: Any, iteration: int) -> None:
        assert member is self.member
        self.said.put(("announced", iteration))
        if isinstance(self.refuses, queue.Full):
            raise self.refuses

    def put(self, inbound: Any) -> None:
        assert inbound.member is self.member
        if self.refuses is not None:
            raise self.refuses
        self.data = inbound.data
        self.said.put((inbound.message, {name: tensor.tolist() for name, tensor in inbound.tensors.items()}))

    def next(self) -> Any:
        return self.said.get(timeout=60)


def framed(message: Any, size: int = 0) -> bytes:
    text = json.dumps({"type": type(message).__name__.lower(), **asdict(message)}).encode()
    return struct.pack(">4sIQ", b"FCR1", len(text), size) + text


@dataclass
class Known:
    """A trainer that has been let in: its end of the connection, and the thread that serves it."""

    link: Link
    near: Link
    group: NotedGroup
    thread: threading.Thread
    ended: list[RecordsError | None]

    def send(self, message: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        if not tensors:
            self.link.send(message)
            return
        head, order = header(tensors)
        self.link.send(message, [head, *(p for name in order for p in pieces(tensors[name]))], packed_bytes(tensors))

    def promise(self, message: Any, size: int) -> None:
        """The head of a message with a payload, and nothing of the payload."""
        self.link._out.sendall(framed(message, size))

    def end(self) -> RecordsError | None:
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.ended[0]

    def why(self) -> tuple[str, str]:
        error = self.end()
        assert error is not None
        return error.what, error.where


Enter = Callable[..., Known]


@contextlib.contextmanager
def entering() -> Iterator[Enter]:
    """enter(rank=0, **NotedGroup) -> a trainer that is let in. Its run is "run", its epoch 3, its ranks 4."""
    made: list[Known] = []

    def begin(rank: int = 0, **options: Any) -> Known:
        near, far = (Link(sock) for sock in socket.socketpair())
        near.peer = "host:1"
        group = NotedGroup(**options)
        hello = Hello("run", 3, rank, 4, "main", "", "", instance="first start")
        asked: list[str] = []
        ended: list[RecordsError | None] = []

        def group_of(name: str) -> Any:
            asked.append(name)
            return group

        def run() -> None:
            try:
                connection.Connection(near, hello, group_of).run()
                ended.append(None)
            except RecordsError as error:
                ended.append(error)
            assert asked == ["main"]

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        made.append(Known(far, near, group, thread, ended))
        return made[-1]

    yield begin
    for one in made:
        one.link.close()
        one.near.close()
        one.thread.join(10)
