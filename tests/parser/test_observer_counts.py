"""The survey and its interpretation: hand-made packets for each rule, real captures for the whole.

The frames are built from the standards here (struct and zlib), not with the parser.
"""

from __future__ import annotations

import ctypes
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser.observer import Observer
from scapy.utils import RawPcapReader

from parser.findings import interpret, ranks_of
from parser.nccl import of
from parser.pairing import connection_port

CAPTURES = Path(__file__).parents[2].parent / "shared" / "captures"

FIRST, MIDDLE, LAST, LAST_IMM, ONLY, ONLY_IMM, READ, ACK = 6, 7, 8, 9, 0x0A, 0x0B, 0x0C, 0x11
SEND_FIRST, SEND_LAST, SEND_ONLY = 0, 2, 4
A, B = b"\x0a\0\0\1", b"\x0a\0\0\2"


def frame(
    opcode: int, psn: int, payload: bytes = b"", *, extra: bytes = b"", qp: int = 0x20, src: bytes = A,
    dst: bytes = B, sport: int = 0xC000, tclass: int = 0, damage: int = 0,
) -> bytes:
    pad = -len(payload) % 4
    bth = struct.pack(">BBHII", opcode, pad << 4, 0xFFFF, qp, psn & 0xFFFFFF)
    body = bth + extra + payload + bytes(pad)
    size = 20 + 8 + len(body) + 4
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, tclass, size, 0, 0x4000, 64, 17, 0, src, dst)
    udp = struct.pack(">HHHH", sport, 4791, size - 20, 0)
    masked = bytearray(b"\xff" * 8 + ip + udp + body)
    for at in (8 + 1, 8 + 8, 8 + 10, 8 + 11, 28 + 6, 28 + 7, 36 + 4):
        masked[at] = 0xFF
    icrc = zlib.crc32(masked) ^ damage
    return bytes(12) + b"\x08\x00" + ip + udp + body + icrc.to_bytes(4, "little")


def reth(va: int, length: int, rkey: int = 0x77) -> bytes:
    return struct.pack(">QII", va, rkey, length)


def imm(value: int) -> bytes:
    return value.to_bytes(4, "little")


def noise(n: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(n)


def ll(lines: int, flag: int) -> bytes:
    data = noise(8 * lines, flag)
    return b"".join(
        data[8 * i : 8 * i + 4] + imm(flag) + data[8 * i + 4 : 8 * i + 8] + imm(flag) for i in range(lines)
    )


def ll128(lines: int, flag: int) -> bytes:
    return b"".join(noise(120, flag + i) + flag.to_bytes(8, "little") for i in range(lines))


def cts(version: str, number: int, va: int, rkey: int, size: int, tag: int = 3) -> bytes:
    if version == "2.19.4":
        return struct.pack("<QIIIIQ", va, size, rkey, 1, tag, number)
    if version == "2.23.4":
        return struct.pack("<QIIIIIIQ24x", va, size, rkey, 0, 1, tag, 0, number)
    if version == "2.27.7":
        return struct.pack("<QQIIIIIIQ16x", va, size, rkey, 0, 0, 0, 1, tag, number)
    return struct.pack("<QQ8IIIQ", va, size, rkey, *[0] * 7, 1, tag, number)


def survey(*frames: bytes) -> dict[str, Any]:
    one = Observer()
    for raw in frames:
        one.add(raw)
    return one.report()


def flow(*frames: bytes) -> dict[str, Any]:
    report = survey(*frames)
    assert len(report["flows"]) == 1
    return report["flows"][0]


def sends(*psns: int) -> dict[str, Any]:
    found = flow(*(frame(SEND_ONLY, psn, b"data") for psn in psns))["requests"]
    return {key: found[key] for key in SEQUENCE}


SEQUENCE = ("gaps", "missing", "duplicates", "late", "restarts", "out_of_order", "before_first")
CLEAN = dict.fromkeys(SEQUENCE, 0)


# -- sequences --------------------------------------------------------------------------------------------


def test_in_order_and_around_the_wrap() -> None:
    assert sends(*range(10)) == CLEAN
    assert sends(*range(0xFFFFFC, 0x1000005)) == CLEAN


def test_gap_late_duplicate_restart() -> None:
    assert sends(0, 1, 5, 6) == {**CLEAN, "gaps": 1, "missing": 3}
    assert sends(0, 2, 1, 3) == {**CLEAN, "gaps": 1, "late": 1, "out_of_order": 1}
    assert sends(0, 1, 1, 2) == {**CLEAN, "duplicates": 1, "restarts": 1}
    # go-back-N: 2 was lost before the capture, 3 and 4 come twice
    assert sends(0, 1, 3, 4, 2, 3, 4, 5) == {**CLEAN, "gaps": 1, "late": 1, "duplicates": 2, "restarts": 1}
    assert sends(5, 6, 3, 7) == {**CLEAN, "before_first": 1, "out_of_order": 1}


def test_missing_ranges_are_named() -> None:
    found = flow(*(frame(SEND_ONLY, psn, b"data") for psn in (0, 5, 3, 9)))["requests"]
    assert found["missing_ranges"] == [(1, 2), (4, 1), (6, 3)]
    assert (found["psn_first"], found["psn_last"]) == (0, 9)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=120), st.integers(0, 0xFFFFFF))
def test_sequence_against_a_set(order: list[int], origin: int) -> None:
    """Whatever the order: seen again + new = all, and missing is what a set says."""
    found = sends(*((origin + psn) & 0xFFFFFF for psn in order))
    first, seen, before = order[0], set[int](), 0
    duplicates = 0
    for psn in order:
        if psn < first:
            before += 1
        elif psn in seen:
            duplicates += 1
        else:
            seen.add(psn)
    assert found["missing"] == max(seen) + 1 - first - len(seen)
    assert (found["duplicates"], found["before_first"]) == (duplicates, before)


def test_more_holes_than_are_remembered() -> None:
    """4096 gaps are kept; older ones stay counted as missing."""
    found = flow(*(frame(SEND_ONLY, psn, b"data") for psn in range(0, 10002, 2)))["requests"]
    assert (found["gaps"], found["missing"], len(found["missing_ranges"])) == (5000, 5000, 4096)


def test_read_requests_take_several_numbers() -> None:
    reads = [frame(READ, psn, extra=reth(0x1000, 5001)) for psn in (7, 12, 17)]  # 5 x 1024
    assert flow(*reads)["requests"]["gaps"] == 0
    assert flow(reads[0], frame(READ, 15, extra=reth(0x1000, 5001)))["requests"]["missing"] == 7


def test_answers() -> None:
    acks = [frame(ACK, psn, extra=struct.pack(">I", syndrome << 24 | msn))
            for psn, syndrome, msn in ((3, 0x1F, 1), (4, 0x60, 1), (5, 0x2C, 1), (2, 0x61, 9))]
    found = flow(*acks)
    assert found["requests"] is None
    assert found["answers"] == {
        "acks": 1, "rnr_naks": 1, "last_msn": 9, "naks": {"sequence_error": 1, "invalid_request": 1},
        "psn_low": 2, "psn_high": 5,
    }


# -- messages ---------------------------------------------------------------------------------------------


def test_write_messages_and_immediates() -> None:
    data = noise(2500)
    found = flow(
        frame(FIRST, 0, data[:1024], extra=reth(0x1000, 2500)),
        frame(MIDDLE, 1, data[1024:2048]),
        frame(LAST_IMM, 2, data[2048:], extra=imm(2500)),
        frame(ONLY_IMM, 3, data[:100], extra=reth(0x2000, 100) + (100).to_bytes(4, "big")),
        frame(ONLY_IMM, 4, b"", extra=reth(0x3000, 0) + imm(0)),
        frame(ONLY, 5, data[:8], extra=reth(0x4000, 8)),
    )
    assert found["messages"]["sizes"] == {2500: 1, 100: 1, 0: 1, 8: 1}
    assert (found["messages"]["writes"], found["messages"]["empty"]) == (4, 1)
    immediate = found["messages"]["immediate"]
    assert (immediate["little_endian"], immediate["big_endian"], immediate["unexplained"]) == (1, 1, 0)
    assert found["max_payload"] == 1024


def test_adaptive_routing_pair_and_write_cut_by_the_nic() -> None:
    data = noise(4096)
    pair = [
        frame(FIRST, 0, data[:1024], extra=reth(0x1000, 1500)),
        frame(LAST, 1, data[1024:1500]),
        frame(ONLY_IMM, 2, extra=reth(0, 0, 0) + imm(1500)),
    ]
    cut = [frame(ONLY, 3 + i, data[:1024], extra=reth(0x1000 + 1024 * i, 1024)) for i in range(3)]
    cut += [frame(ONLY, 6, data[:512], extra=reth(0x1C00, 512))]
    closing = frame(ONLY_IMM, 7, extra=reth(0, 0, 0) + imm(3584))
    found = flow(*pair, *cut, closing)["messages"]
    assert found["sizes"] == {1500: 1, 3584: 1}
    assert found["adaptive_routing_pairs"] == 2
    assert found["cut_by_nic"] == {"writes": 1, "packets": 4}
    assert found["immediate"]["little_endian"] == 2
    # Without the closing immediate they are what they look like: single writes.
    assert flow(*cut)["messages"]["sizes"] == {1024: 3, 512: 1}


def test_message_split_over_queue_pairs() -> None:
    found = flow(frame(ONLY_IMM, 0, noise(256), extra=reth(0, 256) + imm(1000)))["messages"]["immediate"]
    assert found["split_little_endian"] == {4: 1}


def test_retransmitted_messages_count_once() -> None:
    one = frame(ONLY_IMM, 0, noise(64), extra=reth(0x1000, 64) + imm(64))
    two = frame(ONLY_IMM, 1, noise(64), extra=reth(0x2000, 64) + imm(64))
    assert flow(one, two, one, two)["messages"]["writes"] == 2


def test_wrong_icrc_is_counted_and_not_believed() -> None:
    found = flow(frame(SEND_ONLY, 0, b"data"), frame(SEND_ONLY, 9, b"data", damage=1))
    assert found["icrc"] == {"ok": 1, "wrong": 1}
    assert found["requests"]["packets"] == 1


# -- what NCCL writes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.19.4", "2.23.4", "2.27.7", "2.30.7"])
def test_clear_to_send_forms(version: str) -> None:
    size = len(cts(version, 1, 1, 1, 1))
    found = flow(
        *(
            frame(ONLY, i, cts(version, i + 1, 0x7F0000000000 + i * 65536, 0x1234, 65536),
                  extra=reth(0x5000 + i * 8 * size, size))
            for i in range(8)
        )
    )
    assert found["cts"]["layouts"] == {of(version).cts.versions: 8}
    assert (found["cts"]["first_number"], found["cts"]["last_number"]) == (1, 8)
    assert found["cts"]["fifo_steps"][str(8 * size)] == 7
    assert found["cts"]["sizes"] == {65536: 8}
    assert found["cts"]["tags"] == {3: 8}
    assert found["messages"]["writes"] == 0


@settings(max_examples=300)
@given(st.binary(min_size=64, max_size=64) | st.binary(min_size=32, max_size=32))
def test_other_small_writes_are_no_clear_to_send(data: bytes) -> None:
    found = interpret(survey(*(frame(ONLY, i, data, extra=reth(0x5000, len(data))) for i in range(3))))
    assert found["flows"][0]["kind"] == "writes"


def traffic(payload: Any, version: str = "2.27.7") -> dict[str, Any]:
    """Four messages with their clear-to-send; payload(step) -> bytes."""
    frames = []
    port = connection_port(0x20, 0x31)
    size = len(cts(version, 1, 1, 1, 1))
    for i in range(4):
        data, va = payload(i), 0x10000 + i * 0x10000
        element = cts(version, i + 1, va, 0x77, 65536)
        frames.append(frame(ONLY, i, element, extra=reth(0x5000 + i * 8 * size, size, 0x99), qp=0x31, src=B,
                            dst=A, sport=port))
        frames.append(frame(ONLY_IMM, i, data, extra=reth(va, len(data)) + imm(len(data)), sport=port))
    return interpret(survey(*frames))


@pytest.mark.parametrize(
    ("payload", "name", "certainty"),
    [
        (lambda step: ll(8, step + 1), "LL", "sure"),
        (lambda step: ll128(16, step + 1), "LL128", "sure"),
        (lambda step: noise(4096, step), "SIMPLE", "probable"),
        (lambda step: bytes(256), "unknown", "none"),
        (lambda step: b"\0\0\x80\x3f" * 64, "unknown", "none"),
        (lambda step: ll(8, step + 1) if step < 2 else noise(1024), "mixed", "sure"),
    ],
)
def test_protocols(payload: Any, name: str, certainty: str) -> None:
    found = traffic(payload)
    (connection,) = found["connections"]
    data = found["flows"][connection["data_flow"]]
    assert (data["protocol"]["name"], data["protocol"]["certainty"]) == (name, certainty)
    assert data["kind"] == "NCCL data"
    assert connection["is"] == "NCCL"
    assert connection["nccl_versions"] == "2.24-2.29"
    assert (connection["sender_tag"], connection["immediate_order"]) == (3, "little-endian")
    assert ranks_of(found["connections"]) == {"10.0.0.1": [3]}


def test_pairing_by_clear_to_send_when_the_port_says_nothing() -> None:
    frames = []
    for i in range(3):
        element = cts("2.30.7", i + 1, 0x10000 * (i + 1), 0x77, 65536)
        frames.append(frame(ONLY, i, element, extra=reth(512 * i, 64), qp=0x31, src=B, dst=A))
        frames.append(
            frame(ONLY_IMM, i, noise(64, i), extra=reth(0x10000 * (i + 1), 64) + imm(64), sport=51000)
        )
    (connection,) = interpret(survey(*frames))["connections"]
    assert connection["paired_by"] == "clear-to-send address"
    assert (connection["data_qp"], connection["back_qp"]) == (0x20, 0x31)


def test_one_direction_alone_is_said() -> None:
    found = interpret(survey(*(
        frame(ONLY_IMM, i, ll(4, i + 1), extra=reth(0x1000, 64) + imm(64)) for i in range(5)
    )))
    assert found["flows"][0]["protocol"]["name"] == "LL"
    assert found["flows"][0]["protocol"]["certainty"] == "probable"
    assert any("other direction" in note["text"] for note in found["notes"])


def test_acknowledged_but_never_captured() -> None:
    port = connection_port(0x20, 0x31)
    found = interpret(survey(
        frame(SEND_ONLY, 0, b"data", sport=port),
        frame(ACK, 4, extra=b"\x1f\0\0\5", qp=0x31, src=B, dst=A, sport=port),
    ))
    assert found["connections"][0]["acknowledged_unseen"] == 4


# -- other traffic, bounds, the ring ----------------------------------------------------------------------


def test_noise_by_kind() -> None:
    eth = bytes(12)
    tcp4 = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 60, 0, 0, 64, 6, 0, A, B) + bytes(12) + b"\x50" + bytes(7)
    magic = (0x564AB9F2FC4B9D6C).to_bytes(8, "little")
    frames = [
        eth + b"\x08\x06" + bytes(28), eth + b"\x88\xf7" + bytes(44), eth + b"\x88\xcc" + bytes(30),
        eth + b"\x89\x15" + bytes(60), eth + b"\x00\x26" + bytes(46), eth + b"\x12\x34" + bytes(46),
        eth + b"\x08\x00" + tcp4, eth + b"\x08\x00" + tcp4 + magic + bytes(4),
        eth + b"\x81\x00\x00\x05\x08\x06" + bytes(28), bytes(5),
    ]
    report = survey(*frames, frame(SEND_ONLY, 0, b"data")[:40])
    assert report["noise"] == {
        "arp": 2, "ptp": 1, "lldp": 1, "roce_v1": 1, "llc": 1, "other_ethertype": 1, "tcp": 2,
    }
    assert report["bootstrap_handshakes"] == 1
    assert report["packets"]["truncated"] == 2
    assert report["packets"]["roce"] == 0


def test_more_flows_than_the_table_holds() -> None:
    one = Observer()
    for qp in range(2, 16386 + 10):
        one.add(frame(SEND_ONLY, 0, b"", qp=qp))
    report = one.report()
    assert len(report["flows"]) == 16384
    assert report["unlisted_flow_packets"] == 10
    assert any("further flows" in note["text"] for note in interpret(report)["notes"])


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 0xFF), st.integers(0, 30), st.binary(max_size=80)), max_size=30))
def test_any_packet_sequence_gives_a_report(packets: list[tuple[int, int, bytes]]) -> None:
    report = survey(*(frame(opcode, psn, body) for opcode, psn, body in packets))
    assert sum(report["packets"][name] for name in ("roce", "malformed")) == len(packets)
    interpret(report)


class PacketRef(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("timestamp_ns", ctypes.c_uint64), ("length", ctypes.c_uint32),
        ("stream", ctypes.c_uint16), ("flags", ctypes.c_uint16),
    ]


class Ring(ctypes.Structure):
    """fc_ring of dataplane/include/packetref.h, cache lines spelled out."""

    _fields_ = [
        ("head", ctypes.c_uint64), ("tail_seen", ctypes.c_uint64), ("closed", ctypes.c_uint32),
        ("_a", ctypes.c_char * 44), ("tail", ctypes.c_uint64), ("_b", ctypes.c_char * 56),
        ("mask", ctypes.c_uint64), ("entries", ctypes.c_void_p), ("_c", ctypes.c_char * 48),
    ]


def test_ring_gives_the_same_report_as_single_frames() -> None:
    frames = [frame(SEND_ONLY, psn, b"data") for psn in (0, 1, 2, 5, 3)]
    entries = (PacketRef * 8)()
    kept = [ctypes.create_string_buffer(raw, len(raw)) for raw in frames]
    for i, raw in enumerate(kept):
        entries[i] = PacketRef(ctypes.addressof(raw), 1000 + i, len(raw), 2, 0)
    ring = Ring(head=3, mask=7, entries=ctypes.addressof(entries))
    one = Observer()
    assert one.drain(ctypes.addressof(ring)) == 3
    assert not one.drained(ctypes.addressof(ring))
    ring.head, ring.closed = 5, 1
    assert not one.drained(ctypes.addressof(ring))
    assert one.drain(ctypes.addressof(ring)) == 2
    assert one.drained(ctypes.addressof(ring))
    assert ring.tail == 5
    found = one.report()
    assert (found["first_ns"], found["last_ns"]) == (1000, 1004)
    (got,) = found["flows"]
    assert got["captures"] == [2]
    assert got["requests"] == flow(*frames)["requests"]


# -- real captures ----------------------------------------------------------------------------------------


def capture(name: str) -> dict[str, Any]:
    paths = list(CAPTURES.glob(f"*/{name}*"))
    if not paths:
        pytest.skip(f"shared capture {name} is not here ({CAPTURES})")
    one = Observer()
    with RawPcapReader(str(paths[0])) as reader:
        for raw, _ in reader:
            one.add(raw)
    report = one.report()
    return {**report, **interpret(report)}


def again(found: dict[str, Any]) -> int:
    return sum(f["requests"]["duplicates"] + f["requests"]["late"] for f in found["flows"] if f["requests"])


def missing(found: dict[str, Any]) -> int:
    return sum(f["requests"]["missing"] for f in found["flows"] if f["requests"])


@pytest.mark.captures
@pytest.mark.parametrize(
    ("name", "lost", "seen_again"),
    [
        ("01_", 0, 0), ("02_", 0, 0), ("03_", 0, 0), ("05_", 0, 0), ("07_", 0, 0), ("20_", 0, 1713),
        ("24_", 0, 190), ("26_", 0, 396), ("30_", 0, 0), ("rdma32", 0, 0), ("allreduce+p2p", 0, 0),
        ("allreduce_addstep", 0, 0), ("iter_40000", 0, 0), ("iter_80000", 15, 0),
    ],
)
def test_sequences_of_real_captures(name: str, lost: int, seen_again: int) -> None:
    found = capture(name)
    assert (missing(found), again(found)) == (lost, seen_again)


@pytest.mark.captures
@pytest.mark.parametrize(
    ("name", "connections", "protocol", "versions", "clear_to_send"),
    [
        ("02_", 2, "SIMPLE", "2.24-2.29", 32), ("03_", 4, "SIMPLE", "2.24-2.29", 48),
        ("05_", 16, "SIMPLE", "2.24-2.29", 48), ("07_", 4, "SIMPLE", "2.24-2.29", 48),
        ("20_", 4, "SIMPLE", "2.24-2.29", 48), ("24_", 4, "SIMPLE", "2.24-2.29", 48),
        ("rdma32", 4, "LL", "2.12-2.19", 8), ("iter_80000", 2, "LL", "2.12-2.19", 9),
        ("allreduce_addstep", 4, "LL", "2.12-2.19", 12),
    ],
)
def test_nccl_captures(name: str, connections: int, protocol: str, versions: str, clear_to_send: int) -> None:
    found = capture(name)
    assert len(found["connections"]) == connections
    assert {c["is"] for c in found["connections"]} == {"NCCL"}
    assert {c["paired_by"] for c in found["connections"]} == {"UDP source port"}
    assert {c["nccl_versions"] for c in found["connections"]} == {versions}
    assert {c["immediate_order"] for c in found["connections"]} <= {"little-endian", None}
    data = [found["flows"][c["data_flow"]] for c in found["connections"]]
    assert {f["protocol"]["name"] for f in data} == {protocol}
    assert sum(f["cts"]["count"] for f in found["flows"] if f["cts"]) == clear_to_send


@pytest.mark.captures
def test_iter_40000_names_ranks_and_point_to_point() -> None:
    found = capture("iter_40000")
    data = [found["flows"][c["data_flow"]] for c in found["connections"]]
    assert sorted((f["protocol"]["name"], f["messages"]["writes"]) for f in data) == [
        ("LL", 41), ("LL", 45), ("unknown", 20),
    ]
    assert ["point-to-point" in f["protocol"]["because"] for f in data].count(True) == 1
    assert ranks_of(found["connections"]) == {
        "fe80::e42:a1ff:fe9f:58f8": [0],
        "fe80::ac0:ebff:fe8c:282d": [1],
    }
    assert found["bootstrap_handshakes"] == 5
    ring = next(f for f in data if f["messages"]["writes"] == 45)
    assert (ring["payload"]["first_flag"], ring["payload"]["last_flag"]) == (1, 45)


@pytest.mark.captures
def test_rdma32_pairs_and_cut_writes() -> None:
    found = capture("rdma32")
    messages = [found["flows"][c["data_flow"]]["messages"] for c in found["connections"]]
    assert [m["adaptive_routing_pairs"] for m in messages] == [1, 1, 1, 1]
    assert sorted(m["cut_by_nic"]["packets"] for m in messages) == [0, 0, 16, 16]
    assert [f["kind"] for f in found["flows"] if f["icrc"]["wrong"]] == ["vendor opcode"]


@pytest.mark.captures
def test_four_queue_pairs_per_connection() -> None:
    found = capture("05_")
    assert {c["qps"] for c in found["connections"]} == {4}
    assert {c["split_over_qps"] for c in found["connections"]} == {4, None}
    assert ranks_of(found["connections"]) == {}, "four addresses that all say 0 name no rank"


@pytest.mark.captures
@pytest.mark.parametrize("name", ["01_", "26_", "30_", "40_"])
def test_what_is_not_nccl_is_not_called_so(name: str) -> None:
    found = capture(name)
    kinds = {f["kind"] for f in found["flows"]}
    assert not any(kind.startswith("NCCL") for kind in kinds)
    assert {c["is"] for c in found["connections"]} <= {"other RDMA"}
    assert {f["protocol"]["name"] for f in found["flows"] if f["protocol"]} <= {"unknown"}
    assert "no mark of NCCL was seen" in [note["text"] for note in found["notes"]]


@pytest.mark.captures
def test_kinds_of_perftest() -> None:
    kinds = {f["dest_qp"]: f["kind"] for f in capture("01_")["flows"] if f["dst"] == "10.77.0.1"}
    assert [kinds[qp] for qp in range(0x18, 0x2A)] == [
        *["writes"] * 10, "sends", "sends", "datagrams", "reads", "reads", "reads", "atomics", "atomics",
    ]


@pytest.mark.captures
def test_receiver_not_ready() -> None:
    found = capture("26_")
    (answers,) = [f["answers"] for f in found["flows"] if f["answers"]]
    assert (answers["rnr_naks"], answers["naks"]) == (26, {"sequence_error": 26})
    assert [f["requests"]["restarts"] for f in found["flows"] if f["requests"]] == [26]


@pytest.mark.captures
def test_icrc_probe() -> None:
    found = capture("40_")
    assert sum(f["icrc"]["wrong"] for f in found["flows"]) == 896
    assert sum(f["icrc"]["ok"] for f in found["flows"]) == 720
    assert {f["kind"] for f in found["flows"]} == {"datagrams", "wrong ICRC only"}
