"""A node without a mirror port: it holds copies of other nodes' versions, and offers them. No DPDK, no capture.

    with Holder(config, say) as holder: holder.wait()

Order of starting: settings -> who may come in -> API -> copies. What it holds lies in files, which survive it: started
again it offers them at once, before any source answers. Its threads and processes share nothing with a trainer.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import typer

from flowcheck.errors import EnvironmentProblem
from flowcheck.node.children import Children
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.config.nodes import meant_by
from flowcheck.node.listening import check_address
from flowcheck.node.notify import Notify
from flowcheck.node.protect.supervisor import check_copies
from flowcheck.node.status.board_writer import BoardWriter
from flowcheck.node.tokens import Access, warnings_of
from flowcheck.node.versions.output import check_places

__all__ = ["Holder", "check"]


class Holder:
    """Everything of one process."""

    last = "what was copied stays"

    def __init__(self, config: NodeConfig, say: Callable[..., None]) -> None:
        self.config = config
        self._stopping = self._reload = False  # no Event: a signal's handler may interrupt its very lock
        self._access = access = _check_files(config, lambda event, **fields: self._say(event, **fields))
        self._notify = Notify()
        self._children: Children | None = None
        with ExitStack() as undo:
            self._board_writer = undo.enter_context(closing(BoardWriter(
                config.name, (), (), None, dict, shadow=config.shadow, doors=self._doors)))
            self._say = say = self._board_writer.tally.counting(say)
            self._board_writer.look()
            self._children = undo.enter_context(closing(Children(config, access, say, self._board_writer.board.fd)))
            self._undo = undo.pop_all()

    def _doors(self) -> dict[str, Any]:
        return {"ports": self._children.connected if self._children is not None else {}, "inboxes": {},
                "telemetry": {}}

    @property
    def api(self) -> str | None:
        return self._children.api if self._children is not None else None

    def announce(self, say: Callable[..., None]) -> None:
        assert self.config.protect is not None
        say("holder_ready", api=self.api, copies=list(self.config.protect.copies), every=self.config.protect.every,
            registry=list(self.config.nodes.registry), parity=self.config.protect.parity)
        for why in warnings_of(self.config):
            self._say("problem", why=why)

    def wait(self) -> None:
        """Until `stop`."""
        while not self._stopping:
            time.sleep(0.1)
            if not self._stopping:  # what told this process to end may have told those beside it, too
                self.turn()

    def turn(self) -> None:
        """What is done again and again. Never waits."""
        assert self._children is not None
        self._board_writer.look()
        self._children.look()
        at_once, self._reload = self._reload, False
        if self._access.look(at_once):
            self._children.renew()
        self._notify.alive()

    def stop(self) -> None:
        self._stopping = True

    def reload(self) -> None:
        """Tokens and certificate, soon; also from a signal's handler."""
        self._reload = True

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_files(config: NodeConfig, say: Callable[..., None]) -> Access:
    """Raises UserError or EnvironmentProblem for what is not there or cannot be made."""
    access = Access(config, say)
    check_places(config.output)
    check_copies(config)
    return access


def _taken(directory: Path) -> int:
    """Bytes that an earlier holder left, or one has that runs: those count in the bound, too. It may be removing some.
    """
    sizes = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                sizes += os.lstat(os.path.join(folder, name)).st_size
    return sizes


def check(config: NodeConfig, as_json: bool) -> None:
    """Print what it would take. Raises the first of what cannot hold, after all of it was printed."""
    _check_files(config, lambda *_, **__: None)
    assert config.api is not None
    check_address(config.api.address, "api.listen")
    assert config.protect is not None and config.copies is not None
    free = shutil.disk_usage(config.copies).free + _taken(config.copies) >> 20
    made = {"copies": list(config.protect.copies), "directory": str(config.copies), "free_mb": free,
            "memory_mb": config.protect.memory_mb, "notes": warnings_of(config),
            "registry": list(config.nodes.registry), "parity": config.protect.parity, "switches": meant_by(config)}
    if as_json:
        typer.echo(json.dumps(made))
    else:
        whose = [*config.protect.copies, *(f"those that {one} says" for one in config.nodes.registry[:1])]
        if whose:
            typer.echo(f"copies of the versions of {', '.join(whose)}, in {config.copies}")
        if config.protect.code is not None and config.member is not None:
            typer.echo(f"stream {config.member} of {config.protect.parity}, parity of the versions of"
                       f" {', '.join(config.protect.group[: config.protect.code[0]])}, in {config.parity}")
        elif config.protect.placed:
            typer.echo(f"a stream of {config.protect.parity}, if {config.nodes.registry[0]} says so, in"
                       f" {config.parity}")
        typer.echo(f"at most {config.protect.memory_mb:,} MiB; {free:,} MiB are free there")
        for note in warnings_of(config):
            typer.echo(note)
    if free < config.protect.memory_mb:
        raise EnvironmentProblem(
            f"{free:,} MiB are free in {config.copies.parent}, and copies and parity may take"
            f" {config.protect.memory_mb:,}", where="protect.memory_mb",
            remedy="another protect.directory, a larger tmpfs, or less as protect.memory_mb",
        )
