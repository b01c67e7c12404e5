"""The lab's network: a namespace per rank, one for the leaf switch, one per checkpoint node; cables; the mirror.

    rank r   fab0 10.77.0.(10+r) ---- p<r> [leaf: Linux bridge + tc, or Open vSwitch] m<n> ---- mir0   node n
             ctl0 10.78.0.(10+r) ---- c<r> [control bridge, in the leaf's namespace]  d<n> ---- ctl0   10.78.0.(2+n)

    with Fabric(FabricConfig(ranks=4, mirrored=((0, 1, 2),))) as fabric:
        fabric.start_mirror()                          through switch_configs: plan, render, apply, read back
        fabric.spawn("r0", ["python", ...], core=0)    dies with this process
    # everything is gone here

Where an impairment is asked for, the cable is cut and the impairer joins the ends (impair.py):

    fab0 ---- p<r>o =impairer= p<r>i ---- p<r>        m<n> ---- m<n>i =impairer= m<n>o ---- mir0

A holder is cabled as a node is, to the control network alone; its numbers follow those of the nodes.

Names: namespaces flowcheck-NAME-r0.., -leaf, -node, -node1.., -holder0..; state in /run/flowcheck-lab/NAME, shared
memory of its nodes in /dev/shm/flowcheck-lab/NAME. Two labs with
different names do not meet. What a killed lab has left is found by these names and cleared by the next `up` of the
same name, or by `down`; a lab whose owner lives is refused. Counter files of killed nodes carry a process id and no
lab's name: whoever clears a lab removes those of all dead processes. A fabric belongs to one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

from dataplane import counters
from flowcheck.errors import EnvironmentProblem, FlowcheckError, UserError
from flowcheck.interrupts import deferred
from lab.network import netns
from lab.network.impair import Impairer, Wire
from lab.network.mirror_session import Mirror
from lab.network.ovs import OpenVSwitch
from lab.shape import BRIDGE, CONTROL, MIRROR_MTU, MTU, NAME, PREFIX, SHARED, STATE, FabricConfig, check_name

__all__ = ["Fabric", "Leftover", "clear", "leftovers"]

ROLE = re.compile(rf"{PREFIX}-([a-z][a-z0-9]{{0,15}})-(r\d+|leaf|node\d*|holder\d+)")
SETTLE_SECONDS = 60.0


class Fabric:
    """A built network. `up()` builds, `down()` removes; as a context manager both. `down` may be called again."""

    def __init__(self, config: FabricConfig, *, keep: bool = False) -> None:
        """keep: stays when this process ends (`flowcheck lab up`); without it the next `up` clears what was left."""
        self.config = config
        self.directory, self.shared = STATE / config.name, SHARED / config.name
        self._keep, self._adopted = keep, False
        self._mine = False  # what has this name is this fabric's: from before the first thing is made until it is gone
        self._ovs: OpenVSwitch | None = None
        self._impairer: Impairer | None = None
        self._children: list[subprocess.Popen[Any]] = []
        self.mirrors: list[Mirror] = []

    def __enter__(self) -> Self:
        try:
            self.up()
        except BaseException:  # an interrupt that came when all was built
            self._give_up()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._give_up()

    def _give_up(self) -> None:
        try:
            self.down()
        except KeyboardInterrupt:  # somebody in a hurry: once more, and then out
            self.down()
            raise

    @classmethod
    def of(cls, config: FabricConfig) -> Self:
        """The network that `flowcheck lab up` has left, if it has just this shape, or a new one."""
        fabric = cls(config)
        old = next((lab for lab in leftovers() if lab.name == config.name and lab.kept), None)
        if old is not None:
            if old.config is None or (odd := old.config.differs(config)):
                raise UserError(
                    f"the lab that is up has another shape: {odd}" if old.config else "the lab that is up is not whole",
                    where=f"lab {config.name}",
                    remedy=f"flowcheck lab down --name {config.name}, or give the same options",
                )
            fabric._adopted = True
        return fabric

    # -- building -------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Raises EnvironmentProblem where the machine cannot, or where a living lab has this name."""
        netns.require()
        if self._adopted:
            if self.config.switch == "ovs":
                self._ovs = OpenVSwitch(self.directory / "ovs", self.config.namespace("leaf"), None, keep=True)
            return
        old = next((lab for lab in leftovers() if lab.name == self.config.name), None)
        if old is not None and (old.owner is not None or old.kept):
            who = f"process {old.owner}" if old.owner is not None else "`flowcheck lab up`"
            raise EnvironmentProblem(
                f"a lab of this name exists already: it belongs to {who}", where=f"lab {self.config.name}",
                remedy=f"flowcheck lab down --name {self.config.name}, or choose another --name",
            )
        clear(self.config.name)
        self._mine = True
        try:
            self._build()
        except BaseException:
            self._give_up()
            raise

    def _build(self) -> None:
        config = self.config
        self.directory.mkdir(parents=True)
        self.shared.mkdir(parents=True)
        owner = {"pid": os.getpid(), "started": counters.start_ticks(os.getpid()), "keep": self._keep}
        (self.directory / "lab.json").write_text(json.dumps({"owner": owner, "fabric": config.to_dict()}))
        for role in config.roles:
            netns.add(config.namespace(role))
            netns.quiet(config.namespace(role))
        leaf = config.namespace("leaf")
        netns.only_switch(leaf)
        netns.batch(leaf, [
            f"link add {CONTROL} type bridge mcast_snooping 0 stp_state 0 forward_delay 0",
            f"link set {CONTROL} up",
        ])
        if config.switch == "tc":
            netns.batch(leaf, [
                f"link add {BRIDGE} mtu {MTU} type bridge mcast_snooping 0 stp_state 0 forward_delay 0",
                f"link set {BRIDGE} up",
            ])
        cut = {impairment.port for impairment in config.impairments}
        wires = []
        for rank in range(config.ranks):
            space, port = config.namespace(f"r{rank}"), f"p{rank}"
            end = self._cable(port, "fab0", space, MTU, f"02:fc:00:00:00:{10 + rank:02x}", cut=f"r{rank}" in cut)
            wires += [Wire(f"r{rank}", *end)] if end else []
            self._cable(f"c{rank}", "ctl0", space, MTU, f"02:fc:01:00:00:{10 + rank:02x}")
            # Neighbours are known: a burst at a cold ARP table would lose all but a few packets before it has begun.
            others = [other for other in range(config.ranks) if other != rank]
            netns.batch(space, [
                f"addr add 10.77.0.{10 + rank}/24 dev fab0", f"addr add 10.78.0.{10 + rank}/24 dev ctl0",
                *(f"neigh add 10.77.0.{10 + r} lladdr 02:fc:00:00:00:{10 + r:02x} dev fab0" for r in others),
            ])
            netns.plain(space, ["fab0", "ctl0"])
        for node in range(config.nodes):
            space = config.namespace(config.roles[1 + config.ranks + node])
            end = self._cable(f"m{node}", "mir0", space, MIRROR_MTU, f"02:fc:02:00:00:{node:02x}",
                              cut=f"mirror{node}" in cut)
            wires += [Wire(f"mirror{node}", *end)] if end else []
            self._cable(f"d{node}", "ctl0", space, MTU, f"02:fc:01:00:00:{2 + node:02x}")
            netns.batch(space, [f"addr add 10.78.0.{2 + node}/24 dev ctl0"])
            netns.plain(space, ["mir0", "ctl0"])
        for holder in range(config.holders):
            space, number = config.namespace(f"holder{holder}"), config.nodes + holder
            self._cable(f"d{number}", "ctl0", space, MTU, f"02:fc:01:00:00:{2 + number:02x}")
            netns.batch(space, [f"addr add 10.78.0.{2 + number}/24 dev ctl0"])
            netns.plain(space, ["ctl0"])
        ports = [f"p{rank}" for rank in range(config.ranks)]
        control = [f"c{rank}" for rank in range(config.ranks)]
        control += [f"d{node}" for node in range(config.nodes + config.holders)]
        netns.batch(leaf, [f"link set {port} master {CONTROL}" for port in control])
        if config.switch == "tc":
            netns.batch(leaf, [f"link set {port} master {BRIDGE}" for port in ports])
        else:
            self._ovs = OpenVSwitch(self.directory / "ovs", leaf, config.core, keep=self._keep)
            self._ovs.start(BRIDGE, [*ports, *(f"m{node}" for node in range(config.nodes))], MIRROR_MTU)
        for name, megabits in config.rate_mbit.items():
            self.limit(name, megabits)
        self._wait_for_ports(leaf)
        if wires:
            self._impairer = Impairer(wires, config.impairments, self.directory, self.spawn)
            self._impairer.start()
        for rank in range(config.ranks):
            netns.announce(config.namespace(f"r{rank}"), "fab0", f"02:fc:00:00:00:{10 + rank:02x}",
                           f"10.77.0.{10 + rank}")

    def _wait_for_ports(self, leaf: str) -> None:
        """A bridge port forwards only when the kernel's link watch has been round, up to a second after `up`."""
        end = time.monotonic() + SETTLE_SECONDS
        while True:
            links = json.loads(netns.run("ip", "-n", leaf, "-j", "-d", "link", "show"))
            slaves = [link["linkinfo"].get("info_slave_data", {}) for link in links if "linkinfo" in link]
            waiting = [slave for slave in slaves if slave.get("state", "forwarding") != "forwarding"]
            if not waiting and all(link["operstate"] == "UP" for link in links if "link_index" in link):
                return
            if time.monotonic() > end:
                raise EnvironmentProblem("ports of the leaf's bridge do not come up", where=leaf,
                                         remedy="see `ip -d link` in that namespace")
            time.sleep(0.01)

    def _cable(
        self, port: str, far: str, space: str, mtu: int, address: str, *, cut: bool = False
    ) -> tuple[str, str] | None:
        """A veth from the leaf's `port` to `far` in another namespace; cut: in two, and the loose ends are returned
        as (towards far, towards the switch)."""
        leaf = self.config.namespace("leaf")
        near, inner = (f"{port}o", f"{port}i") if cut else (port, "")
        lines = [f"link add {near} mtu {mtu} type veth peer name {far} mtu {mtu} address {address} netns {space}"]
        if cut:
            lines.append(f"link add {port} mtu {mtu} type veth peer name {inner} mtu {mtu}")
        ends = [port, near, inner] if cut else [port]
        netns.batch(leaf, [*lines, *(f"link set {end} up" for end in ends)])
        netns.batch(space, [f"link set {far} up"])
        netns.plain(leaf, ends)
        return (near, inner) if cut else None

    @staticmethod
    def leaf_port(name: str) -> str:
        """"r2" -> "p2", "mirror0" -> "m0": the switch port of a cable's name."""
        return f"m{name.removeprefix('mirror')}" if name.startswith("mirror") else f"p{name.removeprefix('r')}"

    # -- using ----------------------------------------------------------------------------------------------

    def start_mirror(self) -> None:
        """Mirror as configured, on every node's port. Raises EnvironmentProblem if a copy could not flow."""
        if not self.mirrors:
            rundir = str(self._ovs.rundir) if self._ovs else None
            self.mirrors = [Mirror.planned(self.config, node, rundir) for node in range(self.config.nodes)]
        for mirror in self.mirrors:
            mirror.apply()
        if self._ovs is not None:
            self._ovs.settle()

    def stop_mirror(self) -> None:
        for mirror in self.mirrors:
            mirror.remove()
        if self._ovs is not None:
            self._ovs.settle()

    def control_link(self, rank: int, up: bool) -> None:
        """Cut or restore a rank's cable to the control network; nothing that was sent is lost, TCP sends it again."""
        netns.batch(self.config.namespace("leaf"), [f"link set c{rank} {'up' if up else 'down'}"])

    def limit(self, name: str, megabits: float | None) -> None:
        """Limit what leaves the leaf on this port ("r0", "mirror0"), None: no longer."""
        device = ("-n", self.config.namespace("leaf"), "qdisc")
        if megabits is None:
            netns.run("tc", *device, "del", "dev", self.leaf_port(name), "root")
            return
        # tbf: a bucket of at least one frame; what waits longer than 50 ms is dropped
        netns.run("tc", *device, "replace", "dev", self.leaf_port(name), "root", "tbf", "rate", f"{megabits:g}mbit",
                  "burst", "64k", "latency", "50ms")

    @property
    def impairer(self) -> Impairer:
        """The impaired cables. Raises UserError if none was configured."""
        if self._impairer is None:
            raise UserError("no cable of this lab is impaired", remedy="give the fabric's config impairments")
        return self._impairer

    def check(self) -> None:
        """Raises EnvironmentProblem if a process that the network is made of has died."""
        if self._impairer is not None:
            self._impairer.check()
        if self._ovs is not None:
            self._ovs.check()

    def spawn(
        self, role: str, command: Sequence[str], *, core: int | None = None, env: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL, stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None, text: bool = True, die_with_parent: bool = True,
    ) -> subprocess.Popen[Any]:
        """Start a command in the namespace of a role; it is ended by `down` at the latest."""
        words = netns.prefix(self.config.namespace(role), core)
        if not die_with_parent:
            words = words[3:]
        with deferred():  # never running without being known
            child = subprocess.Popen(
                [*words, *command], stdin=stdin, stdout=stdout, stderr=stderr, text=text, start_new_session=True,
                env={**os.environ, **(env or {})},
            )
            self._children.append(child)
        return child

    # -- taking down ----------------------------------------------------------------------------------------

    def down(self) -> None:
        """Remove everything that `up` has made, whatever state it is in. Interrupting it and calling it again is
        fine; a lab of this name that somebody else has made stays."""
        for mirror in self.mirrors:
            mirror.close()
        if self._impairer is not None:
            self._impairer.stop()
        if self._ovs is not None:
            self._ovs.stop()
        for child in self._children:
            if child.poll() is None:
                child.terminate()
        for child in self._children:
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(10)
            for stream in (child.stdin, child.stdout, child.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        self._children.clear()
        if self._mine:
            clear(self.config.name)
        else:
            counters.sweep()
        self._mine = False
        self._ovs = self._impairer = None
        self.mirrors = []

    def detach(self) -> None:
        """Leave everything running (`flowcheck lab up`); only `clear` removes it then, or `down` of this object."""
        self._children.clear()
        self._ovs = self._impairer = None


# -- what is there, and removing it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Leftover:
    """A lab found on the machine. owner: its living process, if any; kept: made by `up`, stays without an owner."""

    name: str
    roles: tuple[str, ...]
    owner: int | None
    kept: bool
    config: FabricConfig | None

    def mirrors(self) -> list[str]:
        """What each node's mirror session says of itself, in words."""
        if self.config is None or "leaf" not in self.roles:
            return []
        rundir = str(STATE / self.name / "ovs") if self.config.switch == "ovs" else None
        out = []
        for node in range(self.config.nodes):
            try:
                states = Mirror.planned(self.config, node, rundir).state()
            except FlowcheckError as error:  # its switch has died
                out.append(f"mirror of node {node}: {error.what}")
                continue
            for state in states:
                ports = ", ".join(sorted(f"{source.port} {source.direction}" for source in state.sources))
                what, why = f"copies {ports or 'nothing'}", state.reason or "no session"
                if not state.active:
                    what += f", and is not whole: {why}" if ports else f": {why}"
                out.append(f"mirror of node {node}: {what}" + (f", {state.copies:,} so far" if state.copies else ""))
        return out


def leftovers() -> list[Leftover]:
    """Every lab of which anything exists."""
    found: dict[str, list[str]] = {}
    for namespace in netns.names():
        if match := ROLE.fullmatch(namespace):
            found.setdefault(match[1], []).append(match[2])
    for parent in (STATE, SHARED):
        for entry in parent.iterdir() if parent.is_dir() else ():
            if NAME.fullmatch(entry.name):
                found.setdefault(entry.name, [])
    return [_leftover(name, tuple(sorted(roles))) for name, roles in sorted(found.items())]


def _leftover(name: str, roles: tuple[str, ...]) -> Leftover:
    owner, kept, config = None, False, None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, UserError):  # half written, or another version
        state = json.loads((STATE / name / "lab.json").read_text())
        pid = int(state["owner"]["pid"])
        kept = bool(state["owner"]["keep"])
        if not kept and counters.alive(pid, state["owner"]["started"]):
            owner = pid
        config = FabricConfig.from_dict(state["fabric"])
    return Leftover(name, roles, owner, kept, config)


def clear(name: str) -> bool:
    """Remove all namespaces, processes and state of a lab, and the counters of what was killed in it. False if there
    was nothing of the lab's name. Raises UserError if it is none: directories of that name are removed."""
    check_name(name)
    mine = [space for space in netns.names() if (match := ROLE.fullmatch(space)) and match[1] == name]
    for space in sorted(mine, key=lambda one: one.endswith("-leaf")):  # the leaf last: all need its switch
        netns.delete(space)
    had = bool(mine)
    for parent in (STATE, SHARED):
        had |= (parent / name).exists()
        shutil.rmtree(parent / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            parent.rmdir()  # not empty: another lab
    counters.sweep()
    return had
