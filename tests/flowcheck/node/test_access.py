"""Who may come in: every role at every route and at the control port, tokens and certificates that are replaced, and
clients that take their time. The expectations are written here and not read from the product."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.ask.receiving import AskError
from flowcheck.control.protocol import Link, RecordsError, Wanted, greet
from flowcheck.control.tls import Secure, client_context, server_context
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.api import routes as api
from flowcheck.node.api import worker as answering
from flowcheck.node.api.description import describe
from flowcheck.node.api.guard import Guard
from flowcheck.node.api.routes import make_app
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.api.worker import serve, server_of
from flowcheck.node.config.load import load
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.doors import http_door
from flowcheck.node.doors.http_door import Limits
from flowcheck.node.groups.control import ControlServer
from flowcheck.node.groups.inbox import Inbox
from flowcheck.node.tokens import Access
from flowcheck.node.versions.held import Gone
from flowcheck.node.versions.holdings import Shelf

from ..certificates import issue
from ..hand_node import LONGEST, until

ROLES = ("trainer", "peer", "reader", "operator")
TOKENS = {role: f"the token of every {role}" for role in ROLES}
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND")
VERSION = "/v1/versions/m" + 31 * "0"
ODD = ("/", "/nowhere", "/metrics", "/v1", "/healthz/", "//healthz", "/healthz/../v1/versions", "/v1/versionsx",
       "/v1//versions", "/v1/versions/../status", f"{VERSION}/../../../etc/passwd", "/HEALTHZ", "/v1/versions/",
       f"{VERSION}/user/../manifest.json", "/docs", "/.env", "/v1/status/", "", "*", "/healthz;x", "/healthz?x")
Says = list[tuple[str, dict[str, Any]]]


def settings(folder: Path, **more: Any) -> NodeConfig:
    """A node with a token for each role."""
    for role, token in TOKENS.items():
        if not (folder / role).exists():
            (folder / role).write_text(token + "\n")
    return NodeConfig.model_validate({
        "name": "n", "control": {"listen": "127.0.0.1:0"}, "capture": {"device": "x"},
        "tokens": {role: str(folder / role) for role in ROLES}, "output": {"directory": str(folder / "out")},
        "replica": {"directory": str(folder)}, "api": {"listen": "127.0.0.1:0"},
    } | more)


def access(config: NodeConfig) -> tuple[Access, Says]:
    said: Says = []
    return Access(config, lambda event, **fields: said.append((event, fields))), said


def shown(role: str) -> str:
    return f"Bearer {reader_key(TOKENS[role].encode())}"


class Empty(Shelf):
    def look(self) -> list[Any]:
        return []

    def hold(self, id: str) -> Any:
        raise Gone("there is no such version", where=id)

    def expire(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def guarded() -> Iterator[Callable[..., Any]]:
    """guarded(keys) -> the application that a node answers with, of an empty tier."""
    made: list[api._Api] = []

    def make(keys: Callable[[], Any]) -> Any:
        made.append(api._Api({"memory": Empty()}))
        return Guard(made[-1].app, keys)

    yield make
    for one in made:
        one.close()


# -- HTTP: roles -----------------------------------------------------------------------------------------------------


def status(app: Any, path: str, header: str | None, method: str = "GET") -> int:
    """Of the answer; 599 if the application raised before it gave one."""
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(0 if not sent else 3600)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
             "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
             "headers": [(b"authorization", header.encode())] if header is not None else [],
             "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    asyncio.run(app(scope, receive, send))
    return int(sent[0]["status"])


def paths() -> list[str]:
    return [path.replace("{id}", VERSION[-32:]).replace("{rank}", "3") for path in describe("/healthz")["paths"]]


def due(role: str | None, path: str) -> set[int]:
    """What a GET may be answered with. 404: there is none of it here."""
    if path == "/healthz":
        return {200}
    if role in (None, "peer"):
        return {401}
    if path == "/v1/versions" or path.startswith("/v1/versions/"):
        return {403} if role == "operator" else {200, 307, 404}
    if path == "/v1/pieces" or path.startswith("/v1/pieces/"):
        return {200, 307, 404} if role == "reader" else {403}
    if path in ("/v1/status", "/v1/rewind", "/openapi.json"):
        return {200}
    if path in ("/", "/metrics", "/v1/node"):  # 503: no node has said anything here
        return {200 if path == "/" else 503} if role in ("reader", "operator") else {403}
    return {200, 307, 404} if role == "operator" else {403}


def test_no_role_is_served_what_is_not_its_own(tmp_path: Path, guarded: Callable[..., Any]) -> None:
    """Every route, described or not, with every role and method: what is not served to it is not even looked for."""
    found, _ = access(settings(tmp_path))
    app = guarded(lambda: found.keys)
    asked = served = 0
    for path, role, method in itertools.product([*paths(), *ODD], (None, *ROLES), METHODS):
        header = shown(role) if role is not None else None
        if role is None or role == "peer":
            assert status(app, path, f"Bearer {TOKENS['trainer']}", method) == status(app, path, "Basic eDp4", method)
        got = status(app, path, header, method)
        asked += 1
        allowed = due(role, path)
        if method in ("GET", "HEAD") or allowed & {401, 403}:
            assert got in allowed, (path, role, method, got)
        else:
            assert got in (405, 404, 307), (path, role, method, got)  # nothing is written over HTTP
        served += got in (200, 206) and role is None and path != "/healthz"
    assert served == 0 and asked == (len(paths()) + len(ODD)) * 5 * len(METHODS)


def test_one_token_file_is_of_all_roles_and_an_own_one_of_one(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKENS["trainer"])
    control = {"listen": "127.0.0.1:0", "token_file": str(tmp_path / "token")}
    whole, _ = access(settings(tmp_path, control=control, tokens={}))
    assert set(whole.keys[reader_key(TOKENS["trainer"].encode())]) == {"trainer", "reader", "operator"}
    assert TOKENS["trainer"] not in whole.keys  # it lets trainers speak, and never travels
    part, _ = access(settings(tmp_path, control=control, tokens={"operator": str(tmp_path / "operator")}))
    assert part.keys[TOKENS["operator"]] == ["operator"]  # a scraper sends what its file has
    assert part.of("peer") == part.of("trainer") == (TOKENS["trainer"].encode(),)


def test_a_role_without_a_token_is_let_in_by_nothing(tmp_path: Path, guarded: Callable[..., Any]) -> None:
    one, _ = access(settings(tmp_path, tokens={"trainer": str(tmp_path / "trainer")}))
    assert one.of("operator") == one.of("reader") == one.of("peer") == ()
    app = guarded(lambda: one.keys)
    assert [status(app, "/v1/versions", shown(role)) for role in ROLES] == [200, 401, 401, 401]
    with pytest.raises(ValueError, match=r"control\.token_file|without a token of trainers"):
        settings(tmp_path, tokens={"reader": str(tmp_path / "reader")})
    with pytest.raises(ValueError, match="names nodes that ask for one"):
        settings(tmp_path, tokens={"trainer": str(tmp_path / "trainer")}, replica={"peers": ["127.0.0.1:9"]})


# -- replaced while the node runs ------------------------------------------------------------------------------------


def test_a_token_is_replaced_with_an_overlap_that_two_lines_make(tmp_path: Path) -> None:
    one, said = access(settings(tmp_path))
    old, new = TOKENS["trainer"].encode(), b"another token of trainers"
    assert not one.look(at_once=False) and one.of("trainer") == (old,)
    for text, expected in ((new + b"\n" + old + b"\n", (new, old)), (new + b"\n", (new,))):
        (tmp_path / "trainer").write_bytes(text)
        until(one.look)
        assert one.of("trainer") == expected and one.of("peer") == (TOKENS["peer"].encode(),)
        assert [reader_key(token) in one.keys for token in (new, old)] == [True, old in expected]
    assert [event for event, _ in said] == ["access", "access"]
    assert one.look(at_once=True) and said[-1][1]["why"] == "asked to"


@pytest.mark.parametrize("text", [b"", b"short", b"\xff" * 20, b"x" * 20 + b"\n" + b"y" * 20 + b"\n" + b"z" * 20])
def test_a_file_that_becomes_bad_changes_nothing_and_is_said_once(tmp_path: Path, text: bytes) -> None:
    one, said = access(settings(tmp_path))
    before = dict(one.keys)
    (tmp_path / "reader").write_bytes(text)
    for _ in range(3):
        assert not one.look(at_once=True)
    (problem,) = said
    assert problem[0] == "problem" and "what was read before stays in force" in problem[1]["why"]
    assert one.keys == before and one.of("reader") == (TOKENS["reader"].encode(),)
    (tmp_path / "reader").write_text("a token of readers, at last")
    until(one.look)
    assert one.of("reader") == (b"a token of readers, at last",)


def test_files_that_are_bad_at_the_start_are_named(tmp_path: Path) -> None:
    config = settings(tmp_path)
    (tmp_path / "reader").write_text("a token that is right\nanother that is\nand one too many")
    with pytest.raises(UserError, match="has 3 lines, each of which would be let in") as refused:
        access(config)
    assert refused.value.where == str(tmp_path / "reader")
    os.unlink(tmp_path / "reader")
    with pytest.raises((UserError, EnvironmentProblem), match="No such file"):
        access(config)


def test_pipes_into_which_nobody_writes_are_waited_for_by_nobody(tmp_path: Path) -> None:
    """At the start, and when a file is replaced by one while the node runs."""
    config = settings(tmp_path)
    running, said = access(config)
    token = tmp_path / "reader"
    token.unlink()
    os.mkfifo(token, 0o600)
    assert not running.look(at_once=True)
    assert ["is no regular file" in fields["why"] for event, fields in said if event == "problem"] == [True]
    with pytest.raises(UserError, match="is no regular file"):
        access(config)
    os.mkfifo(tmp_path / "node.toml", 0o600)
    with pytest.raises(UserError):
        load(tmp_path / "node.toml")
    os.mkfifo(tmp_path / "pipe.pem", 0o600)
    for read in (lambda pem: client_context(str(pem)), lambda pem: server_context(pem, pem)):
        with pytest.raises(UserError, match="it is a pipe, and no file"):
            read(tmp_path / "pipe.pem")


def test_settings_that_a_shell_gives_through_a_pipe_are_read(tmp_path: Path) -> None:
    text = '[control]\nlisten = "127.0.0.1:0"\ntoken_file = "t"\n[capture]\ndevice = "af_packet:x"\n'
    text += "# more than a pipe holds\n" * 20_000
    read, write = os.pipe()

    def give() -> None:
        with os.fdopen(write, "w") as pipe:
            pipe.write(text)

    writer = threading.Thread(target=give)
    writer.start()
    try:
        assert load(f"/dev/fd/{read}").capture[0].device == "af_packet:x"
    finally:
        writer.join()
        os.close(read)


# -- the control port ------------------------------------------------------------------------------------------------


class Group:
    plan = None
    inbox = Inbox(1 << 30)

    @property
    def ranks(self) -> Group:
        return self

    def refused(self, run: tuple[str, int, int]) -> str:
        return ""

    def join(self, run: Any, member: Any, instance: str = "") -> str:
        return ""

    def leave(self, member: Any) -> None:
        pass


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Callable[..., tuple[ControlServer, Access]]]:
    with contextlib.ExitStack() as open_:
        def start(**more: Any) -> tuple[ControlServer, Access]:
            found, _ = access(settings(tmp_path, **more))
            server = ControlServer(("127.0.0.1", 0), found.of, 16, lambda name: Group(),  # type: ignore
                                   lambda event, **fields: None, tls=lambda: found.tls)
            open_.enter_context(contextlib.closing(server))
            server.start()
            return server, found

        yield start


def attach(server: ControlServer, role: str, token: bytes, tls: ssl.SSLContext | None = None) -> str:
    """"", or why not."""
    host, _, number = server.address.rpartition(":")
    sock = socket.create_connection((host, int(number)), timeout=60)
    link = Link(sock, Secure(sock, tls, host) if tls is not None else None)
    try:
        greet(link, token, run_id="run", epoch=0, rank=0, ranks=1, group="", role=role)
        if role == "trainer":
            assert link.receive(wait=60) == (Wanted(["user", "userhead", "notice"], ""), 0)
        return ""
    except RecordsError as error:
        return error.what
    finally:
        link.close()
        sock.close()


def test_a_token_of_another_role_opens_nothing(port: Callable[..., Any]) -> None:
    server, _ = port()
    for said, owner in itertools.product(("trainer", "peer", "reader", "operator", "node", ""), ROLES):
        why = attach(server, said, TOKENS[owner].encode())
        if said == owner and said in ("trainer", "peer"):
            assert why == ""
        else:
            assert why.startswith("refused: "), (said, owner, why)


def test_both_tokens_are_taken_while_there_are_two_and_the_node_proves_the_same(
    port: Callable[..., Any], tmp_path: Path
) -> None:
    server, found = port()
    old, new = TOKENS["trainer"].encode(), b"another token of trainers"
    assert attach(server, "trainer", new).startswith("refused: the token is wrong")
    (tmp_path / "trainer").write_bytes(new + b"\n" + old)
    until(found.look)
    assert attach(server, "trainer", new) == attach(server, "trainer", old) == ""
    (tmp_path / "trainer").write_bytes(new)
    until(found.look)
    assert attach(server, "trainer", new) == ""
    assert attach(server, "trainer", old).startswith("refused: the token is wrong")


def test_a_certificate_is_replaced_while_connections_are_open(port: Callable[..., Any], tmp_path: Path) -> None:
    first, second = issue(tmp_path, "first"), issue(tmp_path, "second")
    own = issue(tmp_path, "own")
    own.cert.write_bytes(first.cert.read_bytes())
    own.key.write_bytes(first.key.read_bytes())
    server, found = port(tls={"cert": str(own.cert), "key": str(own.key)})
    trusts = [client_context(str(one.ca)) for one in (first, second)]
    token = TOKENS["trainer"].encode()
    assert attach(server, "trainer", token, trusts[0]) == ""
    assert "not trusted" in attach(server, "trainer", token, trusts[1])
    own.cert.write_bytes(second.cert.read_bytes())
    assert not found.look(at_once=True)  # its key is not there yet
    assert attach(server, "trainer", token, trusts[0]) == ""
    own.key.write_bytes(second.key.read_bytes())
    until(found.look)
    assert attach(server, "trainer", token, trusts[1]) == ""
    assert "not trusted" in attach(server, "trainer", token, trusts[0])


# -- where a node may listen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["control", "api"])
def test_elsewhere_than_the_loopback_only_with_tls_or_in_so_many_words(tmp_path: Path, table: str) -> None:
    far = {"listen": "10.0.0.2:7"}
    with pytest.raises(ValueError, match=r"10\.0\.0\.2 is not the loopback"):
        settings(tmp_path, **{table: far})
    assert settings(tmp_path, **{table: far | {"insecure": True}}).tls is None
    tls = {"cert": "c", "key": "k"}
    assert settings(tmp_path, **{table: far}, tls=tls).tls.ca == "system"  # type: ignore[union-attr]


# -- HTTP over TLS, and slow clients ---------------------------------------------------------------------------------


def test_http_is_tls_too_and_takes_other_keys_and_certificates(tmp_path: Path) -> None:
    first, second, own = (issue(tmp_path, name) for name in ("first", "second", "own"))
    own.cert.write_bytes(first.cert.read_bytes())
    own.key.write_bytes(first.key.read_bytes())
    config = settings(tmp_path, tls={"cert": str(own.cert), "key": str(own.key)})
    found, _ = access(config)
    with contextlib.closing(Serving(config, found.keys, lambda *_, **__: None)) as node:
        host, _, number = node.address.rpartition(":")

        def offers(ca: Path, role: str) -> str:
            asked = NodeClient((host, int(number)), reader_key(TOKENS[role].encode()), LONGEST, client_context(str(ca)))
            try:
                return str(asked.offers())
            except AskError as error:
                return error.what

        assert offers(first.ca, "reader") == offers(first.ca, "trainer") == "[]"
        assert offers(first.ca, "peer") == "the token is wrong"
        assert offers(first.ca, "operator").startswith("refused: this is for trainer or reader, the key is of operator")
        assert offers(second.ca, "reader").startswith("the node's certificate is not trusted")
        with contextlib.closing(http.client.HTTPConnection(host, int(number), timeout=60)) as plain:
            with pytest.raises((OSError, http.client.HTTPException)):
                plain.request("GET", "/healthz")
                plain.getresponse()
        own.cert.write_bytes(second.cert.read_bytes())
        own.key.write_bytes(second.key.read_bytes())
        (tmp_path / "reader").write_text("another token of readers")
        assert found.look(at_once=True)
        node.renew(found.keys)
        until(lambda: offers(second.ca, "trainer") == "[]")
        assert offers(second.ca, "reader") == "the token is wrong"  # the old one: there is one line in the file


@contextlib.contextmanager
def answering_here(app: Any, tls: Any = None) -> Iterator[tuple[str, int]]:
    """The server of the answering process, on a thread of this one."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = server_of(app, tls)
        thread = threading.Thread(target=serve, args=(server, sock, Limits()))
        thread.start()
        try:
            yield sock.getsockname()
        finally:
            server.should_exit = True
            thread.join(60)


def _closed(sock: socket.socket) -> bool:
    sock.settimeout(60)
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("secure", [False, True])
def test_clients_that_ask_slowly_are_let_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, secure: bool) -> None:
    """Nothing, half a request, a byte now and then, a body without an end: none keeps its place."""
    monkeypatch.setattr(answering, "ASK_SECONDS", 0.5)
    monkeypatch.setattr(answering, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(http_door, "HANDSHAKE_SECONDS", 0.5)
    issued = issue(tmp_path)
    tls = (lambda *_: server_context(issued.cert, issued.key)) if secure else None
    with answering_here(make_app({"memory": Empty()}, "k"), tls) as address, contextlib.ExitStack() as open_:
        def connect(handshake: bool = True) -> socket.socket:
            sock = open_.enter_context(socket.create_connection(address, timeout=60))
            if not secure or not handshake:
                return sock
            context = client_context(str(issued.ca))
            return open_.enter_context(context.wrap_socket(sock, server_hostname="127.0.0.1"))

        assert _closed(connect(handshake=False)) and _closed(connect())
        for text in (b"GET /healthz HT", b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nx",
                     b"POST /v1/status HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"):
            sock = connect()
            sock.sendall(text)
            assert _closed(sock)
        dripping = connect()
        dripping.settimeout(0.05)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            for i in range(1000):
                dripping.sendall(b"GET /healthz HTTP/1.1\r\nX: "[i : i + 1] or b"x")
                with contextlib.suppress(TimeoutError):
                    if dripping.recv(1) == b"":
                        break
        assert time.monotonic() - began < 40
        quick = http.client.HTTPSConnection(*address, context=client_context(str(issued.ca))) if secure else \
            http.client.HTTPConnection(*address)
        with contextlib.closing(quick):  # one connection, asked for longer than a request may take
            for _ in range(12):
                quick.request("GET", "/healthz")
                with contextlib.closing(quick.getresponse()) as answer:
                    assert answer.status == 200 and answer.read()
                threading.Event().wait(0.1)


def test_a_client_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "TAKE_SECONDS", 0.5)
    monkeypatch.setattr(answering, "LOOK_SECONDS", 0.05)
    ended = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not (scope["path"] == "/stop" and ended.is_set()):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            if scope["state"].get("gone"):
                break
            if (await asyncio.wait_for(_gone(receive), 60)):
                break
        ended.set()

    async def _gone(receive: Any) -> bool:
        task = asyncio.ensure_future(receive())
        done, _ = await asyncio.wait([task], timeout=0)
        if not done:
            task.cancel()
            return False
        return bool(task.result()["type"] == "http.disconnect")

    with answering_here(endless) as address, socket.create_connection(address, timeout=60) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert ended.wait(60)
        assert _closed(sock)


MALFORMED = [
    b"\x00" * 64, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /healthz HTTP/1.1\r\n\r\n", b"\r\n" * 50,
    b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20000 + b"\r\n",
    b"POST /v1/status HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/status HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    b"POST /v1/status HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
    b"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
    b"GET /v1/%00%ff%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /v1/status HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    b"POST /v1/status HTTP/1.1\r\nHost: x\r\nContent-Length: 400000\r\n\r\n" + b"z" * 400000,
    b"GET /v1/status HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HEAD /v1/status HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
]


def test_what_is_no_request_is_refused_and_serving_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    with answering_here(make_app({"memory": Empty()}, "k")) as address:
        for text in MALFORMED:
            with socket.create_connection(address, timeout=60) as sock, contextlib.suppress(ConnectionError):
                sock.sendall(text)
                sock.shutdown(socket.SHUT_WR)
                said = b""
                while piece := sock.recv(65536):
                    said += piece
                assert said == b"" or said.split(b" ")[1] in (b"400", b"401", b"404", b"405", b"431"), (text[:60], said)
        with contextlib.closing(http.client.HTTPConnection(*address)) as asked:
            asked.request("GET", "/healthz")
            assert asked.getresponse().read().startswith(b'{"ok":true')
    assert "Traceback" not in capfd.readouterr().err
