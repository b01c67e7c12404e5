"""The opening of a connection: who is let in, and whom a trainer trusts.

One side is the product's. The other is made by hand from frames, and computes its proofs as docs/use/node.md says, on
its own. Two openings have both sides of the product.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from flowcheck.control.protocol import Bye, Flows, Limits, Link, RecordsError, accept, greet, token_bytes
from flowcheck.errors import UserError
from flowcheck.trainer.connection.sender import Sender
from flowcheck.trainer.starts import Identity

TOKEN = b"a token that only tests have"
WHO = {"run_id": "run", "epoch": 3, "rank": 1, "ranks": 4, "group": "main", "instance": "first start"}
NONCE = "5a" * 32


def proof(side: str, challenge: str, hello: dict[str, Any], token: bytes = TOKEN) -> str:
    said = [side, challenge, hello["nonce"], hello["run_id"], hello["epoch"], hello["rank"], hello["ranks"],
            hello["group"], hello["instance"]]
    return hmac.new(token, json.dumps(said).encode(), hashlib.sha256).hexdigest()


def hello_of(challenge: str, **changed: Any) -> dict[str, Any]:
    """A right Hello of who it says, to this challenge."""
    hello = {"nonce": NONCE, **WHO, **changed}
    said = proof(hello.get("role", "trainer"), challenge, hello)
    return {"type": "hello", **hello, "proof": said, "protocol": "flowcheck/records/1"}


class Raw:
    """One end of a connection, by hand."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(10)
        self.sock = sock

    def send(self, body: dict[str, Any], payload: bytes = b"") -> None:
        text = json.dumps(body).encode()
        self.sock.sendall(struct.pack(">4sIQ", b"FCR1", len(text), len(payload)) + text + payload)

    def receive(self) -> dict[str, Any]:
        magic, length, size = struct.unpack(">4sIQ", self.sock.recv(16, socket.MSG_WAITALL))
        assert (magic, size) == (b"FCR1", 0)
        body: dict[str, Any] = json.loads(self.sock.recv(length, socket.MSG_WAITALL))
        return body

    def rest(self) -> bytes:
        """All that comes until the other side closes."""
        return b"".join(iter(lambda: self.sock.recv(4096), b""))


Start = Callable[..., tuple[Raw, Future[Any]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(side, **Limits) -> the raw other end, what the side comes to. The connection ends with the side."""
    links: list[Link] = []
    raws: list[Raw] = []

    def begin(side: Callable[[Link], Any], **limits: Any) -> tuple[Raw, Future[Any]]:
        near, far = socket.socketpair()
        link = Link(near)
        link.peer = "host:1"
        if limits:
            link.limits = lambda: Limits(**limits)

        def run() -> Any:
            try:
                return side(link)
            finally:
                link.close()

        links.append(link)
        raws.append(Raw(far))
        return raws[-1], pool.submit(run)

    with ThreadPoolExecutor() as pool:
        yield begin
        for raw in raws:
            raw.sock.close()
        for link in links:
            link.close()


def node(link: Link) -> Any:
    return accept(link, TOKEN)


def trainer(link: Link) -> None:
    greet(link, TOKEN, **WHO)  # type: ignore[arg-type]


def why(coming: Future[Any]) -> str:
    with pytest.raises(RecordsError) as refused:
        coming.result(10)
    assert refused.value.where == "host:1"
    return refused.value.what


# -- the node --------------------------------------------------------------------------------------------------


def test_a_node_lets_in_who_knows_the_token_and_proves_that_it_knows_it_too(start: Start) -> None:
    raw, coming = start(node)
    challenge = raw.receive()
    assert challenge.keys() == {"type", "nonce", "protocol"}
    assert (challenge["type"], challenge["protocol"]) == ("challenge", "flowcheck/records/1")
    assert re.fullmatch("[0-9a-f]{64}", challenge["nonce"])
    hello = hello_of(challenge["nonce"])
    raw.send(hello)
    assert raw.receive() == {"type": "welcome", "proof": proof("node", challenge["nonce"], hello), "resync": "state"}
    who = coming.result(10)
    assert {name: getattr(who, name) for name in WHO} == WHO


def test_a_node_says_how_it_wants_to_have_the_state(start: Start) -> None:
    raw, coming = start(lambda link: accept(link, TOKEN, "ranges"))
    raw.send(hello_of(raw.receive()["nonce"]))
    assert raw.receive()["resync"] == "ranges"
    coming.result(10)


def test_an_instance_may_be_left_out(start: Start) -> None:
    raw, coming = start(node)
    hello = hello_of(raw.receive()["nonce"], instance="")
    del hello["instance"]
    raw.send(hello)
    assert coming.result(10).instance == ""


@pytest.mark.parametrize("forge", [
    lambda right, other: "",
    lambda right, other: "0",
    lambda right, other: "000",
    lambda right, other: "0" * 64,
    lambda right, other: right[:-1],
    lambda right, other: right[:32],
    lambda right, other: right + "0",
    lambda right, other: right + right,
    lambda right, other: right.upper(),
    lambda right, other: right[:-1] + ("1" if right[-1] == "0" else "0"),
    lambda right, other: ("1" if right[0] == "0" else "0") + right[1:],
    lambda right, other: other,
    lambda right, other: "\u00e9" * 64,
], ids=["empty", "one digit", "three", "zeros", "one short", "half", "one long", "twice", "capitals", "last digit",
        "first digit", "the node's own", "not ASCII"])
def test_a_wrong_proof_is_refused(start: Start, forge: Callable[[str, str], str]) -> None:
    raw, coming = start(node)
    challenge = raw.receive()["nonce"]
    hello = hello_of(challenge)
    hello["proof"] = forge(hello["proof"], proof("node", challenge, hello))
    raw.send(hello)
    assert why(coming) == "the token is wrong"
    assert raw.rest() == b""  # not even a Welcome


@pytest.mark.parametrize("half", ["\ud800", "0" * 63 + "\udfff", "\udc00\ud800"])
@pytest.mark.parametrize("field", ["proof", "run_id", "group", "instance", "nonce", "role", "protocol"])
def test_half_a_character_is_no_message(start: Start, field: str, half: str) -> None:
    """JSON can write a surrogate without its other half. Nothing can encode it, to compare it or to hash it."""
    raw, coming = start(node)
    raw.send(hello_of(raw.receive()["nonce"]) | {field: half})
    assert why(coming) == "not a message: no UTF-8" and raw.rest() == b""


def test_characters_beyond_16_bits_are_two_halves_in_json(start: Start) -> None:
    raw, coming = start(node)
    raw.send(hello_of(raw.receive()["nonce"], instance="\U0001f680 \\ud800"))
    assert coming.result(10).instance == "\U0001f680 \\ud800"


def test_a_proof_with_another_token_is_refused(start: Start) -> None:
    raw, coming = start(node)
    challenge = raw.receive()["nonce"]
    hello = hello_of(challenge)
    raw.send(hello | {"proof": proof("trainer", challenge, hello, token=b"another token of the tests")})
    assert why(coming) == "the token is wrong" and raw.rest() == b""


@pytest.mark.parametrize(("field", "value"), [
    ("run_id", "run2"), ("run_id", ""), ("epoch", 4), ("epoch", 0), ("rank", 0), ("rank", 2), ("ranks", 5),
    ("ranks", 2), ("group", "other"), ("group", ""), ("instance", "second start"), ("instance", ""),
    ("nonce", "5b" * 32), ("nonce", ""),
    ("role", "peer"),
])
def test_a_field_changed_after_the_proof_was_made_is_refused(start: Start, field: str, value: Any) -> None:
    """A man in the middle passes on what the product's trainer says, but for one field."""
    ours, coming = start(node)
    theirs, _ = start(trainer)
    theirs.send(ours.receive())
    hello = theirs.receive()
    assert hello[field] != value
    ours.send(hello | {field: value})
    assert why(coming) == "the token is wrong" and ours.rest() == b""


def test_a_peer_is_known_by_its_own_proof(start: Start) -> None:
    raw, coming = start(node)
    challenge = raw.receive()["nonce"]
    raw.send(hello_of(challenge, role="peer"))
    assert raw.receive()["type"] == "welcome" and coming.result(timeout=10).role == "peer"


def test_a_product_says_which_of_them_it_is(start: Start) -> None:
    ours, coming = start(node)
    theirs, _ = start(lambda link: greet(link, TOKEN, **WHO, role="peer"))
    theirs.send(ours.receive())
    ours.send(theirs.receive())
    theirs.send(ours.receive())
    assert coming.result(timeout=10).role == "peer"


@pytest.mark.parametrize("role", ["", "node", "Peer"])
def test_another_role_is_refused(start: Start, role: str) -> None:
    raw, coming = start(node)
    raw.send(hello_of(raw.receive()["nonce"], role=role))
    assert why(coming) == f"{role!r} is not one of trainer, peer" and raw.rest() == b""


def test_a_proof_for_another_challenge_is_refused(start: Start) -> None:
    ours, coming = start(node)
    theirs, _ = start(trainer)
    theirs.send(ours.receive() | {"nonce": "0c" * 32})
    ours.send(theirs.receive())
    assert why(coming) == "the token is wrong" and ours.rest() == b""


@pytest.mark.parametrize(("one", "two"), [("run_id", "group"), ("group", "instance"), ("nonce", "run_id")])
def test_two_fields_changed_for_one_another_are_refused(start: Start, one: str, two: str) -> None:
    raw, coming = start(node)
    hello = hello_of(raw.receive()["nonce"])
    raw.send(hello | {one: hello[two], two: hello[one]})
    assert why(coming) == "the token is wrong"


def test_a_recorded_hello_is_of_no_use_on_another_connection(start: Start) -> None:
    first, came = start(node)
    hello = hello_of(first.receive()["nonce"])
    first.send(hello)
    assert came.result(10).rank == 1
    second, coming = start(node)
    second.receive()
    second.send(hello)
    assert why(coming) == "the token is wrong" and second.rest() == b""


def test_every_connection_has_a_challenge_of_its_own(start: Start) -> None:
    found = set()
    for _ in range(4):
        raw, coming = start(node)
        found.add(raw.receive()["nonce"])
        raw.sock.close()
        assert "connection" in why(coming)
    assert len(found) == 4


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2), (65535, 65536)])
def test_ranks_that_there_are(start: Start, rank: int, ranks: int) -> None:
    raw, coming = start(node)
    raw.send(hello_of(raw.receive()["nonce"], rank=rank, ranks=ranks))
    assert (coming.result(10).rank, coming.result(10).ranks) == (rank, ranks)


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0), (0, -1), (0, 65537), (65536, 65537)])
def test_ranks_that_there_are_not(start: Start, rank: int, ranks: int) -> None:
    raw, coming = start(node)
    raw.send(hello_of(raw.receive()["nonce"], rank=rank, ranks=ranks))
    assert why(coming) == f"rank {rank} of {ranks}" and raw.rest() == b""


LONG = "flowcheck/records/" + "9" * 50


@pytest.mark.parametrize(("answer", "payload", "what"), [
    ({"type": "welcome", "proof": "00"}, b"", "a Welcome where a Hello was due"),
    ({"type": "flows", "flows": []}, b"", "a Flows where a Hello was due"),
    ({"type": "challenge", "nonce": "00"}, b"", "a Challenge where a Hello was due"),
    ({"type": "refused", "why": "you"}, b"", "refused: you"),
    ({"protocol": "flowcheck/records/2"}, b"", "speaks 'flowcheck/records/2', this is flowcheck/records/1"),
    ({"protocol": ""}, b"", "speaks '', this is flowcheck/records/1"),
    ({"protocol": LONG}, b"", "speaks 'flowcheck/records/9999999999999999999999', this is flowcheck/records/1"),
    ({}, b"x", "a payload of 1 bytes, at most 0 are read here"),
])
def test_what_is_not_a_hello_is_refused(start: Start, answer: dict[str, Any], payload: bytes, what: str) -> None:
    raw, coming = start(node)
    nonce = raw.receive()["nonce"]
    raw.send(answer if "type" in answer else hello_of(nonce) | answer, payload)
    assert why(coming) == what


def test_a_hello_has_no_payload_whatever_the_limits(start: Start) -> None:
    raw, coming = start(node, payload={"hello": 10})
    raw.send(hello_of(raw.receive()["nonce"]), b"x")
    assert why(coming) == "a Hello where a Hello was due"


def test_who_says_nothing_is_not_waited_for(start: Start) -> None:
    """A trainer hears what may be the matter: a port that is another one's, or TLS."""
    for side, more in ((node, []), (trainer, ["control.listen", "[tls]"])):
        _, coming = start(side, seconds=0.5)
        said = why(coming)
        assert said.startswith("no answer") and all(one in said for one in more)


# -- the trainer -----------------------------------------------------------------------------------------------


def test_a_trainer_says_who_it_is_and_proves_it(start: Start) -> None:
    raw, coming = start(trainer)
    raw.send({"type": "challenge", "nonce": "0c" * 32, "protocol": "flowcheck/records/1"})
    hello = raw.receive()
    assert hello == {"type": "hello", **WHO, "nonce": hello["nonce"], "protocol": "flowcheck/records/1",
                     "role": "trainer", "proof": proof("trainer", "0c" * 32, hello)}
    assert re.fullmatch("[0-9a-f]{64}", hello["nonce"])
    raw.send({"type": "welcome", "proof": proof("node", "0c" * 32, hello)})
    assert coming.result(10) is None


@pytest.mark.parametrize("said", [{}, {"resync": "state"}, {"resync": "ranges"}])
def test_a_trainer_learns_how_the_node_wants_to_have_the_state(start: Start, said: dict[str, str]) -> None:
    raw, coming = start(lambda link: greet(link, TOKEN, **WHO))  # type: ignore[arg-type]
    raw.send({"type": "challenge", "nonce": "0c" * 32})
    raw.send({"type": "welcome", "proof": proof("node", "0c" * 32, raw.receive()), **said})
    assert coming.result(10).resync == said.get("resync", "state")


def test_the_token_does_not_travel_and_an_instance_is_empty_unless_given(start: Start) -> None:
    who = {key: value for key, value in WHO.items() if key != "instance"}
    raw, coming = start(lambda link: greet(link, TOKEN, **who))  # type: ignore[arg-type]
    raw.send({"type": "challenge", "nonce": "0c" * 32})
    hello = raw.receive()
    assert hello["instance"] == "" and TOKEN.decode() not in json.dumps(hello) and TOKEN.hex() not in hello.values()
    raw.sock.close()
    assert "connection" in why(coming)


@pytest.mark.parametrize("forge", [
    lambda hello, right: "00" * 32,
    lambda hello, right: "",
    lambda hello, right: right[:-1],
    lambda hello, right: right + "0",
    lambda hello, right: right[:-1] + ("1" if right[-1] == "0" else "0"),
    lambda hello, right: hello["proof"],
    lambda hello, right: hello["nonce"],
    lambda hello, right: proof("node", "0d" * 32, hello),
    lambda hello, right: proof("node", "0c" * 32, hello | {"nonce": NONCE}),
    lambda hello, right: proof("node", "0c" * 32, hello | {"rank": 0}),
    lambda hello, right: proof("node", "0c" * 32, hello, token=b"another token of the tests"),
    lambda hello, right: proof("", "0c" * 32, hello),
    lambda hello, right: "\u00e9" * 64,
], ids=["zeros", "empty", "one short", "one long", "last digit", "the trainer's own", "its nonce", "another challenge",
        "another nonce", "another rank", "another token", "of nobody", "not ASCII"])
def test_an_impostor_gets_nothing_after_the_hello(start: Start, forge: Callable[..., str]) -> None:
    raw, coming = start(trainer)
    raw.send({"type": "challenge", "nonce": "0c" * 32})
    hello = raw.receive()
    raw.send({"type": "welcome", "proof": forge(hello, proof("node", "0c" * 32, hello))})
    assert why(coming) == "the node does not know the token"
    assert raw.rest() == b""


def test_a_recorded_node_is_of_no_use_for_another_connection(start: Start) -> None:
    first, came = start(trainer)
    challenge = {"type": "challenge", "nonce": "0c" * 32}
    first.send(challenge)
    welcome = {"type": "welcome", "proof": proof("node", "0c" * 32, first.receive())}
    first.send(welcome)
    came.result(10)
    second, coming = start(trainer)
    second.send(challenge)
    second.receive()
    second.send(welcome)
    assert why(coming) == "the node does not know the token" and second.rest() == b""


@pytest.mark.parametrize(("body", "what"), [
    ({"type": "refused", "why": "too many"}, "refused: too many"),
    ({"type": "welcome", "proof": ""}, "a Welcome where a Challenge was due"),
    ({"type": "wanted", "what": [], "why": ""}, "a Wanted where a Challenge was due"),
    ({"type": "challenge", "nonce": "0c", "protocol": "flowcheck/records/0"},
     "speaks 'flowcheck/records/0', this is flowcheck/records/1"),
    ({"type": "challenge"}, "not a message: required field 'nonce' is missing"),
])
def test_a_trainer_says_nothing_until_it_is_challenged(start: Start, body: dict[str, Any], what: str) -> None:
    raw, coming = start(trainer)
    raw.send(body)
    assert why(coming) == what and raw.rest() == b""


@pytest.mark.parametrize(("body", "what"), [
    ({"type": "refused", "why": "rank 1 is attached already"}, "refused: rank 1 is attached already"),
    ({"type": "challenge", "nonce": "0c"}, "a Challenge where a Welcome was due"),
    ({"type": "wanted", "what": ["state"], "why": "all"}, "a Wanted where a Welcome was due"),
])
def test_a_trainer_goes_on_after_a_welcome_only(start: Start, body: dict[str, Any], what: str) -> None:
    raw, coming = start(trainer)
    raw.send({"type": "challenge", "nonce": "0c"})
    raw.receive()
    raw.send(body)
    assert why(coming) == what and raw.rest() == b""


@pytest.mark.parametrize("welcome", ["00" * 32, "\u00e9" * 64], ids=["zeros", "not ASCII"])
def test_an_attachment_does_not_attach_to_an_impostor(welcome: str) -> None:
    """The thread of an attachment, whose opening holds the model. It goes on to try again."""
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        sender = Sender(server.getsockname(), TOKEN, Identity("run", 0, 0, 1, ""), lambda: [Flows([])], said.append,
                        lambda message, room: pytest.fail("nobody asks"))
        sender.start()
        try:
            sock = server.accept()[0]
            with sock:
                raw = Raw(sock)
                raw.send({"type": "challenge", "nonce": "0c" * 32})
                raw.receive()
                raw.send({"type": "welcome", "proof": welcome})
                assert raw.rest() == b""
            assert sender.tried.wait(10)
            assert not sender.connected and said == ["the node does not know the token"]
        finally:
            sender.close(Bye(), 10)


# -- both --------------------------------------------------------------------------------------------------------


def both(token: bytes) -> tuple[Any, Any]:
    """What the two sides come to: this token at the node, TOKEN at the trainer."""
    ends = [Link(sock) for sock in socket.socketpair()]

    def run(side: Callable[[Link], Any], link: Link) -> Any:
        try:
            return side(link)
        except RecordsError as error:
            link.close()
            return error.what

    with ThreadPoolExecutor() as pool:
        sides = (pool.submit(run, lambda link: accept(link, token), ends[0]), pool.submit(run, trainer, ends[1]))
        found = tuple(side.result(10) for side in sides)
    for link in ends:
        link.close()
    return found  # type: ignore[return-value]


def test_both_sides_of_the_product_open() -> None:
    hello, nothing = both(TOKEN)
    assert nothing is None and {name: getattr(hello, name) for name in WHO} == WHO


def test_both_sides_with_two_tokens_do_not() -> None:
    assert both(TOKEN[:-1]) == ("the token is wrong", "connection closed")


# -- tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "token"), [
    ("x" * 16, b"x" * 16), ("x" * 4096, b"x" * 4096), (f"  {'x' * 16}\n", b"x" * 16),
    ("\u00e9" * 8, b"\xc3\xa9" * 8), ("two words of it", None), ("x" * 15 + "\n", None), ("x" * 4097, None), ("", None),
])
def test_a_token_has_16_to_4096_bytes_without_the_spaces_round_it(text: str, token: bytes | None) -> None:
    if token is not None:
        assert token_bytes(text) == token
        return
    with pytest.raises(UserError) as refused:
        token_bytes(text)
    assert refused.value.what == f"a token of {len(text.strip())} characters; 16 to 4096 are usable"
    assert refused.value.where == "token" and "secrets" in refused.value.remedy
