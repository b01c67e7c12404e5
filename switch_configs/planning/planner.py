"""Choose what to mirror: pure function Topology -> MirrorPlan, every choice with its reason.

1. What can be. A host counts where the copies of all its NICs of the group end (hosts.py). Refused if the arithmetic
   (coverage.py) says that the group can never be complete, that no node can have enough by itself and no nodes are
   named peers of each other, or that the wanted loss is not survived.
2. So many hosts that the group is complete with any `redundancy` - 1 mirrored GPUs lost: as many as that where a host
   is complete by itself (both directions), more in one direction; few leaves, and away from ring neighbours (two
   neighbours in both directions see the same packets twice). Only with the default redundancy a group too small for it
   is taken whole, and a note says what it survives.
3. All at one node where its ports allow it (assignment.py). With the default redundancy, hosts for which it has no
   room go to other nodes.
4. Both directions where the ports can carry them, because acknowledgements and clear-to-sends are witnesses; else one
   direction, if that survives the wanted loss too; else refused with the sums.
5. What each node then has, and what loss it survives, is worked out again from the sessions (completeness.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from switch_configs.errors import PlanError
from switch_configs.planning.assignment import Holding, Wish, assign
from switch_configs.planning.completeness import describe, shares_of
from switch_configs.planning.coverage import duplicates
from switch_configs.planning.hosts import Members, Place, Unit, cables_of, places_of, unreachable
from switch_configs.planning.monitor_ports import MonitorPorts, gbps
from switch_configs.planning.platform_rules import check_destination, check_plan, session_numbers, split_basis
from switch_configs.planning.shortage import Wanted, cheapest, what_lacks
from switch_configs.schema import (
    Direction,
    Group,
    GroupChoice,
    Leaf,
    MirrorPlan,
    MirrorSession,
    MonitorPort,
    NicPort,
    Source,
    Topology,
    ways_of,
)

__all__ = ["DEFAULT_REDUNDANCY", "make_plan", "refusal"]

DEFAULT_REDUNDANCY = 3  # GPUs per group, as the FlowCheck paper recommends
SPLIT = "each direction of its sources has a monitor port of its own"


def make_plan(
    topology: Topology, *, redundancy: int | None = None, direction: Direction | None = None, joined: bool = False
) -> MirrorPlan:
    """Choose ports and sessions. Raises PlanError with the reason and what would help.

    redundancy: every group stays complete with any redundancy - 1 of its mirrored GPUs lost. None: 3, or as much as
    a group has hosts for. direction: None chooses. joined: captures of all nodes are replayed together; else every
    group must be complete at one node, because a job attaches to one, or at nodes that the topology names peers.
    """
    if redundancy is not None and redundancy < 1:
        raise PlanError("redundancy counts GPUs per group and is at least 1", remedy="give --redundancy 1 or more")
    for leaf in topology.leaves:
        for port in leaf.monitor_ports:
            check_destination(leaf, port, topology.path_mtu)

    def fits(changed: Topology, wanted: Wanted) -> bool:
        try:
            _made(changed, wanted.redundancy, wanted.direction, joined=joined, greedy=True)
        except PlanError:
            return False
        return True

    try:
        return _made(topology, redundancy, direction, joined=joined)
    except _NoRoom as error:
        changes = cheapest(topology, Wanted(redundancy, direction), fits, DEFAULT_REDUNDANCY)
        if not changes:
            raise
        several = "cheapest first: " if len(changes) > 1 else ""
        known = "; or give peak_gbps of the ports, if their load is known to be lower"
        raise PlanError(error.what, where=error.where, remedy=several + "; or ".join(changes) + known) from None


def refusal(topology: Topology, direction: Direction, *, quick: bool = False) -> str:
    """Why make_plan() would refuse this direction; empty if it would not. Without changes that would help. quick: it
    may refuse what a longer search finds."""
    try:
        _made(topology, None, direction, joined=False, greedy=quick)
    except PlanError as error:
        return error.what
    return ""


def _made(
    topology: Topology, redundancy: int | None, direction: Direction | None, *, joined: bool, greedy: bool = False
) -> MirrorPlan:
    """make_plan() of a topology whose destinations are checked. greedy: without the searches that take seconds. Raises
    _NoRoom where other monitor ports would do."""
    ways: tuple[Direction, ...] = (direction,) if direction else ("both", "ingress", "egress")
    best: MirrorPlan | None = None
    refused: list[PlanError] = []
    tried: list[str] = []
    overloaded = False
    wanted = redundancy or DEFAULT_REDUNDANCY

    def shortfall(plan: MirrorPlan) -> int:
        return sum(max(0, wanted - 1 - choice.survives) for choice in plan.groups)

    for way in ways:
        try:
            plan = _Planner(topology, wanted, way, strict=redundancy is not None, joined=joined).plan(greedy=greedy)
        except _Overload as error:
            tried.append(f"{way}: {error}")
            overloaded = True
            continue
        except PlanError as error:
            tried.append(f"{way}: {error.what}")
            refused.append(error)
            continue
        if tried:
            plan.notes.insert(0, f"{way} only, because " + "; ".join(tried)[:240])
        if best is None or shortfall(plan) < shortfall(best):
            best = plan
        if shortfall(best) == 0:
            break
        tried.append(f"{way}: survives less than the loss of {wanted - 1} GPUs")
    if best is not None:
        check_plan(best)
        return best
    if refused and (direction or not overloaded):
        raise refused[0]
    raise _NoRoom(
        "the monitor ports cannot carry the copies: " + "; ".join(tried),
        remedy="add monitor ports, lower --redundancy, or give peak_gbps of the ports if their load is known to be "
        "lower",
    )


class _NoRoom(PlanError):
    """With more or faster monitor ports, or less to be copied, there would be a plan."""


class _Overload(Exception):
    """The monitor ports of a leaf are too slow for a direction, or too few."""


class _Planner:
    """One direction tried. strict: a group that does not survive `redundancy` - 1 lost GPUs is refused."""

    def __init__(self, topology: Topology, redundancy: int, way: Direction, *, strict: bool, joined: bool) -> None:
        self.topology, self.way, self.target = topology, way, redundancy - 1
        self.strict, self.joined = strict, joined
        self.cables = cables_of(topology)
        self.places = places_of(topology, joined=joined)
        self.everywhere = Place((node for place in self.places for node in place.nodes), topology, together=True)
        self.ports = MonitorPorts(topology, way)

    def plan(self, *, greedy: bool) -> MirrorPlan:
        wishes = [self._wish(group) for group in self.topology.groups]
        arrangement = assign(wishes, self.ports, self.everywhere, greedy=greedy)
        notes: list[str] = []
        chosen = []
        for wish, holding in zip(wishes, arrangement.holdings, strict=True):
            if holding is None:
                raise self._overload(wish, [])
            self._fill_up(wish, holding)
            chosen.append([*holding.units, *holding.others])
        copies = [duplicates(wish.members.group.rings, wish.members.hosts, wish.members.views(units))
                  for wish, units in zip(wishes, chosen, strict=True)]
        sessions = self._sessions(wishes, chosen, max(copied / seen if seen else 1.0 for seen, copied in copies))
        choices = []
        for wish, units, (seen, copied) in zip(wishes, chosen, copies, strict=True):
            choice = self._choice(wish.members, units, sessions)
            if copied > seen:
                choice.why.append(f"{copied - seen} of {seen} ring edges lie between two mirrored ports: those packets "
                                  "come twice")
            choices.append(choice)
            name = wish.members.group.name
            short = choice.survives < self.target
            if short and self.strict:
                raise self._too_fragile(wish, choice)
            if short and not wish.all_of:
                notes.append(f"group {name} survives {choice.survives} lost GPUs, not {self.target}: no more of its "
                             f"hosts reach {'a node' if self.joined else 'the same node'}")
        if not arrangement.proven:
            ended = f"ended after {arrangement.steps} steps" if arrangement.steps else "was not exact: too many groups"
            notes.append(f"the search for an arrangement {ended}; a better one may exist")
        if self.way != "both":
            notes.append("one direction: a running job can be joined in LL and LL128, but in SIMPLE only by its "
                         "clear-to-sends, which go the other way")
        nodes: dict[str, set[str]] = {}
        for session in sessions:
            nodes.setdefault(session.leaf, set()).add(session.node)
        return MirrorPlan(
            sessions=sessions, groups=choices, nodes_per_leaf={leaf: len(names) for leaf, names in nodes.items()},
            path_mtu=self.topology.path_mtu, notes=notes,
        )

    # -- what can be, with empty ports ----------------------------------------------------------------

    def _wish(self, group: Group) -> Wish:
        where = f"group {group.name}"
        for rank in group.ranks:
            if rank not in self.cables:
                raise PlanError(f"rank {rank} has no port in the topology", where=where,
                                remedy="add its port, or import an LLDP dump that shows it")
        members = Members(group, self.cables, self.way)
        usable = self._named(members) if group.mirror is not None else [
            unit for unit in members.units if not unreachable(unit, self.way)[0]
        ]
        why = members.lacking(usable)
        if why and not usable and group.mirror is None and not members.lacking(members.units):
            reason, remedy = unreachable(members.units[0], self.way)
            raise PlanError(f"no host of it has all its NICs on leaves with a monitor port: {reason}", where=where,
                            remedy=remedy)
        if why:
            named = f"ranks {sorted(r for u in usable for r in u.ranks)}, {self.way}" if usable else "the group"
            raise PlanError(f"{named} can never be complete: {why}", where=where,
                            remedy="mirror both directions, more ranks, or other ranks")
        losses = members.tolerance(usable)
        if self.strict and losses < self.target:
            raise PlanError(
                f"mirroring {self.way} of {len(usable)} of its {len(members.units)} hosts survives the loss of any "
                f"{losses} mirrored GPUs, --redundancy {self.target + 1} wants {self.target}", where=where,
                remedy=f"give --redundancy {losses + 1}, or another --direction",
            )
        places = [(place, [unit for unit in usable if place.reaches(unit)]) for place in self.places]
        places = [(place, units) for place, units in places if members.tolerance(units) >= 0]
        if not places:
            raise self._nowhere(members, usable)
        places.sort(key=lambda one: (-min(members.tolerance(one[1]), self.target), one[0].together))
        return Wish(members, usable, self.target, group.mirror is not None, places)

    def _named(self, members: Members) -> list[Unit]:
        """The hosts of the ranks that a person picked."""
        where, mirror = f"group {members.group.name}", set(members.group.mirror or ())
        chosen = [unit for unit in members.units if set(unit.ranks) & mirror]
        for unit in chosen:
            left = sorted(set(unit.ranks) - mirror)
            if left:
                raise PlanError(
                    f"ranks {sorted(mirror)} can never be complete: host {unit.host} also sends through the NICs "
                    f"of ranks {left}", where=where, remedy=f"add ranks {left} to mirror",
                )
            reason, remedy = unreachable(unit, self.way)
            if reason:
                raise PlanError(reason, where=where, remedy=remedy)
        return chosen

    def _nowhere(self, members: Members, usable: list[Unit]) -> PlanError:
        """No node could have enough, whatever its ports carry: what would have to change."""
        nodes: list[str] = []
        split = ""
        for unit in usable:
            ends = {leaf.name: self.everywhere.ports(leaf, nic)[0] for leaf, nic in unit.nics}
            nodes += [port.node for port in ends.values() if port.node not in nodes]
            if not split and len({port.node for port in ends.values()}) > 1:
                named = [f"{port.node} ({leaf} {port.port})" for leaf, port in ends.items()]
                split = f"host {unit.host} is copied to {', '.join(named[:-1])} and {named[-1]}"
        few = split or f"its {len(usable)} hosts are copied to {len(nodes)} nodes, and none of those has enough"
        leaves = sorted({leaf for unit in usable for leaf in unit.leaves})
        return PlanError(
            f"no node can be complete: {few}; a job attaches to one node", where=f"group {members.group.name}",
            remedy=f"give one node a monitor port on each of {_some(leaves)}; or name nodes that make up for each "
            f"other: peers: [[{_some(nodes)}]]; or make a group per leaf; --joined plans for a replay of the captures "
            "of all nodes together",
        )

    # -- after the assignment ---------------------------------------------------------------------------

    def _fill_up(self, wish: Wish, holding: Holding) -> None:
        """More hosts at other nodes if the group's own has no room for as many as are wanted. Raises _Overload if the
        others have none either."""
        members = wish.members
        wanted = min(wish.target, members.tolerance(wish.usable))
        left = [unit for unit in wish.usable if unit.index not in holding.deals]
        while members.tolerance([*holding.units, *holding.others]) < wanted:
            if not left:
                raise self._overload(wish, [*holding.units, *holding.others])
            unit = members.next_unit([*holding.units, *holding.others], left)
            left.remove(unit)
            dealt = self.ports.put(unit, self.everywhere)
            if dealt is not None:
                holding.deals[unit.index] = dealt
                holding.others.append(unit)

    def _overload(self, wish: Wish, own: list[Unit]) -> _Overload:
        """Sums of the leaf that most of the wanted hosts are on."""
        picked = wish.usable if wish.all_of else wish.members.pick(wish.usable, wish.target)
        wanted: dict[str, dict[str, NicPort]] = {}
        for unit in picked:
            for leaf, nic in unit.nics:
                wanted.setdefault(leaf.name, {})[nic.port] = nic
        leaf = max((leaf for leaf in self.topology.leaves if leaf.name in wanted), key=lambda x: len(wanted[x.name]))
        its = {nic.port for unit in own for there, nic in unit.nics if there is leaf}
        nics = wanted[leaf.name] | {nic.port: nic for nic in self.ports.mirrored(leaf.name) if nic.port not in its}
        return _Overload(what_lacks(self.topology, self.way, leaf, list(nics.values())))

    def _too_fragile(self, wish: Wish, choice: GroupChoice) -> PlanError:
        share = max(choice.shares, key=lambda share: share.survives)
        return _NoRoom(
            f"no node is complete with any {self.target} mirrored GPUs lost; the best, {' and '.join(share.nodes)} "
            f"({_some(share.ports)}), survives {choice.survives}", where=f"group {choice.group}",
            remedy=f"give --redundancy {choice.survives + 1}, or a faster monitor port",
        )

    def _choice(self, members: Members, units: list[Unit], sessions: list[MirrorSession]) -> GroupChoice:
        shares = shares_of(members, units, sessions, self.topology, joined=self.joined)
        best = max(shares, key=lambda share: share.survives)  # the first: a node alone before peers that are no better
        choice = GroupChoice(
            group=members.group.name, ranks=[rank for unit in units for rank in unit.ranks], direction=self.way,
            survives=best.survives, complete=[s.nodes[0] for s in shares if s.complete and len(s.nodes) == 1],
            peers=best.nodes if len(best.nodes) > 1 else [], shares=shares,
            why=[_explain(members.group, units, self.way)],
        )
        choice.why += describe(choice, joined=self.joined)
        return choice

    # -- sessions -----------------------------------------------------------------------------------------

    def _sessions(self, wishes: list[Wish], chosen: list[list[Unit]], copies: float) -> list[MirrorSession]:
        reasons: dict[tuple[str, str], list[str]] = {}
        for wish, units in zip(wishes, chosen, strict=True):
            for leaf, nic in (cable for unit in units for cable in unit.nics):
                reasons.setdefault((leaf.name, nic.port), []).append(wish.members.group.name)
        return [session for leaf in self.topology.leaves for session in self._of_leaf(leaf, reasons, copies)]

    def _of_leaf(self, leaf: Leaf, reasons: dict[tuple[str, str], list[str]], copies: float) -> Iterator[MirrorSession]:
        used = [port for port in leaf.monitor_ports if self.ports.sources(leaf.name, port.port)]
        number = leaf.session_number
        for index, port in enumerate(used):
            yield self._session(leaf, port, reasons, index, number, copies)
            number += session_numbers(leaf.vendor, self.ports.direction(leaf.name, port.port))

    def _session(
        self, leaf: Leaf, port: MonitorPort, reasons: dict[tuple[str, str], list[str]], index: int, number: int,
        copies: float,
    ) -> MirrorSession:
        way = self.ports.direction(leaf.name, port.port)
        nics = self.ports.sources(leaf.name, port.port)
        nics = sorted(nics, key=lambda n: [int(p) if p.isdecimal() else 0 for p in n.port.replace(".", "/").split("/")])
        sources = [
            Source(port=n.port, rank=n.rank, rail=n.rail, speed_gbps=n.speed_gbps, address=n.address,
                   why=f"rank {n.rank} (rail {n.rail}) of {n.host}, for {', '.join(reasons[leaf.name, n.port])}"[:300])
            for n in nics
        ]
        load = gbps(nics, way)
        factor = "in both directions" if way == "both" else way
        why = [f"{len(sources)} sources {factor} add up to {load:g} Gb/s; {port.port} carries {port.speed_gbps:g} Gb/s "
               f"to node {port.node}"]
        if any(n.peak_gbps is not None for n in nics):
            full = sum(n.speed_gbps for n in nics) * len(ways_of(way))
            why.append(f"the sum trusts peak_gbps; at line rate it is {full:g} Gb/s")
        if way != self.way:
            others = {end.port for n in nics for _, end in self.ports.ends(leaf.name, n.port)} - {port.port}
            why.append(f"{SPLIT}, the other one goes to {_some(sorted(others))} ({split_basis(leaf.vendor)})"[:300])
        base = self.topology.session
        return MirrorSession(
            leaf=leaf.name, vendor=leaf.vendor, name=base if index == 0 else f"{base[:29]}-{index + 1}", number=number,
            direction=way, sources=sources, destination=port.port, destination_gbps=port.speed_gbps,
            node=port.node, mtu=port.mtu, load_gbps=load, copies=round(copies, 4), why=why, address=leaf.address,
            ssh_port=leaf.ssh_port, bridge=leaf.bridge, netns=leaf.netns, ovs_rundir=leaf.ovs_rundir,
            split_directions=leaf.split_directions,
        )


def _explain(group: Group, chosen: list[Unit], way: Direction) -> str:
    order = "known ring order" if group.rings else "unknown ring order"
    ring = {
        "both": "one host's two directions hold every chunk: what its edge out lacks comes in",
        "ingress": "two hosts' edges out hold every chunk: each lacks another one",
        "egress": "two hosts' edges in hold every chunk: each lacks another one",
    }
    tree = {
        "both": "any host has the results, from its parent or for its children",
        "ingress": "of each tree a host with children, which sends the results down",
        "egress": "of each tree a host with a parent, which gets the results",
    }
    parts = [f"ring ({order}): {ring[way]}"] if group.algorithm in ("ring", "any") else []
    parts += [f"tree: {tree[way]}"] if group.algorithm in ("tree", "any") else []
    return f"{len(chosen)} of the group's hosts; " + "; ".join(parts)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
