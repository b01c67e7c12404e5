"""Versions of NCCL for tests that mean "one of each row of the table": all of them try a new row of parser.nccl.

Tests that mean a version by itself, such as that of a capture or of a vector, name it.
"""

from __future__ import annotations

from parser.nccl import TABLE

__all__ = ["UNREAD", "VECTORS", "VERSIONS", "since"]

VERSIONS = tuple(row.example for row in TABLE)
#: Cases of NCCL itself, executed, in the captures' folder nccl-vectors: VERSION.jsonl.
VECTORS = {"2.19.4": 171, "2.22.3": 146, "2.27.7": 171, "2.30.7": 146}
#: The version after the newest row's.
UNREAD = f"2.{TABLE[-1].last + 1}.0"


def since(minor: int) -> tuple[str, ...]:
    """One version of each row that begins with 2.`minor` or later."""
    return tuple(row.example for row in TABLE if row.first >= minor)
