"""What is said of one version in a replica file besides its tensors: its status, what nothing has shown of it, and how
many checksums of the trainer had matched.

    text = remarks(status, unproven, matches)        at most MOST_REMARKS bytes; what has no room is counted
    status, unproven, matches = read(text)           whatever lies there

The replica's own marks, which hold for all its versions, are in the layout (updater/reader.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from updater.store import MOST_REMARKS

__all__ = ["DAMAGED", "read", "remarks"]

DAMAGED = "what was said of this version cannot be read"


def remarks(status: str, unproven: Sequence[str], matches: int = 0) -> bytes:
    """b"" for nothing to say."""
    if not status and not unproven and not matches:
        return b""
    for kept in range(len(unproven), -1, -1):
        left = len(unproven) - kept
        said = [*unproven[:kept], *([f"and {left} more that have no room here"] if left else [])]
        text = json.dumps([status, said, *([matches] if matches else [])]).encode()
        if len(text) <= MOST_REMARKS:
            return text
    raise ValueError(f"a status of {len(status)} characters")


def read(text: bytes) -> tuple[str, tuple[str, ...], int | None]:
    """matches: None: unsaid, as is all else of ("", (), None)."""
    if not text:
        return "", (), None
    try:
        status, unproven, *rest = json.loads(text)
        counted = not rest or (len(rest) == 1 and type(rest[0]) is int and rest[0] > 0)
        if isinstance(status, str) and isinstance(unproven, list) and all(isinstance(one, str) for one in unproven):
            if counted:
                return status, tuple(unproven), rest[0] if rest else None
    except (ValueError, TypeError, RecursionError):
        pass
    return "unverified", (DAMAGED,), 0
