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

__all__ = [
    "CTS_ELEMENTS", "QP_INFOS", "TABLE", "Chunks", "CtsElement", "Nccl", "Parts", "QpInfo", "WireError", "minor_of",
    "of", "span",
]


class WireError(ValueError):
    """The job describes something that this wire model does not cover."""


@dataclass(frozen=True)
class CtsElement:
    """One form of the clear-to-send write (5.4): its bytes, and where its fields begin. All are little-endian.

    bytes: at most 128, which is what learning keeps of a write. size: how much may be written, of 4 or 8 bytes.
    rkey_at: the first of `keys` memory keys of 4 bytes. requests, tag (of the sender): 4 bytes. number (of the
    message, the first is 1), address: 8 bytes. Raises ValueError for fields that overlap or lie outside.
    """

    bytes: int
    size_width: int
    rkey_at: int
    keys: int
    requests_at: int
    tag_at: int
    number_at: int
    address_at: int = 0
    size_at: int = 8

    def __post_init__(self) -> None:
        fields = sorted([
            (self.address_at, 8), (self.size_at, self.size_width), (self.rkey_at, 4 * self.keys),
            (self.requests_at, 4), (self.tag_at, 4), (self.number_at, 8),
        ])
        ends = [at + width for at, width in fields]
        if self.size_width not in (4, 8) or self.keys < 1 or self.bytes > 128 or fields[0][0] < 0:
            raise ValueError(f"{self}: a width, a place or the bytes are not possible")
        if any(end > at for end, at in zip(ends, [*(at for at, _ in fields[1:]), self.bytes], strict=True)):
            raise ValueError(f"{self}: fields overlap, or lie outside")

    @property
    def versions(self) -> str:
        """The versions that write it, such as "2.24-2.29"."""
        return span([row for row in TABLE if row.cts == self])


@dataclass(frozen=True)
class QpInfo:
    """The record of the queue pair handshake (6.1). qpn_at, qpn_step: where the first QP number lies, and how far from
    it the next. gid_at, fifo_at, mtu_at: where GID, FIFO address and the path MTU's enum lie; 0: that was not read.
    after_devices: a list of devices comes before it."""

    bytes: int
    qpn_at: int
    qpn_step: int
    gid_at: int = 0
    fifo_at: int = 0
    mtu_at: int = 0
    after_devices: bool = False


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
    2.6. tree_threads: threads of a tree call, 0: as 3.1 computes them. qp_info: record of the queue pair handshake
    (6.1), None where it was not read. example: a version that learning names when the range is all it knows.
    proven: what confirms the row in addition to its source (docs/understand/wire.md).
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
    qp_info: QpInfo | None = None
    proven: str = ""

    @property
    def versions(self) -> str:
        return span([self])


_CTS_32 = CtsElement(32, size_width=4, rkey_at=12, keys=1, requests_at=16, tag_at=20, number_at=24)
_CTS_2_20 = CtsElement(64, size_width=4, rkey_at=12, keys=2, requests_at=20, tag_at=24, number_at=32)
_CTS_2_24 = CtsElement(64, size_width=8, rkey_at=16, keys=4, requests_at=32, tag_at=36, number_at=40)
_CTS_2_30 = CtsElement(64, size_width=8, rkey_at=16, keys=8, requests_at=48, tag_at=52, number_at=56)
_QP_552 = QpInfo(552, qpn_at=8, qpn_step=4)
_QP_2600 = QpInfo(2600, qpn_at=8, qpn_step=4, gid_at=2568, fifo_at=2592, mtu_at=2584)
_QP_3336 = QpInfo(3336, qpn_at=0, qpn_step=24, gid_at=3088, fifo_at=3320)
_QP_3576 = QpInfo(3576, qpn_at=0, qpn_step=24, gid_at=3088, fifo_at=3560, after_devices=True)
_QP_3584 = QpInfo(3584, qpn_at=0, qpn_step=24, gid_at=3088, fifo_at=3560, after_devices=True)
_QP_4448 = QpInfo(4448, qpn_at=0, qpn_step=24, gid_at=3472, fifo_at=4424, after_devices=True)
_LOOPS, _RANGES = Chunks(Parts.LOOPS), Chunks(Parts.RANGES)
_2_22 = Chunks(Parts.BYTES, min_traffic=512, cell=16, floored=True)
_2_23 = Chunks(Parts.BYTES, min_traffic=16384)
_2_26 = Chunks(Parts.BYTES, min_traffic=16384, ll_weight=4)
_2_29 = Chunks(Parts.BYTES, min_traffic=32768, ll_weight=4, clamped=False)

#: In order of versions, without a gap.
TABLE = (
    Nccl(12, 15, "2.12.12", _CTS_32, _LOOPS, always_pairs=True, qp_info=_QP_552,
         proven="NIC captures, two ranks, LL"),
    Nccl(16, 18, "2.18.6", _CTS_32, _LOOPS, qp_info=_QP_552,
         proven="source; layout as 2.19"),
    Nccl(19, 19, "2.19.4", _CTS_32, _LOOPS, qp_info=_QP_2600,
         proven="NIC captures, two ranks, LL; vectors"),
    Nccl(20, 21, "2.20.5", _CTS_2_20, _RANGES, devices=2, qp_info=_QP_3336,
         proven="source, written twice"),
    Nccl(22, 22, "2.22.3", _CTS_2_20, _2_22, devices=2, tree_threads=640, qp_info=_QP_3336,
         proven="vectors"),
    Nccl(23, 23, "2.23.4", _CTS_2_20, _2_23, devices=2, tree_threads=640, qp_info=_QP_3336,
         proven="source, written twice"),
    Nccl(24, 25, "2.24.3", _CTS_2_24, _2_23, devices=4, tree_threads=640, qp_info=_QP_3576,
         proven="source, written twice"),
    Nccl(26, 28, "2.27.7", _CTS_2_24, _2_26, devices=4, tree_threads=640, qp_info=_QP_3584,
         proven="vectors; soft-RoCE captures of 2.27"),
    Nccl(29, 29, "2.29.2", _CTS_2_24, _2_29, big_endian=True, devices=4, tree_threads=640,
         proven="source, written twice"),
    Nccl(30, 30, "2.30.7", _CTS_2_30, _2_29, big_endian=True, devices=8, tree_threads=640, qp_info=_QP_4448,
         proven="vectors"),
)
#: Every form once. None can be taken for another: what counts the requests in one is a key or zero in the others.
#: tests/flowcheck/rebuild/test_rows_apart.py tries that.
CTS_ELEMENTS = tuple(dict.fromkeys(row.cts for row in TABLE))
QP_INFOS = tuple(dict.fromkeys(row.qp_info for row in TABLE if row.qp_info is not None))


def span(rows: Sequence[Nccl]) -> str:
    """The versions of rows in the table's order, such as "2.24-2.29", or "2.12-2.15 or 2.19"."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row.first == runs[-1][1] + 1:
            runs[-1][1] = row.last
        else:
            runs.append([row.first, row.last])
    return " or ".join(f"2.{first}" if first == last else f"2.{first}-2.{last}" for first, last in runs)


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
