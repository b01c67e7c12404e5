"""[feed]: gradients that trainers send, on a node without a mirror port."""

from __future__ import annotations

from flowcheck.node.config.table import Table

__all__ = ["Feed"]


class Feed(Table):
    """This node follows jobs that send their gradients (attach: source="feed"), and has no [capture]: no DPDK, no huge
    pages, no rights. It has no keys. A node with a [capture] follows them besides, and needs no [feed]."""
