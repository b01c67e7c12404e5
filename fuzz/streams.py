"""What somebody might send to a node's two ports, made from what is right: the inputs of
tests/flowcheck/node/test_fuzz_records.py, which sends them to a real node.

    messages(job)                              one of each of the records protocol, right in itself: fields, payload
    streams = Streams(messages(job), seed)
    streams.frames()                           1 to 12 frames, each changed somewhere, or not at all
    streams.hello()                            who says he comes: fields of Hello
    streams.request(key)                       HTTP; who shows no key: ""

Deterministic by seed; one thread.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from flowcheck.control.messages import Bye, Bytes, Flows, Holes, Joined, Manifest, Patch, Record, State, User
from flowcheck.control.tensors import header, pieces
from flowcheck.control.user_state import pack

__all__ = ["Streams", "messages"]

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


def messages(job: Any) -> list[tuple[dict[str, Any], bytes]]:
    """One of each, right in itself."""
    tensors = {"model.w": torch.zeros(3), "optimizer.w.step": torch.tensor(2.0)}
    head, order = header(tensors)
    payload = head + b"".join(bytes(piece) for name in order for piece in pieces(tensors[name]))
    manifest = job.to_dict() | {"run_id": "run"}
    mine = [flow for flow in manifest["flows"] if 1 in (flow["src"], flow["dst"])]
    sums = {entry.name: "0123456789abcdef" for entry in job.model}
    said: list[tuple[Any, bytes]] = [
        (Flows(mine), b""), (Manifest(manifest, 3), b""), (State(4, [{"lr": 0.1}]), payload),
        (Record(5, [{"lr": 0.1}], 0.5, 2.0, False, sums), b""), (Record(6), payload),
        (Patch(1, 7, [(job.model[0].name, 0, 3)]), payload), (Patch(1, 7, refused="no"), b""),
        (User(8, 1), pack({"seed": 7}, step=9, rank=1, ranks=4)), (Bye(), b""), (Joined(3), b""),
        (Holes(1, 9, "5a" * 32, [(0, 64), (128, 8)], 0.5), b""), (Bytes(1, 9, why="gone"), b""),
    ]
    return [({"type": type(one).__name__.lower(), **asdict(one)}, data) for one, data in said]


class Streams:
    """ids: of versions that there are."""

    def __init__(self, messages: Sequence[tuple[dict[str, Any], bytes]], seed: int, ids: Sequence[str] = ()) -> None:
        self._messages, self._rng = list(messages), random.Random(seed)
        files = ("manifest.json", "model.safetensors", "optimizer.safetensors", "user/0")
        self._paths = (*PATHS, *(f"/v1/versions/{id}/{file}" for id in ids for file in files))

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
        if key:
            headers.append(f"Authorization: Bearer {key}")
        lines = [f"{rng.choice(METHODS)} {rng.choice(self._paths)} {rng.choice(FORMS)}", *headers, "", ""]
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
            at[str(rng.choice(ODD))] = copy.deepcopy(rng.choice(ODD))
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
