"""Making a communicator's connections: listeners announced to the peers, then one QP handshake each.

    Connector(nic, settings, communicator, boot, macs, addresses)
        .graph("ring", edges)       every connection of a graph, all ranks together
        .pair(peer)                 point-to-point connections with one peer, both directions

    receiver r                                     sender s = r - d
      listener per channel, peer message (tag d) ------>
                                       <------ magic, type, QP info of s
      QP info of r, QPs ready                ------>
                                       <------ 4 bytes: ready
Source: nccl-wire.md 6.1. One thread at a time.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from lab.softroce.bootstrap import Bootstrap, accept, address_of, listen, read, socket_address
from lab.softroce.nic import Nic
from lab.softroce.settings import Settings

__all__ = ["Connection", "Connector"]

_MAGIC, _TYPE_IB = 0x564AB9F2FC4B9D6C, 4
_GRAPHS = {"p2p": 0, "ring": 1, "tree": 2}
_MTU_ENUM = {1024: 3, 2048: 4, 4096: 5}


@dataclass(frozen=True)
class Connection:
    """number: the engine's. qpns: the receiver's QPs, cts_qpns: the sender's."""

    graph: str
    channel: int
    src: int
    dst: int
    number: int
    qpns: list[int]
    cts_qpns: list[int]


@dataclass
class _Half:
    """The local half of a connection."""

    channel: int
    src: int
    dst: int
    number: int
    qpns: list[int]
    fifo: int
    rkey: int


@dataclass(frozen=True)
class _Record:
    """Where the fields of the QP info are, by family. devices: in the list exchanged first; 0: there is none."""

    size: int
    gid: int
    rkey: int
    fifo: int
    mtu: int
    devices: int


def _record(first: tuple[int, int]) -> _Record:
    if first < (2, 20):
        return _Record(2600, 2568, 2588, 2592, 2584, 0)
    if first < (2, 24):
        return _Record(3336, 3072 + 16, 3072 + 32, 3320, 0, 0)
    if first < (2, 29):
        return _Record(3576 if first < (2, 26) else 3584, 3072 + 16, 3072 + 32, 3560, 0, 4)
    return _Record(4448, 3456 + 16, 3456 + 32, 4424, 0, 8)


class Connector:
    """macs, addresses: 6 and 4 bytes per rank."""

    def __init__(
        self, nic: Nic, settings: Settings, communicator: int, boot: Bootstrap, macs: list[bytes],
        addresses: list[bytes],
    ) -> None:
        self._nic, self._settings, self._communicator = nic, settings, communicator
        self._boot, self._macs, self._addresses = boot, macs, addresses
        self._form = _record(settings.wire_family.first)
        self._entry = 128 if settings.wire_family.first < (2, 23) else 256

    def graph(self, name: str, edges: Iterable[tuple[int, int, int]]) -> list[Connection]:
        """This rank's connections among `edges` (channel, source, destination); collective."""
        rank, size = self._boot.rank, self._boot.size
        mine = [edge for edge in edges if rank in edge[1:]]
        made: list[Connection] = []
        for distance in range(1, size):
            source, target = (rank - distance) % size, (rank + distance) % size
            into = sorted(channel for channel, src, dst in mine if (src, dst) == (source, rank))
            out = sorted(channel for channel, src, dst in mine if (src, dst) == (rank, target))
            tag = distance << 8 | _GRAPHS[name]
            made += self._exchange(name, [tag, tag], source, target, into, out)
        return made

    def pair(self, peer: int) -> list[Connection]:
        """Connections for point-to-point messages from and to `peer`, who does the same."""
        rank, size, graph = self._boot.rank, self._boot.size, _GRAPHS["p2p"]
        tags = [(rank - peer) % size << 8 | graph, (peer - rank) % size << 8 | graph]
        return self._exchange("p2p", tags, peer, peer, [0], [0])

    def _exchange(
        self, graph: str, tags: list[int], source: int, target: int, into: list[int], out: list[int],
    ) -> list[Connection]:
        """tags: of messages to the peers, and of theirs."""
        rank = self._boot.rank
        with contextlib.ExitStack() as streams:
            listeners = [streams.enter_context(listen(self._settings.address, 4, self._boot.timeout)) for _ in into]
            entries = b"".join(self._listener_entry(listener) for listener in listeners)
            plain = b"".join(struct.pack("<I", 1).ljust(self._entry, b"\0") for _ in out)
            if source == target:
                bodies = [(source, entries + plain)] if into or out else []
            else:
                bodies = [(peer, body) for peer, body in ((source, entries), (target, plain)) if body]
            for peer, body in bodies:
                self._boot.send(peer, tags[0], body)
            got = {peer: self._boot.receive(peer, tags[1]) for peer, _ in bodies}
            # A peer lists its receive entries first: as many as this rank has outbound connections to it.
            announced = [address_of(got[target][i * self._entry : i * self._entry + 28]) for i in range(len(out))]
            begun = []
            for channel, address in zip(out, announced, strict=True):
                half = self._half(channel, rank, target, outbound=True)
                stream = streams.enter_context(socket.create_connection(address, self._boot.timeout))
                stream.sendall(struct.pack("<QI", _MAGIC, _TYPE_IB) + self._info(half))
                begun.append((half, stream))
            accepted = []
            for channel, listener in zip(into, listeners, strict=True):
                half = self._half(channel, source, rank, outbound=False)
                with self._boot.awaiting(f"connection from rank {source}"):
                    stream = streams.enter_context(accept(listener, (_MAGIC, _TYPE_IB), self._boot.timeout))
                remote = self._connect(half, source, stream)
                stream.sendall(self._info(half))
                accepted.append((half, remote, stream))
            made = []
            for half, stream in begun:
                remote = self._connect(half, target, stream)
                stream.sendall(struct.pack("<I", 1))
                made.append(Connection(graph, half.channel, half.src, half.dst, half.number, remote, half.qpns))
            for half, remote, stream in accepted:
                read(stream, 4)
                made.append(Connection(graph, half.channel, half.src, half.dst, half.number, half.qpns, remote))
            for peer, _ in bodies:  # nobody goes on before the peers have connected, too
                self._boot.send(peer, tags[0], bytes(4))
            for peer, _ in bodies:
                self._boot.receive(peer, tags[1])
            return made

    def _listener_entry(self, listener: socket.socket) -> bytes:
        entry = socket_address(listener.getsockname()) + bytes(4) + struct.pack("<Q", _MAGIC)
        return entry.ljust(self._entry, b"\0")

    def _half(self, channel: int, src: int, dst: int, *, outbound: bool) -> _Half:
        number, qpns, fifo, rkey = self._nic.engine.connection(
            self._communicator, outbound, src, dst, channel, self._settings.qps_per_connection)
        return _Half(channel, src, dst, number, qpns, fifo, rkey)

    def _info(self, half: _Half) -> bytes:
        form = self._form
        data = bytearray(form.size)
        if form.size == 2600:
            struct.pack_into("<IBB", data, 0, 0, 1, 2)
            for i, qpn in enumerate(half.qpns):
                struct.pack_into("<I", data, 8 + 4 * i, qpn)
        else:
            for i, qpn in enumerate(half.qpns):
                struct.pack_into("<I", data, 24 * i, qpn)
            struct.pack_into("<I", data, form.fifo + 8, 1)
        data[form.gid : form.gid + 16] = bytes(10) + b"\xff\xff" + self._nic.address
        struct.pack_into("<I", data, form.rkey, half.rkey)
        struct.pack_into("<Q", data, form.fifo, half.fifo)
        if form.mtu:
            struct.pack_into("<I", data, form.mtu, _MTU_ENUM[self._settings.mtu])
        lead = struct.pack("<I", 1) + bytes(4 * form.devices) if form.devices else b""
        return lead + bytes(data)

    def _connect(self, half: _Half, peer: int, stream: socket.socket) -> list[int]:
        """Read the peer's QP info and make the QPs ready; the peer's QP numbers."""
        form = self._form
        data = read(stream, form.size + (4 + 4 * form.devices if form.devices else 0))[-form.size :]
        start, width = (8, 4) if form.size == 2600 else (0, 24)
        qpns = [
            int(struct.unpack_from("<I", data, start + width * i)[0]) for i in range(self._settings.qps_per_connection)
        ]
        if data[form.gid + 12 : form.gid + 16] != self._addresses[peer]:
            raise ConnectionError(f"the QP info of rank {peer} names another address")
        (rkey,) = struct.unpack_from("<I", data, form.rkey)
        (fifo,) = struct.unpack_from("<Q", data, form.fifo)
        self._nic.engine.connect(half.number, qpns, fifo, rkey, self._addresses[peer], self._macs[peer])
        return qpns
