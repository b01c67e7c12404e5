"""Interfaces that tests make: a frame that is sent before the kernel has noticed the link is lost without a word."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

__all__ = ["wait_for_links"]

HANG = 60.0  # seconds; the kernel's link watch takes one at most, and a busy machine several


def wait_for_links(ip: Callable[..., str], *names: str) -> None:
    """Until these interfaces carry frames, and forward them where they are a bridge's. ip("link", "show") runs ip."""
    end = time.monotonic() + HANG
    while missing := [name for name in names if not _carries(json.loads(ip("-j", "-d", "link", "show", name))[0])]:
        assert time.monotonic() < end, f"not up after {HANG:g} s: {missing}"
        time.sleep(0.005)


def _carries(link: dict) -> bool:
    info = link.get("linkinfo", {})
    forwards = info.get("info_slave_kind") != "bridge" or info["info_slave_data"]["state"] == "forwarding"
    return link["operstate"] == "UP" and forwards
