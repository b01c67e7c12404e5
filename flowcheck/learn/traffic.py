"""From message starts to connections: which flows carry data, which announce it, what each message was.

    trace -> flows -> clear-to-send flows | data flows -> Connection (messages in order, whole or with a gap)

Pure: takes what parser.trace.Trace reports, returns plain objects. Section numbers: nccl-wire.md.
"""

from __future__ import annotations

import ipaddress
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from parser.findings import connection_port

__all__ = ["P2P_SIZE", "Connection", "Message", "connections", "head_flags"]

P2P_SIZE = 131072
#: (element bytes, width of size, offset of rkey, of nreqs, of tag, of idx, versions), 5.4.
CTS_LAYOUTS = (
    (32, 4, 12, 16, 20, 24, "2.12-2.19"),
    (64, 4, 12, 20, 24, 32, "2.20-2.23"),
    (64, 8, 16, 32, 36, 40, "2.24-2.29"),
    (64, 8, 16, 48, 52, 56, "2.30"),
)
FIRST, LAST_IMM, ONLY, ONLY_IMM = 6, 9, 10, 11


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a data flow. psn: of its first packet, unwrapped. size: wire bytes. imm: as on the wire, None
    if not seen. pair: left as plain WRITE plus empty WRITE_WITH_IMM. head: its first bytes, at most 128."""

    psn: int
    size: int
    imm: int | None
    pair: bool
    va: int
    rkey: int
    ns: int
    head: bytes


@dataclass
class Connection:
    """Data src -> dst on QP qpn, and what comes back on cts_qpn (None: not captured).

    whole: how many messages follow each other without a gap from PSN 0 on (0: begins in mid-stream).
    cts_sizes, tags: of the clear-to-send writes; posted: size by number of the message announced. layout: versions by
    their form. imm_order: "little", "big" or "" if no immediate told. split: several QPs carry the messages.
    """

    src: str
    dst: str
    qpn: int
    sport: int
    mtu: int | None
    largest: int
    messages: list[Message]
    whole: int
    dropped: int = 0
    cts_qpn: int | None = None
    paired_by: str = ""
    cts_sizes: Counter[int] = field(default_factory=Counter)
    tags: Counter[int] = field(default_factory=Counter)
    posted: dict[int, int] = field(default_factory=dict)
    layout: str = ""
    imm_order: str = ""
    split: bool = False

    @property
    def tag(self) -> int | None:
        """Rank of the sender by CTS tag."""
        return next(iter(self.tags)) if len(self.tags) == 1 else None

    @property
    def point_to_point(self) -> bool:
        return bool(self.cts_sizes) and set(self.cts_sizes) == {P2P_SIZE}

    @cached_property
    def flagged(self) -> int:
        """Messages whose first bytes have flags, small enough for the steps taken since PSN 0 (at most 4 a message)."""
        return sum(0 < head_flags(m.head, m.size)[1] <= 4 * (i + 1) for i, m in enumerate(self.messages))

    @cached_property
    def pairs(self) -> int:
        """Messages that left as adaptive-routing pairs."""
        return sum(m.pair for m in self.messages)

    def name(self) -> str:
        return f"{self.src} -> {self.dst} QP {self.qpn:#x}"


@lru_cache(maxsize=1 << 16)
def head_flags(head: bytes, size: int) -> tuple[str, int]:
    """("ll", flag), ("ll128", flag) or ("", 0) from a message's first bytes: every line that is there agrees."""
    length = min(len(head), size)
    if size and size % 16 == 0 and length >= 16:
        flags = {f for at in range(0, length - 15, 16) for f in struct.unpack_from("<4xI4xI", head, at)}
        if len(flags) == 1 and 0 not in flags:
            # constant data could be all equal words: then it says nothing
            words = set(struct.unpack_from(f"<{length // 16 * 4}I", head))
            if words != flags:
                return "ll", flags.pop()
    if size and size % 2048 == 0 and length >= 128:
        flag = int(struct.unpack_from("<Q", head, 120)[0])
        if 0 < flag < 1 << 40:
            return "ll128", flag
    return "", 0


# -- clear to send ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cts:
    address: int
    size: int
    rkey: int
    tag: int
    index: int


def _cts_of(head: bytes, length: int, layout: int) -> _Cts | None:
    size, width, rkey, nreqs, tag, idx, _ = CTS_LAYOUTS[layout]
    if length != size or len(head) < size:
        return None
    found = _Cts(
        struct.unpack_from("<Q", head)[0], struct.unpack_from("<I" if width == 4 else "<Q", head, 8)[0],
        struct.unpack_from("<I", head, rkey)[0], struct.unpack_from("<I", head, tag)[0],
        struct.unpack_from("<Q", head, idx)[0],
    )  # fmt: skip
    requests = struct.unpack_from("<I", head, nreqs)[0]
    plausible = (
        1 <= requests <= 8 and 1 <= found.index < 1 << 48 and 1 <= found.size < 1 << 34 and found.address
        and found.rkey and found.tag < 1 << 24
    )  # fmt: skip
    return found if plausible else None


def _clear_to_send(records: np.ndarray) -> tuple[int, list[_Cts]] | None:
    """(layout, elements) if a flow consists of clear-to-send writes. records: in PSN order."""
    for layout in range(len(CTS_LAYOUTS)):
        if not len(records) or (records["opcode"] != ONLY).any() or (records["length"] != CTS_LAYOUTS[layout][0]).any():
            continue
        found = [_cts_of(r["head"].tobytes(), int(r["length"]), layout) for r in records]
        elements = [c for c in found if c is not None]
        steps = all(b.index >= a.index for a, b in pairwise(elements))
        if len(elements) == len(found) and steps:
            return layout, elements
    return None


# -- messages --------------------------------------------------------------------------------------------


def _packets(size: int, mtu: int) -> int:
    return max(1, -(-size // mtu))


def _messages(records: np.ndarray, mtu: int) -> Iterator[tuple[Message, int]]:
    """(message, PSN behind it) in PSN order. A plain WRITE, whole or cut by the NIC, ends with its immediate."""
    plain: list[Any] = []  # pieces of the plain WRITE that is open
    behind = 0

    def whole(end: Any | None) -> tuple[Message, int]:
        first = plain[0]
        size = sum(int(p["length"]) for p in plain)
        imm = None if end is None else int(end["imm"])
        message = Message(
            int(first["psn"]), size, imm, end is not None and end["opcode"] == ONLY_IMM, int(first["va"]),
            int(first["rkey"]), int(first["ns"]), first["head"].tobytes()[: int(first["payload"])],
        )  # fmt: skip
        return message, (behind if end is None else int(end["psn"]) + 1)

    for r in records:
        operation, psn, length = int(r["opcode"]), int(r["psn"]), int(r["length"])
        if operation == LAST_IMM:
            if plain and behind == psn + 1:
                yield whole(r)
                plain = []
            elif plain:  # the write's end is another one's: its own was lost
                yield whole(None)
                plain = []
            continue
        ends_pair = operation == ONLY_IMM and length == 0 and not r["va"] and not r["rkey"]
        if plain and ends_pair and psn == behind:
            yield whole(r)
            plain = []
            continue
        joined = (
            operation == ONLY and plain and psn == behind and int(plain[-1]["opcode"]) == ONLY
            and int(r["va"]) == int(plain[-1]["va"]) + int(plain[-1]["length"])
            and int(plain[-1]["length"]) == int(plain[0]["length"])
        )  # fmt: skip
        if plain and not joined:
            yield whole(None)
            plain = []
        if operation == ONLY_IMM:
            head = r["head"].tobytes()[: int(r["payload"])]
            imm = int(r["imm"])
            yield Message(psn, length, imm, False, int(r["va"]), int(r["rkey"]), int(r["ns"]), head), psn + 1
            continue
        plain.append(r)
        behind = psn + _packets(length, mtu)
    if plain:
        yield whole(None)


def _mtu(records: np.ndarray, largest: int) -> int | None:
    """The largest payload, if some message had several packets (then it is the MTU exactly)."""
    several = (records["opcode"] == FIRST).any() or (
        len(records) > 2 and ((records["opcode"] == ONLY) & (records["length"] == largest)).sum() > 1
    )
    return largest if several and largest in (256, 512, 1024, 2048, 4096) else None


def _connection(flow: dict[str, Any], records: np.ndarray) -> Connection:
    mtu = _mtu(records, flow["max_payload"])
    found = list(_messages(records, mtu or 4096))
    whole, expected = 0, 0
    for message, behind in found:
        if message.psn != expected or message.imm is None:
            break
        whole, expected = whole + 1, behind
    little = big = split = 0
    for message, _ in found:
        if message.imm is None:
            continue
        swapped = int.from_bytes(message.imm.to_bytes(4, "big"), "little")
        if swapped == message.imm:
            continue
        little += swapped == message.size
        big += message.imm == message.size
        split += message.size not in (swapped, message.imm)
    return Connection(
        _address(flow["src"]), _address(flow["dst"]), flow["id"], flow["sport"], mtu, flow["max_payload"],
        [message for message, _ in found], whole, flow["dropped"],
        imm_order="little" if little and not big else "big" if big and not little else "",
        split=split > max(little, big),
    )  # fmt: skip


def _address(packed: bytes) -> str:
    return str(ipaddress.ip_address(packed))


# -- connections -----------------------------------------------------------------------------------------


def connections(flows: list[dict[str, Any]], starts: np.ndarray) -> list[Connection]:
    """Every data flow with the clear-to-send flow that announces it, in order of appearance."""
    order = np.argsort(starts["flow"], kind="stable")
    bounds = np.searchsorted(starts["flow"][order], np.arange(len(flows) + 1))
    announcers: list[tuple[dict[str, Any], int, list[_Cts]]] = []
    data: list[tuple[Connection, dict[str, Any]]] = []
    for number, flow in enumerate(flows):
        records = starts[order[bounds[number] : bounds[number + 1]]]
        if flow["tcp"] or not len(records):
            continue
        records = records[np.argsort(records["psn"], kind="stable")]
        keep = np.ones(len(records), bool)
        keep[1:] = records["psn"][1:] != records["psn"][:-1]  # a repeated packet has the same PSN
        records = records[keep]
        cts = _clear_to_send(records)
        if cts is not None:
            announcers.append((flow, *cts))
        else:
            data.append((_connection(flow, records), flow))
    _pair([c for c, _ in data], announcers)
    return [c for c, _ in data]


def _pair(data: list[Connection], announcers: list[tuple[dict[str, Any], int, list[_Cts]]]) -> None:
    """First by address (a CTS names the very buffer that is then written), then by source port (5.8)."""
    by_buffer: dict[tuple[str, str, int, int], list[int]] = {}
    for number, (flow, _, elements) in enumerate(announcers):
        for key in {(c.rkey, c.address) for c in elements}:
            by_buffer.setdefault((_address(flow["dst"]), _address(flow["src"]), *key), []).append(number)
    taken: dict[int, Connection] = {}
    for connection in data:
        ends = (connection.src, connection.dst)
        found = {number for m in connection.messages for number in by_buffer.get((*ends, m.rkey, m.va), ())}
        if len(found) != 1:
            continue
        number = found.pop()
        if number in taken:  # one announcer, several data QPs: messages go round them or are cut
            connection.split = taken[number].split = True
        _join(connection, announcers[number], "clear-to-send address")
        taken[number] = connection
    for connection in data:
        if connection.cts_qpn is not None:
            continue
        fits = [
            number for number, (flow, _, _) in enumerate(announcers)
            if number not in taken and _address(flow["dst"]) == connection.src
            and _address(flow["src"]) == connection.dst
            and flow["sport"] == connection.sport == connection_port(connection.qpn, flow["id"])
        ]  # fmt: skip
        if len(fits) == 1:
            _join(connection, announcers[fits[0]], "UDP source port")


def _join(connection: Connection, announcer: tuple[dict[str, Any], int, list[_Cts]], how: str) -> None:
    flow, layout, elements = announcer
    connection.cts_qpn = flow["id"]
    connection.paired_by = how
    connection.layout = CTS_LAYOUTS[layout][-1]
    connection.cts_sizes = Counter(c.size for c in elements)
    connection.tags = Counter(c.tag for c in elements)
    connection.posted = {c.index - 1: c.size for c in elements}
