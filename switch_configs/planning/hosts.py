"""Which hosts of a group can be mirrored at which node, and what is known of them before any port is dealt.

A unit is a host with all its NICs of one group: which of them a ring or tree uses is NCCL's affair, so a node has a
host's view when it gets the copies of all of them. One GPU per host and group makes it one GPU.
A place is what counts together as one receiver: a node with all its monitor ports, or nodes that are peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from switch_configs.planning.coverage import GroupCoverage, Views, ring_edges
from switch_configs.schema import Direction, Group, Leaf, MonitorPort, NicPort, Topology

__all__ = ["Cables", "Members", "Place", "Unit", "cables_of", "places_of", "unreachable"]

Cables = dict[int, list[tuple[Leaf, NicPort]]]  # rank -> its NICs, each with its leaf

CANDIDATES = 64  # looked at per choice: large groups are regular, and trying all is quadratic


def cables_of(topology: Topology) -> Cables:
    cables: Cables = {}
    for leaf in topology.leaves:
        for nic in leaf.ports:
            cables.setdefault(nic.rank, []).append((leaf, nic))
    return cables


class Place:
    """What counts together as one receiver. together: more nodes than one, or all of them for a joined replay."""

    def __init__(self, nodes: Iterable[str], topology: Topology, *, together: bool) -> None:
        self.nodes, self.together = frozenset(nodes), together
        self._ports = {
            leaf.name: [port for port in leaf.monitor_ports if port.node in self.nodes] for leaf in topology.leaves
        }

    def ports(self, leaf: Leaf, nic: NicPort) -> list[MonitorPort]:
        """Monitor ports that a copy of this NIC's port may go to: same leaf, same ASIC."""
        return [port for port in self._ports[leaf.name] if port.asic == nic.asic]

    def reaches(self, unit: Unit) -> bool:
        return all(self.ports(leaf, nic) for leaf, nic in unit.nics)


def places_of(topology: Topology, *, joined: bool) -> list[Place]:
    """Every node alone, then every set of peers; only all nodes together if their captures are joined."""
    nodes = list(dict.fromkeys(port.node for leaf in topology.leaves for port in leaf.monitor_ports))
    if joined:
        return [Place(nodes, topology, together=True)]
    places = [Place([node], topology, together=False) for node in nodes]
    return places + [Place(peers, topology, together=True) for peers in topology.peers]


class Unit:
    """A host's NICs for one group; `index` is its place among the group's hosts."""

    def __init__(self, index: int, host: str, ranks: list[int], cables: Cables) -> None:
        self.index, self.host, self.ranks = index, host, ranks
        self.nics = [cable for rank in ranks for cable in cables[rank]]
        self.leaves = frozenset(leaf.name for leaf, _ in self.nics)
        self.load = sum(nic.load_gbps for _, nic in self.nics)


class Members:
    """One group's hosts, mirrored in one direction: which sets of them are complete, and with how many lost."""

    def __init__(self, group: Group, cables: Cables, way: Direction) -> None:
        self.group, self.way = group, way
        self.hosts = {rank: cables[rank][0][1].host for rank in group.ranks}
        self.coverage = GroupCoverage(group.algorithm, group.rings, self.hosts, group.ranks)
        self.units = _units(group, cables, self.hosts)
        self._alike = Counter(unit.leaves for unit in self.units)
        self._neighbours: dict[str, set[str]] = {}
        for ring in group.rings:
            for _, a, b in ring_edges(ring, self.hosts):
                self._neighbours.setdefault(a, set()).add(b)
                self._neighbours.setdefault(b, set()).add(a)
        self._known: dict[frozenset[int], int] = {}

    def views(self, units: Iterable[Unit]) -> Views:
        return {unit.host: self.way for unit in units}

    def lacking(self, units: Iterable[Unit]) -> str:
        return self.coverage.missing(self.views(units))

    def tolerance(self, units: Collection[Unit]) -> int:
        """GroupCoverage.survives of these hosts."""
        key = frozenset(unit.index for unit in units)
        if key not in self._known:
            self._known[key] = self.coverage.survives(self.views(units))
        return self._known[key]

    def next_unit(self, chosen: list[Unit], left: list[Unit]) -> Unit:
        """Of the hosts that are left, the one that adds most: what the group survives, then few leaves, then away
        from ring neighbours (two neighbours in both directions see the same packets twice)."""
        taken = {unit.host for unit in chosen}
        used = Counter(leaf for unit in chosen for leaf in unit.leaves)
        return min(
            left[:CANDIDATES],
            key=lambda unit: (
                -self.tolerance([*chosen, unit]),
                -sum(used[leaf] for leaf in unit.leaves),
                -self._alike[unit.leaves],
                len(self._neighbours.get(unit.host, set()) & taken),
                unit.index,
            ),
        )

    def pick(self, units: list[Unit], target: int) -> list[Unit]:
        """So many of `units` that the group survives `target` lost GPUs, or as many as they allow; ports are not
        looked at."""
        chosen: list[Unit] = []
        left = list(units)
        while left and self.tolerance(chosen) < target:
            unit = self.next_unit(chosen, left)
            chosen.append(unit)
            left.remove(unit)
        return self.trimmed(chosen, target)

    def trimmed(self, chosen: list[Unit], target: int) -> list[Unit]:
        """Without those that were taken before a better one and are not needed any more."""
        reached = min(self.tolerance(chosen), target)
        for unit in chosen[::-1]:
            fewer = [other for other in chosen if other is not unit]
            if self.tolerance(fewer) >= max(reached, 0):
                chosen = fewer
        return chosen


def _units(group: Group, cables: Cables, hosts: dict[int, str]) -> list[Unit]:
    members: dict[str, list[int]] = {}
    for rank in group.ranks:
        members.setdefault(hosts[rank], []).append(rank)
    busy = set(group.ranks)
    if group.rings and group.algorithm == "ring":  # known order: a GPU in the middle of its host uses no NIC
        busy = set()
        for ring in group.rings:
            for position, _, _ in ring_edges(ring, hosts):
                busy |= {ring[position], ring[(position + 1) % len(ring)]}
    return [
        Unit(index, host, [rank for rank in ranks if rank in busy] or ranks, cables)
        for index, (host, ranks) in enumerate(members.items())
    ]


def unreachable(unit: Unit, way: Direction) -> tuple[str, str]:
    """Why no node can have this host's view, and what to do; empty if one can, or several together."""
    bare = sorted({leaf.name for leaf, _ in unit.nics if not leaf.monitor_ports})
    if bare:
        what = f"host {unit.host} is on {', '.join(bare)} without a monitor port"
        return what, "add a monitor_ports entry to the leaf"
    for leaf, nic in unit.nics:
        where = f"{leaf.name} {nic.port} of host {unit.host}"
        for one in ("ingress", "egress") if way == "both" else (way,):
            if one not in leaf.directions:
                return f"{leaf.name}: this switch cannot mirror {one}", "choose another --direction"
        if nic.port_channel and leaf.vendor == "cumulus" and way != "ingress":
            return f"{where} is in {nic.port_channel}: no egress mirror of a bond", "choose --direction ingress"
        if not any(port.asic == nic.asic for port in leaf.monitor_ports):
            return (f"{where} is on ASIC {nic.asic}, which has no monitor port",
                    "source and destination must be on one ASIC: add a monitor port there")
    return "", ""
