"""TLS below the records protocol: whom each side trusts, and that messages pass as without it. Real sockets."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.control import tls
from flowcheck.control.protocol import Bye, Hello, Limits, Link, Record, RecordsError, State, Welcome, accept, greet
from flowcheck.control.tls import Secure, client_context, server_context
from flowcheck.errors import UserError

from ..certificates import Issued, issue

TOKEN = b"a token that only tests have"
WHO: dict[str, Any] = {"run_id": "run", "epoch": 0, "rank": 0, "ranks": 1, "group": ""}
BIG = 24 << 20


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return issue(tmp_path_factory.mktemp("certificates"))


class Ends:
    """Both ends of one connection, each with or without TLS, and what each side comes to."""

    def __init__(self, near: ssl.SSLContext | None, far: ssl.SSLContext | None, name: str = "127.0.0.1") -> None:
        one, other = socket.socketpair()
        self.node = Link(one, Secure(one, near) if near is not None else None)
        self.trainer = Link(other, Secure(other, far, name) if far is not None else None)
        self._pool = ThreadPoolExecutor(4)

    def do(self, call: Callable[..., Any], *given: Any, **more: Any) -> Future[Any]:
        return self._pool.submit(call, *given, **more)

    def opening(self) -> tuple[Any, Any]:
        """Hello and Welcome, or why not."""
        sides = (self.do(_or_why, self.node, accept, TOKEN), self.do(_or_why, self.trainer, greet, TOKEN, **WHO))
        return sides[0].result(60), sides[1].result(60)

    def close(self) -> None:
        self.node.close()
        self.trainer.close()
        self._pool.shutdown()


def _or_why(link: Link, side: Any, *given: Any, **more: Any) -> Any:
    try:
        return side(link, *given, **more)
    except RecordsError as error:
        link.close()
        return error.what


@pytest.fixture
def ends() -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []

    def connect(*given: Any) -> Ends:
        made.append(Ends(*given))
        return made[-1]

    yield connect
    for one in made:
        one.close()


def _both(issued: Issued) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return server_context(issued.cert, issued.key), client_context(str(issued.ca))


def test_messages_and_payloads_go_both_ways_at_once(ends: Callable[..., Ends], issued: Issued) -> None:
    """A reader and a writer in each side's one OpenSSL object, 24 MiB each way at the same time."""
    one = ends(*_both(issued))
    hello, welcome = one.opening()
    assert isinstance(hello, Hello) and isinstance(welcome, Welcome)
    data = bytes(range(256)) * (BIG // 256)
    for link in (one.node, one.trainer):
        link.limits = lambda: Limits(payload={"state": BIG}, seconds=120.0)

    def taken(link: Link) -> bytes:
        message, size = link.receive(wait=60)
        assert message == State(7)
        return bytes(link.payload(size))

    views = [memoryview(data)[i : i + 1_000_003] for i in range(0, BIG, 1_000_003)]
    sent = [one.do(link.send, State(7), views, BIG, seconds=120.0) for link in (one.node, one.trainer)]
    got = [one.do(taken, link) for link in (one.node, one.trainer)]
    assert all(part.result(120) == data for part in got) and not any(part.result(120) for part in sent)
    one.trainer.send(Bye())
    assert one.node.receive(wait=60) == (Bye(), 0)


def test_nothing_of_the_records_can_be_read_on_the_way(issued: Issued) -> None:
    """What passes the wire is looked at: the same opening without TLS shows its run, with TLS it does not."""
    for hidden in (False, True):
        passed = _tapped(*_both(issued)) if hidden else _tapped(None, None)
        assert (b"a run with a name" in passed) != hidden and len(passed) > 500


def _tapped(near: ssl.SSLContext | None, far: ssl.SSLContext | None) -> bytes:
    (a, tap_a), (tap_b, b) = socket.socketpair(), socket.socketpair()
    passed: list[bytes] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            passed.append(data)
            target.sendall(data)

    pumps = [threading.Thread(target=pump, args=pair) for pair in ((tap_a, tap_b), (tap_b, tap_a))]
    for thread in pumps:
        thread.start()
    node = Link(a, Secure(a, near) if near is not None else None)
    trainer = Link(b, Secure(b, far, "localhost") if far is not None else None)
    with ThreadPoolExecutor() as pool:
        known = pool.submit(accept, node, TOKEN)
        greet(trainer, TOKEN, **{**WHO, "run_id": "a run with a name"})
        assert known.result(60).run_id == "a run with a name"
    for sock in (tap_a, tap_b):
        sock.shutdown(socket.SHUT_RDWR)
    for thread in pumps:
        thread.join()
    for one in (node, trainer, tap_a, tap_b):
        one.close()
    return b"".join(passed)


def test_a_certificate_of_another_authority(ends: Callable[..., Ends], issued: Issued, tmp_path: Path) -> None:
    other = issue(tmp_path, "other")
    node, trainer = ends(server_context(other.cert, other.key), client_context(str(issued.ca))).opening()
    assert trainer.startswith("no TLS: the node's certificate is not trusted: ") and node.startswith("no TLS: ")


def test_a_certificate_of_another_host(ends: Callable[..., Ends], issued: Issued) -> None:
    for name in ("10.0.0.2", "elsewhere"):
        _, trainer = ends(*_both(issued), name).opening()
        assert "certificate is not trusted" in trainer and name in trainer


def test_the_machines_authorities_do_not_trust_ours(ends: Callable[..., Ends], issued: Issued) -> None:
    _, trainer = ends(server_context(issued.cert, issued.key), client_context("system")).opening()
    assert "certificate is not trusted" in trainer


def test_one_side_alone(ends: Callable[..., Ends], issued: Issued) -> None:
    """Never a conversation that one side takes for encrypted; whoever finds out says what is the matter."""
    near, far = _both(issued)
    one = ends(None, far)
    node, trainer = one.opening()
    assert trainer == "no TLS: the other side speaks without" and isinstance(node, str)
    one = ends(near, None)
    one.node.limits = lambda: Limits(seconds=60.0)
    one.trainer.limits = lambda: Limits(seconds=1.0)
    node, trainer = one.opening()
    assert node.startswith("no TLS")
    assert trainer.startswith("no answer") and "FLOWCHECK_CA" in trainer


def test_somebody_who_drips_a_handshake_is_let_go(issued: Issued) -> None:
    """The deadline is of the whole handshake, and of a whole message, not of each byte."""
    one, other = socket.socketpair()
    with other:
        link = Link(one, Secure(one, server_context(issued.cert, issued.key)))
        link.limits = lambda: Limits(seconds=0.3)
        ended = threading.Event()

        def drip() -> None:
            for byte in b"\x16\x03\x01\x02\x00" + bytes(512):
                if ended.wait(0.05):
                    return
                other.send(bytes([byte]))

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(RecordsError, match="no TLS came"):
            link.begin()
        ended.set()
        dripping.join()
        link.close()


def test_a_message_that_is_dripped_below_tls_is_too_slow(ends: Callable[..., Ends], issued: Issued) -> None:
    """TLS hands on whole records only: one of which bytes keep coming must not look like progress."""
    one = ends(*_both(issued))
    one.opening()
    one.node.limits = lambda: Limits(seconds=0.4)
    secure = one.trainer._secure
    assert secure is not None
    _, data = secure.encrypted(memoryview(b"F"))
    _, more = secure.encrypted(memoryview(b"C" * 200))
    ended = threading.Event()

    def drip() -> None:
        secure._socket.send(data)
        for byte in more:
            if ended.wait(0.02):
                return
            secure._socket.send(bytes([byte]))

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(RecordsError, match="too slow"):
        one.node.receive(wait=60)
    ended.set()
    dripping.join()


def test_a_changed_byte_ends_the_connection(ends: Callable[..., Ends], issued: Issued) -> None:
    one = ends(*_both(issued))
    one.opening()
    secure = one.trainer._secure
    assert secure is not None
    _, data = secure.encrypted(memoryview(b"FCR1" + bytes(60)))
    secure._socket.send(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RecordsError, match="connection lost"):
        one.node.receive(wait=60)


def test_an_end_that_is_cut_is_the_end(ends: Callable[..., Ends], issued: Issued) -> None:
    one = ends(*_both(issued))
    one.opening()
    one.trainer.send(Record(3, []))
    one.trainer.close()
    assert one.node.receive(wait=60)[0] == Record(3, [])
    with pytest.raises(RecordsError, match="connection closed"):
        one.node.receive(wait=60)


# -- one side alone --------------------------------------------------------------------------------------------


class Pair:
    """Two sides over a real connection, after their handshake. sockets: below them, the node's first."""

    def __init__(self, near: ssl.SSLContext, far: ssl.SSLContext) -> None:
        self.sockets = one, other = socket.socketpair()
        self.node, self.trainer = Secure(one, near), Secure(other, far, "127.0.0.1")

    def __enter__(self) -> Pair:
        try:
            with ThreadPoolExecutor() as pool:
                for done in [pool.submit(side.handshake, 60.0) for side in (self.node, self.trainer)]:
                    done.result(60)
        except BaseException:
            self.__exit__()
            raise
        for side in (self.node, self.trainer):
            side.settimeout(60.0)
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.sockets:
            one.close()


@pytest.fixture
def pair(issued: Issued) -> Iterator[Pair]:
    with Pair(*_both(issued)) as made:
        yield made


def test_bytes_come_as_they_were_sent(pair: Pair) -> None:
    """Of a payload a part at a time is taken, and a side takes as many bytes as it asks for."""
    data = memoryview(bytes(range(256)) * 3072)
    writer, sent, got = pair.trainer.dup(), 0, bytearray()
    with ThreadPoolExecutor() as pool:

        def read() -> None:
            while len(got) < len(data):
                piece = pair.node.recv(1000)
                assert 0 < len(piece) <= 1000
                got.extend(piece)

        reading = pool.submit(read)
        writer.settimeout(60.0)
        counts = []
        while sent < len(data):
            counts.append(writer.send(data[sent:]))
            sent += counts[-1]
        reading.result(60)
    assert counts == [256 << 10] * 3 and got == data
    writer.close()
    say(pair.node, b"answer")
    assert pair.trainer.recv(100) == b"answer", "the connection is not the writer's"


def say(side: Secure, data: bytes) -> None:
    writer = side.dup()
    writer.settimeout(60.0)
    assert writer.send(memoryview(data)) == len(data)
    writer.close()


def test_whoever_waits_for_nothing_is_told_at_once(pair: Pair, issued: Issued) -> None:
    pair.node.settimeout(0.0)
    one, other = socket.socketpair()
    with one, other:
        for side in (pair.node, Secure(one, server_context(issued.cert, issued.key))):  # nobody told it how long
            with pytest.raises(TimeoutError):
                side.recv(1)


def test_how_much_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "time", SimpleNamespace(monotonic=lambda: 100.0))
    assert tls._left(100.25) == 0.25 and tls._left(103.0) == 3.0
    for deadline in (100.0, 99.0):
        with pytest.raises(TimeoutError):
            tls._left(deadline)


def test_a_handshake_that_nobody_reads_ends(issued: Issued) -> None:
    """What it has to say finds no room."""
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                one.send(bytes(65536))
        with pytest.raises(TimeoutError):
            Secure(one, client_context(str(issued.ca)), "127.0.0.1").handshake(0.1)


def test_a_writer_that_nobody_reads_ends(pair: Pair) -> None:
    writer = pair.trainer.dup()
    writer.settimeout(0.1)
    with pytest.raises(TimeoutError):
        for _ in range(1000):
            writer.send(memoryview(bytes(1 << 20)))
    writer.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_where_the_other_side_is(issued: Issued, family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    if family == socket.AF_INET6 and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.create_server((host, 0), family=family) as listener:
        with socket.create_connection(listener.getsockname()[:2]) as one:
            side = Secure(one, client_context(str(issued.ca)), host)
            assert side.getpeername() == listener.getsockname()[:2]


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_whoever_closes_or_shuts_a_side_ends_its_connection(pair: Pair) -> None:
    pair.trainer.shutdown(socket.SHUT_WR)
    assert pair.node.recv(1) == b""
    say(pair.node, b"still")
    assert pair.trainer.recv(5) == b"still", "the other way is open"
    pair.node.close()
    assert pair.sockets[0].fileno() == -1 and pair.sockets[1].fileno() >= 0


def test_nobody_comes_in_with_an_older_tls_or_takes_a_ticket(issued: Issued) -> None:
    node, client = server_context(issued.cert, issued.key), client_context(str(issued.ca))
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol"), Pair(node, client):
        pass
    with Pair(node, client_context(str(issued.ca))) as met:
        say(met.node, b"x")
        assert met.trainer.recv(1) == b"x"
        session = met.trainer._tls.session
        assert met.trainer._tls.version() == "TLSv1.3" and (session is None or not session.has_ticket)


def test_files_that_are_none(issued: Issued, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no certificate")
    os.mkfifo(tmp_path / "pipe")
    other = issue(tmp_path, "other")
    for cert, key, why in (
        (tmp_path / "none such", issued.key, "No such file or directory"), (tmp_path / "text", issued.key, "no pem"),
        (issued.cert, other.key, "key values mismatch"), (tmp_path / "pipe", issued.key, "it is a pipe, and no file"),
        (issued.cert, tmp_path / "pipe", "it is a pipe, and no file"),
    ):
        with pytest.raises(UserError) as refused:
            server_context(cert, key)
        assert refused.value.what == f"cannot be used: {why}" and refused.value.remedy
        assert str(cert) in refused.value.where and str(key) in refused.value.where
    for name, why in (("none such", "No such file or directory"), ("text", "no certificate or crl found"),
                      ("pipe", "it is a pipe, and no file")):
        with pytest.raises(UserError) as refused:
            client_context(str(tmp_path / name))
        assert refused.value.what == f"no certificates can be read there: {why}"
        assert str(tmp_path / name) in refused.value.where and "system" in refused.value.remedy
