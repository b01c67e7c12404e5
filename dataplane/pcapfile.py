"""Reading the record headers of a capture file before DPDK opens it.

The net_pcap driver is lenient where a checkpoint must not be: a cut file looks like a short one, a corrupt
record header loses its place silently, any link type is taken for Ethernet. `scan` walks every record
header, checks it as strictly as libpcap and its neighbours allow, and says how many packets must arrive.

    pcap     | magic, version, snaplen, link type (24) | { seconds, fraction, captured, original | bytes }*
    pcapng   | { type, total length | body, padded to 4 | total length again }*

Bounded memory: the file is read in pieces of 1 MiB with pread and never mapped, because a file that shrinks
under a mapping kills the process. Standard library only.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from typing import Final, NoReturn

__all__ = ["MAX_FRAME", "CaptureFileError", "PcapInfo", "scan"]

MAX_FRAME: Final = 65535  # net_pcap keeps a frame's length in 16 bits
MAX_BLOCK: Final = 16 << 20  # libpcap refuses larger pcapng blocks
PIECE: Final = 1 << 20
ETHERNET: Final = 1
LINK_TYPES: Final = {
    0: "BSD loopback", 12: "raw IP", 14: "raw IP", 101: "raw IP", 105: "IEEE 802.11", 108: "OpenBSD loopback",
    113: "Linux cooked (SLL)", 127: "802.11 with radiotap (RADIOTAP)", 197: "Endace ERF", 228: "raw IPv4",
    229: "raw IPv6", 247: "InfiniBand", 249: "USB", 276: "Linux cooked v2 (SLL2)",
}
OTHER_MAGIC: Final = {
    b"\x1f\x8b": ("it is compressed with gzip", "gunzip it first"),
    b"\x28\xb5\x2f\xfd": ("it is compressed with zstd", "unzstd it first"),
    b"\xfd7zX": ("it is compressed with xz", "unxz it first"),
    b"BZh": ("it is compressed with bzip2", "bunzip2 it first"),
    b"\x34\xcd\xb2\xa1": ("it is a patched (Kuznetzov) pcap", "convert it: editcap -F pcap IN OUT"),
    b"\xa1\xb2\xcd\x34": ("it is a patched (Kuznetzov) pcap", "convert it: editcap -F pcap IN OUT"),
}
SECTION, INTERFACE, OLD_PACKET, SIMPLE_PACKET, PACKET = 0x0A0D0D0A, 1, 2, 3, 6
RECAPTURE: Final = "capture again, or keep the intact part: editcap -F pcap IN OUT"


class CaptureFileError(ValueError):
    """The file cannot be replayed. `offset` is the byte at which the first bad record begins."""

    def __init__(self, path: str | os.PathLike[str], offset: int, what: str, remedy: str) -> None:
        self.path, self.offset, self.what, self.remedy = os.fspath(path), offset, what, remedy
        super().__init__(f"{self.path}: at byte {offset}: {what}\n  remedy: {remedy}")


@dataclass(frozen=True, slots=True)
class PcapInfo:
    """What the record headers say. Lengths in bytes; `size` and `mtime_ns` are the file's at the scan."""

    path: str
    format: str  # "pcap" | "pcapng"
    linktype: int
    nanosecond: bool  # timestamps finer than a microsecond
    snaplen: int  # 0: unlimited
    packet_count: int
    max_captured: int
    truncated_packets: int  # captured shorter than on the wire
    captured_bytes: int
    size: int
    mtime_ns: int


class _File:
    """Pieces of a file of known size; every miss becomes a CaptureFileError."""

    def __init__(self, path: str, fd: int, status: os.stat_result) -> None:
        self.path, self.fd, self.size, self.mtime_ns = path, fd, status.st_size, status.st_mtime_ns

    def bad(self, offset: int, what: str, remedy: str = RECAPTURE) -> NoReturn:
        raise CaptureFileError(self.path, offset, what, remedy)

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes at `offset`, short only at the end of the file."""
        wanted = min(length, self.size - offset)
        parts = []
        while wanted > 0:
            try:
                part = os.pread(self.fd, wanted, offset)
            except OSError as exc:
                self.bad(offset, f"cannot be read: {exc.strerror}", "check the disk and copy the file")
            if not part:
                self.bad(offset, "the file became shorter while it was read", "wait until it is complete")
            parts.append(part)
            offset += len(part)
            wanted -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def check_link(self, offset: int, linktype: int) -> None:
        if linktype != ETHERNET:
            name = LINK_TYPES.get(linktype, "not known here")
            self.bad(
                offset, f"link type {linktype} ({name}) is not Ethernet",
                "capture on the Ethernet interface itself, for example tcpdump -i eth0 instead of -i any",
            )

    def check_frame(self, offset: int, captured: int, original: int) -> None:
        if captured > original:
            self.bad(offset, f"bad record header: {captured} bytes captured of a packet of {original}")
        if captured > MAX_FRAME:
            self.bad(
                offset, f"a frame of {captured} bytes; DPDK's capture port takes at most {MAX_FRAME}",
                "capture without receive offloads: ethtool -K IFACE gro off lro off (or it is corrupt)",
            )


@dataclass(slots=True)
class _Totals:
    packets: int = 0
    longest: int = 0
    cut: int = 0
    octets: int = 0


def scan(path: str | os.PathLike[str]) -> PcapInfo:
    """Walks all record headers of a pcap or pcapng file (either byte order, micro- or nanoseconds).

    Raises:
        CaptureFileError: unreadable, empty, cut, corrupt, not Ethernet, or without a single packet.
    """
    name = os.fspath(path)
    try:
        # Without O_NONBLOCK a FIFO would hang here.
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise CaptureFileError(name, 0, f"cannot be opened: {reason}", "check path and permissions") from None
    try:
        return scan_fd(name, fd)
    finally:
        os.close(fd)


def scan_fd(name: str, fd: int) -> PcapInfo:
    """The same of an open file; `name` is for messages. The file position is not used."""
    status = os.fstat(fd)
    file = _File(name, fd, status)
    if not stat.S_ISREG(status.st_mode):
        file.bad(0, "not a regular file", "name a pcap or pcapng file")
    if file.size == 0:
        file.bad(0, "the file is empty", "capture again; did tcpdump have the space and the rights to write?")
    start = file.read(0, 24)
    for magic, (what, remedy) in OTHER_MAGIC.items():
        if start.startswith(magic):
            file.bad(0, what, remedy)
    if start[:4] in (b"\xd4\xc3\xb2\xa1", b"\xa1\xb2\xc3\xd4", b"\x4d\x3c\xb2\xa1", b"\xa1\xb2\x3c\x4d"):
        info = _scan_pcap(file, start)
    elif start[:4] == b"\x0a\x0d\x0d\x0a":
        info = _PcapngScan(file).run()
    elif len(start) < 4:
        file.bad(0, f"the file has only {file.size} bytes")
    else:
        file.bad(0, f"unknown file type (it begins with {start[:4].hex(' ')})", "name a pcap or pcapng file")
    if info.packet_count == 0:
        file.bad(file.size, "no packets in this file", "capture again while the job runs")
    return info


def _scan_pcap(file: _File, header: bytes) -> PcapInfo:
    if len(header) < 24:
        file.bad(0, f"the file header is cut: {len(header)} of 24 bytes")
    order = "<" if header[:4] in (b"\xd4\xc3\xb2\xa1", b"\x4d\x3c\xb2\xa1") else ">"
    nanosecond = b"\x3c" in (header[1:2], header[2:3])
    major, minor, _zone, _accuracy, snaplen, link = struct.unpack_from(order + "HHIIII", header, 4)
    if (major, minor) != (2, 4):
        file.bad(4, f"pcap version {major}.{minor}, 2.4 is expected", "convert it: editcap -F pcap IN OUT")
    # The upper bits say how long a frame check sequence is, if the frames carry one.
    file.check_link(20, link & 0x03FFFFFF)
    totals = _walk_pcap(file, order, 1_000_000_000 if nanosecond else 1_000_000, snaplen or MAX_FRAME)
    return _info(file, "pcap", nanosecond, snaplen, totals)


def _walk_pcap(file: _File, order: str, unit: int, snaplen: int) -> _Totals:
    unpack = struct.Struct(order + "IIII").unpack_from
    size, most = file.size, min(snaplen, MAX_FRAME)
    packets = longest = cut = octets = 0
    record = offset = 24  # file offsets of the last record header read and of the next
    while offset < size:
        piece = file.read(offset, PIECE)
        at, last = 0, len(piece) - 16
        while at <= last:
            _seconds, fraction, captured, original = unpack(piece, at)
            if captured > most or captured > original or fraction >= unit:
                _bad_pcap_record(file, offset + at, snaplen, unit, fraction, captured, original)
            record = offset + at
            at += 16 + captured
            packets += 1
            octets += captured
            if captured > longest:
                longest = captured
            if captured != original:
                cut += 1
        if at == 0:
            file.bad(offset, f"the file ends inside a record header ({len(piece)} of 16 bytes)")
        offset += at
    if offset > size:
        file.bad(record, f"the file ends inside packet {packets} ({offset - size} bytes are missing)")
    return _Totals(packets, longest, cut, octets)


def _bad_pcap_record(
    file: _File, offset: int, snaplen: int, unit: int, fraction: int, captured: int, original: int
) -> NoReturn:
    if fraction >= unit:
        file.bad(offset, f"bad record header: {fraction} fractions of a second, a second has {unit}")
    file.check_frame(offset, captured, original)
    file.bad(
        offset, f"bad record header: {captured} bytes captured, the file's snap length is {snaplen}",
        "if another tool shows sane packets, rewrite the file: editcap -F pcap IN OUT",
    )


def _info(file: _File, kind: str, nanosecond: bool, snaplen: int, totals: _Totals) -> PcapInfo:
    return PcapInfo(
        file.path, kind, ETHERNET, nanosecond, snaplen, totals.packets, totals.longest, totals.cut,
        totals.octets, file.size, file.mtime_ns,
    )


class _PcapngScan:
    """One pass over the blocks. What libpcap would refuse later is refused here, with its place."""

    def __init__(self, file: _File) -> None:
        self.file = file
        self.order = "<"
        self.snaplens: list[int] = []  # interfaces of the current section
        self.first_snaplen: int | None = None  # of the file
        self.nanosecond = False
        self.totals = _Totals()

    def run(self) -> PcapInfo:
        file, offset, piece, base = self.file, 0, b"", 0
        head = struct.Struct("<II")
        trailer = struct.Struct("<I")
        while offset < file.size:
            at = offset - base
            if at + 12 > len(piece):
                piece, base, at = file.read(offset, PIECE), offset, 0
                if len(piece) < 12:
                    file.bad(offset, f"the file ends inside a block header ({len(piece)} of 12 bytes)")
            if piece[at : at + 4] == b"\x0a\x0d\x0d\x0a":
                self._byte_order(offset, piece[at + 8 : at + 12])
                head, trailer = struct.Struct(self.order + "II"), struct.Struct(self.order + "I")
            kind, total = head.unpack_from(piece, at)
            self._check_length(offset, total)
            if at + total > len(piece):
                piece, base, at = file.read(offset, max(PIECE, total)), offset, 0
            if trailer.unpack_from(piece, at + total - 4)[0] != total:
                again = trailer.unpack_from(piece, at + total - 4)[0]
                file.bad(offset, f"block lengths disagree: {total} before and {again} after the block")
            if kind == PACKET:
                self._packet(offset, piece, at, total)
            elif kind in (SECTION, INTERFACE, OLD_PACKET, SIMPLE_PACKET):
                self._other(kind, offset, piece[at + 8 : at + total - 4])
            offset += total
        return _info(file, "pcapng", self.nanosecond, self.first_snaplen or 0, self.totals)

    def _byte_order(self, offset: int, magic: bytes) -> None:
        orders = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
        if magic not in orders:
            self.file.bad(offset + 8, f"bad byte-order magic {magic.hex(' ')} in a pcapng section header")
        if offset and orders[magic] != self.order:
            self.file.bad(offset, "sections of both byte orders in one file", "convert it: editcap -F pcap IN OUT")
        self.order = orders[magic]

    def _check_length(self, offset: int, total: int) -> None:
        if total < 12 or total % 4 or total > MAX_BLOCK:
            self.file.bad(offset, f"bad block length {total}: it must be a multiple of 4 in 12..{MAX_BLOCK}")
        if total > self.file.size - offset:
            missing = total - (self.file.size - offset)
            self.file.bad(offset, f"the file ends inside a block ({missing} of {total} bytes are missing)")

    def _packet(self, offset: int, piece: bytes, at: int, total: int) -> None:
        """Enhanced packet block: nearly all of a file."""
        if total < 32:
            self.file.bad(offset, f"a packet block of {total} bytes is too short for its header")
        interface, _hi, _lo, captured, original = struct.unpack_from(self.order + "IIIII", piece, at + 8)
        self._count(offset, interface, captured, original, total - 32)

    def _count(self, offset: int, interface: int, captured: int, original: int, room: int) -> None:
        if interface >= len(self.snaplens):
            self.file.bad(offset, f"a packet of interface {interface}, only {len(self.snaplens)} are described")
        if captured > room:
            self.file.bad(offset, f"bad packet block: {captured} bytes captured, the block has room for {room}")
        if self.first_snaplen and captured > self.first_snaplen:  # libpcap reads no further
            self.file.bad(offset, f"bad packet block: {captured} bytes captured of {self.first_snaplen} at most")
        self.file.check_frame(offset, captured, original)
        totals = self.totals
        totals.packets += 1
        totals.octets += captured
        totals.longest = max(totals.longest, captured)
        totals.cut += captured != original

    def _other(self, kind: int, offset: int, body: bytes) -> None:
        if kind == SECTION:
            self._section(offset, body)
        elif kind == INTERFACE:
            self._interface(offset, body)
        elif kind == OLD_PACKET:
            if len(body) < 20:
                self.file.bad(offset, f"a packet block of {len(body) + 12} bytes is too short for its header")
            interface, _drops, _hi, _lo, captured, original = struct.unpack_from(self.order + "HHIIII", body)
            self._count(offset, interface, captured, original, len(body) - 20)
        else:
            if len(body) < 4:
                self.file.bad(offset, "a simple packet block without a length")
            (original,) = struct.unpack_from(self.order + "I", body)
            limit = self.snaplens[0] if self.snaplens and self.snaplens[0] else original
            self._count(offset, 0, min(original, limit), original, len(body) - 4)

    def _section(self, offset: int, body: bytes) -> None:
        if len(body) < 16:
            self.file.bad(offset, f"a section header of {len(body) + 12} bytes is too short")
        major, minor = struct.unpack_from(self.order + "HH", body, 4)
        if major != 1 or minor not in (0, 2):
            self.file.bad(offset, f"pcapng version {major}.{minor}, 1.0 is expected")
        self.snaplens = []

    def _interface(self, offset: int, body: bytes) -> None:
        if len(body) < 8:
            self.file.bad(offset, f"an interface block of {len(body) + 12} bytes is too short")
        link, _reserved, snaplen = struct.unpack_from(self.order + "HHI", body)
        self.file.check_link(offset, link)
        if self.first_snaplen is None:
            self.first_snaplen = snaplen
        elif snaplen != self.first_snaplen:
            self.file.bad(
                offset,
                f"interfaces with different snap lengths ({self.first_snaplen} and {snaplen}), "
                "which libpcap does not read",
                "convert it: editcap -F pcap IN OUT",
            )
        self.snaplens.append(snaplen)
        self._options(offset, body)

    def _options(self, offset: int, body: bytes) -> None:
        """if_tsresol, and that the list of options is whole: libpcap refuses what is refused here."""
        at, seen = 8, set()
        while at + 4 <= len(body):
            code, length = struct.unpack_from(self.order + "HH", body, at)
            if at + 4 + length > len(body) or (code == 0 and length):
                self.file.bad(offset, f"option {code} of an interface block reaches beyond the block")
            if code == 0:
                return
            if code in (9, 14):
                if code in seen or length != (1 if code == 9 else 8):
                    self.file.bad(offset, f"timestamp option {code} of an interface: twice, or of a bad length")
                seen.add(code)
            if code == 9:
                self._resolution(offset, body[at + 4])
            at += 4 + -(-length // 4) * 4

    def _resolution(self, offset: int, value: int) -> None:
        binary, exponent = value & 0x80, value & 0x7F
        if exponent > (63 if binary else 19):
            self.file.bad(offset, f"an interface's timestamp resolution is absurd (0x{value:02x})")
        self.nanosecond |= exponent > (20 if binary else 6)
