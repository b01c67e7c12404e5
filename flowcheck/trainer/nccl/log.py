"""NCCL's own log of one process: its communicators, rings, trees, channels, settings and queue pairs.

    log = read_log(path)                    what NCCL_DEBUG_FILE of this process has; as far as it is written
    log.communicator(ranks=8, rank=3)       the one that is meant; refused by name where more than one could be
    log.buffer_bytes, log.queue_pairs       sizes of the manifest; numbers, where a version prints them

Lines are read by flowcheck/job/nccl_lines.py, which has their forms. Those that are not understood are stepped over:
NCCL prints many more. What contradicts itself is refused (UserError), and so is a file that cannot be such a log. No
line says which channel a queue pair is of. torch is not needed; the standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, NoReturn

from flowcheck.errors import UserError
from flowcheck.job.model import BUFFER_BYTES
from flowcheck.job.nccl_lines import (
    CHANNELS_MAX,
    CUT,
    LINE_MAX,
    LINES_MAX,
    RANKS_MAX,
    Comm,
    Edge,
    Hop,
    Line,
    LoggedQueuePair,
    Order,
    Tree,
    Trees,
    channels_in,
    comm_in,
    devices_in,
    edge_in,
    hop_in,
    line_of,
    network_in,
    order_in,
    queue_pair_in,
    setting_in,
    trees_in,
    version_in,
)

__all__ = ["Hop", "Log", "LoggedCommunicator", "LoggedQueuePair", "Tree", "parse_log", "read_log"]

_BUFFERS = {"ll": "NCCL_LL_BUFFSIZE", "ll128": "NCCL_LL128_BUFFSIZE", "simple": "NCCL_BUFFSIZE"}


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
        another default, which no log says.) Raises UserError for a size that cannot be."""
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

    Raises UserError, naming file and line: it cannot be read, has no line of NCCL's, or contradicts itself.
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
        elif (said := line_of(text)) is not None and said.level == "INFO":
            reader.take(said)
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

    def take(self, line: Line) -> None:
        said = line.said
        if self.log.process and line.process != self.log.process:
            self.refuse(f"is of {line.process}, and those before are of {self.log.process}")
        self.log.process = line.process
        if said.startswith("NCCL version "):
            self.version(said)
        elif (comm := comm_in(said)) is not None:
            self._communicator(line.thread, comm)
        elif (setting := setting_in(said)) is not None:
            self.log.environment[setting[0]] = setting[1]
        elif (network := network_in(said)) is not None:
            self.log.network = network
        elif said.startswith("NET/IB"):
            self.log.devices.update(devices_in(said))
            if (made := queue_pair_in(said)) is not None:
                self._queue_pair(made)
        else:
            self._shape(line)

    def version(self, said: str) -> None:
        found = version_in(said)
        if found is None:
            return
        if self.log.version not in ("", found):
            self.refuse(f"names NCCL {found}, and one before it {self.log.version}")
        self.log.version = found

    def _communicator(self, thread: str, said: Comm) -> None:
        if not said.stage and said.nodes is None:
            return
        pointer, rank, ranks = said.pointer, said.rank, said.ranks
        if not 0 <= rank < ranks <= RANKS_MAX:
            self.refuse(f"has rank {rank} of {ranks}")
        known = next((one for one in reversed(self.log.communicators) if one.pointer == pointer), None)
        if said.stage == "Init START":
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
        if said.hash is not None:
            if known.hash not in (0, said.hash):
                self.refuse(f"has the commId {said.hash:#x}, and communicator {pointer} had {known.hash:#x}")
            known.hash = said.hash
        if said.nodes is not None:
            known.nodes = self._same(known.nodes, said.nodes, "nodes")
        known.complete |= said.stage == "Init COMPLETE"
        known.ended |= said.stage in ("Abort COMPLETE", "Destroy COMPLETE")

    def _same(self, before: int, now: int, what: str) -> int:
        if before not in (0, now):
            self.refuse(f"says {now} {what}, and one before it {before}")
        return now

    def _shape(self, line: Line) -> None:
        """Rings, trees and channels are printed by the thread that makes a communicator."""
        if (hop := hop_in(line.said)) is not None:
            self._hop(line.thread, *hop)
            return
        of = self._current.get(line.thread)
        if of is None or of.complete:
            return
        if (edge := edge_in(line.said)) is not None:
            self._ring(of, edge)
        elif (order := order_in(line.said)) is not None:
            self._order(of, order)
        elif (trees := trees_in(line.said)) is not None:
            self._trees(of, trees, line)
        elif (count := channels_in(line.said)) is not None:
            if not 0 < count <= CHANNELS_MAX or (of.rings and sorted(of.rings) != list(range(count))):
                self.refuse(f"says {count} channels, and {len(of.rings)} rings were logged")
            of.channels = self._same(of.channels, count, "channels")

    def _ring(self, of: LoggedCommunicator, edge: Edge) -> None:
        channel, before, me, after = edge
        if channel >= CHANNELS_MAX or me != of.rank or max(before, after) >= of.ranks:
            self.refuse(f"has ring {channel} as {before} -> {me} -> {after}, and this is rank {of.rank} of {of.ranks}")
        if of.rings.setdefault(channel, (before, after)) != (before, after):
            self.refuse(f"has another ring {channel} than one before it")
        if channel in of.orders and _ends(of.orders[channel], me) != (before, after):
            self.refuse(f"has ring {channel} as {before} -> {me} -> {after}, and its order is {of.orders[channel]}")

    def _order(self, of: LoggedCommunicator, said: Order) -> None:
        channel, channels, ring = said.channel, said.channels, said.ring
        if not said.whole or (of.ranks > 20 and len(ring) < of.ranks):
            return  # cut by NCCL
        if channel >= channels or channels > CHANNELS_MAX or sorted(ring) != list(range(of.ranks)):
            self.refuse(f"has channel {channel} of {channels} as {ring[:40]}, and there are {of.ranks} ranks")
        of.channels = self._same(of.channels, channels, "channels")
        if of.orders.setdefault(channel, ring) != ring:
            self.refuse(f"has another order of channel {channel} than one before it")
        if channel in of.rings and _ends(ring, of.rank) != of.rings[channel]:
            self.refuse(f"has channel {channel} as {ring[:40]}, and its ring is {of.rings[channel]}")

    def _trees(self, of: LoggedCommunicator, said: Trees, line: Line) -> None:
        for channel, me, tree in said.trees:
            ends = (tree.up, *tree.down)
            if channel >= CHANNELS_MAX or me != of.rank or not all(-1 <= one < of.ranks for one in ends):
                self.refuse(f"has tree {channel} of rank {me} as {tree}, and this is rank {of.rank} of {of.ranks}")
            if of.trees.setdefault(channel, tree) != tree:
                self.refuse(f"has another tree {channel} than one before it")
        of.cut = bool(said.rest) or line.cut
        if said.rest and not line.cut and len(line.said) < CUT - 64:
            self.refuse(f"has a tree that is none: {said.rest[:40]!r}")

    def _hop(self, thread: str, way: str, hop: Hop) -> None:
        if hop.transport == "NET" and hop.device < 0:
            self.refuse("has a connection over the network without its device")
        of = self._current.get(thread)
        if of is None or of.complete:
            mine = hop.src if way == "send" else hop.dst if way == "receive" else -1
            could = [one for one in self.log.communicators if not one.ended and max(hop.src, hop.dst) < one.ranks
                     and mine in (-1, one.rank)]
            of = could[0] if len(could) == 1 else None
        if of is not None and (
            hop.channel >= CHANNELS_MAX or max(hop.src, hop.dst) >= of.ranks or of.rank not in (hop.src, hop.dst)
        ):
            self.refuse(
                f"connects {hop.src} -> {hop.dst} on channel {hop.channel}, and this is rank {of.rank} of {of.ranks}"
            )
        (self.log.hops if of is None else of.hops).append(hop)

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
