"""The process that writes versions to a store: started, watched and ended by the node (child.py).

    child = storing(config, say)        in the node
    check_store(config)                 for --check: may be waited for

It has the cores that no capture is pinned to, at a lower priority. The process itself: worker.py.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

from flowcheck.checkpoint.objects import check_url
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.process.child import ChildProcess, start
from flowcheck.node.process.lines import read_event
from flowcheck.node.store.border import EVENTS, PROGRAM, StoreSettings, Unstored
from flowcheck.node.tokens import PEER

__all__ = ["check_store", "storing"]

START_SECONDS = 60.0  # that a process takes to begin, on a machine with much else to do


def storing(config: NodeConfig, say: Callable[..., None]) -> ChildProcess:
    """config: with a `store`. say: events. Raises UserError for its URL."""
    assert config.store is not None
    check_url(config.store.url)
    return ChildProcess(PROGRAM, _settings(config, probe=False), say)


def check_store(config: NodeConfig) -> None:
    """Write, read and remove an object, in a process that is ended if it hangs. Raises FlowcheckError."""
    assert config.store is not None
    check_url(config.store.url)
    seconds = config.store.seconds
    try:
        process = start(PROGRAM.module, _settings(config, probe=True), blocking=True)
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
        if isinstance(said := read_event(EVENTS, line), Unstored):
            why = said.why
    if why:
        raise EnvironmentProblem(why, where="store.url", remedy="a place that this node may write to, read and remove"
                                 " from; credentials as its library takes them, or in store.options")


def _settings(config: NodeConfig, probe: bool) -> StoreSettings:
    assert config.store is not None
    return StoreSettings(
        node=config.name, replicas=config.replica.directory, probe=probe, store=config.store,
        cores=tuple(sorted(os.sched_getaffinity(0) - config.pinned)), token_file=config.token_files.get(PEER),
        readable_by=config.output.readable_by, journals=config.journals if config.store.deltas else None,
    )
