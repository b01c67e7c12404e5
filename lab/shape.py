"""The shape of a lab's network: how many ranks and nodes, which ports are mirrored, what is impaired, and all names.

    FabricConfig(ranks=4, mirrored=((0, 1, 2),))       checked when it is made; to_dict(), from_dict() for files

Pure; fabric.py builds it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from flowcheck.errors import UserError
from lab.network.impair import Impairment

__all__ = ["BRIDGE", "CONTROL", "MIRROR_MTU", "MTU", "NAME", "PREFIX", "SHARED", "STATE", "FabricConfig", "check_name"]

PREFIX = "flowcheck"
STATE = Path("/run/flowcheck-lab")
SHARED = Path("/dev/shm/flowcheck-lab")  # replicas of the lab's nodes
BRIDGE, CONTROL = "flowcheck0", "flowcheckctl"
NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
MTU, MIRROR_MTU = 9000, 9216  # RoCE at path MTU 4096 needs 4174 (reference switches.md 1.5)
MOST_RANKS, MOST_NODES = 16, 8  # addresses of nodes are those before the ranks'


def check_name(name: str) -> None:
    """Raises UserError unless it is the name of a lab: it becomes a part of paths that root makes and removes."""
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} is not the name of a lab", where="name",
                        remedy="a letter, then at most 15 of a-z and 0-9")


@dataclass(frozen=True)
class FabricConfig:
    """What to build. mirrored: for each node the ranks whose ports it sees; () is a fabric without nodes.

    groups: for each node its data-parallel group, default one of all ranks. direction: of the mirrored ports. holders:
    nodes without a mirror port, on the control network alone.
    rate_mbit: port ("r0", "mirror0") -> tbf limit of what leaves the leaf there.
    """

    name: str = "lab"
    ranks: int = 4
    switch: Literal["tc", "ovs"] = "tc"
    mirrored: tuple[tuple[int, ...], ...] = ((0, 1, 2),)
    groups: tuple[tuple[int, ...], ...] = ()
    direction: Literal["ingress", "egress", "both"] = "both"
    algorithm: Literal["ring", "tree", "any"] = "ring"
    path_mtu: int = 4096
    impairments: tuple[Impairment, ...] = ()
    rate_mbit: Mapping[str, float] = field(default_factory=dict)
    holders: int = 0
    core: int | None = None  # where the leaf's own processes (impairer, Open vSwitch) run

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 2 <= self.ranks <= MOST_RANKS:
            raise UserError(f"{self.ranks} ranks", where="ranks", remedy=f"from 2 to {MOST_RANKS}")
        if not 0 <= self.holders <= MOST_NODES - self.nodes:
            raise UserError(f"{self.nodes} nodes and {self.holders} holders", where="holders",
                            remedy=f"{MOST_NODES} in all at most")
        if self.groups and len(self.groups) != len(self.mirrored):
            raise UserError(f"{len(self.groups)} groups for {len(self.mirrored)} nodes", where="groups",
                            remedy="one group per node")
        for some in (*self.mirrored, *self.groups):
            if not some or len(set(some)) != len(some) or not all(0 <= rank < self.ranks for rank in some):
                raise UserError(f"{list(some)}: not a set of ranks below {self.ranks}", where="mirrored, groups",
                                remedy="name each mirrored rank once")
        ports = {f"r{rank}" for rank in range(self.ranks)} | {f"mirror{node}" for node in range(self.nodes)}
        for port in [*self.rate_mbit, *(impairment.port for impairment in self.impairments)]:
            if port not in ports:
                raise UserError(f"there is no port {port}", where="impairments, rate_mbit",
                                remedy="r0, r1, ... or mirror0, ...")
        if not all(rate > 0 for rate in self.rate_mbit.values()):
            raise UserError("a rate must be above 0", where="rate_mbit", remedy="in megabits per second")

    def differs(self, other: FabricConfig) -> str:
        """What would have to be built otherwise for `other`, or "": its job (groups, algorithm, MTU) may be another."""
        for name in ("ranks", "switch", "mirrored", "direction", "impairments", "rate_mbit", "holders"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {mine!r}, not {theirs!r}"
        return ""

    @property
    def nodes(self) -> int:
        return len(self.mirrored)

    def group(self, node: int) -> tuple[int, ...]:
        return self.groups[node] if self.groups else tuple(range(self.ranks))

    def namespace(self, role: str) -> str:
        return f"{PREFIX}-{self.name}-{role}"

    @property
    def hosts(self) -> list[str]:
        """On the control network: of nodes, and then of holders."""
        return [f"10.78.0.{2 + number}" for number in range(self.nodes + self.holders)]

    @property
    def roles(self) -> list[str]:
        """leaf first: everything is cabled to it."""
        nodes = ["node", *(f"node{n}" for n in range(1, self.nodes))][: self.nodes]
        return ["leaf", *(f"r{rank}" for rank in range(self.ranks)), *nodes,
                *(f"holder{number}" for number in range(self.holders))]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        known = {entry.name for entry in dataclasses.fields(cls)}
        if unknown := sorted(data.keys() - known):
            raise UserError(f"unknown field {unknown[0]}", where="fabric", remedy="docs/use/lab.md lists the fields")
        fields = dict(data)
        for key in ("mirrored", "groups"):
            fields[key] = tuple(tuple(one) for one in data.get(key, ()))
        fields["impairments"] = tuple(Impairment(**one) for one in data.get("impairments", ()))
        return cls(**fields)
