"""What takes the place of captures on a node of [feed]: no port, no DPDK, no rights.

    captures = NoCaptures(config, say)          as OpenCaptures has it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flowcheck.node.config.node import NodeConfig
from flowcheck.node.ports.rights import Rights
from flowcheck.node.ports.silence import Arrivals

if TYPE_CHECKING:
    from dataplane.live import LiveSource
    from flowcheck.node.ports.captures import PlannedCapture

__all__ = ["NoCaptures"]


class NoCaptures:
    """As OpenCaptures."""

    def __init__(self, config: NodeConfig, say: Callable[..., None]) -> None:
        self.planned: list[PlannedCapture] = []
        self.sources: list[LiveSource] = []
        Rights(()).give_back()
        self.port = Arrivals()

    def watch(self, say: Callable[..., None]) -> None:
        """There are no drops."""

    def start(self) -> None:
        """There is nothing to receive."""

    def look(self) -> None:
        """No interface could be gone."""

    def stop(self, say: Callable[..., Any]) -> None:
        """Nothing was brought."""

    def close(self) -> None:
        """Nothing was opened."""
