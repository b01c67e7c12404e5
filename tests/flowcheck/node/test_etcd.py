"""What etcd is asked, by an endpoint that says what the test wants: leases, own keys, transactions of a root, and what
is made of answers that are late, odd or refused. What a real etcd does with it: test_registry.py."""

from __future__ import annotations

import base64
import gc
import http.server
import json
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from flowcheck.errors import UserError
from flowcheck.node.protect import registry_etcd as module
from flowcheck.node.protect.registry import LEASE_SECONDS, PLACEMENT, ROOT, Entry, RegistryError

pytest.importorskip("etcd3gw", reason="the extra `registry` is not installed")
Etcd = module.Etcd
GRANT, ALIVE, REVOKE = "/v3/lease/grant", "/v3/lease/keepalive", "/v3/lease/revoke"
TXN, PUT, RANGE = "/v3/kv/txn", "/v3/kv/put", "/v3/kv/range"
AT = "/flowcheck/my%20cluster%2F1/"


def text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()


def code(plain: str) -> str:
    return base64.b64encode(plain.encode()).decode()


class Endpoint:
    """answers: by path; a number is a status. asked: path and body of each question."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {
            GRANT: {"ID": "7", "TTL": "3"}, ALIVE: {"result": {"ID": "7", "TTL": "3"}}, REVOKE: {}, PUT: {}, RANGE: {},
            TXN: {"succeeded": True},
        }
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                answer = endpoint.answers[self.path]
                body = b"no\n leader" if isinstance(answer, int) else json.dumps(answer).encode()
                self.send_response(answer if isinstance(answer, int) else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self) -> list[tuple[str, Any]]:
        """What was asked since it was asked last."""
        found, self.asked = self.asked, []
        return found

    def paths(self) -> list[str]:
        return [path for path, _ in self.take()]


@pytest.fixture
def endpoints() -> Iterator[list[Endpoint]]:
    with ExitStack() as stack:
        made = [Endpoint(), Endpoint()]
        for one in made:
            stack.callback(one.close)
        yield made


@pytest.fixture
def endpoint(endpoints: list[Endpoint]) -> Endpoint:
    return endpoints[0]


@pytest.fixture
def etcd(endpoint: Endpoint) -> module.Etcd:
    return Etcd([endpoint.url], "my cluster/1", seconds=60.0)


def create(key: str, value: str) -> tuple[str, Any]:
    """Only if it is not there, and for as long as the lease."""
    return TXN, {"compare": [{"key": code(AT + key), "result": "EQUAL", "target": "CREATE", "create_revision": 0}],
                 "success": [{"request_put": {"key": code(AT + key), "value": code(value), "lease": 7}}], "failure": []}


def put(key: str, value: str) -> tuple[str, Any]:
    return PUT, {"key": code(AT + key), "value": code(value), "lease": 7}


def kvs(*entries: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    return {"kvs": [{"key": code(AT + key), "value": code(value), **more} for key, value, more in entries]}


def test_an_answer_without_an_end_is_none_and_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write may have written gigabytes, and what answers may be no etcd."""
    monkeypatch.setattr(module, "MOST_ANSWER", 4 << 20)
    sent: list[int] = []

    def serve() -> None:
        for _ in range(5):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                sent.append(0)
                with suppress(OSError):
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n")
                    while sent[-1] < 64 << 20:
                        sent[-1] += connection.send(bytes(1 << 20))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        etcd = Etcd([f"http://127.0.0.1:{listener.getsockname()[1]}"], "c", seconds=60.0)
        gc.disable()  # nothing is left for it
        try:
            tracemalloc.start()
            for _ in range(5):
                with pytest.raises(RegistryError) as caught:
                    etcd.read()
                assert "4 MiB" in caught.value.message()
            held, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
        thread.join()
    assert max(sent) < 32 << 20 and most < 16 << 20 and held < 2 << 20


# -- the lease, and own keys ---------------------------------------------------------------------------------------


def test_own_keys_are_made_once_and_written_where_they_change(endpoint: Endpoint, etcd: module.Etcd) -> None:
    etcd.renew({"members/a": "1", "have/a": "x"})
    assert endpoint.take() == [(GRANT, {"TTL": LEASE_SECONDS, "ID": 0}), create("members/a", "1"),
                               create("have/a", "x")]
    etcd.renew({"members/a": "1", "have/a": "x"})
    assert endpoint.take() == [(ALIVE, {"ID": 7})]
    etcd.renew({"members/a": "1", "have/a": "y"})
    assert endpoint.take() == [(ALIVE, {"ID": 7}), put("have/a", "y")]


@pytest.mark.parametrize(("said", "over"), [({"TTL": "3"}, False), ({"TTL": "1"}, False), ({"TTL": "0"}, True),
                                            ({"TTL": "-1"}, True), ({}, True)], ids=str)
def test_a_lease_that_ran_out_is_taken_anew_with_all_keys(
    endpoint: Endpoint, etcd: module.Etcd, said: dict[str, str], over: bool
) -> None:
    etcd.renew({"members/a": "1", "have/a": "x"})
    endpoint.take()
    endpoint.answers[ALIVE] = {"result": said}
    etcd.renew({"members/a": "1", "have/a": "x"})
    assert endpoint.paths() == [ALIVE, *([GRANT, TXN, TXN] if over else [])]


@pytest.mark.parametrize(("there", "whose"), [
    ({}, "nobody's"), (kvs(("members/a", "9", {})), "one that stays"), (kvs(("members/a", "9", {"lease": "7"})), "own"),
    (kvs(("members/a", "9", {"lease": "8"})), "another's"),
], ids=["gone again", "one that stays", "own", "another's"])
def test_a_key_that_is_there_is_taken_unless_another_member_has_it(
    endpoint: Endpoint, etcd: module.Etcd, there: dict[str, Any], whose: str
) -> None:
    """By its lease: a key without one was written by hand."""
    endpoint.answers |= {TXN: {}, RANGE: there}
    if whose == "another's":
        with pytest.raises(RegistryError, match=r"^[^ ]*: members/a is somebody else's") as caught:
            etcd.renew({"members/a": "1"})
        assert caught.value.where == endpoint.url
    else:
        etcd.renew({"members/a": "1"})
    asked = endpoint.take()
    assert asked[:2] == [(GRANT, {"TTL": LEASE_SECONDS, "ID": 0}), create("members/a", "1")]
    assert (asked[2][0], asked[2][1]["key"]) == (RANGE, code(AT + "members/a"))
    assert asked[3:] == ([] if whose == "another's" else [put("members/a", "1")])


def test_what_was_read_says_which_own_keys_have_to_be_put_back(endpoint: Endpoint, etcd: module.Etcd) -> None:
    etcd.renew({"members/a": "1", "have/a": "x", "more/a": "2"})
    endpoint.answers[RANGE] = kvs(("members/a", "1", {"create_revision": "4"}),
                                  ("have/a", "a lie", {"create_revision": "5"}))
    etcd.read()
    endpoint.take()
    etcd.renew({"members/a": "1", "have/a": "x", "more/a": "2"})
    assert endpoint.take() == [(ALIVE, {"ID": 7}), create("have/a", "x"), create("more/a", "2")]


def test_all_keys_of_the_cluster_are_read(endpoint: Endpoint, etcd: module.Etcd) -> None:
    assert etcd.read() == {}
    (asked,) = endpoint.take()
    assert asked[0] == RANGE and text(asked[1]["key"]) == AT and text(asked[1]["range_end"]) == AT[:-1] + "0"
    assert "serializable" not in asked[1]  # of a side that has lost its leader nothing is read
    endpoint.answers[RANGE] = kvs((ROOT, "a", {"create_revision": "12", "mod_revision": "40"}),
                                  ("members/a", "", {"create_revision": "3"}))
    endpoint.answers[RANGE]["kvs"].append({"key": base64.b64encode(AT.encode() + b"\xff").decode(),
                                           "value": base64.b64encode(b"\xfe").decode(), "create_revision": "1"})
    assert etcd.read() == {ROOT: Entry("a", 12), "members/a": Entry("", 3), "\ufffd": Entry("\ufffd", 1)}


# -- a root --------------------------------------------------------------------------------------------------------


def test_who_has_a_lease_may_become_root(endpoint: Endpoint, etcd: module.Etcd) -> None:
    assert etcd.elect("a") is False and endpoint.take() == []
    etcd.renew({})
    endpoint.take()
    assert etcd.elect("a") is True and endpoint.take() == [create(ROOT, "a")]
    endpoint.answers[TXN] = {"succeeded": False}
    assert etcd.elect("a") is False


def test_what_is_decided_is_written_as_long_as_the_root_is_the_one_that_was_read(
    endpoint: Endpoint, etcd: module.Etcd
) -> None:
    """It is no lease's, and stays."""
    assert etcd.decide(PLACEMENT, "text", Entry("a", 12)) is True
    assert endpoint.take() == [(TXN, {
        "compare": [{"key": code(AT + ROOT), "result": "EQUAL", "target": "CREATE", "create_revision": 12}],
        "success": [{"request_put": {"key": code(AT + PLACEMENT), "value": code("text")}}], "failure": []})]
    for said in ({}, {"succeeded": False}):
        endpoint.answers[TXN] = said
        assert etcd.decide(PLACEMENT, "text", Entry("a", 12)) is False


def test_who_leaves_says_so_once(endpoint: Endpoint, etcd: module.Etcd) -> None:
    etcd.close()
    assert endpoint.take() == []
    etcd.renew({})
    endpoint.take()
    endpoint.answers[REVOKE] = 500
    etcd.close()  # it runs out
    assert endpoint.take() == [(REVOKE, {"ID": 7})]
    etcd.close()
    assert endpoint.take() == [] and etcd.elect("a") is False


# -- endpoints -----------------------------------------------------------------------------------------------------


def test_an_endpoint_that_refuses_is_left_for_the_next_one(endpoints: list[Endpoint]) -> None:
    """Which is asked first from then on."""
    one, two = endpoints
    etcd = Etcd([one.url, two.url + "/"], "x", seconds=60.0)
    one.answers[RANGE] = 503
    for _ in range(2):
        assert etcd.read() == {}
    assert one.paths() == [RANGE] and two.paths() == [RANGE, RANGE]
    two.answers[RANGE] = 500
    with pytest.raises(RegistryError) as caught:
        etcd.read()
    assert caught.value.what == "etcd does not answer (InternalServerError no leader)"  # of the one asked first
    assert sorted(caught.value.where.split(", ")) == sorted([one.url, two.url])
    assert one.paths() == [RANGE] and two.paths() == [RANGE]


def test_why_it_does_not_answer_is_short(endpoint: Endpoint, etcd: module.Etcd) -> None:
    endpoint.answers[RANGE] = kvs(("x", "1", {"create_revision": "no number " * 100}))
    with pytest.raises(RegistryError) as caught:
        etcd.read()
    why = caught.value.what.removeprefix("etcd does not answer (").removesuffix(")")
    assert why.startswith("ValueError invalid literal for int()") and len(why) == 200


def test_one_question_at_a_time_goes_to_an_endpoint(
    endpoints: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose answer has not ended: it may be one that trickles, and each would hold a thread."""
    begun: list[tuple[str, Future[Any]]] = []

    def begin(call: Callable[[Any], Any], client: Any) -> Future[Any]:
        begun.append((client.base_url, Future()))
        return begun[-1][1]

    monkeypatch.setattr(module, "_begun", begin)
    etcd = Etcd([one.url for one in endpoints], "x", seconds=2.0)
    assert etcd._most == 6.0
    etcd._most = 0.0
    urls = [one.url for one in endpoints]
    with pytest.raises(RegistryError, match=r"\(TimeoutError\)"):
        etcd.read()
    with pytest.raises(RegistryError, match="TimeoutError an earlier answer has not ended"):
        etcd.read()
    assert [url for url, _ in begun] == urls
    begun[1][1].set_exception(ValueError("late"))
    with pytest.raises(RegistryError):
        etcd.read()
    assert [url for url, _ in begun] == [*urls, urls[1]]


def test_a_question_has_a_thread_that_nobody_waits_for(endpoint: Endpoint, etcd: module.Etcd) -> None:
    def ends(_: Any) -> Any:
        raise SystemExit(3)

    found: threading.Thread = etcd._ask(lambda client: threading.current_thread())
    assert found is not threading.current_thread() and found.daemon
    with pytest.raises(RegistryError, match="SystemExit"):
        etcd._ask(ends)


def test_how_endpoints_are_reached(endpoint: Endpoint) -> None:
    one, two = Etcd(["https://[::1]:4", "http://h:5"], "x", "ca.pem", 0.5)._clients
    assert (one.base_url, two.base_url) == ("https://[::1]:4", "http://h:5")
    assert one.session.verify == two.session.verify == "ca.pem" and one.timeout == two.timeout == 0.5
    (alone,) = Etcd(["https://h:4/"], "x")._clients
    assert alone.session.verify is True and alone.timeout == module.SECONDS
    assert alone.get_url("kv/put") == "https://h:4/v3/kv/put"  # without a question for its version


@pytest.mark.parametrize("endpoint", ["", "h:1", "http://h", "http://:1", "http://h:x", "ftp://h:1",
                                      "http://h:1/path", "http://h:1//"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(UserError, match="is not an endpoint of etcd"):
        module.check_endpoints(["https://h:1/", "http://h:1", endpoint])
    module.check_endpoints(["https://h:1/", "http://h:1"])
