"""What a line of NCCL's log says: the one place that knows their forms.

    line = line_of(text)          who wrote it, and what; None where it is not NCCL's
    ring_in(line.said)            and so on: what one kind of line has, None for every other line

NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=INIT,NET,ENV,GRAPH. Lines of NCCL 2.18 to 2.30, and where NCCL prints them (in
brackets where a file has moved since):

    HOST:PID:TID [DEV] NCCL INFO ...        src/debug.cc, before it a time where the user asked for one; cut at 1023
    NCCL version 2.27.7+cuda12.9            src/init.cc, rank 0 alone
    comm P rank R nranks N ... - Init START, COMPLETE; nNodes; N coll channels; Ring C : P -> R -> N; Trees [C] ...
                                            src/init.cc
    Channel C/N : 0 1 2 ...                 src/graph/rings.cc, rank 0 alone; at most 20 ranks to 2.22, later 127 bytes
    Channel C/I : A[D] -> B[D] [send] via NET/IB/D      src/transport/net.cc; p2p.cc and shm.cc inside a host
    NCCL_X set by environment to V          src/misc/param.cc; src/graph/tuning.cc
    Using network IB                        src/init.cc; src/plugin/net.cc (2.26)
    NET/IB : Using [0]mlx5_0:1/RoCE         src/transport/net_ib.cc (src/transport/net_ib/init.cc)
    NET/IB: ... qpn Q mtu M ... GID I (S/I) src/transport/net_ib.cc (src/transport/net_ib/connect.cc): what sends data
    NET/IB: F: QP created: ... qp_num=Q     src/transport/net_ib/connect.cc, 2.29 and later: both ends
    N Bytes -> Algo A proto P               src/enqueue.cc: with TUNING in the subsystems

Any text is read: a line that is not understood gives None, and nothing raises. What a log says as a whole:
flowcheck/trainer/nccl/log.py of one process, flowcheck/learning/logs.py of several together. The standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import NamedTuple

__all__ = [
    "CHANNELS_MAX", "CUT", "LINES_MAX", "LINE_MAX", "RANKS_MAX", "Choice", "Comm", "Edge", "Hop", "Line",
    "LoggedQueuePair", "Order", "Tree", "Trees", "channels_in", "choice_in", "comm_in", "devices_in", "edge_in",
    "hop_in", "line_of", "network_in", "order_in", "queue_pair_in", "registers_buffers", "setting_in", "trees_in",
    "version_in",
]

LINE_MAX = 8192  # NCCL's are 1024 bytes at most; a host name and a time stand before them
LINES_MAX = 1 << 20
CUT = 1023  # bytes after which NCCL cuts what it prints
RANKS_MAX, CHANNELS_MAX = 65536, 64
MTU_OF_ENUM = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}  # enum ibv_mtu
_TREE = r"(-?\d{1,6})/(-?\d{1,6})/(-?\d{1,6})->(\d{1,6})->(-?\d{1,6})"

_LINE = re.compile(r"([^:\s]{1,256}:\d{1,10}):(\d{1,20})\s+\[-?\d{1,6}\]\s+NCCL\s+(INFO|WARN|TRACE)\s+(.*)", re.DOTALL)
_VERSION = re.compile(r"NCCL version (\d{1,3}\.\d{1,3}\.\d{1,3})(?![\d.])")
_COMM = re.compile(
    r"(?:\[Rank \d+\] )?(?:\w+ )?comm 0x([0-9a-f]{1,16}) rank (\d{1,6}) n[rR]anks (\d{1,6}) (.*)", re.DOTALL
)
_COMM_ID = re.compile(r"commId 0x([0-9a-f]{1,16}) ")
_NODES = re.compile(r"nNodes (\d{1,6}) ")
_STAGE = re.compile(r"- ?(Init START|Init COMPLETE|Abort COMPLETE|Destroy COMPLETE)$")
_ORDER = re.compile(r"Channel (\d{1,3})/(\d{1,3}) ?:((?:\s+\d{1,6})+)\s*(\.\.\.)?$")
_RING = re.compile(r"Ring (\d{1,3}) : (\d{1,6}) -> (\d{1,6}) -> (\d{1,6})$")
_TREES = re.compile(rf"Trees((?: \[\d{{1,3}}\] {_TREE})*)(.*)$")
_ONE_TREE = re.compile(rf" \[(\d{{1,3}})\] {_TREE}")
_CHANNELS = re.compile(r"(\d{1,3}) coll channels, ")
_HOP = re.compile(
    r"Channel (\d{1,3})(?:/(\d{1,2}))? : (\d{1,6})\[[0-9a-f]+\] -> (\d{1,6})\[[0-9a-f]+\] (?:\[(send|receive)\] )?"
    r"via ([A-Z0-9]+)/([^/]*)(?:/(\d{1,3})(?:\((\d{1,6})\))?)?"
)
_SET = re.compile(r"(NCCL_\w{1,64}) set by environment to (.*?)\.?$")
_NETWORK = re.compile(r"Using network (.{1,64})$")
_DEVICE = re.compile(r"\[(\d{1,3})\]([\w.+-]{1,128}):(\d{1,3})/(RoCE|IB)\b")
_QP = re.compile(
    r"NET/IB: (?:\w+: )?(?:NCCL Dev|NCCL MergedDev|Dev) (\d{1,3}) (?:IbDev (\d{1,3}) )?Port (\d{1,3})"
    r" (?:qpn|qp_num) (\d{1,8}) mtu (\d) (?:query_ece=\{[^}]*\} )?(?:GID (-?\d{1,4}) \(([0-9A-F]{1,16})/"
    r"([0-9A-F]{1,16})\)|LID (\d+))"
)
_CREATED = re.compile(
    r"NET/IB: (\w+): QP created: port=(\d{1,3}) dev=(\d{1,3}) devName=(\S{1,64}) ndevs=\d+ nmdevs=\d+ qp_num=(\d{1,8}) "
)
_CHOICE = re.compile(r"(?:(\w{1,64}): )?(\d{1,18}) Bytes -> Algo (\w{1,64}) proto (\w{1,64})")


class Line(NamedTuple):
    """process: HOST:PID. level: INFO, WARN or TRACE. cut: NCCL has cut it."""

    process: str
    thread: str
    level: str
    said: str
    cut: bool


class Comm(NamedTuple):
    """A line about a communicator. pointer: NCCL's. hash: its commId, None if not said; nodes likewise. stage: what has
    begun or ended, "" if nothing has."""

    pointer: str
    rank: int
    ranks: int
    stage: str
    nodes: int | None
    hash: int | None


class Edge(NamedTuple):
    """A channel's ring at this rank: before -> me -> after."""

    channel: int
    before: int
    me: int
    after: int


class Order(NamedTuple):
    """A channel's ring, as the ranks that are printed. whole: False where NCCL says that it is cut."""

    channel: int
    channels: int
    ring: list[int]
    whole: bool


class Tree(NamedTuple):
    """Neighbours of a rank in one channel's tree; -1: no neighbour."""

    up: int
    down: tuple[int, int, int]


class Trees(NamedTuple):
    """trees: (channel, this rank, its neighbours). rest: what follows them and is not a tree; its length counts."""

    trees: list[tuple[int, int, Tree]]
    rest: str


@dataclass(frozen=True)
class Hop:
    """One connection of this rank: data src -> dst on a channel.

    index: 0 of collectives, 1 of point-to-point.
    transport: "NET", "P2P" or "SHM"; network: of NET, NCCL's name ("IB").
    device: NCCL's number of the NIC, -1 inside a host, and where the line of a network lacks it.
    proxy: the rank whose proxy sends (PXN), or -1.
    """

    channel: int
    index: int
    src: int
    dst: int
    transport: str
    network: str
    device: int
    proxy: int


class LoggedQueuePair(NamedTuple):
    """A queue pair of this process.

    sends: it sends data (its number is the destination of clear-to-send). False: it receives, or is a loopback that
        2.29 names alike. None: the log does not say.
    device: NCCL's number, of the port where NICs are merged. mtu: of this side, bytes, 0 if not said.
    address: of this side's GID, "" if not said.
    """

    number: int
    device: int
    port: int
    mtu: int
    gid_index: int
    address: str
    sends: bool | None


class Choice(NamedTuple):
    """What NCCL has chosen for calls of so many bytes. function: "" if not said. The names are as they are printed."""

    function: str
    nbytes: int
    algorithm: str
    protocol: str


def line_of(text: str) -> Line | None:
    """text: with its end or without."""
    found = _LINE.search(text)
    if found is None:
        return None
    return Line(found[1], found[2], found[3], found[4].rstrip(), len(text.rstrip("\r\n").encode()) >= CUT)


def version_in(text: str) -> str | None:
    """Some versions print it without anything before it, so any line is looked at."""
    found = _VERSION.search(text)
    return found[1] if found else None


def comm_in(said: str) -> Comm | None:
    found = _COMM.match(said)
    if found is None:
        return None
    stage, nodes, hashed = _STAGE.search(found[4]), _NODES.search(found[4]), _COMM_ID.search(found[4])
    return Comm(found[1], int(found[2]), int(found[3]), stage[1] if stage else "", int(nodes[1]) if nodes else None,
                int(hashed[1], 16) if hashed else None)


def edge_in(said: str) -> Edge | None:
    found = _RING.match(said)
    return Edge(*map(int, found.groups())) if found else None


def order_in(said: str) -> Order | None:
    found = _ORDER.match(said)
    if found is None:
        return None
    return Order(int(found[1]), int(found[2]), [int(word) for word in found[3].split()], not found[4])


def trees_in(said: str) -> Trees | None:
    found = _TREES.match(said)
    if found is None:
        return None
    each = [tuple(map(int, one.groups())) for one in _ONE_TREE.finditer(found[1])]
    return Trees([(channel, me, Tree(up, (a, b, c))) for channel, a, b, c, me, up in each], found[found.re.groups])


def channels_in(said: str) -> int | None:
    found = _CHANNELS.match(said)
    return int(found[1]) if found else None


def hop_in(said: str) -> tuple[str, Hop] | None:
    """("send", "receive" or "", the connection)."""
    found = _HOP.match(said)
    if found is None or found[6] not in ("NET", "P2P", "SHM") or (found[6] == "NET") != (found[5] is not None):
        return None
    channel, index, src, dst = (int(found[at] or 0) for at in range(1, 5))
    network, device = (found[7], int(found[8] or -1)) if found[6] == "NET" else ("", -1)
    return found[5] or "", Hop(channel, index, src, dst, found[6], network, device, int(found[9] or -1))


def setting_in(said: str) -> tuple[str, str] | None:
    """(name of a variable, its value)."""
    found = _SET.match(said)
    return (found[1], found[2]) if found else None


def network_in(said: str) -> str | None:
    found = _NETWORK.match(said)
    return found[1] if found else None


def devices_in(said: str) -> dict[int, tuple[str, int]]:
    """NCCL's number -> (name, port)."""
    if not said.startswith("NET/IB : Using"):
        return {}
    return {int(number): (name, int(port)) for number, name, port, _ in _DEVICE.findall(said)}


def queue_pair_in(said: str) -> LoggedQueuePair | None:
    """One of this process: a peer's, which 2.20 to 2.26 print with `set_ece=`, is not taken for it."""
    if found := _QP.match(said):
        device, port, number = int(found[2] or found[1]), int(found[3]), int(found[4])
        mtu = MTU_OF_ENUM.get(int(found[5]), 0)
        address = _address(int(found[7], 16), int(found[8], 16)) if found[7] else ""
        return LoggedQueuePair(number, device, port, mtu, int(found[6] or -1), address, True)
    if found := _CREATED.match(said):
        sends = True if "Sender" in found[1] else False if "Receiver" in found[1] else None
        return LoggedQueuePair(int(found[5]), int(found[3]), int(found[2]), 0, -1, "", sends)
    return None


def choice_in(said: str) -> Choice | None:
    found = _CHOICE.search(said)
    return Choice(found[1] or "", int(found[2]), found[3], found[4]) if found else None


def registers_buffers(said: str) -> bool:
    """Does it register buffers of the user for the network?"""
    lowered = said.lower()
    return "registered" in lowered and "buffer" in lowered and ("net" in lowered or "ub" in lowered.split())


def _address(prefix: int, identifier: int) -> str:
    """Of a GID whose halves NCCL prints as numbers of the host, which is little-endian."""
    address = IPv6Address(prefix.to_bytes(8, "little") + identifier.to_bytes(8, "little"))
    return str(address.ipv4_mapped or address)
