"""A checkpoint node made by hand: its frames are built and taken apart here and not by the product."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

TOKEN = b"a token that only tests have"
LONGEST = 240.0  # seconds that anything may take: it bounds what hangs, not what a busy machine does slowly


def until(true: Callable[[], Any]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + LONGEST
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


class Peer:
    """One connection of a node: frames as docs/use/node.md has them."""

    HEAD = struct.Struct(">4sIQ")
    NONCE = "ab" * 32

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(LONGEST)

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        text = json.dumps({"type": kind, **fields}).encode()
        self.socket.sendall(self.HEAD.pack(b"FCR1", len(text), len(payload)) + text + payload)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """(message, payload) of the next frame. EOFError: the trainer has closed the connection."""
        magic, length, size = self.HEAD.unpack(self._read(self.HEAD.size))
        assert magic == b"FCR1"
        return json.loads(self._read(length)), self._read(size)

    def expect(self, kind: str) -> dict[str, Any]:
        """The next message, which is of this kind and has no payload."""
        message, payload = self.receive()
        assert message.pop("type") == kind and not payload
        return message

    def says_no_more(self) -> None:
        """The end of what this side says. The trainer may have ended the connection already."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def ended(self) -> bool:
        """True once the trainer has closed the connection, having said nothing more before that."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def rest(self) -> list[str]:
        """The kinds of messages that still come before the trainer closes the connection."""
        kinds = []
        try:
            while True:
                kinds.append(self.receive()[0]["type"])
        except (EOFError, ConnectionResetError):
            return kinds

    def proof(self, hello: dict[str, Any], side: str = "node", token: bytes = TOKEN) -> str:
        said = [side, self.NONCE, *(hello[key] for key in ("nonce", "run_id", "epoch", "rank", "ranks", "group",
                                                           "instance"))]
        return hmac.new(token, json.dumps(said).encode(), hashlib.sha256).hexdigest()

    def challenge(self) -> dict[str, Any]:
        """The Hello that answers a Challenge."""
        self.send("challenge", nonce=self.NONCE, protocol="flowcheck/records/1")
        return self.expect("hello")

    def welcome(self, **more: Any) -> dict[str, Any]:
        """The whole opening, with right proofs on both sides; the Hello. more: fields of the Welcome."""
        hello = self.challenge()
        assert hello["proof"] == self.proof(hello, "trainer")
        self.send("welcome", proof=self.proof(hello), **more)
        return hello

    def close(self) -> None:
        self.socket.close()


class HandNode:
    """A listening socket; what is said on its connections is the test's business."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LONGEST)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._peers: list[Peer] = []

    def accept(self) -> Peer:
        self._peers.append(Peer(self._listener.accept()[0]))
        return self._peers[-1]

    def welcome(self, **more: Any) -> Peer:
        """A new connection whose opening went well."""
        peer = self.accept()
        peer.welcome(**more)
        return peer

    def close(self) -> None:
        for one in (self._listener, *self._peers):
            one.close()
