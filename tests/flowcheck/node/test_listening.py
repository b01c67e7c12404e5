"""Listening sockets of a node: addresses, what is refused, how many may wait."""

from __future__ import annotations

import errno
import socket
import struct

import pytest

from flowcheck.errors import EnvironmentProblem
from flowcheck.node.listening import check_address, listen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_free_port_is_taken_and_said(host: str) -> None:
    listener, said = listen((host, 0), "control.listen", 3)
    with listener:
        port = listener.getsockname()[1]
        assert port > 0 and said == (f"[::1]:{port}" if ":" in host else f"127.0.0.1:{port}")
        with socket.create_connection((host, port), timeout=10):
            pass


@pytest.mark.parametrize("backlog", [1, 77])
def test_so_many_connections_may_wait(backlog: int) -> None:
    """As the kernel says of a listening socket: tcpi_sacked, the eighth word of struct tcp_info (linux/tcp.h)."""
    listener, _ = listen(("127.0.0.1", 0), "control.listen", backlog)
    with listener:
        info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        assert struct.unpack_from("8I", info)[7] == backlog


def test_a_port_that_is_taken_is_named() -> None:
    first, said = listen(("127.0.0.1", 0), "api.listen", 1)
    with first, pytest.raises(EnvironmentProblem, match="cannot listen: Address already in use") as raised:
        listen(("127.0.0.1", first.getsockname()[1]), "api.listen", 1)
    assert raised.value.where == said and raised.value.remedy.endswith("a free port in api.listen")


def test_an_address_is_looked_at_whether_its_port_is_taken_or_not() -> None:
    listener, _ = listen(("127.0.0.1", 0), "api.listen", 1)
    with listener:
        check_address(("127.0.0.1", listener.getsockname()[1]), "api.listen")
    with pytest.raises(EnvironmentProblem, match="cannot listen: Cannot assign requested address") as raised:
        check_address(("192.0.2.1", 7070), "control.listen")
    assert raised.value.what == "cannot listen: Cannot assign requested address"  # and no port 0
    assert raised.value.where == "192.0.2.1:7070" and "control.listen" in raised.value.remedy


def test_any_free_port_will_do_to_look_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, int]] = []
    real = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda at, **more: (tried.append(at), real(at, **more))[1])
    check_address(("127.0.0.1", 7070), "api.listen")
    assert tried == [("127.0.0.1", 0)]


def test_why_it_cannot_listen_is_said_in_the_systems_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the port, which may be another than that of the settings. A resolver's number is not one of the system's
    errors, so that its own words are said. An error without words is said as it is."""
    for error, said in (
        (PermissionError(errno.EPERM, "Not so (while attempting to bind on ('::', 0))"), "Operation not permitted"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"), (OSError("odd"), "odd"),
    ):
        def refuse(*_: object, raised: OSError = error, **__: object) -> socket.socket:
            raise raised

        monkeypatch.setattr(socket, "create_server", refuse)
        with pytest.raises(EnvironmentProblem) as found:
            listen(("nowhere", 1), "api.listen", 1)
        assert found.value.what == f"cannot listen: {said}"
