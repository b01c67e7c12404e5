"""Counts by cause, and by how much they have grown."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["grown"]


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """By how much each count has, of those that have."""
    return {cause: count - before.get(cause, 0) for cause, count in now.items() if count > before.get(cause, 0)}
