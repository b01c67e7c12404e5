"""Topology (what is cabled), MirrorPlan (what to mirror) and SessionState (what a switch says it mirrors).

Directions are the switch port's: "ingress" is what the NIC sends, "egress" what the NIC receives.
Every name that reaches a command line is checked against a pattern here, so no file can smuggle a command in.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from switch_configs.documents import read_document, validated
from switch_configs.errors import printable

__all__ = [
    "VENDORS", "Direction", "Group", "GroupChoice", "HostNic", "Leaf", "MirrorPlan", "MirrorSession", "MonitorPort",
    "NicPort", "NodeNic", "NodeShare", "SessionState", "Source", "SourceState", "Topology", "Vendor", "frame_bytes",
    "ways_of",
]

Direction = Literal["ingress", "egress", "both"]
Vendor = Literal["comware", "eos", "nxos", "sonic", "sonic-configdb", "cumulus", "junos", "ovs", "tc"]
VENDORS: tuple[str, ...] = Vendor.__args__  # type: ignore[attr-defined]

Port = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,63}$")]
# One lower limit for all: SONiC's 32 characters; letters first, because NX-OS and shells take it unquoted.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")]
Host = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._:-]{0,252}$")]


def _address(text: str) -> str:
    """A name or an IP address alone: what has one colon is an address with a port, and the port has a field."""
    if text.count(":") == 1:
        raise ValueError(f"{text} has a port: write the address alone, a switch's port as ssh_port, 1 to 65535")
    return text


Address = Annotated[Host, AfterValidator(_address)]
# Free text lands in comments of rendered files and on terminals: one line, no control or direction characters.
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]{0,300}$")]
# A port of a leaf, as messages name it: "leaf1 Ethernet1".
LeafPort = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._:-]{0,252} [A-Za-z0-9][A-Za-z0-9._/:@-]{0,63}$")
]


def frame_bytes(path_mtu: int) -> int:
    """Largest RoCEv2 frame at an RDMA path MTU: Ethernet, VLAN tag, IPv6, UDP, BTH, RETH, immediate, ICRC, FCS."""
    return path_mtu + 14 + 4 + 40 + 8 + 12 + 16 + 4 + 4 + 4


def ways_of(direction: Direction) -> list[Literal["ingress", "egress"]]:
    """The single directions of one."""
    return ["ingress", "egress"] if direction == "both" else [direction]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


# -- what is cabled ---------------------------------------------------------------------------------------


class NicPort(_Strict):
    """A switch port with a trainer's NIC behind it. peak_gbps: load per direction if known (default: speed)."""

    port: Port
    rank: Annotated[int, Field(ge=0)]
    host: Host
    rail: Annotated[int, Field(ge=0)] = 0
    speed_gbps: Annotated[float, Field(gt=0)]
    peak_gbps: Annotated[float, Field(gt=0)] | None = None
    address: Address | None = None
    port_channel: Port | None = None
    asic: int = 0

    @property
    def load_gbps(self) -> float:
        return self.speed_gbps if self.peak_gbps is None else self.peak_gbps


class MonitorPort(_Strict):
    """A switch port with a checkpoint node behind it, and the facts that can forbid it as a destination."""

    port: Port
    node: Host
    speed_gbps: Annotated[float, Field(gt=0)]
    mtu: Annotated[int, Field(gt=0)] = 9216
    port_channel: Port | None = None
    vlans: list[Annotated[int, Field(ge=1, le=4094)]] = []
    routed: bool = False
    asic: int = 0


class Leaf(_Strict):
    """One leaf switch. address: management address; netns, ovs_rundir: where a software switch lives.

    split_directions: consent to copy ingress and egress of one port to two monitor ports on a platform of which nobody
    says that it can (platform_rules.SPLITS has the others).
    """

    name: Host
    vendor: Vendor
    ports: list[NicPort] = []
    monitor_ports: list[MonitorPort] = []
    address: Address | None = None
    ssh_port: Annotated[int, Field(ge=1, le=65535)] = 22
    session_number: Annotated[int, Field(ge=0)] = 1
    directions: list[Literal["ingress", "egress"]] = ["ingress", "egress"]
    split_directions: bool = False
    bridge: Port | None = None
    netns: Name | None = None
    ovs_rundir: Annotated[str, StringConstraints(pattern=r"^/[A-Za-z0-9._/-]*$")] | None = None


class Group(_Strict):
    """A data-parallel group. rings: per channel the ranks in order, if known. mirror: ranks picked by a person."""

    name: Name
    ranks: Annotated[list[int], Field(min_length=1)]
    algorithm: Literal["ring", "tree", "any"] = "any"
    rings: list[list[int]] = []
    mirror: list[int] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Group:
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError("a rank is named twice")
        for number, ring in enumerate(self.rings):
            if sorted(ring) != sorted(self.ranks):
                raise ValueError(f"rings[{number}] does not hold exactly the group's ranks")
        if self.mirror is not None and not set(self.mirror) <= set(self.ranks):
            raise ValueError("mirror names a rank outside the group")
        return self


class HostNic(_Strict):
    """A trainer's NIC whose switch port is not known yet: an LLDP dump of its host says it (lldp.fill)."""

    host: Host
    interface: Host
    rank: Annotated[int, Field(ge=0)]
    rail: Annotated[int, Field(ge=0)] = 0
    speed_gbps: Annotated[float, Field(gt=0)]
    peak_gbps: Annotated[float, Field(gt=0)] | None = None
    address: Address | None = None


class NodeNic(_Strict):
    """The same for a checkpoint node."""

    node: Host
    interface: Host
    speed_gbps: Annotated[float, Field(gt=0)]
    mtu: Annotated[int, Field(gt=0)] = 9216


class Topology(_Strict):
    """peers: sets of nodes that count together, because what one lacks is taken from the others."""

    leaves: Annotated[list[Leaf], Field(min_length=1)]
    groups: Annotated[list[Group], Field(min_length=1)]
    peers: list[Annotated[list[Host], Field(min_length=2)]] = []
    nics: list[HostNic] = []
    node_nics: list[NodeNic] = []
    session: Name = "flowcheck"
    path_mtu: Literal[256, 512, 1024, 2048, 4096] = 4096

    @model_validator(mode="after")
    def _consistent(self) -> Topology:
        names = [leaf.name for leaf in self.leaves]
        if len(set(names)) != len(names):
            raise ValueError("two leaves have one name")
        hosts: dict[int, str] = {}
        for leaf in self.leaves:
            ports = [p.port for p in leaf.ports] + [p.port for p in leaf.monitor_ports]
            for port in ports:
                if ports.count(port) > 1:
                    raise ValueError(f"{leaf.name}: port {port} is listed twice")
            for nic in leaf.ports:
                if hosts.setdefault(nic.rank, nic.host) != nic.host:
                    raise ValueError(f"rank {nic.rank} is on host {hosts[nic.rank]} and on host {nic.host}")
        nodes = {port.node for leaf in self.leaves for port in leaf.monitor_ports}
        nodes |= {nic.node for nic in self.node_nics}
        named: set[str] = set()
        for node in (node for peers in self.peers for node in peers):
            if node not in nodes:
                raise ValueError(f"peers names node {node}, which has no monitor port")
            if node in named:
                raise ValueError(f"peers names node {node} twice: nodes that count together are one set")
            named.add(node)
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Topology:
        """Read YAML or JSON. Raises PlanError naming the file or the field."""
        return validated(cls, read_document(path), os.fspath(path))


# -- what to mirror ---------------------------------------------------------------------------------------


class Source(_Strict):
    port: Port
    rank: int
    rail: int = 0
    speed_gbps: float
    address: Address | None = None
    why: Text = ""


class Mirror(_Strict):
    """What a session mirrors, and where to."""

    leaf: Host
    vendor: Vendor
    name: Name = "flowcheck"
    number: Annotated[int, Field(ge=0)] = 1
    direction: Direction = "both"
    sources: Annotated[list[Source], Field(min_length=1)]
    destination: Port
    destination_gbps: float
    node: Host = "node"
    mtu: int = 9216
    load_gbps: float = 0.0
    copies: float = 1.0
    why: list[Text] = []
    undo_minutes: Annotated[int, Field(ge=1, le=60)] = 5

    @property
    def ports(self) -> list[str]:
        return [source.port for source in self.sources]

    @property
    def ways(self) -> list[Literal["ingress", "egress"]]:
        return ways_of(self.direction)


class Switch(_Strict):
    """How the leaf is reached, and what it consents to: as in its entry of the topology."""

    address: Address | None = None
    ssh_port: Annotated[int, Field(ge=1, le=65535)] = 22
    bridge: Port | None = None
    netns: Name | None = None
    ovs_rundir: str | None = None
    split_directions: bool = False


class MirrorSession(Switch, Mirror):
    """One mirror session on one switch: everything that rendering and applying need, flat in a plan's file.

    classifier: of tc only. Kernels without matchall need u32, and only trying tells.
    """

    classifier: Literal["matchall", "u32"] = "matchall"


class NodeShare(_Strict):
    """What ends at one node of a group's streams, or at several nodes that count together.

    nodes: one, or peers (or all nodes, for a joined replay). ports: monitor ports that the copies come through, each
    with its cable and the node's port behind it. ranks: those whose host it sees in full. complete: every reduced
    slice of the group is there. survives: GPUs that may be lost, any of them; -1 if not complete. spared, needed: of
    the mirrored ports that end there and of `ports`, those that may be lost, and those with which completeness is
    lost; one at a time. lacks: why it is not complete.
    """

    nodes: Annotated[list[Host], Field(min_length=1)]
    ports: list[LeafPort]
    ranks: list[int]
    complete: bool
    survives: int
    spared: list[LeafPort] = []
    needed: list[LeafPort] = []
    lacks: Text = ""


class GroupChoice(_Strict):
    """Which ranks of a group are mirrored, and what each node has of it.

    survives: how many mirrored GPUs may be lost where the group is complete, at the best node, or at the best peers if
    they survive more. complete: nodes that are complete by themselves. peers: the nodes on which completeness or
    `survives` depends together; empty if on one.
    """

    group: Name
    ranks: list[int]
    direction: Direction
    survives: int
    why: list[Text]
    complete: list[Host] = []
    peers: list[Host] = []
    shares: list[NodeShare] = []


class MirrorPlan(_Strict):
    """The answer to a topology: sessions to apply, and per group what they deliver. One JSON file."""

    schema_: Literal["flowcheck-mirror-plan/1"] = Field(default="flowcheck-mirror-plan/1", alias="schema")
    sessions: list[MirrorSession]
    groups: list[GroupChoice]
    nodes_per_leaf: dict[str, int]
    path_mtu: int = 4096
    notes: list[Text] = []

    model_config = ConfigDict(extra="forbid", populate_by_name=True, allow_inf_nan=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MirrorPlan:
        return validated(cls, read_document(path), os.fspath(path))

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


# -- what a switch says -----------------------------------------------------------------------------------


class SourceState(_Strict):
    port: str
    direction: Direction

    @field_validator("port")
    @classmethod
    def _printable(cls, text: str) -> str:
        return printable(text)


class SessionState(_Strict):
    """One session as read back. ours: carries our mark; None where a platform has no place for a mark.

    active: copies can flow. reason: why not, in words, with the vendor's usual cause. truncation: what cuts
    or samples copies ("" means nothing). lost: copies the switch itself counts as lost, by its own name.
    """

    name: str
    exists: bool
    active: bool = False
    ours: bool | None = None
    sources: list[SourceState] = []
    destination: str | None = None
    truncation: str = ""
    reason: str = ""
    lost: dict[str, int] = {}
    copies: int | None = None
    key: str = ""  # the platform's own handle, where names are not unique
    config: list[str] = []  # its own configuration as the switch prints it, so that it can be put back as it was
    added: list[str] = []  # tc: ports whose clsact qdisc is there because we added it

    @field_validator("name", "destination", "truncation", "reason", "key")
    @classmethod
    def _printable(cls, text: str | None) -> str | None:
        """What a switch prints reaches terminals and logs: no escape sequence gets through."""
        return None if text is None else printable(text)

    def same_as(self, session: MirrorSession) -> bool:
        wanted = sorted((port, session.direction) for port in session.ports)
        return (
            self.exists
            and not self.truncation
            and self.destination == session.destination
            and sorted((s.port, s.direction) for s in self.sources) == wanted
        )
