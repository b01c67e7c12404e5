"""Whoever answers byte by byte, or without end, is left, wherever in the answer he is; and a file is no longer than its
manifest."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from flowcheck.ask import connection
from flowcheck.ask.client import NodeClient
from flowcheck.ask.receiving import AskError
from flowcheck.control.version import MODEL

from ..hand_api import KEY, HandApi, HandVersion

HEAD = b"HTTP/1.1 200 OK\r\n"
JSON = b'{"versions": [' + b" " * (1 << 20)


@pytest.fixture
def drips() -> Iterator[Callable[[bytes, bytes], NodeClient]]:
    """drips(at once, byte by byte) -> a node that answers so, for as long as it is asked."""
    over = threading.Event()
    with contextlib.ExitStack() as stack:

        def serve(listener: socket.socket, begin: bytes, slowly: bytes) -> None:
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                with sock:
                    sock.recv(65536)
                    sock.sendall(begin)
                    for byte in slowly:
                        sock.sendall(bytes([byte]))
                        if over.wait(0.02):
                            return

        def start(begin: bytes, slowly: bytes) -> NodeClient:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            thread = threading.Thread(target=serve, args=(listener, begin, slowly), daemon=True)
            thread.start()
            stack.callback(thread.join, 60)
            stack.callback(over.set)
            return NodeClient(("127.0.0.1", listener.getsockname()[1]), KEY, seconds=0.5)

        yield start


@pytest.mark.parametrize(("begin", "slowly"), [
    (b"", HEAD + b"X: " + b"y" * 100_000),
    (HEAD, b"X: " + b"y" * 100_000),
    (HEAD + b"Content-Length: 100000\r\n\r\n", JSON),
    (HEAD + b"Connection: close\r\n\r\n", JSON),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 100_000),
], ids=["status", "headers", "body", "no length", "chunks"])
def test_an_answer_byte_by_byte_is_left(
    drips: Callable[[bytes, bytes], NodeClient], begin: bytes, slowly: bytes
) -> None:
    node = drips(begin, slowly)
    began = time.monotonic()
    with pytest.raises(AskError) as error:
        node.offers()
    assert error.value.what == "an answer that is too slow" and 0.9 < time.monotonic() - began < 60


@pytest.mark.parametrize(("begin", "again"), [
    (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 60_000 + b"\r\n \r\n"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n" * 10_000),
], ids=["interim", "chunks", "trailers"])
def test_an_answer_without_end_is_left_however_fast_it_comes(
    begin: bytes, again: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MOST_TEXT", 1 << 20)

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):
            sock.recv(65536)
            sock.sendall(begin)
            while True:
                sock.sendall(again)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        with contextlib.closing(NodeClient(("127.0.0.1", listener.getsockname()[1]), KEY)) as node:
            with pytest.raises(AskError) as error:
                node.offers()
        assert error.value.what == "an answer that is too long"
        thread.join(60)
        assert not thread.is_alive()


def test_a_quick_answer_in_many_pieces_is_taken(drips: Callable[[bytes, bytes], NodeClient]) -> None:
    text = b'{"versions": []}'
    node = drips(HEAD + b"Content-Length: %d\r\n\r\n" % len(text), text)
    assert node.offers() == []


@pytest.mark.parametrize("length", ["1" + 400 * "0", "100000000000000000000"])
def test_a_file_is_no_longer_than_its_manifest_says(length: str, drips: Callable[[bytes, bytes], NodeClient]) -> None:
    with HandApi(HandVersion(7)) as api, contextlib.closing(NodeClient(api.address, KEY)) as node:
        (offer,) = node.offers()
        version = node.version(offer)
    liar = drips(HEAD + b"Content-Length: " + length.encode() + b"\r\n\r\n", b"")
    with pytest.raises(AskError, match="longer than what its manifest lists"):
        liar.tensors(offer, version, MODEL, {})
