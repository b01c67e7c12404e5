"""A node that follows jobs: DPDK, captures, groups, control port, and processes of its own.

    with dpdk_errors(), Node(config, say) as node: node.wait()

Order of starting: settings and name -> DPDK and captures, then rights are given back (ports/open_captures.py) ->
groups -> control port. Ending is the reverse: nobody new, then what is in the rings is judged and published, then
captures and DPDK go. What `--check` says: check/check.py. A node of [feed] has NoCaptures (ports/no_captures.py), and
one that holds copies alone is another: holder.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from flowcheck.control.tls import client_context
from flowcheck.node.check.files import check_files
from flowcheck.node.children import Children
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.groups.control import ControlServer
from flowcheck.node.groups.groups import Groups
from flowcheck.node.groups.ranges import wished
from flowcheck.node.groups.unattended import unattended_jobs
from flowcheck.node.notify import Notify
from flowcheck.node.peers.common_step import Common
from flowcheck.node.peers.step_gossip import Neighbours
from flowcheck.node.ports.no_captures import NoCaptures
from flowcheck.node.status.board_writer import BoardWriter
from flowcheck.node.status.telemetry import Telemetry
from flowcheck.node.tokens import warnings_of
from flowcheck.node.versions.output import Hashes, Writer
from flowcheck.node.versions.replica_files import NameLock

if TYPE_CHECKING:
    from flowcheck.node.ports.open_captures import OpenCaptures

__all__ = ["Node"]


class Node:
    """Everything of one process. `with Node(config, say) as node: node.wait()`."""

    last = "what is in the rings is judged and published first"

    def __init__(self, config: NodeConfig, say: Callable[..., None]) -> None:
        self.config, self._say = config, say
        jobs = unattended_jobs(config)
        self._stopping = self._reload = False  # no Event: a signal's handler may interrupt its very lock
        self._access = check_files(config, self._say_now)
        self._notify = Notify()
        self.control: ControlServer | None = None
        self._children: Children | None = None
        self._board_writer: BoardWriter | None = None
        self._telemetry: Telemetry | None = None
        with ExitStack() as undo:
            for directory in config.directories:  # to the end of all others
                undo.enter_context(closing(NameLock(directory, config.name)))
            captures = self._captures = undo.enter_context(closing(_captures(config, say)))
            self._common = Common(config.name, config.common.seconds, config.replica.slots, self._say_now)
            if config.api is not None:
                self._board_writer = undo.enter_context(closing(BoardWriter(
                    config.name, captures.planned, captures.sources, captures.port, self._connected,
                    common=self._common.document, shadow=config.shadow, doors=self._doors)))
                say = self._say = self._board_writer.tally.counting(say)
            captures.watch(say)
            groups = self.groups = self._begun(undo, say)
            groups.take_up(jobs)
            self._open(undo, groups, say)
            self._undo: ExitStack = undo.pop_all()

    def _begun(self, undo: ExitStack, say: Callable[..., None]) -> Groups:
        """Groups, with what they write."""
        config, path = self.config, self.config.output.keep_hashes
        hashes = undo.enter_context(closing(Hashes(path))) if path else None
        writer = undo.enter_context(closing(Writer(say, config.output.every, vouch=self._access.vouch)))
        if config.telemetry is not None:
            self._telemetry = undo.enter_context(closing(Telemetry(config.telemetry, say)))
        undo.callback(self._captures.stop, say)
        groups = Groups(config, self._captures.port, self._captures.start, say, writer, hashes, self._common,
                        self._telemetry)
        undo.callback(groups.stop)
        return groups

    def _open(self, undo: ExitStack, groups: Groups, say: Callable[..., None]) -> None:
        """Ports, processes, and then whoever comes."""
        config, access = self.config, self._access
        self.control = undo.enter_context(closing(ControlServer(
            config.control.address, access.of, config.control.connections, groups.intake_of, say, groups.shelf_of,
            wished(config.replica), lambda: access.tls, self._common.hear,
            strangers=config.control.strangers, per_address=config.control.strangers_per_address,
        )))
        tls = client_context(config.tls.ca) if config.tls is not None and config.common.nodes else None
        neighbours = undo.enter_context(closing(Neighbours(
            config.common.addresses, partial(config.token, "peer"), self._common, say, tls)))
        if self._board_writer is not None:
            self._board_writer.look()
        board = self._board_writer.board.fd if self._board_writer is not None else -1
        self._children = undo.enter_context(closing(Children(config, access, say, board)))
        self.control.start()
        neighbours.start()

    @property
    def api(self) -> str | None:
        """Where versions are served, if they are."""
        return self._children.api if self._children is not None else None

    def announce(self, say: Callable[..., None]) -> None:
        assert self.control is not None
        say("listening", control=self.control.address, groups=self.config.groups, api=self.api)
        for why in warnings_of(self.config):
            self._say("problem", why=why)

    def _say_now(self, event: str, **fields: object) -> None:
        self._say(event, **fields)

    def _connected(self) -> dict[str, int]:
        """Ranks that are, by group."""
        return self.groups.connected

    def _doors(self) -> dict[str, Any]:
        """Who is connected to the ports, what of the groups' inboxes is taken, and what was measured of gradients."""
        ports = {"control": self.control.connected} if self.control is not None else {}
        if self._children is not None:
            ports |= self._children.connected
        measured = self._telemetry.document() if self._telemetry is not None else {}
        return {"ports": ports, "inboxes": self.groups.inboxes, "telemetry": measured}

    def wait(self) -> None:
        """Until `stop`, until a group's thread has died of a fault of ours, or a capture cannot go on (its interface is
        gone)."""
        while not self._stopping:
            time.sleep(0.1)
            if not self._stopping:  # what ended this process may have ended those of its own, too
                self.turn()

    def turn(self) -> None:
        """What is done again and again."""
        assert self._children is not None
        self._captures.look()
        if self._board_writer is not None:
            self._board_writer.look()
        self._children.look()
        self._common.look()
        self.groups.check()
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

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _captures(config: NodeConfig, say: Callable[..., None]) -> OpenCaptures | NoCaptures:
    if not config.capture:
        return NoCaptures(config, say)
    from flowcheck.node.ports.open_captures import OpenCaptures  # which needs DPDK

    return OpenCaptures(config, say)
