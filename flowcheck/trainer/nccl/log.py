"""NCCL's own log of one process: its communicators, rings, trees, channels, settings and queue pairs.

    log = read_log(path)                    what NCCL_DEBUG_FILE of this process has; as far as it is written
    log.communicator(ranks=8, rank=3)       the one that is meant; refused by name where more than one could be
    log.buffer_bytes, log.queue_pairs       sizes of the manifest; numbers, where a version prints them

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

Lines that are not understood are stepped over: NCCL prints many more. What contradicts itself is refused (UserError),
and so is a file that cannot be such a log. No line says which channel a queue pair is of. torch is not needed; the
standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv6Address
from pathlib import Path
from typing import BinaryIO, NoReturn

from flowcheck.errors import UserError
from flowcheck.job.model import BUFFER_BYTES

__all__ = ["Hop", "Log", "LoggedCommunicator", "LoggedQueuePair", "Tree", "parse_log", "read_log"]

LINE_MAX = 8192  # NCCL's are 1024 bytes at most; a host name and a time stand before them
LINES_MAX = 1 << 20
CUT = 1023  # bytes after which NCCL cuts what it prints
RANKS_MAX, CHANNELS_MAX = 65536, 64
MTU_OF_ENUM = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}  # enum ibv_mtu
_BUFFERS = {"ll": "NCCL_LL_BUFFSIZE", "ll128": "NCCL_LL128_BUFFSIZE", "simple": "NCCL_BUFFSIZE"}
_TREE = r"(-?\d{1,6})/(-?\d{1,6})/(-?\d{1,6})->(\d{1,6})->(-?\d{1,6})"

_VERSION = re.compile(r"NCCL version (\d{1,3}\.\d{1,3}\.\d{1,3})(?![\d.])")
_COMM = re.compile(
    r"(?:\[Rank \d+\] )?(?:\w+ )?comm 0x([0-9a-f]{1,16}) rank (\d{1,6}) n[rR]anks (\d{1,6}) (.*)", re.DOTALL
)
_COMM_ID = re.compile(r"commId 0x([0-9a-f]{1,16}) ")
_NODES = re.compile(r"nNodes (\d{1,6}) ")
_STAGE = re.compile(r"- ?(Init START|Init COMPLETE|Abort COMPLETE|Destroy COMPLETE)$")
_ORDER = re.compile(r"Channel (\d{1,3})/(\d{1,3}) ?:([ \d]+)(\.\.\.)?$")
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


@dataclass(frozen=True)
class Tree:
    """Neighbours of this rank in one channel's tree, -1 where there is none."""

    up: int
    down: tuple[int, int, int]


@dataclass(frozen=True)
class Hop:
    """One connection of this rank: data src -> dst on a channel. index: 0 of collectives, 1 of point-to-point.
    transport: "NET", "P2P" or "SHM"; network: of NET, NCCL's name ("IB"). device: NCCL's number of the NIC, -1 inside a
    host. proxy: the rank whose proxy sends (PXN), or -1."""

    channel: int
    index: int
    src: int
    dst: int
    transport: str
    network: str
    device: int
    proxy: int


@dataclass(frozen=True)
class LoggedQueuePair:
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


@dataclass
class LoggedCommunicator:
    """What a log says of one communicator. pointer: NCCL's, which it may use again for a later one. hash: its `commId`,
    0 where none is printed (a split). complete: NCCL has said so. ended: it is gone. nodes, channels: 0 if not said.
    rings: by channel (rank before, rank after) of this rank; orders: whole rings, where the log has them; trees: by
    channel; cut: the line of the trees ended early."""

    pointer: str
    rank: int
    ranks: int
    hash: int = 0
    complete: bool = False
    ended: bool = False
    nodes: int = 0
    channels: int = 0
    rings: dict[int, tuple[int, int]] = field(default_factory=dict)
    orders: dict[int, list[int]] = field(default_factory=dict)
    trees: dict[int, Tree] = field(default_factory=dict)
    hops: list[Hop] = field(default_factory=list)
    cut: bool = False


@dataclass
class Log:
    """where: the file, for messages. process: HOST:PID. devices: NCCL's number -> (name, port). environment: what NCCL
    took from it. hops: connections of which it is not said whose they are (NCCL 2.22 and later connects at the first
    call). queue_pairs: in the order in which they were made."""

    where: str
    process: str = ""
    version: str = ""
    network: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    devices: dict[int, tuple[str, int]] = field(default_factory=dict)
    communicators: list[LoggedCommunicator] = field(default_factory=list)
    hops: list[Hop] = field(default_factory=list)
    queue_pairs: list[LoggedQueuePair] = field(default_factory=list)

    @property
    def buffer_bytes(self) -> dict[str, int]:
        """By protocol, as the manifest has them: NCCL's defaults, or what the environment set. (NCCL 2.18 on ARM has
        another default, which no log says.) Raises UserError for a size that is none."""
        found = dict(BUFFER_BYTES)
        for protocol, name in _BUFFERS.items():
            text = self.environment.get(name)
            if text is None or text == "-2":
                continue
            if not re.fullmatch(r"[1-9]\d{0,11}", text, re.ASCII):
                raise UserError(f"{name} is {text[:40]!r}", where=self.where, remedy="a whole number of bytes")
            found[protocol] = int(text)
        return found

    def communicator(self, *, ranks: int, rank: int, hash: int | None = None) -> LoggedCommunicator:
        """The one that is whole, not gone, of so many ranks, and in which this process is `rank`; of this hash, if
        given and printed. Raises UserError if none or more than one is left."""
        present = [one for one in self.communicators if one.complete and not one.ended]
        left = [one for one in present
                if (one.ranks, one.rank) == (ranks, rank) and (hash is None or one.hash in (0, hash))]
        if len(left) == 1:
            return left[0]
        listed = "; ".join(f"{one.hash:#x} rank {one.rank} of {one.ranks}" for one in left or present) or "none at all"
        found = f"{len(left)} communicators" if left else "no communicator"
        asked = f"rank {rank} of {ranks}" + (f", hash {hash:#x}" if hash is not None else "")
        raise UserError(f"{found} could be {asked}; there are: {listed}", where=self.where,
                        remedy="hash= of the one that DDP uses; NCCL_DEBUG=INFO with INIT in NCCL_DEBUG_SUBSYS")


def read_log(path: str | os.PathLike[str]) -> Log:
    """The log in a file, as far as it is written: an unfinished last line is left for the next time.

    Raises UserError, naming file and line: it cannot be read, is no log of NCCL's, or contradicts itself.
    """
    try:
        with Path(path).open("rb") as stream:
            return parse_log(_lines(stream, str(path)), str(path))
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read NCCL's log: {getattr(error, 'strerror', None) or error}", where=str(path),
                        remedy="NCCL_DEBUG_FILE of this process, which NCCL writes with NCCL_DEBUG=INFO") from None


def _lines(stream: BinaryIO, where: str) -> Iterator[bytes]:
    for number, line in enumerate(iter(partial(stream.readline, LINE_MAX + 1), b""), 1):
        if len(line) > LINE_MAX:
            _refuse(f"line {number} has more than {LINE_MAX} bytes, and NCCL's have 1024", where)
        if number > LINES_MAX:
            _refuse(f"has more than {LINES_MAX} lines", where)
        if line.endswith(b"\n"):
            yield line


def _refuse(what: str, where: str) -> NoReturn:
    raise UserError(what, where=where, remedy="NCCL_DEBUG_FILE of this process alone, a new one for each start")


def parse_log(lines: Iterable[bytes], where: str = "NCCL's log") -> Log:
    """As `read_log`, of lines that are whole."""
    reader = _Reader(Log(where))
    for number, line in enumerate(lines, 1):
        reader.number = number
        if b"\0" in line:
            reader.refuse("has a zero byte")
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if text.startswith("NCCL version "):  # printed without a prefix by some versions
            reader.version(text)
            continue
        before, found, said = text.partition(" NCCL INFO ")
        if found:
            words = before.rsplit(" ", 2)
            process, _, thread = words[-2].rpartition(":") if len(words) > 1 else ("", "", "")
            if thread.isdecimal() and re.fullmatch(r"[^:\s]+:\d{1,10}", process):
                reader.take(process, thread, said, len(said.encode()) + len(found) + len(before) >= CUT)
    if not reader.log.process and not reader.log.version:
        raise UserError("no line of NCCL's is in it", where=where,
                        remedy="NCCL_DEBUG=INFO, and NCCL_DEBUG_FILE before NCCL's first call")
    return reader.log


class _Reader:
    """Line by line. current: by thread the communicator that it is making, or made last."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.number = 0
        self._current: dict[str, LoggedCommunicator] = {}

    def refuse(self, what: str) -> NoReturn:
        _refuse(f"line {self.number} {what}", self.log.where)

    def take(self, process: str, thread: str, said: str, cut: bool) -> None:
        if self.log.process and process != self.log.process:
            self.refuse(f"is of {process}, and those before are of {self.log.process}")
        self.log.process = process
        if said.startswith("NCCL version "):
            self.version(said)
        elif found := _COMM.match(said):
            self._communicator(thread, found[1], int(found[2]), int(found[3]), found[4])
        elif found := _SET.match(said):
            self.log.environment[found[1]] = found[2]
        elif found := _NETWORK.match(said):
            self.log.network = found[1]
        elif said.startswith("NET/IB"):
            self._network(said)
        else:
            self._shape(thread, said, cut)

    def version(self, said: str) -> None:
        found = _VERSION.match(said)
        if found is None:
            return
        if self.log.version not in ("", found[1]):
            self.refuse(f"names NCCL {found[1]}, and one before it {self.log.version}")
        self.log.version = found[1]

    def _communicator(self, thread: str, pointer: str, rank: int, ranks: int, rest: str) -> None:
        stage, nodes, hashed = _STAGE.search(rest), _NODES.search(rest), _COMM_ID.search(rest)
        if stage is None and nodes is None:
            return
        if not 0 <= rank < ranks <= RANKS_MAX:
            self.refuse(f"has rank {rank} of {ranks}")
        known = next((one for one in reversed(self.log.communicators) if one.pointer == pointer), None)
        if stage is not None and stage[1] == "Init START":
            if known is not None and not known.ended and not known.complete:
                self.refuse(f"begins communicator {pointer}, which one before it has begun already")
            if known is not None:
                known.ended = True  # NCCL takes memory again without a word where a communicator was aborted
            known = LoggedCommunicator(pointer, rank, ranks)
            self.log.communicators.append(known)
            self._current[thread] = known
        if known is None:
            return  # its beginning was not logged
        if (known.rank, known.ranks) != (rank, ranks):
            self.refuse(f"has rank {rank} of {ranks}, and communicator {pointer} had {known.rank} of {known.ranks}")
        if hashed is not None:
            if known.hash not in (0, int(hashed[1], 16)):
                self.refuse(f"has the commId {int(hashed[1], 16):#x}, and communicator {pointer} had {known.hash:#x}")
            known.hash = int(hashed[1], 16)
        if nodes is not None:
            known.nodes = self._same(known.nodes, int(nodes[1]), "nodes")
        if stage is not None:
            known.complete |= stage[1] == "Init COMPLETE"
            known.ended |= stage[1] in ("Abort COMPLETE", "Destroy COMPLETE")

    def _same(self, before: int, now: int, what: str) -> int:
        if before not in (0, now):
            self.refuse(f"says {now} {what}, and one before it {before}")
        return now

    def _shape(self, thread: str, said: str, cut: bool) -> None:
        """Rings, trees and channels are printed by the thread that makes a communicator."""
        if found := _HOP.match(said):
            self._hop(thread, found)
            return
        of = self._current.get(thread)
        if of is None or of.complete:
            return
        if found := _RING.match(said):
            self._ring(of, *map(int, found.groups()))
        elif found := _ORDER.match(said):
            self._order(of, found)
        elif found := _TREES.match(said):
            for number, *down, me, up in (map(int, one.groups()) for one in _ONE_TREE.finditer(found[1])):
                self._tree(of, number, me, Tree(up, (down[0], down[1], down[2])))
            of.cut = bool(found[found.re.groups]) or cut
            if found[found.re.groups] and not cut and len(said) < CUT - 64:
                self.refuse(f"has a tree that is none: {found[found.re.groups][:40]!r}")
        elif found := _CHANNELS.match(said):
            count = int(found[1])
            if not 0 < count <= CHANNELS_MAX or (of.rings and sorted(of.rings) != list(range(count))):
                self.refuse(f"says {count} channels, and {len(of.rings)} rings were logged")
            of.channels = self._same(of.channels, count, "channels")

    def _ring(self, of: LoggedCommunicator, channel: int, before: int, me: int, after: int) -> None:
        if channel >= CHANNELS_MAX or me != of.rank or max(before, after) >= of.ranks:
            self.refuse(f"has ring {channel} as {before} -> {me} -> {after}, and this is rank {of.rank} of {of.ranks}")
        if of.rings.setdefault(channel, (before, after)) != (before, after):
            self.refuse(f"has another ring {channel} than one before it")
        if channel in of.orders and _ends(of.orders[channel], me) != (before, after):
            self.refuse(f"has ring {channel} as {before} -> {me} -> {after}, and its order is {of.orders[channel]}")

    def _order(self, of: LoggedCommunicator, found: re.Match[str]) -> None:
        channel, channels = int(found[1]), int(found[2])
        ring = [int(word) for word in found[3].split()]
        if found[4] or (of.ranks > 20 and len(ring) < of.ranks):
            return  # cut by NCCL
        if channel >= channels or channels > CHANNELS_MAX or sorted(ring) != list(range(of.ranks)):
            self.refuse(f"has channel {channel} of {channels} as {ring[:40]}, and there are {of.ranks} ranks")
        of.channels = self._same(of.channels, channels, "channels")
        if of.orders.setdefault(channel, ring) != ring:
            self.refuse(f"has another order of channel {channel} than one before it")
        if channel in of.rings and _ends(ring, of.rank) != of.rings[channel]:
            self.refuse(f"has channel {channel} as {ring[:40]}, and its ring is {of.rings[channel]}")

    def _tree(self, of: LoggedCommunicator, channel: int, me: int, tree: Tree) -> None:
        if channel >= CHANNELS_MAX or me != of.rank or not all(-1 <= one < of.ranks for one in (tree.up, *tree.down)):
            self.refuse(f"has tree {channel} of rank {me} as {tree}, and this is rank {of.rank} of {of.ranks}")
        if of.trees.setdefault(channel, tree) != tree:
            self.refuse(f"has another tree {channel} than one before it")

    def _hop(self, thread: str, found: re.Match[str]) -> None:
        channel, index, src, dst = (int(found[at] or 0) for at in range(1, 5))
        transport = found[6]
        if transport not in ("NET", "P2P", "SHM") or (transport == "NET") != (found[5] is not None):
            return
        if transport == "NET" and found[8] is None:
            self.refuse("has a connection over the network without its device")
        hop = Hop(
            channel, index, src, dst, transport, found[7] if transport == "NET" else "",
            int(found[8]) if transport == "NET" else -1, int(found[9]) if found[9] else -1,
        )
        of = self._current.get(thread)
        if of is None or of.complete:
            mine = src if found[5] == "send" else dst if found[5] == "receive" else -1
            could = [one for one in self.log.communicators if not one.ended and max(src, dst) < one.ranks
                     and mine in (-1, one.rank)]
            of = could[0] if len(could) == 1 else None
        if of is not None and (channel >= CHANNELS_MAX or max(src, dst) >= of.ranks or of.rank not in (src, dst)):
            self.refuse(f"connects {src} -> {dst} on channel {channel}, and this is rank {of.rank} of {of.ranks}")
        (self.log.hops if of is None else of.hops).append(hop)

    def _network(self, said: str) -> None:
        if said.startswith("NET/IB : Using"):
            for number, name, port, _ in _DEVICE.findall(said):
                self.log.devices[int(number)] = (name, int(port))
        elif found := _QP.match(said):
            device, port, number = int(found[2] or found[1]), int(found[3]), int(found[4])
            mtu = MTU_OF_ENUM.get(int(found[5]), 0)
            address = _address(int(found[7], 16), int(found[8], 16)) if found[7] else ""
            self._queue_pair(LoggedQueuePair(number, device, port, mtu, int(found[6] or -1), address, True))
        elif found := _CREATED.match(said):
            sends = True if "Sender" in found[1] else False if "Receiver" in found[1] else None
            self._queue_pair(LoggedQueuePair(int(found[5]), int(found[3]), int(found[2]), 0, -1, "", sends))

    def _queue_pair(self, made: LoggedQueuePair) -> None:
        if not 0 < made.number < 1 << 24:
            self.refuse(f"has a queue pair number {made.number}")
        for at, before in enumerate(self.log.queue_pairs):
            if (before.number, before.device, before.port) == (made.number, made.device, made.port) and made.address:
                if before.address in ("", made.address):
                    self.log.queue_pairs[at] = made  # said when it was made, and again with its GID
                    return
        self.log.queue_pairs.append(made)


def _ends(ring: list[int], rank: int) -> tuple[int, int]:
    at = ring.index(rank)
    return ring[at - 1], ring[(at + 1) % len(ring)]


def _address(prefix: int, identifier: int) -> str:
    """Of a GID whose halves NCCL prints as numbers of the host, which is little-endian."""
    address = IPv6Address(prefix.to_bytes(8, "little") + identifier.to_bytes(8, "little"))
    return str(address.ipv4_mapped or address)
