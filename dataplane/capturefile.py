"""A capture file under a scan: its bytes, what is wrong with it, and which parts of it a port is to be given.

    file = CaptureFile(path, fd, os.fstat(fd))
    piece = file.read(offset, length)            short only at the end of the file
    file.bad(offset, what, remedy)               raises Damage: reading ends there
    file.refuse(offset, what, remedy)            raises CaptureFileError: nothing of it is read
    kept = Selection()                           kept.skip(...), kept.patch(...), kept.parts(end)

Bounded memory: the file is read in pieces of 1 MiB with pread and never mapped, because a file that shrinks
under a mapping kills the process. Standard library only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final, NoReturn

__all__ = ["ETHERNET", "LONGEST", "MAX_FRAME", "TOO_LONG", "CaptureFile", "CaptureFileError", "Damage", "Part",
           "PcapInfo", "Selection", "Totals", "link_name"]

MAX_FRAME: Final = 65535  # net_pcap keeps a frame's length in 16 bits
TOO_LONG: Final = f"frame over {MAX_FRAME} bytes"  # a key of what is skipped
LONGEST: Final = 1 << 20  # a header that says more is damaged: TCP super-frames have at most half of it
ANY_SNAPLEN: Final = 262144  # libpcap's own limit, for a header that says too little
PIECE: Final = 1 << 20
ETHERNET: Final = 1
LINK_TYPES: Final = {
    0: "BSD loopback", 6: "Token Ring", 9: "PPP", 12: "raw IP", 14: "raw IP", 50: "PPP", 51: "PPPoE", 101: "raw IP",
    104: "Cisco HDLC", 105: "IEEE 802.11", 107: "Frame Relay", 108: "OpenBSD loopback", 113: "Linux cooked (SLL)",
    119: "802.11 with Prism", 127: "802.11 with radiotap (RADIOTAP)", 187: "Bluetooth HCI", 189: "Linux USB",
    192: "PPI", 195: "IEEE 802.15.4", 197: "Endace ERF", 201: "Bluetooth HCI", 220: "Linux USB", 227: "CAN",
    228: "raw IPv4", 229: "raw IPv6", 239: "Linux netfilter log", 247: "InfiniBand", 249: "USB",
    251: "Bluetooth Low Energy", 253: "Linux netlink", 276: "Linux cooked v2 (SLL2)", 281: "Broadcom switch tag",
    282: "Broadcom switch tag", 283: "Marvell DSA", 284: "Marvell DSA", 285: "Marvell EDSA",
}
DAMAGED: Final = "capture again: no whole packet comes before that byte"
Part = bytes | tuple[int, int]  # bytes as they are, or (start, end) of the file


def link_name(linktype: int) -> str:
    """A link type other than Ethernet, for a person."""
    return f"link type {linktype} ({LINK_TYPES.get(linktype, 'not known here')}), not Ethernet"


class CaptureFileError(ValueError):
    """The file cannot be replayed. `offset` is the byte at which the first bad record begins."""

    def __init__(self, path: str | os.PathLike[str], offset: int, what: str, remedy: str) -> None:
        self.path, self.offset, self.what, self.remedy = os.fspath(path), offset, what, remedy
        super().__init__(f"{self.path}: at byte {offset}: {what}\n  remedy: {remedy}")


class Damage(CaptureFileError):
    """From `offset` on nothing can be read. What comes before it is whole."""


@dataclass(frozen=True, slots=True)
class PcapInfo:
    """What the record headers say.

    path: as it was given.
    format: "pcap" or "pcapng".
    linktype: of all packets that are counted.
    nanosecond: timestamps are finer than a microsecond.
    snaplen: bytes, as the header says, 0: unlimited.
    packet_count: that a port will bring.
    max_captured: bytes of the longest of them.
    truncated_packets: of them, captured shorter than on the wire.
    captured_bytes: of them all.
    size, mtime_ns: the file's at the scan. Bytes that are written behind `size` later are not read.
    skipped: frames that are not brought, by what they are.
    left_out: bytes at the end that cannot be read. left_out_why: the reason, "" if there are none.
    parts: what the port is given instead of the file; empty: the file as it is.
    """

    path: str
    format: str
    linktype: int
    nanosecond: bool
    snaplen: int
    packet_count: int
    max_captured: int
    truncated_packets: int
    captured_bytes: int
    size: int
    mtime_ns: int
    skipped: dict[str, int] = field(default_factory=dict)
    left_out: int = 0
    left_out_why: str = ""
    parts: tuple[Part, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What of the file is not brought, as sentences for a person."""
        said = [f"{count} skipped: {what}" for what, count in self.skipped.items()]
        if self.left_out_why:
            out = f"the last {self.left_out} bytes are left out: " if self.left_out else ""
            said.append(f"{out}{self.left_out_why}. It is read as far as it is whole")
        return [f"{self.path}: {text}" for text in said]


class CaptureFile:
    """Pieces of a file of known size."""

    def __init__(self, path: str, fd: int, status: os.stat_result) -> None:
        self.path, self.fd, self.size, self.mtime_ns = path, fd, status.st_size, status.st_mtime_ns

    def refuse(self, offset: int, what: str, remedy: str) -> NoReturn:
        """Nothing of the file is read. Raises CaptureFileError."""
        raise CaptureFileError(self.path, offset, what, remedy)

    def bad(self, offset: int, what: str, remedy: str = DAMAGED) -> NoReturn:
        """Nothing is read from `offset` on. Raises Damage."""
        raise Damage(self.path, offset, what, remedy)

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes at `offset`, short only at the end of the file. Raises CaptureFileError."""
        wanted = min(length, self.size - offset)
        parts = []
        while wanted > 0:
            try:
                part = os.pread(self.fd, wanted, offset)
            except OSError as exc:
                self.refuse(offset, f"cannot be read: {exc.strerror}", "check the disk and copy the file")
            if not part:
                self.refuse(offset, "the file became shorter while it was read", "wait until it is complete")
            parts.append(part)
            offset += len(part)
            wanted -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def piece(self, offset: int, least: int = 0) -> bytes:
        """At least `least` bytes at `offset`, as many as are read at once otherwise."""
        return self.read(offset, max(PIECE, least))


@dataclass(slots=True)
class Totals:
    """Of the packets that a port will bring. `skipped`: of others, by what they are."""

    packets: int = 0
    longest: int = 0
    cut: int = 0
    octets: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def add(self, captured: int, original: int) -> None:
        self.packets += 1
        self.octets += captured
        self.longest = max(self.longest, captured)
        self.cut += captured != original

    def skip(self, what: str) -> None:
        self.skipped[what] = self.skipped.get(what, 0) + 1


class Selection:
    """Which bytes of a file a port is given. Places only go forward; patches may come in any order, of bytes that are
    not skipped."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, int]] = []
        self._from = 0
        self._patches: dict[int, tuple[int, bytes]] = {}

    def skip(self, start: int, end: int) -> None:
        """Leave out [start, end)."""
        if start > self._from:
            self._kept.append((self._from, start))
        self._from = end

    def patch(self, start: int, end: int, instead: bytes) -> None:
        """Give `instead` in place of [start, end)."""
        self._patches[start] = end, instead

    def parts(self, end: int, size: int) -> tuple[Part, ...]:
        """All of it up to `end`; empty where that is the whole file as it is."""
        kept = [*self._kept, (self._from, end)] if end > self._from else self._kept
        if kept == [(0, size)] and not self._patches:
            return ()
        out: list[Part] = []
        patches = iter([*sorted(self._patches.items()), (size + 1, (size + 1, b""))])
        at, (behind, instead) = next(patches)
        for start, stop in kept:
            while at < stop:
                out += [(start, at), instead] if at > start else [instead]
                start = behind
                at, (behind, instead) = next(patches)
            if stop > start:
                out.append((start, stop))
        return tuple(out)
