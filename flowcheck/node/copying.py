"""The process that keeps copies of other nodes' versions: started, watched and ended by the node (beside.py).

    copying = Copying(config, key, say)      key: that this node shows to others
    copying.tell(key)                        another one from now on
    copying.move(sources)                    copy from these from now on

It has the cores that no capture is pinned to, at a lower priority. The process itself: copier.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowcheck.control.tls import client_context
from flowcheck.durable import check_writable
from flowcheck.errors import UserError
from flowcheck.node.beside import Beside
from flowcheck.node.config import NodeConfig

__all__ = ["Copying", "check_copies"]


class Copying(Beside):
    """config: with `protect`."""

    def __init__(self, config: NodeConfig, key: str, say: Callable[..., None]) -> None:
        protect, directory = config.protect, config.copies
        assert protect is not None and directory is not None
        super().__init__("flowcheck.node.copier", "keeps copies of other nodes' versions", {
            "directory": str(directory), "key": key, "ca": config.tls.ca if config.tls is not None else "",
            "sources": protect.addresses, "cores": sorted(os.sched_getaffinity(0) - config.pinned),
            "rules": {"every": protect.every, "keep": protect.keep, "most": protect.memory_mb << 20,
                      "seconds": protect.seconds},
        }, say)

    def tell(self, key: str) -> None:
        self.order({"key": key})

    def move(self, sources: Sequence[tuple[str, int]]) -> None:
        self.order({"sources": list(sources)})

    def _tell(self, event: str, name: str, said: Mapping[str, Any]) -> None:
        match event:
            case "copied":
                self.well()
                self._say("copied", name=name, source=said["source"], step=said["step"], bytes=said["bytes"],
                          seconds=said["seconds"], path=said["path"])
            case "uncopied":
                self._say("uncopied", name=name, source=said["source"], why=said["why"])


def check_copies(config: NodeConfig) -> Path:
    """Where they lie. Raises EnvironmentProblem or UserError: it cannot be written to, or nobody could be asked."""
    directory = config.copies
    assert config.protect is not None and directory is not None
    if config.api is not None and config.api.address in config.protect.addresses:
        raise UserError(f"{config.api.listen} is this node itself", where="protect.copies",
                        remedy="those of other nodes")
    if config.tls is not None:
        client_context(config.tls.ca)
    check_writable(directory, "a directory that the node may write to as protect.directory, on tmpfs, and free space")
    return directory
