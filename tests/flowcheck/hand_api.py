"""A node's HTTP API made by hand: manifests and safetensors files are built here and not by the product. Whatever it
says can be changed, cut short or held back."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import struct
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

TOKEN = "a token that only tests have"
KEY = hmac.new(TOKEN.encode(), b"flowcheck reader 1", hashlib.sha256).hexdigest()
NODE_KEY = hmac.new(TOKEN.encode(), b"flowcheck node 1", hashlib.sha256).hexdigest()  # proven by other nodes
FILES = ("model.safetensors", "optimizer.safetensors")
LISTING = re.compile(r"/v1/versions(\?step=[0-9]+)?")  # with a step: what a log makes of it as well; here is no log
Floats = dict[str, list[float]]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def safetensors(tensors: Floats, shapes: Mapping[str, Sequence[int]] = MappingProxyType({})) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        start, end = end, end + 4 * len(values)
        entries[name] = {"dtype": "F32", "shape": list(shapes.get(name, [len(values)])), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(floats(values) for values in tensors.values())


def seal(document: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in document.items() if name != "manifest_sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return {**body, "manifest_sha256": sha256(text)}


def mac(*said: Any) -> str:
    return hmac.new(bytes.fromhex(NODE_KEY), json.dumps(said).encode(), hashlib.sha256).hexdigest()


class HandVersion:
    """A version that a node holds; what of it is asked for. Everything may be changed after it was made."""

    def __init__(
        self, step: int, model: Floats | None = None, state: Floats | None = None, *, tier: str = "memory",
        epoch: int = 0, shard: str = "", run_id: str = "run", status: str = "verified", start: str = "",
        optimizer: str = "sgd", options: dict[str, Any] | None = None, rounding: str = "torch-cpu",
        shapes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        named = "".join(filter(str.isalnum, shard + (run_id if run_id != "run" else "")))
        self.id = f"{tier[0]}{epoch}0{step}0{named}{sha256(start.encode())[:8] if start else ''}"
        model = {"w": [step + 0.5, 2.0], "b": [3.0]} if model is None else model
        state = {"state.w.momentum_buffer": [1.0, float(step)]} if state is None else state
        self.offer: dict[str, Any] = {
            "id": self.id, "tier": tier, "run_id": run_id, "epoch": epoch, "step": step, "shard": shard,
            "status": status, "start": start, "attached": True,
            "nbytes": 4 * sum(map(len, (*model.values(), *state.values()))),
        }
        held = dict(zip(FILES, (model, state), strict=True))
        self.document = seal({
            "schema": "flowcheck/checkpoint/3", "run_id": run_id, "epoch": epoch, "step": step, "shard": shard,
            "status": status, "unproven": [], "rounding": rounding, **({"start": start} if start else {}),
            "attached": mac("flowcheck attached 1", run_id, epoch),
            "optimizer": {"name": optimizer, "groups": [
                {"params": list(model), "options": {"lr": 0.1, "momentum": 0.9} if options is None else options}]},
            "files": {
                file: {"bytes": 0, "tensors": {
                    name: {"dtype": "float32", "shape": list(shapes.get(name, [len(values)])),
                           "sha256": sha256(floats(values))}
                    for name, values in tensors.items()
                }} for file, tensors in held.items()
            },
        })
        self.files = {file: safetensors(tensors, shapes) for file, tensors in held.items()}
        self.users: dict[int, bytes] = {}

    def give(self, rank: int, data: bytes) -> None:
        """What that rank gave of itself."""
        self.users[rank] = data
        self.offer["user"] = [[one, one] for one in sorted(self.users)]


class HandApi:
    """A node. versions: what it lists. asked: (path, Range) of each request. cut: per path, after how many bytes each
    request's connection ends, the first for the first. answers: what is said instead, per path: status and body. quiet:
    paths that are not answered until `close`. stalls: per path, after how many bytes nothing more comes until then."""

    def __init__(self, *versions: HandVersion, absent: Sequence[str] = ()) -> None:
        self.versions = list(versions)
        self.asked: list[tuple[str, str | None]] = []
        self.cut: dict[str, list[int]] = {}
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.quiet: set[str] = set()
        self.stalls: dict[str, int] = {}
        self.withheld: object = []  # of /v1/versions
        self.statuses: object = "own"
        self.diverged: object = []
        self.hashing: list[int] = []  # bytes that are said to be hashed, one for each question for a manifest
        self.unmeasured: set[str] = set()  # paths whose answers do not say how long they are
        self._nonces: set[str] = set()
        self._ended = threading.Event()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                api._answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address: tuple[str, int] = ("127.0.0.1", self._server.server_address[1])
        self.name = f"127.0.0.1:{self.address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> HandApi:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def asked_for(self, end: str) -> int:
        return sum(path.endswith(end) for path, _ in self.asked)

    def _proven(self, request: Any) -> str:
        """The mac of a question whose asker has proven that he knows the nodes' token; "": he has not."""
        said = dict(re.findall(r'([a-z]+)="([^"]*)"', request.headers.get("Authorization") or ""))
        if not said or said["nonce"] not in self._nonces:
            return ""
        self._nonces.remove(said["nonce"])
        wanted = mac("flowcheck asks 1", "GET", request.path, request.headers.get("Range") or "", said["nonce"],
                     said["mine"], self.name, said["name"])
        return wanted if wanted == said["mac"] else ""

    def _answer(self, request: Any) -> None:
        wanted = request.headers.get("Range")
        if request.headers.get("Authorization") is None:  # who proves a key asks for a nonce first
            self._nonces.add(nonce := secrets.token_hex(16))
            request.send_response(401)
            request.send_header("WWW-Authenticate", f'Bearer, FlowCheck-HMAC nonce="{nonce}"')
            request.send_header("Content-Length", "2")
            request.end_headers()
            request.wfile.write(b"{}")
            return
        self.asked.append((request.path, wanted))
        if request.path in self.quiet:
            self._ended.wait()
            request.close_connection = True
            return
        request.proven = proven = self._proven(request)
        status, body = self._body(request)
        if wanted is not None and status == 200:
            first = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])  # type: ignore[index]
            status, body = 206, body[first:]
        request.send_response(status)
        if request.path not in self.unmeasured:
            request.send_header("Content-Length", str(len(body)))
        request.send_header("Connection", "close")
        if proven:
            request.send_header("FlowCheck-Proof", mac("flowcheck answers 1", proven, status, sha256(body)))
        request.end_headers()
        cuts = self.cut.get(request.path, [])
        request.wfile.write(body[: cuts.pop(0) if cuts else self.stalls.get(request.path)])
        if request.path in self.stalls:
            self._ended.wait()
        request.close_connection = True

    def _body(self, request: Any) -> tuple[int, bytes]:
        if not request.proven and request.headers.get("Authorization") != f"Bearer {KEY}":
            return 401, b'{"why": "the key is missing or wrong"}'
        asked = "/v1/versions" if LISTING.fullmatch(request.path) else request.path
        if asked in self.answers:
            return self.answers[asked]
        if asked == "/v1/versions":
            return 200, json.dumps({
                "versions": [one.offer for one in self.versions], "absent": [], "withheld": self.withheld,
                "statuses": self.statuses, "diverged": self.diverged}).encode()
        if request.path == "/v1/pieces":
            own = [one.offer for one in self.versions if one.offer["tier"] in ("memory", "copy", "disk")]
            return 200, json.dumps({"versions": own, "streams": [], "absent": []}).encode()
        path = request.path.partition("?")[0]
        if self.hashing and path.endswith("/manifest.json"):
            hashed = self.hashing.pop(0)
            return 503, json.dumps({"why": "it is being hashed", "hashed": hashed, "of": 20}).encode()
        for one in self.versions:
            for file in ("manifest.json", *FILES):
                if path == f"/v1/versions/{one.id}/{file}":
                    return 200, json.dumps(one.document).encode() if file == "manifest.json" else one.files[file]
            for rank, data in one.users.items():
                if request.path == f"/v1/versions/{one.id}/user/{rank}":
                    return 200, data
        return 404, b'{"why": "there is no such version, or no longer"}'
