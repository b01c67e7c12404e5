"""What a client reads of a node, byte by byte and second by second: files, own states, answers that are none."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.ask import client, connection, receiving, refusals
from flowcheck.ask.client import NodeClient, order_of
from flowcheck.ask.connection import Connection
from flowcheck.ask.offer import Offer
from flowcheck.ask.pace import Pace
from flowcheck.ask.receiving import AskError
from flowcheck.ask.refusals import BusyError, FullError, GoneError, HashingProgress, UnhashedError
from flowcheck.control.link import MAGIC
from flowcheck.control.tensors import CHUNK, TensorSpec
from flowcheck.control.tls import client_context, server_context
from flowcheck.control.user_state import pack
from flowcheck.control.version import MODEL, OPTIMIZER, Digest, Version

from ..certificates import issue
from ..hand_api import KEY, HandApi, HandVersion, safetensors


def refused(call: Any, *given: Any) -> AskError:
    with pytest.raises(AskError) as caught:
        call(*given)
    return caught.value


def offered(node: NodeClient) -> tuple[Offer, Version]:
    (offer,) = node.offers()
    return offer, node.version(offer)


# -- files -----------------------------------------------------------------------------------------------------------


def test_the_widest_elements_come_first() -> None:
    widths = {"a": "float16", "b": "float64", "c": "float32", "d": "int64", "e": "bool"}
    files = {MODEL: {name: Digest(TensorSpec(dtype, (2,)), "") for name, dtype in widths.items()}, OPTIMIZER: {}}
    version = Version("run", 0, 7, "", "verified", (), {}, "torch-cpu", files)
    assert order_of(version, MODEL) == ["b", "d", "c", "a", "e"] and order_of(version, OPTIMIZER) == []


def test_a_file_comes_in_pieces_a_tensor_after_the_other(api: HandApi, node: NodeClient) -> None:
    size = CHUNK // 4 + 5
    api.versions = [HandVersion(7, {"w": [0.25 * at for at in range(size)], "none": [], "b": [3.0, 4.0]})]
    offer, version = offered(node)
    pieces = [bytes(piece) for piece in node.pieces(offer, version, MODEL)]
    assert [len(piece) for piece in pieces] == [CHUNK, 20, 8]
    assert b"".join(pieces) == api.versions[0].files[MODEL][-4 * (size + 2) :]
    assert b"".join(map(bytes, node.pieces(offer, version, OPTIMIZER))) == api.versions[0].files[OPTIMIZER][-8:]
    assert not node.connection.is_open, "it is let go at the end"


def test_a_piece_that_is_not_what_the_manifest_says_is_named_when_its_tensor_is_over(
    api: HandApi, node: NodeClient,
) -> None:
    data = bytearray(api.versions[0].files[MODEL])
    data[-5] ^= 1  # of w; b has the last four
    api.versions[0].files[MODEL] = bytes(data)
    offer, version = offered(node)
    came = list[bytes]()

    def take() -> None:
        came.extend(map(bytes, node.pieces(offer, version, MODEL)))

    error = refused(take)
    assert error.what == "tensor 'w' has other bytes than its manifest says (SHA-256 differs)"
    assert error.where == f"{api.name}, memory: {MODEL}" and not node.connection.is_open
    came.clear()
    api.versions[0].files[MODEL] = safetensors({"b": [3.0], "w": [7.5, 2.0]})
    error = refused(take)
    assert error.what == "has its tensors in another order than their widths" and error.where.endswith(MODEL)
    assert came == []


def test_a_file_of_which_only_the_size_is_known(api: HandApi, node: NodeClient) -> None:
    data = bytes(range(256)) * (CHUNK // 256) + b"12345"
    api.answers["/v1/x"] = 200, data
    assert [bytes(piece) for piece in node.raw("/v1/x", len(data), "x")] == [data[:CHUNK], b"12345"]
    assert not node.connection.is_open and node.connection.received == len(data)
    api.answers["/v1/x"] = 200, data[:10]
    error = refused(list, node.raw("/v1/x", 11, "a file"))
    assert (error.what, error.where) == ("has 10 bytes, not 11", "a file")
    error = refused(list, node.raw("/v1/x", 9, "a file"))
    assert (error.what, error.where) == ("is longer than what its manifest lists", "a file")
    api.answers["/v1/x"] = 200, b""
    assert list(node.raw("/v1/x", 0, "a file")) == []


def test_what_a_rank_gave(api: HandApi, node: NodeClient) -> None:
    api.versions[0].give(1, pack({"user": {"at": 7}}, step=7, rank=1, ranks=2))
    (offer,) = node.offers()
    found = node.user(offer, 1)
    assert (found.step, found.rank, found.state["user"]) == (7, 1, {"at": 7})
    where = f"{api.name}, memory: state of rank 1"
    for step, rank in ((6, 1), (7, 0)):
        api.versions[0].give(1, pack({}, step=step, rank=rank, ranks=2))
        error = refused(node.user, offer, 1)
        assert (error.what, error.where) == (f"is of step {step} and rank {rank}", where)
    api.versions[0].give(1, b"nothing")
    error = refused(node.user, offer, 1)
    assert error.where == where and error.what and isinstance(refused(node.user, offer, 0), GoneError)


def test_tensors_are_taken_together_up_to_a_chunk() -> None:
    lie = {"a": (0, 10), "b": (10, CHUNK), "c": (CHUNK, CHUNK + 1), "d": (CHUNK + 1, 4 * CHUNK), "e": (4 * CHUNK,) * 2,
           "f": (4 * CHUNK, 5 * CHUNK)}
    assert list(client._together(lie)) == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert list(client._together({})) == []


def test_where_a_tensor_is_received() -> None:
    digest, rows = Digest(TensorSpec("float32", (2,)), "sum"), torch.zeros(2)
    assert client._place("w", digest, rows) == ("w", rows, "sum", None)
    for apart in (torch.zeros(4)[::2], torch._neg_view(torch.zeros(2))):
        name, tensor, sha256, into = client._place("w", digest, apart)
        assert into is apart and tensor.is_contiguous() and (name, sha256, tensor.shape) == ("w", "sum", (2,))
    conjugate = torch.zeros(2, dtype=torch.complex64).conj()
    placed = client._place("w", Digest(TensorSpec("complex64", (2,)), ""), conjugate)
    assert placed.into is conjugate and placed.tensor.dtype == torch.complex64
    error = refused(client._place, "w", Digest(TensorSpec("float32", (1 << 50,)), ""), None)
    assert error.what.startswith(f"no memory for tensor 'w', [{1 << 50}]: ") and "\n" not in error.what


# -- lists -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "silent"), [
    ({}, []), ({"absent": ["store", "x", "disk"]}, ["disk", "store"]), ({"absent": "disk"}, []), ({"absent": None}, []),
    ({"withheld": None}, []), ({"withheld": 3}, []),
])
def test_tiers_that_did_not_answer(api: HandApi, node: NodeClient, said: dict[str, Any], silent: list[str]) -> None:
    api.answers["/v1/versions"] = 200, json.dumps({"versions": [api.versions[0].offer]} | said).encode()
    assert len(node.offers()) == 1 and (node.silent, node.withheld, node.epochs) == (silent, [], {"run": 0})


def test_a_node_before_it_was_asked_and_asked_again() -> None:
    pace, tls = Pace(1e6), client_context("system")
    one = NodeClient(("::1", 7), KEY, 3.0, tls, pace)
    link = one.connection
    assert (one.silent, one.withheld, one.epochs, one.failed, one.gone) == ([], [], {}, {}, set())
    assert (one.busy, link.answered, link.received, link.seconds, link.plain) == (False, False, 0, 3.0, None)
    for again, seconds in ((one.again(), 3.0), (one.again(0.5), 0.5)):
        other = again.connection
        assert (again.name, other.seconds, other.pace, other.tls, other.key) == ("[::1]:7", seconds, pace, tls, KEY)
        assert again is not one and other is not link
    assert NodeClient(("h", 1), KEY).connection.seconds == receiving.SECONDS


# -- what is sent and what comes -------------------------------------------------------------------------------------


class Server:
    """Sends `answer` to one connection, and ends it. heard: what was asked."""

    def __init__(self, answer: bytes) -> None:
        self.heard = b""
        self._listener, self._answer = socket.create_server(("127.0.0.1", 0)), answer
        self.address = self._listener.getsockname()
        self.name = f"127.0.0.1:{self.address[1]}"
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            while b"\r\n\r\n" not in self.heard:
                self.heard += connection.recv(4096)
            try:
                connection.sendall(self._answer)
            except OSError:
                pass  # whoever asked has heard enough

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(60)
        self._listener.close()


@pytest.mark.parametrize("first", [0, 5])
def test_what_is_asked(first: int) -> None:
    status = b"206 Partial Content" if first else b"200 OK"
    with Server(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\nab") as server:
        one = Connection(server.address, KEY, 30.0, None, None)
        assert one.open("/v1/x", first, 2).read() == b"ab" and one.answered and one.plain is not None
        one.close()
        assert (one.is_open, one.plain) == (False, None)
    line, *headers = server.heard.decode().split("\r\n")
    assert line == "GET /v1/x HTTP/1.1" and f"Authorization: Bearer {KEY}" in headers
    assert "Accept-Encoding: identity" in headers
    assert [one for one in headers if one.startswith("Range")] == ([f"Range: bytes={first}-"] if first else [])


@pytest.mark.parametrize(("answer", "why"), [
    (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "what answers there speaks no HTTP"),
    (MAGIC + bytes(60), "this is a node's control port, for trainers: give the address of its api.listen"),
    (b"", "connection lost: Remote end closed connection without response"),
    (b"HTTP/1.1 100 Continue\r\n\r\n" * 60_000, "an answer that is too long"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "connection lost: closed before its end"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 400_000, "an answer that is too long"),
])
def test_what_is_no_answer(answer: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_TEXT", 1000)
    with Server(answer) as server:
        error = refused(NodeClient(server.address, KEY).connection.json, "/v1/versions")
    assert error.what.startswith(why) and error.where == server.name


@pytest.mark.parametrize(("error", "why"), [
    (TimeoutError(), "no answer within 2.5 s"), (EOFError(), "connection lost: EOFError"),
    (OSError(5, "Input/output error"), "connection lost: Input/output error"), (OSError("x"), "connection lost: x"),
    (http.client.BadStatusLine("x"), "what answers there speaks no HTTP"),
    (http.client.RemoteDisconnected("gone"), "connection lost: gone"),
])
def test_how_an_answer_is_lost(error: Exception, why: str) -> None:
    said = NodeClient(("h", 1), KEY, 2.5).connection.lost(error)
    assert (said.what, said.where) == (why, "h:1")


def refusal(status: int, body: bytes) -> AskError:
    with Server(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)) as server:
        error = refused(NodeClient(server.address, KEY).connection.json, "/v1/x")
    assert error.where == server.name
    return error


@pytest.mark.parametrize(("status", "body", "kind", "why"), [
    (404, b'{"why": "it  made\\nroom"}', GoneError, "refused: it made room"),
    (405, b'{"why": "w"}', AskError, "refused: w"), (500, b"[" * 4000, AskError, "refused: status 500"),
    (503, b'{"why": "w"}', BusyError, "refused: w"), (503, b'{"why": "w", "hashed": 1.0}', BusyError, "refused: w"),
    (503, b"[]", FullError, "refused: it serves as many as it can at once"),
    (401, b'{"why": "w"}', AskError, "the token is wrong"), (403, b'{"why": ""}', AskError, "refused: status 403"),
    (500, b'{"why": "w"}'.ljust(4096), AskError, "refused: w"),
    (500, b'{"why": "w"' + b" " * 4085 + b"}", AskError, "refused: status 500"),
    (404, b"[]", GoneError, "refused: status 404"), (404, b"nothing", GoneError, "refused: status 404"),
    (500, b'{"why": 3}', AskError, "refused: status 500"), (206, b"{}", AskError, "refused: status 206"),
    (503, b'{"why": "it is being hashed", "hashed": 4}', UnhashedError, "refused: it is being hashed"),
])
def test_what_a_node_says_when_it_refuses(status: int, body: bytes, kind: type[AskError], why: str) -> None:
    error = refusal(status, body)
    assert type(error) is kind and error.what == why


def test_all_of_it_over_tls(api: HandApi, tmp_path: Path) -> None:
    own, other = issue(tmp_path, "own"), issue(tmp_path, "other")
    server = api._server
    server.socket = server_context(own.cert, own.key).wrap_socket(server.socket, server_side=True)
    node = NodeClient(api.address, KEY, 30.0, client_context(str(own.ca)))
    offer, version = offered(node)
    assert node.tensors(offer, version, MODEL, {})["w"].tolist() == [7.5, 2.0]
    opened = node.connection.open("/v1/versions", most=1000)
    assert node.connection.plain is None and json.loads(opened.read())["versions"]
    node.close()
    error = refused(NodeClient(api.address, KEY, 30.0, client_context(str(other.ca))).offers)
    assert error.what.startswith("the node's certificate is not trusted: ") and error.where == api.name
    api.quiet.add("/v1/versions")
    hurried = NodeClient(api.address, KEY, 0.2, client_context(str(own.ca)))
    assert refused(hurried.offers).what == "no answer within 0.2 s"


# -- time ------------------------------------------------------------------------------------------------------------


class Clock:
    """Of ask.py: it moves by `each` with each reading of a connection, and otherwise as the test says."""

    def __init__(self, patch: pytest.MonkeyPatch, each: float = 0.0) -> None:
        self.now, self._each, self._asked = 100.0, each, 0
        for module in (connection, refusals):
            patch.setattr(module, "time", SimpleNamespace(monotonic=self._monotonic))

    def _monotonic(self) -> float:
        self._asked += 1
        self.now += 0.0 if self._asked % 2 else self._each
        return self.now


def paced(seconds: float, data: bytes = b"") -> tuple[Any, socket.socket, socket.socket]:
    near, far = socket.socketpair()
    far.sendall(data)
    return connection._Paced(near, seconds), near, far


def test_an_answer_may_take_twice_as_long_as_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RATE", 1e300)
    Clock(monkeypatch, 1.0)
    one, near, far = paced(2.0, b"0123456789")
    with near, far:
        assert [one.readinto(bytearray(1)) for _ in range(4)] == [1] * 4
        with pytest.raises(connection._TooSlow):
            one.readinto(bytearray(1))
        one.close()


def test_what_has_come_gives_time_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RATE", 2.0)
    Clock(monkeypatch, 1.5)
    one, near, far = paced(1.0, b"0123456789")
    with near, far:
        assert [one.readinto(bytearray(size)) for size in (2, 1, 1)] == [2, 1, 1]  # 1.5 of 2 left, 0.5, -0.5
        with pytest.raises(connection._TooSlow):
            one.readinto(bytearray(1))
        one.close()


def test_a_silence_is_one_until_there_is_too_little_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(connection, "RATE", 1e300)
    one, near, far = paced(0.05)
    with near, far:
        with pytest.raises(TimeoutError) as silent:
            one.readinto(bytearray(1))
        assert not isinstance(silent.value, connection._TooSlow)
        one.close()
    one, near, far = paced(0.05, b"x")
    with near, far:
        clock._each, clock._asked = 0.08, 0
        assert one.readinto(bytearray(1)) == 1
        with pytest.raises(connection._TooSlow):
            one.readinto(bytearray(1))
        one.close()


def test_an_answer_has_room_for_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_HEAD", 6)
    one, near, far = paced(5.0, b"0123456789")
    with near, far:
        assert (one.readinto(bytearray(5)), one.room, one.readinto(bytearray(1)), one.room) == (5, 1, 1, 0)
        with pytest.raises(connection._TooLong):
            one.readinto(bytearray(1))
        one.room += 2
        assert one.readinto(bytearray(100)) == 4, "what is there, at once"
        far.close()
        one.room = 1
        assert one.readinto(bytearray(100)) == 0 and one.room == 1
        one.close()
        assert one.closed and one._raw.closed


def test_room_for_a_body_is_added_to_what_is_left_for_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_HEAD", 200)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"  # and no body, so that the head alone is read by then
    with Server(answer) as server:
        one = Connection(server.address, KEY, 30.0, None, None)
        one.open("/v1/x", most=100)
        assert one._paced is not None and one._paced.room == 200 + 2 * 100 - len(answer)
        one.close()


def progress(patch: pytest.MonkeyPatch, nbytes: int = 1000, rate: float = 10.0) -> tuple[Clock, Any]:
    patch.setattr(connection, "RATE", rate)
    patch.setattr(refusals, "RATE", rate)
    clock = Clock(patch)
    return clock, HashingProgress(10.0, nbytes, "a node")


def said(one: Any, clock: Clock, *steps: tuple[float, int]) -> str:
    """Of seconds and what was hashed by then: why it is given up, with the last of them and with none before."""
    for at, hashed in steps[:-1]:
        clock.now = 100.0 + at
        one.take(hashed)
    clock.now = 100.0 + steps[-1][0]
    error = refused(one.take, steps[-1][1])
    assert error.where == "a node"
    return error.what


def test_hashing_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, one = progress(monkeypatch)
    assert said(one, clock, (0.0, 0), (10.0, 0), (10.5, 0)) == (
        "has hashed no more of it for 10 s: 0 of 1000 bytes so far")
    clock, one = progress(monkeypatch)
    assert said(one, clock, (9.0, 90), (14.0, 50), (19.0, 90), (19.5, 90)) == (
        "has hashed no more of it for 10 s: 90 of 1000 bytes so far"), "what it says again is nothing new"


def test_hashing_that_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, one = progress(monkeypatch)
    assert said(one, clock, (1.0, 100), (10.0, 101), (19.0, 102), (28.0, 103)) == (
        "hashes it too slowly: 103 of 1000 bytes so far"), "20 s, less 9, 9 and 9; what it was ahead is not saved"
    clock, one = progress(monkeypatch, rate=1e300)
    assert said(one, clock, (10.0, 1), (19.5, 2), (20.0, 2)) == "hashes it too slowly: 2 of 1000 bytes so far"


def test_hashing_that_claims_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, one = progress(monkeypatch, nbytes=50)
    assert said(one, clock, (5.0, 10**9), (14.0, 10**9 + 1), (15.5, 10**10)) == (
        "has hashed no more of it for 10 s: 50 of 50 bytes so far")


def test_hashing_has_an_end_whatever_it_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "HASH_SECONDS", 30.0)
    clock, one = progress(monkeypatch, nbytes=10**9, rate=1e-300)
    assert said(one, clock, (9.0, 10), (18.0, 20), (27.0, 30), (30.0, 40), (30.5, 50)) == (
        f"hashes it too slowly: 50 of {10**9} bytes so far")
