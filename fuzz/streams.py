"""What somebody might send to a node's two ports, made from what is right: the inputs of
tests/flowcheck/node/test_fuzz_records.py, which sends them to a real node.

    streams = Streams(messages, seed)          messages: (fields, payload) of the records protocol that are right
    streams.frames()                           1 to 12 frames, each changed somewhere, or not at all
    streams.hello()                            who says he comes: fields of Hello
    streams.request(key)                       HTTP

Deterministic by seed; one thread.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["Streams"]

HEAD = struct.Struct(">4sIQ")
NUMBERS = (
    -1, 0, 1, 7, 255, 1 << 16, 1 << 31, (1 << 46) - 1, 1 << 46, (1 << 63) - 1, 1 << 63, 1 << 64, 10**40, -(10**40),
)
ODD: tuple[Any, ...] = (
    None, True, False, *NUMBERS, 0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), "", " ", "\0", "\ud800",
    "\udfff", "\U0001f680", "../../etc/passwd", "/dev/shm/x", "a" * 300, "a" * 5000, "%s%n", "\x1b[2J", "'; --",
    [], {}, [[]], {"": ""}, [None], {"lr": "x"}, [0, 0], [[0, 8]], [["", 0, 1]],
)
PATHS = (
    "/", "/healthz", "/openapi.json", "/metrics", "/v1/node", "/v1/status", "/v1/versions", "/v1/versions/",
    "/v1/versions/m" + 31 * "0" + "/manifest.json", "/v1/versions/d" + 31 * "f" + "/model.safetensors",
    "/v1/versions/s" + 31 * "1" + "/optimizer.safetensors", "/v1/versions/m" + 31 * "0" + "/user/3",
    "/../../etc/passwd",
    "/v1/versions/%2e%2e%2f%00/user/" + "9" * 4400, "*", "http://other/v1/status", "/healthz?" + "x" * 3000,
)
METHODS = (
    "GET", "GET", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PRI", "get", "",
)
FORMS = ("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/3", "")
BODIES = (b"", b"", b"abcde", b"5\r\nabcde\r\n0\r\n\r\n")
HEADERS = (
    "Range: bytes=0-9", "Range: bytes=-1", "Range: bytes=9-0,1-2", "Range: " + "9" * 400, "Content-Length: 5",
    "Content-Length: -1", "Content-Length: 99999999999999999999", "Transfer-Encoding: chunked", "Expect: 100-continue",
    "Connection: close", "Connection: upgrade", "Upgrade: websocket", "Accept: text/event-stream", "Host: y", "X: \0",
    "Accept: application/openmetrics-text", " folded", ":", "X" * 300 + ": y", "Authorization: Basic eDp4",
)


class Streams:
    def __init__(self, messages: Sequence[tuple[dict[str, Any], bytes]], seed: int) -> None:
        self._messages, self._rng = list(messages), random.Random(seed)

    def frames(self, only: str = "") -> bytes:
        """The last one may be no frame at all: whatever follows it is not read. only: messages of this type."""
        rng = self._rng
        messages = [one for one in self._messages if only in ("", one[0]["type"])]
        out = b"".join(self._frame(messages) for _ in range(rng.choice((1, 1, 2, 3, 12))))
        return self._bytes(out) if rng.random() < 0.2 else out

    def hello(self) -> dict[str, Any]:
        """Right in its types: anything else would prove nothing, and be refused before it is looked at."""
        rng = self._rng
        who = {"run_id": "run", "epoch": 0, "rank": rng.randrange(2), "ranks": 2, "instance": ""}
        if rng.random() < 0.3:
            texts = ("other", "", "../x", "\U0001f680", "a" * 200, "\x1b[2J", "x y")
            who |= {"run_id": rng.choice(texts), "instance": rng.choice(texts), "epoch": rng.choice((0, -1, 1 << 46))}
        return who

    def request(self, key: str) -> bytes:
        rng = self._rng
        headers = ["Host: x", *rng.choices(HEADERS, k=rng.choice((0, 0, 1, 2, 5)))]
        if rng.random() < 0.7:
            headers.append(f"Authorization: Bearer {key}")
        lines = [f"{rng.choice(METHODS)} {rng.choice(PATHS)} {rng.choice(FORMS)}", *headers, "", ""]
        data = "\r\n".join(lines).encode() + rng.choice(BODIES)
        return self._bytes(data) if rng.random() < 0.5 else data

    def _frame(self, messages: Sequence[tuple[dict[str, Any], bytes]]) -> bytes:
        rng = self._rng
        fields, payload = rng.choice(messages)
        fields = copy.deepcopy(fields)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
            self._change(fields)
        text = json.dumps(fields).encode()
        if rng.random() < 0.1:
            text = self._bytes(text)
        if payload and rng.random() < 0.5:
            payload = self._bytes(payload)
        length, size = len(text), len(payload)
        if rng.random() < 0.05:
            length, size = rng.choice(((length + 1, size), (length, size + 1), (1 << 31, 0), (length, 1 << 62), (0, 0)))
        return HEAD.pack(b"FCR1", length, size) + text + payload

    def _change(self, fields: dict[str, Any]) -> None:
        """One field, however deep it lies."""
        rng = self._rng
        at: Any = fields
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                return
            key = rng.choice(keys)
            if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.8:
                at = at[key]
                continue
            break
        if rng.random() < 0.1 and isinstance(at, dict):
            del at[key]
        elif rng.random() < 0.1 and isinstance(at, dict):
            at[str(rng.choice(ODD))] = rng.choice(ODD)
        else:
            at[key] = copy.deepcopy(rng.choice(ODD))

    def _bytes(self, data: bytes) -> bytes:
        rng = self._rng
        out = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at, size = rng.randrange(len(out) + 1), rng.choice((1, 2, 4, 16, 100))
            kind = rng.randrange(5)
            if kind == 0 and at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                out[at : at + size] = rng.randbytes(len(out[at : at + size]))
            elif kind == 2:
                del out[at : at + size]
            elif kind == 3:
                out[at:at] = rng.randbytes(size)
            else:
                out[at:at] = out[at : at + size]
        return bytes(out)
