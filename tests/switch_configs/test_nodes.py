"""Which node a group's streams end at, and what each node has: held against a simulation of NCCL's sends port by port,
and against every way to deal ports where there are few."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from switch_configs.errors import PlanError
from switch_configs.planning import assignment
from switch_configs.planning.planner import make_plan
from switch_configs.schema import GroupChoice, MirrorPlan, NodeShare, Topology

from .test_plan import ring_delivers, tree_delivers

Port = tuple[str, str]  # leaf, port
Copy = tuple[str, str, str]  # the same, and which direction of it
WAYS = {"both": ["ingress", "egress"], "ingress": ["ingress"], "egress": ["egress"]}
#: Where ingress and egress of one port may go to two monitor ports without consent: mirror-safety's rules of a planner.
SPLITS = ("sonic", "sonic-configdb", "nxos", "junos", "ovs", "tc")

# What a switch has room for, by (platform, direction): monitor ports in use. From the pages that switches.md names.
ROOM = {
    "eos": (99, 99), "sonic": (99, 99), "nxos": (4, 3), "junos": (2, 2), "cumulus": (7, 3), "comware": (15, 15),
    "ovs": (32, 32), "tc": (255, 255),
}


def planned(data: dict[str, Any], **options: Any) -> MirrorPlan:
    return make_plan(Topology.model_validate(data), **options)


def by_line(plan: MirrorPlan) -> str:
    return "\n".join(line for choice in plan.groups for line in choice.why)


# -- the oracle -------------------------------------------------------------------------------------------


class Fabric:
    """A topology as plain data, and what of a group certainly passes a set of mirrored ports."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.nics: dict[Port, dict[str, Any]] = {(x["name"], p["port"]): p for x in data["leaves"] for p in x["ports"]}
        self.ends: dict[Port, dict[str, Any]] = {
            (x["name"], p["port"]): p for x in data["leaves"] for p in x["monitor_ports"]
        }
        self.vendors = {x["name"]: x["vendor"] for x in data["leaves"]}
        self.groups = {group["name"]: group for group in data["groups"]}

    def hosts(self, name: str) -> dict[int, str]:
        of = {p["rank"]: p["host"] for p in self.nics.values()}
        return {rank: of[rank] for rank in self.groups[name]["ranks"]}

    def through(self, name: str) -> dict[str, list[Port]]:
        """Ports that a host's traffic of this group may pass: NCCL chooses among them, for every edge anew."""
        group, hosts = self.groups[name], self.hosts(name)
        ranks = set(group["ranks"])
        if group.get("rings") and group.get("algorithm") == "ring":
            ranks = {
                rank for ring in group["rings"] for at, other in enumerate(ring)
                if hosts[other] != hosts[ring[at - 1]] for rank in (other, ring[at - 1])
            } or ranks
        found: dict[str, list[Port]] = {host: [] for host in hosts.values()}
        for port, nic in self.nics.items():
            if nic["rank"] in ranks and nic["rank"] in hosts:
                found[nic["host"]].append(port)
        for host, ports in found.items():  # none of its GPUs is at an edge: any may be
            ports += [p for p, nic in self.nics.items() if not ports and nic["rank"] in hosts and nic["host"] == host]
        return found

    def complete(self, name: str, copies: set[Copy]) -> bool:
        """Is every reduced slice on some edge that certainly is among `copies`, for every ring that there may be?
        An edge is certain where each of the ports that it may take is copied."""
        group, hosts = self.groups[name], self.hosts(name)
        views = {}
        for host, may in self.through(name).items():
            ways = [way for way in ("ingress", "egress") if all((*port, way) in copies for port in may)]
            if ways:
                views[host] = "both" if len(ways) == 2 else ways[0]
        algorithm = group.get("algorithm", "any")
        names = list(dict.fromkeys(hosts.values()))
        if len(names) < 2 or not views:
            return False
        orders = group.get("rings") or [
            [rank for host in some for rank in hosts if hosts[rank] == host] for some in itertools.permutations(names)
        ]
        rings = algorithm == "tree" or all(ring_delivers(order, hosts, views) for order in orders)
        return rings and (algorithm == "ring" or all(tree_delivers(names, views, tree) for tree in (0, 1)))

    def at(
        self, plan: MirrorPlan, nodes: list[str], without: str = "", lost: set[int] | None = None, whole: str = ""
    ) -> set[Copy]:
        """Directions of mirrored ports whose copies reach these nodes; without one port, mirrored or monitor; without
        lost GPUs; whole: without hosts that they do not see in this direction, through all ports."""
        found = {
            (session.leaf, source.port, way)
            for session in plan.sessions
            if session.node in nodes and f"{session.leaf} {session.destination}" != without
            for source in session.sources
            if f"{session.leaf} {source.port}" != without and source.rank not in (lost or set())
            for way in session.ways
        }
        wanted = WAYS.get(whole, [])
        return {copy for copy in found if all((*copy[:2], way) in found for way in wanted)}


def room(vendor: str, kinds: Counter[Any]) -> bool:
    """Has a switch room for so many sessions of each direction?"""
    most, of_both = ROOM[vendor]
    if vendor == "junos":
        return all(kinds["both"] + kinds[way] <= most for way in ("ingress", "egress"))
    if vendor == "nxos":  # the fourth is receive only after three in both directions
        return kinds.total() <= most and (kinds["both"] <= of_both) and not (kinds["both"] == 3 and kinds["egress"])
    return kinds.total() + kinds["both"] * (vendor == "cumulus") <= (7 if vendor == "cumulus" else most)


def check_limits(fabric: Fabric, plan: MirrorPlan) -> None:
    """No port carries more than its rate, no switch has more sessions than its platform, no direction of a port two
    destinations, and no port two where the platform is not known to do that."""
    copies = Counter((s.leaf, port, way) for s in plan.sessions for port in s.ports for way in s.ways)
    assert all(n == 1 for n in copies.values())
    for (leaf, _), count in Counter((s.leaf, port) for s in plan.sessions for port in s.ports).items():
        assert count == 1 or fabric.vendors[leaf] in SPLITS
    for leaf in {session.leaf for session in plan.sessions}:
        kinds = Counter(session.direction for session in plan.sessions if session.leaf == leaf)
        assert room(fabric.vendors[leaf], kinds)
    assert all(n == 1 for n in Counter((s.leaf, s.destination) for s in plan.sessions).values())
    for session in plan.sessions:
        end = fabric.ends[session.leaf, session.destination]
        assert session.node == end["node"]
        rate = sum(fabric.nics[session.leaf, port]["speed_gbps"] * len(session.ways) for port in session.ports)
        assert rate <= end["speed_gbps"] and session.load_gbps == pytest.approx(rate)
        assert {fabric.nics[session.leaf, port].get("asic", 0) for port in session.ports} == {end.get("asic", 0)}


def check_share(fabric: Fabric, plan: MirrorPlan, choice: GroupChoice, share: NodeShare) -> None:
    name, way = choice.group, choice.direction
    assert share.complete == fabric.complete(name, fabric.at(plan, share.nodes, whole=way))
    assert share.complete == (share.survives >= 0) == (not share.lacks)
    if not share.complete:
        return
    ends = {f"{s.leaf} {s.destination}" for s in plan.sessions if s.node in share.nodes}
    mine = {port for ports in fabric.through(name).values() for port in ports}
    reach = {f"{leaf} {port}" for leaf, port, _ in fabric.at(plan, share.nodes) if (leaf, port) in mine}
    assert set(share.ports) <= ends and set(share.spared) | set(share.needed) == reach | set(share.ports)
    for port in share.spared:
        assert fabric.complete(name, fabric.at(plan, share.nodes, without=port)), port
    for port in share.needed:
        assert not fabric.complete(name, fabric.at(plan, share.nodes, without=port)), port

    def endures(lost: tuple[int, ...]) -> bool:
        return fabric.complete(name, fabric.at(plan, share.nodes, lost=set(lost), whole=way))

    assert all(endures(lost) for lost in itertools.combinations(share.ranks, share.survives))
    assert not all(endures(lost) for lost in itertools.combinations(share.ranks, share.survives + 1))


def check_group(fabric: Fabric, plan: MirrorPlan, choice: GroupChoice, *, joined: bool) -> None:
    nodes = list(dict.fromkeys(session.node for session in plan.sessions))
    for share in choice.shares:
        check_share(fabric, plan, choice, share)
    whole = {
        node for node in nodes if fabric.complete(choice.group, fabric.at(plan, [node], whole=choice.direction))
    }
    assert set(choice.complete) == whole
    if not joined and not whole:
        assert any(set(choice.peers) <= set(peers) for peers in fabric.data.get("peers", []))
        assert fabric.complete(choice.group, fabric.at(plan, choice.peers, whole=choice.direction))
    assert choice.survives == max(share.survives for share in choice.shares) >= 0


# -- small fabrics of every kind --------------------------------------------------------------------------


@st.composite
def fabrics(draw: st.DrawFn, *, hosts: int = 5, most_nics: int = 2, ends: int = 4) -> dict[str, Any]:
    """Hosts whose GPUs have a NIC or two each on any leaf, nodes with ports on any, groups that share hosts or not."""
    leaves: list[dict[str, Any]] = [
        {"name": f"leaf{n}", "vendor": draw(st.sampled_from(["eos", "eos", "nxos", "junos", "sonic", "cumulus"])),
         "ports": [], "monitor_ports": []}
        for n in range(draw(st.integers(1, 2)))
    ]
    groups: list[dict[str, Any]] = []
    rank = 0
    for number in range(draw(st.integers(1, 2))):
        members = []
        for host in range(draw(st.integers(2, hosts))):
            for _ in range(draw(st.integers(1, 2)) if most_nics > 1 else 1):
                for _ in range(draw(st.sampled_from([1, 1, most_nics]))):
                    leaf = draw(st.sampled_from(leaves))
                    leaf["ports"].append({
                        "port": f"Ethernet{len(leaf['ports']) + 1}", "rank": rank, "host": f"gpu{number}-{host}",
                        "speed_gbps": draw(st.sampled_from([100, 100, 200])),
                        "asic": draw(st.sampled_from([0, 0, 0, 1])),
                    })
                members.append((host, rank))
                rank += 1
        group = {"name": f"dp{number}", "ranks": [r for _, r in members],
                 "algorithm": draw(st.sampled_from(["ring", "tree", "any"]))}
        if draw(st.booleans()):
            order = draw(st.permutations(sorted({host for host, _ in members})))
            group["rings"] = [[r for host in order for h, r in members if h == host]]
        groups.append(group)
    for number in range(draw(st.integers(1, ends))):
        draw(st.sampled_from(leaves))["monitor_ports"].append({
            "port": f"Ethernet{900 + number}", "node": f"ck{draw(st.integers(0, 2))}",
            "speed_gbps": draw(st.sampled_from([200, 400, 800])), "asic": draw(st.sampled_from([0, 0, 0, 1])),
        })
    nodes = sorted({end["node"] for leaf in leaves for end in leaf["monitor_ports"]})
    peers = [nodes] if len(nodes) > 1 and draw(st.booleans()) else []
    return {"leaves": leaves, "groups": groups, "peers": peers}


@settings(max_examples=200)
@given(data=fabrics(), redundancy=st.sampled_from([None, 1, 2]), way=st.sampled_from([None, "both", "egress"]),
       joined=st.booleans())
def test_what_a_plan_says_of_its_nodes_is_what_ends_there(data: Any, redundancy: Any, way: Any, joined: bool) -> None:
    try:
        plan = planned(data, redundancy=redundancy, direction=way, joined=joined)
    except PlanError as refused:
        assert refused.remedy
        return
    fabric = Fabric(data)
    check_limits(fabric, plan)
    for choice in plan.groups:
        check_group(fabric, plan, choice, joined=joined)
        assert choice.survives >= (redundancy or 1) - 1
    assert MirrorPlan.model_validate_json(plan.to_json()) == plan == planned(
        data, redundancy=redundancy, direction=way, joined=joined)


@settings(max_examples=100)
@given(data=fabrics(hosts=3, most_nics=1, ends=3), redundancy=st.integers(1, 2),
       way=st.sampled_from(["both", "ingress", "egress"]))
def test_nothing_is_refused_that_some_dealing_of_ports_would_do(data: Any, redundancy: int, way: str) -> None:
    """Every mirrored port to every monitor port, to two of them by directions, or to none; hosts have one NIC, so a
    lost GPU is a lost port."""
    fabric = Fabric(data)
    try:
        planned(data, redundancy=redundancy, direction=way)
        return
    except PlanError:
        pass
    nics = list(fabric.nics)
    ends: list[tuple[tuple[Port, str], ...]] = [(), *(((end, way),) for end in fabric.ends)]
    if way == "both":
        ends += [((a, "ingress"), (b, "egress")) for a, b in itertools.permutations(fabric.ends, 2)]
    assume(len(ends) ** len(nics) <= 10**6)
    places = [{end["node"]} for end in fabric.ends.values()] + [set(peers) for peers in data["peers"]]
    known: dict[tuple[str, frozenset[Port]], bool] = {}

    def enough(name: str, seen: frozenset[Port]) -> bool:
        mine = frozenset(p for p in seen if fabric.nics[p]["rank"] in fabric.groups[name]["ranks"])
        if (name, mine) not in known:
            known[name, mine] = all(
                fabric.complete(name, {(*port, each) for port in mine - set(lost) for each in WAYS[way]})
                for lost in itertools.combinations(sorted(mine), min(redundancy - 1, len(mine)))
            )
        return known[name, mine]

    def can(nic: Port, some: tuple[tuple[Port, str], ...]) -> bool:
        """Same leaf and ASIC, fast enough, and two monitor ports only where the platform has that."""
        return (len(some) < 2 or fabric.vendors[nic[0]] in SPLITS) and all(
            nic[0] == end[0] and fabric.nics[nic]["asic"] == fabric.ends[end]["asic"]
            and fabric.nics[nic]["speed_gbps"] * len(WAYS[kind]) <= fabric.ends[end]["speed_gbps"]
            for end, kind in some
        )

    for dealt in itertools.product(*([some for some in ends if can(nic, some)] for nic in nics)):
        used: dict[Port, list[tuple[Port, str]]] = {}
        for nic, some in zip(nics, dealt, strict=True):
            for end, kind in some:
                used.setdefault(end, []).append((nic, kind))
        kinds: dict[str, Counter[str]] = {}
        for end, copies in used.items():
            kinds.setdefault(end[0], Counter())[copies[0][1]] += 1
        fits = all(
            len({kind for _, kind in copies}) == 1
            and sum(fabric.nics[nic]["speed_gbps"] * len(WAYS[kind]) for nic, kind in copies)
            <= fabric.ends[end]["speed_gbps"]
            for end, copies in used.items()
        ) and all(room(fabric.vendors[leaf], some) for leaf, some in kinds.items())
        if fits:
            seen = [
                frozenset(nic for nic, some in zip(nics, dealt, strict=True)
                          if some and all(fabric.ends[end]["node"] in nodes for end, _ in some))
                for nodes in places
            ]
            assert not all(any(enough(name, some) for some in seen) for name in fabric.groups), dealt


# -- one node, several ports, peers -----------------------------------------------------------------------


def rail(nodes: tuple[str, str], hosts: int = 4) -> dict[str, Any]:
    """NIC r of every host on leaf r, one group over all: no leaf has a whole host."""
    return {
        "leaves": [
            {"name": f"leaf{r}", "vendor": "eos",
             "ports": [{"port": f"Ethernet{h + 1}", "rank": 2 * h + r, "host": f"gpu{h}", "speed_gbps": 100}
                       for h in range(hosts)],
             "monitor_ports": [{"port": "Ethernet60", "node": nodes[r], "speed_gbps": 800}]}
            for r in (0, 1)
        ],
        "groups": [{"name": "dp", "ranks": list(range(2 * hosts))}],
    }


def test_a_node_with_a_port_on_every_rail_is_complete_by_itself() -> None:
    plan = planned(rail(("ck0", "ck0")))
    choice = plan.groups[0]
    assert choice.complete == ["ck0"] and not choice.peers and choice.survives == 2
    assert choice.shares[0].ports == ["leaf0 Ethernet60", "leaf1 Ethernet60"]
    assert sorted(choice.shares[0].needed) == ["leaf0 Ethernet60", "leaf1 Ethernet60"]
    assert len(choice.shares[0].spared) == 6
    assert "node ck0 (leaf0 Ethernet60, leaf1 Ethernet60) is complete by itself" in by_line(plan)
    assert "it has to capture on all of these 2 ports" in by_line(plan)
    assert "does not survive the loss of a monitor port" in by_line(plan)


def test_peers_count_together_and_the_plan_says_so() -> None:
    data = rail(("ck0", "ck1"))
    with pytest.raises(PlanError, match="no node can be complete: host gpu0 is copied to ck0") as refused:
        planned(data)
    assert "give one node a monitor port on each of leaf0, leaf1" in refused.value.remedy
    assert "peers: [[ck0, ck1]]" in refused.value.remedy
    plan = planned(data | {"peers": [["ck0", "ck1"]]})
    choice = plan.groups[0]
    assert not choice.complete and choice.peers == ["ck0", "ck1"] and choice.survives == 2
    assert "depends on the peers: none is complete by itself" in by_line(plan)
    assert "node ck0 is not complete: nothing of it is mirrored" not in by_line(plan)
    assert "node ck0 is not complete: it has no host's ports all" in by_line(plan)


def test_a_second_node_is_complete_and_peers_survive_more() -> None:
    """Three nodes with room for a host each: every one is complete, and together they survive two losses."""
    data = rail(("ck0", "ck0"))
    data["leaves"] = data["leaves"][:1]
    data["groups"] = [{"name": "dp", "ranks": [0, 2, 4, 6]}]
    data["leaves"][0]["monitor_ports"] = [
        {"port": f"Ethernet{60 + n}", "node": f"ck{n}", "speed_gbps": 200} for n in range(3)
    ]
    alone = planned(data, direction="both").groups[0]
    assert alone.complete == ["ck0", "ck1", "ck2"] and alone.survives == 0 and not alone.peers
    plan = planned(data | {"peers": [["ck0", "ck1", "ck2"]]}, direction="both", redundancy=3)
    assert plan.groups[0].survives == 2 and plan.groups[0].complete == ["ck0", "ck1", "ck2"]
    assert plan.groups[0].peers == ["ck0", "ck1", "ck2"]
    assert "that depends on the peers" in by_line(plan)


def test_a_group_ends_at_one_node_although_a_leaf_has_several() -> None:
    """Six hosts of two groups, two nodes with three ports each of which takes one host: filled port by port, a group
    would end at both."""
    leaf = {
        "name": "leaf0", "vendor": "eos",
        "ports": [{"port": f"Ethernet{r + 1}", "rank": r, "host": f"gpu{r}", "speed_gbps": 100} for r in range(6)],
        "monitor_ports": [{"port": f"Ethernet{60 + n}", "node": f"ck{n % 2}", "speed_gbps": 200} for n in range(6)],
    }
    groups = [{"name": "a", "ranks": [0, 2, 4]}, {"name": "b", "ranks": [1, 3, 5]}]
    plan = planned({"leaves": [leaf], "groups": groups}, redundancy=3, direction="both")
    assert [choice.complete for choice in plan.groups] == [["ck0"], ["ck1"]]
    assert all(choice.survives == 2 and not choice.shares[0].needed for choice in plan.groups)
    assert "survives the loss of any one monitor port" in by_line(plan)


# What the greedy choice misses: speeds of each group's hosts, then nodes and speeds of the monitor ports.
MISSED: dict[str, tuple[list[list[float]], list[tuple[str, float]], int]] = {
    "moves": (
        [[400, 100], [200, 400, 400], [400, 400], [400, 400, 200]], [("ck1", 200), ("ck1", 800), ("ck1", 800)], 1,
    ),
    "exact": (
        [[200, 100, 100], [200, 400], [400, 100, 200]], [("ck2", 200), ("ck2", 800), ("ck0", 800), ("ck2", 800)], 2,
    ),
}


@pytest.mark.parametrize("step", MISSED)
def test_a_later_step_finds_what_the_earlier_ones_miss(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, ends, redundancy = MISSED[step]
    speeds = [speed for group in groups for speed in group]
    first = list(itertools.accumulate((len(group) for group in groups), initial=0))
    data = {
        "leaves": [{
            "name": "leaf0", "vendor": "eos",
            "ports": [{"port": f"Ethernet{rank + 1}", "rank": rank, "host": f"gpu{rank}", "speed_gbps": speed}
                      for rank, speed in enumerate(speeds)],
            "monitor_ports": [{"port": f"Ethernet{90 + n}", "node": node, "speed_gbps": speed}
                              for n, (node, speed) in enumerate(ends)],
        }],
        "groups": [{"name": f"dp{n}", "ranks": list(range(start, start + len(group)))}
                   for n, (start, group) in enumerate(zip(first, groups, strict=False))],
    }
    with monkeypatch.context() as without:
        without.setattr(assignment, "EXACT_GROUPS", 0)
        if step == "moves":
            without.setattr(assignment, "MOVES", 0)
        with pytest.raises(PlanError):
            planned(data, redundancy=redundancy, direction="both")
    if step == "moves":
        monkeypatch.setattr(assignment, "EXACT_GROUPS", 0)
    plan = planned(data, redundancy=redundancy, direction="both")
    check_limits(Fabric(data), plan)
    assert all(choice.complete and choice.survives == redundancy - 1 for choice in plan.groups)


def test_a_search_that_ends_early_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = {
        "name": "leaf0", "vendor": "eos",
        "ports": [{"port": f"Ethernet{r + 1}", "rank": r, "host": f"gpu{r}", "speed_gbps": 100} for r in range(6)],
        "monitor_ports": [{"port": f"Ethernet{60 + n}", "node": f"ck{n}", "speed_gbps": 400} for n in range(3)],
    }
    data = {"leaves": [leaf], "groups": [{"name": "dp", "ranks": list(range(6))}]}
    plan = planned(data, direction="both")
    assert plan.groups[0].survives == 1 and not any("search" in note for note in plan.notes)
    monkeypatch.setattr(assignment, "STEPS", 3)
    plan = planned(data, direction="both")
    assert plan.groups[0].survives == 1
    assert "the search for an arrangement ended after 4 steps; a better one may exist" in plan.notes
    monkeypatch.setattr(assignment, "EXACT_GROUPS", 0)
    notes = planned(data, direction="both").notes
    assert "the search for an arrangement was not exact: too many groups; a better one may exist" in notes


def test_a_plan_never_has_more_sessions_than_the_switch() -> None:
    """Six ports, of which Junos can use two for each direction: two hosts, or four where their copies share a port."""
    leaf = {
        "name": "leaf0", "vendor": "junos",
        "ports": [{"port": f"et-0/0/{r}", "rank": r, "host": f"gpu{r}", "speed_gbps": 100} for r in range(4)],
        "monitor_ports": [{"port": f"et-0/0/{60 + n}", "node": "ck0", "speed_gbps": 100} for n in range(6)],
    }
    data = {"leaves": [leaf], "groups": [{"name": "dp", "ranks": [0, 1, 2, 3]}]}
    with pytest.raises(PlanError, match="junos has 4"):
        planned(data, direction="both")
    plan = planned(data, direction="both", redundancy=2)
    assert plan.groups[0].survives == 1 and len(plan.sessions) == 4
    for port in leaf["monitor_ports"]:
        port["speed_gbps"] = 200
    plan = planned(data, direction="both", redundancy=4)
    check_limits(Fabric(data), plan)
    assert plan.groups[0].survives == 3 and len(plan.sessions) == 4


# -- large ------------------------------------------------------------------------------------------------


def large(spread: int, speed: float, leaves: int = 64, groups: int = 128, hosts: int = 16) -> dict[str, Any]:
    """Hosts of a group on `spread` leaves in turn; a node for every four leaves."""
    data: list[dict[str, Any]] = [
        {"name": f"leaf{n}", "vendor": "eos", "ports": [],
         "monitor_ports": [{"port": f"Ethernet{900 + k}", "node": f"ck{n // 4}", "speed_gbps": speed} for k in (0, 1)]}
        for n in range(leaves)
    ]
    for rank in range(groups * hosts):
        group, host = divmod(rank, hosts)
        leaf = data[(group * leaves // groups + host % spread) % leaves]
        leaf["ports"].append({"port": f"Ethernet{len(leaf['ports']) + 1}", "rank": rank, "host": f"gpu{rank}",
                              "speed_gbps": 100})
    return {"leaves": data, "groups": [
        {"name": f"dp{n}", "ranks": list(range(n * hosts, (n + 1) * hosts))} for n in range(groups)
    ]}


@pytest.mark.parametrize(("spread", "speed"), [(1, 800), (8, 600), (8, 400)])
def test_many_groups_on_many_leaves(spread: int, speed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for all, and just not for all: the work stays within what the module's text says."""
    looked: Counter[str] = Counter()
    real = assignment._Search._fit

    def counted(self: Any, *arguments: Any) -> Any:
        looked["fits"] += 1
        return real(self, *arguments)

    monkeypatch.setattr(assignment._Search, "_fit", counted)
    data = large(spread, speed)
    plan = planned(data)
    check_limits(Fabric(data), plan)
    assert len(plan.groups) == 128 and all(choice.complete for choice in plan.groups)
    assert spread > 1 or all(choice.survives == 2 for choice in plan.groups)
    assert looked["fits"] <= 3 * (128 * 16 + assignment.MOVES * 16 * 8)
