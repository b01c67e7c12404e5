"""NCCL's TCP bootstrap, read passively: which QP belongs to which communicator, graph, channel and ranks.

    TCP segments --reassemble--> streams --parse_bootstrap--> Bootstrap(communicators, connections, notes)

Pure functions over bytes that anybody may have sent: every length is checked against what is there, every loop
runs over a bounded number of items, and nothing raises. A stream that does not fit is not NCCL's and is left
out. Source: nccl-wire.md 6.1 (NCCL's bootstrap.cc, transport.cc, net_ib); layouts and what proved them are
listed in docs/use/learn.md.

Three kinds of stream are used:

    root        rank info sent to the bootstrap root: rank and number of ranks of a communicator
    peer        connect infos from rank to rank: where rank q listens for channel c from rank p
    handshake   the QP numbers of one connection, sender's and receiver's
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from parser.nccl import QP_INFOS, TABLE, QpInfo, span

__all__ = ["Bootstrap", "BootstrapConnection", "Side", "Stream", "parse_bootstrap", "parse_qp_info", "reassemble"]

HANDSHAKE_MAGIC = 0x564AB9F2FC4B9D6C
BOOTSTRAP, NETWORK_IB = 1, 4
GRAPHS = {0: "p2p", 1: "ring", 2: "tree", 3: "collnet chain", 4: "NVLS", 5: "collnet direct"}
CONNECT_SIZES = (128, 256)  # to 2.22, from 2.23 (256 is also two entries of 128: the contents decide)
MTU_OF_ENUM = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
MAX_RANKS = 65536
MAX_CHANNELS = 64
STREAM_BYTES = 1 << 20
#: NCCL versions by the form of their QP info.
QP_INFO = {form: span([row for row in TABLE if row.qp_info == form]) for form in QP_INFOS}
DEVICES = sorted({row.devices for row in TABLE})  # how many a list of devices may have room for


@dataclass(frozen=True)
class Stream:
    """One TCP direction, reassembled. src, dst: (address, port). data begins after the SYN if that was seen."""

    src: tuple[str, int]
    dst: tuple[str, int]
    data: bytes
    begun: bool = True


@dataclass(frozen=True)
class Side:
    """One side's QP info. qpns: as many as the record holds. fifo: address the peer announces or reports to.
    gid, fifo: empty where the record was not read. mtu: 0 where not known."""

    versions: str
    qpns: tuple[int, ...]
    gid: str
    mtu: int
    fifo: int


@dataclass(frozen=True)
class BootstrapConnection:
    """One network connection: data of rank src to rank dst. qpns: the receiver's, destination of the data;
    cts_qpns: the sender's. graph: "ring", "tree", "p2p", ...; channel: its place among the connect infos of
    that graph, which is the channel number for collectives."""

    communicator: int
    graph: str
    channel: int
    src: int
    dst: int
    versions: str
    sender: Side
    receiver: Side

    @property
    def qpns(self) -> tuple[int, ...]:
        return self.receiver.qpns

    @property
    def cts_qpns(self) -> tuple[int, ...]:
        return self.sender.qpns


@dataclass
class Bootstrap:
    """ranks: communicator -> its number of ranks (0: not seen). connections: whose both ends were seen. connected:
    (communicator, graph, src, dst) -> number of channels. notes: what was left out because it contradicts itself."""

    ranks: dict[int, int] = field(default_factory=dict)
    connections: list[BootstrapConnection] = field(default_factory=list)
    connected: dict[tuple[int, str, int, int], int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


# -- TCP -------------------------------------------------------------------------------------------------


def reassemble(segments: Iterable[tuple[int, int, bytes]]) -> tuple[bytes, bool]:
    """(sequence number, TCP flags, payload) of one direction, any order, repeats allowed -> (bytes from the
    beginning to the first hole, was the beginning seen). Bounded by STREAM_BYTES."""
    kept = list(segments)
    opening = [seq for seq, flags, _ in kept if flags & 2]
    if not kept:
        return b"", False
    start = (opening[-1] + 1) & 0xFFFFFFFF if opening else kept[0][0]
    for seq, _, _ in kept if not opening else ():  # the lowest, in serial number arithmetic
        if ((start - seq) & 0xFFFFFFFF) < 0x80000000:
            start = seq
    placed = [((seq - start) & 0xFFFFFFFF, data) for seq, flags, data in kept if data and not flags & 2]
    out = bytearray()
    for at, data in sorted(placed, key=lambda item: item[0]):
        if at >= STREAM_BYTES or at > len(out):
            break
        out += data[len(out) - at :]
    return bytes(out[:STREAM_BYTES]), bool(opening)


# -- pieces ----------------------------------------------------------------------------------------------


def _u32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _u64(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])


def _socket(data: bytes, at: int) -> tuple[str, int] | None:
    """A sockaddr in host order: family 2 (IPv4) or 10 (IPv6); None if it is neither."""
    if at + 28 > len(data):
        return None
    family = struct.unpack_from("<H", data, at)[0]
    port = struct.unpack_from(">H", data, at + 2)[0]
    if family == 2:
        return str(ipaddress.IPv4Address(data[at + 4 : at + 8])), port
    if family == 10:
        return str(ipaddress.IPv6Address(data[at + 8 : at + 24])), port
    return None


def _prefixed(data: bytes, at: int, most: int = 1 << 20) -> tuple[bytes, int] | None:
    """A length-prefixed item at `at`: (bytes, place after it)."""
    if at + 4 > len(data):
        return None
    size = _u32(data, at)
    if size > most or at + 4 + size > len(data):
        return None
    return data[at + 4 : at + 4 + size], at + 4 + size


def _gid(raw: bytes) -> str:
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)


def parse_qp_info(data: bytes) -> Side | None:
    """A QP info record of any known form; None if its fields are plausible in no form, or in several."""
    found = [side for form in QP_INFO if (side := _side(form, data)) is not None]
    return found[0] if len(found) == 1 else None


def _side(form: QpInfo, data: bytes) -> Side | None:
    if len(data) != form.bytes:
        return None
    count = 128 if form.gid_at else 1  # not described by the reference: one QP as in 2.19, the rest is not used
    every = (_u32(data, form.qpn_at + form.qpn_step * i) for i in range(count))
    qpns = tuple(takewhile(lambda qpn: 0 < qpn < 1 << 24, every))
    if not form.gid_at:
        return Side(QP_INFO[form], qpns, "", 0, 0) if qpns else None
    gid, fifo = data[form.gid_at : form.gid_at + 16], _u64(data, form.fifo_at)
    if not qpns or not any(gid) or not fifo:
        return None
    mtu = MTU_OF_ENUM.get(_u32(data, form.mtu_at), 0) if form.mtu_at else 0
    return Side(QP_INFO[form], qpns, _gid(gid), mtu, fifo)


# -- streams ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Listener:
    """Where the receiver of one connection listens."""

    communicator: int
    graph: str
    channel: int
    src: int
    dst: int


def _root_info(data: bytes) -> tuple[int, int] | None:
    """(rank, ranks) of a rank's message to the root: after magic and type a prefixed item that begins with
    rank and ranks and goes on with two socket addresses (to 2.22), or begins one word later (2.23+)."""
    item = _prefixed(data, 12)
    if item is None or len(item[0]) < 64:
        return None
    body = item[0]
    for at in (0, 4):
        rank, ranks = _u32(body, at), _u32(body, at + 4)
        if rank < ranks <= MAX_RANKS and ranks >= 2 and _socket(body, at + 8) is not None:
            return rank, ranks
    return None


def _peer_message(data: bytes) -> tuple[int, int, bytes] | None:
    """(sender's rank, tag, body)."""
    words, at = b"", 12  # rank and tag, in one item or in two
    while len(words) < 8:
        item = _prefixed(data, at)
        if item is None or len(item[0]) not in (4, 8):
            return None
        words, at = words + item[0], item[1]
    body = _prefixed(data, at)
    return None if body is None or len(words) != 8 else (_u32(words, 0), _u32(words, 4), body[0])


def _listening(body: bytes, size: int) -> list[tuple[str, int]] | None:
    """Addresses of the receive entries, which come first; None if `size` does not fit the body."""
    if not body or len(body) % size or len(body) // size > 2 * MAX_CHANNELS:
        return None
    found: list[tuple[str, int]] = []
    for at in range(0, len(body), size):
        address = _socket(body, at)
        magic = any(_u64(body, at + offset) == HANDSHAKE_MAGIC for offset in (28, 32))
        if address is None or not magic:
            break
        found.append(address)
    return found


def _connect_infos(body: bytes) -> list[tuple[str, int]]:
    """Listeners of a peer message. 256-byte entries leave every second 128 bytes without one."""
    by_size = [found for size in CONNECT_SIZES if (found := _listening(body, size))]
    return max(by_size, key=len, default=[])


def _handshake(data: bytes) -> Side | None:
    """QP info in a stream that may begin with magic and type, and end with 4 bytes. From 2.24 on a device list comes
    first; lengths alone then do not tell, so every reading is tried and two are none."""
    at = 0
    if len(data) >= 12 and _u64(data, 0) == HANDSHAKE_MAGIC:
        at = 12
    rest = len(data) - at
    found = []
    for form in QP_INFO:
        for devices in DEVICES if form.after_devices else [0]:
            lead, end = 4 + 4 * devices if devices else 0, form.bytes
            if rest not in (lead + end, lead + end + 4) or (devices and not 1 <= _u32(data, at) <= devices):
                continue
            side = _side(form, data[at + lead : at + lead + end])
            if side is not None:
                found.append(side)
    return found[0] if len(found) == 1 else None


def parse_bootstrap(streams: Sequence[Stream]) -> Bootstrap:
    """Everything the streams say. Never raises; what contradicts itself is left out and noted."""
    out = Bootstrap()
    messages: list[tuple[int, int, int, list[tuple[str, int]]]] = []
    by_ends = {(stream.src, stream.dst): stream.data for stream in streams}
    handshakes: dict[tuple[tuple[str, int], tuple[str, int]], bytes] = {}
    for stream in streams:
        data = stream.data
        if len(data) < 12:
            continue
        magic, kind = _u64(data, 0), _u32(data, 8)
        if magic == HANDSHAKE_MAGIC and kind == NETWORK_IB:
            handshakes[stream.src, stream.dst] = data
        elif kind == BOOTSTRAP and (info := _root_info(data)) is not None:
            known = out.ranks.get(magic, 0)
            if known and known != info[1]:
                out.notes.append(f"communicator {magic:#018x} is said to have {known} and {info[1]} ranks")
            out.ranks[magic] = 0 if known and known != info[1] else info[1]
        elif kind == BOOTSTRAP and (message := _peer_message(data)) is not None:
            rank, tag, body = message
            messages.append((magic, rank, tag, _connect_infos(body)))
    listeners = _listeners(out, messages)
    for (src, dst), data in handshakes.items():
        _connect(out, listeners.get(dst), dst, data, by_ends.get((dst, src), b""))
    return out


def _listeners(
    out: Bootstrap, messages: list[tuple[int, int, int, list[tuple[str, int]]]]
) -> dict[tuple[str, int], _Listener | None]:
    """Socket address -> whose connection is made there; None if two messages claim it."""
    found: dict[tuple[str, int], _Listener | None] = {}
    for magic, rank, tag, listeners in messages:
        ranks, distance = out.ranks.get(magic, 0), tag >> 8
        graph = GRAPHS.get(tag & 0xFF)
        if not ranks or graph is None or not 0 < distance < ranks or rank >= ranks or not listeners:
            continue
        src = (rank - distance) % ranks
        key = (magic, graph, src, rank)
        out.connected[key] = max(out.connected.get(key, 0), len(listeners))
        for channel, address in enumerate(listeners):
            listener = _Listener(magic, graph, channel, src, rank)
            found[address] = listener if found.get(address, listener) == listener else None
    return found


def _connect(out: Bootstrap, listener: _Listener | None, at: tuple[str, int], data: bytes, answer: bytes) -> None:
    """Add the connection whose QP handshake this is. at: where the receiver listens."""
    sender, receiver = _handshake(data), _handshake(answer)
    if listener is None:
        if sender is not None:
            out.notes.append(f"QP handshake with {at[0]} port {at[1]}: whose listener that is was not seen")
        return
    if sender is None or receiver is None or sender.versions != receiver.versions:
        out.notes.append(
            f"QP handshake of rank {listener.src} -> {listener.dst}, {listener.graph} channel {listener.channel}:"
            f" {len(data)} and {len(answer)} bytes fit no known version, or were not all seen"
        )
        return
    # A record's QP array may hold stale numbers after the used ones; both sides use equally many.
    count = min(len(sender.qpns), len(receiver.qpns))
    out.connections.append(BootstrapConnection(
        listener.communicator, listener.graph, listener.channel, listener.src, listener.dst, sender.versions,
        replace(sender, qpns=sender.qpns[:count]), replace(receiver, qpns=receiver.qpns[:count]),
    ))
