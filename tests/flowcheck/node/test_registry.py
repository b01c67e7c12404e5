"""Both registries do the same: leases, own keys, one root, decisions of a root that still is one."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowcheck.errors import EnvironmentProblem
from flowcheck.node.protect import registry_etcd as module
from flowcheck.node.protect.registry import LEASE_SECONDS, PLACEMENT, ROOT, Entry, Registry, RegistryError, Shared
from flowcheck.node.protect.registry_etcd import Etcd

from ..hand_node import until
from .registry_scene import EtcdServer, etcd_server

Make = Callable[[], Registry]
Pass = Callable[[], None]


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as one:
        yield one


@pytest.fixture(params=["in-process", "etcd"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Make, Callable[[float], None]]]:
    """(a new member's registry, let so many seconds pass)."""
    if request.param == "in-process":
        clock = Clock()
        shared = Shared(clock)
        yield shared.session, lambda seconds: setattr(clock, "at", clock.at + seconds)
        return
    one: EtcdServer = request.getfixturevalue("server")
    made: list[Etcd] = []

    def make() -> Etcd:
        made.append(Etcd(one.endpoints, f"{tmp_path}", seconds=30.0))
        return made[-1]

    yield make, time.sleep
    for each in made:
        each.close()


def test_a_contract(kind: tuple[Make, Callable[[float], None]]) -> None:
    make, wait = kind
    one, two = make(), make()
    assert one.read() == {} and not one.elect("a")  # nobody without a lease is root
    one.renew({"members/a": "1", "have/a": "x"})
    two.renew({"members/b": "2"})
    found = two.read()
    assert {key: entry.value for key, entry in found.items()} == {"members/a": "1", "have/a": "x", "members/b": "2"}
    with pytest.raises(RegistryError, match="members/a is somebody else's"):
        two.renew({"members/a": "3"})
    one.renew({"members/a": "1", "have/a": "y"})
    assert one.read()["have/a"].value == "y" and one.read()["have/a"].created == found["have/a"].created

    assert two.elect("b") and not one.elect("a") and not two.elect("b")
    root = one.read()[ROOT]
    assert root.value == "b" and two.decide(PLACEMENT, "first", root)
    assert one.read()[PLACEMENT].value == "first"

    for _ in range(4):  # b is silent for longer than its lease, a is not
        wait(LEASE_SECONDS / 2)
        one.renew({"members/a": "1", "have/a": "y"})
        if "members/b" not in one.read():
            break
    until(lambda: "members/b" not in one.read())
    assert ROOT not in one.read() and one.read()[PLACEMENT].value == "first"  # what was decided stays
    assert not two.decide(PLACEMENT, "of one that was root", root)
    assert one.elect("a")
    assert not two.decide(PLACEMENT, "of one that was root", root)  # although there is one again
    newer = one.read()[ROOT]
    assert newer.created != root.created and one.decide(PLACEMENT, "second", newer)
    two.renew({"members/b": "2"})  # comes back
    assert two.read()["members/b"].value == "2" and two.read()[PLACEMENT].value == "second"
    one.close()
    until(lambda: "members/a" not in two.read())
    assert two.elect("b")


# -- etcd ----------------------------------------------------------------------------------------------------------


def test_clusters_do_not_see_each_other(server: EtcdServer) -> None:
    with contextlib.closing(Etcd(server.endpoints, "a", seconds=30.0)) as one, \
            contextlib.closing(Etcd(server.endpoints, "a/b", seconds=30.0)) as two:
        one.renew({"members/x": "1"})
        assert two.read() == {} and two.elect("x") is False


def test_the_next_endpoint_is_asked(server: EtcdServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = f"http://127.0.0.1:{silent.getsockname()[1]}"
        one = Etcd([dead, *server.endpoints], "next", seconds=0.2)
        until(lambda: _answers(one))
        one._clients[0].timeout = 30.0
        one.renew({"members/x": "1"})
        assert one.read()["members/x"].value == "1"
        one.close()
    nobody = Etcd(["http://127.0.0.1:9"], "next")
    with pytest.raises(RegistryError, match="etcd does not answer") as caught:
        nobody.read()
    assert caught.value.where == "http://127.0.0.1:9"
    nobody.close()


def _answers(one: Etcd) -> bool:
    try:
        one.read()
    except RegistryError:
        return False
    return True


def test_one_that_is_paused_is_an_error_in_time(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server:
        one = Etcd(server.endpoints, "x", seconds=0.3)
        server.pause()
        for call in (one.read, lambda: one.renew({"members/a": "1"})):
            with pytest.raises(RegistryError, match="Timeout"):
                call()
        server.resume()
        until(lambda: _answers(one))


@pytest.mark.parametrize("how", ["removed", "written over"])
def test_a_key_that_others_touched_is_put_back(server: EtcdServer, how: str) -> None:
    """By hand, or by whoever can write there. The lease lives, so a member that did not look would never be back."""
    with contextlib.closing(Etcd(server.endpoints, f"touched {how}", seconds=30.0)) as one:
        keys = {"members/a": "1", "have/a": "2"}
        one.renew(keys)
        for key in keys:
            client, name = one._clients[0], one._prefix + key
            assert client.delete(name) if how == "removed" else client.put(name, "a lie")
        one.read()
        one.renew(keys)
        assert {key: entry.value for key, entry in one.read().items()} == keys


def test_bytes_that_are_no_text_harm_nobody(server: EtcdServer) -> None:
    """Whoever may write there may write anything, also names that are none."""
    with contextlib.closing(Etcd(server.endpoints, "bytes", seconds=30.0)) as one:
        one.renew({"members/a": "1"})
        one._clients[0].put(f"{one._prefix}have/x", b"\xff\xfe")
        one._clients[0].put(one._prefix.encode() + b"members/\xff", b"{}")
        found = one.read()
        assert found["members/a"].value == "1" and len(found) == 3


@pytest.mark.parametrize("answer", [
    "[]", "3", "{}", '{"kvs": 3}', '{"kvs": [{}]}', '{"ID": []}', "x", '{"succeeded": 1}', '{"result": {"TTL": "x"}}',
    '{"kvs": [{"key": "eA==", "value": "eA==", "create_revision": "x"}]}', '{"ID": 4, "result": {"TTL": {}}}',
    "[" * 100_000,
], ids=lambda text: text[:30])
def test_an_endpoint_that_answers_anything_is_an_error_at_most(answer: str) -> None:
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        one = Etcd([f"http://127.0.0.1:{server.server_port}"], "x", seconds=30.0)
        for call in (lambda: one.renew({"members/a": "1"}), lambda: one.renew({"members/a": "2"}), one.read,
                     lambda: one.elect("a"), lambda: one.decide("placement", "x", Entry("a", 1)), one.close):
            with contextlib.suppress(RegistryError):
                call()
        server.shutdown()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"])
def test_an_endpoint_that_answers_byte_by_byte_is_left_for_the_next(server: EtcdServer, head: bytes) -> None:
    """Each byte is in time, and the answer never ends. It holds up one question, and no second one."""
    over, accepted = threading.Event(), list[socket.socket]()

    def trickle(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not over.is_set():
                accepted.append(listening.accept()[0])
                accepted[-1].sendall(head)
                threading.Thread(target=drip, args=(accepted[-1],), daemon=True).start()

    def drip(one: socket.socket) -> None:
        with contextlib.suppress(OSError), one:
            while not over.wait(0.02):
                one.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=trickle, args=(listening,), daemon=True)
        thread.start()
        slow = f"http://127.0.0.1:{listening.getsockname()[1]}"
        alone = Etcd([slow], "drip", seconds=0.3)
        for _ in range(3):
            with pytest.raises(RegistryError, match="etcd does not answer"):
                alone.read()
        assert len(accepted) == 1
        both = Etcd([slow, *server.endpoints], "drip", seconds=0.3)
        until(lambda: _answers(both))
        over.set()
        with contextlib.suppress(OSError):
            socket.create_connection(listening.getsockname()).close()
        thread.join(60.0)


def test_a_client_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "etcd3gw", None)
    with pytest.raises(EnvironmentProblem, match="is not installed") as caught:
        module.check_endpoints(["http://127.0.0.1:1"])
    assert "pip install etcd3gw" in (caught.value.remedy or "")


