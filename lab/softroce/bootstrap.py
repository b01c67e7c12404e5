"""NCCL's TCP bootstrap on the fabric: ranks find each other, exchange connect infos and QP numbers, in plaintext.

    boot = Bootstrap(rank, size, store, address, family, timeout_s)
    boot.gather(bytes) -> one item per rank         round the bootstrap ring
    boot.send(peer, tag, body); boot.receive(peer, tag)
    boot.close()

On the wire, as in NCCL: every stream begins with the communicator's magic and a type; rank 0's root listener gets each
rank's two listeners and tells each rank its ring successor's; then a ring of streams for gathers, and one stream per
message between peers. Which magic and where the root listens come over the c10d store, as NCCL's unique id does.
Source: nccl-wire.md 6.1 and the TCP streams of the ConnectX captures. One thread at a time.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lab.synth.families import Family

__all__ = ["Bootstrap", "accept", "address_of", "listen", "read", "socket_address"]

_TYPE_BOOTSTRAP = 1
_LIMIT = 1 << 20


def listen(address: str, backlog: int, timeout: float) -> socket.socket:
    """A TCP listener on a free port of `address`."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.settimeout(timeout)
    found.bind((address, 0))
    found.listen(backlog)
    return found


def accept(listener: socket.socket, greeting: tuple[int, int], timeout: float) -> socket.socket:
    """The next stream that begins with this magic and type; others are closed. Raises TimeoutError."""
    while True:
        stream, _ = listener.accept()
        stream.settimeout(timeout)
        if struct.unpack("<QI", read(stream, 12)) == greeting:
            return stream
        stream.close()


def read(sock: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes. Raises ConnectionError if the peer ends before, TimeoutError."""
    out = bytearray()
    while len(out) < count:
        piece = sock.recv(count - len(out))
        if not piece:
            raise ConnectionError(f"the peer closed the connection after {len(out)} of {count} bytes")
        out += piece
    return bytes(out)


def socket_address(address: tuple[str, int]) -> bytes:
    """The 28 bytes of NCCL's socket address: sockaddr_in, zeros."""
    return struct.pack("<H", 2) + struct.pack(">H", address[1]) + socket.inet_aton(address[0]) + bytes(20)


def address_of(raw: bytes) -> tuple[str, int]:
    family, port = struct.unpack("<H", raw[:2])[0], struct.unpack(">H", raw[2:4])[0]
    if family != 2:
        raise ConnectionError(f"address family {family} in the bootstrap")
    return socket.inet_ntoa(raw[4:8]), port


def _item(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _read_item(sock: socket.socket) -> bytes:
    (size,) = struct.unpack("<I", read(sock, 4))
    if size > _LIMIT:
        raise ConnectionError(f"a bootstrap item of {size} bytes")
    return read(sock, size)


class Bootstrap:
    """size >= 2. timeout: seconds for each wait on a peer; what is waited for is named when it is over. Raises
    RuntimeError, ConnectionError or TimeoutError if the ranks do not find each other in time."""

    def __init__(self, rank: int, size: int, store: Any, address: str, family: Family, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._address = address
        self._one_word = family.first >= (2, 23)  # sender and tag in one item; the root's message a word longer
        self._listener = listen(address, 4 * size, timeout)
        self._early: dict[tuple[int, int], list[bytes]] = {}
        self._open = [self._listener]
        self._trouble = ""  # of the root's thread
        try:
            self._join(store)
            self._peers = [address_of(raw) for raw in self.gather(socket_address(self._listener.getsockname()))]
        except BaseException:
            self.close()
            raise

    def _join(self, store: Any) -> None:
        root = None
        successor = listen(self._address, 1, self.timeout)
        if self.rank == 0:
            listener = listen(self._address, self.size, 0.9 * self.timeout)  # first to know, and it knows who is absent
            self.magic = int.from_bytes(os.urandom(8), "little") | 1
            root = threading.Thread(target=self._root, args=(listener, successor), daemon=True)
            root.start()
            store.set("softroce/root", json.dumps([self.magic, *listener.getsockname()]))
        try:
            self.magic, host, port = json.loads(store.get("softroce/root"))
            with self.awaiting("connection to the root at rank 0"), self._stream((host, port)) as stream:
                own = socket_address(successor.getsockname()) + socket_address(self._listener.getsockname())
                lead = b"\0\0\0\0" if self._one_word else b""
                stream.sendall(_item(lead + struct.pack("<II", self.rank, self.size) + own))
            with self.awaiting("word from rank 0, which all ranks have to reach"), self._accept(successor) as stream:
                following = address_of(_read_item(stream))
        finally:
            successor.close()
        self._ring_out = self._stream(following)
        self._open.append(self._ring_out)
        with self.awaiting(f"connection from rank {(self.rank - 1) % self.size}"):
            self._ring_in = self._accept(self._listener)
        self._open.append(self._ring_in)
        if root is not None:
            root.join()

    @contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Errors of the block say what was waited for."""
        try:
            yield
        except TimeoutError:
            raise TimeoutError(f"no {what}, within {self.timeout:g} s") from None
        except OSError as error:
            raise ConnectionError(self._trouble or f"{error}, where a {what} was due") from None

    def _root(self, listener: socket.socket, own: socket.socket) -> None:
        """NCCL's bootstrap root: tells each rank where its successor listens. Ends when that is done or too late; then
        `own`, where this rank waits for the same, is shut."""
        found: dict[int, tuple[bytes, bytes]] = {}
        with listener:  # closed last: who is refused there finds the trouble said
            try:
                while len(found) < self.size:
                    with self._accept(listener) as stream:
                        item = _read_item(stream)[4 if self._one_word else 0 :]
                        rank, size = struct.unpack("<II", item[:8])
                        if size != self.size or rank in found or rank >= size:
                            raise ConnectionError(f"somebody says it is rank {rank} of {size}")
                        found[rank] = item[8:36], item[36:64]
                for rank in range(self.size):
                    with self._stream(address_of(found[rank][0])) as stream:
                        stream.sendall(_item(found[(rank + 1) % self.size][1]))
            except (OSError, struct.error) as error:  # the ranks that wait for it run into their own timeouts
                absent = ", ".join(str(rank) for rank in range(self.size) if rank not in found)
                self._trouble = f"{error}, while rank {absent} was waited for" if absent else str(error)
                own.shutdown(socket.SHUT_RDWR)

    def _stream(self, address: tuple[str, int]) -> socket.socket:
        stream = socket.create_connection(address, self.timeout, source_address=(self._address, 0))
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.sendall(struct.pack("<QI", self.magic, _TYPE_BOOTSTRAP))
        return stream

    def _accept(self, listener: socket.socket) -> socket.socket:
        return accept(listener, (self.magic, _TYPE_BOOTSTRAP), self.timeout)

    def gather(self, own: bytes) -> list[bytes]:
        """Every rank's item, in rank order."""
        found = [b""] * self.size
        found[self.rank] = own
        for distance in range(self.size - 1):
            self._ring_out.sendall(_item(found[(self.rank - distance) % self.size]))
            with self.awaiting(f"item from rank {(self.rank - 1) % self.size}"):
                found[(self.rank - distance - 1) % self.size] = _read_item(self._ring_in)
        return found

    def send(self, peer: int, tag: int, body: bytes) -> None:
        lead = _item(struct.pack("<II", self.rank, tag)) if self._one_word else b"".join(
            _item(struct.pack("<I", word)) for word in (self.rank, tag))
        with self._stream(self._peers[peer]) as stream:
            stream.sendall(lead + _item(body))

    def receive(self, peer: int, tag: int) -> bytes:
        """The oldest message of `peer` with this tag; others are kept for later."""
        while not self._early.get((peer, tag)):
            with self.awaiting(f"message from rank {peer}"), self._accept(self._listener) as stream:
                lead = _read_item(stream)
                if not self._one_word:
                    lead += _read_item(stream)
                sender, got = struct.unpack("<II", lead)
                self._early.setdefault((sender, got), []).append(_read_item(stream))
        return self._early[peer, tag].pop(0)

    def close(self) -> None:
        for sock in self._open:
            sock.close()
