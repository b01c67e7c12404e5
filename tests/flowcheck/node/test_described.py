"""Every route of the node's HTTP API with every role and method, over a socket to the real process: schemathesis makes
requests of what /openapi.json describes, and holds the answers against it.

Who may have what is written in test_access.py, and not read from the product.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck

from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.checkpoint.directory import Meta, write_step
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.status.board import Board
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from ..hand_node import LONGEST, until
from .test_access import METHODS, ROLES, TOKENS, access, due, paths, settings, shown
from .told_scene import attached, document, iteration

STATE = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3), "step": 2.0}
EVERYBODY = (None, *ROLES)


@dataclass
class Served:
    """A node's HTTP process. schema: schemathesis's of what it describes. ids: of the versions that it has."""

    address: str
    process: Any
    schema: Any
    ids: list[str]

    def ask(self, path: str, role: str | None, method: str = "GET") -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=LONGEST)) as asked:
            asked.request(method, path, headers={"Authorization": shown(role)} if role else {})
            with contextlib.closing(asked.getresponse()) as answer:
                return answer.status, answer.read()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Version 7 in memory, 6 and 7 on disk, and a node that has said how it is."""
    import schemathesis  # takes a second, which only who runs this file has to wait

    folder = tmp_path_factory.mktemp("served")
    with contextlib.ExitStack() as stack:
        shm = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        spec = OptimizerSpec.check("adam", [(["w"], {"lr": 0.5})])
        replica = stack.enter_context(contextlib.closing(Replica(
            {"w": torch.ones(3)}, spec, path=shm / "flowcheck-n--1.replica", run_id="run", step=7,
            optimizer_state={"w": STATE}, slots=3,
        )))
        meta = Meta("run", 0, "unverified", (), replica.current.optimizer, "torch-cpu")
        config = settings(folder, replica={"directory": str(shm)})
        for step in (6, 7):
            write_step(Path(config.output.directory) / "run" / "epoch-0", step, {"w": torch.ones(3)}, {"w": STATE},
                       meta, lambda: {0: b"of rank 0"})
        board = stack.enter_context(contextlib.closing(Board()))
        board.write(json.dumps(document(attached(), iteration(5))).encode())
        keys, _ = access(config)
        node = stack.enter_context(contextlib.closing(Serving(config, keys.keys, lambda *_, **__: None, board.fd)))
        host, _, port = node.address.rpartition(":")
        asked = NodeClient((host, int(port)), reader_key(TOKENS["reader"].encode()), LONGEST)
        stack.callback(asked.close)
        until(lambda: len(asked.offers()) == 3)
        described = schemathesis.openapi.from_url(
            f"http://{node.address}/openapi.json", headers={"Authorization": shown("operator")}
        )
        yield Served(node.address, node.child.process, described, [one.id for one in asked.offers()])
        assert node.child.process.poll() is None


def unmoved(served: Served) -> None:
    """The process is the one that it was, and answers."""
    assert served.process.poll() is None
    assert served.ask("/healthz", None)[0] == 200


def test_no_method_of_no_route_is_served_to_a_role_that_may_not(served: Served) -> None:
    """Each described route, also with the id of a version that is there; nothing is written over HTTP."""
    real = [path.replace(path.split("/")[3], served.ids[0]) for path in paths() if path.count("/") > 2]
    told: Counter[int] = Counter()
    asked = http.client.HTTPConnection(served.address, timeout=LONGEST)
    for path, role, method in itertools.product([*paths(), *real], EVERYBODY, METHODS):
        asked.request(method, path, headers={"Authorization": shown(role)} if role else {})
        with contextlib.closing(asked.getresponse()) as answer:
            status, body = answer.status, answer.read()
        told[status] += 1
        allowed = due(role, path)
        if allowed & {401, 403}:
            assert status in allowed, (path, role, method, status)
        elif method in ("GET", "HEAD"):
            assert status in (200, 404), (path, role, method, status)
        else:
            assert status == 405, (path, role, method, status)
        if status >= 400 and method != "HEAD":
            assert set(json.loads(body)) == {"why"}, (path, role, method, body)
    assert sum(told.values()) == (len(paths()) + len(real)) * len(EVERYBODY) * len(METHODS)
    assert all(told[status] for status in (200, 401, 403, 404, 405))
    asked.close()
    unmoved(served)


def hold(served: Served, role: str | None, examples: int) -> Counter[int]:
    """Requests of every described operation, as described and otherwise; what was answered to them."""
    import requests
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi import checks

    told: Counter[int] = Counter()
    headers = {"Authorization": shown(role)} if role is not None else {}
    with requests.Session() as session:
        for found in served.schema.get_all_operations():
            operation = found.ok()
            has = {one.name for one in operation.iter_parameters()} - {"Authorization"}
            modes: list[tuple[Any, dict[str, str] | None]] = [(GenerationMode.POSITIVE, None)]
            if has:
                modes.append((GenerationMode.NEGATIVE, None))
            if "id" in has:
                modes += [(GenerationMode.POSITIVE, {"id": id} | ({"rank": "0"} if "rank" in has else {}))
                          for id in served.ids]
            for mode, fixed in modes:
                @hypothesis.settings(max_examples=examples if has else 2, database=None, derandomize=True,
                                     deadline=None, suppress_health_check=list(HealthCheck))
                @hypothesis.given(case=operation.as_strategy(generation_mode=mode, path_parameters=fixed))
                def ask(case: Any) -> None:
                    path = case.operation.path
                    if headers:  # else those that it has made up
                        case.headers = {
                            name: value for name, value in (case.headers or {}).items() if name != "Authorization"
                        } | headers
                    answer = case.call(base_url=f"http://{served.address}", session=session, timeout=LONGEST)
                    told[answer.status_code] += 1
                    assert answer.status_code < 500, answer.text
                    allowed = due(role, path.replace("{id}", "x"))
                    if allowed & {401, 403}:
                        assert answer.status_code in allowed, (path, role, answer.status_code)
                    case.validate_response(answer, checks=[
                        checks.status_code_conformance, checks.content_type_conformance,
                        checks.response_headers_conformance, checks.response_schema_conformance,
                    ])

                ask()
    return told


@pytest.mark.parametrize("role", [None, "reader"])
def test_what_is_answered_is_what_is_described(served: Served, role: str | None) -> None:
    told = hold(served, role, 3)
    if role is not None:
        assert told[200] and told[404], told
    unmoved(served)


@pytest.mark.slow
@pytest.mark.parametrize("role", EVERYBODY)
def test_what_is_answered_is_what_is_described_at_length(served: Served, role: str | None) -> None:
    hold(served, role, 1500)
    unmoved(served)


@pytest.mark.parametrize("rank", ["9" * 5000, "-1", "1e3", "%00", "٣", "9" * 9, "0x1", "+1", "%20%31"])
def test_a_rank_that_is_none(served: Served, rank: str) -> None:
    """More digits than Python reads, digits that are not ASCII."""
    from urllib.parse import quote

    status, body = served.ask(f"/v1/versions/{served.ids[0]}/user/{quote(rank, safe='%')}", "reader")
    assert status == 404 and b"why" in body
    unmoved(served)


def test_bytes_that_are_no_request_change_nothing(served: Served) -> None:
    """Of every described route, each byte of a request changed once."""
    host, _, port = served.address.rpartition(":")
    text = (f"GET /v1/versions/{served.ids[0]}/model.safetensors HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Range: bytes=0-9\r\nAuthorization: {shown('operator')}\r\n\r\n").encode()
    told: Counter[bytes] = Counter()
    for at in range(0, len(text), 3):
        for flip in (1, 0x20, 0x80):
            sent = text[:at] + bytes([text[at] ^ flip]) + text[at + 1 :]
            with socket.create_connection((host, int(port)), timeout=LONGEST) as sock:
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
                said = b""
                with contextlib.suppress(ConnectionError):
                    while piece := sock.recv(65536):
                        said += piece
            told[said.split(b" ")[1] if said else b""] += 1
    # 404: of a path that is no route's, for which the operator's key is good. b"": the same, where uvicorn saw the end
    # of what was sent before its answer was ready. Never 200 or 206: a version is the reader's.
    assert set(told) <= {b"", b"400", b"401", b"403", b"404"}, told
    assert told[b"400"] and told[b"401"] and told[b"403"], told
    unmoved(served)
