"""RoCEv2 frames: Ethernet (VLAN or not), IPv4 or IPv6, UDP 4791, BTH and its extensions, ICRC.

    Path(src, dst).frame(opcode, qpn, psn, extension, payload) -> bytes

A Path holds everything constant between two hosts for one QP pair and one direction. The CRC of the
constant, masked headers is kept per UDP length, so a frame costs two zlib.crc32 calls.
Source: reference icrc.md, nccl-wire.md 5.8. Not thread safe (it keeps the cache).
"""

from __future__ import annotations

import ipaddress
import struct
import zlib
from dataclasses import dataclass

__all__ = [
    "ACK", "Endpoint", "Path", "WRITE_FIRST", "WRITE_LAST", "WRITE_LAST_IMM", "WRITE_MIDDLE", "WRITE_ONLY",
    "WRITE_ONLY_IMM", "checksummed", "udp_source_port",
]

WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST, WRITE_LAST_IMM, WRITE_ONLY, WRITE_ONLY_IMM = 6, 7, 8, 9, 10, 11
ACK = 17

ROCE_PORT = 4791
_CLASS, _HOPS = 2, 64  # DSCP and ECN byte; TTL or hop limit. The ICRC does not cover them
_MIGRATED = 0x40  # BTH byte 1: MigReq, as every RoCE NIC sets it


@dataclass(frozen=True)
class Endpoint:
    """A host's port: MAC as 6 bytes and IP address text."""

    mac: bytes
    address: str


def udp_source_port(a: int, b: int) -> int:
    """Source port the Linux kernel derives from a connection's two QP numbers, equal in both directions."""
    v = a * b
    v ^= v >> 20
    v ^= v >> 40
    label = v & 0xFFFFF
    return ((label & 0x3FFF) ^ (label >> 14)) | 0xC000


def checksummed(header: bytes) -> bytes:
    """An IPv4 header of 20 bytes with its checksum in place of the two zeros that stand there."""
    total = sum(struct.unpack(">10H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return header[:10] + struct.pack(">H", ~total & 0xFFFF) + header[12:]


class Path:
    """Frames from one host to another for one QP pair. vlan: 802.1Q tag control word or None."""

    def __init__(self, src: Endpoint, dst: Endpoint, port: int, *, vlan: int | None = None) -> None:
        self._src, self._dst = ipaddress.ip_address(src.address), ipaddress.ip_address(dst.address)
        self._port = port
        kind = 0x0800 if self._src.version == 4 else 0x86DD
        tag = b"" if vlan is None else struct.pack(">HH", 0x8100, vlan)
        self._ethernet = dst.mac + src.mac + tag + struct.pack(">H", kind)
        self._known: dict[int, tuple[bytes, int]] = {}

    def frame(
        self, opcode: int, qpn: int, psn: int, extension: bytes = b"", payload: bytes = b"", *,
        ack_request: bool = False,
    ) -> bytes:
        """One frame, padded and with its ICRC; `extension`: the headers after the BTH (RETH and so on)."""
        pad = -len(payload) % 4
        rest = extension + payload + bytes(pad)
        headers, crc = self._headers(8 + 12 + len(rest) + 4)
        first = struct.pack(">BBH", opcode, _MIGRATED | pad << 4, 0xFFFF)
        last = struct.pack(">I", ack_request << 31 | psn)
        qp = qpn.to_bytes(3, "big")
        crc = zlib.crc32(rest, zlib.crc32(first + b"\xff" + qp + last, crc))
        return b"".join((headers, first, b"\0", qp, last, rest, crc.to_bytes(4, "little")))

    def _headers(self, udp_length: int) -> tuple[bytes, int]:
        if udp_length not in self._known:
            udp = struct.pack(">HHH", self._port, ROCE_PORT, udp_length)
            addresses = self._src.packed + self._dst.packed
            if self._src.version == 4:
                def ip(tos: int, ttl: int, checksum: int) -> bytes:
                    return struct.pack(
                        ">BBHHHBBH", 0x45, tos, 20 + udp_length, 0, 0x4000, ttl, 17, checksum
                    ) + addresses
                header, masked = checksummed(ip(_CLASS, _HOPS, 0)), ip(0xFF, 0xFF, 0xFFFF)
            else:
                rest = struct.pack(">HB", udp_length, 17)
                first = struct.pack(">I", 6 << 28 | _CLASS << 20)
                header = first + rest + bytes([_HOPS]) + addresses
                masked = struct.pack(">I", 6 << 28 | 0xFFFFFFF) + rest + b"\xff" + addresses
            crc = zlib.crc32(b"\xff" * 8 + masked + udp + b"\xff\xff")
            self._known[udp_length] = (self._ethernet + header + udp + b"\0\0", crc)
        return self._known[udp_length]
