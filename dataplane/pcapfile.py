"""Reading the record headers of a capture file before DPDK opens it.

The net_pcap driver is lenient where a checkpoint must not be: a cut file looks like a short one, a corrupt
record header loses its place silently, any link type is taken for Ethernet. And libpcap is strict where a reader need
not be: it gives up at a cut record, at interfaces of several kinds, at a frame of more than it expects. `scan` walks
every record header, says how many packets must arrive, what is skipped and what is left out, and which parts of the
file (`PcapInfo.parts`, fed through a pipe by feed.py) make a stream that libpcap reads to its end.

    pcap     | magic, version, snaplen, link type (24) | { seconds, fraction, captured, original | bytes }*
    pcapng   | { type, total length | body, padded to 4 | total length again }*      (pcapng.py)

A record that is cut, or a header that cannot be true, ends the reading there: what comes before it is whole.
"""

from __future__ import annotations

import os
import stat
import struct
from typing import Final

from dataplane.capturefile import (
    ANY_SNAPLEN,
    ETHERNET,
    LONGEST,
    MAX_FRAME,
    TOO_LONG,
    CaptureFile,
    CaptureFileError,
    Damage,
    PcapInfo,
    Selection,
    Totals,
    link_name,
)
from dataplane.pcapng import PcapngScan
from dataplane.spool import open_capture

__all__ = ["MAX_FRAME", "CaptureFileError", "PcapInfo", "scan", "scan_fd"]

OTHER_MAGIC: Final = {
    b"\x28\xb5\x2f\xfd": ("it is compressed with zstd", "give it through a pipe: zstd -dc IN | flowcheck inspect -"),
    b"\x34\xcd\xb2\xa1": ("it is a patched (Kuznetzov) pcap", "convert it: editcap -F pcap IN OUT"),
    b"\xa1\xb2\xcd\x34": ("it is a patched (Kuznetzov) pcap", "convert it: editcap -F pcap IN OUT"),
    b"snoop\0\0\0": ("it is a snoop capture", "convert it: editcap -F pcap IN OUT"),
}
PCAP: Final = (b"\xd4\xc3\xb2\xa1", b"\xa1\xb2\xc3\xd4", b"\x4d\x3c\xb2\xa1", b"\xa1\xb2\x3c\x4d")
HEAD: Final = 24
OFFLOAD: Final = (
    "capture behind a mirror port, not on a host that puts frames together (or there: ethtool -K eth0 gro off lro off "
    "gso off tso off), and while the job runs"
)


def scan(path: str | os.PathLike[str]) -> PcapInfo:
    """Walks all record headers of a pcap or pcapng file (either byte order, micro- or nanoseconds), of what is
    compressed with gzip, bzip2 or xz, and of what comes through a pipe ("-": standard input).

    Raises:
        CaptureFileError: unreadable, empty, not a capture of Ethernet frames, or without a single whole packet.
    """
    name = os.fspath(path)
    fd, note = open_capture(name)
    try:
        return scan_fd(name, fd, note)
    finally:
        os.close(fd)


def scan_fd(name: str, fd: int, note: str = "") -> PcapInfo:
    """The same of an open file; `name` is for messages, `note` says why more of it could not be had. The file position
    is not used."""
    status = os.fstat(fd)
    file = CaptureFile(name, fd, status)
    if not stat.S_ISREG(status.st_mode):
        file.refuse(0, "not a file with packets", "name a pcap or pcapng file")
    if file.size == 0:
        file.refuse(0, "the file is empty", "capture again; did tcpdump have the space and the rights to write?")
    start = file.read(0, HEAD)
    for magic, (what, remedy) in OTHER_MAGIC.items():
        if start.startswith(magic):
            file.refuse(0, what, remedy)
    if start[:4] in PCAP:
        info = _scan_pcap(file, start, note)
    elif start[:4] == b"\x0a\x0d\x0d\x0a":
        info = PcapngScan(file, note).run()
    elif len(start) < 4:
        file.refuse(0, f"the file has only {file.size} bytes", "capture again")
    else:
        file.refuse(0, f"unknown file type (it begins with {start[:4].hex(' ')})", "name a pcap or pcapng file")
    if info.packet_count == 0:
        found = [*(f"{count} skipped: {what}" for what, count in info.skipped.items()), info.left_out_why]
        file.refuse(
            file.size - info.left_out, f"no packets in this file that can be read ({'; '.join(filter(None, found))})"
            if any(found) else "no packets in this file",
            OFFLOAD if set(info.skipped) == {TOO_LONG}
            else "capture while the job runs, on the Ethernet interface itself: tcpdump -i eth0 instead of -i any",
        )
    return info


def _scan_pcap(file: CaptureFile, header: bytes, note: str) -> PcapInfo:
    if len(header) < HEAD:
        file.refuse(0, f"the file header is cut: {len(header)} of {HEAD} bytes", "capture again")
    order = "<" if header[:4] in (b"\xd4\xc3\xb2\xa1", b"\x4d\x3c\xb2\xa1") else ">"
    nanosecond = b"\x3c" in (header[1:2], header[2:3])
    major, minor, _zone, _accuracy, snaplen, link = struct.unpack_from(order + "HHIIII", header, 4)
    if (major, minor) != (2, 4):
        file.refuse(4, f"pcap version {major}.{minor}, 2.4 is expected", "convert it: editcap -F pcap IN OUT")
    link &= 0x03FFFFFF  # the upper bits say how long a frame check sequence is, if the frames carry one
    if link != ETHERNET:
        file.refuse(
            20, link_name(link),
            "capture on the Ethernet interface itself, for example tcpdump -i eth0 instead of -i any",
        )
    walk = _PcapWalk(file, order, 1_000_000_000 if nanosecond else 1_000_000, snaplen)
    end, why = walk.run()
    if walk.lies:
        walk.kept.patch(16, 20, struct.pack(order + "I", ANY_SNAPLEN))
    totals = walk.totals
    return PcapInfo(
        file.path, "pcap", ETHERNET, nanosecond, snaplen, totals.packets, totals.longest, totals.cut, totals.octets,
        file.size, file.mtime_ns, totals.skipped, file.size - end, why or note, walk.kept.parts(end, file.size),
    )


class _PcapWalk:
    """One pass over the records. lies: the header's snap length is less than what there is."""

    def __init__(self, file: CaptureFile, order: str, unit: int, snaplen: int) -> None:
        self.file, self.unit, self.snaplen = file, unit, snaplen or MAX_FRAME
        self.head = struct.Struct(order + "IIII")
        self.totals, self.kept, self.lies = Totals(), Selection(), False

    def run(self) -> tuple[int, str]:
        """(where reading ends, why not at the end of the file or "")."""
        offset = HEAD
        try:
            while offset < self.file.size:
                offset = self._piece(offset)
        except Damage as damage:
            if self.totals.packets == 0 and not self.totals.skipped and damage.offset == HEAD:
                raise
            return damage.offset, damage.what
        return offset, ""

    def _piece(self, offset: int) -> int:
        """Walk the records that begin in the piece at `offset`; where the next one begins. Raises Damage."""
        unpack, unit = self.head.unpack_from, self.unit
        most = MAX_FRAME if self.lies else min(self.snaplen, MAX_FRAME)
        piece = self.file.piece(offset)
        # A record that ends in the piece is whole; of one that does not only the last of the file may be cut.
        at, last, size = 0, len(piece) - 16, self.file.size - offset
        packets = octets = cut = 0
        longest = self.totals.longest
        try:
            while at <= last:
                _seconds, fraction, captured, original = unpack(piece, at)
                end = at + 16 + captured
                if captured > most or fraction >= unit or end > size:
                    if self._odd(offset + at, fraction, captured):
                        at = end
                        continue
                    most = MAX_FRAME if self.lies else most
                at = end
                packets += 1
                octets += captured
                if captured > longest:
                    longest = captured
                if captured != original:
                    cut += 1
            if at == 0:
                self.file.bad(offset, f"the file ends inside a record header ({len(piece)} of 16 bytes)")
        finally:
            totals = self.totals
            totals.packets += packets
            totals.octets += octets
            totals.cut += cut
            totals.longest = longest
        return offset + at

    def _odd(self, offset: int, fraction: int, captured: int) -> bool:
        """Is the record skipped? False: it is read all the same. Raises Damage if its header cannot be true."""
        file, end = self.file, offset + 16 + captured
        if captured > LONGEST:
            file.bad(offset, f"bad record header: a frame of {captured} bytes")
        if end > file.size:
            number = "the packet" if captured else "a record"
            file.bad(offset, f"the file ends inside {number} ({end - file.size} of {captured} bytes are missing)")
        if not self._follows(end):
            file.bad(offset, f"bad record header: {captured} bytes captured, and no record follows them")
        if captured > MAX_FRAME:
            self.totals.skip(TOO_LONG)
            self.kept.skip(offset, end)
            return True
        self.lies |= captured > self.snaplen
        return False

    def _follows(self, offset: int) -> bool:
        """May what begins there be a record?"""
        head = self.file.read(offset, 16)
        return len(head) < 16 or self.head.unpack(head)[2] <= LONGEST
