"""From message starts to queue pairs: which flows carry data, which announce it, what each message was.

    trace -> flows -> Announcer (clear-to-send writes) | Queue (messages in order, whole or with a gap)

Pure: takes what parser.observer.Observer reports (messages), returns plain objects. Section numbers: nccl-wire.md.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

__all__ = ["P2P_SIZE", "Announcer", "Cts", "Message", "Queue", "head_flags", "observed"]

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
    """One message on a QP, or its piece there. psn: of its first packet, unwrapped. size: wire bytes. imm: as on the
    wire, None if not seen. pair: left as plain WRITE plus empty WRITE_WITH_IMM. head: its first bytes, at most 128."""

    psn: int
    size: int
    imm: int | None
    pair: bool
    va: int
    rkey: int
    ns: int
    head: bytes


@dataclass(frozen=True)
class Queue:
    """Data src -> dst to QP qpn: a whole connection, or one of its several QPs.

    messages: what began on it, in PSN order; pieces of messages where these are split over QPs. whole: how many of
    them follow each other without a gap from PSN 0 on (0: begins in mid-stream, or the first packet is lost)."""

    src: str
    dst: str
    qpn: int
    sport: int
    mtu: int | None
    largest: int
    messages: list[Message]
    whole: int
    dropped: int = 0

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
class Cts:
    """One clear-to-send write: message number index - 1 may be written to address, at most size bytes. keys: memory
    keys by port of a merged NIC, the first of them is rkey."""

    address: int
    size: int
    rkey: int
    tag: int
    index: int
    keys: tuple[int, ...] = ()


@dataclass(frozen=True)
class Announcer:
    """A flow of clear-to-send writes src -> dst, which announce data dst -> src. elements: in PSN order."""

    src: str
    dst: str
    qpn: int
    sport: int
    layout: str
    elements: list[Cts]


def _cts_of(head: bytes, length: int, layout: int) -> Cts | None:
    size, width, rkey, nreqs, tag, idx, _ = CTS_LAYOUTS[layout]
    if length != size or len(head) < size:
        return None
    found = Cts(
        struct.unpack_from("<Q", head)[0], struct.unpack_from("<I" if width == 4 else "<Q", head, 8)[0],
        struct.unpack_from("<I", head, rkey)[0], struct.unpack_from("<I", head, tag)[0],
        struct.unpack_from("<Q", head, idx)[0], struct.unpack_from(f"<{(nreqs - rkey) // 4}I", head, rkey),
    )
    requests = struct.unpack_from("<I", head, nreqs)[0]
    plausible = (
        1 <= requests <= 8 and 1 <= found.index < 1 << 48 and 1 <= found.size < 1 << 34 and found.address
        and found.rkey and found.tag < 1 << 24
    )
    return found if plausible else None


def _clear_to_send(records: np.ndarray) -> tuple[int, list[Cts]] | None:
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
        )
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
        if ends_pair and int(r["imm"]):  # all that is left of a pair
            continue
        joined = (
            operation == ONLY and plain and psn == behind and int(plain[-1]["opcode"]) == ONLY
            and int(r["va"]) == int(plain[-1]["va"]) + int(plain[-1]["length"])
            and int(plain[-1]["length"]) == int(plain[0]["length"])
        )
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
    """The largest payload, if some message had several packets (then it is the MTU exactly): a FIRST, or a write that
    the NIC cut into one-packet writes. Pieces of split messages may all be single packets of one size."""
    several = (records["opcode"] == FIRST).any()
    if not several and len(records) > 1:
        here, behind = records[:-1], records[1:]
        several = (
            (here["opcode"] == ONLY) & (behind["opcode"] == ONLY) & (here["length"] == largest)
            & (behind["psn"] == here["psn"] + 1) & (behind["va"] == here["va"] + here["length"])
        ).any()
    return largest if several and largest in (256, 512, 1024, 2048, 4096) else None


def _queue(flow: dict[str, Any], records: np.ndarray) -> Queue:
    mtu = _mtu(records, flow["max_payload"])
    found = list(_messages(records, mtu or 4096))
    whole, expected = 0, 0
    for message, behind in found:
        if message.psn != expected or message.imm is None:
            break
        whole, expected = whole + 1, behind
    return Queue(
        _address(flow["src"]), _address(flow["dst"]), flow["id"], flow["sport"], mtu, flow["max_payload"],
        [message for message, _ in found], whole, flow["dropped"],
    )


def _address(packed: bytes) -> str:
    return str(ipaddress.ip_address(packed))


def observed(flows: list[dict[str, Any]], starts: np.ndarray) -> tuple[list[Queue], list[Announcer]]:
    """Every flow with writes, in order of appearance: QPs with data, and flows of clear-to-send writes."""
    order = np.argsort(starts["flow"], kind="stable")
    bounds = np.searchsorted(starts["flow"][order], np.arange(len(flows) + 1))
    announcers: list[Announcer] = []
    data: list[Queue] = []
    for number, flow in enumerate(flows):
        records = starts[order[bounds[number] : bounds[number + 1]]]
        if flow["tcp"] or not len(records):
            continue
        records = records[np.argsort(records["psn"], kind="stable")]
        keep = np.ones(len(records), bool)
        keep[1:] = records["psn"][1:] != records["psn"][:-1]  # a repeated packet has the same PSN
        records = records[keep]
        cts = _clear_to_send(records)
        if cts is None:
            data.append(_queue(flow, records))
        else:
            ends = _address(flow["src"]), _address(flow["dst"])
            announcers.append(Announcer(*ends, flow["id"], flow["sport"], CTS_LAYOUTS[cts[0]][-1], cts[1]))
    return data, announcers
