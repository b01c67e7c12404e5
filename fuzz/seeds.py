"""Where fuzzing begins: one small valid input of every kind, per target. Deterministic, any thread.

    seeds(target) -> [bytes]          made here
    corpus(target) -> {name: bytes}   finds of the past, tests/attacks/corpus/<target>/*.hex
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

from lab.synth import example_job, generate

__all__ = ["block", "captures", "corpus", "seeds"]

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "attacks" / "corpus"


def corpus(target: str) -> dict[str, bytes]:
    """Text files: lines of hex, `#` begins a comment. Binary files have no place in the tree."""
    found = {}
    for path in sorted((CORPUS / target).glob("*.hex")):
        lines = (line.partition("#")[0] for line in path.read_text().splitlines())
        found[path.stem] = bytes.fromhex("".join(lines))
    return found


def seeds(target: str) -> list[bytes]:
    made = {"decoder": _frames, "machine": _programs, "observer": _programs, "scan": captures, "bootstrap": _streams,
            "records": _records}
    return made[target]()


# -- frames ----------------------------------------------------------------------------------------


def _frames() -> list[bytes]:
    out = []
    for ipv6 in (False, True):
        for protocol in ("ll", "ll128", "simple"):
            made = generate(example_job(protocol=protocol, count=600, mtu=1024, ipv6=ipv6), ports=[0])
            shapes = {len(frame): frame for _, frame in made.packets}
            out += list(shapes.values())[:6]
    plain = out[0]
    out.append(plain[:12] + b"\x81\x00\x00\x05" + plain[12:])
    out.append(plain[:12] + b"\x88\xa8\x00\x05\x81\x00\x00\x06" + plain[12:])
    for number, head in (
        (47, b"\0\0\x65\x58"), (47, b"\0\0\x88\xbe"), (47, b"\x10\0\x88\xbe" + bytes(4) + b"\x10" + bytes(7)),
        (47, b"\x10\0\x22\xeb" + bytes(4) + b"\x20" + bytes(11)),
        (47, b"\x30\0\x22\xeb" + bytes(8) + b"\x20" + bytes(10) + b"\1" + bytes(8)),
        (17, struct.pack(">HHHHII", 7, 4789, 16 + len(plain), 0, 0x08000000, 0x1200)),
    ):
        inner = head + plain
        ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(inner), 0, 0, 64, number, 0, b"\xc0\0\2\1", b"\xc0\0\2\2")
        out.append(bytes(12) + b"\x08\0" + ip + inner)
    return out


# -- sequences -------------------------------------------------------------------------------------


def _programs() -> list[bytes]:
    """Byte 0: job, byte 1: flags, then instructions of four bytes; see targets/sequence.pyx."""
    rng = random.Random(1)
    out = []
    for job in range(8):
        out += [bytes([job, 4]), bytes([job, 6]), bytes([job, 5]) + b"\0\x20\0\0\x0e\2\1\0\0\x20\0\0"]
        out.append(bytes([job, 4]) + b"\0\x30\0\0" + b"\1\x05\0\0" + b"\0\x20\0\0")
        out.append(bytes([job, 4]) + b"\1\xff\0\0" * 2)  # begins in mid-stream
        out.append(bytes([job, 4]) + b"\0\x60\0\0\x02\x20\0\0")
        out.append(bytes([job, 0]) + b"\x0d\0\0\0\x0d\1\0\0\x0d\2\0\0\x0d\3\0\0\x0d\4\0\0" * 8)
        for operation in range(16):
            program = bytes([operation, *rng.randbytes(3)]) + b"\0" + rng.randbytes(3)
            out.append(bytes([job, 5 if operation >= 14 else 4]) + program * 3)
    return out


# -- capture files ---------------------------------------------------------------------------------


def captures() -> list[bytes]:
    """Small files of every form the scan knows."""
    frames = [bytes(12) + b"\x08\0" + bytes(range(size - 14)) for size in (60, 61, 90)]
    out = []
    for order in "<>":
        for magic in (0xA1B2C3D4, 0xA1B23C4D):
            head = struct.pack(order + "IHHIIII", magic, 2, 4, 0, 0, 65535, 1)
            records = [struct.pack(order + "IIII", 1, i, len(f), len(f) + i) + f for i, f in enumerate(frames)]
            out.append(head + b"".join(records))
        section = block(order, 0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1))
        interface = block(order, 1, struct.pack(order + "HHI", 1, 0, 65535))
        timed = block(
            order, 1, struct.pack(order + "HHIHHB3xHHQHH", 1, 0, 65535, 9, 1, 9, 14, 8, 0, 0, 0)
        )
        packets = [
            block(order, 6, struct.pack(order + "IIIII", 0, 0, i, len(f), len(f)) + f) for i, f in enumerate(frames)
        ]
        simple = block(order, 3, struct.pack(order + "I", 60) + frames[0])
        old = block(order, 2, struct.pack(order + "HHIIII", 0, 0, 0, 1, 60, 64) + frames[0])
        other = block(order, 5, bytes(12))
        out += [
            section + interface + b"".join(packets), section + timed + other + packets[0] + simple,
            section + interface + old + section + interface + packets[1],
        ]
    return out


def block(order: str, kind: int, body: bytes) -> bytes:
    body += bytes(-len(body) % 4)
    total = struct.pack(order + "I", 12 + len(body))
    return struct.pack(order + "I", kind) + total + body + total


# -- bootstrap -------------------------------------------------------------------------------------


def _streams() -> list[bytes]:
    """See targets/bootstrap.py: { how, source, destination, length, body }*."""
    address = struct.pack("<H", 2) + struct.pack(">H", 1001) + bytes([10, 0, 0, 1]) + bytes(20)
    entry = (address + struct.pack("<Q", 0x564AB9F2FC4B9D6C)).ljust(128, b"\0")
    info = struct.pack("<II", 0, 2) + address * 2
    infos = [_chunk(2, rank, 3, _item(struct.pack("<II", rank, 2) + info[8:])) for rank in (0, 1)]
    peers = [
        _chunk(2, 1, 2, _item(struct.pack("<II", 1, 1 << 8 | 1)) + _item(entry * 2)),
        _chunk(2, 1, 2, _item(struct.pack("<I", 1)) + _item(struct.pack("<I", 1 << 8)) + _item(entry)),
    ]
    qps = b"".join(struct.pack("<6I", 7 + i, 1, 2, 3, 4, 5) for i in range(2))
    out = [infos[0] + infos[1] + peers[0], infos[1] + peers[1]]
    for size in range(1, 7):
        for extra in (0, 96):
            how = 1 | size << 2 | extra
            out.append(infos[1] + peers[0] + _chunk(how, 0, 5, qps) + _chunk(how, 5, 0, qps))
    segments = struct.pack("<IBB", 99, 2, 0) + struct.pack("<IBB", 103, 0, 3) + b"abc"
    segments += struct.pack("<IBB", 100, 0, 3) + b"xyz"
    out.append(_chunk(128 | 1, 0, 1, segments))
    return out


def _item(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def _chunk(how: int, source: int, destination: int, body: bytes) -> bytes:
    return bytes([how, source, destination]) + struct.pack("<H", len(body)) + body


# -- records ---------------------------------------------------------------------------------------


def _records() -> list[bytes]:
    """See targets/records.py: { how, length, body }*. One of each message, and some that are none."""
    nonce = "5a" * 32
    said: list[dict[str, Any]] = [
        {"type": "challenge", "nonce": nonce}, {"type": "refused", "why": "the token is wrong"},
        {"type": "hello", "run_id": "run", "epoch": 0, "rank": 1, "ranks": 4, "group": "", "nonce": nonce,
         "proof": "0" * 64, "protocol": "flowcheck/records/1", "instance": "", "role": "peer"},
        {"type": "welcome", "proof": nonce, "resync": "ranges"}, {"type": "bye"}, {"type": "notice", "why": ""},
        {"type": "flows", "flows": [{"src": 0, "dst": 1, "channel": 0, "qpns": [7, 8], "addresses": ["10.0.0.1"]}]},
        {"type": "manifest", "job": {"schema": "flowcheck/job/1", "model": [{"name": "w", "shape": [3]}]}, "first": 5},
        {"type": "state", "iteration": 3, "groups": [{"lr": 0.5, "betas": [0.9, 0.999]}]},
        {"type": "record", "iteration": 1, "groups": [{"lr": 1e-3}], "clip": 0.5, "scale": 65536.0, "skipped": True,
         "checksums": {"w": "0123456789abcdef"}, "sample": "AAAA"},
        {"type": "ranges", "request": 1, "ranges": [["w", 0, 2], ["b", 5, 1]]},
        {"type": "patch", "request": 1, "iteration": 2, "ranges": [["w", 0, 2]], "refused": ""},
        {"type": "patch", "request": 1, "iteration": 2, "refused": "gone \U0001f680"},
        {"type": "holes", "request": 1, "iteration": 9, "plan": nonce, "ranges": [[0, 64], [128, 8]], "seconds": 0.5},
        {"type": "bytes", "request": 1, "iteration": 9, "ranges": [[8, 16]], "digest": nonce},
        {"type": "user", "iteration": 4, "rank": 3}, {"type": "joined", "iteration": 0},
        {"type": "wanted", "what": ["user"], "why": ""},
        {"type": "progress", "iteration": 4, "status": "verified"}, {"type": ["x"]},
        {"type": "record", "iteration": 1e400},
        {"type": "notice", "why": "\ud800"}, {"type": "hello", "proof": "\udfff"},
    ]
    texts = [json.dumps(one).encode() for one in said]
    texts += [b"[" * 900, b'{"type":"bye","type":"bye"}', b"\xff\xfe{}", b"9" * 600]
    out = [b"".join(_frame(how, text) for text in texts[::2]) for how in (1, 5)]
    return out + [_frame(how, text) for text in texts for how in (0, 1, 3, 5, 9)]


def _frame(how: int, text: bytes) -> bytes:
    return bytes([how]) + struct.pack("<H", len(text)) + text
