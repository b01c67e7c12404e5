"""The generator against captures of real NCCL: ConnectX NICs and the kernel's soft-RoCE.

A manifest of the captured job is written by hand, the job synthesised with the same QP numbers, and every
data packet compared: opcode, PSN, slot address relative to the region, RETH length, immediate, payload; and
every CTS: length, announced size, number, and that it names its message's address.
"""

from __future__ import annotations

import ipaddress
import struct
from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowcheck.job.model import Collective, Collectives, Communicator, Flow, Job
from lab.synth import TransportOptions, generate
from lab.synth.families import Family, family_of
from lab.synth.values import generate_values

CAPTURES = Path(__file__).resolve().parents[4] / "shared" / "captures"
pytestmark = pytest.mark.captures


@dataclass
class Packet:
    src: str
    opcode: int
    qpn: int
    psn: int
    reth: tuple[int, int, int] | None
    imm: bytes | None
    payload: bytes


def parse(frame: bytes) -> Packet | None:
    kind = struct.unpack_from(">H", frame, 12)[0]
    if kind == 0x0800 and frame[23] == 17:
        src, udp = ".".join(str(b) for b in frame[26:30]), 34
    elif kind == 0x86DD and frame[20] == 17:
        src, udp = frame[22:38].hex(), 54
    else:
        return None
    if struct.unpack_from(">H", frame, udp + 2)[0] != 4791:
        return None
    end = udp + struct.unpack_from(">H", frame, udp + 4)[0] - 4
    opcode, flags = frame[udp + 8], frame[udp + 9]
    qpn, psn = (struct.unpack_from(">I", frame, udp + 8 + at)[0] & 0xFFFFFF for at in (4, 8))
    at, reth, imm = udp + 20, None, None
    if opcode in (6, 10, 11):
        reth = struct.unpack_from(">QII", frame, at)
        at += 16
    if opcode in (9, 11):
        imm = frame[at:at + 4]
        at += 4
    return Packet(src, opcode, qpn, psn, reth, imm, frame[at:end - (flags >> 4 & 3)])


def writes(frames: list[bytes]) -> dict[tuple[str, int], list[Packet]]:
    """WRITE packets by (source address, QP) in PSN order, each PSN once."""
    found: dict[tuple[str, int], dict[int, Packet]] = defaultdict(dict)
    for frame in frames:
        packet = parse(frame)
        if packet is not None and 6 <= packet.opcode <= 11:
            found[packet.src, packet.qpn].setdefault(packet.psn, packet)
    return {key: [packets[psn] for psn in sorted(packets)] for key, packets in found.items()}


def is_cts(packets: list[Packet], family: Family) -> bool:
    return all(p.opcode == 10 and len(p.payload) == family.cts_bytes for p in packets)


def headers(packets: list[Packet]) -> list[tuple[Any, ...]]:
    """Everything about data packets but region base and rkey."""
    base = next(p.reth[0] for p in packets if p.reth and p.reth[2])
    return [
        (p.opcode, p.psn, len(p.payload), p.imm, None if p.reth is None else
         (p.reth[0] - base if p.reth[0] else None, p.reth[2]))
        for p in packets
    ]


def cts(packets: list[Packet], family: Family, ignore: Set[str]) -> list[tuple[Any, ...]]:
    """A flow's CTS writes: PSN, FIFO slot and address from the first, the element's fields but `ignore`."""
    found = []
    (origin,) = struct.unpack_from("<Q", packets[0].payload)
    fifo = packets[0].reth[0]  # type: ignore[index]
    for p in packets:
        (address,) = struct.unpack_from("<Q", p.payload)
        fields = {
            name: int.from_bytes(p.payload[at:at + width], "little")
            for name, (at, width) in family.cts_fields.items() if name not in ignore | {"addr", "rkey"}
        }
        assert p.reth is not None
        found.append((p.psn, p.reth[0] - fifo, address - origin, *sorted(fields.items())))
    return found


def read_capture(path: Path) -> list[bytes]:
    """Frames of a little-endian pcap or pcapng file."""
    raw = path.read_bytes()
    frames = []
    if raw[:4] == b"\n\r\r\n":
        at = 0
        while at < len(raw):
            kind, size = struct.unpack_from("<II", raw, at)
            if kind == 6:
                held = struct.unpack_from("<I", raw, at + 20)[0]
                frames.append(raw[at + 28:at + 28 + held])
            at += size
        return frames
    at = 24
    while at < len(raw):
        held = struct.unpack_from("<I", raw, at + 8)[0]
        frames.append(raw[at + 16:at + 16 + held])
        at += 16 + held
    return frames


def frames_of(name: str) -> list[bytes]:
    path = CAPTURES / name
    if not path.exists():
        pytest.skip(f"shared capture not found: {path}")
    return read_capture(path)


def compare(
    real: list[bytes], made: list[bytes], family: Family, ignore: Set[str] = frozenset(),
) -> dict[tuple[str, int], list[Packet]]:
    """Every flow of `made` is in `real` with the same packets; returns the real data flows."""
    theirs, ours = writes(real), writes(made)
    announcements = defaultdict(list)
    for (src, _), packets in theirs.items():
        if is_cts(packets, family):
            announcements[src].append(cts(packets, family, ignore))
    data = {}
    for (src, qpn), packets in ours.items():
        if is_cts(packets, family):
            assert cts(packets, family, ignore) in announcements[src]
        else:
            assert headers(packets) == headers(theirs[src, qpn]), (src, hex(qpn))
            data[src, qpn] = theirs[src, qpn]
    assert data
    return data


@pytest.mark.parametrize(("name", "ranks", "count", "seed", "qpns", "options"), [
    ("02_nccl_ring2", 2, 131072, 102, [[0x2B], [0x2B]], {}),
    ("03_nccl_ring4", 4, 131072, 103, [[0x2D], [0x14], [0x14], [0x2C]], {}),
    ("05_nccl_ring4_ar_qps4", 4, 100003, 105,
     [[0x34, 0x35, 0x36, 0x37], [0x1B, 0x1C, 0x1D, 0x1E], [0x1B, 0x1C, 0x1D, 0x1E], [0x34, 0x35, 0x36, 0x37]],
     {"adaptive_routing": True, "qps_per_connection": 4, "split_data_on_qps": True}),
    ("07_nccl_ring4_mtu1024", 4, 100003, 107, None, {"mtu": 1024}),
])
def test_soft_roce(
    name: str, ranks: int, count: int, seed: int, qpns: list[list[int]] | None, options: dict[str, Any],
) -> None:
    """NCCL 2.27.7's transport: all packets of all ranks, payloads included."""
    real = frames_of(f"soft-roce/{name}.pcap")
    family = family_of("2.27.7")
    if qpns is None:
        flows = writes(real)
        found = {src: qpn for (src, qpn), packets in flows.items() if not is_cts(packets, family)}
        qpns = [[found[f"10.77.0.{rank + 1}"]] for rank in range(ranks)]
    job = Job(
        Communicator(ranks, "2.27.7", "simple", **options),
        [
            Flow(r, (r + 1) % ranks, 0, f"10.77.0.{r + 1}", f"10.77.0.{(r + 1) % ranks + 1}", qpns[r])
            for r in range(ranks)
        ],
        Collectives(
            iteration_0=[Collective("AllReduce", count)], steady=[Collective("AllReduce", count)],
        ),
    )
    job.communicator.buffer_bytes["simple"] = 262144
    iterations = 2 if ranks == 2 else 1
    made = generate(
        job, iterations=iterations, ports=range(ranks), directions="out",
        gradients=lambda iteration, _, rank: generate_values("float32", seed + iteration, rank, count),
    )
    # The capture's driver, not NCCL, chose the tag.
    compare(real, [frame for _, frame in made.packets], family, {"tag"})
    theirs, ours = writes(real), writes([frame for _, frame in made.packets])
    for key, packets in ours.items():
        if not is_cts(packets, family):
            assert [p.payload for p in packets] == [p.payload for p in theirs[key]], key


def test_connectx_ll() -> None:
    """NCCL 2.19 on ConnectX, both directions of rank 0: start-up, 20 AllReduces, flags of every line."""
    real = frames_of("nccl-hardware/iter_40000_p2p_iter10_2.pcapng")
    zero, one = "fe80::e42:a1ff:fe9f:58f8", "fe80::ac0:ebff:fe8c:282d"
    job = Job(
        Communicator(2, "2.19.4"),
        [Flow(0, 1, 0, zero, one, [0x453], [0x12E2]), Flow(1, 0, 0, one, zero, [0x12E3], [0x452])],
        Collectives(
            startup=[
                Collective("AllGather", 8, "int8"), Collective("Broadcast", 32, "int8"),
                Collective("Broadcast", 5000),
            ],
            iteration_0=[Collective("AllReduce", 5000)],
            rebuild=[Collective("Broadcast", 2, "int32"), Collective("Broadcast", 1, "int32")],
            steady=[Collective("AllReduce", 5000)],
        ),
    )
    made = generate(job, iterations=20, ports=[0])
    data = compare(real, [frame for _, frame in made.packets], family_of("2.19"))
    ours = writes([frame for _, frame in made.packets])
    for key, packets in data.items():
        for theirs, mine in zip(packets, ours[key], strict=True):
            flags = [np.frombuffer(p.payload, "<u4").reshape(-1, 2)[:, 1] for p in (theirs, mine)]
            assert np.array_equal(*flags)
    assert sum(len(packets) for packets in data.values()) == 415


def test_connectx_adaptive_routing_and_cut_writes() -> None:
    """NCCL 2.12-2.15: AR pairs, a NIC that cuts plain WRITEs, an empty chunk; payload i mod 10."""
    real = frames_of("nccl-hardware/rdma32.pcapng")
    family = family_of("2.12")
    found = defaultdict(list)
    for (src, qpn), packets in sorted(writes(real).items()):
        if any(p.imm is not None for p in packets):
            found[src].append(qpn)
    hosts = {0: "fe80::e42:a1ff:fe9f:58f8", 1: "fe80::ac0:ebff:fe8c:282c"}
    packed = {rank: ipaddress.ip_address(address).packed.hex() for rank, address in hosts.items()}
    job = Job(
        Communicator(2, "2.12.10", channels=2, mtu=1024),
        [
            Flow(src, 1 - src, channel, hosts[src], hosts[1 - src], [found[packed[src]][channel]])
            for src in (0, 1) for channel in (0, 1)
        ],
        Collectives(iteration_0=[Collective("AllReduce", 5000, "int32")]),
    )
    job.gradients.dtype = "int32"
    made = generate(
        job, ports=[0], transport=TransportOptions(cut_ranks=frozenset([0])),
        gradients=lambda iteration, bucket, rank: (np.arange(5000) % 10).astype("<i4"),
    )
    frames = [frame for _, frame in made.packets]
    data = compare(real, frames, family)
    assert len(data) == 4
    ours = writes(frames)
    for key, packets in data.items():
        assert [p.payload for p in packets] == [p.payload for p in ours[key]], key
