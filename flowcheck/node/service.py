"""A node that follows jobs: DPDK, captures, groups, control port. With `--check` only what it would take.

    with dpdk_errors(), Node(config, say) as node: node.wait()

Order of starting: settings -> DPDK and captures, then rights are given back (ports/rights.py) -> groups -> control
port. Ending is the reverse: nobody new, then what is in the rings is judged and published, then captures and DPDK go. A
node without a port: holder.py.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import typer
from rich.console import Console

from dataplane.live import LiveSource, check_cores, start_eal
from dataplane.pydpdk.errors import DpdkError
from flowcheck.checkpoint.objects import check_url
from flowcheck.control.proof import node_key
from flowcheck.control.tls import client_context
from flowcheck.errors import EnvironmentProblem, FlowcheckError, UserError
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.budget import EXAMPLE_MBPS, Budget, ask, budget
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.groups.control import ControlServer
from flowcheck.node.groups.group import Group
from flowcheck.node.groups.ranges import wished
from flowcheck.node.groups.unattended import Unattended, unattended_jobs
from flowcheck.node.listening import check_address
from flowcheck.node.notify import Notify
from flowcheck.node.peers.common_step import Common
from flowcheck.node.peers.shelf import Shelf
from flowcheck.node.peers.step_gossip import Neighbours
from flowcheck.node.ports.captures import naming, plan_captures
from flowcheck.node.ports.drops import Drops
from flowcheck.node.ports.port import Port
from flowcheck.node.ports.rights import Rights
from flowcheck.node.protect.supervisor import Copying, check_copies
from flowcheck.node.status.publisher import Telling
from flowcheck.node.store.supervisor import Storing, check_store
from flowcheck.node.tokens import PEER, Access, warnings_of
from flowcheck.node.versions.output import Hashes, Writer, check_places
from flowcheck.rebuild.calibration import settle, settle_updates
from flowcheck.tables import Column, print_table, screen

__all__ = ["Node", "check", "dpdk_errors"]

GROUP_NAME = r"[A-Za-z0-9_.]{0,32}"  # no hyphen: in the names of replica files it ends the group's name


class Node:
    """Everything of one process. `with Node(config, say) as node: node.wait()`."""

    last = "what is in the rings is judged and published first"

    def __init__(self, config: NodeConfig, say: Callable[..., None]) -> None:
        self.config, self._say = config, say
        unattended = unattended_jobs(config)
        self._stopping = False  # no Event: a signal's handler may interrupt its very lock
        self._lock = threading.Lock()
        self._groups: dict[str, Group] = {}
        self._ended: set[str] = set()  # groups whose job has ended in order, and nobody has come back since
        self._started = False  # with the first job
        self._receiving = 0  # captures that do
        self._access = access = _check_files(config, self._say_now)
        self._reload = False
        self._notify = Notify()
        planned = plan_captures(config)
        self._rights = rights = Rights(one.live.port.driver for one in planned)
        with ExitStack() as undo:
            begin: Callable[..., Any] = partial(rights.call, start_eal) if rights.opens_with_dpdk else start_eal
            eal = undo.enter_context(begin(*(one.live for one in planned), huge=config.huge))
            say("placing", text=str(settle(max(one.live.path_mtu or 1024 for one in planned), eal.huge)))
            say("updating", text=str(settle_updates()))
            self._captures: list[LiveSource] = []
            for one in planned:
                with naming(one):
                    check_cores(one.settings.place_cores)  # those of `cores` are looked at by the source
                    source = rights.call(LiveSource, eal, one.live)
                    undo.callback(rights.call, source.close)
                    self._captures.append(source)
                    if one.live.port.interface:  # its driver sets the interface's flags then
                        rights.call(source.start_port)
            rights.give_back()
            self._planned = planned
            self._port = Port(planned, self._captures)
            self._telling: Telling | None = None
            self._serving: Serving | None = None
            self.control: ControlServer | None = None
            self._common = Common(config.name, config.common.seconds, config.replica.slots, self._say_now)
            if config.api is not None:
                self._telling = undo.enter_context(closing(Telling(
                    config.name, planned, self._captures, self._port, self._connected, common=self._common.document,
                    shadow=config.shadow, doors=self._doors)))
                say = self._say = self._telling.tally.beside(say)
            self._drops = [Drops(one, partial(self._port.drops_of, i), say) for i, one in enumerate(planned)]
            path = config.output.keep_hashes
            self._hashes = undo.enter_context(closing(Hashes(path))) if path else None
            self._writer = undo.enter_context(closing(Writer(say, config.output.every, vouch=access.vouch)))
            undo.callback(self._stop_groups)
            self._unattended = [
                Unattended(*job, config, self._port.queues, self._port.placers, self._port, say, self._hashes)
                for job in unattended
            ]
            for name in self._left_behind():
                self._group(name)
            for follower in self._unattended:
                self._start()
                follower.start()
            self.control = undo.enter_context(closing(ControlServer(
                config.control.address, access.of, config.control.connections, self._group, say, self._shelf,
                wished(config.replica), lambda: access.tls, self._common.hear,
                strangers=config.control.strangers, per_address=config.control.strangers_per_address,
            )))
            tls = client_context(config.tls.ca) if config.tls is not None and config.common.nodes else None
            neighbours = undo.enter_context(closing(Neighbours(
                config.common.addresses, partial(config.token, "peer"), self._common, say, tls)))
            if self._telling is not None:
                self._telling.look()
                self._serving = undo.enter_context(closing(Serving(config, access.keys, say, self._telling.board.fd)))
            self._storing = undo.enter_context(closing(Storing(config, say))) if config.store else None
            self._copying = undo.enter_context(closing(
                Copying(config, self._key, self.api or "", say))) if config.protect else None
            self.control.start()
            neighbours.start()
            self._undo = undo.pop_all()

    @property
    def api(self) -> str | None:
        """Where versions are served, if they are."""
        return self._serving.address if self._serving is not None else None

    def announce(self, say: Callable[..., None]) -> None:
        assert self.control is not None
        say("listening", control=self.control.address, groups=self.config.groups, api=self.api)
        for why in warnings_of(self.config):
            self._say("problem", why=why)

    def _say_now(self, event: str, **fields: object) -> None:
        self._say(event, **fields)

    def _say_of(self, group: str, event: str, /, **fields: object) -> None:
        """What a group says. A session outlives the end of its job, which only its events tell."""
        if event == "end":
            self._ended.add(group)
        elif event == "attached":  # it may have come back before the end of the one before was said
            self._ended.discard(group)
        self._say(event, **fields)

    def _connected(self) -> dict[str, int]:
        """Ranks that are, by group."""
        return {name: len(group.members) for name, group in list(self._groups.items())}

    def _doors(self) -> dict[str, Any]:
        """Who is connected to the ports, and what of the groups' inboxes is taken."""
        ports = {"control": self.control.connected} if self.control is not None else {}
        if self._serving is not None:
            ports["api"] = self._serving.connected
        inboxes = {name: group.inbox.counts() for name, group in list(self._groups.items())}
        return {"ports": ports, "inboxes": inboxes}

    def _left_behind(self) -> list[str]:
        """Groups whose replicas an earlier process of this name left."""
        pattern = re.compile(rf"flowcheck-{re.escape(self.config.name)}-({GROUP_NAME})-[0-9]+\.replica")
        found = map(pattern.fullmatch, (path.name for path in self.config.replica.directory.glob("*.replica")))
        return sorted({match[1] for match in found if match})[: self.config.groups]

    def _group(self, name: str) -> Group | str:
        if not re.fullmatch(GROUP_NAME, name):
            return "the name of a group has letters, digits, _ and ."
        if name in {one.group for one in self.config.follow}:
            return f"group {name!r} is of [[follow]] in this node's settings, without trainers; attach with another"
        with self._lock:
            if name in self._groups:
                self._ended.discard(name)
                return self._groups[name]
            if len(self._groups) == self.config.groups:
                left = {key: group.plan for key, group in self._groups.items() if not group.members}
                idle = [key for key, plan in left.items() if plan is None]
                idle += [key for key in left if key in self._ended]
                if not idle:
                    return f"{len(self._groups)} groups are attached, this node has room for no more"
                self._groups.pop(idle[0]).stop()
                self._ended.discard(idle[0])
            self._start()
            port = self._port
            group = Group(name, self.config, port.queues, port.placers, port, partial(self._say_of, name), self._writer,
                          self._hashes, self._common)
            try:
                group.start()
            except RuntimeError as error:  # there is no thread to be had
                group.stop()
                raise EnvironmentProblem(f"group {name!r} cannot be started: {error}", where="groups",
                                         remedy="room for more threads of this user") from None
            self._groups[name] = group
            return group

    def _shelf(self, name: str) -> Shelf | None:
        with self._lock:
            group = self._groups.get(name)
        return group.peering.shelf if group is not None and self.config.replica.shows else None

    def _start(self) -> None:
        """Receive and place. Raises EnvironmentProblem: a later trainer may try again, and nothing is begun twice."""
        if self._started:
            return
        try:
            self._port.placers.start()
        except OSError as error:
            raise EnvironmentProblem(
                f"a placing thread cannot be pinned: {error.strerror}", where="capture.place_cores",
                remedy="cores that this process may use, or none",
            ) from None
        try:
            with dpdk_errors():
                for one, capture in zip(self._planned, self._captures, strict=True):  # what may fail comes first
                    with naming(one):
                        self._rights.call(capture.start_port)
                both = list(zip(self._planned, self._captures, strict=True))
                for one, capture in both[self._receiving :]:  # those before came up in an earlier attempt
                    with naming(one):
                        capture.start()
                    self._receiving += 1
        except BaseException:
            self._port.placers.stop()  # the next one who comes would have a second set of them on the same rings
            raise
        self._started = True

    def wait(self) -> None:
        """Until `stop`, until a group's thread has died of a fault of ours, or a capture cannot go on (its interface is
        gone)."""
        while not self._stopping:
            time.sleep(0.1)
            if not self._stopping:  # what told this process to end may have told those beside it, too
                self._turn()

    def _turn(self) -> None:
        """What is done again and again."""
        for drops in self._drops:
            drops.look()
        if self._started:
            self._check_captures()
        if self._serving is not None and self._telling is not None:
            self._telling.look()
            self._serving.look()
        for beside in (self._storing, self._copying):
            if beside is not None:
                beside.look()
        self._common.look()
        followers: list[Group | Unattended] = [*self._groups.values(), *self._unattended]
        failed = next((one.failure for one in followers if one.failure is not None), None)
        if failed is not None:
            raise failed
        self._look_at_access()
        self._notify.alive()

    def _look_at_access(self) -> None:
        at_once, self._reload = self._reload, False
        if not self._access.look(at_once):
            return
        if self._serving is not None:
            self._serving.tell(self._access.keys)
        if self._copying is not None:
            self._copying.tell(self._key)

    @property
    def _key(self) -> str:
        """What it proves to other nodes."""
        return node_key(self._access.of(PEER)[0]).hex()

    def _check_captures(self) -> None:
        for one, capture in zip(self._planned, self._captures, strict=True):
            with naming(one):
                if capture.error is not None:
                    raise capture.error

    def stop(self) -> None:
        self._stopping = True

    def reload(self) -> None:
        """Tokens and certificate, soon; also from a signal's handler."""
        self._reload = True

    def _stop_groups(self) -> None:
        for group in self._groups.values():
            group.stop()
        for one in self._unattended:
            one.close()
        self._port.placers.stop()
        for capture in self._captures:
            capture.stop()
        for capture in self._captures:
            self._say("capture", text=capture.summary())

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_files(config: NodeConfig, say: Callable[..., None]) -> Access:
    """Who may come in. Raises UserError or EnvironmentProblem for a file that is not there or cannot be made."""
    access = Access(config, say)
    if config.tls is not None:
        client_context(config.tls.ca)
    if not os.access(config.replica.directory, os.W_OK | os.X_OK):  # a job would find out when it is too late
        raise EnvironmentProblem(
            "replica files cannot be made there", where=f"replica.directory {config.replica.directory}",
            remedy="an existing directory on tmpfs or hugetlbfs that the node may write to",
        )
    check_places(config.output)
    if config.store is not None:
        check_url(config.store.url)
    if config.protect is not None:
        check_copies(config)
    return access


def check(config: NodeConfig, as_json: bool) -> None:
    """Print what the node would take. Raises the first of what cannot hold, after all of it was printed."""
    _check_files(config, lambda *_, **__: None)
    check_address(config.control.address, "control.listen")
    if config.api is not None:
        check_address(config.api.address, "api.listen")
    planned = plan_captures(config)
    unattended_jobs(config)
    made = budget(config, planned, ask(config, planned))
    if as_json:
        typer.echo(json.dumps(asdict(made) | {"problems": [str(problem) for problem in made.problems]}))
    else:
        _show(made, screen())
    problems = list(made.problems)
    if config.store is not None:
        try:
            check_store(config)
        except FlowcheckError as error:
            problems.append(error)
    if not problems:
        for one in planned:
            with naming(one):
                check_cores((*one.live.cores, *one.settings.place_cores))
    for problem in problems[1:]:
        print(f"flowcheck-node: error: {problem.message()}", file=sys.stderr)
    if problems:
        raise problems[0]


def _show(made: Budget, console: Console) -> None:
    mb = [Column("device", folds=True), Column("NUMA node", number=True), Column("dump"), Column("queues", number=True),
          Column("packets per ring", number=True), Column("buffers MB", number=True), Column("rings MB", number=True),
          Column("in the kernel MB", number=True)]
    rows = [
        [one.device, str(one.node) if one.node >= 0 else "-", one.dump, str(one.queues), f"{one.ring_packets:,}",
         _mb(one.buffers), _mb(one.rings), _mb(one.kernel)] for one in made.captures
    ]
    print_table(console, mb, rows, "Captures")
    rows = [
        [one.device, f"{one.mbps / 1000:g}" if one.mbps > 0 else f"unknown; as an example {EXAMPLE_MBPS // 1000}",
         f"{one.pause_ms:.1f}", ", ".join(one.engines) or "-"] for one in made.captures
    ]
    pause = [Column("device", folds=True), Column("link Gb/s", number=True, folds=True),
             Column("longest pause ms", number=True), Column("DMA engines", folds=True)]
    print_table(console, pause, rows, "A ring bears, if full packets of the whole link come to one queue")
    kind = "huge pages" if made.huge else "ordinary memory"
    print_table(console, [Column("memory"), Column("MB", number=True)], [
        [f"captures, in {kind}", _mb(made.dpdk)], ["captures, in the kernel", _mb(made.kernel)],
        ["replicas and gradients of all groups, at most", _mb(made.replicas)],
        *([["answers of peers and to them, at most", _mb(made.peers)]] if made.peers else []),
        ["trainers' messages to all groups, at most", _mb(made.inboxes)],
        ["free huge pages", _mb(made.huge_free)], ["available ordinary memory", _mb(made.available)],
    ])
    threads = [Column("threads", folds=True), Column("how many", number=True), Column("core", number=True)]
    print_table(console, threads, [
        [one.name, str(one.count), "any" if one.core is None else str(one.core)] for one in made.threads
    ])
    left = ", ".join(map(str, made.left)) or "none"
    console.print(f"cores that no thread is pinned to: {left}", highlight=False, markup=False)
    for note in made.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _mb(size: int) -> str:
    """Rounded up: what is taken is never less than what is shown."""
    return f"{-(-size >> 20):,}"


@contextmanager
def dpdk_errors() -> Iterator[None]:
    try:
        yield
    except DpdkError as error:
        raise EnvironmentProblem(error.what, remedy=error.remedy) from None
    except ValueError as error:
        if isinstance(error, FlowcheckError):
            raise
        raise UserError(str(error), where="capture", remedy="docs/use/settings.md has every key") from None
