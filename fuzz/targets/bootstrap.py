"""Target: NCCL's bootstrap as strangers may send it, through flowcheck.learning.bootstrap (compiled by Cython).

    input: { how, source, destination, length (2) | body }*

`how` says what stands around the body, because no mutation finds a magic and a record of 3,584 bytes by chance:
bits 0-1 the stream's magic and type, bits 2-4 which size of QP record the body is stretched to, bit 5 a device
list before it, bit 6 four bytes behind it, bit 7 the body is TCP segments to be put together first.

Nothing may raise whatever the bytes, and the answer may not depend on being asked twice.
"""

from __future__ import annotations

import struct

from flowcheck.learning.bootstrap import STREAM_BYTES, Stream, parse_bootstrap, parse_qp_info, reassemble

__all__ = ["one"]

MAGIC = 0x564AB9F2FC4B9D6C
LEADS = (b"", struct.pack("<QI", MAGIC, 4), struct.pack("<QI", 77, 1), struct.pack("<QI", MAGIC, 1))
SIZES = (0, 552, 2600, 3336, 3576, 3584, 4448, 0)


def one(data: bytes) -> None:
    streams: list[Stream] = []
    at = 0
    while at + 5 <= len(data) and len(streams) < 64:
        how, source, destination = data[at : at + 3]
        (length,) = struct.unpack_from("<H", data, at + 3)
        body = data[at + 5 : at + 5 + length]
        at += 5 + length
        size, begun = SIZES[how >> 2 & 7], True
        if size and body:
            body = (body * (size // len(body) + 1))[:size] if how & 3 == 3 else body[:size].ljust(size, b"\0")
            parse_qp_info(body)
        body = (b"\1\0\0\0" + body[:4].ljust(4, b"\0") if how & 32 else b"") + body + (bytes(4) if how & 64 else b"")
        body = LEADS[how & 3] + body
        if how & 128:
            body, begun = reassemble(_segments(body))
            assert len(body) <= STREAM_BYTES
        streams.append(Stream(_address(source), _address(destination), body, begun))
    first = parse_bootstrap(streams)
    assert first == parse_bootstrap(streams)


def _address(number: int) -> tuple[str, int]:
    """A few addresses and ports, so that streams meet."""
    return f"10.0.0.{number & 3}", 1000 + (number >> 2 & 7)


def _segments(body: bytes) -> list[tuple[int, int, bytes]]:
    out, at = [], 0
    while at + 6 <= len(body):
        seq, flags, length = struct.unpack_from("<IBB", body, at)
        out.append((seq, flags, body[at + 6 : at + 6 + length]))
        at += 6 + length
    return out
