"""Strangers at a port: what somebody without a key, or a token, can do to it from a machine of his own.

    with crowd("silent", address): ...      the others come meanwhile
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
from collections.abc import Callable, Iterator

from flowcheck.node.doors.files import raise_limit

SIZE = 1000
HALF = b"GET /v1/versions HTTP/1.1\r\nHost: x\r\nX: "
HELLO = bytes.fromhex("160301020001")  # a TLS handshake's first bytes, of a record of 512


def _one(address: tuple[str, int], source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(address, timeout=60, source_address=(source, 0))


def _sources() -> Iterator[str]:
    return (f"127.{1 + i // 60000}.{i // 250 % 240}.{1 + i % 250}" for i in itertools.count())


class Crowd:
    """sockets: those that stay. said: what each of them has said."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address, self.sockets, self.ending = address, list[socket.socket](), threading.Event()
        self.rounds = 0

    def come(self, said: bytes = b"", many: bool = False) -> None:
        sources = _sources() if many else itertools.repeat("127.0.0.1")
        for source, _ in zip(sources, range(SIZE), strict=False):
            self.sockets.append(_one(self.address, source))
            self.say(self.sockets[-1], said)

    @staticmethod
    def say(sock: socket.socket, said: bytes) -> None:
        with contextlib.suppress(OSError):  # it was closed for another
            sock.send(said)

    def answered(self) -> bool:
        """Has each an answer, or was let go?"""
        poll = select.poll()
        for sock in self.sockets:
            poll.register(sock, select.POLLIN)
        return len(poll.poll(0)) == len(self.sockets)

    def again(self, turn: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            while not self.ending.is_set():
                with contextlib.suppress(OSError):
                    turn()
                self.rounds += 1

        return threading.Thread(target=run, daemon=True)

    def slowly(self) -> None:
        """Another byte of each."""
        for sock in self.sockets:
            if self.ending.wait(1.0 / SIZE):
                return
            self.say(sock, b"x")

    def comes_and_goes(self) -> None:
        _one(self.address).close()

    def comes_and_stays(self, sources: Iterator[str]) -> None:
        self.sockets.append(_one(self.address, next(sources)))
        if len(self.sockets) > SIZE:
            self.sockets.pop(0).close()


@contextlib.contextmanager
def crowd(kind: str, address: tuple[str, int], said: bytes = b"") -> Iterator[Crowd]:
    """kind: what they do. said: by "talking" ones."""
    raise_limit()
    made, threads = Crowd(address), list[threading.Thread]()
    try:
        if kind in ("silent", "many", "talking", "slow"):
            made.come(said, kind == "many")
        if kind == "slow":
            threads = [made.again(made.slowly)]
        elif kind == "loop":
            threads = [made.again(made.comes_and_goes) for _ in range(2)]
        elif kind in ("flood", "flood of many"):
            sources = _sources() if "many" in kind else itertools.repeat("127.0.0.1")
            threads = [made.again(lambda: made.comes_and_stays(sources))]
        elif kind == "pipelined":
            def ask() -> None:
                with contextlib.closing(_one(address)) as sock:
                    for _ in range(20):
                        sock.sendall(said * 100)

            threads = [made.again(ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        yield made
    finally:
        made.ending.set()
        for thread in threads:
            thread.join(60)
        for sock in made.sockets:
            sock.close()
