"""Which ports: arithmetic of ring and tree against a simulation of NCCL's sends, choices, and every refusal."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switch_configs.errors import PlanError
from switch_configs.planning.coverage import duplicates, missing, survives, tree_parents
from switch_configs.planning.planner import make_plan
from switch_configs.planning.platform_rules import check_plan
from switch_configs.schema import MirrorPlan, Topology, frame_bytes

# nccl-wire.md 7.1: parent > child edges
TREES = {
    (2, 0): "0>1", (2, 1): "1>0",
    (3, 0): "0>2 2>1", (3, 1): "1>0 0>2",
    (4, 0): "0>2 2>1 2>3", (4, 1): "3>1 1>2 1>0",
    (8, 0): "0>4 4>2 4>6 2>1 2>3 6>5 6>7", (8, 1): "7>3 3>5 3>1 5>6 5>4 1>2 1>0",
}


@pytest.mark.parametrize(("nodes", "tree"), TREES)
def test_trees_are_those_of_nccl(nodes: int, tree: int) -> None:
    edges = {f"{up}>{x}" for x, up in enumerate(tree_parents(nodes, tree)) if up >= 0}
    assert edges == set(TREES[nodes, tree].split())


def ring_delivers(ring: list[int], hosts: dict[int, str], views: dict[str, str]) -> bool:
    """Every chunk reduced on some seen edge, by NCCL's order of sends (2.2), step by step."""
    n = len(ring)
    seen = set()
    for r in range(n):
        a, b = hosts[ring[r]], hosts[ring[(r + 1) % n]]
        if a == b or not (views.get(a) in ("ingress", "both") or views.get(b) in ("egress", "both")):
            continue
        for k in range(n - 1, 2 * n - 2):
            seen.add(r if k == n - 1 else (r - (k - (n - 1))) % n)
    return seen == set(range(n))


def tree_delivers(names: list[str], views: dict[str, str], tree: int) -> bool:
    """Follow the results of one tree down, edge by edge (7.2): is one edge from a parent to a child seen?"""
    parents = tree_parents(len(names), tree)
    return any(
        views.get(names[up]) in ("ingress", "both") or views.get(names[x]) in ("egress", "both")
        for x, up in enumerate(parents)
        if up >= 0
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_ring_arithmetic_is_the_order_of_sends(ranks: int) -> None:
    for per_host in (1, 2):
        hosts = {r: f"h{r // per_host}" for r in range(ranks)}
        names = sorted(set(hosts.values()))
        ring = list(range(ranks))
        for views in itertools.product((None, "ingress", "egress", "both"), repeat=len(names)):
            chosen: Any = {h: v for h, v in zip(names, views, strict=True) if v}
            assert (missing("ring", [ring], hosts, ring, chosen) == "") == ring_delivers(ring, hosts, chosen), chosen


def test_unknown_order_promises_only_what_every_order_delivers() -> None:
    hosts = {r: f"h{r}" for r in range(4)}
    orders = [list(p) for p in itertools.permutations(range(4))]
    for views in itertools.product((None, "ingress", "egress", "both"), repeat=4):
        chosen: Any = {f"h{r}": v for r, v in enumerate(views) if v}
        promised = missing("ring", [], hosts, [0, 1, 2, 3], chosen) == ""
        assert not promised or all(ring_delivers(order, hosts, chosen) for order in orders)


def test_a_tree_leaf_sends_no_result() -> None:
    hosts = {r: f"h{r}" for r in range(4)}
    ranks = [0, 1, 2, 3]
    assert "tree 0" in missing("tree", [], hosts, ranks, {"h1": "ingress"})
    assert missing("tree", [], hosts, ranks, {"h1": "both"}) == ""
    assert missing("tree", [], hosts, ranks, {"h1": "egress"}) == ""
    assert "tree 1" in missing("tree", [], hosts, ranks, {"h3": "egress"})  # root of tree 1
    assert missing("tree", [], hosts, ranks, {"h0": "ingress", "h3": "ingress"}) == ""


def test_neighbours_are_counted_twice() -> None:
    hosts = {r: f"h{r}" for r in range(4)}
    assert duplicates([[0, 1, 2, 3]], hosts, {"h0": "both", "h1": "both"}) == (3, 4)
    assert duplicates([[0, 1, 2, 3]], hosts, {"h0": "both", "h2": "both"}) == (4, 4)
    assert survives("ring", [], hosts, [0, 1, 2, 3], {"h0": "both", "h1": "both", "h2": "both"}) == 2


# -- plans ------------------------------------------------------------------------------------------------


def document(hosts: int = 4, rails: int = 1, **changes: Any) -> dict[str, Any]:
    """Rail-optimised: NIC r of every host on leaf r, one GPU per NIC; one group per rail."""
    leaves = [
        {
            "name": f"leaf{rail}", "vendor": "eos",
            "ports": [
                {"port": f"Ethernet{h + 1}", "rank": h * rails + rail, "host": f"gpu{h}", "rail": rail,
                 "speed_gbps": 100}
                for h in range(hosts)
            ],
            "monitor_ports": [{"port": "Ethernet60", "node": f"ck{rail}", "speed_gbps": 800}],
        }
        for rail in range(rails)
    ]
    groups = [{"name": f"dp{rail}", "ranks": [h * rails + rail for h in range(hosts)]} for rail in range(rails)]
    return {"leaves": leaves, "groups": groups, **changes}


def planned(data: dict[str, Any], **options: Any) -> MirrorPlan:
    return make_plan(Topology.model_validate(data), **options)


def test_three_gpus_of_every_group_by_default_each_with_its_reason() -> None:
    plan = planned(document(hosts=8, rails=2))
    assert [len(s.sources) for s in plan.sessions] == [3, 3]
    assert {s.leaf for s in plan.sessions} == {"leaf0", "leaf1"} and plan.nodes_per_leaf == {"leaf0": 1, "leaf1": 1}
    assert all(choice.survives == 2 and choice.direction == "both" and choice.why for choice in plan.groups)
    assert all(source.why for session in plan.sessions for source in session.sources)
    assert MirrorPlan.model_validate_json(plan.to_json()) == plan


def test_a_group_over_all_rails_takes_whole_hosts() -> None:
    data = document(hosts=4, rails=2)
    data["groups"] = [{"name": "dp", "ranks": list(range(8))}]
    plan = planned(data, redundancy=1, joined=True)
    assert sorted(r for c in plan.groups for r in c.ranks) == [0, 1]
    assert [len(s.sources) for s in plan.sessions] == [1, 1]


def test_a_rail_fabric_where_no_node_can_be_complete_is_refused_by_name() -> None:
    """Each host's ports lie on two leaves: every node would lack half of every host."""
    data = document(hosts=4, rails=2)
    data["groups"] = [{"name": "dp", "ranks": list(range(8))}]
    with pytest.raises(PlanError, match=r"no node can be complete: host gpu0 is copied to ck0 .* and ck1") as caught:
        planned(data)
    assert "--joined" in caught.value.remedy
    together = planned(data, joined=True)
    assert together.groups[0].survives == 2 and len(together.sessions) == 2


def test_survival_is_that_of_one_node() -> None:
    """Three monitor ports with a host each: a job attaches to one of them, and its one host must not be lost."""
    data = document()
    data["leaves"][0]["monitor_ports"] = [
        {"port": f"Ethernet{60 + n}", "node": f"ck{n}", "speed_gbps": 200} for n in range(3)
    ]
    plan = planned(data, direction="both")
    assert plan.groups[0].survives == 0 and "node ck0 (leaf0 Ethernet60)" in plan.groups[0].why[1]
    assert any("survives 0 lost GPUs, not 2" in note for note in plan.notes)
    assert planned(data, direction="both", joined=True).groups[0].survives == 2
    with pytest.raises(PlanError, match=r"the best, ck0 \(leaf0 Ethernet60\), survives 0"):
        planned(data, direction="both", redundancy=3)


def test_the_ports_of_a_host_go_to_one_node_port() -> None:
    leaf = {
        "name": "leaf0", "vendor": "eos",
        "ports": [{"port": f"Ethernet{r}", "rank": r, "host": f"gpu{r // 2}", "speed_gbps": 100} for r in range(6)],
        "monitor_ports": [{"port": f"Ethernet{60 + n}", "node": f"ck{n}", "speed_gbps": 600} for n in range(2)],
    }
    group = {"name": "dp", "ranks": list(range(6)), "mirror": [0, 1, 2, 3]}
    plan = planned({"leaves": [leaf], "groups": [group]}, direction="both")
    assert [sorted(source.rank for source in session.sources) for session in plan.sessions] == [[0, 1], [2, 3]]


def test_units_are_on_one_leaf_and_away_from_ring_neighbours() -> None:
    data = document(hosts=4)
    data["groups"][0]["rings"] = [[0, 1, 2, 3]]
    assert planned(data, redundancy=2).groups[0].ranks == [0, 2]
    other = {**data["leaves"][0], "name": "leafB", "ports": data["leaves"][0]["ports"][2:]}
    data["leaves"][0]["ports"] = data["leaves"][0]["ports"][:2]
    data["leaves"].append(other)
    assert len({s.leaf for s in planned(data, redundancy=2).sessions}) == 1


def test_one_direction_where_both_do_not_fit() -> None:
    data = document()
    data["leaves"][0]["monitor_ports"][0]["speed_gbps"] = 400
    plan = planned(data)
    # Results come down a tree: what hosts receive survives more losses than what they send.
    assert plan.sessions[0].direction == "egress" and plan.sessions[0].load_gbps == 400
    assert any("600 Gb/s" in note for note in plan.notes) and plan.groups[0].survives == 2
    assert any("in SIMPLE only by its clear-to-sends" in note for note in plan.notes)
    assert not any("SIMPLE" in note for note in planned(data, direction="both", redundancy=1).notes)
    data["groups"][0]["algorithm"] = "ring"
    plan = planned(data)
    assert plan.sessions[0].direction == "ingress" and plan.groups[0].survives == 2
    data["leaves"][0]["monitor_ports"][0]["speed_gbps"] = 300
    assert planned(data, redundancy=2).groups[0].survives == 1


def test_redundancy_is_the_loss_survived_and_not_a_number_of_hosts() -> None:
    data = document(hosts=8)
    for redundancy in (1, 2, 3, 4):
        for way, hosts in (("both", redundancy), ("egress", redundancy + 1)):
            choice = planned(data, redundancy=redundancy, direction=way).groups[0]
            assert (choice.survives, len(choice.ranks)) == (redundancy - 1, hosts)
    with pytest.raises(PlanError, match=r"ingress of 8 of its 8 hosts survives the loss of any 3 mirrored GPUs"):
        planned(data, redundancy=5, direction="ingress")
    two = document(hosts=2)
    assert planned(two).groups[0].survives == 1  # the default: as much as the group has hosts for, and it is said
    assert any("survives 1 lost GPUs, not 2" in note for note in planned(two).notes)
    with pytest.raises(PlanError, match="--redundancy 3 wants 2") as caught:
        planned(two, redundancy=3)
    assert "--redundancy 2" in caught.value.remedy


ALGORITHMS = st.sampled_from(["ring", "tree", "any"])


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[str, Any], list[list[int]]]:
    """Hosts with one to three GPUs of one group each, rings known or not, and orders that NCCL could choose."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=6))
    hosts = [h for h, size in enumerate(sizes) for _ in range(size)]
    members = [[r for r, h in enumerate(hosts) if h == host] for host in range(len(sizes))]
    # NCCL's rings pass a host once: its GPUs are a chain
    orders = [
        [r for h in draw(st.permutations(range(len(sizes)))) for r in draw(st.permutations(members[h]))]
        for _ in range(draw(st.integers(1, 3)))
    ]
    leaf = {"name": "leaf0", "vendor": "eos", "monitor_ports": [{"port": "Ethernet60", "node": "c", "speed_gbps": 9e9}],
            "ports": [{"port": f"Ethernet{r + 1}", "rank": r, "host": f"h{h}", "speed_gbps": 1}
                      for r, h in enumerate(hosts)]}
    group = {"name": "dp", "ranks": list(range(len(hosts))), "algorithm": draw(ALGORITHMS)}
    if draw(st.booleans()):
        group["rings"] = orders
    return {"leaves": [leaf], "groups": [group]}, orders


@settings(max_examples=150)
@given(cluster=clusters(), redundancy=st.integers(1, 4), way=st.sampled_from(["both", "ingress", "egress"]))
def test_a_plan_survives_every_loss_that_it_promises(cluster: Any, redundancy: int, way: str) -> None:
    """Every set of lost GPUs, tried against NCCL's order of sends and its trees; no smaller set of hosts would do."""
    data, orders = cluster
    group = data["groups"][0]
    hosts = {p["rank"]: p["host"] for p in data["leaves"][0]["ports"]}
    names = list(dict.fromkeys(hosts.values()))

    def whole(views: Any) -> bool:
        rings = group["algorithm"] == "tree" or all(ring_delivers(order, hosts, views) for order in orders)
        return rings and (group["algorithm"] == "ring" or all(tree_delivers(names, views, t) for t in (0, 1)))

    def endures(chosen: Any, losses: int) -> bool:
        return all(
            missing(group["algorithm"], group.get("rings", []), hosts, group["ranks"],
                    {h: way for h in chosen if h not in lost}) == ""  # type: ignore[misc]
            for lost in itertools.combinations(chosen, min(losses, len(chosen)))
        )

    try:
        choice = planned(data, redundancy=redundancy, direction=way).groups[0]
    except PlanError:
        assert not endures(names, redundancy - 1)  # not even all of them
        return
    assert choice.survives >= redundancy - 1
    for lost in itertools.combinations(choice.ranks, choice.survives):
        gone = {hosts[r] for r in lost}
        assert whole({hosts[r]: way for r in choice.ranks if hosts[r] not in gone}), lost
    chosen = {hosts[r] for r in choice.ranks}
    assert endures(chosen, choice.survives) and not endures(chosen, choice.survives + 1)
    fewer = itertools.combinations(names, len(chosen) - 1)
    assert not any(endures(some, redundancy - 1) for some in fewer)


def test_sources_are_dealt_to_several_node_ports() -> None:
    data = document()
    data["leaves"][0]["monitor_ports"] = [
        {"port": f"Ethernet{60 + n}", "node": f"ck{n}", "speed_gbps": 200} for n in range(3)
    ]
    plan = planned(data)
    assert plan.nodes_per_leaf == {"leaf0": 3}
    for port in data["leaves"][0]["monitor_ports"]:
        port["node"] = "ck0"
    assert planned(data).nodes_per_leaf == {"leaf0": 1}  # three ports of one node
    assert [s.name for s in plan.sessions] == ["flowcheck", "flowcheck-2", "flowcheck-3"]
    assert len({s.number for s in plan.sessions}) == 3


def change(path: str, value: Any, hosts: int = 4) -> dict[str, Any]:
    data = document(hosts)
    node: Any = data
    *steps, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    for step in steps:
        node = node[step]
    node[last] = value
    return data


REFUSED = {
    "one direction of one host": (change("groups.0.mirror", [0]), {"direction": "ingress"}, "can never be complete"),
    "nothing mirrored": (change("groups.0.mirror", []), {}, "nothing of it is mirrored"),
    "one rank": (change("groups.0.ranks", [0]), {}, "reduces nothing"),
    "a rank without a port": (change("groups.0.ranks", [0, 9]), {}, "rank 9 has no port"),
    "one host": (change("leaves.0.ports.1.host", "gpu0") | {"groups": [{"name": "g", "ranks": [0, 1]}]}, {}, "switch"),
    "no monitor port": (change("leaves.0.monitor_ports", []), {}, "without a monitor port"),
    "too slow": (change("leaves.0.monitor_ports.0.speed_gbps", 100), {}, "600 Gb/s, 1 monitor ports carry 100"),
    "small MTU": (change("leaves.0.monitor_ports.0.mtu", 4096), {}, "MTU 4096 is below 4202"),
    "port-channel": (change("leaves.0.monitor_ports.0.port_channel", "Po1"), {}, "member of Po1"),
    "VLAN": (change("leaves.0.monitor_ports.0.vlans", [7]), {}, "VLAN 7"),
    "routed": (change("leaves.0.monitor_ports.0.routed", True), {}, "IP address"),
    "destination is a port-channel": (change("leaves.0.monitor_ports.0.port", "Port-Channel1"), {}, "port-channel"),
    "direction": (change("leaves.0.directions", ["ingress"]), {"direction": "both"}, "cannot mirror egress"),
    "other ASIC": (change("leaves.0.monitor_ports.0.asic", 1), {}, "ASIC 0"),
    "number": (change("leaves.0.vendor", "comware"), {}, "Comware interface name"),
    "bridge": (change("leaves.0.vendor", "ovs"), {}, "name of the bridge"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    data, options, why = REFUSED[name]
    with pytest.raises(PlanError, match=why) as caught:
        planned(data, **options)
    assert caught.value.remedy


EDITS = {
    "destination is a source": ({"destination": "Ethernet1"}, "also a source"),
    "overload": ({"load_gbps": 9000}, "add up to 9000"),
    "nxos number": ({"vendor": "nxos", "number": 33}, "1 to 32"),
    "cumulus needs two numbers": ({"vendor": "cumulus", "number": 7}, "0 to 7"),
    "tc number": ({"vendor": "tc", "number": 257}, "0 to 255"),
    "small MTU": ({"mtu": 1500}, "below the largest frame"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_plan_edited_by_hand_is_checked_again(name: str) -> None:
    plan = planned(document())
    edit, why = EDITS[name]
    plan.sessions[0] = plan.sessions[0].model_copy(update=edit)
    with pytest.raises(PlanError, match=why):
        check_plan(plan)


def test_sessions_of_one_switch_are_checked_together() -> None:
    plan = planned(document())
    first = plan.sessions[0]
    plan.sessions.append(first.model_copy(update={"name": "second", "destination": "Ethernet61"}))
    with pytest.raises(PlanError, match=r"source port \S+ is used by 2"):
        check_plan(plan)
    ports = [
        [s.model_copy(update={"port": f"Ethernet{9 * n + i}"}) for i, s in enumerate(first.sources)] for n in range(5)
    ]
    for vendor, count, why in (("nxos", 5, "5 sessions, nxos has 4"), ("nxos", 4, "receive only"), ("junos", 3, "QFX")):
        plan.sessions = [
            first.model_copy(
                update={
                    "vendor": vendor, "name": f"s{n}", "number": n + 1, "destination": f"Ethernet{60 + n}",
                    "sources": ports[n],
                }
            )
            for n in range(count)
        ]
        with pytest.raises(PlanError, match=why):
            check_plan(plan)


# -- NICs and monitor ports of one speed ------------------------------------------------------------------


def equal_speeds(vendor: str, ends: int, speed: int = 400, **leaf: Any) -> dict[str, Any]:
    data = document(hosts=4)
    port = "HundredGigE1/0/{}" if vendor == "comware" else "Ethernet1/{}"
    nics = [{**nic, "port": port.format(n + 1), "speed_gbps": 400} for n, nic in enumerate(data["leaves"][0]["ports"])]
    monitors = [{"port": port.format(n + 60), "node": "ck0", "speed_gbps": speed} for n in range(ends)]
    data["leaves"][0] |= {"vendor": vendor, "ports": nics, "monitor_ports": monitors, "bridge": "br0", **leaf}
    return data


CAN = ["sonic", "sonic-configdb", "nxos", "junos", "ovs", "tc"]


@pytest.mark.parametrize("vendor", CAN)
def test_both_directions_of_a_port_as_fast_as_the_monitor_ports_go_to_two_of_them(vendor: str) -> None:
    plan = planned(equal_speeds(vendor, 4), redundancy=2, direction="both")
    copies = {(port, session.direction): session.destination for session in plan.sessions for port in session.ports}
    assert len(copies) == len(set(copies.values())) == 4 and plan.groups[0].survives == 1
    assert {way for _, way in copies} == {"ingress", "egress"} and len({port for port, _ in copies}) == 2
    assert all(session.load_gbps == 400 for session in plan.sessions)
    assert plan.groups[0].complete == ["ck0"] and plan.groups[0].direction == "both"
    check_plan(MirrorPlan.model_validate_json(plan.to_json()))
    # a lost monitor port takes one direction: the other host has both, so nothing of the group is lost with it
    share = plan.groups[0].shares[0]
    assert set(share.ports) <= set(share.spared)


@pytest.mark.parametrize("vendor", ["eos", "cumulus", "comware"])
def test_where_nobody_says_that_it_can_it_takes_consent(vendor: str) -> None:
    with pytest.raises(PlanError, match=f"both directions of .*/1 need 800 Gb/s.*{vendor}") as caught:
        planned(equal_speeds(vendor, 4), redundancy=2, direction="both")
    assert f"untried on {vendor}" in caught.value.remedy
    plan = planned(equal_speeds(vendor, 4, split_directions=True), redundancy=2, direction="both")
    assert [session.direction for session in plan.sessions] == ["ingress", "egress"] * 2
    check_plan(plan)
    plan.sessions = [session.model_copy(update={"split_directions": False}) for session in plan.sessions]
    with pytest.raises(PlanError, match="used by 2 sessions, one for each direction"):
        check_plan(plan)


def test_two_sessions_that_copy_one_direction_of_a_port_are_refused() -> None:
    plan = planned(equal_speeds("sonic", 4), redundancy=2, direction="both")
    plan.sessions[1] = plan.sessions[1].model_copy(update={"direction": "both", "load_gbps": 0})
    with pytest.raises(PlanError, match="used by 2 sessions, which both copy its"):
        check_plan(plan)


SHORT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "one port more": (equal_speeds("sonic", 1), {"redundancy": 1}, "1 more monitor port of 400 Gb/s on leaf0"),
    "faster": (equal_speeds("eos", 1), {"redundancy": 1}, "monitor ports of 800 Gb/s"),
    "one direction": (equal_speeds("eos", 4), {"direction": "both"}, "--direction egress"),
    "fewer GPUs": (equal_speeds("sonic", 4), {"direction": "both"}, "--redundancy 2"),
    "sessions": (equal_speeds("nxos", 6), {"direction": "both"}, "--redundancy 2"),
}


@pytest.mark.parametrize("name", SHORT)
def test_what_does_not_fit_is_said_with_a_change_that_does(name: str) -> None:
    data, options, change = SHORT[name]
    with pytest.raises(PlanError, match="Gb/s") as caught:
        planned(data, **options)
    assert change in caught.value.remedy
    if change.startswith("--"):  # it can be followed
        option, value = change.removeprefix("--").split()
        assert planned(data, **{**options, option: int(value) if value.isdigit() else value}).sessions
    ports = data["leaves"][0]["monitor_ports"]
    if "more" in change:
        ports.append({**ports[0], "port": "Ethernet1/99"})
        assert planned(data, **options).sessions
    if change.startswith("monitor ports of"):
        ports[0]["speed_gbps"] = 800
        assert planned(data, **options).sessions


def test_no_port_is_cut_in_pieces() -> None:
    """The sum fits, and no dealing does: both hosts' copies, 400 each, do not go into 600 and 600 with a third."""
    data = document(hosts=3)
    for nic in data["leaves"][0]["ports"]:
        nic["speed_gbps"] = 200
    data["leaves"][0]["monitor_ports"] = [
        {"port": f"Ethernet{60 + n}", "node": "ck0", "speed_gbps": 600} for n in range(2)
    ]
    with pytest.raises(PlanError, match="need 1200 Gb/s, 2 monitor ports carry 1200, but only 2 of them fit"):
        planned(data, direction="both")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"), ("a: [", "not YAML"), ("[]", "document"), ("leaves: []\ngroups: []", "leaves"),
        ("\0", "not YAML"),
        ("!!python/object/apply:os.system [id]", "not YAML"), ("[" * 100000, "not JSON"),
        (json.dumps(document() | {"x": 1}), "x: is not a key"),
        (json.dumps(change("leaves.0.ports.0.port", "e1; reboot")), "leaves.0.ports.0.port"),
        (json.dumps(change("leaves.0.ports.1.port", "Ethernet1")), "listed twice"),
        (json.dumps(change("groups.0.rings", [[0, 1]])), "rings"),
        (json.dumps(change("leaves.0.ssh_port", 70000)), "ssh_port: .*65535"),
        (json.dumps(change("leaves.0.address", "192.0.2.11:70000")), "has a port: .*ssh_port"),
    ],
)
def test_bad_files_are_refused_by_field(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "topology"
    path.write_text(text)
    with pytest.raises(PlanError, match=why):
        Topology.load(path)


def test_a_plan_holds_no_port_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for edit in ({"ssh_port": 70000}, {"address": "192.0.2.11:22"}):
        plan = json.loads(planned(document()).to_json())
        plan["sessions"][0] |= edit
        path.write_text(json.dumps(plan))
        with pytest.raises(PlanError, match=r"ssh_port"):
            MirrorPlan.load(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        Topology.load(tmp_path)
    with pytest.raises(PlanError, match="cannot read"):
        Topology.load(tmp_path / "none")


def test_frame_is_the_largest_that_a_path_mtu_makes() -> None:
    assert frame_bytes(4096) == 4202
