"""What a switch does to a frame on its way to the collector: rewrites headers, cuts, encapsulates.

    Mirror(wrap="erspan2", session=7).deliver(frame, number) -> bytes

Only fields that the invariant CRC masks are rewritten (VLAN tag, TTL or hop limit, DSCP/ECN, IPv4 checksum).
Sources: RFC 2784/2890 (GRE), RFC 7348 (VXLAN), draft-foschiano-erspan-03; reference switches.md section 1.
Pure function of mirror, frame and number; any thread.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

from lab.synth.packets import checksummed

__all__ = ["WRAPS", "Mirror"]

WRAPS = ("", "gre", "erspan1", "erspan2", "erspan3", "vxlan")

_SWITCH, _COLLECTOR = b"\x02\xfd\0\0\0\x01", b"\x02\xfd\0\0\0\x02"


@dataclass(frozen=True)
class Mirror:
    """wrap: one of WRAPS. ipv6: the outer header. session: ERSPAN session, GRE key or VXLAN network.
    tag: an 802.1Q tag around the outer header. truncate: bytes kept of each mirrored frame, 0 for all (ERSPAN
    then sets its T bit, the others have none). rewrite: VLAN tags pushed or stripped, TTL and ECN changed."""

    wrap: str = ""
    ipv6: bool = False
    session: int = 1
    tag: int | None = None
    truncate: int = 0
    rewrite: bool = False

    @property
    def any(self) -> bool:
        return bool(self.wrap or self.truncate or self.rewrite)

    def deliver(self, frame: bytes, number: int) -> bytes:
        """The mirror's copy of the number-th frame."""
        if self.rewrite:
            frame = _rewrite(frame, random.Random(number))
        cut = 0 < self.truncate < len(frame)
        if cut:
            frame = frame[:self.truncate]
        if not self.wrap:
            return frame
        body = self._headers(len(frame), number, cut) + frame
        protocol = 17 if self.wrap == "vxlan" else 47
        if self.ipv6:
            outer = struct.pack(">IHBB", 6 << 28, len(body), protocol, 60) + b"\xfd" + bytes(14) + b"\x01" \
                + b"\xfd" + bytes(14) + b"\x02"
        else:
            outer = checksummed(struct.pack(
                ">BBHHHBBH", 0x45, 0, 20 + len(body), number & 0xFFFF, 0x4000, 60, protocol, 0,
            ) + b"\xac\x10\0\x01\xac\x10\0\x02")
        tag = b"" if self.tag is None else struct.pack(">HH", 0x8100, self.tag)
        kind = 0x86DD if self.ipv6 else 0x0800
        return _COLLECTOR + _SWITCH + tag + struct.pack(">H", kind) + outer + body

    def _headers(self, length: int, number: int, cut: bool) -> bytes:
        if self.wrap == "vxlan":
            udp = struct.pack(">HHHH", 0xC000 | number & 0xFFF, 4789, 16 + length, 0)
            return udp + struct.pack(">II", 0x08000000, self.session << 8)
        if self.wrap == "gre":  # with a key, without a sequence number
            return struct.pack(">HHI", 0x2000, 0x6558, self.session)
        if self.wrap == "erspan1":
            return struct.pack(">HH", 0, 0x88BE)
        flags = int(cut) << 10 | self.session & 0x3FF
        if self.wrap == "erspan2":
            return struct.pack(">HHIHHI", 0x1000, 0x88BE, number, 1 << 12 | 100, 3 << 11 | flags, 5)
        # every other frame with the optional platform subheader
        last = 6 << 4 | 2 << 1 | number & 1
        head = struct.pack(">HHIHHIHH", 0x1000, 0x22EB, number, 2 << 12 | 100, flags, number * 100, 0, last)
        return head + (bytes([0x0C]) + bytes(7) if number & 1 else b"")


def _rewrite(frame: bytes, rng: random.Random) -> bytes:
    at = 18 if frame[12:14] == b"\x81\0" else 14
    kind, packet = frame[at - 2:at], bytearray(frame[at:])
    if kind == b"\x08\0":
        packet[1] = rng.randrange(256)
        packet[8] = rng.randrange(1, 256)
        packet[:20] = checksummed(bytes(packet[:10]) + b"\0\0" + bytes(packet[12:20]))
    else:
        first = struct.unpack(">I", packet[:4])[0]
        packet[:4] = struct.pack(">I", first & ~0xFFFFFFF | rng.randrange(1 << 28))
        packet[7] = rng.randrange(1, 256)
    tags = b"".join(struct.pack(">HH", kind, rng.randrange(1 << 16)) for kind in ((), (0x8100,), (0x88A8, 0x8100))[
        rng.randrange(3)
    ])
    return frame[:12] + tags + kind + bytes(packet)
