"""Capture files written byte by byte, so that they can be wrong on purpose; one Eal per process."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import random
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dataplane.counters import PF_EXITING

from ..links import wait_for_links

pydpdk = pytest.importorskip("dataplane.pydpdk", reason="the DPDK binding was not built")

SHARED = Path(__file__).resolve().parents[3] / "shared" / "captures"


def threads() -> dict[int, str]:
    """This process's threads by number, without those that have been joined and are only not off the list yet."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if not int(fields.split()[6]) & PF_EXITING:
                found[int(task.name)] = name
    return found


def wait_until(condition: Callable[[], object], state: Callable[[], object] = lambda: "") -> None:
    """Until condition() is true. Fails after two minutes, with what state() says."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, state()
        time.sleep(0.001)


@dataclass(frozen=True)
class Record:
    """One packet of a capture file. length: on the wire, None: as captured."""

    data: bytes
    seconds: int = 1_700_000_000
    nanoseconds: int = 0
    length: int | None = None
    interface: int = 0

    @property
    def wire(self) -> int:
        return len(self.data) if self.length is None else self.length


def ipv4_frame(size: int, rng: random.Random) -> bytes:
    """An Ethernet/IPv4/UDP frame of `size` bytes whose IP length agrees, payload random."""
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, size - 14, 0, 0, 64, 17, 0, b"\x0a\0\0\1", b"\x0a\0\0\2")
    return bytes(6) + b"\2\0\0\0\0\1" + b"\x08\0" + ip + rng.randbytes(size - 34)


def make_records(
    count: int, sizes: Sequence[int] = (60, 64, 1082, 1500, 4170), seed: int = 1
) -> list[Record]:
    rng = random.Random(seed)
    return [
        Record(ipv4_frame(rng.choice(sizes), rng), 1_700_000_000 + i // 1000, i % 1000 * 1_000_000 + i)
        for i in range(count)
    ]


def pcap_bytes(
    records: Sequence[Record], *, order: str = "<", nano: bool = False, snaplen: int = 65535, link: int = 1
) -> bytes:
    head = struct.pack(order + "IHHIIII", 0xA1B23C4D if nano else 0xA1B2C3D4, 2, 4, 0, 0, snaplen, link)
    return head + b"".join(
        struct.pack(
            order + "IIII", r.seconds, r.nanoseconds if nano else r.nanoseconds // 1000, len(r.data), r.wire
        )
        + r.data
        for r in records
    )


def block(order: str, kind: int, body: bytes) -> bytes:
    body += bytes(-len(body) % 4)
    return struct.pack(order + "II", kind, len(body) + 12) + body + struct.pack(order + "I", len(body) + 12)


def section_block(order: str) -> bytes:
    return block(order, 0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1))


def interface_block(order: str, *, link: int = 1, snaplen: int = 65535, resolution: int = 6) -> bytes:
    option = struct.pack(order + "HHBxxxHH", 9, 1, resolution, 0, 0)
    return block(order, 1, struct.pack(order + "HHI", link, 0, snaplen) + option)


def packet_block(order: str, record: Record, *, resolution: int = 6) -> bytes:
    ticks = (record.seconds * 10**9 + record.nanoseconds) // 10 ** (9 - resolution)
    fields = (record.interface, ticks >> 32, ticks & 0xFFFFFFFF, len(record.data), record.wire)
    return block(order, 6, struct.pack(order + "IIIII", *fields) + record.data)


def pcapng_bytes(
    records: Sequence[Record],
    *,
    order: str = "<",
    interfaces: int = 1,
    resolution: int = 6,
    noise: bool = True,
) -> bytes:
    """With noise: a block of unknown kind before every seventh packet and interface statistics at the end."""
    out = [section_block(order)] + [interface_block(order, resolution=resolution)] * interfaces
    for i, record in enumerate(records):
        if noise and i % 7 == 0:
            out.append(block(order, 0x0BAD, b"?" * (i % 23)))
        out.append(packet_block(order, record, resolution=resolution))
    if noise:
        out.append(block(order, 5, struct.pack(order + "III", 0, 0, 0)))
    return b"".join(out)


FORMATS: dict[str, Callable[[Sequence[Record]], bytes]] = {
    "pcap": pcap_bytes,
    "pcap-big-endian": lambda records: pcap_bytes(records, order=">"),
    "pcap-nanoseconds": lambda records: pcap_bytes(records, nano=True),
    "pcap-nanoseconds-big-endian": lambda records: pcap_bytes(records, nano=True, order=">"),
    "pcap-no-snaplen": lambda records: pcap_bytes(records, snaplen=0),
    "pcapng": pcapng_bytes,
    "pcapng-big-endian": lambda records: pcapng_bytes(records, order=">"),
    "pcapng-nanoseconds": lambda records: pcapng_bytes(records, resolution=9),
    "pcapng-two-interfaces": lambda records: pcapng_bytes(
        [Record(r.data, r.seconds, r.nanoseconds, r.length, i % 2) for i, r in enumerate(records)],
        interfaces=2,
    ),
    "pcapng-two-sections": lambda records: (
        pcapng_bytes(records[: len(records) // 2]) + pcapng_bytes(records[len(records) // 2 :])
    ),
}


class Captures:
    """What tests need from this file: importlib mode lets test modules import no neighbours."""

    Record = Record
    formats = FORMATS
    records = staticmethod(make_records)
    frame = staticmethod(ipv4_frame)
    pcap = staticmethod(pcap_bytes)
    pcapng = staticmethod(pcapng_bytes)
    block = staticmethod(block)
    section = staticmethod(section_block)
    interface = staticmethod(interface_block)
    packet = staticmethod(packet_block)


@pytest.fixture(scope="session")
def captures() -> type[Captures]:
    return Captures


@pytest.fixture(params=sorted(FORMATS))
def file_format(request: pytest.FixtureRequest) -> Callable[[Sequence[Record]], bytes]:
    """Every kind of capture file there is."""
    return FORMATS[request.param]


@pytest.fixture
def eal() -> Iterator[pydpdk.Eal]:
    """The process's Eal; whatever a test left open on it is closed.

    Started as in tests/conftest.py: DPDK starts once per process, and either folder may come first.
    """
    with pydpdk.Eal.start(memory_mb=256, huge=False) as running:
        yield running


DUMPS = {
    "copy": (0, 0),
    "hold": (0, 0),
    "dma-1": (1, 1),
    "dma-2": (2, 1024),
    "dma-4": (4, 64),
}


@pytest.fixture(params=DUMPS)
def dump(request: pytest.FixtureRequest, eal: pydpdk.Eal) -> Callable[[], dict[str, Any]]:
    """dump() -> the keywords that choose a strategy, with engines of its own each time it is called.

    dma: 1, 2 and 4 engines; all pieces to an engine, those of 1 KB and more, those of 64 bytes and more.
    """
    engines, minimum = DUMPS[request.param]
    numbers = itertools.count()

    def choose() -> dict[str, Any]:
        if not engines:
            return {"dump": request.param}
        devices = tuple(pydpdk.DmaDevice(eal, f"dma_skeleton{next(numbers)}") for _ in range(engines))
        return {"dump": "dma", "engines": devices, "dma_minimum": minimum}

    return choose


@pytest.fixture(params=DUMPS)
def live_dump(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The same choice as keywords of LiveConfig."""
    engines, minimum = DUMPS[request.param]
    if not engines:
        return {"dump": request.param}
    return {"dump": "dma", "engines": ("dma_skeleton",) * engines, "dma_minimum": minimum}


CLONE_NEWNET = 0x40000000


class Veth:
    """Two connected interfaces in a network namespace that only this thread is in."""

    near, far = "flowcheck0", "flowcheck1"

    def __init__(self, mtu: int) -> None:
        for where in ("all", "default"):  # no packet but ours
            Path(f"/proc/sys/net/ipv6/conf/{where}/disable_ipv6").write_text("1")
        self.ip("link", "add", self.near, "mtu", str(mtu), "type", "veth", "peer", "name", self.far, "mtu", str(mtu))
        self.up()
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        self.socket.bind((self.far, 0))

    def up(self) -> None:
        """Both ends; frames that are sent from now on arrive."""
        for end in (self.near, self.far):
            self.ip("link", "set", end, "up")
        wait_for_links(self.ip, self.near, self.far)

    def ip(self, *words: str) -> str:
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout

    def send(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            self.socket.send(frame)

    def transmitted(self, interface: str) -> int:
        link = json.loads(self.ip("-json", "-stats", "link", "show", interface))[0]
        return int(link["stats64"]["tx"]["packets"])


@pytest.fixture
def veth() -> Iterator[Callable[..., Veth]]:
    """veth(mtu=9000) -> a pair. The namespace and all in it vanish with the test."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a network namespace")
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    made: list[Veth] = []

    def make(mtu: int = 9000) -> Veth:
        if libc.unshare(CLONE_NEWNET) != 0:
            pytest.skip(f"no network namespaces here: {os.strerror(ctypes.get_errno())}")
        try:
            made.append(Veth(mtu))
        except (OSError, subprocess.CalledProcessError) as exc:
            pytest.skip(f"no veth pairs here: {exc}")
        return made[-1]

    try:
        yield make
    finally:
        for pair in made:
            pair.socket.close()
        assert libc.setns(home, CLONE_NEWNET) == 0
        os.close(home)


@pytest.fixture(scope="session")
def shared_captures() -> list[Path]:
    found = sorted(SHARED.glob("*/*.pcap*"))
    if not found:
        pytest.skip(f"the shared captures are not at {SHARED}")
    return found
