"""What the monitor ports carry while mirrored ports are dealt to them: rates, sessions, and who holds what.

A mirrored port is copied whole to one monitor port; or, where it is copied in both directions and the platform allows
it, ingress to one and egress to another. A monitor port has one session, so all that it carries has one direction.
Every change can be taken back in any order, because a port's load is summed again from what it has (no drift).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import fsum

from switch_configs.planning.hosts import Place, Unit
from switch_configs.planning.platform_rules import most_source_characters, no_room, splits
from switch_configs.schema import Direction, Leaf, MonitorPort, NicPort, Topology, ways_of

__all__ = ["Deal", "Ends", "MonitorPorts", "PortName", "gbps"]

PortName = tuple[str, str]  # leaf, port
Ends = tuple[tuple[Direction, MonitorPort], ...]  # what of a mirrored port is copied to which monitor port
Deal = tuple[Leaf, NicPort, Ends]


def gbps(nics: list[NicPort], way: Direction) -> float:
    """What the copies of these ports need at the peak."""
    return fsum(len(ways_of(way)) * nic.load_gbps for nic in nics)


class MonitorPorts:
    """Which mirrored port is copied to which monitor ports. That is one choice for a mirrored port, whichever groups
    want it; it stays until the last of them gives it back."""

    def __init__(self, topology: Topology, way: Direction) -> None:
        self.way = way
        self._nodes: Counter[str] = Counter()  # node -> copies of mirrored ports that end at it
        self._splits = {
            leaf.name: way == "both" and splits(leaf.vendor, leaf.split_directions) for leaf in topology.leaves
        }
        self._has: dict[PortName, dict[str, NicPort]] = {
            (leaf.name, port.port): {} for leaf in topology.leaves for port in leaf.monitor_ports
        }
        self._ways: dict[PortName, Direction] = {}  # of monitor ports in use, each a session
        self._begun: dict[str, Counter[Direction]] = {leaf.name: Counter() for leaf in topology.leaves}  # the same
        self._to: dict[PortName, Ends] = {}
        self._holders: Counter[PortName] = Counter()

    def ends(self, leaf: str, port: str) -> Ends:
        """Where a mirrored port is copied to; empty: it is not mirrored."""
        return self._to.get((leaf, port), ())

    def sources(self, leaf: str, port: str) -> list[NicPort]:
        """What is copied to a monitor port, in the order in which it was dealt."""
        return list(self._has[leaf, port].values())

    def direction(self, leaf: str, port: str) -> Direction:
        """What of its sources is copied to a monitor port that is in use."""
        return self._ways[leaf, port]

    def mirrored(self, leaf: str) -> list[NicPort]:
        """All that is mirrored on a leaf."""
        return list({
            nic.port: nic for (name, _), nics in self._has.items() if name == leaf for nic in nics.values()
        }.values())

    @property
    def nodes_in_use(self) -> int:
        return sum(count > 0 for count in self._nodes.values())

    @property
    def sessions(self) -> int:
        """Monitor ports in use."""
        return len(self._ways)

    def fitting(self, place: Place, leaf: Leaf, nics: list[NicPort]) -> list[Ends]:
        """Where in the place all of these NICs, which are on one leaf and ASIC, can be copied to: what begins the
        fewest sessions and nodes first, and of that what keeps both directions together. Of several that are alike and
        empty, one."""
        found: list[Ends] = [
            ((self.way, port),) for port in self._with_room(place, leaf, nics, self.way, 1)
            if self._allowed(leaf, ((self.way, port),))
        ]
        if self._splits[leaf.name]:
            found += self._pairs(place, leaf, nics)

        def begins(ends: Ends) -> tuple[int, int, int, int]:
            nodes = {port.node for _, port in ends}
            return (
                sum(not self._has[leaf.name, port.port] for _, port in ends),
                sum(not self._nodes[node] for node in nodes), len(ends), len(nodes),
            )

        return sorted(found, key=begins)

    def _pairs(self, place: Place, leaf: Leaf, nics: list[NicPort]) -> Iterator[Ends]:
        alike = set()
        for sent in self._with_room(place, leaf, nics, "ingress", 2):
            for received in self._with_room(place, leaf, nics, "egress", 2):
                if sent is received:
                    continue
                kinds = tuple(
                    (port.node, port.speed_gbps) if not self._has[leaf.name, port.port] else port.port
                    for port in (sent, received)
                )
                ends: Ends = (("ingress", sent), ("egress", received))
                if kinds not in alike and self._allowed(leaf, ends):
                    alike.add(kinds)
                    yield ends

    def _with_room(
        self, place: Place, leaf: Leaf, nics: list[NicPort], way: Direction, most: int
    ) -> Iterator[MonitorPort]:
        """Ports of the place that this direction of all NICs fits into; of empty ones that are alike so many."""
        alike: Counter[tuple[str, float]] = Counter()
        characters = most_source_characters(leaf.vendor)
        for port in place.ports(leaf, nics[0]):
            has = self._has[leaf.name, port.port]
            if not has:
                kind = (port.node, port.speed_gbps)
                alike[kind] += 1
                if alike[kind] > most:
                    continue
            elif self._ways[leaf.name, port.port] != way:
                continue
            together = [*has.values(), *nics]
            if characters is not None and sum(len(nic.port) + 1 for nic in together) - 1 > characters:
                continue
            if gbps(together, way) <= port.speed_gbps:
                yield port

    def _allowed(self, leaf: Leaf, ends: Ends) -> bool:
        """Has the switch room for the sessions that this begins?"""
        new = Counter(way for way, port in ends if not self._has[leaf.name, port.port])
        return not new or not no_room(leaf.vendor, self._begun[leaf.name] + new, leaf.session_number)[0]

    def deal(self, leaf: Leaf, nic: NicPort, ends: Ends) -> Deal:
        name = leaf.name, nic.port
        if not self._holders[name]:
            for way, port in ends:
                has = self._has[leaf.name, port.port]
                if not has:
                    self._ways[leaf.name, port.port] = way
                    self._begun[leaf.name][way] += 1
                has[nic.port] = nic
                self._nodes[port.node] += 1
            self._to[name] = ends
        self._holders[name] += 1
        return leaf, nic, ends

    def take_back(self, deal: Deal) -> None:
        leaf, nic, ends = deal
        name = leaf.name, nic.port
        self._holders[name] -= 1
        if self._holders[name]:
            return
        for way, port in ends:
            has = self._has[leaf.name, port.port]
            del has[nic.port]
            if not has:
                del self._ways[leaf.name, port.port]
                self._begun[leaf.name][way] -= 1
            self._nodes[port.node] -= 1
        del self._to[name]

    def put(self, unit: Unit, place: Place) -> list[Deal] | None:
        """Deal all NICs of a host to ports of the place, those of a leaf to one port if one has room. None: no room,
        and nothing is changed."""
        deals: list[Deal] = []
        alike: dict[tuple[str, int], list[tuple[Leaf, NicPort]]] = {}
        for leaf, nic in sorted(unit.nics, key=lambda cable: -cable[1].load_gbps):
            there = self.ends(leaf.name, nic.port)
            if not there:
                alike.setdefault((leaf.name, nic.asic), []).append((leaf, nic))
            elif all(port.node in place.nodes for _, port in there):
                deals.append(self.deal(leaf, nic, there))
            else:
                self._undo(deals)
                return None
        for cables in alike.values():
            leaf, nics = cables[0][0], [nic for _, nic in cables]
            whole = self.fitting(place, leaf, nics)
            for nic in nics:
                ends = whole or self.fitting(place, leaf, [nic])
                if not ends:
                    self._undo(deals)
                    return None
                deals.append(self.deal(leaf, nic, ends[0]))
        return deals

    def _undo(self, deals: list[Deal]) -> None:
        for deal in deals:
            self.take_back(deal)
