"""What changed on the wire between NCCL versions: one table, a row for each range of versions that are alike.

    of(version) -> Nccl      the row of "2.27.7"; WireError for a version that was never read

Everything that depends on NCCL's version asks a row: the state machine's plan, the observer, the layout of calls,
learning, the checks of a manifest. docs/understand/new-nccl.md says how a version is added. Pure, any thread.

Sources: reference nccl-wire.md; the section is named at each field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["CTS_ELEMENTS", "TABLE", "Chunks", "CtsElement", "Nccl", "Parts", "WireError", "minor_of", "of", "span"]


class WireError(ValueError):
    """The job describes something that this wire model does not cover."""


@dataclass(frozen=True)
class CtsElement:
    """The clear-to-send write (5.4): its size, the width of its size field (at byte 8, after the address), and at which
    bytes the memory keys, the number of requests, the sender's tag and the message number begin."""

    bytes: int
    size_width: int
    rkey_at: int
    requests_at: int
    tag_at: int
    number_at: int

    @property
    def versions(self) -> str:
        """The versions that write it, such as "2.24-2.29"."""
        return span([row for row in TABLE if row.cts == self])


class Parts(Enum):
    """How a call's elements are given to channels."""

    LOOPS = "loops over all channels"  # 2.4, 7.3, 8.1: interleaved
    RANGES = "one range per channel, aligned by threads"  # 2.5
    BYTES = "one range per channel, cut by traffic"  # 2.6: continuous byte distribution


@dataclass(frozen=True)
class Chunks:
    """How calls are cut. The rest is for Parts.BYTES alone (2.6):

    min_traffic: bytes that a channel is worth using for. cell: bytes of a cell, 0: computed from min_traffic.
    ll_weight: how much heavier LL's traffic counts. clamped: a channel's part is at least min_traffic. floored: the
    first channel's part is rounded down to cells, and may be empty.
    """

    parts: Parts
    min_traffic: int = 0
    cell: int = 0
    ll_weight: int = 1
    clamped: bool = True
    floored: bool = False


@dataclass(frozen=True)
class Nccl:
    """NCCL 2.`first` to 2.`last`.

    cts: clear-to-send element (5.4). big_endian: byte order of immediates (5.2). always_pairs: large messages leave as
    an adaptive-routing pair whatever is set (5.2). devices: ports that a NIC may be merged of (5.3). chunks: 2.4 to
    2.6. tree_threads: threads of a tree call, 0: as 3.1 computes them. qp_info: bytes of the queue pair handshake's
    record (6.1), 0 where it was not read. example: a version that learning names when the range is all it knows.
    proven: what confirms the row beside its source (docs/understand/wire.md).
    """

    first: int
    last: int
    example: str
    cts: CtsElement
    chunks: Chunks
    big_endian: bool = False
    always_pairs: bool = False
    devices: int = 1
    tree_threads: int = 0
    qp_info: int = 0
    proven: str = ""

    @property
    def versions(self) -> str:
        return span([self])


_CTS_32 = CtsElement(32, size_width=4, rkey_at=12, requests_at=16, tag_at=20, number_at=24)
_CTS_2_20 = CtsElement(64, size_width=4, rkey_at=12, requests_at=20, tag_at=24, number_at=32)
_CTS_2_24 = CtsElement(64, size_width=8, rkey_at=16, requests_at=32, tag_at=36, number_at=40)
_CTS_2_30 = CtsElement(64, size_width=8, rkey_at=16, requests_at=48, tag_at=52, number_at=56)
_LOOPS, _RANGES = Chunks(Parts.LOOPS), Chunks(Parts.RANGES)
_2_22 = Chunks(Parts.BYTES, min_traffic=512, cell=16, floored=True)
_2_23 = Chunks(Parts.BYTES, min_traffic=16384)
_2_26 = Chunks(Parts.BYTES, min_traffic=16384, ll_weight=4)
_2_29 = Chunks(Parts.BYTES, min_traffic=32768, ll_weight=4, clamped=False)

#: In order of versions, without a gap.
TABLE = (
    Nccl(12, 15, "2.12.12", _CTS_32, _LOOPS, always_pairs=True, qp_info=552,
         proven="NIC captures, two ranks, LL"),
    Nccl(16, 18, "2.18.6", _CTS_32, _LOOPS, qp_info=552,
         proven="source; layout as 2.19"),
    Nccl(19, 19, "2.19.4", _CTS_32, _LOOPS, qp_info=2600,
         proven="NIC captures, two ranks, LL; vectors"),
    Nccl(20, 21, "2.20.5", _CTS_2_20, _RANGES, devices=2, qp_info=3336,
         proven="source, written twice"),
    Nccl(22, 22, "2.22.3", _CTS_2_20, _2_22, devices=2, tree_threads=640, qp_info=3336,
         proven="vectors"),
    Nccl(23, 23, "2.23.4", _CTS_2_20, _2_23, devices=2, tree_threads=640, qp_info=3336,
         proven="source, written twice"),
    Nccl(24, 25, "2.24.3", _CTS_2_24, _2_23, devices=4, tree_threads=640, qp_info=3576,
         proven="source, written twice"),
    Nccl(26, 28, "2.27.7", _CTS_2_24, _2_26, devices=4, tree_threads=640, qp_info=3584,
         proven="vectors; soft-RoCE captures of 2.27"),
    Nccl(29, 29, "2.29.2", _CTS_2_24, _2_29, big_endian=True, devices=4, tree_threads=640,
         proven="source, written twice"),
    Nccl(30, 30, "2.30.7", _CTS_2_30, _2_29, big_endian=True, devices=8, tree_threads=640, qp_info=4448,
         proven="vectors"),
)
#: Every form once. None can be taken for another: what counts the requests in one is a key or zero in the others.
CTS_ELEMENTS = tuple(dict.fromkeys(row.cts for row in TABLE))


def span(rows: Sequence[Nccl]) -> str:
    """The versions of neighbouring rows, such as "2.24-2.29"."""
    first, last = rows[0].first, rows[-1].last
    return f"2.{first}" if first == last else f"2.{first}-2.{last}"


def minor_of(version: str) -> int:
    """27 of "2.27.7". Raises WireError."""
    parts = version.split(".")
    try:
        major, minor = int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        raise WireError(f"{version!r} is not an NCCL version such as 2.19.4") from None
    if major != 2 or not TABLE[0].first <= minor <= TABLE[-1].last:
        known = f"2.{TABLE[0].first}..2.{TABLE[-1].last}"
        raise WireError(f"NCCL {version} is outside {known}: its wire layout has not been read")
    return minor


def of(version: str) -> Nccl:
    """The row of an NCCL version such as "2.27.7". Raises WireError."""
    minor = minor_of(version)
    return next(row for row in TABLE if row.first <= minor <= row.last)
