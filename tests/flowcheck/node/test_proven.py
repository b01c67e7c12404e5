"""Nodes that ask each other over HTTP: who answers at a member's address without the nodes' token learns nothing that
is of use anywhere, and nothing that he says is believed. The API is the product's, as it is served."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import itertools
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.ask.offer import COPY, DISK
from flowcheck.ask.receiving import AskError
from flowcheck.ask.sources import take
from flowcheck.checkpoint.directory import Meta, load_step, write_step
from flowcheck.control.proof import Proven, Questions, authorization, node_key, nonce_in, place_of, voucher
from flowcheck.node.api.routes import make_app
from flowcheck.node.tokens import keys_of
from flowcheck.node.versions.holdings import DiskShelf

from .test_access import answering_here

TOKEN = b"the token of all nodes"
KEY = Proven(node_key(TOKEN).hex())
KEYS = keys_of(dict.fromkeys(("trainer", "peer", "reader", "operator"), (TOKEN,)), False)
ADAM = {"name": "adam", "groups": []}


def write(folder: Path, epoch: int = 0, step: int = 7, attached: str = "", run_id: str = "run") -> Path:
    meta = Meta(run_id, epoch, "verified", (), ADAM, "torch-cpu", "", 1, attached=attached)
    return write_step(folder / "dp0" / run_id / f"epoch-{epoch}", step, {"w": torch.arange(4.0)}, {}, meta)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[tuple[str, int]]:
    write(tmp_path / "disk", attached=voucher(node_key(TOKEN), "run", 0))
    with answering_here(make_app({DISK: DiskShelf(tmp_path / "disk")}, lambda: KEYS)) as address:
        yield address


def said(
    address: tuple[str, int], path: str, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=60)) as connection:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def challenge(address: tuple[str, int]) -> str:
    status, headers, _ = said(address, "/v1/versions")
    assert status == 401
    return nonce_in(headers.get("www-authenticate"))


def proof(address: tuple[str, int], path: str = "/v1/versions", key: bytes = node_key(TOKEN), **changed: str) -> str:
    """What a node would show there. changed: of what is shown, not of what was signed."""
    shown, _ = authorization(key, "GET", path, "", challenge(address), place_of(address), "x:1")
    for name, value in changed.items():
        shown = re.sub(rf'{name}="[^"]*"', f'{name}="{value}"', shown)
    return shown


class Man:
    """At a member's address, without the token. answer(head of a request) -> bytes. heard: all that he was sent."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self.heard: list[bytes] = []
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(60)
                text = b""
                while piece := connection.recv(65536):
                    text += piece
                    if text.endswith(b"\r\n\r\n"):
                        self.heard.append(text)
                        connection.sendall(self._answer(text))
                        text = b""

    def shown(self) -> str:
        """The Authorization of the last request that had one."""
        found = [re.search(rb"authorization: ([^\r]*)", one, re.IGNORECASE) for one in self.heard]
        return [one[1].decode() for one in found if one][-1]

    def __enter__(self) -> Man:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)


def http_answer(status: int, body: bytes, **headers: str) -> bytes:
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def asking(nonce: str) -> bytes:
    return http_answer(401, b"{}", WWW_Authenticate=f'Bearer, FlowCheck-HMAC nonce="{nonce}"')


EVIL = json.dumps({"versions": [{
    "id": "m1", "tier": "memory", "run_id": "run", "epoch": 1000000, "step": 9, "shard": "", "status": "verified",
    "nbytes": 16, "attached": True}], "withheld": [], "absent": []}).encode()


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(AskError) as caught:
        call()
    return caught.value.what


def test_nodes_read_from_each_other(api: tuple[str, int], tmp_path: Path) -> None:
    fetched = take([NodeClient(api, KEY)], None, None, None)
    assert fetched.model["w"].tolist() == [0.0, 1.0, 2.0, 3.0] and fetched.version.step == 7
    assert "wrong" in refused(NodeClient(api, node_key(TOKEN).hex()).offers)  # proven it is a key, shown it is none
    assert "another one" in refused(NodeClient(api, Proven(node_key(b"a token of others").hex())).offers)
    assert take([NodeClient(api, reader_key(TOKEN))], None, None, None).version.step == 7  # readers show theirs


def test_a_man_at_a_members_address_learns_nothing_of_use(api: tuple[str, int]) -> None:
    """He gives the nonce of a true node on, and hands what he is shown to that node: at once, and again. It was meant
    for his address, so it is nothing there; and of what he was sent no key can be seen."""
    nonces: list[str] = []

    def relay(text: bytes) -> bytes:
        if b"authorization" in text.lower():
            return http_answer(200, EVIL)
        nonces.append(challenge(api))
        return asking(nonces[-1])

    with Man(relay) as man:
        why = refused(NodeClient(man.address, KEY).offers)
        assert "does not prove" in why
        for _ in range(2):
            status, _, body = said(api, "/v1/versions", {"Authorization": man.shown()})
            assert status == 401 and b"run" not in body
        everything = b"".join(man.heard)
    for secret in (TOKEN, reader_key(TOKEN).encode(), KEY.encode()):
        assert secret not in everything
    at = place_of(api)
    moved = re.sub(r'at="[^"]*"', f'at="{at}"', man.shown())
    assert said(api, "/v1/versions", {"Authorization": moved})[0] == 401  # what it was meant for is signed, too


def test_what_he_has_heard_of_a_true_answer_is_no_answer_to_another_question(api: tuple[str, int]) -> None:
    """He stood between, and answers the same question later with the same nonce and the answer of then."""
    nonce = challenge(api)
    shown, _ = authorization(node_key(TOKEN), "GET", "/v1/versions", "", nonce, place_of(api), "x:1")
    status, headers, body = said(api, "/v1/versions", {"Authorization": shown})
    assert status == 200 and headers["flowcheck-proof"]
    old = http_answer(200, body, FlowCheck_Proof=headers["flowcheck-proof"])
    with Man(lambda text: old if b"authorization" in text.lower() else asking(nonce)) as man:
        assert "does not prove" in refused(NodeClient(man.address, KEY).offers)


@pytest.mark.parametrize(("answer", "why"), [
    (http_answer(200, EVIL), "everybody"), (http_answer(401, b"{}", WWW_Authenticate="Bearer"), "earlier release"),
    (http_answer(401, b"{}"), "earlier release"), (asking("zz"), "earlier release"), (b"nothing\r\n\r\n", "HTTP"),
    (http_answer(503, b"full"), "as many as it can"), (asking("ab" * 900), "earlier release"),
])
def test_nothing_is_shown_to_who_does_not_ask_as_a_node_does(answer: bytes, why: str) -> None:
    with Man(lambda text: answer) as man:
        assert why in refused(NodeClient(man.address, KEY, seconds=2.0).offers)
        assert b"authorization" not in b"".join(man.heard).lower()


@pytest.mark.parametrize("changed", [
    {"at": "127.0.0.2:1"}, {"at": ""}, {"name": "y:1"}, {"mine": "0" * 32}, {"mac": "0" * 64}, {"mac": ""},
    {"nonce": "0" * 80}, {"nonce": ""}, {"nonce": "\u0660" * 80}, {"mac": "x" * 3000},
], ids=str)
def test_a_proof_that_was_changed_opens_nothing(api: tuple[str, int], changed: dict[str, str]) -> None:
    assert said(api, "/v1/versions", {"Authorization": proof(api)})[0] == 200
    status, _, body = said(api, "/v1/versions", {"Authorization": proof(api, **changed).encode().decode("latin-1")})
    assert status == 401 and b"run" not in body


def test_a_proof_is_of_one_question_and_good_once(api: tuple[str, int]) -> None:
    shown = {"Authorization": proof(api)}
    assert said(api, "/v1/versions?x", shown)[0] == said(api, "/v1/pieces", shown)[0] == 401
    assert said(api, "/v1/versions", shown | {"Range": "bytes=1-"})[0] == 401
    assert said(api, "/v1/versions", shown)[0] == 200 and said(api, "/v1/versions", shown)[0] == 401
    assert said(api, "/v1/node", {"Authorization": proof(api, "/v1/node")})[0] == 403  # of other nodes it is no matter
    assert said(api, "/v1/versions", {"Authorization": proof(api, key=node_key(b"another"))})[0] == 401


def test_nonces_end_and_only_used_ones_are_kept() -> None:
    at = [0.0]
    questions = Questions(["ck0:7071"], lambda: at[0])

    def asks(nonce: str, place: str = "10.0.0.2:7071", name: str = "ck0:7071") -> Any:
        shown, _ = authorization(node_key(TOKEN), "GET", "/", "", nonce, place, name)
        return questions.check(shown, [node_key(b"x"), node_key(TOKEN)], "GET", "/", "", "10.0.0.2:7071")

    nonces = [nonce_in(questions.challenge()) for _ in range(1000)]
    assert len(set(nonces)) == 1000 and not questions._used
    assert asks(nonces[0])[0] == node_key(TOKEN) and isinstance(asks(nonces[0]), str)
    assert asks(nonces[1], "10.0.0.9:1")[0] == node_key(TOKEN)  # what others call it is its own name, too
    assert "nodes.advertise" in asks(nonces[2], "10.0.0.9:1", "other:7071")
    at[0] = 31.0
    assert isinstance(asks(nonces[3]), str) and asks(nonce_in(questions.challenge()))[0] == node_key(TOKEN)
    assert len(questions._used) == 1


def test_an_end_of_a_connection_is_the_same_on_both_sides() -> None:
    assert place_of(("::ffff:10.0.0.2", 7, 0, 0)) == place_of(("10.0.0.2", 7)) == "10.0.0.2:7"
    assert place_of(("fe80::1%eth0", 7, 0, 2)) == place_of(("fe80::1", 7)) == "[fe80::1]:7"
    assert place_of(None) == place_of(("/a/socket",)) == place_of(("a name", 7)) == ""


# -- epochs that nobody attached with ------------------------------------------------------------------------------


def documented(key: bytes, run_id: str, epoch: int) -> str:
    """As docs/reference/checkpoint.md has it."""
    return hmac.new(key, json.dumps(["flowcheck attached 1", run_id, epoch]).encode(), hashlib.sha256).hexdigest()


def test_an_epoch_that_nobody_attached_with_is_never_preferred(tmp_path: Path) -> None:
    """A manifest that was planted where a node looks, in every form that one who has no token can give it."""
    real = documented(node_key(TOKEN), "run", 2)
    write(tmp_path / "disk", 2, 7, real)
    claims = ["", real, documented(b"his own key", "run", 1_000_000), "\u00e9", documented(node_key(TOKEN), "x", 10**6)]
    for step, claim in zip(itertools.count(100), claims, strict=False):
        write(tmp_path / "disk", 1_000_000, step, claim)
    with answering_here(make_app({DISK: DiskShelf(tmp_path / "disk")}, lambda: KEYS)) as address:
        for key in (KEY, reader_key(TOKEN)):
            fetched = take([NodeClient(address, key)], None, None, None)
            assert (fetched.version.epoch, fetched.version.step) == (2, 7)


def test_where_nobody_vouches_for_anything_the_newest_is_taken_as_before(tmp_path: Path) -> None:
    """Checkpoints of an earlier release, and of a node that has no token of nodes."""
    write(tmp_path / "disk", 1, 50)
    write(tmp_path / "disk", 2, 7)
    with answering_here(make_app({DISK: DiskShelf(tmp_path / "disk")}, reader_key(TOKEN))) as address:
        assert take([NodeClient(address, reader_key(TOKEN))], None, None, None).version.epoch == 2


def test_a_copy_is_offered_under_an_epoch_that_a_follower_vouches_for(tmp_path: Path) -> None:
    write(tmp_path / "copies", 0, 7, documented(node_key(TOKEN), "run", 0))
    planted = write(tmp_path / "copies", 3, 9)
    assert load_step(planted).step == 9
    with answering_here(make_app({COPY: DiskShelf(tmp_path / "copies", tier=COPY)}, lambda: KEYS)) as address:
        listed = json.loads(said(address, "/v1/versions", {"Authorization": f"Bearer {reader_key(TOKEN)}"})[2])
    assert [(one["epoch"], one["step"], one["attached"]) for one in listed["versions"]] == [(0, 7, True)]
    assert [(one["epoch"], one["step"]) for one in listed["withheld"]] == [(3, 9)]
