"""The process that writes versions to a store: started, watched and ended by the node (child.py).

    storing = Storing(config, say)      in the node
    check_store(config)                 for --check: may be waited for

It has the cores that no capture is pinned to, at a lower priority. The process itself: worker.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from flowcheck.checkpoint.objects import check_url
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.child import Beside, start
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.tokens import PEER

__all__ = ["Storing", "check_store"]

MODULE = "flowcheck.node.store.worker"
START_SECONDS = 60.0  # that a process takes to begin, on a machine with much else to do


class Storing(Beside):
    """config: with a `store`. Raises UserError for its URL."""

    def __init__(self, config: NodeConfig, say: Callable[..., None]) -> None:
        assert config.store is not None
        check_url(config.store.url)
        super().__init__(MODULE, "writes to the store", _settings(config, probe=False), say)

    def _tell(self, event: str, name: str, said: Mapping[str, Any]) -> None:
        match event:
            case "stored":
                self.well()
                self._say("stored", name=name, step=said["step"], bytes=said["bytes"], seconds=said["seconds"],
                          path=said["path"])
            case "unstored":
                self._say("unstored", name=name, step=said["step"], why=said["why"], again=said["again"])
            case "expired":
                self._say("expired", name=name, versions=said["versions"], path=said["path"])
            case "marked":
                self._say("marked", name=name, steps=said["steps"], newest=said["newest"], path=said["path"])
            case "skipped":
                self._say("skipped", name=name, step=said["step"], why=said["why"])
            case "problem":
                self._say("problem", name=name, why=said["why"])


def check_store(config: NodeConfig) -> None:
    """Write, read and remove an object, in a process that is ended if it hangs. Raises FlowcheckError."""
    assert config.store is not None
    check_url(config.store.url)
    seconds = config.store.seconds
    try:
        process = start(MODULE, _settings(config, probe=True), blocking=True)
    except OSError as error:
        raise EnvironmentProblem(f"the process that writes to the store cannot be started: {error.strerror}",
                                 where="store", remedy="memory, and room for processes and open files") from None
    try:
        out, _ = process.communicate(timeout=seconds + START_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out = b""
    why = f"no answer within {seconds:g} s" if process.returncode != 0 else ""
    for line in out.splitlines():
        if line.startswith(b'{"event": "unstored"'):
            why = str(json.loads(line)["why"])
    if why:
        raise EnvironmentProblem(why, where="store.url", remedy="a place that this node may write to, read and remove"
                                 " from; credentials as its library takes them, or in store.options")


def _settings(config: NodeConfig, probe: bool) -> dict[str, Any]:
    assert config.store is not None
    return {
        "node": config.name, "replicas": str(config.replica.directory), "probe": probe,
        "cores": sorted(os.sched_getaffinity(0) - config.pinned), "store": config.store.model_dump(),
        "token_file": str(config.token_files.get(PEER, "")), "readable_by": config.output.readable_by,
    }
