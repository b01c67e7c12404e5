"""NCCL's bootstrap: real captures flow by flow, every family by its own encoder, and bytes that lie."""

import ipaddress
import random
import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser.observer import Observer
from scapy.utils import RawPcapNgReader

from flowcheck.learning.bootstrap import HANDSHAKE_MAGIC, QP_INFO, Stream, parse_bootstrap, parse_qp_info, reassemble
from flowcheck.learning.captures import streams_of

HARDWARE = "nccl-hardware/{}.pcapng"
COMM = 0x1122334455667788


@pytest.mark.parametrize(("name", "flows", "seen"), [
    ("iter_40000_p2p_iter10_2", 5, 3), ("iter_80000", 2, 2), ("allreduce+p2p", 18, 6), ("allreduce_addstep", 4, 4),
])
def test_every_flow_of_the_captures(capture, name: str, flows: int, seen: int) -> None:
    """29 connections of four captures: every handshake is mapped, every data flow on the wire is among them, with the
    QP its clear-to-send goes to, the path MTU, and the FIFO address that the first clear-to-send is written to."""
    trace = Observer(messages=True)
    with RawPcapNgReader(str(capture(HARDWARE.format(name)))) as reader:
        for frame, _ in reader:
            trace.add(frame)
    found = parse_bootstrap(streams_of(trace))
    assert found.notes == [] and set(found.ranks.values()) == {2}
    assert len(found.connections) == flows
    starts, listed = trace.start_records(), trace.flow_list()
    ends = {(f["src"], f["dst"], f["id"]): i for i, f in enumerate(listed) if not f["tcp"]}
    matched = 0
    for flow in found.connections:
        src, dst = (ipaddress.ip_address(side.gid).packed for side in (flow.sender, flow.receiver))
        data, back = ends.get((src, dst, flow.qpns[0])), ends.get((dst, src, flow.cts_qpns[0]))
        if data is None or not (starts["flow"] == data).any():
            continue
        matched += 1
        assert back is not None
        first = starts[starts["flow"] == back][0]
        assert first["va"] == flow.sender.fifo
        assert listed[data]["max_payload"] <= flow.receiver.mtu
    assert matched == seen
    carrying = {i for i in set(starts["flow"].tolist()) if (starts[starts["flow"] == i]["opcode"] != 10).any()}
    assert len(carrying) == seen


# -- every family, from an encoder of the reference's offsets ----------------------------------------------

FIELDS = {  # size: (gid, fifo address)
    2600: (2568, 2592), 3336: (3088, 3320), 3576: (3088, 3560), 3584: (3088, 3560), 4448: (3472, 4424),
}
SIZES = (552, *FIELDS)


def _info(size: int, qpn: int, address: str, fifo: int) -> bytes:
    out = bytearray(size)
    if size == 552:
        struct.pack_into("<I", out, 8, qpn)
        return bytes(out)
    gid, at = FIELDS[size]
    struct.pack_into("<I", out, 8 if size == 2600 else 0, qpn)
    mapped = ipaddress.IPv6Address(f"::ffff:{address}").packed
    out[gid : gid + 16] = mapped
    if size == 2600:
        struct.pack_into("<I", out, 2584, 5)
    struct.pack_into("<Q", out, at, fifo)
    return bytes(out)


def _sockaddr(address: str, port: int) -> bytes:
    return struct.pack("<H", 2) + struct.pack(">H", port) + ipaddress.IPv4Address(address).packed + bytes(20)


def _job(size: int, ranks: int = 4, channels: int = 2) -> list[Stream]:
    """The bootstrap of a ring 0 -> 1 -> ...: infos, receive entries to the rank before, handshakes."""
    late = size >= 3576
    entry = 256 if late else 128
    streams, port = [], 1000

    def item(data: bytes) -> bytes:
        return struct.pack("<I", len(data)) + data

    opening = struct.pack("<QI", COMM, 1)
    for rank in range(ranks):
        info = struct.pack("<II", rank, ranks) + _sockaddr(f"10.0.0.{rank}", 1) + _sockaddr(f"10.0.0.{rank}", 2)
        streams.append(Stream((f"10.0.0.{rank}", 100 + rank), ("10.0.0.0", 99), opening + item(info)))
    for rank in range(ranks):
        before, body = (rank - 1) % ranks, b""
        for channel in range(channels):
            port += 1
            listener = _sockaddr(f"10.0.0.{rank}", port) + bytes(0 if not late else 4)
            body += (listener + struct.pack("<Q", HANDSHAKE_MAGIC)).ljust(entry, b"\0")
            ends = (f"10.0.0.{before}", 30000 + port), (f"10.0.0.{rank}", port)
            send = _info(size, 100 + 10 * before + channel, f"10.1.0.{before}", 0xF000 + channel)
            recv = _info(size, 500 + 10 * rank + channel, f"10.1.0.{rank}", 0xA000 + channel)
            lead = struct.pack("<II", 1, 7) if late else b""
            head = struct.pack("<QI", HANDSHAKE_MAGIC, 4)
            streams.append(Stream(*ends, head + lead + send + struct.pack("<I", 1)))
            streams.append(Stream(ends[1], ends[0], lead + recv))
        tag = (1 << 8) + 1
        names = (struct.pack("<I", rank), struct.pack("<I", tag))
        who = item(b"".join(names)) if late else item(names[0]) + item(names[1])
        streams.append(Stream((f"10.0.0.{rank}", 200), (f"10.0.0.{before}", 201), opening + who + item(body)))
    return streams


def test_every_record_of_the_table_is_encoded_here() -> None:
    assert {form.bytes for form in QP_INFO} == set(SIZES)


@pytest.mark.parametrize("size", SIZES)
def test_every_family(size: int) -> None:
    found = parse_bootstrap(_job(size))
    versions = next(versions for form, versions in QP_INFO.items() if form.bytes == size)
    assert found.notes == [] and found.ranks == {COMM: 4}
    assert len(found.connections) == 8
    for flow in found.connections:
        assert (flow.graph, flow.dst, flow.versions) == ("ring", (flow.src + 1) % 4, versions)
        assert flow.qpns[0] == 500 + 10 * flow.dst + flow.channel
        assert flow.cts_qpns[0] == 100 + 10 * flow.src + flow.channel
        if size != 552:
            assert (flow.sender.gid, flow.receiver.gid) == (f"10.1.0.{flow.src}", f"10.1.0.{flow.dst}")
            assert (flow.sender.mtu, flow.sender.fifo) == (4096 if size == 2600 else 0, 0xF000 + flow.channel)


def test_a_missing_side_is_named_not_guessed() -> None:
    streams = [s for s in _job(2600) if s.src[1] != 1001]  # one receiver's answer
    found = parse_bootstrap(streams)
    assert len(found.connections) == 7 and "fit no known version" in found.notes[0]
    streams = [s for s in _job(2600) if s.dst[1] != 201 or s.src[0] != "10.0.0.1"]  # one peer message
    assert len(parse_bootstrap(streams).connections) == 6


# -- hostile bytes -----------------------------------------------------------------------------------------


@settings(max_examples=300, derandomize=True)
@given(st.sampled_from(SIZES), st.integers(0, 10**9))
def test_changed_bytes_never_crash(size: int, seed: int) -> None:
    rng = random.Random(seed)
    streams = []
    for s in _job(size, ranks=2, channels=rng.randint(1, 3)):
        data = bytearray(s.data)
        for _ in range(rng.randint(0, 4)):
            at = rng.randrange(min(len(data), 64) if rng.random() < 0.7 else len(data))
            data[at] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        streams.append(Stream(s.src, s.dst, bytes(data)))
    for flow in parse_bootstrap(streams).connections:
        assert flow.src != flow.dst and max(flow.src, flow.dst) < 65536
        assert 0 <= flow.channel < 128 and 0 < flow.qpns[0] < 1 << 24


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=400), max_size=6), st.binary(max_size=20))
def test_any_bytes(bodies: list[bytes], lead: bytes) -> None:
    opening = struct.pack("<QI", COMM, 1)
    streams = [Stream(("10.0.0.1", i), ("10.0.0.2", i), opening + lead + body) for i, body in enumerate(bodies)]
    parse_bootstrap(streams)
    for body in bodies:
        for size in SIZES:
            parse_qp_info((body * 40)[:size])


@settings(max_examples=200, derandomize=True)
@given(st.binary(min_size=1, max_size=2000), st.integers(0, 2**32 - 1), st.integers(0, 10**9), st.booleans())
def test_segments_in_any_order_give_the_stream(data: bytes, start: int, seed: int, syn: bool) -> None:
    rng = random.Random(seed)
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(5))})
    parts = [((start + 1 + a) & 0xFFFFFFFF, 16, data[a:b]) for a, b in pairwise(cuts)]
    parts += rng.sample(parts, rng.randint(0, len(parts)))  # repeated
    rng.shuffle(parts)
    if syn:
        parts.insert(rng.randrange(len(parts) + 1), (start, 2, b""))
    assert reassemble(parts) == (data, syn)
    assert reassemble([]) == (b"", False)


def test_a_hole_ends_the_stream() -> None:
    assert reassemble([(10, 2, b""), (11, 16, b"abc"), (20, 16, b"xyz")]) == (b"abc", True)
