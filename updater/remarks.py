"""What is said of one version in a replica file besides its tensors: its status, and what nothing has shown of it.

    text = remarks(status, unproven)        at most MOST_REMARKS bytes; what has no room is counted
    status, unproven = read(text)           whatever lies there

The replica's own marks, which hold for all its versions, are in the layout (updater/reader.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from updater.store import MOST_REMARKS

__all__ = ["DAMAGED", "read", "remarks"]

DAMAGED = "what was said of this version cannot be read"


def remarks(status: str, unproven: Sequence[str]) -> bytes:
    """b"" for nothing to say."""
    if not status and not unproven:
        return b""
    for kept in range(len(unproven), -1, -1):
        left = len(unproven) - kept
        said = [*unproven[:kept], *([f"and {left} more that have no room here"] if left else [])]
        text = json.dumps([status, said]).encode()
        if len(text) <= MOST_REMARKS:
            return text
    raise ValueError(f"a status of {len(status)} characters")


def read(text: bytes) -> tuple[str, tuple[str, ...]]:
    """("", ()) for nothing said."""
    if not text:
        return "", ()
    try:
        status, unproven = json.loads(text)
        if isinstance(status, str) and isinstance(unproven, list) and all(isinstance(one, str) for one in unproven):
            return status, tuple(unproven)
    except (ValueError, TypeError, RecursionError):
        pass
    return "unverified", (DAMAGED,)
