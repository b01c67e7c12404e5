"""What a switch topology says about nodes and ports: the file and the planner of `flowcheck switch plan`.

    fabric = fabric_of(Path("topology.yaml"), ranks=8, groups=64)

The same loader and the same plan, so that both commands agree on nodes per leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowcheck.errors import UserError, missing_module
from flowcheck.plan.answer import need
from flowcheck.plan.loss_law import Direction

__all__ = ["Fabric", "LeafRow", "fabric_of"]


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
    """Raises UserError for a file that is no topology, a plan that cannot be, and groups that are not the job's."""
    try:
        from switch_configs.errors import PlanError
        from switch_configs.planning.planner import make_plan
        from switch_configs.schema import Topology
    except ImportError as error:
        raise missing_module(error, "--topology") from None
    try:
        topology = Topology.load(file)
        for group in topology.groups:
            need(len(group.ranks) == ranks, f"group {group.name} has {len(group.ranks)} ranks, the job's groups have "
                 f"{ranks} (--dp / --shard)", str(file), "give the layout that the topology is of")
        need(len(topology.groups) <= groups, f"{len(topology.groups)} groups, the job has {groups} "
             "(--tp x --pp x --shard)", str(file), "give the layout that the topology is of")
        plan = make_plan(topology)
    except PlanError as error:
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
