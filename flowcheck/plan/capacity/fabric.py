"""What a switch topology says about nodes and ports: the file and the planner of `flowcheck switch plan`.

    fabric = fabric_of(Path("topology.yaml"), ranks=8, groups=64)
    why = leaf_refusal(LeafPorts(...), quick=False)      the same of a leaf that is described by numbers

The same loader and the same plan, so that both commands agree on nodes per leaf, and on what fits into a port.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from flowcheck.errors import UserError, missing_module
from flowcheck.plan.answers.answer import need
from flowcheck.plan.traffic.loss_law import Direction

__all__ = ["SWITCHES", "Fabric", "LeafPorts", "LeafRow", "fabric_of", "leaf_refusal", "splits"]

#: Platforms, as `vendor` of a topology names them.
SWITCHES = ("comware", "eos", "nxos", "sonic", "sonic-configdb", "cumulus", "junos", "ovs", "tc")
MOST_PORTS = 1024  # of the leaf that is planned; nodes beyond it are like those before
RANKS = 64  # of a group, without those that are mirrored


@dataclass(frozen=True)
class LeafRow:
    """Of one leaf: checkpoint nodes on it, ports that are mirrored, and monitor ports that take the copies."""

    name: str
    nodes: int
    mirrored: int
    monitor: int


@dataclass(frozen=True)
class Fabric:
    """The plan, as far as capacity needs it. mirrors: ports of the group with the most. groups_per_node, node_ports: of
    the node with the most. groups: in the file. load_gbps: at the peak, of the node with the most, as the planner adds
    it up (`peak_gbps` of ports counts)."""

    leaves: Sequence[LeafRow]
    nodes: int
    direction: Direction
    mirrors: int
    groups: int
    groups_per_node: int
    node_ports: int
    port_gbps: float
    monitor_gbps: float
    load_gbps: float
    path_mtu: int
    notes: Sequence[str]


def fabric_of(file: Path, ranks: int, groups: int) -> Fabric:
    """Raises UserError for a file without a topology, a plan that cannot be, and groups that are not the job's."""
    planner, schema, errors = _planner("--topology")
    try:
        topology = schema.Topology.load(file)
        for group in topology.groups:
            need(len(group.ranks) == ranks, f"group {group.name} has {len(group.ranks)} ranks, the job's groups have "
                 f"{ranks} (--dp / --shard)", str(file), "give the layout that the topology is of")
        need(len(topology.groups) <= groups, f"{len(topology.groups)} groups, the job has {groups} "
             "(--tp x --pp x --shard)", str(file), "give the layout that the topology is of")
        plan = planner.make_plan(topology)
    except errors.PlanError as error:
        raise UserError(error.what, where=error.where or str(file), remedy=error.remedy) from None
    nics = {(leaf.name, port.port): port for leaf in topology.leaves for port in leaf.ports}
    speeds = [nics[session.leaf, source.port].speed_gbps for session in plan.sessions for source in session.sources]
    follows = Counter(choice.complete[0] for choice in plan.groups if choice.complete)
    ends: Mapping[str, int] = Counter(session.node for session in plan.sessions)
    loads = dict.fromkeys(ends, 0.0)
    for session in plan.sessions:
        loads[session.node] += session.load_gbps
    rows = [
        LeafRow(
            leaf.name, plan.nodes_per_leaf.get(leaf.name, 0),
            sum(len(session.sources) for session in plan.sessions if session.leaf == leaf.name),
            sum(session.leaf == leaf.name for session in plan.sessions),
        )
        for leaf in topology.leaves
    ]
    notes = list(plan.notes)
    if len(topology.groups) < groups:
        notes.append(f"the topology has {len(topology.groups)} of the job's {groups} groups: nodes are of these alone")
    return Fabric(
        rows, len({session.node for session in plan.sessions}), plan.groups[0].direction,
        max(len(choice.ranks) for choice in plan.groups), len(plan.groups), max(follows.values(), default=1),
        max(ends.values()), max(speeds), min(session.destination_gbps for session in plan.sessions),
        max(loads.values()), plan.path_mtu, notes,
    )


# -- without a topology -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeafPorts:
    """The busiest leaf, by numbers. nodes: on it, each with `ports` monitor ports of monitor_gbps, and `groups` groups
    of `ranks` of which `mirrors` are mirrored there. load_gbps: of each direction of a mirrored port at the peak."""

    switch: str
    split: bool
    nodes: int
    groups: int
    ranks: int
    mirrors: int
    direction: Direction
    algorithm: str
    load_gbps: float
    ports: int
    monitor_gbps: float


def splits(switch: str, consent: bool) -> bool:
    """May the two directions of a port go to two monitor ports on this platform?"""
    _planner("--switch")
    from switch_configs.planning import platform_rules

    return platform_rules.splits(switch, consent)


@lru_cache(maxsize=64)
def leaf_refusal(leaf: LeafPorts, *, quick: bool) -> str:
    """Why `flowcheck switch plan` would refuse this leaf; empty if it would not. quick: without its long searches."""
    planner, schema, _ = _planner("--switch")
    ranks = max(leaf.mirrors, min(leaf.ranks, RANKS))
    nodes = min(leaf.nodes, max(1, MOST_PORTS // (leaf.groups * ranks)))
    name = "HundredGigE1/0/{}" if leaf.switch == "comware" else "Ethernet{}"
    each = leaf.groups * ranks
    document = {
        "path_mtu": 4096,
        "leaves": [{
            "name": "leaf", "vendor": leaf.switch, "bridge": "br0", "split_directions": leaf.split,
            "ports": [
                {"port": name.format(rank + 1), "rank": rank, "host": f"host{rank}", "speed_gbps": leaf.load_gbps}
                for rank in range(nodes * each)
            ],
            "monitor_ports": [
                {"port": name.format(nodes * each + 1 + node * leaf.ports + port), "node": f"node{node}",
                 "speed_gbps": leaf.monitor_gbps}
                for node in range(nodes) for port in range(leaf.ports)
            ],
        }],
        "groups": [
            {"name": f"dp{group}", "ranks": list(range(group * ranks, (group + 1) * ranks)),
             "mirror": list(range(group * ranks, group * ranks + leaf.mirrors)), "algorithm": leaf.algorithm}
            for group in range(nodes * leaf.groups)
        ],
    }
    why: str = planner.refusal(schema.Topology.model_validate(document), leaf.direction, quick=quick)
    return why


def _planner(where: str) -> tuple[ModuleType, ModuleType, ModuleType]:
    """switch_configs' planner, schema and errors, which need packages of their own."""
    try:
        from switch_configs import errors, schema
        from switch_configs.planning import planner
    except ImportError as error:
        raise missing_module(error, where) from None
    return planner, schema, errors
