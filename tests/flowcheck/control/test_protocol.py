"""Frames on a connection: every message in its form, every limit exactly and one beyond, every end. Real sockets."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from flowcheck.control.protocol import (
    Bye,
    Bytes,
    Challenge,
    Flows,
    Hello,
    Holes,
    Joined,
    Limits,
    Link,
    Manifest,
    Patch,
    Progress,
    Ranges,
    Record,
    RecordsError,
    Refused,
    State,
    Steps,
    Wanted,
    Welcome,
)

BYE = b'{"type":"bye"}'


def frame(text: bytes, payload: bytes = b"", *, magic: bytes = b"FCR1", length: int = -1, size: int = -1) -> bytes:
    """A frame made by hand; length and size may lie."""
    head = struct.pack(
        ">4sIQ", magic, len(text) if length < 0 else length, len(payload) if size < 0 else size
    )
    return head + text + payload


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    """A link, and the raw other end of its connection."""
    near, far = socket.socketpair()
    far.settimeout(10)
    link = Link(near)
    yield link, far
    link.close()
    far.close()


# -- the form of messages --------------------------------------------------------------------------------------

FORMS: list[tuple[Any, bytes]] = [
    (Challenge("0f"), b'{"type":"challenge","nonce":"0f","protocol":"flowcheck/records/1"}'),
    (
        Hello("r", 1, 2, 3, "g", "0a", "0b", instance="i"),
        b'{"type":"hello","run_id":"r","epoch":1,"rank":2,"ranks":3,"group":"g","nonce":"0a","proof":"0b",'
        b'"protocol":"flowcheck/records/1","instance":"i","role":"trainer"}',
    ),
    (
        Holes(2, 8, "ab", [(16, 8), (64, 4)], 0.5),
        b'{"type":"holes","request":2,"iteration":8,"plan":"ab","ranges":[[16,8],[64,4]],"seconds":0.5}',
    ),
    (
        Bytes(2, 8, [(16, 8)], "cd"),
        b'{"type":"bytes","request":2,"iteration":8,"ranges":[[16,8]],"digest":"cd","why":""}',
    ),
    (
        Bytes(2, 8, why="gone"),
        b'{"type":"bytes","request":2,"iteration":8,"ranges":[],"digest":"","why":"gone"}',
    ),
    (
        Steps("0a" * 16, "n", [("r", 1, "g", [4, 5]), ("", 0, "", [])]),
        b'{"type":"steps","node":"0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a","name":"n","have":[["r",1,"g",[4,5]],["",0,"",[]]]}',
    ),
    (Welcome("0c"), b'{"type":"welcome","proof":"0c","resync":"state"}'),
    (Welcome("0c", "ranges"), b'{"type":"welcome","proof":"0c","resync":"ranges"}'),
    (Refused("no"), b'{"type":"refused","why":"no"}'),
    (Flows([{"src": 0}]), b'{"type":"flows","flows":[{"src":0}]}'),
    (Manifest({"epoch": 1}, 7), b'{"type":"manifest","job":{"epoch":1},"first":7}'),
    (State(4, [{"lr": 0.5}]), b'{"type":"state","iteration":4,"groups":[{"lr":0.5}]}'),
    (
        Record(5, [{"lr": 0.5}], 0.25, 8.0, True, {"w": "0123456789abcdef"}, "AAAA"),
        b'{"type":"record","iteration":5,"groups":[{"lr":0.5}],"clip":0.25,"scale":8.0,"skipped":true,'
        b'"checksums":{"w":"0123456789abcdef"},"sample":"AAAA"}',
    ),
    (
        Record(6),
        b'{"type":"record","iteration":6,"groups":[],"clip":null,"scale":null,"skipped":false,"checksums":{},"sample":""}',
    ),
    (
        Ranges(3, [("a.weight", 0, 1), ("b", 7, 20), ("a.weight", 5, 2)]),
        b'{"type":"ranges","request":3,"ranges":[["a.weight",0,1],["b",7,20],["a.weight",5,2]]}',
    ),
    (Patch(3, 8, [("b", 7, 20)]), b'{"type":"patch","request":3,"iteration":8,"ranges":[["b",7,20]],"refused":""}'),
    (Patch(3, 8, refused="no"), b'{"type":"patch","request":3,"iteration":8,"ranges":[],"refused":"no"}'),
    (Bye(), BYE),
    (Wanted(["state", "flows"], "lost"), b'{"type":"wanted","what":["state","flows"],"why":"lost"}'),
    (Joined(9), b'{"type":"joined","iteration":9}'),
    (Refused("no", True), b'{"type":"refused","why":"no","final":true}'),
    (Progress(10, "verified"), b'{"type":"progress","iteration":10,"status":"verified"}'),
]
NAMES = [type(message).__name__ for message, _ in FORMS]


@pytest.mark.parametrize(("message", "text"), FORMS, ids=NAMES)
def test_a_message_is_sent_in_this_form(pair: Any, message: Any, text: bytes) -> None:
    link, far = pair
    link.send(message)
    assert far.recv(4096) == b"FCR1" + len(text).to_bytes(4, "big") + bytes(8) + text


@pytest.mark.parametrize(("message", "text"), FORMS, ids=NAMES)
def test_this_form_is_read_as_the_message(pair: Any, message: Any, text: bytes) -> None:
    link, far = pair
    far.sendall(frame(text))
    assert link.receive() == (message, 0)


@pytest.mark.parametrize(("text", "message"), [
    (b'{"type":"challenge","nonce":"n"}', Challenge("n", "flowcheck/records/1")),
    (b'{"type":"manifest","job":{}}', Manifest({}, 0)),
    (b'{"type":"welcome","proof":"p"}', Welcome("p", "state")),
    (b'{"type":"patch","request":1,"iteration":2,"ranges":[["b",7,20]]}', Patch(1, 2, [("b", 7, 20)], "")),
    (b'{"type":"patch","request":1,"iteration":2,"refused":"no"}', Patch(1, 2, [], "no")),
    (b'{"type":"record","iteration":1}', Record(1, [], None, None, False, {})),
    (
        b'{"type":"hello","run_id":"r","epoch":0,"rank":0,"ranks":1,"group":"","nonce":"n","proof":"p"}',
        Hello("r", 0, 0, 1, "", "n", "p", "flowcheck/records/1", "", "trainer"),
    ),
])
def test_fields_that_may_be_left_out(pair: Any, text: bytes, message: Any) -> None:
    link, far = pair
    far.sendall(frame(text))
    assert link.receive() == (message, 0)


@pytest.mark.parametrize(("text", "what"), [
    (b"[]", "not one of the messages of this protocol"),
    (b'"bye"', "not one of the messages of this protocol"),
    (b"{}", "not one of the messages of this protocol"),
    (b'{"type":"Bye"}', "not one of the messages of this protocol"),
    (b'{"type":"recordserror"}', "not one of the messages of this protocol"),
    (b'{"type":null}', "not one of the messages of this protocol"),
    (b'{"type":["bye"]}', "not a message: "),
    (b'{"type":"bye","more":1}', "not a message: unknown field 'more'"),
    (b'{"type":"joined"}', "not a message: required field 'iteration' is missing"),
    (b'{"type":"joined","iteration":"1"}', "not a message: expected a whole number"),
    (b'{"type":"joined","iteration":1.0}', "not a message: expected a whole number"),
    (b'{"type":"joined","iteration":1,"iteration":2}', "not a message: the key 'iteration' appears twice"),
    (b'{"type":"record","iteration":1,"clip":NaN}', "not a message: NaN is not JSON"),
    (b'{"type":"refused","why":"a\\u001b[2J"}', "has unprintable characters"),
    (b'{"type":"bye"', "not a message: not valid JSON"),
    (b"", "not a message: not valid JSON"),
    (b'{"type":"bye\xff"}', "not a message: no UTF-8"),
    (b"[" * 4096, "not a message: "),
])
def test_what_is_not_exactly_a_message_is_refused(pair: Any, text: bytes, what: str) -> None:
    link, far = pair
    link.peer = "host:1"
    far.sendall(frame(text))
    with pytest.raises(RecordsError) as refused:
        link.receive()
    assert what in refused.value.what and refused.value.where == "host:1"


def test_a_number_that_is_not_finite_is_not_sent(pair: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        pair[0].send(Record(1, clip=float("nan")))


def test_the_error_ends_a_command_as_a_problem_of_the_environment() -> None:
    assert RecordsError("x").exit_code == 3


# -- payloads --------------------------------------------------------------------------------------------------


def test_a_payload_follows_its_message(pair: Any) -> None:
    link, far = pair
    link.limits = lambda: Limits(payload={"record": 5})
    text = b'{"type":"record","iteration":1}'
    far.sendall(frame(text, b"abcde") + frame(BYE))
    message, size = link.receive()
    assert (message, size) == (Record(1), 5)
    payload = link.payload(size)
    assert payload == b"abcde" and isinstance(payload, bytearray)  # tensors are made over it
    assert link.receive() == (Bye(), 0)


def test_a_payload_is_sent_in_pieces(pair: Any) -> None:
    link, far = pair
    link.send(State(1), [b"ab", memoryview(b"cde"), b""], 5)
    link.close()
    came = b"".join(iter(lambda: far.recv(4096), b""))
    text = b'{"type":"state","iteration":1,"groups":[]}'
    assert came == b"FCR1\x00\x00\x00" + bytes([len(text)]) + bytes(7) + b"\x05" + text + b"abcde"


@pytest.mark.parametrize(("pieces", "size", "what"), [
    ([b"abc"], 4, "a payload of 3 bytes was announced as 4"),
    ([b"ab", b"cde"], 4, "a payload of 5 bytes was announced as 4"),
    ([], 1, "a payload of 0 bytes was announced as 1"),
    ([b"a"], 0, "a payload of 1 bytes was announced as 0"),
])
def test_a_payload_must_be_as_long_as_announced(pair: Any, pieces: list[bytes], size: int, what: str) -> None:
    link, _ = pair
    link.peer = "host:1"
    with pytest.raises(RecordsError) as refused:
        link.send(State(1), pieces, size)
    assert (refused.value.what, refused.value.where) == (what, "host:1")


# -- limits ----------------------------------------------------------------------------------------------------


def test_limits_before_anything_is_known() -> None:
    assert (Limits().text, Limits().payload, Limits().seconds, Limits().rate) == (4096, {}, 5.0, 1e6)


@pytest.mark.parametrize("most", [4096, 14, 100])
def test_the_text_may_be_as_long_as_the_limit_and_not_longer(pair: Any, most: int) -> None:
    link, far = pair
    link.peer = "host:1"
    if most != 4096:  # otherwise the default's own
        link.limits = lambda: Limits(text=most)
    far.sendall(frame(BYE + b" " * (most - len(BYE))))
    assert link.receive() == (Bye(), 0)
    far.sendall(frame(BYE + b" " * (most + 1 - len(BYE))))
    with pytest.raises(RecordsError) as refused:
        link.receive()
    assert refused.value.what == f"a message of {most + 1} bytes, at most {most} are read"
    assert refused.value.where == "host:1"


def test_a_huge_text_is_refused_before_any_of_it_is_read(pair: Any) -> None:
    link, far = pair
    far.sendall(frame(b"", length=0xFFFFFFFF))
    with pytest.raises(RecordsError, match="a message of 4294967295 bytes, at most 4096"):
        link.receive()


@pytest.mark.parametrize(("text", "name", "most"), [
    (b'{"type":"record","iteration":1}', "record", 10),
    (b'{"type":"state","iteration":1}', "state", 1),
    (b'{"type":"state","iteration":1}', "record", 0),  # of another message's limit nothing is left over
    (BYE, "", 0),
])
def test_the_payload_may_be_as_long_as_its_messages_limit(pair: Any, text: bytes, name: str, most: int) -> None:
    link, far = pair
    link.peer = "host:1"
    link.limits = lambda: Limits(payload={name: most or 50})
    far.sendall(frame(text, size=most))
    assert link.receive()[1] == most
    far.sendall(frame(text, size=most + 1))
    with pytest.raises(RecordsError) as refused:
        link.receive()
    assert refused.value.what == f"a payload of {most + 1} bytes, at most {most} are read here"
    assert refused.value.where == "host:1"


def test_limits_are_asked_when_a_message_begins_and_not_before(pair: Any) -> None:
    """A reader may wait for long. What it learns meanwhile holds for the message that comes then."""
    link, _ = pair
    link.limits = lambda: pytest.fail("limits were asked before anything had arrived")
    with pytest.raises(TimeoutError):
        link.receive(wait=0.01)


def test_limits_are_asked_anew_for_each_message(pair: Any) -> None:
    link, far = pair
    far.sendall(frame(BYE) * 2)
    link.receive()
    link.limits = lambda: Limits(text=13)
    with pytest.raises(RecordsError, match="a message of 14 bytes, at most 13"):
        link.receive()


@pytest.mark.parametrize("magic", [b"FCR2", b"fcr1", b"GET ", b"XCR1"])
def test_another_protocol_is_refused(pair: Any, magic: bytes) -> None:
    link, far = pair
    link.peer = "host:1"
    far.sendall(frame(BYE, magic=magic))
    with pytest.raises(RecordsError) as refused:
        link.receive()
    assert (refused.value.what, refused.value.where) == ("does not speak this protocol", "host:1")


# -- the end of a connection -----------------------------------------------------------------------------------


def _where(error: pytest.ExceptionInfo[RecordsError]) -> tuple[str, str]:
    return error.value.what, error.value.where


def test_an_end_between_messages(pair: Any) -> None:
    link, far = pair
    link.peer = "host:1"
    far.close()
    with pytest.raises(RecordsError) as ended:
        link.receive()
    assert _where(ended) == ("connection closed", "host:1")


@pytest.mark.parametrize(("sent", "missing"), [(1, 15), (15, 1), (16, 14), (29, 1)])
def test_an_end_within_a_message(pair: Any, sent: int, missing: int) -> None:
    link, far = pair
    link.peer = "host:1"
    far.sendall(frame(BYE)[:sent])
    far.close()
    with pytest.raises(RecordsError) as ended:
        link.receive()
    assert _where(ended) == (f"connection closed within a message, {missing} bytes before its end", "host:1")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_that_is_reset(host: str) -> None:
    try:
        server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        assert host == "::1"
        pytest.skip(f"no IPv6 here: {error}")
    with server:
        far = socket.create_connection(server.getsockname()[:2], timeout=60)
        link = Link(server.accept()[0])
    peer = f"{host}:{far.getsockname()[1]}"
    assert link.peer == peer
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    with pytest.raises(RecordsError) as lost:
        link.receive()
    assert _where(lost) == ("connection lost: Connection reset by peer", peer)
    with pytest.raises(RecordsError) as lost:
        link.send(Bye())
    assert _where(lost) == ("connection lost: Broken pipe", peer)
    link.close()


def test_the_peer_of_a_socket_without_an_address_is_somebody(pair: Any) -> None:
    assert pair[0].peer == "somebody"
    with socket.socket() as sock:  # not connected
        link = Link(sock)
        assert link.peer == "somebody"
        link.close()
