"""`flowcheck-node --config node.toml`: settings, DPDK, control port, groups; until SIGTERM or Ctrl-C.

Order of starting: settings -> DPDK and captures -> groups -> control port. Ending is the reverse: nobody new, then what
is in the rings is judged and published, then captures and DPDK go. Exit 0 after an orderly end, else as in errors.py.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dataplane.live import LiveConfig, LiveSource, start_eal
from dataplane.pydpdk.errors import DpdkError
from flowcheck import __version__
from flowcheck.errors import EnvironmentProblem, FlowcheckError, InternalError, UserError
from flowcheck.node.config import NodeConfig, load
from flowcheck.node.control import ControlServer
from flowcheck.node.drops import Drops
from flowcheck.node.group import Group
from flowcheck.node.output import Events, Hashes, Writer, check_places
from flowcheck.node.port import Port
from flowcheck.rebuild.calibration import settle, settle_updates

__all__ = ["Node", "main"]

GROUP_NAME = r"[A-Za-z0-9_.]{0,32}"  # no hyphen: in the names of replica files it ends the group's name


class Node:
    """Everything of one process. `with Node(config, say) as node: node.wait()`."""

    def __init__(self, config: NodeConfig, say: Events) -> None:
        self.config, self._say = config, say
        self._stopping = False  # no Event: a signal's handler may interrupt its very lock
        self._lock = threading.Lock()
        self._groups: dict[str, Group] = {}
        self._readers: dict[str, int] = {}  # of the capture, by group
        self._started = False  # with the first group: packets that nobody reads would only fill the ring
        token = config.token()
        if not os.access(config.replica.directory, os.W_OK | os.X_OK):  # a job would find out when it is too late
            raise EnvironmentProblem(
                "replica files cannot be made there", where=f"replica.directory {config.replica.directory}",
                remedy="an existing directory on tmpfs or hugetlbfs that the node may write to",
            )
        check_places(config.output)
        with ExitStack() as undo:
            capture = config.capture
            live = LiveConfig(
                capture.device, path_mtu=capture.path_mtu, queues=capture.queues, ring_size=capture.ring_size,
                cores=capture.cores,
            )
            eal = undo.enter_context(start_eal(live, huge=capture.huge))
            say("placing", text=str(settle(capture.path_mtu or 1024, eal.huge)))
            say("updating", text=str(settle_updates()))
            self._capture = undo.enter_context(LiveSource(eal, live))
            self._port = Port(self._capture, config.groups, capture.device)
            self._drops = Drops(capture, lambda: self._port.drops, say)
            path = config.output.keep_hashes
            self._hashes = undo.enter_context(closing(Hashes(path))) if path else None
            self._writer = undo.enter_context(closing(Writer(say, config.output.every)))
            undo.callback(self._stop_groups)
            for name in self._left_behind():
                self._group(name)
            self.control = undo.enter_context(closing(ControlServer(
                config.control.address, token, config.control.connections, self._group, say,
            )))
            self.control.start()
            self._undo = undo.pop_all()

    def _left_behind(self) -> list[str]:
        """Groups whose replicas an earlier process of this name left."""
        pattern = re.compile(rf"flowcheck-{re.escape(self.config.name)}-({GROUP_NAME})-[0-9]+\.replica")
        found = map(pattern.fullmatch, (path.name for path in self.config.replica.directory.glob("*.replica")))
        return sorted({match[1] for match in found if match})[: self.config.groups]

    def _group(self, name: str) -> Group | str:
        if not re.fullmatch(GROUP_NAME, name):
            return "the name of a group has letters, digits, _ and ."
        with self._lock:
            if name in self._groups:
                return self._groups[name]
            if len(self._groups) == self.config.groups:
                idle = [key for key, group in self._groups.items() if not group.members and group.plan is None]
                if not idle:
                    return f"{len(self._groups)} groups are attached, this node has room for no more"
                self._groups.pop(idle[0]).stop()
                self._port.close(self._readers.pop(idle[0]))
            reader = next(i for i in range(self.config.groups) if i not in self._readers.values())
            if not self._started:
                self._capture.start()
                self._started = True
            sources = self._port.open(reader)
            group = Group(name, self.config, sources, self._port, self._say, self._writer, self._hashes)
            group.start()
            self._groups[name], self._readers[name] = group, reader
            return group

    def wait(self) -> None:
        """Until `stop`, until a group's thread has died of a fault of ours, or the capture cannot go on (its
        interface is gone)."""
        while not self._stopping:
            time.sleep(0.1)
            self._drops.look()
            if self._started and self._capture.error is not None:
                raise self._capture.error
            failed = next((g.failure for g in self._groups.values() if g.failure is not None), None)
            if failed is not None:
                raise failed

    def stop(self) -> None:
        self._stopping = True

    def _stop_groups(self) -> None:
        for group in self._groups.values():
            group.stop()
        self._capture.stop()
        self._say("capture", text=self._capture.summary())

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
        raise UserError(str(error), where="capture", remedy="docs/use/node.md has every key") from None


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"flowcheck-node {__version__}")
        raise typer.Exit


def run(
    config: Annotated[Path, typer.Option("--config", help="Settings: node.toml (docs/use/node.md).")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line for machines.")] = False,
    keep_hashes: Annotated[
        Path | None, typer.Option("--keep-hashes", help="Append the SHA-256 of every version's tensors here.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Follow training jobs on a mirror port: a checkpoint after every iteration, or a reason why not."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also a start that is cut short is taken down in order
    settings = load(config)
    if keep_hashes is not None:
        settings = settings.model_copy(
            update={"output": settings.output.model_copy(update={"keep_hashes": keep_hashes})}
        )
    say = Events(as_json, settings.output.status_file)
    try:
        with _dpdk_errors(), Node(settings, say) as node:
            came: list[int] = []

            def stop(number: int, _: object) -> None:
                came.append(number)
                node.stop()

            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, stop)
            say("listening", control=node.control.address, groups=settings.groups)
            node.wait()
            why = signal.Signals(came[0]).name if came else "asked to"
            say("stopping", why=f"{why}: what is in the rings is judged and published first")
    except KeyboardInterrupt:
        print("flowcheck-node: interrupted before it was listening; nothing is left behind", file=sys.stderr)
        raise typer.Exit(130) from None
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
