"""Descriptors: a process has so many, and connections must leave some for everything else."""

from __future__ import annotations

import resource

__all__ = ["OTHERS", "most_descriptors", "raise_limit", "strangers_within"]

MOST = 1 << 16  # more than any setting asks for; some libraries walk through all that there may be
OTHERS = 192  # that are not for connections: captures, replicas, logs, pipes
LEAST = 8


def most_descriptors() -> int:
    """That this process may have at most."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)


def raise_limit() -> int:
    """Raise the soft limit as far as it may be raised. Returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most_descriptors()
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft
    return wanted


def strangers_within(limit: int, wanted: int, connections: int) -> int:
    """How many strangers may be connected next to so many that are known, of which each takes two descriptors."""
    return max(LEAST, min(wanted, limit - OTHERS - 2 * connections))
