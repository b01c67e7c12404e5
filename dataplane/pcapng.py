"""The blocks of a pcapng file: which packets a port will bring, and what must be left out or set right for libpcap.

    | section header | interface* | { packet | statistics | names | ... }* |   and again, section by section

libpcap wants every interface to have the snap length and the link type of the first; mergecap writes what each had.
So snap lengths are set to one value where they differ or are less than what there is, and packets of interfaces
that are not Ethernet are skipped and counted. Blocks are copied as they are; block 3 (a packet without an interface)
has no length of its own under a snap length, so it becomes a block 6 where snap lengths are changed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from dataplane.capturefile import (
    ANY_SNAPLEN,
    ETHERNET,
    MAX_FRAME,
    TOO_LONG,
    CaptureFile,
    Damage,
    PcapInfo,
    Selection,
    Totals,
    link_name,
)

__all__ = ["PcapngScan"]

MAX_BLOCK: Final = 16 << 20  # libpcap refuses larger ones
SECTION, INTERFACE, OLD_PACKET, SIMPLE_PACKET, PACKET = 0x0A0D0D0A, 1, 2, 3, 6
WITH_PACKETS: Final = (OLD_PACKET, SIMPLE_PACKET, PACKET)


@dataclass(frozen=True, slots=True)
class _Interface:
    offset: int  # of its block
    link: int
    snaplen: int


class PcapngScan:
    """One pass over the blocks. note: why no more of the file could be had."""

    def __init__(self, file: CaptureFile, note: str = "") -> None:
        self.file, self.note = file, note
        self.order = "<"
        self.interfaces: list[_Interface] = []  # of the current section
        self.all: list[_Interface] = []
        self.simple: list[tuple[int, int, int, int]] = []  # offset, total length, captured, original
        self.nanosecond = self.lies = False
        self.totals, self.kept = Totals(), Selection()

    def run(self) -> PcapInfo:
        end, why = self._walk()
        file, totals = self.file, self.totals
        if self.lies or len({(one.link, one.snaplen) for one in self.all}) > 1:
            self._set_right()
        return PcapInfo(
            file.path, "pcapng", ETHERNET, self.nanosecond, self.all[0].snaplen if self.all else 0, totals.packets,
            totals.longest, totals.cut, totals.octets, file.size, file.mtime_ns, totals.skipped, file.size - end,
            why or self.note, self.kept.parts(end, file.size),
        )

    def _walk(self) -> tuple[int, str]:
        """(where reading ends, why not at the end of the file or "")."""
        offset = 0
        try:
            piece, base = b"", 0
            while offset < self.file.size:
                at = offset - base
                if at + 12 > len(piece):
                    piece, base, at = self.file.piece(offset), offset, 0
                    if len(piece) < 12:
                        self.file.bad(offset, f"the file ends inside a block header ({len(piece)} of 12 bytes)")
                if piece[at : at + 4] == b"\x0a\x0d\x0d\x0a":
                    self._byte_order(offset, piece[at + 8 : at + 12])
                kind, total = struct.unpack_from(self.order + "II", piece, at)
                self._check_length(offset, total)
                if total <= MAX_BLOCK:
                    if at + total > len(piece):
                        piece, base, at = self.file.piece(offset, total), offset, 0
                    self._check_trailer(offset, total, piece[at + total - 4 : at + total])
                    self._block(kind, offset, piece, at, total)
                else:
                    self._check_trailer(offset, total, self.file.read(offset + total - 4, 4))
                    if kind in WITH_PACKETS:
                        self.totals.skip(f"packet block over {MAX_BLOCK >> 20} MiB")
                    self.kept.skip(offset, offset + total)
                offset += total
        except Damage as damage:
            if not self.totals.packets and not self.totals.skipped:
                raise
            return damage.offset if damage.offset < offset else offset, damage.what
        return offset, ""

    def _byte_order(self, offset: int, magic: bytes) -> None:
        orders = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
        if magic not in orders:
            self.file.bad(offset + 8, f"bad byte-order magic {magic.hex(' ')} in a pcapng section header")
        if offset and orders[magic] != self.order:
            self.file.bad(offset, "sections of both byte orders in one file", "convert it: editcap IN OUT")
        self.order = orders[magic]

    def _check_length(self, offset: int, total: int) -> None:
        if total < 12 or total % 4:
            self.file.bad(offset, f"bad block length {total}: it must be a multiple of 4, at least 12")
        if total > self.file.size - offset:
            missing = total - (self.file.size - offset)
            self.file.bad(offset, f"the file ends inside a block ({missing} of {total} bytes are missing)")

    def _check_trailer(self, offset: int, total: int, trailer: bytes) -> None:
        (again,) = struct.unpack(self.order + "I", trailer)
        if again != total:
            self.file.bad(offset, f"block lengths disagree: {total} before and {again} after the block")

    def _block(self, kind: int, offset: int, piece: bytes, at: int, total: int) -> None:
        """One whole block, `piece[at : at + total]`."""
        if kind == PACKET:  # nearly all of a file
            if total >= 32:
                interface, _hi, _lo, captured, original = struct.unpack_from(self.order + "IIIII", piece, at + 8)
                self._count(offset, total, interface, captured, original, total - 32)
            else:
                self._skip(offset, total, "packet block that is too short")
        elif kind in (SECTION, INTERFACE, OLD_PACKET, SIMPLE_PACKET):
            self._other(kind, offset, total, piece[at + 8 : at + total - 4])

    def _skip(self, offset: int, total: int, what: str) -> None:
        self.totals.skip(what)
        self.kept.skip(offset, offset + total)

    def _count(self, offset: int, total: int, interface: int, captured: int, original: int, room: int) -> bool:
        """A packet that will be brought, or is skipped by what it is (False)."""
        if interface >= len(self.interfaces):
            self._skip(offset, total, "packet of an interface that is not described")
        elif (link := self.interfaces[interface].link) != ETHERNET:
            self._skip(offset, total, link_name(link))
        elif captured > room:
            self._skip(offset, total, "packet block that says more bytes than it has")
        elif captured > MAX_FRAME:
            self._skip(offset, total, TOO_LONG)
        else:
            self.lies |= 0 < self.interfaces[0].snaplen < captured
            self.totals.add(captured, original)
            return True
        return False

    def _other(self, kind: int, offset: int, total: int, body: bytes) -> None:
        if kind == SECTION:
            self._section(offset, body)
        elif kind == INTERFACE:
            self._interface(offset, body)
        elif kind == OLD_PACKET and len(body) >= 20:
            interface, _drops, _hi, _lo, captured, original = struct.unpack_from(self.order + "HHIIII", body)
            self._count(offset, total, interface, captured, original, len(body) - 20)
        elif kind == SIMPLE_PACKET and len(body) >= 4:
            (original,) = struct.unpack_from(self.order + "I", body)
            limit = self.interfaces[0].snaplen if self.interfaces else 0
            captured = min(original, limit or original)
            if self._count(offset, total, 0, captured, original, len(body) - 4):
                self.simple.append((offset, total, captured, original))
        else:
            self._skip(offset, total, "packet block that is too short")

    def _section(self, offset: int, body: bytes) -> None:
        if len(body) < 16:
            self.file.bad(offset, f"a section header of {len(body) + 12} bytes is too short")
        major, minor = struct.unpack_from(self.order + "HH", body, 4)
        if major != 1 or minor not in (0, 2):
            self.file.bad(offset, f"pcapng version {major}.{minor}, 1.0 is expected")
        self.interfaces = []

    def _interface(self, offset: int, body: bytes) -> None:
        if len(body) < 8:
            self.file.bad(offset, f"an interface block of {len(body) + 12} bytes is too short")
        link, _reserved, snaplen = struct.unpack_from(self.order + "HHI", body)
        self._options(offset, body)
        self.interfaces.append(_Interface(offset, link, snaplen))
        self.all.append(self.interfaces[-1])

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

    def _set_right(self) -> None:
        """All interfaces alike. Block 3 becomes a block 6 of the first interface, without a time, as it had none."""
        for one in self.all:
            self.kept.patch(
                one.offset + 8, one.offset + 16, struct.pack(self.order + "HHI", ETHERNET, 0, ANY_SNAPLEN)
            )
        for offset, total, captured, original in self.simple:
            size = total + 16
            head = struct.pack(self.order + "IIIIIII", PACKET, size, 0, 0, 0, captured, original)
            self.kept.patch(offset, offset + 12, head)
            self.kept.patch(offset + total - 4, offset + total, struct.pack(self.order + "I", size))
