"""From message starts to flows: which carry data, which announce it, what each message was.

    observed_flows(flows, starts) -> [Flow] with data, messages in order, whole or with a gap
                                     [CtsFlow] of clear-to-send writes

A flow is one direction of one queue pair. Pure: takes what an Observer of messages reports. Section numbers:
nccl-wire.md.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from parser.nccl import CTS_ELEMENTS, CtsElement

__all__ = ["P2P_SIZE", "Cts", "CtsFlow", "Flow", "Message", "head_flags", "observed_flows", "packets"]

P2P_SIZE = 131072
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
class Flow:
    """Data src -> dst to QP qpn: a whole connection's, or that of one of its several QPs.

    sport: UDP source port. mtu: path MTU, None if packets do not tell; largest: bytes of the largest payload.
    messages: what began on it, in PSN order; pieces of messages where these are split over QPs. whole: how many of
    them follow each other without a gap from PSN 0 on (0: begins in mid-stream, or the first is not all there).
    dropped: message starts that were not kept."""

    src: str
    dst: str
    qpn: int
    sport: int
    mtu: int | None
    largest: int
    messages: list[Message]
    whole: int
    dropped: int = 0

    @property
    def begins(self) -> bool:
        """Was its very first packet seen?"""
        return bool(self.messages) and self.messages[0].psn == 0

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
class CtsFlow:
    """A flow of clear-to-send writes src -> dst, which announce data dst -> src. layout: NCCL versions by their form.
    elements: in PSN order."""

    src: str
    dst: str
    qpn: int
    sport: int
    layout: str
    elements: list[Cts]


def _cts_of(head: bytes, form: CtsElement) -> Cts | None:
    """The clear-to-send write with these first bytes, None if its fields are not plausible."""
    if len(head) < form.bytes:
        return None
    keys = struct.unpack_from(f"<{form.keys}I", head, form.rkey_at)
    requests, tag = (struct.unpack_from("<I", head, at)[0] for at in (form.requests_at, form.tag_at))
    address, index = (struct.unpack_from("<Q", head, at)[0] for at in (form.address_at, form.number_at))
    size = int.from_bytes(head[form.size_at : form.size_at + form.size_width], "little")
    plausible = (
        1 <= requests <= 8 and 1 <= index < 1 << 48 and 1 <= size < 1 << 34 and address and keys[0] and tag < 1 << 24
    )
    return Cts(address, size, keys[0], tag, index, keys) if plausible else None


def _clear_to_send(records: np.ndarray) -> tuple[CtsElement, list[Cts]] | None:
    """(form, elements) if a flow consists of clear-to-send writes. records: in PSN order, at least one."""
    if (records["opcode"] != ONLY).any():
        return None
    for form in CTS_ELEMENTS:
        if (records["length"] != form.bytes).any():
            continue
        elements = [c for r in records if (c := _cts_of(r["head"].tobytes(), form)) is not None]
        if len(elements) == len(records) and all(b.index >= a.index for a, b in pairwise(elements)):
            return form, elements
    return None


# -- messages --------------------------------------------------------------------------------------------


def packets(size: int, mtu: int) -> int:
    """How many PSNs a write of `size` bytes takes."""
    return max(1, -(-size // mtu))


def _messages(records: np.ndarray, mtu: int) -> Iterator[tuple[Message, int]]:
    """(message, PSN after it) in PSN order. A plain WRITE, whole or cut by the NIC, ends with its immediate."""
    plain: list[Any] = []  # pieces of the plain WRITE that is open
    due = 0  # PSN after them

    def whole(end: Any | None) -> tuple[Message, int]:
        first, size = plain[0], sum(int(p["length"]) for p in plain)
        plain.clear()
        head = first["head"].tobytes()[: int(first["payload"])]
        place = int(first["va"]), int(first["rkey"]), int(first["ns"]), head
        if end is None:
            return Message(int(first["psn"]), size, None, False, *place), due
        return Message(int(first["psn"]), size, int(end["imm"]), end["opcode"] == ONLY_IMM, *place), int(end["psn"]) + 1

    for r in records:
        operation, psn, length = int(r["opcode"]), int(r["psn"]), int(r["length"])
        ends_pair = operation == ONLY_IMM and not length and not r["va"] and not r["rkey"]
        if plain and ((ends_pair and psn == due) or (operation == LAST_IMM and psn + 1 == due)):
            yield whole(r)
            continue
        if ends_pair and int(r["imm"]):  # all that is left of a pair
            continue
        joined = (
            operation == ONLY and plain and psn == due and int(plain[-1]["opcode"]) == ONLY
            and int(r["va"]) == int(plain[-1]["va"]) + int(plain[-1]["length"])
            and int(plain[-1]["length"]) == int(plain[0]["length"])
        )
        if plain and not joined:
            yield whole(None)
        if operation == LAST_IMM:  # of a write whose beginning was lost
            continue
        plain.append(r)
        due = psn + packets(length, mtu)
        if operation == ONLY_IMM:
            message, _ = whole(None)
            yield replace(message, imm=int(r["imm"])), psn + 1
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


def _flow(seen: dict[str, Any], records: np.ndarray) -> Flow:
    mtu = _mtu(records, seen["max_payload"])
    found = list(_messages(records, mtu or 4096))
    whole, expected = 0, 0
    for message, behind in found:
        if message.psn != expected or message.imm is None:
            break
        whole, expected = whole + 1, behind
    return Flow(
        _address(seen["src"]), _address(seen["dst"]), seen["id"], seen["sport"], mtu, seen["max_payload"],
        [message for message, _ in found], whole, seen["dropped"],
    )


def _address(packed: bytes) -> str:
    return str(ipaddress.ip_address(packed))


def observed_flows(flows: list[dict[str, Any]], starts: np.ndarray) -> tuple[list[Flow], list[CtsFlow]]:
    """Every flow with writes, in order of appearance: those with data, and those of clear-to-send writes."""
    order = np.argsort(starts["flow"], kind="stable")
    bounds = np.searchsorted(starts["flow"][order], np.arange(len(flows) + 1))
    data: list[Flow] = []
    cts_flows: list[CtsFlow] = []
    for number, seen in enumerate(flows):
        records = starts[order[bounds[number] : bounds[number + 1]]]
        if seen["tcp"] or not len(records):
            continue
        records = records[np.argsort(records["psn"], kind="stable")]
        keep = np.ones(len(records), bool)
        keep[1:] = records["psn"][1:] != records["psn"][:-1]  # a repeated packet has the same PSN
        records = records[keep]
        cts = _clear_to_send(records)
        if cts is None:
            data.append(_flow(seen, records))
        else:
            ends = _address(seen["src"]), _address(seen["dst"])
            cts_flows.append(CtsFlow(*ends, seen["id"], seen["sport"], cts[0].versions, cts[1]))
    return data, cts_flows
