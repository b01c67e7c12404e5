"""What the monitor ports carry while mirrored ports are dealt to them: rates, sessions, and who holds what.

Every change can be taken back in any order, because a port's load is summed anew from what it has (no drift).
"""

from __future__ import annotations

from collections import Counter
from math import fsum

from switch_configs.planning.hosts import Place, Unit
from switch_configs.planning.platform_rules import most_sessions, most_source_characters
from switch_configs.schema import Direction, Leaf, MonitorPort, NicPort, Topology

__all__ = ["Deal", "MonitorPorts", "PortName"]

PortName = tuple[str, str]  # leaf, port
Deal = tuple[Leaf, NicPort, MonitorPort]


class MonitorPorts:
    """Which mirrored port is copied to which monitor port. A mirrored port has one destination, whichever groups
    want it; it stays until the last of them gives it back."""

    def __init__(self, topology: Topology, way: Direction) -> None:
        self.factor = 2 if way == "both" else 1
        self._nodes: Counter[str] = Counter()  # node -> mirrored ports that end at it
        self._limits = {leaf.name: most_sessions(leaf, way) for leaf in topology.leaves}
        self._begun: Counter[str] = Counter()  # leaf -> monitor ports in use, each a session
        self._has: dict[PortName, dict[str, NicPort]] = {
            (leaf.name, port.port): {} for leaf in topology.leaves for port in leaf.monitor_ports
        }
        self._to: dict[PortName, MonitorPort] = {}
        self._holders: Counter[PortName] = Counter()

    def destination(self, leaf: str, port: str) -> MonitorPort | None:
        """Where a mirrored port is copied to; None: it is not mirrored."""
        return self._to.get((leaf, port))

    def sources(self, leaf: str, port: str) -> list[NicPort]:
        """What is copied to a monitor port, in the order in which it was dealt."""
        return list(self._has[leaf, port].values())

    def mirrored(self, leaf: str) -> list[NicPort]:
        """All that is mirrored on a leaf."""
        return [nic for (name, _), nics in self._has.items() if name == leaf for nic in nics.values()]

    @property
    def nodes_in_use(self) -> int:
        return sum(count > 0 for count in self._nodes.values())

    @property
    def sessions(self) -> int:
        """Monitor ports in use."""
        return self._begun.total()

    def gbps(self, nics: list[NicPort]) -> float:
        return fsum(self.factor * nic.load_gbps for nic in nics)

    def fitting(self, place: Place, leaf: Leaf, nics: list[NicPort]) -> list[MonitorPort]:
        """Ports of the place with room for all of these NICs, which are on one leaf and ASIC: those of nodes and ports
        that are in use first, so that sessions and nodes stay few. Of several that are alike and empty, one."""
        fits = []
        alike = set()
        for port in place.ports(leaf, nics[0]):
            has = self._has[leaf.name, port.port]
            if not has:
                kind = (port.node, port.speed_gbps)
                limit = self._limits[leaf.name]
                if kind in alike or (limit is not None and self._begun[leaf.name] >= limit):
                    continue
                alike.add(kind)
            together = [*has.values(), *nics]
            characters = most_source_characters(leaf.vendor)
            if characters is not None and sum(len(nic.port) + 1 for nic in together) - 1 > characters:
                continue
            if self.gbps(together) <= port.speed_gbps:
                fits.append(port)
        return sorted(fits, key=lambda port: (not self._has[leaf.name, port.port], not self._nodes[port.node]))

    def deal(self, leaf: Leaf, nic: NicPort, port: MonitorPort) -> Deal:
        name = leaf.name, nic.port
        if not self._holders[name]:
            has = self._has[leaf.name, port.port]
            self._begun[leaf.name] += not has
            has[nic.port] = nic
            self._nodes[port.node] += 1
            self._to[name] = port
        self._holders[name] += 1
        return leaf, nic, port

    def take_back(self, deal: Deal) -> None:
        leaf, nic, port = deal
        name = leaf.name, nic.port
        self._holders[name] -= 1
        if not self._holders[name]:
            has = self._has[leaf.name, port.port]
            del has[nic.port]
            self._begun[leaf.name] -= not has
            self._nodes[port.node] -= 1
            del self._to[name]

    def put(self, unit: Unit, place: Place) -> list[Deal] | None:
        """Deal all NICs of a host to ports of the place, those of a leaf to one port if one has room. None: no room,
        and nothing is changed."""
        deals: list[Deal] = []
        alike: dict[tuple[str, int], list[tuple[Leaf, NicPort]]] = {}
        for leaf, nic in sorted(unit.nics, key=lambda cable: -cable[1].load_gbps):
            there = self.destination(leaf.name, nic.port)
            if there is None:
                alike.setdefault((leaf.name, nic.asic), []).append((leaf, nic))
            elif there.node in place.nodes:
                deals.append(self.deal(leaf, nic, there))
            else:
                self._undo(deals)
                return None
        for cables in alike.values():
            leaf, nics = cables[0][0], [nic for _, nic in cables]
            whole = self.fitting(place, leaf, nics)
            for nic in nics:
                ports = whole or self.fitting(place, leaf, [nic])
                if not ports:
                    self._undo(deals)
                    return None
                deals.append(self.deal(leaf, nic, ports[0]))
        return deals

    def _undo(self, deals: list[Deal]) -> None:
        for deal in deals:
            self.take_back(deal)
