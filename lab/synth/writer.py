"""Capture files: nanosecond pcap, or pcapng when the name ends in .pcapng. Never half of one.

Any thread; one writer per path.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path

from flowcheck.durable import write_atomic

__all__ = ["write_capture"]

_ETHERNET = 1


def write_capture(path: str | os.PathLike[str], packets: Iterable[tuple[int, bytes]]) -> None:
    """Write (nanoseconds since 1970, frame) pairs. Raises EnvironmentProblem if that cannot be done."""
    form = _pcapng if os.fspath(path).endswith(".pcapng") else _pcap
    write_atomic(Path(path), b"".join(form(packets)))


def _pcap(packets: Iterable[tuple[int, bytes]]) -> Iterable[bytes]:
    yield struct.pack("<IHHIIII", 0xA1B23C4D, 2, 4, 0, 0, 262144, _ETHERNET)
    for time, frame in packets:
        yield struct.pack("<IIII", time // 10**9, time % 10**9, len(frame), len(frame)) + frame


def _pcapng(packets: Iterable[tuple[int, bytes]]) -> Iterable[bytes]:
    def block(kind: int, body: bytes) -> bytes:
        size = len(body) + 12
        return struct.pack("<II", kind, size) + body + struct.pack("<I", size)

    yield block(0x0A0D0D0A, struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1))
    resolution = struct.pack("<HHB3x", 9, 1, 9) + struct.pack("<HH", 0, 0)
    yield block(1, struct.pack("<HHI", _ETHERNET, 0, 262144) + resolution)
    for time, frame in packets:
        header = struct.pack("<IIIII", 0, time >> 32, time & 0xFFFFFFFF, len(frame), len(frame))
        yield block(6, header + frame + bytes(-len(frame) % 4))
