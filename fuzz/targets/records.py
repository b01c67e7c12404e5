"""Target: what strangers and trainers send to a node's control port, through flowcheck.control.protocol and its
messages (both compiled by Cython). The sockets are bytes in memory; a real port is
tests/flowcheck/node/test_fuzz_records.py.

    input: { how, length (2) | body }*

`how` says what stands around the body, because no mutation finds a magic and two lengths: bit 0 the body is a frame's
JSON, bit 1 with a payload of 64 bytes that it does not announce, bit 2 with one that it does, bit 3 as the answer to an
opening.

Nothing but RecordsError may leave the reader. A message that was read is one of the protocol's, every text in it can
be encoded, and written again it is read as the same message.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from flowcheck.control.protocol import MESSAGES, Limits, Link, RecordsError, accept

__all__ = ["one"]

TOKEN = b"a token that only tests have"
LIMITS = Limits(1 << 16, {"state": 64, "record": 64, "patch": 64, "user": 64, "bytes": 64}, 60.0)
_HEAD = struct.Struct(">4sIQ")


class Wire:
    """A connection whose other side has said all that it will say."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at, self.sent = data, 0, bytearray()

    def recv(self, most: int) -> bytes:
        piece = self._data[self._at : self._at + most]
        self._at += len(piece)
        return piece

    def send(self, piece: Any) -> int:
        self.sent += piece
        return len(piece)

    def dup(self) -> Wire:
        return self

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def getpeername(self) -> Any:
        raise OSError

    def shutdown(self, how: int) -> None:
        pass

    def close(self) -> None:
        pass


def one(data: bytes) -> None:
    stream, opening, at = bytearray(), False, 0
    while at + 3 <= len(data):
        how, length = data[at], int.from_bytes(data[at + 1 : at + 3], "little")
        body = data[at + 3 : at + 3 + length]
        at += 3 + length
        opening |= bool(how & 8)
        stream += _HEAD.pack(b"FCR1", len(body), 64 if how & 4 else 0) + body if how & 1 else body
        stream += bytes(64) if how & 6 else b""
    if opening:
        try:
            accept(_link(bytes(stream)), TOKEN)
        except RecordsError:
            return
        raise AssertionError("somebody without the token was let in")
    link = _link(bytes(stream))
    while True:
        try:
            message, size = link.receive(wait=60.0)
            assert len(link.payload(size)) == size <= LIMITS.payload.get(type(message).__name__.lower(), 0)
        except RecordsError:
            return
        assert type(message) in MESSAGES.values()
        json.dumps(vars(message), ensure_ascii=False).encode()
        wire = Wire(b"")
        _link(wire).send(message)
        assert _link(bytes(wire.sent)).receive(wait=60.0) == (message, 0)


def _link(of: bytes | Wire) -> Link:
    wire: Any = Wire(of) if isinstance(of, bytes) else of
    link = Link(wire)
    link.limits = lambda: LIMITS
    return link
