"""What changed between NCCL versions, as data: one Family per group of versions with the same wire format.

Source: reference nccl-wire.md sections 2.4 to 2.6, 5.2 and 5.4; the layout rules themselves are in chunk_layout.py.
Pure functions; any thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flowcheck.errors import UserError

__all__ = ["FAMILIES", "NEWEST", "Family", "family_of"]


@dataclass(frozen=True)
class Family:
    """One wire format.

    first: the lowest (major, minor) it holds for.
    layout: "loops" (interleaved, to 2.19), "ranges" (2.20-2.21), "bytes" (continuous byte distribution).
    min_traffic, cell, ll_scale, floor_lo, clamp: the parameters of "bytes" (chunk_layout.split_bytes). cell: bytes, 0
    where it is computed from min_traffic.
    cts_bytes: element size; cts_fields: offset and width of addr, size, the first rkey, nreqs, tag, idx.
    big_endian_imm: byte order of the immediate on the wire.
    always_pair: adaptive-routing pair above the threshold whatever the setting says (2.12-2.15).
    """

    name: str
    first: tuple[int, int]
    layout: str
    cts_bytes: int
    cts_fields: dict[str, tuple[int, int]]
    big_endian_imm: bool = False
    always_pair: bool = False
    min_traffic: int = 0
    cell: int = 0
    floor_lo: bool = False
    ll_scale: int = 1
    clamp: bool = True


_CTS_32 = {"addr": (0, 8), "size": (8, 4), "rkey": (12, 4), "nreqs": (16, 4), "tag": (20, 4), "idx": (24, 8)}
_CTS_2_20 = {"addr": (0, 8), "size": (8, 4), "rkey": (12, 4), "nreqs": (20, 4), "tag": (24, 4), "idx": (32, 8)}
_CTS_2_24 = {"addr": (0, 8), "size": (8, 8), "rkey": (16, 4), "nreqs": (32, 4), "tag": (36, 4), "idx": (40, 8)}
_CTS_2_30 = {"addr": (0, 8), "size": (8, 8), "rkey": (16, 4), "nreqs": (48, 4), "tag": (52, 4), "idx": (56, 8)}

FAMILIES = (
    Family("2.12", (2, 12), "loops", 32, _CTS_32, always_pair=True),
    Family("2.16", (2, 16), "loops", 32, _CTS_32),
    Family("2.19", (2, 19), "loops", 32, _CTS_32),
    Family("2.20", (2, 20), "ranges", 64, _CTS_2_20),
    Family("2.22", (2, 22), "bytes", 64, _CTS_2_20, min_traffic=512, cell=16, floor_lo=True),
    Family("2.23", (2, 23), "bytes", 64, _CTS_2_20, min_traffic=16384),
    Family("2.24", (2, 24), "bytes", 64, _CTS_2_24, min_traffic=16384),
    Family("2.26", (2, 26), "bytes", 64, _CTS_2_24, min_traffic=16384, ll_scale=4),
    Family("2.29", (2, 29), "bytes", 64, _CTS_2_24, True, min_traffic=32768, ll_scale=4, clamp=False),
    Family("2.30", (2, 30), "bytes", 64, _CTS_2_30, True, min_traffic=32768, ll_scale=4, clamp=False),
)
#: The last version that the last family holds for.
NEWEST = (2, 30)


def family_of(version: str) -> Family:
    """The family of an NCCL version such as "2.27.7" or "2.19". Raises UserError for one that has none."""
    match = re.fullmatch(r"v?(\d+)\.(\d+)(\..*)?", version.strip())
    wanted = (int(match[1]), int(match[2])) if match else (0, 0)
    if not FAMILIES[0].first <= wanted <= NEWEST:
        raise UserError(
            f"NCCL {version!r} has no known wire format", where="communicator.nccl_version",
            remedy=f"give a version from {FAMILIES[0].name} to {NEWEST[0]}.{NEWEST[1]}, such as 2.27.7",
        )
    return [family for family in FAMILIES if family.first <= wanted][-1]
