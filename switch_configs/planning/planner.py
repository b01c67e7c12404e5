"""Choose what to mirror: pure function Topology -> MirrorPlan, every choice with its reason.

1. Units. A unit is a host with all its NICs of the group: which of them a ring or tree uses is NCCL's affair.
   One GPU per host and group makes it one GPU.
2. So many units that the group is complete with any `redundancy` - 1 mirrored GPUs lost: as many as that where a
   unit is complete by itself (both directions), more in one direction. On one leaf where that is possible, because a
   node captures on one port and a job attaches to one node, and away from ring neighbours (two neighbours in both
   directions see the same packets twice). Refused if the arithmetic says that the set can never be complete, that no
   node port has such a set, or that the wanted loss is not survived; only with the default redundancy a group too
   small for it is taken whole, and a note says what it survives.
3. Both directions where the node ports can carry them, because acknowledgements and clear-to-sends are witnesses;
   else one direction, if that survives the wanted loss too; else refused with the sums.
4. Sources are dealt to the leaf's node ports host by host, the fullest first, into the port already begun if it has
   room; one session each.
"""

from __future__ import annotations

from collections.abc import Iterator

from switch_configs.errors import PlanError
from switch_configs.planning.coverage import duplicates, missing, ring_edges, survives
from switch_configs.planning.platform_rules import check_destination, check_plan
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
)

__all__ = ["DEFAULT_REDUNDANCY", "make_plan"]

DEFAULT_REDUNDANCY = 3  # GPUs per group, as the FlowCheck paper recommends

CANDIDATES = 64  # looked at per choice: large groups are regular, and trying all is quadratic

_Cables = dict[int, list[tuple[Leaf, NicPort]]]


class _Unit:
    """A host's NICs for one group."""

    def __init__(self, host: str, ranks: list[int], cables: _Cables) -> None:
        self.host, self.ranks = host, ranks
        self.nics = [cable for rank in ranks for cable in cables[rank]]
        self.leaves = {leaf.name for leaf, _ in self.nics}


def make_plan(
    topology: Topology, *, redundancy: int | None = None, direction: Direction | None = None, joined: bool = False
) -> MirrorPlan:
    """Choose ports and sessions. Raises PlanError with the reason and what would help.

    redundancy: every group stays complete with any redundancy - 1 of its mirrored GPUs lost. None: 3, or as much as
    a group has hosts for. direction: None chooses. joined: captures of all nodes are replayed together; else every
    group must be complete at one node port, because a node captures on one and a job attaches to one node.
    """
    if redundancy is not None and redundancy < 1:
        raise PlanError("redundancy counts GPUs per group and is at least 1", remedy="give --redundancy 1 or more")
    cables: _Cables = {}
    for leaf in topology.leaves:
        for nic in leaf.ports:
            cables.setdefault(nic.rank, []).append((leaf, nic))
        for port in leaf.monitor_ports:
            check_destination(leaf, port, topology.path_mtu)
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
            plan = _plan(topology, cables, wanted, way, strict=redundancy is not None, joined=joined)
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
    raise PlanError(
        "the node ports cannot carry the copies: " + "; ".join(tried),
        remedy="add node ports, lower --redundancy, or give peak_gbps of the ports if their load is known to be lower",
    )


class _Overload(Exception):
    """The node ports of a leaf are too slow for a direction."""


def _plan(
    topology: Topology, cables: _Cables, redundancy: int, way: Direction, *, strict: bool, joined: bool
) -> MirrorPlan:
    reasons: dict[tuple[str, str], list[str]] = {}
    wanted: dict[tuple[str, str], tuple[Leaf, NicPort]] = {}
    choices, copies, notes = [], 1.0, []
    chosen = []
    for group in topology.groups:
        choice, units, ratio = _choose(group, cables, redundancy, way, strict=strict)
        choices.append(choice)
        chosen.append((group, choice, units))
        copies = max(copies, ratio)
        for unit in units:
            for leaf, nic in unit.nics:
                wanted[leaf.name, nic.port] = (leaf, nic)
                reasons.setdefault((leaf.name, nic.port), []).append(group.name)
    sessions = []
    for leaf in topology.leaves:
        nics = [nic for (name, _), (_, nic) in wanted.items() if name == leaf.name]
        if nics:
            groups = {nic.port: reasons[leaf.name, nic.port] for nic in nics}
            sessions += list(_sessions(topology, leaf, nics, groups, way, copies))
    for group, choice, units in chosen:
        if not joined:
            _at_one_node(group, choice, units, cables, sessions, redundancy if strict else 0)
        if choice.survives < redundancy - 1 and group.mirror is None:
            notes.append(f"group {group.name} survives {choice.survives} lost GPUs, not {redundancy - 1}: no more of "
                         f"its hosts reach {'a node port' if joined else 'the same node port'}")
    if way != "both":
        notes.append("one direction: a running job can be joined in LL and LL128, but in SIMPLE only by its "
                     "clear-to-sends, which go the other way")
    nodes: dict[str, set[str]] = {}
    for session in sessions:
        nodes.setdefault(session.leaf, set()).add(session.node)
    counts = {leaf: len(names) for leaf, names in nodes.items()}
    return MirrorPlan(sessions=sessions, groups=choices, nodes_per_leaf=counts, path_mtu=topology.path_mtu, notes=notes)


# -- which hosts of a group -------------------------------------------------------------------------------


def _choose(
    group: Group, cables: _Cables, redundancy: int, way: Direction, *, strict: bool
) -> tuple[GroupChoice, list[_Unit], float]:
    where = f"group {group.name}"
    for rank in group.ranks:
        if rank not in cables:
            raise PlanError(f"rank {rank} has no port in the topology", where=where,
                            remedy="add its port, or import an LLDP dump that shows it")
    hosts = {rank: cables[rank][0][1].host for rank in group.ranks}
    units = _units(group, cables, hosts)

    def lacking(chosen: list[_Unit]) -> str:
        return missing(group.algorithm, group.rings, hosts, group.ranks, {u.host: way for u in chosen})

    if group.mirror is not None:
        chosen = [u for u in units if set(u.ranks) & set(group.mirror)]
        for unit in chosen:
            left = sorted(set(unit.ranks) - set(group.mirror))
            if left:
                raise PlanError(
                    f"ranks {sorted(group.mirror)} can never be complete: host {unit.host} also sends through the NICs "
                    f"of ranks {left}", where=where, remedy=f"add ranks {left} to mirror",
                )
        for unit in chosen:
            _reachable(unit, where)
    else:
        chosen = _pick(group, [u for u in units if not _unreachable(u)], hosts, redundancy, way)
    why = lacking(chosen)
    if why and not chosen and group.mirror is None and not lacking(units):
        raise PlanError(f"no host of it has all its NICs on leaves with a node port: {_unreachable(units[0])}",
                        where=where, remedy="add a monitor_ports entry to these leaves")
    if why:
        named = f"ranks {sorted(r for u in chosen for r in u.ranks)}, {way}" if chosen else "the group"
        raise PlanError(f"{named} can never be complete: {why}", where=where,
                        remedy="mirror both directions, more ranks, or other ranks")
    views = {unit.host: way for unit in chosen}
    losses = survives(group.algorithm, group.rings, hosts, group.ranks, views)
    seen, copied = duplicates(group.rings, hosts, views)
    if strict and losses < redundancy - 1:
        raise PlanError(
            f"mirroring {way} of {len(chosen)} of its {len(units)} hosts survives the loss of any {losses} mirrored "
            f"GPUs, --redundancy {redundancy} wants {redundancy - 1}", where=where,
            remedy=f"give --redundancy {losses + 1}, or another --direction",
        )
    mirrored = sum(len(u.ranks) for u in chosen)
    text = [_explain(group, chosen, way), f"complete with any {losses} of {mirrored} mirrored GPUs lost"]
    if copied > seen:
        text.append(f"{copied - seen} of {seen} ring edges lie between two mirrored ports: those packets come twice")
    choice = GroupChoice(group=group.name, ranks=[r for u in chosen for r in u.ranks], direction=way,
                         survives=losses, why=text)
    return choice, chosen, copied / seen if seen else 1.0


def _at_one_node(
    group: Group, choice: GroupChoice, units: list[_Unit], cables: _Cables, sessions: list[MirrorSession],
    redundancy: int,
) -> None:
    """What the best of the node ports has by itself goes into `choice`. Raises PlanError if none is complete, or if
    none survives the loss of `redundancy` - 1 GPUs."""
    where = f"group {group.name}"
    to = {(session.leaf, port): session for session in sessions for port in session.ports}
    hosts = {rank: cables[rank][0][1].host for rank in group.ranks}
    whole: dict[tuple[str, str], list[_Unit]] = {}
    split = ""
    for unit in units:
        ends = {(s.leaf, s.destination): s for s in (to[leaf.name, nic.port] for leaf, nic in unit.nics)}
        if len(ends) == 1:
            whole.setdefault(next(iter(ends)), []).append(unit)
        elif not split:
            names = [f"{s.node} ({s.leaf} {s.destination})" for s in ends.values()]
            split = f"host {unit.host} is copied to {', '.join(names[:-1])} and {names[-1]}"
    best, at = -1, ("", "")
    for end, some in whole.items():
        views: dict[str, Direction] = {unit.host: choice.direction for unit in some}
        losses = survives(group.algorithm, group.rings, hosts, group.ranks, views)
        if losses > best:
            best, at = losses, end
    if best < 0:
        few = split or f"its {len(units)} hosts are copied to {len(whole)} node ports, and none of those has enough"
        raise PlanError(
            f"no node can be complete: {few}; a node captures on one port, and a job attaches to one node", where=where,
            remedy="bring all ports of a host to one leaf and one node port, or make a group per leaf; --joined plans "
            "for a replay of the captures of all nodes together",
        )
    if best < redundancy - 1:
        raise PlanError(
            f"no node port is complete with any {redundancy - 1} mirrored GPUs lost; the best, {at[0]} {at[1]}, "
            f"survives {best}", where=where, remedy=f"give --redundancy {best + 1}, or a faster node port",
        )
    node = next(s.node for s in sessions if (s.leaf, s.destination) == at)
    mirrored = sum(len(unit.ranks) for unit in whole[at])
    choice.survives = best
    choice.why[1] = f"node {node} ({at[0]} {at[1]}) is complete with any {best} of {mirrored} mirrored GPUs lost"
    if len(whole[at]) < len(units):
        choice.why.append("what goes to other node ports does not help it: a job attaches to one node")


def _units(group: Group, cables: _Cables, hosts: dict[int, str]) -> list[_Unit]:
    members: dict[str, list[int]] = {}
    for rank in group.ranks:
        members.setdefault(hosts[rank], []).append(rank)
    busy = set(group.ranks)
    if group.rings and group.algorithm == "ring":  # known order: a GPU in the middle of its host uses no NIC
        busy = set()
        for ring in group.rings:
            for position, _, _ in ring_edges(ring, hosts):
                busy |= {ring[position], ring[(position + 1) % len(ring)]}
    return [_Unit(host, [r for r in ranks if r in busy] or ranks, cables) for host, ranks in members.items()]


def _unreachable(unit: _Unit) -> str:
    bare = sorted({leaf.name for leaf, _ in unit.nics if not leaf.monitor_ports})
    return f"host {unit.host} is on {', '.join(bare)} without a node port" if bare else ""


def _reachable(unit: _Unit, where: str) -> None:
    why = _unreachable(unit)
    if why:
        raise PlanError(why, where=where, remedy="add a monitor_ports entry to the leaf")


def _pick(group: Group, units: list[_Unit], hosts: dict[int, str], redundancy: int, way: Direction) -> list[_Unit]:
    neighbours: dict[str, set[str]] = {}
    for ring in group.rings:
        for _, a, b in ring_edges(ring, hosts):
            neighbours.setdefault(a, set()).add(b)
            neighbours.setdefault(b, set()).add(a)

    def tolerance(chosen: list[_Unit]) -> int:
        views: dict[str, Direction] = {u.host: way for u in chosen}
        return survives(group.algorithm, group.rings, hosts, group.ranks, views)

    chosen: list[_Unit] = []
    while len(chosen) < len(units) and tolerance(chosen) < redundancy - 1:
        taken = {u.host for u in chosen}
        used = [leaf for u in chosen for leaf in u.leaves]
        chosen.append(
            min(
                [u for u in units if u.host not in taken][:CANDIDATES],
                key=lambda u: (
                    -tolerance([*chosen, u]),
                    -sum(used.count(leaf) for leaf in u.leaves),  # one node should see them all
                    -sum(v.leaves == u.leaves for v in units),
                    len(neighbours.get(u.host, set()) & taken),
                    units.index(u),
                ),
            )
        )
    reached = min(tolerance(chosen), redundancy - 1)
    for unit in chosen[::-1]:  # one that was taken before a better one may not be needed any more
        fewer = [u for u in chosen if u is not unit]
        if tolerance(fewer) >= max(reached, 0):
            chosen = fewer
    return chosen


def _explain(group: Group, chosen: list[_Unit], way: Direction) -> str:
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


# -- which node port gets which source --------------------------------------------------------------------


def _sessions(
    topology: Topology, leaf: Leaf, nics: list[NicPort], groups: dict[str, list[str]], way: Direction, copies: float
) -> Iterator[MirrorSession]:
    for one in ("ingress", "egress") if way == "both" else (way,):
        if one not in leaf.directions:
            raise PlanError(f"this switch cannot mirror {one}", where=leaf.name, remedy="choose another --direction")
    for nic in nics:
        if nic.port_channel and leaf.vendor == "cumulus" and way != "ingress":
            raise PlanError(f"{nic.port} is in {nic.port_channel}: no egress mirror of a bond", where=leaf.name,
                            remedy="choose --direction ingress")
    factor = 2 if way == "both" else 1
    load: dict[str, float] = {port.port: 0.0 for port in leaf.monitor_ports}
    dealt: dict[str, list[NicPort]] = {port.port: [] for port in leaf.monitor_ports}
    hosts: dict[str, list[NicPort]] = {}
    for nic in sorted(nics, key=lambda n: -n.load_gbps):
        hosts.setdefault(nic.host, []).append(nic)

    def deal(some: list[NicPort]) -> bool:
        """All of them to one port, if one has room."""
        rate = factor * sum(nic.load_gbps for nic in some)
        fits = [
            port for port in leaf.monitor_ports
            if {port.asic} == {nic.asic for nic in some} and load[port.port] + rate <= port.speed_gbps
        ]
        if fits:
            # the port already begun first: fewer sessions and fewer nodes
            best = min(fits, key=lambda port: (not dealt[port.port], leaf.monitor_ports.index(port)))
            load[best.port] += rate
            dealt[best.port] += some
        return bool(fits)

    for some in hosts.values():
        if not deal(some):
            for nic in some:
                if not deal([nic]):
                    _refuse_load(leaf, nics, nic, factor)
    step = 2 if leaf.vendor == "cumulus" and way == "both" else 1
    used = [port for port in leaf.monitor_ports if dealt[port.port]]
    for index, port in enumerate(used):
        yield _session(topology, leaf, port, dealt[port.port], groups, way, index, step, load[port.port], copies)


def _refuse_load(leaf: Leaf, nics: list[NicPort], nic: NicPort, factor: int) -> None:
    if not any(port.asic == nic.asic for port in leaf.monitor_ports):
        raise PlanError(f"{nic.port} is on ASIC {nic.asic}, which has no node port", where=leaf.name,
                        remedy="source and destination must be on one ASIC: add a node port there")
    total = factor * sum(n.load_gbps for n in nics)
    have = sum(port.speed_gbps for port in leaf.monitor_ports)
    raise _Overload(
        f"{leaf.name}: {len(nics)} sources need {total:g} Gb/s, {len(leaf.monitor_ports)} node ports carry {have:g}"
    )


def _session(
    topology: Topology, leaf: Leaf, port: MonitorPort, nics: list[NicPort], groups: dict[str, list[str]],
    way: Direction, index: int, step: int, load: float, copies: float,
) -> MirrorSession:
    nics = sorted(nics, key=lambda n: [int(p) if p.isdigit() else 0 for p in n.port.replace(".", "/").split("/")])
    sources = [
        Source(port=n.port, rank=n.rank, rail=n.rail, speed_gbps=n.speed_gbps, address=n.address,
               why=f"rank {n.rank} (rail {n.rail}) of {n.host}, for {', '.join(groups[n.port])}"[:300])
        for n in nics
    ]
    factor = "in both directions" if way == "both" else way
    why = [
        f"{len(sources)} sources {factor} add up to {load:g} Gb/s; {port.port} carries {port.speed_gbps:g} Gb/s to "
        f"node {port.node}"
    ]
    if any(n.peak_gbps is not None for n in nics):
        full = sum(n.speed_gbps for n in nics) * (2 if way == "both" else 1)
        why.append(f"the sum trusts peak_gbps; at line rate it is {full:g} Gb/s")
    base = topology.session
    return MirrorSession(
        leaf=leaf.name, vendor=leaf.vendor, name=base if index == 0 else f"{base[:29]}-{index + 1}",
        number=leaf.session_number + index * step, direction=way, sources=sources, destination=port.port,
        destination_gbps=port.speed_gbps, node=port.node, mtu=port.mtu, load_gbps=load, copies=round(copies, 4),
        why=why, address=leaf.address, ssh_port=leaf.ssh_port, bridge=leaf.bridge, netns=leaf.netns,
        ovs_rundir=leaf.ovs_rundir,
    )
