"""The dataplane's truncation check sees a frame cut inside an encapsulation, not only the outer lengths."""

from pathlib import Path
from typing import Any

import pytest

from dataplane.capture import PcapSource
from dataplane.reader import RingReader

INNER = bytes(12) + b"\x08\0\x45\0\0\x2e" + bytes(42)  # Ethernet, IPv4 of 46 bytes
HEADERS = {
    "gre": (47, b"\0\0\x65\x58"),
    "erspan2": (47, b"\x10\0\x88\xbe" + bytes(4) + b"\x10\0\0\1" + bytes(4)),
    "erspan2 cut": (47, b"\x10\0\x88\xbe" + bytes(4) + b"\x10\0\x04\1" + bytes(4)),
    "erspan3": (47, b"\x10\0\x22\xeb" + bytes(4) + b"\x20\0\0\1" + bytes(8)),
    "vxlan": (17, b"\xc0\0\x12\xb5" + bytes(4) + b"\x08" + bytes(7)),
    "gre of nothing known": (47, b"\0\0\x12\x34"),
}


def wrap(name: str, inner: bytes, six: bool) -> bytes:
    protocol, head = HEADERS[name]
    body = head + inner
    if six:
        ip = b"\x60\0\0\0" + len(body).to_bytes(2, "big") + bytes([protocol, 64]) + bytes(32)
        return bytes(12) + b"\x86\xdd" + ip + body
    ip = b"\x45\0" + (20 + len(body)).to_bytes(2, "big") + bytes(5) + bytes([protocol]) + bytes(10)
    return bytes(12) + b"\x08\0" + ip + body


@pytest.mark.parametrize("six", [False, True], ids=["v4", "v6"])
def test_truncated_inside_a_tunnel(eal: Any, captures: Any, tmp_path: Path, six: bool) -> None:
    cases = []
    for name in HEADERS:
        whole = wrap(name, INNER, six)
        known = name != "gre of nothing known"
        cases += [
            (whole, name == "erspan2 cut"),
            (whole + bytes(6), name == "erspan2 cut"),  # Ethernet padding behind the outer packet
            (whole[:-1], True),  # cut by the capture: the outer length tells
            (wrap(name, INNER[:-1], six), known),  # cut by the mirror: the outer lengths agree
            (wrap(name, INNER[:15], six), known),
            (wrap(name, b"", six), known),
        ]
    path = tmp_path / "cases.pcap"
    path.write_bytes(captures.pcap([captures.Record(data) for data, _ in cases]))
    with PcapSource(eal, path) as source:
        source.start()
        assert [(p.data, p.truncated) for p in RingReader(source.ring_address)] == cases
        assert source.counters()["truncated"] == sum(cut for _, cut in cases)


@pytest.mark.parametrize("six", [False, True], ids=["v4", "v6"])
def test_truncated_roce(eal: Any, captures: Any, tmp_path: Path, six: bool) -> None:
    """Frames of the short way, and those that just miss it: by a tag, IP options, their length, the port."""
    cases = []
    for port in (4791, 4789, 53):
        for size in (0, 1, 16, 80, 1000):
            udp = b"\xc0\0" + port.to_bytes(2, "big") + bytes(4) + bytes(size)
            ip = b"\x45\0" + (20 + len(udp)).to_bytes(2, "big") + bytes(5) + b"\x11" + bytes(10)
            options = b"\x46\0" + (24 + len(udp)).to_bytes(2, "big") + bytes(5) + b"\x11" + bytes(14)
            if six:
                ip = options = b"\x60\0\0\0" + len(udp).to_bytes(2, "big") + b"\x11\x40" + bytes(32)
            kind = b"\x86\xdd" if six else b"\x08\0"
            for head in (kind + ip, kind + options, b"\x81\0\0\1" + kind + ip):
                whole = bytes(12) + head + udp
                # A VXLAN header that is not there makes no tunnel, and so no truncation inside one.
                cases += [(whole, False), (whole + bytes(5), False), (whole[:-1], True), (whole[: 14 + 7], True)]
    path = tmp_path / "cases.pcap"
    path.write_bytes(captures.pcap([captures.Record(data) for data, _ in cases]))
    with PcapSource(eal, path) as source:
        source.start()
        assert [(p.data, p.truncated) for p in RingReader(source.ring_address)] == cases


def test_seven_tags_are_not_looked_behind(eal: Any, captures: Any, tmp_path: Path) -> None:
    """The decoder calls such a frame malformed: whether it is cut is not asked either."""
    frames = [(bytes(12) + b"\x81\0\0\1" * tags + INNER[12:-1], tags < 7) for tags in (0, 1, 6, 7)]
    path = tmp_path / "tags.pcap"
    path.write_bytes(captures.pcap([captures.Record(data) for data, _ in frames]))
    with PcapSource(eal, path) as source:
        source.start()
        assert [(p.data, p.truncated) for p in RingReader(source.ring_address)] == frames
