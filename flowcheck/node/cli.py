"""`flowcheck-node --config node.toml`: settings, DPDK, control port, groups; until SIGTERM or Ctrl-C.

Order of starting: settings -> DPDK and captures -> groups -> control port. Ending is the reverse: nobody new, then what
is in the rings is judged and published, then captures and DPDK go. Exit 0 after an orderly end, else as in errors.py.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dataplane.live import LiveConfig, LiveSource, start_eal
from dataplane.pydpdk.errors import DpdkError
from flowcheck.errors import EnvironmentProblem, FlowcheckError, InternalError, UserError
from flowcheck.node.config import NodeConfig, load
from flowcheck.node.control import ControlServer
from flowcheck.node.group import Group
from flowcheck.node.output import Events, Hashes, Writer

__all__ = ["Node", "main"]


@dataclass(frozen=True)
class Queue:
    """One rx queue as a stream's source."""

    source: LiveSource
    index: int

    @property
    def ring_address(self) -> int:
        return self.source.ring_addresses[self.index]

    @property
    def error(self) -> Exception | None:
        return self.source.error


class Node:
    """Everything of one process. `with Node(config, say) as node: node.wait()`."""

    def __init__(self, config: NodeConfig, say: Events) -> None:
        self.config, self._say = config, say
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._groups: dict[str, Group] = {}
        self._used: dict[str, LiveSource] = {}  # by group
        self._started: list[LiveSource] = []
        with ExitStack() as undo:
            capture = config.capture
            live = [
                LiveConfig(
                    capture.device, path_mtu=capture.path_mtu, queues=capture.queues, ring_size=capture.ring_size,
                    cores=capture.cores,
                )
                for _ in range(config.groups)
            ]  # fmt: skip
            eal = undo.enter_context(start_eal(*live))
            self._captures = [undo.enter_context(LiveSource(eal, one)) for one in live]
            path = config.output.keep_hashes
            self._hashes = undo.enter_context(closing(Hashes(path))) if path else None
            self._writer = undo.enter_context(closing(Writer(say)))
            undo.callback(self._stop_groups)
            for name in self._left_behind():
                self._group(name)
            self.control = undo.enter_context(closing(ControlServer(
                config.control.address, config.token(), config.control.connections, self._group, say,
            )))
            self.control.start()
            self._undo = undo.pop_all()

    def _left_behind(self) -> list[str]:
        """Groups whose replicas an earlier process of this name left."""
        pattern = re.compile(rf"flowcheck-{re.escape(self.config.name)}-(.*)-[0-9]+\.replica")
        found = map(pattern.fullmatch, (path.name for path in self.config.replica.directory.glob("*.replica")))
        return sorted({match[1] for match in found if match})[: self.config.groups]

    def _group(self, name: str) -> Group | str:
        if not re.fullmatch(r"[A-Za-z0-9_.]{0,32}", name):
            return "the name of a group has letters, digits, _ and ."
        with self._lock:
            if name in self._groups:
                return self._groups[name]
            if len(self._groups) == self.config.groups:
                idle = [key for key, group in self._groups.items() if not group.members and group.plan is None]
                if not idle:
                    return f"{len(self._groups)} groups are attached, this node has room for no more"
                self._groups.pop(idle[0]).stop()
                del self._used[idle[0]]
            capture = next(c for c in self._captures if c not in self._used.values())
            sources = [Queue(capture, i) for i in range(self.config.capture.queues)]
            group = Group(name, self.config, sources, self._say, self._writer, self._hashes)
            if capture not in self._started:
                capture.start()
                self._started.append(capture)
            group.start()
            self._groups[name], self._used[name] = group, capture
            return group

    def wait(self) -> None:
        """Until `stop`, until a group's thread has died of a fault of ours, or a capture cannot go on (its interface
        is gone)."""
        while not self._stop.wait(0.2):
            lost = next((capture.error for capture in self._started if capture.error is not None), None)
            if lost is not None:
                raise lost
            failed = next((g.failure for g in self._groups.values() if g.failure is not None), None)
            if failed is not None:
                raise failed

    def stop(self) -> None:
        self._stop.set()

    def _stop_groups(self) -> None:
        for group in self._groups.values():
            group.stop()
        for capture in self._started:
            capture.stop()
            self._say("capture", text=capture.summary())

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _dpdk_errors() -> Iterator[None]:
    try:
        yield
    except DpdkError as error:
        raise EnvironmentProblem(error.what, remedy=error.remedy) from None
    except ValueError as error:
        if isinstance(error, FlowcheckError):
            raise
        raise UserError(str(error), where="capture", remedy="docs/node.md has every key") from None


def run(
    config: Annotated[Path, typer.Option("--config", help="Settings: node.toml (docs/node.md).")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line for machines.")] = False,
    keep_hashes: Annotated[
        Path | None, typer.Option("--keep-hashes", help="Append the SHA-256 of every version's tensors here.")
    ] = None,
) -> None:
    """Follow training jobs on a mirror port: a checkpoint after every iteration, or a reason why not."""
    settings = load(config)
    if keep_hashes is not None:
        settings = settings.model_copy(
            update={"output": settings.output.model_copy(update={"keep_hashes": keep_hashes})}
        )
    say = Events(as_json, settings.output.status_file)
    with _dpdk_errors(), Node(settings, say) as node:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: node.stop())
        say("listening", control=node.control.address, groups=settings.groups)
        node.wait()
    say("stopped")


def main() -> None:
    """Entry point of the console script."""
    app = typer.Typer(add_completion=False)
    app.command()(run)
    try:
        app(standalone_mode=True)
    except FlowcheckError as error:
        _fail(error)
    except Exception as error:
        traceback.print_exc()
        _fail(InternalError(f"{type(error).__name__}: {error}", remedy="this is a bug: report the lines above"))


def _fail(error: FlowcheckError) -> None:
    print(f"flowcheck-node: error: {error.message()}", file=sys.stderr)
    sys.exit(error.exit_code)
